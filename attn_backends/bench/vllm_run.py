"""vLLM through this library against vLLM's own backends: the same tokens, and as many a second.

    python -m attn_backends.bench.vllm_run --models smollm2,llama8 --json OUT.json

Every engine is a process of its own on the same GPU, with prefix caching, chunked prefill and CUDA
graphs of decode. Correctness first: greedy tokens of 64 prompts with shared prefixes; where two
engines part, the reference's logits tell how near the two tokens were. Then throughput, the
engines taking turns, and medians over the turns.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from .report import save
from .vllm_prompts import random_ids, tokenized, uniform

OURS = "attn_backends"
Serve: TypeAlias = Callable[..., tuple[list[dict[str, Any]], dict[str, Any]]]
CAPTURE = [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
LOGPROBS = 8
NEW_TOKENS = 64


@dataclass(frozen=True)
class Model:
    """A model to serve.

    Attributes:
        name: What results call it.
        vocabulary: Tokens that random prompts draw from.
        config: Its ``config.json``, for weights made by vLLM; empty for a real model.
        runs: Dtypes with the backends to serve it by; the first one is the reference.
        compiled: Dtypes whose engines are compiled, and whose throughput is measured.
    """

    name: str
    vocabulary: int
    config: dict[str, Any]
    runs: dict[str, tuple[str, ...]]
    compiled: tuple[str, ...] = ("bfloat16",)


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

MODELS = {
    "smollm2": Model(
        "SmolLM2-135M-Instruct",
        49152,
        {},
        {
            "bfloat16": ("FLASH_ATTN", "TRITON_ATTN", OURS),
            "float16": ("FLASH_ATTN", OURS),
            "float32": ("TRITON_ATTN", OURS),
        },
    ),
    "llama8": Model(
        "Llama-8B shape, 8 layers, random weights",
        128256,
        LLAMA8,
        {"bfloat16": ("FLASH_ATTN", "TRITON_ATTN", OURS)},
    ),
}


@dataclass
class Engine:
    """A worker process.

    Attributes:
        backend: vLLM's name, or ``attn_backends``.
        model: What it serves.
        dtype: Of its weights.
        process: The worker.
        log: What vLLM printed.
        ready: Its first answer, once it came.
    """

    backend: str
    model: Model
    dtype: str
    process: subprocess.Popen[str]
    log: Path
    ready: dict[str, Any] = field(default_factory=dict)

    def ask(self, command: dict[str, Any] | None, deadline: float) -> dict[str, Any] | None:
        """Send a command (None only waits for the next answer); None if it failed or is late."""
        if self.process.poll() is not None or self.process.stdin is None:
            return None
        try:
            if command is not None:
                self.process.stdin.write(json.dumps(command) + "\n")
                self.process.stdin.flush()
            assert self.process.stdout is not None
            wait = max(0.0, deadline - time.monotonic())
            if not select.select([self.process.stdout], [], [], wait)[0]:
                self.stop()
                return None
            line = self.process.stdout.readline()
            return json.loads(line) if line else None
        except (OSError, ValueError):
            return None

    def why(self) -> str:
        """The last error in the log."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        errors = [line for line in lines if "Error" in line]
        return (errors or lines or ["no output"])[-1][-300:]

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()


def real_backend(backend: str) -> str:
    """The name that vLLM knows a backend by."""
    if backend != OURS:
        return backend
    from ..engines.vllm import backend_name

    return backend_name()


