"""Time eager calls by the clock on the wall: on a GPU host work included, on a CPU all there is."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from .graph_timer import LEAST_ROUNDS, Times, Variant

Key = TypeVar("Key", bound=Hashable)

#: A sample is so many calls that reading the clock does not matter.
SAMPLE_S = 1e-3
MOST_CALLS = 50


def sync_of(device: torch.device) -> Callable[[], None]:
    """What waits for a device's work; on a CPU there is nothing to wait for."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """On a CPU compute in one thread, so that figures do not depend on what else runs there."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure_eager(
    variants: list[Variant],
    copies: int,
    device: torch.device,
    rounds: int = 24,
    limit_s: float | None = None,
) -> dict[str, Times]:
    """Call the variants in turn, forward and backward, and return medians.

    A sample waits for the device before and after, so it holds host time where the device does not
    hide it. The calls of a sample rotate over the copies of the inputs.

    Args:
        variants: What to call.
        copies: Copies of the inputs.
        device: Where they run.
        rounds: Samples of each; on a GPU the first is not counted.
        limit_s: Stop after so many seconds, but not before four rounds.
    """
    sync = sync_of(device)
    calls = {v.name: _calls_per_sample(v, sync, copies) for v in variants}
    samples: dict[str, list[float]] = {v.name: [] for v in variants}
    turns = dict.fromkeys(samples, 0)
    begin = time.monotonic()
    for turn in range(max(rounds, 1)):
        if limit_s is not None and turn >= LEAST_ROUNDS and time.monotonic() - begin > limit_s:
            break
        for v in variants if turn % 2 == 0 else variants[::-1]:
            count, at = calls[v.name], turns[v.name]
            sync()
            start = time.perf_counter()
            for i in range(at, at + count):
                v.call(i % copies)
            sync()
            samples[v.name].append((time.perf_counter() - start) / count * 1e6)
            turns[v.name] = at + count
    skip = 1 if device.type == "cuda" and rounds > 1 else 0
    return {name: Times.of(times[skip:]) for name, times in samples.items()}


def _calls_per_sample(variant: Variant, sync: Callable[[], None], copies: int) -> int:
    variant.call(0)
    sync()
    start = time.perf_counter()
    variant.call(copies - 1)
    sync()
    once = time.perf_counter() - start
    return max(1, min(MOST_CALLS, int(SAMPLE_S / max(once, 1e-9))))


def measure_host(
    work: Mapping[Key, Callable[[], Any]],
    device: torch.device,
    samples: int = 40,
    calls: int = 20,
) -> dict[Key, Times]:
    """Host time of calls that are queued and not waited for; all interleaved.

    Args:
        work: Calls by any key.
        device: Waited for between samples, outside of the timed part.
        samples: How many.
        calls: Calls of a sample.
    """
    sync = sync_of(device)
    found: dict[Key, list[float]] = {name: [] for name in work}
    for call in work.values():
        call()
    for _ in range(samples):
        for name, call in work.items():
            sync()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            found[name].append((time.perf_counter() - start) / calls * 1e6)
    sync()
    return {name: Times.of(times) for name, times in found.items()}


__all__ = ["measure_eager", "measure_host", "one_thread", "sync_of"]
