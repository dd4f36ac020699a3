"""Time variants of the same work against each other: cold L2, CUDA graphs, interleaved."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

#: Bytes that one graph replay must touch, so that no input is found in L2: five times 60 MB.
COLD_BYTES = 5 * 60 * 2**20


def copies_for(input_bytes: int, limit_bytes: int = 40 * 2**30) -> int:
    """How many copies of the inputs make a replay cold."""
    return max(1, min(-(-COLD_BYTES // max(input_bytes, 1)), limit_bytes // max(input_bytes, 1)))


@dataclass
class Variant:
    """One way to do the work; ``call(i)`` runs it on copy i and allocates nothing that matters."""

    name: str
    call: Callable[[int], object]
    graph: torch.cuda.CUDAGraph | None = None
    calls: int = 1


@dataclass(frozen=True)
class Times:
    """Microseconds per call: median, 20th and 80th percentile of the replays."""

    median_us: float
    p20_us: float
    p80_us: float


def capture(variant: Variant, copies: int, least: int = 4) -> None:
    """Capture one graph of calls over all copies, after a warm-up that compiles."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(min(copies, 3)):
            variant.call(i)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    passes = -(-least // copies)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(passes):
            for i in range(copies):
                variant.call(i)
    variant.graph, variant.calls = graph, passes * copies


def measure(variants: list[Variant], rounds: int = 24) -> dict[str, Times]:
    """Replay the captured variants in turn, forward and backward, and return medians."""
    ready = [v for v in variants if v.graph is not None]
    samples: dict[str, list[float]] = {v.name: [] for v in ready}
    for v in ready:
        v.graph.replay()
    torch.cuda.synchronize()
    for turn in range(rounds):
        marks = []
        for v in ready if turn % 2 == 0 else ready[::-1]:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            v.graph.replay()
            end.record()
            marks.append((v, start, end))
        torch.cuda.synchronize()
        for v, start, end in marks:
            samples[v.name].append(start.elapsed_time(end) * 1e3 / v.calls)
    result = {}
    for name, times in samples.items():
        times = sorted(times[1:])
        n = len(times)
        result[name] = Times(statistics.median(times), times[n // 5], times[(4 * n) // 5])
    return result


__all__ = ["COLD_BYTES", "Times", "Variant", "capture", "copies_for", "measure"]
