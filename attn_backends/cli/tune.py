"""``attn-backends tune``: measure backends, and write the file that ``auto`` follows."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Annotated

import typer

from ..bench.backend_ways import parse
from ..bench.presets import preset as find_preset
from ..bench.tune import Job, Outcome, jobs_for, order_of, tune
from ..environment import PREFIX
from .bench_options import (
    DEFAULT,
    SHORT,
    Backends,
    Batches,
    CalledCommand,
    Device,
    Lengths,
    check_rounds,
    said,
)
from .bench_progress import progress_bar
from .console import JsonFlag, guarded, print_json, stderr, stdout, table
from .options import parse_device

NAME = "tune"
CLS = CalledCommand
VARIABLE = f"{PREFIX}TUNING_FILE"
FILE = Path("attn_backends_tuning.json")


@guarded
def command(
    ctx: typer.Context,
    preset: Annotated[
        list[str] | None,
        typer.Option(help=f"Model: {', '.join(SHORT)}; may be repeated. Default: {DEFAULT}."),
    ] = None,
    backend: Backends = None,
    phase: Annotated[
        list[str] | None, typer.Option(help="prefill or decode. Default: both.")
    ] = None,
    batch: Batches = None,
    length: Lengths = None,
    out: Annotated[
        Path | None, typer.Option(help=f"File to write. Default: {VARIABLE}, else {FILE}.")
    ] = None,
    budget: Annotated[float, typer.Option(help="Begin no point after so many seconds.")] = 540,
    rounds: Annotated[int, typer.Option(help="Most samples of each backend at a point.")] = 16,
    again: Annotated[
        bool, typer.Option("--again", help="Measure points that the file has already.")
    ] = False,
    device: Device = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure the available backends, and write the file that auto follows.

    The file is written after every point. A run that was interrupted or ran out of its budget is
    continued by the same command; what versions other than today's measured is measured again.
    """
    where = parse_device(device)
    check_rounds(rounds)
    for name in backend or ():
        parse(name)
    models = [find_preset(name) for name in preset or [DEFAULT]]
    jobs = jobs_for(
        models, where, phases=phase or ("prefill", "decode"), batches=batch or (),
        lengths=length or (),
    )  # fmt: skip
    path = out or Path(os.environ.get(VARIABLE) or FILE)
    with progress_bar(NAME, len(jobs)) as step, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of libraries, about their own speed

        def done(job: Job, measured: bool) -> None:
            step(f"{job.phase} {job.bucket}")
            step(None)

        outcome = tune(
            path, jobs, where, backends=backend or (), budget_s=budget, rounds=rounds,
            again=again, command=said(ctx), progress=done,
        )  # fmt: skip
    if as_json:
        print_json(outcome.tuning.model_dump())
        return
    _show(outcome, path)


def _show(outcome: Outcome, path: Path) -> None:
    rows = []
    for row in outcome.tuning.rows:
        order = sorted(row.median_us, key=row.median_us.__getitem__)
        times = ", ".join(f"{name} {row.median_us[name]:g}" for name in order)
        rows.append([row.device, row.phase, row.bucket, str(len(row.points)), times])
    head = ["device", "phase", "bucket", "points", "fastest first, us (geometric mean)"]
    out = stdout()
    out.print(table("", head, rows))
    for device, phase in dict.fromkeys((r.device, r.phase) for r in outcome.tuning.rows):
        overall = ", ".join(order_of(outcome.tuning, device, phase))
        out.print(f"{phase} on {device}, over all rows: {overall}", soft_wrap=True)
    text = f"{outcome.measured} points measured in {outcome.seconds:.0f} s, {outcome.known} known"
    if outcome.left:
        text += f", {outcome.left} left out by the budget: the same command goes on"
    out.print(text, soft_wrap=True)
    if outcome.dropped:
        stderr().print(
            f"{outcome.dropped} rows of other versions were dropped", style="yellow", soft_wrap=True
        )
    out.print(f"auto follows it with {VARIABLE}={path}, or tuning_file in a configuration",
              soft_wrap=True)  # fmt: skip


__all__ = ["CLS", "NAME", "command"]
