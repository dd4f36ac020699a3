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

import torch

from .serving import OURS, Engine, Note, serve_models, smollm2_folder, wait_for
from .serving_models import (
    READY,
    SMALL,
    SMALL_GEMMA2,
    SMALL_GPT_OSS,
    drawn_folder,
)
from .serving_rates import throughput
from .serving_tokens import Times, agreement
from .vllm_prompts import random_ids, tokenized

#: No backend of vLLM: what transformers says, as the reference where vLLM's FLASH_ATTN cannot.
TRANSFORMERS = "transformers"
CAPTURE = "1,2,4,8,16,24,32,40,48,56,64"


@dataclass(frozen=True)
class Model:
    """A model to serve.

    Attributes:
        name: What results call it.
        vocabulary: Tokens that random prompts draw from.
        runs: Dtypes with the backends to serve it by; the first one is the reference.
        config: Its ``config.json``, for weights made by vLLM.
        drawn: Family, shape and width of embeddings of a checkpoint that is drawn. Without either
            it is a real model.
        compiled: Dtypes whose engines are compiled, and whose throughput is measured.
        engine: Further arguments of its engines.
        kv_gib: Size of a cache.
        attention: What transformers computes its attention by.
    """

    name: str
    vocabulary: int
    runs: dict[str, tuple[str, ...]]
    config: dict[str, Any] = field(default_factory=dict)
    drawn: tuple[str, dict[str, Any], float | None] | None = None
    compiled: tuple[str, ...] = ()
    engine: dict[str, Any] = field(default_factory=dict)
    kv_gib: int = 1
    attention: str = "sdpa"


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

#: In float32 beside transformers, in bfloat16 beside vLLM's own.
_BOTH = {
    "float32": (TRANSFORMERS, OURS),
    "bfloat16": ("FLASH_ATTN", "TRITON_ATTN", OURS),
}

MODELS = {
    "smollm2": Model(
        "SmolLM2-135M-Instruct",
        49152,
        _BOTH | {"float16": ("FLASH_ATTN", OURS)},
        compiled=("bfloat16",),
        kv_gib=3,
    ),
    "llama8": Model(
        "Llama-8B shape, 8 layers, random weights",
        128256,
        {"bfloat16": ("FLASH_ATTN", "TRITON_ATTN", OURS)},
        config=LLAMA8,
        compiled=("bfloat16",),
        kv_gib=6,
    ),
    # All layers: the GPU is busy long enough that what else the host does is not seen.
    "llama32": Model(
        "Llama-8B shape, random weights",
        128256,
        {"bfloat16": ("FLASH_ATTN", OURS)},
        config=LLAMA8 | {"num_hidden_layers": 32},
        compiled=("bfloat16",),
        kv_gib=16,
    ),
    "gemma2": Model(
        "Gemma 2, small: softcap 5, windows of 128",
        32000,
        _BOTH,
        drawn=("Gemma2", SMALL_GEMMA2, 0.004),
        attention="eager",
    ),
    "gpt-oss": Model(
        "gpt-oss, small: sinks, windows of 128",
        32000,
        _BOTH,
        drawn=("GptOss", SMALL_GPT_OSS, None),
        attention="eager",
    ),
    "llama-fp8": Model(
        "Llama, small: fp8 cache",
        32000,
        _BOTH,
        drawn=("Llama", SMALL, None),
        engine={"kv_cache_dtype": "fp8"},
        attention="float8_e4m3fn",
    ),
    "llama-dcp": Model(
        "Llama, small, one KV head: context parallelism over two GPUs",
        32000,
        {"float32": (TRANSFORMERS, OURS), "bfloat16": ("FLASH_ATTN", OURS)},
        drawn=("Llama", SMALL | {"num_key_value_heads": 1}, None),
        engine={
            "tensor_parallel_size": 2,
            "decode_context_parallel_size": 2,
            "disable_custom_all_reduce": True,  # looking for its links takes a while
        },
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
        "capture": [int(n) for n in args.capture.split(",") if n],
        "max_model_len": 2048,
        "kv_bytes": model.kv_gib << 30,
        "more": model.engine,
        "attention": model.attention,
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


def made(model: Model, folder: Path, gguf: str | None) -> list[list[int]]:
    """Write the model to a folder; its prompts."""
    if model.drawn is not None:
        family, shape, embedding = model.drawn
        device = "cuda" if torch.cuda.is_available() else "cpu"
        drawn_folder(family, shape, device, folder, 0.05, embedding)
        return random_ids(model.vocabulary)
    if model.config:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(model.config))
        prompts = random_ids(model.vocabulary)
    else:
        prompts = tokenized(smollm2_folder(gguf, folder))
    (folder / READY).touch()
    return prompts


def serve(
    name: str, work: Path, options: argparse.Namespace, deadline: float, note: Note
) -> dict[str, Any]:
    """All rows of a model; how its engines started."""
    model, folder = MODELS[name], work / name
    asked = [dtype for dtype in model.runs if dtype in options.dtypes.split(",")]
    # Engines import for a quarter of a minute: the model is made meanwhile.
    engines = [
        start(backend, model, dtype, folder, work, options)
        for dtype in asked
        for backend in model.runs[dtype]
    ]
    try:
        prompts = made(model, folder, options.gguf)
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
            if len(up) > 1:
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
    parser.add_argument("--capture", default=CAPTURE, help="sizes of decode graphs; '' for none")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds for one answer")
    parser.add_argument("--share", type=float, default=0.5, help="of the time, for the same text")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds in all")
    parser.add_argument("--logs", help="keep the engines' logs in this folder")
    parser.add_argument("--json", help="results file")
    options = parser.parse_args()
    return serve_models(options, serve, "attn_backends.bench.vllm_run")


if __name__ == "__main__":
    raise SystemExit(main())
