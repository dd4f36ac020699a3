"""vLLM through this library against vLLM's own backends: the same tokens, and as many a second.

    python -m attn_backends.bench.vllm_run --models smollm2,llama8 --json OUT.json

Every engine is a process of its own on the same GPU, with prefix caching, chunked prefill and CUDA
graphs of decode. Correctness first, ``serving_tokens``: greedy tokens of 64 prompts with shared
prefixes, as they come and step by step under the same text; of a real model also beside float32,
``serving_truth``. Then throughput, ``serving_rates``: the
engines take turns, and are compared within a turn.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .serving import OURS, Engine, Note, serve_models, smollm2_folder, wait_for
from .serving_rates import throughput
from .serving_tokens import Times, agreement
from .vllm_prompts import random_ids, tokenized

#: No backend of vLLM: what transformers says, as the reference where vLLM's FLASH_ATTN cannot.
TRANSFORMERS = "sdpa of transformers"
CAPTURE = [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]


@dataclass(frozen=True)
class Model:
    """A model to serve.

    Attributes:
        name: What results call it.
        vocabulary: Tokens that random prompts draw from.
        config: Its ``config.json``, for weights made by vLLM; empty for a real model.
        runs: Dtypes with the backends to serve it by; the first one is the reference.
        compiled: Dtypes whose engines are compiled, and whose throughput is measured.
        engine: Further arguments of its engines.
    """

    name: str
    vocabulary: int
    config: dict[str, Any]
    runs: dict[str, tuple[str, ...]]
    compiled: tuple[str, ...] = ("bfloat16",)
    engine: dict[str, Any] = field(default_factory=dict)


LLAMA8 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

#: Softcap, and windows that prompts outgrow in every other layer.
GEMMA2 = LLAMA8 | {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 128,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 4,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}

MODELS = {
    "smollm2": Model(
        "SmolLM2-135M-Instruct",
        49152,
        {},
        {
            "float32": (TRANSFORMERS, OURS),
            "bfloat16": ("FLASH_ATTN", "TRITON_ATTN", OURS),
            "float16": ("FLASH_ATTN", OURS),
        },
    ),
    "llama8": Model(
        "Llama-8B shape, 8 layers, random weights",
        128256,
        LLAMA8,
        {"bfloat16": ("FLASH_ATTN", "TRITON_ATTN", OURS)},
    ),
    "gemma2": Model(
        "Gemma 2 shape, 8 layers, windows of 128, random weights",
        128256,
        GEMMA2,
        {"bfloat16": ("FLASH_ATTN", "TRITON_ATTN", OURS)},
    ),
    "llama8-fp8": Model(
        "Llama-8B shape, 8 layers, random weights, fp8 cache",
        128256,
        LLAMA8,
        {"bfloat16": ("FLASH_ATTN", "TRITON_ATTN", OURS)},
        engine={"kv_cache_dtype": "fp8"},
    ),
}


def start(
    backend: str, model: Model, dtype: str, folder: Path, logs: Path, args: argparse.Namespace
) -> Engine:
    """Start a worker; it answers once its engine is up."""
    options = {
        "model": str(folder),
        "dummy": bool(model.config),
        "backend": backend,
        "ours": backend == OURS,
        "dtype": dtype,
        "compile": args.compile and dtype in model.compiled,
        "capture": CAPTURE if args.graphs else [],
        "max_model_len": 2048,
        "kv_bytes": (6 if model.config else 3) << 30,
        "more": model.engine,
    }
    label = f"{folder.name}-{dtype}-{backend.replace(' ', '-')}"
    env = {**os.environ, "VLLM_CACHE_ROOT": str(logs / f"cache-{label}")}
    env["TORCHINDUCTOR_CACHE_DIR"] = str(logs / f"inductor-{label}")
    env["ATTN_BACKENDS_BACKEND"] = args.backend
    if dtype == "float32":
        # vLLM's Triton kernel multiplies as TF32 unless told otherwise, ours never does.
        env["TRITON_F32_DEFAULT"] = "ieee"
    log = logs / f"{label}.log"
    worker = "transformers_engine" if backend == TRANSFORMERS else "vllm_engine"
    command = [sys.executable, "-m", f"attn_backends.bench.{worker}", json.dumps(options)]
    process = subprocess.Popen(
        [*command, str(log)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=env,
    )
    return Engine(backend, model, dtype, process, log)


def serve(
    name: str, work: Path, options: argparse.Namespace, deadline: float, note: Note
) -> dict[str, Any]:
    """All rows of a model; how its engines started."""
    model, folder = MODELS[name], work / name
    if model.config:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(model.config))
        prompts = random_ids(model.vocabulary)
    else:
        prompts = tokenized(smollm2_folder(options.gguf, folder))
    asked = [dtype for dtype in model.runs if dtype in options.dtypes.split(",")]
    engines = [
        start(backend, model, dtype, folder, work, options)
        for dtype in asked
        for backend in model.runs[dtype]
    ]
    try:
        started = wait_for(engines, lambda each: f"{name} {each.dtype} {each.backend}", deadline)
        by_dtype = {
            dtype: [each for each in engines if each.dtype == dtype and each.ready]
            for dtype in asked
        }
        judge = [each for each in by_dtype.get("float32", []) if each.backend == TRANSFORMERS]
        for i, (dtype, up) in enumerate(by_dtype.items()):
            now = time.monotonic()
            until = now + (deadline - now) * options.share / (len(asked) - i)
            times = Times(until, deadline, options.patience)
            scorer = judge[0] if judge and dtype != "float32" else None
            agreement("vllm_tokens", up, prompts, times, note, scorer)
        for dtype in set(asked) & set(model.compiled):
            up = by_dtype[dtype]
            if options.timed:  # beside the reference
                timed = options.timed.split(",")
                up = [*up[:1], *(each for each in up[1:] if each.backend in timed)]
            if up and options.turns:
                note(throughput("vllm_throughput", up, prompts, options.turns, deadline))
    finally:
        for each in engines:
            each.stop()
    return started


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="smollm2,llama8", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--dtypes", default="bfloat16,float16,float32", help="of each model")
    parser.add_argument("--backend", default="triton", help="what stands behind the plug")
    parser.add_argument("--gguf", help="SmolLM2 as a GGUF file; default: fetched")
    parser.add_argument("--turns", type=int, default=12, help="of throughput; 0 leaves it out")
    parser.add_argument("--timed", help="backends to time beside the reference; default: all")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="eager layers")
    parser.add_argument("--no-graphs", dest="graphs", action="store_false", help="eager decode")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds for one answer")
    parser.add_argument("--share", type=float, default=0.5, help="of the time, for the same text")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds in all")
    parser.add_argument("--logs", help="keep the engines' logs in this folder")
    parser.add_argument("--json", help="results file")
    options = parser.parse_args()
    return serve_models(options, serve, "attn_backends.bench.vllm_run")


if __name__ == "__main__":
    raise SystemExit(main())
