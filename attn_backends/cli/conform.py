"""``attn-backends conform``: hold a backend, anybody's, to the conformance suite."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..conformance import Report, matrix, read_expected_failures, run_conformance
from ..conformance.picture import draw
from ..conformance.report import Row
from ..conformance.target import read_options, resolve
from ..errors import InvalidInputError
from .console import EXIT_BAD_ANSWER, JsonFlag, guarded, print_json, stdout, table

NAME = "conform"


@guarded
def command(
    backends: Annotated[
        list[str], typer.Argument(metavar="BACKEND...", help="A name, or module:Class.")
    ],
    level: Annotated[
        str, typer.Option(help="smoke: about a minute. full: the whole grid.")
    ] = "smoke",
    device: Annotated[str, typer.Option(help="Where the calls run.")] = "cpu",
    requirement: Annotated[
        list[str] | None, typer.Option(help="Only this requirement; may be repeated.")
    ] = None,
    xfail: Annotated[
        Path | None, typer.Option(help="Known failures, a line each: backend rule/case # reason.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="An option of the backend.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes, which share the device.")] = 1,
    write: Annotated[
        Path | None, typer.Option(help="Folder for conformance-<backend>.json.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw backends by requirements: png, svg.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a report page.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Hold backends to the conformance suite; exit 1 unless all of them conform.

    Cases outside a backend's declaration are called too, and must be refused with its reasons.
    """
    if markdown and as_json:
        raise InvalidInputError.of("--markdown, --json", "both", "one of them")
    if os.getcwd() not in sys.path:  # a script has its own folder there, not the user's
        sys.path.append(os.getcwd())
    reports = []
    for name in backends:
        known = read_expected_failures(xfail, resolve(name).name) if xfail is not None else ()
        reports.append(
            run_conformance(
                name,
                level,
                device=device,
                options=read_options(resolve(name), option or ()),
                jobs=jobs,
                requirements=requirement,
                expected_failures=known,
                progress=_progress if sys.stderr.isatty() else None,
            )
        )
        if write is not None:
            reports[-1].write(write)
    if plot is not None:
        draw([report.to_json() for report in reports], plot)
    if as_json:
        print_json({"reports": [report.to_json() for report in reports]})
    elif markdown:
        print("\n".join(report.to_markdown() for report in reports))
        if len(reports) > 1:
            print(matrix(report.to_json() for report in reports))
    else:
        _show(reports)
    if not all(report.ok for report in reports):
        raise typer.Exit(EXIT_BAD_ANSWER)


def _show(reports: list[Report]) -> None:
    out = stdout()
    for report in reports:
        rows = [
            [name, *(str(n or "") for n in report.counts(name).values())]
            for name in report.requirements
        ]
        title = f"{report.backend} on {report.device}, {report.level}"
        head = ["requirement", "passed", "refused", "failed", "expected failures"]
        out.print(table(title, head, rows))
        verdict = "PASS" if report.ok else "FAIL"
        out.print(f"{verdict}: {report.summary()}", soft_wrap=True)


def _progress(done: int, total: int, row: Row) -> None:
    end = "\n" if done == total else ""
    print(f"\r{done}/{total} {row.requirement:<20}", end=end, file=sys.stderr, flush=True)


__all__ = ["NAME", "command"]
