"""Measuring one point: every way to do the work is checked, then all are timed in turn."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .gate import Checked
from .graph_timer import Times, Variant, capture, measure
from .roofline import Gpu
from .wall_timer import measure_eager

Call = Callable[[int], Any]
Gate = Callable[[Call], Checked]
GRAPH, EAGER = "graph_cold", "eager"


def unchecked(call: Call) -> Checked:
    """The gate of what has no answer to check, such as a copy of bytes."""
    return Checked(0.0, 0.0, True)


@dataclass(frozen=True)
class Way:
    """One way to do the work.

    Attributes:
        make: Builds ``call(i)``, which does the work on copy i; what it prepares is not timed.
        for_graph: Builds a call for a CUDA graph, tried if that of ``make`` cannot be captured.
        gate: Compares this way with the reference, in place of the point's own gate.
        no_graph: Why it is not captured at all; empty if it may be tried.
    """

    make: Callable[[], Call]
    for_graph: Callable[[], Call] | None = None
    gate: Gate | None = None
    no_graph: str = ""


@dataclass(frozen=True)
class Point:
    """What is measured, and what it must move and compute at least.

    Attributes:
        bench: Name of the benchmark.
        case: The case as it stands in results files.
        label: The same in a few words.
        bytes: Least traffic.
        flops: Arithmetic.
        dtype: Dtype of the arithmetic, ``bf16`` and the like.
        copies: Copies of the inputs.
        device: Where it runs.
        gpu: Its peak rates; None if unknown.
    """

    bench: str
    case: Mapping[str, Any]
    label: str
    bytes: int
    flops: int
    dtype: str
    copies: int
    device: torch.device
    gpu: Gpu | None = None

    @property
    def floor_us(self) -> float | None:
        """Microseconds at the roofline; None without the peak rates."""
        if self.gpu is None or self.dtype not in self.gpu.tflops:
            return None
        moved = self.bytes / (self.gpu.bandwidth_tbs * 1e12)
        return max(moved, self.flops / self.gpu.peak(self.dtype)) * 1e6

    def row(self, backend: str, mode: str, times: Times, checked: Checked) -> dict[str, Any]:
        """A row of a results file."""
        seconds = times.median_us * 1e-6
        row = {
            **self.wrong(backend, mode, checked), **times.row(2 if times.median_us > 50 else 3),
            "tflops": _digits(self.flops / seconds / 1e12),
            "gbps": _digits(self.bytes / seconds / 1e9), "right": True,
        }  # fmt: skip
        if (floor := self.floor_us) is not None:
            row["floor_us"] = round(floor, 3)
            row["roofline_pct"] = round(100 * floor / times.median_us, 1)
        return row

    def wrong(self, backend: str, mode: str, checked: Checked) -> dict[str, Any]:
        """The row of a wrong answer: without any time."""
        row = {"bench": self.bench, "case": dict(self.case), "backend": backend, "mode": mode}
        if self.device.type != "cuda":
            row |= {"device": self.device.type, "clock": "wall"}
        return row | {"max_err": checked.error, "limit": checked.limit, "right": False}

    def refusal(self, backend: str, reason: str, mode: str | None = None) -> dict[str, Any]:
        """What stands in ``refused`` of a results file."""
        more = {} if mode is None else {"mode": mode}
        return {
            "bench": self.bench, "case": dict(self.case), "backend": backend, **more,
            "reason": reason,
        }  # fmt: skip


@dataclass
class Found:
    """Rows that were measured, and what could not be, with its reason."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    refused: list[dict[str, Any]] = field(default_factory=list)

    def add(self, other: Found) -> None:
        """Append another point's."""
        self.rows += other.rows
        self.refused += other.refused


def default_modes(device: torch.device) -> tuple[str, ...]:
    """CUDA graphs and eager calls on a GPU; eager calls elsewhere."""
    return (GRAPH, EAGER) if device.type == "cuda" else (EAGER,)


def measure_point(
    point: Point,
    ways: Mapping[str, Way],
    gate: Gate,
    *,
    modes: tuple[str, ...],
    rounds: int = 24,
    limit_s: float | None = None,
) -> Found:
    """Check every way, then time those that are right, interleaved.

    Args:
        point: What is measured.
        ways: By the name that results files have.
        gate: Compares a call with the reference.
        modes: ``graph_cold``, ``eager`` or both.
        rounds: Samples of each way.
        limit_s: Stop sampling a mode after so many seconds.

    Returns:
        A row per way and mode. A wrong answer has a row without times; a way that cannot be built,
        called or captured stands among the refused with its error.
    """
    found, ready, checks = Found(), [], {}
    for name, way in ways.items():
        try:
            call = way.make()
            checks[name] = (way.gate or gate)(call)
        except Exception as error:  # foreign code may raise anything
            found.refused.append(point.refusal(name, _said(error)))
            forget_error(point.device)
            continue
        if checks[name].right:
            ready.append(Variant(name, call))
        else:
            found.rows += [point.wrong(name, mode, checks[name]) for mode in modes]
    if GRAPH in modes:
        graphs = []
        for variant in ready:
            if why := ways[variant.name].no_graph:
                found.refused.append(point.refusal(variant.name, why, GRAPH))
                continue
            try:
                graphs.append(_captured(variant, ways[variant.name], gate, point.copies))
            except Exception as error:
                found.refused.append(point.refusal(variant.name, _said(error), GRAPH))
        for name, times in measure(graphs, rounds, limit_s).items():
            found.rows.append(point.row(name, GRAPH, times, checks[name]))
        del graphs
    if EAGER in modes and ready:
        timed = measure_eager(ready, point.copies, point.device, rounds, limit_s)
        found.rows += [point.row(name, EAGER, t, checks[name]) for name, t in timed.items()]
    return found


def _captured(variant: Variant, way: Way, gate: Gate, copies: int) -> Variant:
    """The variant with a graph of its own, planned for graphs if it must be."""
    try:
        own = Variant(variant.name, variant.call)
        capture(own, copies)
        return own
    except Exception:
        if way.for_graph is None:
            raise
        torch.cuda.synchronize()
    own = Variant(variant.name, way.for_graph())
    if not (way.gate or gate)(own.call).right:
        raise ValueError("planned for CUDA graphs, the answer is wrong")
    capture(own, copies)
    return own


def _digits(value: float) -> float:
    """Four digits, whatever the size."""
    return float(f"{value:.4g}")


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


def forget_error(device: torch.device) -> None:
    """Take away the error that a failed launch leaves, lest the next way reports it as its own."""
    if device.type == "cuda":
        with contextlib.suppress(Exception):
            torch.zeros(1, device=device)
            torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Give the memory of a GPU back between points."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


__all__ = ["EAGER", "GRAPH", "Call", "Found", "Gate", "Point", "Way", "default_modes"]
__all__ += ["forget_error", "measure_point", "release", "unchecked"]
