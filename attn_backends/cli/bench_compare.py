"""``attn-backends bench compare``: what became slower between two results files."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ..bench.compare import SAME, Change, Comparison, compare, read_results
from ..bench.plots import label_of
from .console import EXIT_BAD_ANSWER, JsonFlag, guarded, print_json, stdout, table

NAME = "compare"


@guarded
def command(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="Results file of before.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Results file of now.")],
    threshold: Annotated[
        float, typer.Option(help="Growth of a median that counts: 0.05 is 5 %.")
    ] = 0.05,
    across_devices: Annotated[
        bool, typer.Option("--across-devices", help="Compare files of different devices.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Compare two results files; exit 1 if a row is slower, wrong or missing.

    A row is slower if its median grew by more than the threshold and the quartiles of both runs
    lie apart: a difference inside the noise of the samples is none.
    """
    result = compare(
        read_results(old), read_results(new), threshold=threshold, across_devices=across_devices
    )
    if as_json:
        print_json(_plain(result))
    else:
        _show(result)
    if not result.ok:
        raise typer.Exit(EXIT_BAD_ANSWER)


def _plain(result: Comparison) -> dict[str, Any]:
    return {**asdict(result), "ok": result.ok, "counts": result.counts()}


def _show(result: Comparison) -> None:
    out = stdout()
    rows = [_line(change) for change in result.changes if change.verdict != SAME]
    if rows:
        head = ["case", "mode", "backend", "old us", "new us", "new / old", "verdict"]
        out.print(table("", head, rows))
    counts = ", ".join(f"{n} {verdict}" for verdict, n in result.counts().items() if n)
    verdict = "PASS" if result.ok else "FAIL"
    out.print(f"{verdict}: {counts}; threshold {result.threshold:.0%}", soft_wrap=True)


def _line(change: Change) -> list[str]:
    def time(us: float | None, band: tuple[float, float] | None) -> str:
        if us is None:
            return ""
        return f"{us:.2f}" if band is None else f"{us:.2f} ({band[0]:.2f} to {band[1]:.2f})"

    return [
        f"{change.bench} {label_of(change.case)}", change.mode, change.backend,
        time(change.old_us, change.old_band), time(change.new_us, change.new_band),
        "" if change.ratio is None else f"{change.ratio:.3f}", change.verdict,
    ]  # fmt: skip


__all__ = ["NAME", "command"]
