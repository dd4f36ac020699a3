"""SGLang through this library against SGLang's own backends: tokens, and tokens a second.

    python -m attn_backends.bench.sglang_run --models smollm2,llama8 --json OUT.json

Every engine is SGLang with its radix cache, chunked prefill and CUDA graphs of decode, all on the
same GPU. Correctness first, ``serving_tokens``: greedy tokens of 64 prompts with shared prefixes,
as they come and step by step under the same text, which transformers reads in float32 too,
``serving_truth``. Then throughput, ``serving_rates``: the engines take turns, and are compared
within a turn.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .serving import OURS, Engine, Note, serve_models, smollm2_folder, wait_for
from .serving_models import READY, drawn_folder
from .serving_rates import throughput
from .serving_tokens import Times, agreement
from .vllm_prompts import random_ids, tokenized

PEERS = {"cuda": "triton", "cpu": "torch_native"}
CAPTURE = "1,2,4,8,16,24,32,40,48,56,64"

#: Llama 3 8B with a quarter of its layers and of its vocabulary; its weights are drawn.
LLAMA8 = dict(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=8,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=32000,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    tie_word_embeddings=False,
)
#: Softcap, and windows that prompts outgrow in every other layer.
GEMMA2 = LLAMA8 | dict(
    hidden_size=2304,
    intermediate_size=9216,
    num_attention_heads=16,
    query_pre_attn_scalar=128,
    sliding_window=128,
    layer_types=["sliding_attention", "full_attention"] * 4,
    attn_logit_softcapping=50.0,
    hidden_act="gelu_pytorch_tanh",  # where SGLang looks for it
    tie_word_embeddings=True,
)


@dataclass(frozen=True)
class Model:
    """A model to serve.

    Attributes:
        name: What results call it.
        vocabulary: Tokens that random prompts draw from.
        family: Of transformers' classes, for weights that are drawn; empty for a real model.
        shape: Arguments of the family's configuration.
    """

    name: str
    vocabulary: int
    family: str = ""
    shape: dict[str, Any] = field(default_factory=dict)


MODELS = {
    "smollm2": Model("SmolLM2-135M-Instruct", 49152),
    "llama8": Model("Llama-8B shape, 8 layers, random weights", 32000, "Llama", LLAMA8),
    "gemma2": Model(
        "Gemma 2 shape, 8 layers, windows of 128, random weights", 32000, "Gemma2", GEMMA2
    ),
}


def start(
    backend: str, model: Model, folder: Path, logs: Path, options: argparse.Namespace
) -> Engine:
    """Start a worker; it answers once its engine is up."""
    more = dict(json.loads(options.engine))
    if options.device == "cuda":
        more = {
            "cuda_graph_bs_decode": [int(n) for n in options.capture.split(",")],
            "cuda_graph_backend_prefill": options.prefill_graphs,
            **more,
        }
    settings = {
        "model": str(folder),
        "backend": backend,
        "dtype": options.dtype,
        "page_size": options.page_size,
        "max_total_tokens": options.tokens,
        "context_length": 2048,
        "more": {"device": options.device, **more},
    }
    env = {**os.environ, "ATTN_BACKENDS_BACKEND": options.backend}
    if options.dtype == "float32":
        # SGLang's Triton kernels multiply as TF32 unless told otherwise, ours never do.
        env["TRITON_F32_DEFAULT"] = "ieee"
    label = f"{folder.name}-{options.dtype}-{backend}"
    log = logs / f"{label}.log"
    command = [sys.executable, "-m", "attn_backends.bench.sglang_engine", json.dumps(settings)]
    process = subprocess.Popen(
        [*command, str(log)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=env,
        start_new_session=True,
    )
    return Engine(backend, model, options.dtype, process, log)


def start_scorer(model: Model, folder: Path, logs: Path) -> Engine:
    """Start transformers in float32 over the same weights, for what SGLang itself cannot say."""
    log = logs / f"{folder.name}-scorer.log"
    attention = "eager" if "attn_logit_softcapping" in model.shape else "sdpa"  # has no softcap
    settings = json.dumps({"model": str(folder), "dtype": "float32", "attention": attention})
    process = subprocess.Popen(
        [sys.executable, "-m", "attn_backends.bench.transformers_engine", settings, str(log)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    return Engine(f"{attention} of transformers", model, "float32", process, log)


def stop(engine: Engine) -> None:
    """End a worker and the processes that SGLang started from it."""
    try:
        os.killpg(engine.process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    engine.process.wait()


def serve(
    name: str, work: Path, options: argparse.Namespace, deadline: float, note: Note
) -> dict[str, Any]:
    """All rows of a model; how its engines started."""
    model, folder = MODELS[name], work / name
    # Engines import for a quarter of a minute: the model is made meanwhile.
    engines = [
        start(backend, model, folder, work, options)
        for backend in [*(options.peers or PEERS[options.device]).split(","), OURS]
    ]
    started: dict[str, Any] = {}
    others: list[Engine] = []

    def told(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row["case"] |= {"page_size": options.page_size}
        note(rows)

    try:
        if model.family:
            prompts = random_ids(model.vocabulary)
            drawn_folder(model.family, model.shape, options.device, folder)
        else:
            prompts = tokenized(smollm2_folder(options.gguf, folder))
            (folder / READY).touch()
        prompts = prompts[: options.prompts] if options.prompts else prompts
        scorer = start_scorer(model, folder, work) if options.device == "cuda" else None
        others = [scorer] if scorer is not None else []
        started = wait_for(
            [*engines, *others], lambda each: f"{name} {each.dtype} {each.backend}", deadline
        )
        up = [each for each in engines if each.ready]
        if len(up) > 1:
            now = time.monotonic()
            until = now + (deadline - now) * options.share
            times = Times(until, deadline, options.patience)
            judge = scorer if scorer is not None and scorer.ready else None
            agreement("sglang_tokens", up, prompts, times, told, judge)
            if options.turns:
                chosen = options.workloads.split(",") if options.workloads else None
                some = up
                if options.timed:  # beside the reference
                    timed = options.timed.split(",")
                    some = [up[0], *(each for each in up[1:] if each.backend in timed)]
                turns = options.turns
                rows = throughput("sglang_throughput", some, prompts, turns, deadline, chosen)
                told(rows)
    finally:
        for each in [*engines, *others]:
            stop(each)
    return started


def options_of(argv: list[str] | None = None) -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="smollm2,llama8", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--backend", default="triton", help="what stands behind the plug")
    parser.add_argument("--peers", help="SGLang's own; the first one is the reference")
    parser.add_argument("--timed", help="backends to time beside the reference; default: all")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=130_000, help="slots of the pool")
    parser.add_argument("--prefill-graphs", default="disabled", help="or breakable")
    parser.add_argument("--device", default="cuda", choices=tuple(PEERS))
    parser.add_argument("--engine", default="{}", help="further arguments of the engine, JSON")
    parser.add_argument("--gguf", help="SmolLM2 as a GGUF file; default: fetched")
    parser.add_argument("--prompts", type=int, default=0, help="only the first so many")
    parser.add_argument("--turns", type=int, default=12, help="of throughput; 0 leaves it out")
    parser.add_argument("--workloads", help="of prefill, decode, long decode, mixed; default: all")
    parser.add_argument("--capture", default=CAPTURE, help="batch sizes of decode graphs")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds for one answer")
    parser.add_argument("--share", type=float, default=0.5, help="of the time, for the same text")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds in all")
    parser.add_argument("--logs", help="keep the engines' logs in this folder")
    parser.add_argument("--json", help="results file")
    return parser.parse_args(argv)


def main() -> int:
    """Entry point."""
    options = options_of()
    return serve_models(options, serve, "attn_backends.bench.sglang_run")


if __name__ == "__main__":
    raise SystemExit(main())