def start(
    backend: str, model: Model, dtype: str, folder: Path, logs: Path, settings: str
) -> Engine:
    """Start a worker; it answers once its engine is up."""
    options = {
        "model": str(folder),
        "dummy": bool(model.config),
        "backend": real_backend(backend),
        "ours": backend == OURS,
        "dtype": dtype,
        "compile": dtype in model.compiled,
        "capture": CAPTURE,
        "max_model_len": 2048,
        "kv_bytes": (6 if model.config else 3) << 30,
    }
    label = f"{folder.name}-{dtype}-{backend}"
    env = {**os.environ, "VLLM_CACHE_ROOT": str(logs / f"cache-{label}")}
    env["TORCHINDUCTOR_CACHE_DIR"] = str(logs / f"inductor-{label}")
    env["ATTN_BACKENDS_BACKEND"] = settings
    log = logs / f"{label}.log"
    command = [sys.executable, "-m", "attn_backends.bench.vllm_engine", json.dumps(options)]
    process = subprocess.Popen(
        [*command, str(log)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=env,
    )
    return Engine(backend, model, dtype, process, log)


def compare(reference: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """How far two engines' greedy tokens agree, and how near a tie they were where they part.

    A gap is the reference's logit of its own token minus that of the other's, at the first
    difference of a sequence: up to there both have seen the same text.
    """
    same, tokens, agreed, gaps, far, drift = 0, 0, 0, [], 0, 0.0
    for i, (a, b) in enumerate(zip(reference["tokens"], ours["tokens"])):
        first = next((j for j, (x, y) in enumerate(zip(a, b)) if x != y), None)
        upto = len(a) if first is None else first
        tokens, agreed, same = tokens + len(a), agreed + upto, same + (first is None)
        ref, own = reference["logprobs"][i], ours["logprobs"][i]
        for j in range(upto):
            token = str(a[j])
            drift = max(drift, abs(ref[j][token] - own[j][token]))
        if first is None:
            continue
        step = ref[first]
        if str(b[first]) in step:
            gaps.append(step[str(a[first])] - step[str(b[first])])
        else:
            far += 1
    return {
        "sequences": len(reference["tokens"]),
        "equal_sequences": same,
        "tokens": tokens,
        "equal_tokens": agreed / max(tokens, 1),
        "max_gap": max(gaps, default=0.0),
        "median_gap": statistics.median(gaps) if gaps else 0.0,
        "beyond_top": far,
        "max_logprob_difference": drift,
    }


def agreement(engines: list[Engine], prompts: list[list[int]], deadline: float) -> list[dict]:
    """Rows of ``vllm_tokens``: every engine of a model and dtype against the first."""
    command = {"prompts": prompts, "max_tokens": NEW_TOKENS, "logprobs": LOGPROBS}
    answers = [(each, each.ask(command, deadline)) for each in engines]
    rows: list[dict[str, Any]] = []
    if not answers or answers[0][1] is None:
        return rows
    reference = answers[0][1]
    for engine, answer in answers[1:]:
        if answer is None:
            continue
        rows.append(
            {
                "bench": "vllm_tokens",
                "case": case(engine),
                "backend": engine.backend,
                "reference": engines[0].backend,
                "cached_prompt_tokens": answer["cached"],
                "prompt_tokens": sum(map(len, prompts)),
                **compare(reference, answer),
                **{f"steps_{kind}": n for kind, n in answer.get("steps", {}).items()},
            }
        )
    return rows


def case(engine: Engine) -> dict[str, Any]:
    """What a row is about."""
    return {"model": engine.model.name, "dtype": engine.dtype}


def workloads(model: Model, prompts: list[list[int]]) -> dict[str, tuple[dict[str, Any], int]]:
    """By name: the command, and the tokens that its rate counts."""
    long, short = uniform(model.vocabulary, 1024, 48), uniform(model.vocabulary, 32, 64)
    return {
        "prefill": ({"prompts": long, "max_tokens": 1}, 48 * 1024),
        "decode": ({"prompts": short, "max_tokens": 192}, 64 * 192),
        "mixed": ({"prompts": prompts, "max_tokens": 96}, 64 * 96),
    }


def throughput(
    engines: list[Engine], prompts: list[list[int]], turns: int, deadline: float
) -> list[dict[str, Any]]:
    """Rows of ``vllm_throughput``: tokens per second, the engines taking turns."""
    rows = []
    for name, (command, counted) in workloads(engines[0].model, prompts).items():
        seconds: dict[str, list[float]] = {each.backend: [] for each in engines}
        for turn in range(turns + 1):  # the first one warms up
            for engine in engines:
                answer = engine.ask({**command, "tokens": False}, deadline)
                if answer is not None and turn:
                    seconds[engine.backend].append(answer["seconds"])
        for engine in engines:
            times = seconds[engine.backend]
            if times:
                rates = sorted(counted / t for t in times)
                row = {
                    "bench": "vllm_throughput",
                    "case": {**case(engine), "workload": name},
                    "backend": engine.backend,
                    "tokens_per_s": statistics.median(rates),
                    "slowest": rates[0],
                    "fastest": rates[-1],
                    "turns": len(rates),
                }
                rows.append(row)
    return rows


def smollm2_folder(gguf: str | None, target: Path) -> Path:
    """SmolLM2 as a folder of float32 weights, made from the pinned GGUF file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ..cli.model_files import fetch

    path = Path(gguf) if gguf else fetch()
    source: dict[str, Any] = {"gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **source)
    # Its weights are plain numbers by now; what says otherwise would keep them from being saved.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(path.parent, **source).save_pretrained(target)
    return target


def serve(
    name: str, work: Path, options: argparse.Namespace, deadline: float
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All rows of a model, and how its engines started."""
    model, folder = MODELS[name], work / name
    if model.config:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(model.config))
        prompts = random_ids(model.vocabulary)
    else:
        prompts = tokenized(smollm2_folder(options.gguf, folder))
    asked = [dtype for dtype in model.runs if dtype in options.dtypes.split(",")]
    engines = [
        start(backend, model, dtype, folder, work, options.backend)
        for dtype in asked
        for backend in model.runs[dtype]
    ]
    started, rows = {}, []
    try:
        for each in engines:
            each.ready = each.ask(None, deadline) or {}
            label = f"{name} {each.dtype} {each.backend}"
            started[label] = each.ready or {"failed": each.why()}
            print(label, "up" if each.ready else f"FAILED: {each.why()}", flush=True)
        for dtype in asked:
            up = [each for each in engines if each.dtype == dtype and each.ready]
            rows += agreement(up, prompts, deadline)
        for dtype in set(asked) & set(model.compiled):
            up = [each for each in engines if each.dtype == dtype and each.ready]
            if up:
                rows += throughput(up, prompts, options.turns, deadline)
    finally:
        for each in engines:
            each.stop()
    return rows, started


def show(row: dict[str, Any]) -> str:
    """A row in one line."""
    head = f"{row['case']['model'][:22]} {row['case']['dtype']} {row['backend']}"
    if row["bench"] == "vllm_tokens":
        return (
            f"{head} vs {row['reference']}: {row['equal_sequences']}/{row['sequences']} sequences, "
            f"{row['equal_tokens']:.4f} tokens, max gap {row['max_gap']:.4f}, beyond "
            f"{row['beyond_top']}, logprob {row['max_logprob_difference']:.4f}, replayed "
            f"{row.get('steps_replayed', '-')}"
        )
    return (
        f"{head} {row['case']['workload']}: {row['tokens_per_s']:.0f} tokens/s "
        f"({row['slowest']:.0f}..{row['fastest']:.0f})"
    )


def serve_models(
    options: argparse.Namespace, serve: Serve, show: Callable[[dict[str, Any]], str], module: str
) -> int:
    """Serve each model in turn, print and save its rows; 0 if there are any.

    Args:
        options: ``models`` with commas between, ``limit``, ``logs`` and ``json``.
        serve: Serves one model: its name, a folder for logs, the options and the deadline.
        show: A row for people.
        module: What the results file names as its command.
    """
    deadline = time.monotonic() + options.limit
    rows: list[dict[str, Any]] = []
    started: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.models.split(","):
            more, how = serve(name, Path(scratch), options, deadline)
            rows, started = rows + more, started | how
            for row in more:
                print(show(row), flush=True)
            save(options.json, module, rows, engines=started)
        if options.logs:
            Path(options.logs).mkdir(parents=True, exist_ok=True)
            for log in Path(scratch).glob("*.log"):
                (Path(options.logs) / log.name).write_text(log.read_text(errors="replace")[-60000:])
    return 0 if rows else 1


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="of smollm2, llama8")
    parser.add_argument("--dtypes", default="bfloat16,float16,float32", help="of each model")
    parser.add_argument("--backend", default="triton", help="what stands behind the plug")
    parser.add_argument("--gguf", help="SmolLM2 as a GGUF file; default: fetched")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds in all")
    parser.add_argument("--logs", help="keep the engines' logs in this folder")
    parser.add_argument("--json", help="results file")
    options = parser.parse_args()
    return serve_models(options, serve, show, "attn_backends.bench.vllm_run")


if __name__ == "__main__":
    raise SystemExit(main())
