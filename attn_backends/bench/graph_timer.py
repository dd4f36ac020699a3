"""Time variants of the same work against each other: cold L2, CUDA graphs, interleaved."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

#: Bytes that one graph replay must touch, so that no input is found in L2: five times 60 MB.
COLD_BYTES = 5 * 60 * 2**20
#: Rounds that no limit of time takes away.
LEAST_ROUNDS = 4


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
    """Microseconds per call: the median of the samples, and how far they spread.

    Attributes:
        median_us: Median.
        p20_us: 20th percentile.
        p25_us: First quartile.
        p75_us: Third quartile.
        p80_us: 80th percentile.
        samples: How many there were.
    """

    median_us: float
    p20_us: float
    p25_us: float
    p75_us: float
    p80_us: float
    samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Times:
        """Sum up samples, in any order."""
        times, n = sorted(samples), len(samples)
        median = statistics.median(times)
        return cls(median, times[n // 5], times[n // 4], times[3 * n // 4], times[4 * n // 5], n)

    def row(self, digits: int = 2) -> dict[str, float]:
        """The fields of a results file."""
        names = ("median_us", "p20_us", "p25_us", "p75_us", "p80_us")
        return {**{n: round(getattr(self, n), digits) for n in names}, "samples": self.samples}


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


def measure(
    variants: list[Variant], rounds: int = 24, limit_s: float | None = None
) -> dict[str, Times]:
    """Replay the captured variants in turn, forward and backward, and return medians.

    Args:
        variants: Those without a graph are left out.
        rounds: Replays of each; the first of them is not counted.
        limit_s: Stop after so many seconds, but not before four rounds.
    """
    ready = [v for v in variants if v.graph is not None]
    samples: dict[str, list[float]] = {v.name: [] for v in ready}
    for v in ready:
        v.graph.replay()
    torch.cuda.synchronize()
    begin = time.monotonic()
    for turn in range(rounds):
        if limit_s is not None and turn >= LEAST_ROUNDS and time.monotonic() - begin > limit_s:
            break
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
    return {name: Times.of(times[1:]) for name, times in samples.items()}


__all__ = ["COLD_BYTES", "LEAST_ROUNDS", "Times", "Variant", "capture", "copies_for", "measure"]
