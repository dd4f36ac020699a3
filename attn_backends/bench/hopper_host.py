"""Host time of the Hopper prefill: what a run costs the CPU, by way of launching it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from .hopper_inputs import PointInputs
from .hopper_points import Point, is_shape

_ROUNDS = 300
_LAYERS = 8


def _median_us(call: Callable[[int], Any]) -> tuple[float, float]:
    """Median and third quartile of one call, with the GPU idle before each."""
    times = []
    for i in range(_ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call(i % _LAYERS)
        times.append((time.perf_counter() - start) * 1e6)
    times.sort()
    return statistics.median(times), times[3 * len(times) // 4]


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

    rows = []
    for size in (None, 16):
        point = Point(f"host p{size or 0}", 1, 512, 512, page_size=size)
        x = PointInputs(point, copies=_LAYERS)
        ways = {
            "hopper_prefill": x.call(choose_variant(**is_shape(point))),
            "run": _backend_run(x, False), "run with out": _backend_run(x, True),
        }  # fmt: skip
        for name, call in ways.items():
            for i in range(3 * _LAYERS):
                call(i % _LAYERS)
            median, upper = _median_us(call)
            rows.append({
                "bench": "hopper_prefill", "case": {"name": point.name}, "backend": name,
                "mode": "host", "median_us": round(median, 2), "p75_us": round(upper, 2),
                "samples": _ROUNDS,
            })  # fmt: skip
            print(f"{point.name} {name}: {median:.1f} us", flush=True)
    return rows


__all__ = ["measure_host"]
