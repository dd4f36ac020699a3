"""Options that the benchmark commands share, and how their commands are read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from typer.core import TyperCommand

from ..bench.presets import DEFAULT, SHORT
from ..bench.report import command_line
from ..bench.runner import EAGER, GRAPH, default_modes
from ..errors import InvalidInputError
from .console import STDOUT

ROUNDS = 24
_ARGUMENTS = "attn_backends.arguments"

Preset = Annotated[
    str, typer.Option(help=f"Model: {', '.join(SHORT)}, or a name that roofline knows.")
]
Backends = Annotated[
    list[str] | None,
    typer.Option("--backend", help="Name, or name:option=value; may be repeated. Default: all."),
]
Peers = Annotated[
    list[str] | None,
    typer.Option("--peer", help="Another library called directly; may be repeated. Default: all."),
]
NoPeers = Annotated[bool, typer.Option("--no-peers", help="Measure no other library.")]
Batches = Annotated[list[int] | None, typer.Option("--batch", help="Sequences; may be repeated.")]
Lengths = Annotated[
    list[int] | None, typer.Option("--length", help="Keys of each; may be repeated.")
]
Dtype = Annotated[str, typer.Option(help="bf16, fp16, fp32 or fp8.")]
KvDtype = Annotated[str | None, typer.Option(help="Dtype of the cache. Default: dtype.")]
PageSize = Annotated[
    int | None, typer.Option(help="Tokens per page; 0 is ragged keys. Default: the preset's.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, ... Default: CUDA if visible.")]
Modes = Annotated[
    list[str] | None,
    typer.Option("--mode", help=f"{GRAPH} or {EAGER}. Default: both on a GPU, eager on a CPU."),
]
Rounds = Annotated[int, typer.Option(help="Samples of each way, all ways in turn.")]
Results = Annotated[
    str | None,
    typer.Option(
        "--json", metavar="[FILE]", help="Write results; without FILE print them, nothing else."
    ),
]
Picture = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Draw the results: png, svg, pdf.")
]


class CalledCommand(TyperCommand):
    """A command that knows how it was called."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the arguments, for the results to name."""
        ctx.meta[_ARGUMENTS] = list(args)
        return super().parse_args(ctx, args)


class BenchCommand(CalledCommand):
    """A command whose ``--json`` may stand without a file."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put standard output where ``--json`` names no file."""
        given = list(args)
        for i, argument in enumerate(args):
            following = args[i + 1] if i + 1 < len(args) else None
            if argument == "--json" and (following is None or following.startswith("--")):
                given[i] = f"--json={STDOUT}"
        rest = super().parse_args(ctx, given)
        ctx.meta[_ARGUMENTS] = list(args)
        return rest


def said(ctx: typer.Context) -> str:
    """The command as results files name it."""
    return command_line(ctx.command_path, ctx.meta[_ARGUMENTS])


def check_rounds(rounds: int) -> int:
    """The number of samples, at least one.

    Raises:
        InvalidInputError: It is smaller.
    """
    if rounds < 1:
        raise InvalidInputError.of("rounds", rounds, "an int >= 1")
    return rounds


def check_dtype(field: str, name: str, allowed: Sequence[str]) -> str:
    """A dtype by its short name.

    Raises:
        InvalidInputError: It is not among those allowed.
    """
    if name not in allowed:
        raise InvalidInputError.of(field, repr(name), ", ".join(allowed))
    return name


def check_modes(modes: Sequence[str] | None, device: torch.device) -> tuple[str, ...]:
    """The modes to measure in.

    Raises:
        InvalidInputError: A mode is unknown, or the device has no graphs.
    """
    allowed = default_modes(device)
    for mode in modes or ():
        if mode not in allowed:
            raise InvalidInputError.of("mode", repr(mode), f"{', '.join(allowed)} on {device}")
    return tuple(m for m in allowed if not modes or m in modes)


def check_peers(
    given: Sequence[str] | None, none: bool, known: Sequence[str], device: torch.device
) -> list[str]:
    """The peers to measure: those named, else all that are known on a GPU.

    Raises:
        InvalidInputError: A name is unknown, or the device is not a GPU.
    """
    if none and given:
        raise InvalidInputError.of("--peer, --no-peers", "both", "one of them")
    if given and device.type != "cuda":
        raise InvalidInputError.of("peer", ", ".join(given), "none: peers run on a GPU only")
    for name in given or ():
        if name not in known:
            raise InvalidInputError.of("peer", repr(name), ", ".join(known))
    return [] if none or device.type != "cuda" else list(given or known)


def limit_on(device: torch.device) -> float:
    """Seconds of samples for a point and mode; four rounds are taken all the same."""
    return 10.0 if device.type == "cuda" else 2.0


__all__ = ["DEFAULT", "ROUNDS", "SHORT", "Backends", "Batches", "BenchCommand"]
__all__ += ["CalledCommand", "Device", "Dtype", "KvDtype", "Lengths", "Modes", "NoPeers"]
__all__ += ["PageSize", "Peers", "Picture", "Preset", "Results", "Rounds", "check_dtype"]
__all__ += ["check_modes", "check_peers", "check_rounds", "limit_on", "said"]
