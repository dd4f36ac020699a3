"""Time the Hopper prefill and its peers: cold L2, CUDA graphs, replays interleaved, medians.

A wrong barrier hangs instead of failing: every wait here has a limit, after which the process says
so and ends, so that what was measured before is kept.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import torch

from . import hopper_gates
from .hopper_inputs import PointInputs
from .hopper_peers import peers
from .hopper_points import Point, points, variants

#: Largest difference between two right answers in bfloat16 on these inputs, and of their LSEs.
MOST_ERROR, MOST_LSE_ERROR = 0.05, 0.01


def finish(what: str, seconds: float = 15.0) -> None:
    """Wait for the GPU; if it hangs, say so as a line of JSON and end this process."""
    event = torch.cuda.Event()
    event.record()
    end = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() > end:
            print(json.dumps({"status": "hung", "what": what}), flush=True)
            os._exit(3)
        time.sleep(0.0005)


# ----------------------------------------------------------------------------- variants


def kinds(names: list[str], only: set[str] | None = None) -> dict[str, tuple[Point, Any]]:
    """Every compiled kernel that the sets need, by name, with a point that needs it."""
    found: dict[str, tuple[Point, Any]] = {}
    for point in (p for name in names for p in points(name)):
        for name, variant in variants(point).items():
            if only is None or name in only:
                found.setdefault(key_of(point, variant), (point, variant))
    return found


def key_of(point: Point, variant: Any) -> str:
    """What a kernel is compiled for, as text."""
    same = replace(variant, head_group=0)  # a run-time argument
    changed = {k: v for k, v in asdict(same).items() if v != getattr(type(variant)(), k)}
    dims = f"d{point.head_dim}/{point.dv}"
    return f"{dims} {'causal' if point.causal else 'full'} p{point.page_size or 0} {changed}"


def small(point: Point) -> Point:
    """A small call of the same kind, with lengths that end inside tiles and pages."""
    heads = (point.heads[0] // point.heads[1] * 2, 2)
    return Point("small", 3, 333, 1201, heads, point.head_dim, point.causal, point.page_size,
                 head_dim_v=point.head_dim_v)  # fmt: skip


def check_variant(point: Point, variant: Any) -> dict[str, Any]:
    """Compile a variant and compare it with the plain kernel on a small call."""
    x = PointInputs(small(point), copies=1)
    x.o.fill_(float("nan"))
    x.lse.fill_(float("nan"))
    call = x.call(variant)
    for _ in range(3):
        call(0)
        finish("launch")
    want = x.plain()(0)
    error = (x.o.float() - want.o.float()).abs().max().item()
    lse_error = (x.lse - want.lse).abs().max().item()
    right = error <= MOST_ERROR and lse_error <= MOST_LSE_ERROR
    return {"status": "right" if right else "wrong", "max_err": error, "lse_err": lse_error}


def check_share(names: list[str], only: set[str] | None, skip: set[str], share: str) -> None:
    """Check one share of the kernels; one line of JSON before and after each."""
    index, count = map(int, share.split("/"))
    for key, (point, variant) in list(kinds(names, only).items())[index::count]:
        if key in skip:
            continue
        print(json.dumps({"status": "started", "kernel": key}), flush=True)
        start = time.monotonic()
        try:
            row = check_variant(point, variant)
        except Exception as error:
            row = {"status": "failed", "error": f"{type(error).__name__}: {error}"[-300:]}
        row |= {"kernel": key, "seconds": round(time.monotonic() - start, 1)}
        print(json.dumps(row), flush=True)


# ----------------------------------------------------------------------------- times


def time_calls(
    calls: dict[str, Callable[[int], Any]], copies: int, rounds: int
) -> dict[str, list[float]]:
    """Microseconds per call, in the order of the rounds; turns run forward and backward."""
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]] = {}
    for name, call in calls.items():
        passes = -(-2 // copies)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for _ in range(passes):
                for i in range(copies):
                    call(i)
        graphs[name] = graph, passes * copies
        graph.replay()
    finish("first replays")
    found: dict[str, list[float]] = {name: [] for name in calls}
    first = next(iter(graphs.values()))[0]
    for turn in range(rounds):
        marks = []
        # The GPU was idle, and the first to run would find its clocks low.
        first.replay()
        for name in list(graphs)[:: 1 if turn % 2 == 0 else -1]:
            graph, count = graphs[name]
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            a.record()
            graph.replay()
            b.record()
            marks.append((name, a, b, count))
        finish("replays")
        for name, a, b, count in marks:
            found[name].append(a.elapsed_time(b) * 1e3 / count)
    return found


def _first(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, (tuple, list)) else result


#: Whose answer the others are compared with, if it is there; else the plain kernel's.
_ORACLES = (hopper_gates.FA3, hopper_gates.PAGED, hopper_gates.VARLEN, *hopper_gates.FLASHINFER)


def _errors(x: PointInputs, calls: dict[str, Callable[[int], Any]]) -> dict[str, float]:
    """Largest difference of each call from an independent answer, on copy 0."""

    def answer(call: Callable[[int], Any]) -> torch.Tensor:
        x.o.fill_(float("nan"))
        result = call(0)
        got = x.o if result is None else _first(result)
        return got.reshape(x.o.shape).float()

    oracle = next((calls[name] for name in _ORACLES if name in calls), None)
    want = answer(oracle if oracle is not None else x.plain()).clone()
    found = {name: (answer(call) - want).abs().max().item() for name, call in calls.items()}
    return {name: error if error == error else float("inf") for name, error in found.items()}


def measure_point(
    point: Point, rounds: int, only: set[str] | None, bad: set[str]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of a point and its aims.

    Args:
        point: What to measure.
        rounds: Replays of each call.
        only: Names of variants; None is all.
        bad: Kernels (see ``key_of``) that are wrong or hang.
    """
    x = PointInputs(point)
    calls: dict[str, Callable[[int], Any]] = {}
    shown: dict[str, Any] = {}
    for name, variant in variants(point).items():
        if key_of(point, variant) not in bad and (only is None or name in only):
            calls[name], shown[name] = x.call(variant), asdict(variant)
    found, absent = peers(x)
    calls |= found
    for name in list(calls):
        try:
            calls[name](0)
            finish(f"{point.name}: {name}")
        except Exception as error:  # a foreign library may raise anything
            absent[name] = f"{type(error).__name__}: {str(error)[:160]}"
            del calls[name]
    errors = _errors(x, calls)
    times = time_calls(calls, x.copies, rounds)
    wrong = {name for name, error in errors.items() if error > MOST_ERROR}
    rows = []
    for name, samples in times.items():
        row: dict[str, Any] = {
            "bench": "hopper_prefill", "case": asdict(point), "backend": name,
            "mode": "graph_cold", "max_err": errors[name],
        }  # fmt: skip
        if name in shown:
            row["variant"] = shown[name]
        if name not in wrong:
            ordered, n = sorted(samples), len(samples)
            median = statistics.median(ordered)
            row |= {
                "median_us": round(median, 2), "p25_us": round(ordered[n // 4], 2),
                "p75_us": round(ordered[3 * n // 4], 2), "samples": n,
                "tflops": round(x.flops / median / 1e6, 1),
            }  # fmt: skip
            if "chosen" in times and name != "chosen":
                row["chosen_is"] = hopper_gates.ratio(times["chosen"], samples)["ratio"]
        rows.append(row)
    text = "  ".join(f"{r['backend']} {r.get('tflops', 0):.0f}" for r in rows)
    more = f"  WRONG: {sorted(wrong)}" if wrong else ""
    print(f"{point.name:24s} {text}{more}", flush=True)
    for name, why in absent.items():
        rows.append({"bench": "hopper_prefill", "case": asdict(point), "backend": name,
                     "refused": why})  # fmt: skip
        print(f"    {name}: {why[:110]}", flush=True)
    return rows, hopper_gates.judge(point, times, wrong)


def measure_sets(
    names: list[str], rounds: int, only: set[str] | None, bad: set[str]
) -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Measure every point of the sets; a point that fails does not end the run."""
    for name in names:
        for point in points(name):
            try:
                yield measure_point(point, rounds, only, bad)
            except Exception as error:
                print(f"{point.name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                row = {"bench": "hopper_prefill", "case": asdict(point), "backend": "chosen",
                       "refused": f"{type(error).__name__}: {str(error)[:200]}"}  # fmt: skip
                yield [row], hopper_gates.judge(point, {}, ())
            torch.cuda.empty_cache()
            sys.stdout.flush()


__all__ = ["check_share", "finish", "key_of", "kinds", "measure_sets", "small"]
