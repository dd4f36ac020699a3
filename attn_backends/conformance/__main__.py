"""``python -m attn_backends.conformance BACKEND...``: run the suite, print and write reports."""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from .checks import LEVELS, REQUIREMENTS
from .report import Report, Row, matrix
from .runner import read_expected_failures, run_conformance
from .target import read_options, resolve


def main(arguments: list[str] | None = None) -> int:
    """Run the suite on each backend; 0 if all conform."""
    parser = argparse.ArgumentParser(
        prog="python -m attn_backends.conformance", description=__doc__
    )
    parser.add_argument("backends", nargs="+", metavar="BACKEND", help="a name, or module:Class")
    parser.add_argument("--level", choices=LEVELS, default="smoke")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--requirement", action="append", choices=REQUIREMENTS)
    parser.add_argument("--xfail", metavar="FILE", help="lines: backend requirement/case # reason")
    parser.add_argument("--json", metavar="FOLDER", help="write conformance-<backend>.json here")
    parser.add_argument("--markdown", action="store_true", help="print Markdown, not a summary")
    parser.add_argument("--plot", metavar="FILE", help="draw backends by requirements: png, svg")
    parser.add_argument("--slowest", type=int, default=0, metavar="N", help="print N slowest cases")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="of the backend"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes")
    options = parser.parse_args(arguments)
    reports = []
    for name in options.backends:
        known = read_expected_failures(options.xfail, resolve(name).name) if options.xfail else ()
        report = run_conformance(
            name,
            options.level,
            device=options.device,
            options=read_options(resolve(name), options.option),
            requirements=options.requirement,
            expected_failures=known,
            progress=_progress if sys.stderr.isatty() else None,
            jobs=options.jobs,
        )
        reports.append(report)
        print(report.to_markdown() if options.markdown else report.summary(), flush=True)
        _print_slowest(report, options.slowest)
        if options.json:
            report.write(options.json)
    if len(reports) > 1:
        print(matrix(r.to_json() for r in reports))
    if options.plot:
        from .picture import draw

        draw([r.to_json() for r in reports], options.plot)
    return 0 if all(r.ok for r in reports) else 1


def _progress(done: int, total: int, row: Row) -> None:
    end = "\n" if done == total else ""
    print(f"\r{done}/{total} {row.requirement:<20}", end=end, file=sys.stderr, flush=True)


def _print_slowest(report: Report, count: int) -> None:
    if not count:
        return
    times: Counter[str] = Counter()
    for row in report.rows:
        times[row.requirement] += row.seconds  # type: ignore[assignment]
    print(f"  {report.seconds:.1f} s:", ", ".join(f"{n} {s:.1f}" for n, s in times.most_common(5)))
    for row in sorted(report.rows, key=lambda r: -r.seconds)[:count]:
        print(f"  {row.seconds:6.2f} s  {row.requirement}/{row.case} [{row.spec}]")


if __name__ == "__main__":
    sys.exit(main())
