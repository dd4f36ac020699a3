"""Engines of vLLM and SGLang as worker processes, asked in lines of JSON; saving what they say."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import select
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from .report import save

OURS = "attn_backends"
#: Takes rows as they come; a row may come again when more is known of it.
Note: TypeAlias = Callable[[list[dict[str, Any]]], None]
#: Serves one model: its name, a folder, the options, the deadline, and where rows go. Returns how
#: its engines started.
Serve: TypeAlias = Callable[[str, Path, argparse.Namespace, float, Note], dict[str, Any]]


class Served(Protocol):
    """What is known of a model that engines serve."""

    @property
    def name(self) -> str:
        """What results call it."""

    @property
    def vocabulary(self) -> int:
        """Tokens that random prompts draw from."""


@dataclass
class Engine:
    """A worker process.

    Attributes:
        backend: The engine's own name of one of its backends, or ``attn_backends``.
        model: What it serves.
        dtype: Of its weights.
        process: The worker.
        log: What the engine printed.
        ready: Its first answer, once it came.
    """

    backend: str
    model: Served
    dtype: str
    process: subprocess.Popen[str]
    log: Path
    ready: dict[str, Any] = field(default_factory=dict)

    @property
    def case(self) -> dict[str, Any]:
        """What a row about it is about."""
        return {"model": self.model.name, "dtype": self.dtype}

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


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Keep the garbage collector of this process out of what is timed.

    Engines that collect by themselves do so over what they made meanwhile: looking through all
    that a process has imported may take longer than an answer.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


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


def wait_for(
    engines: list[Engine], label: Callable[[Engine], str], deadline: float
) -> dict[str, Any]:
    """Wait until engines are up, or are not; how each of them started.

    Args:
        engines: Workers that were started.
        label: What to call one.
        deadline: When it is too late.

    Returns:
        By label: the engine's first answer, or ``failed`` and why.
    """
    started = {}
    for each in engines:
        each.ready = each.ask(None, deadline) or {}
        started[label(each)] = each.ready or {"failed": each.why()}
        print(label(each), "up" if each.ready else f"FAILED: {each.why()}", flush=True)
    return started


def show(row: dict[str, Any]) -> str:
    """A row in one line."""
    head = f"{row['case']['model'][:22]} {row['case']['dtype']} {row['backend']}"
    if row["bench"].endswith("_tokens"):
        decided = ""
        if row.get("noise"):
            steps = f"{row['decided_parted']}/{row['decided_steps']}"
            decided = f", decided {steps} beyond {row['noise']:.4g}"
        if "float32" in row:
            own, theirs = row["float32"], row["reference_float32"]
            decided += (
                f"; not float32's {own['other_choice']} ({theirs['other_choice']}), gave up "
                f"{own['given_up_max']:.3g} ({theirs['given_up_max']:.3g}), gap error "
                f"{own['gap_error_median']:.3g} ({theirs['gap_error_median']:.3g})"
            )
        return (
            f"{head} vs {row['reference']}: {row['equal_sequences']}/{row['sequences']} sequences, "
            f"{row['equal_tokens']:.4f} tokens; same text: {row['parted']}/{row['steps']} parted "
            f"(ties {row['parted_at_ties']}), max gap {row['max_gap']:.4g}{decided}, cached "
            f"{row['cached_prompt_tokens']}/{row['prompt_tokens']}, replayed "
            f"{row.get('steps_replayed', '-')}"
        )
    return (
        f"{head} {row['case']['workload']}: {row['tokens_per_s']:.0f} tokens/s "
        f"({row['slowest']:.0f}..{row['fastest']:.0f}), ratio {row['ratio']:.3f} "
        f"({row['ratio_p25']:.3f}..{row['ratio_p75']:.3f}), {row['turns']} turns"
    )


def serve_models(options: argparse.Namespace, serve: Serve, module: str) -> int:
    """Serve each model in turn, print and save its rows as they come; 0 if there are any.

    Args:
        options: ``models`` with commas between, ``limit``, ``logs`` and ``json``.
        serve: Serves one model.
        module: What the results file names as its command.
    """
    deadline = time.monotonic() + options.limit
    rows: list[dict[str, Any]] = []
    started: dict[str, Any] = {}

    def note(more: list[dict[str, Any]]) -> None:
        for row in more:
            print(show(row), flush=True)
            if not any(row is known for known in rows):
                rows.append(row)
        save(options.json, module, rows, engines=started)

    with tempfile.TemporaryDirectory() as scratch:
        for name in options.models.split(","):
            started |= serve(name, Path(scratch), options, deadline, note)
            note([])
        if options.logs:
            Path(options.logs).mkdir(parents=True, exist_ok=True)
            for log in Path(scratch).glob("*.log"):
                (Path(options.logs) / log.name).write_text(log.read_text(errors="replace")[-60000:])
    return 0 if rows else 1


__all__ = [
    "wait_for",
    "OURS",
    "Engine",
    "Note",
    "Serve",
    "Served",
    "serve_models",
    "show",
    "smollm2_folder",
    "undisturbed",
]
