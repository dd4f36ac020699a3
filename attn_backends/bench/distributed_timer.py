"""Time the same work on all ranks in step: a sample is the time of the slowest rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from .graph_timer import Times

#: By name: what this rank runs, or None where it only waits for the others.
Work = Mapping[str, "Callable[[], Any] | None"]


class Timer:
    """Times variants in turn, on all ranks at once.

    Args:
        device: This rank's device.
        world: Ranks.
    """

    def __init__(self, device: torch.device, world: int) -> None:
        self.device = device
        self.world = world
        self.token = torch.zeros(1, device=device)

    def meet(self) -> None:
        """Wait until every rank is here."""
        dist.all_reduce(self.token)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def eager(self, variants: Work, rounds: int, calls: int = 1) -> dict[str, Times]:
        """Microseconds per call as Python issues them; a sample is ``calls`` calls in a row."""
        for call in variants.values():
            if call is not None:
                call()
            self.meet()
        samples: dict[str, list[float]] = {name: [] for name in variants}
        order = list(variants)
        for turn in range(rounds + 1):
            for name in order if turn % 2 == 0 else order[::-1]:
                samples[name].append(self._sample(variants[name], calls))
        return self._slowest(samples)

    def graphs(self, variants: Work, rounds: int, calls: int = 1) -> dict[str, Times]:
        """Microseconds per call inside a captured graph of ``calls`` calls."""
        graphs: dict[str, Callable[[], Any] | None] = {}
        for name, call in variants.items():
            graphs[name] = None if call is None else capture(call, calls, self.device).replay
            self.meet()
        times = self.eager(graphs, rounds)
        return {name: _shared(t, calls) for name, t in times.items()}

    def alone(self, call: Callable[[], Any], rounds: int, graph: int = 0) -> Times:
        """Time on this rank only, without the others; captured ``graph`` times if given."""
        if graph:
            call = capture(call, graph, self.device).replay
        call()
        samples = [self._timed(call, 1) for _ in range(rounds + 1)]
        return _shared(Times.of(samples[1:]), max(graph, 1))

    def _sample(self, call: Callable[[], Any] | None, calls: int) -> float:
        # Ranks leave the reduction together; what follows is queued behind it.
        dist.all_reduce(self.token)
        if call is None:
            return 0.0
        return self._timed(call, calls)

    def _timed(self, call: Callable[[], Any], calls: int) -> float:
        if self.device.type != "cuda":
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            return (time.perf_counter() - begin) / calls * 1e6
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize(self.device)
        return start.elapsed_time(end) * 1e3 / calls

    def _slowest(self, samples: dict[str, list[float]]) -> dict[str, Times]:
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, samples)
        return {
            name: Times.of([max(each) for each in zip(*(s[name][1:] for s in everyone))])
            for name in samples
        }


def _shared(times: Times, calls: int) -> Times:
    """Times of one call from those of several."""
    each = (times.median_us, times.p20_us, times.p25_us, times.p75_us, times.p80_us)
    return Times(*(t / calls for t in each), times.samples)


def capture(call: Callable[[], Any], calls: int, device: torch.device) -> torch.cuda.CUDAGraph:
    """A graph of several calls, after a warm-up on the stream that captures."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    # The thread that watches NCCL asks for events all the time; that must not end the capture.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(calls):
            call()
    return graph


__all__ = ["Timer", "Work", "capture"]
