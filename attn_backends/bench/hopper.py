"""Check and time the Hopper prefill on one GPU: ``python -m attn_backends.bench.hopper``.

``--check`` runs the cases of ``hopper_check``, each group in a process with a time limit, since a
wrong barrier hangs instead of failing. ``--bench`` first compiles every variant and compares it
with the plain kernel, then times the right ones beside other libraries, and says which aims are
met. ``--host`` times the host alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ..triton_native import hopper_launch
from . import hopper_processes as processes
from .hopper_points import ALL_SETS, PROCESSES, SETS
from .report import meta, write

_PLAIN = "HOPPER_BENCH_PLAIN_LAUNCH"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {processes.MODULE}", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--bench", action="store_true")
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--groups", nargs="*", help="check only these groups")
    parser.add_argument("--sets", nargs="*", default=list(SETS), choices=ALL_SETS)
    parser.add_argument("--only", nargs="*", help="measure only these variants, as `chosen`")
    parser.add_argument("--rounds", type=int, default=14)
    parser.add_argument("--jobs", type=int, default=8, help="groups of checks at a time")
    parser.add_argument("--limit", type=float, default=75.0, help="seconds a process may take")
    parser.add_argument("--plain-launch", action="store_true", help="launch through Triton only")
    parser.add_argument("--json", type=Path)
    for name in ("--group", "--share", "--measure", "--bad"):  # what child processes are told
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--skip", nargs="*", default=[], help=argparse.SUPPRESS)
    return parser


def _measure(args: argparse.Namespace) -> None:
    """Load, wait for the turn, then measure sets; the file is rewritten after every point."""
    from .hopper_timing import measure_sets

    for name in ("flash_attn_interface", "flashinfer"):
        try:
            __import__(name)
        except Exception as error:  # its absence is reported at the points that want it
            print(f"{name}: {type(error).__name__}", flush=True)
    gc.freeze()  # each capture of a graph collects garbage: not among all that was imported
    if not sys.stdin.readline():  # whoever started this has ended
        return
    result: dict[str, Any] = {"rows": [], "gates": []}
    only = set(args.only) if args.only else None
    bad = set(json.loads(Path(args.bad).read_text()))
    for rows, gates in measure_sets(args.sets, args.rounds, only, bad):
        result["rows"] += rows
        result["gates"] += gates
        write(args.measure, result)


def _is_child(args: argparse.Namespace) -> bool:
    """Do what a child process was started for, if this is one."""
    if args.group:
        from .hopper_check import run_group

        run_group(args.group)
    elif args.share:
        from .hopper_timing import check_share

        check_share(args.sets, set(args.only or ()) or None, set(args.skip), args.share)
    elif args.measure:
        _measure(args)
    else:
        return False
    return True


def _bench(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Fill in variants, rows and aims; the file is rewritten as they come."""
    groups = [[s for s in group if s in args.sets] for group in PROCESSES]
    arguments = ["--rounds", str(args.rounds)]
    arguments += ["--only", *args.only] if args.only else []
    others = result["rows"]

    def save() -> None:
        found = measuring.found()
        result.update(rows=others + found["rows"], gates=found["gates"], processes=measuring.ends)
        if args.json:
            write(args.json, result)

    with tempfile.TemporaryDirectory() as folder:
        measuring = processes.Measuring([g for g in groups if g], arguments, Path(folder))
        try:
            rows = processes.check_variants(args.sets, args.only or [], 2 * args.jobs, args.limit)
            result["variants"] = rows
            bad = [x["kernel"] for x in rows if x["status"] != "right"]
            measuring.run(bad, args.limit, save)
        finally:
            measuring.stop()
            save()
    gates = result["gates"]
    print(f"aims: {sum(g['met'] is True for g in gates)} of {len(gates)} met; the others:")
    for g in gates:
        if not g["met"]:
            got = f"{g['ratio']} ({g['p25']}..{g['p75']})" if "ratio" in g else g["why"]
            print(f"    {g['point']} / {g['peer']}: {got}, asked {g['asked']}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line asks for; returns 1 if a check did not pass."""
    args = _parser().parse_args(arguments)
    if args.plain_launch or os.environ.get(_PLAIN):
        os.environ[_PLAIN] = "1"  # for the processes that this one starts
        hopper_launch.ENABLED = False
    if _is_child(args):
        return 0
    # So that a limit of time from outside ends in a file as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    begin = time.monotonic()
    result: dict[str, Any] = {"meta": meta(processes.MODULE), "checks": [], "rows": []}
    if args.check:
        from .hopper_cases import groups

        names = args.groups or list(groups())
        result["checks"] = processes.run_checks(names, args.limit, args.jobs)
    failed = [x for x in result["checks"] if x["status"] != "passed"]
    if args.check:
        print(f"checks: {len(result['checks']) - len(failed)} passed, {len(failed)} not")
    if args.host:
        from .hopper_host import measure_host

        result["rows"] += measure_host()
    if args.bench:
        _bench(args, result)
    result["seconds"] = round(time.monotonic() - begin, 1)
    print(f"{result['seconds']} s", flush=True)
    if args.json:
        write(args.json, result)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
