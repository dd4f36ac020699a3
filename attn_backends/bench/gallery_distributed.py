"""What the picture of context parallelism shows: times measured, and efficiencies modelled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..distributed.cost import Cost, decode_cost, ring_cost
from .distributed_cost import decode_pieces, ring_pieces

TEXT = (
    "Left, measured: the time of all GPUs as a share of one GPU's, cut into what compute alone "
    "takes and what the exchange adds; the line is what perfect scaling would take, and the figure "
    "the efficiency. Right: the model of "
    "[cost](../context-parallelism.md#a-model-of-cost-for-more-devices), between its slowest and "
    "its fastest exchange, with the measured points."
)
_NAMES = {"ring-prefill": "prefill", "cp-decode": "decode"}


@dataclass(frozen=True)
class Bar:
    """One measured case.

    Attributes:
        label: The case in a few words.
        gpus: How many.
        compute: Compute alone, as a share of the time of one GPU.
        whole: All of it, likewise.
        efficiency: Of 1.
    """

    label: str
    gpus: int
    compute: float
    whole: float
    efficiency: float


@dataclass(frozen=True)
class Band:
    """Efficiency that the model gives.

    Attributes:
        label: What is done.
        gpus: Numbers of GPUs.
        low: With the slowest exchange, by number.
        high: With the fastest.
        measured: Points ``(gpus, efficiency)`` that were measured.
    """

    label: str
    gpus: tuple[int, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    measured: tuple[tuple[int, float], ...]


def holds(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether rows are of the benchmark of context parallelism."""
    return any(isinstance(r, dict) and r.get("bench") in _NAMES for r in rows)


def bars(rows: Sequence[dict[str, Any]]) -> list[Bar]:
    """Every case that was right."""
    found = []
    for whole in _wholes(rows):
        case = whole["case"]
        alike = {
            r["backend"]: r["median_us"]
            for r in rows
            if (r["bench"], r.get("case"), r["mode"]) == (whole["bench"], case, whole["mode"])
        }
        one = next(t for name, t in alike.items() if name.endswith("1 GPU"))
        compute = next(t for name, t in alike.items() if name.endswith("compute alone"))
        what = _NAMES[whole["bench"]]
        label = f"{what}, {case['batch']} x {_short(case['kv_len'])} keys, {whole['mode']}"
        share = whole["median_us"] / one
        found.append(
            Bar(label, whole["gpus"], min(compute / one, share), share, whole["efficiency"])
        )
    return found


def bands(rows: Sequence[dict[str, Any]]) -> list[Band]:
    """Prefill and decode as the model has them."""
    listed = list(rows)
    rings = [p for mode in ("eager", "graph") if (p := ring_pieces(listed, mode))]
    states = decode_pieces(listed)
    gpus = tuple(sorted(states.compute_us))
    ring = [[ring_cost(p, n) for p in rings] for n in gpus]
    decode = [[decode_cost(states, n, how) for how in ("ring", "at once")] for n in gpus]
    modes = {"ring-prefill": "eager", "cp-decode": "graph"}
    return [
        _band(_NAMES[bench], gpus, costs, [
            (r["gpus"], r["efficiency"])
            for r in _wholes(rows)
            if (r["bench"], r["mode"], r["case"]["batch"]) == (bench, modes[bench], 1)
        ])
        for bench, costs in (("ring-prefill", ring), ("cp-decode", decode))
    ]  # fmt: skip


def _band(
    label: str,
    gpus: tuple[int, ...],
    costs: Sequence[Sequence[Cost]],
    measured: Sequence[tuple[int, float]],
) -> Band:
    low = tuple(min(c.efficiency for c in each) for each in costs)
    high = tuple(max(c.efficiency for c in each) for each in costs)
    return Band(label, gpus, low, high, tuple(measured))


def _wholes(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [r for r in rows if "efficiency" in r and r.get("right")]


def _short(keys: int) -> str:
    for size, letter in ((1 << 20, "M"), (1 << 10, "k")):
        if keys >= size and keys % size == 0:
            return f"{keys // size}{letter}"
    return str(keys)


__all__ = ["TEXT", "Band", "Bar", "bands", "bars", "holds"]
