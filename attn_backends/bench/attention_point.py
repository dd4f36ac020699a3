"""One point of attention: what is measured beside the backends, and the measuring."""

from __future__ import annotations

from .attention_cases import Inputs
from .attention_peers import peers
from .gate import check, limit_of, reference
from .runner import GRAPH, Found, Way, measure_point


def peer_ways(x: Inputs, only: set[str] | None = None) -> dict[str, Way]:
    """Other libraries that a case can be put to; each says why it is absent when it is built."""
    if x.device.type != "cuda":
        return {}
    return {name: Way(make) for name, make in peers(x).items() if only is None or name in only}


def measure_case(
    x: Inputs,
    ways: dict[str, Way],
    *,
    modes: tuple[str, ...] = (GRAPH,),
    rounds: int = 24,
    limit_s: float | None = None,
) -> Found:
    """Check and time ways to do a case, all in turn."""
    want = reference(x)
    limit = limit_of(want.o, x.spec.dtype, x.spec.kv)
    return measure_point(
        x.point(), ways, lambda call: check(call, want, limit),
        modes=modes, rounds=rounds, limit_s=limit_s,
    )  # fmt: skip


__all__ = ["measure_case", "peer_ways"]
