"""Host time of the Hopper prefill: what a run costs the CPU, by way of launching it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from .hopper_inputs import PointInputs
from .hopper_points import Point, is_shape

_BLOCKS, _CALLS = 10, 30
_LAYERS = 8


def _times_us(calls: list[Callable[[int], Any]]) -> list[list[float]]:
    """Microseconds of each call, with the GPU idle before each.

    Blocks of the same call, as the layers of a model make them, take turns: whoever came last
    would find another clock.
    """
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(_BLOCKS):
        for found, call in zip(times, calls):
            for i in range(_CALLS):
                torch.cuda.synchronize()
                start = time.perf_counter()
                call(i % _LAYERS)
                found.append((time.perf_counter() - start) * 1e6)
    return times


def _backend_run(x: PointInputs, given: bool) -> Callable[[int], Any]:
    """Runs of the backend on other tensors each time, as the layers of a model are."""
    from ..batch import Batch
    from ..spec import AttentionSpec
    from ..triton_native.backend import TritonBackend, TritonOptions

    point = x.point
    spec = AttentionSpec(
        *point.heads, point.head_dim, dtype=torch.bfloat16, page_size=point.page_size
    )
    backend = TritonBackend(spec, options=TritonOptions(hopper=True))
    batch = Batch.from_lengths(x.q_lens, x.kv_lens, page_table=x.table, device=x.o.device)
    plan = backend.plan(batch)
    if given:
        out = x.o, x.lse
        return lambda i: backend.run(x.q[i], x.k[i], x.v[i], plan, out=out)
    return lambda i: backend.run(x.q[i], x.k[i], x.v[i], plan)


def measure_host() -> list[dict[str, Any]]:
    """Rows of host microseconds: the bare launcher, and runs through the backend."""
    from ..triton_native.hopper_variant import choose_variant

    rows, ways = [], []
    for size in (None, 16):
        point = Point(f"host p{size or 0}", 1, 512, 512, page_size=size)
        x = PointInputs(point, copies=_LAYERS)
        ways += [
            (point.name, "hopper_prefill", x.call(choose_variant(**is_shape(point)))),
            (point.name, "run", _backend_run(x, False)),
            (point.name, "run with out", _backend_run(x, True)),
        ]
    calls = [call for _, _, call in ways]
    for call in calls:
        for i in range(3 * _LAYERS):
            call(i % _LAYERS)
    for (point_name, name, _), times in zip(ways, _times_us(calls)):
        ordered = sorted(times)
        median, upper = statistics.median(ordered), ordered[3 * len(ordered) // 4]
        rows.append({
            "bench": "hopper_prefill", "case": {"name": point_name}, "backend": name,
            "mode": "host", "median_us": round(median, 2), "p75_us": round(upper, 2),
            "samples": len(times),
        })  # fmt: skip
        print(f"{point_name} {name}: {median:.1f} us", flush=True)
    return rows


__all__ = ["measure_host"]
