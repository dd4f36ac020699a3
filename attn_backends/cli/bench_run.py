"""The loop of every benchmark command over its points, and what becomes of the rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer

from ..bench.plots import label_of, plot
from ..bench.report import meta_of, write
from ..bench.runner import Found, release
from ..bench.wall_timer import one_thread
from ..errors import AttnBackendsError
from .bench_options import said
from .bench_progress import progress_bar
from .console import (
    EXIT_BAD_ANSWER,
    STDOUT,
    MissingPackageError,
    print_json,
    stderr,
    stdout,
    table,
)

#: Stands for the backends of a point that could not be measured at all.
EVERY = "every backend"


@dataclass(frozen=True)
class Output:
    """Where the results of a command go.

    Attributes:
        ctx: Of the command.
        device: Where it measures.
        results: File for JSON, ``-`` for standard output, or None.
        picture: File for a plot, or None.
        own: Backend that ratios refer to; None is ``triton`` if it was measured, else the first.
    """

    ctx: typer.Context
    device: torch.device
    results: str | None
    picture: Path | None = None
    own: str | None = None


def run_points(output: Output, points: Sequence[Any], measure: Callable[[Any], Found]) -> None:
    """Measure points one after the other; write, print and draw what was found.

    The results file is written after every point, and the table is printed if the command is
    interrupted too. A point that cannot be measured at all, for want of memory for example, is kept
    with its error, and the next one is measured. Exit code 1 then, if an answer was wrong, or if
    there is no row.

    Args:
        output: Where results go.
        points: Each with a ``label``.
        measure: Measures one.

    Raises:
        MissingPackageError: A plot is asked for, and matplotlib does not import.
    """
    if output.picture is not None:
        _need_matplotlib()
    found = Found()
    data: dict[str, Any] = {"meta": meta_of(said(output.ctx), output.device)}
    if output.device.type == "cpu":
        data["meta"]["threads"] = 1
    try:
        name = output.ctx.info_name or "bench"
        with one_thread(output.device), progress_bar(name, len(points)) as step:
            for point in points:
                step(point.label)
                found.add(_measured(measure, point, name))
                release(output.device)
                data |= {"rows": found.rows, "refused": found.refused}
                if output.results not in (None, STDOUT):
                    write(str(output.results), data)
                step(None)
    finally:
        own = output.own or _own(found.rows)
        if output.results != STDOUT:
            _show(found, own)
    if output.results == STDOUT:
        print_json(data)
    if output.picture is not None:
        stderr().print(f"drawn: {plot(data, output.picture, own=own)}", soft_wrap=True)
    failed = any(item["backend"] == EVERY for item in found.refused)
    if failed or not found.rows or not all(row["right"] for row in found.rows):
        raise typer.Exit(EXIT_BAD_ANSWER)


def _measured(measure: Callable[[Any], Found], point: Any, bench: str) -> Found:
    try:
        with warnings.catch_warnings():  # of libraries, about their own speed
            warnings.simplefilter("ignore", UserWarning)
            return measure(point)
    except AttnBackendsError:  # a malformed question
        raise
    except Exception as error:
        reason = f"{point.label}: {type(error).__name__}: {str(error)[:300]}"
        case = {"label": point.label}
        return Found(refused=[{"bench": bench, "case": case, "backend": EVERY, "reason": reason}])


def _own(rows: Sequence[dict[str, Any]]) -> str:
    names = [row["backend"] for row in rows if row["right"]] or [""]
    return "triton" if "triton" in names else names[0]


def _need_matplotlib() -> None:
    """Say how to install matplotlib before minutes are spent on measuring."""
    try:
        import matplotlib  # noqa: F401
    except Exception as error:
        text = f"--plot needs matplotlib: pip install 'attn-backends[bench]' ({error})"
        raise MissingPackageError(text) from error


def _show(found: Found, own: str) -> None:
    """Print a table of rows, and on standard error what was not measured."""
    if found.rows:
        base = {_key(r): r["median_us"] for r in found.rows if r["backend"] == own and r["right"]}
        head = ["case", "mode", "backend", "median us", "quartiles", "GB/s", "TFLOP/s"]
        head += ["of roofline", f"time / {own}", "largest error"]
        lines = [_line(r, base.get(_key(r))) for r in found.rows]
        if any("associativity_err" in r for r in found.rows):
            head.append("associativity error")
            for line, r in zip(lines, found.rows):
                line.append(f"{r['associativity_err']:.1e}" if "associativity_err" in r else "")
        stdout().print(table("", head, lines))
    missing: dict[str, None] = {}
    for item in found.refused:
        where = item["backend"] + (f" ({item['mode']})" if "mode" in item else "")
        missing[f"not measured: {where}: {item['reason']}"] = None
    for text in missing:
        stderr().print(text, style="yellow", soft_wrap=True)


def _key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["bench"], str(sorted(row["case"].items(), key=str)), row["mode"]


def _line(row: dict[str, Any], base_us: float | None) -> list[str]:
    def of(name: str, form: str) -> str:
        return format(row[name], form) if name in row else ""

    name = [f"{row['bench']} {label_of(row['case'])}", row["mode"], row["backend"]]
    if not row["right"]:
        return [*name, "WRONG", "", "", "", "", "", of("max_err", ".1e")]
    share = of("roofline_pct", ".0f")
    return [
        *name, of("median_us", ".2f"), f"{row['p25_us']:.2f} to {row['p75_us']:.2f}",
        of("gbps", ".4g"), of("tflops", ".3g"), f"{share} %" if share else "",
        f"{row['median_us'] / base_us:.2f}" if base_us else "", of("max_err", ".1e"),
    ]  # fmt: skip


__all__ = ["Output", "run_points"]
