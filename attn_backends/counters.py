"""What the library counted: choices and refusals always, plans and calls while asked to."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

_lock = threading.Lock()


@dataclass(frozen=True)
class Stats:
    """Counts since the start of the process, or since the last reset.

    Keys read ``triton.decode``: a backend, and the phase of the batch. Calls that a CUDA graph
    replays are not counted: only the host counts, when it records them.

    Attributes:
        calls: Runs that returned.
        plans: Plans that were made.
        updates: Plans that were refilled before a replay.
        plan_seconds: Host time of plans and updates.
        choices: Answers of ``select`` that were worked out; those from its cache are not counted.
        refusals: Choices, plans and runs that were refused, by backend; ``auto`` where none was
            left.
        mistakes: Plans and runs that raised InvalidInputError, by backend.
        fallbacks: Choices that gave another backend than the one asked for by name. The contract
            says there are none.
        counting: Whether plans and calls are counted now; if not, zeros mean nothing.
        seconds: How long the counts go back.
    """

    calls: Mapping[str, int]
    plans: Mapping[str, int]
    updates: Mapping[str, int]
    plan_seconds: Mapping[str, float]
    choices: Mapping[str, int]
    refusals: Mapping[str, int]
    mistakes: Mapping[str, int]
    fallbacks: int
    counting: bool
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """The counts as plain data, for a metrics exporter."""
        return {
            name: dict(value) if isinstance(value, Mapping) else value
            for name, value in vars(self).items()
        }


class Counters:
    """The counts of the process; every method may be called from any thread."""

    def __init__(self) -> None:
        self.counting = False
        self.clear()

    def clear(self) -> None:
        """Start from zero."""
        self._counts: dict[str, Counter[str]] = {
            name: Counter()
            for name in ("calls", "plans", "updates", "choices", "refusals", "mistakes")
        }
        self._seconds: Counter[str] = Counter()
        self._fallbacks = 0
        self._start = time.monotonic()

    def add(self, what: str, key: str, seconds: float = 0.0) -> None:
        """Count one event, and its host time if it is a plan's."""
        with _lock:
            self._counts[what][key] += 1
            if seconds:
                self._seconds[key] += seconds  # type: ignore[assignment]

    def chosen(self, name: str, phase: str, asked: str | None) -> None:
        """Count a choice, and whether it is what was asked for by name (None: left open)."""
        self.add("choices", f"{name}.{phase}")
        if asked is not None and asked != name:
            with _lock:
                self._fallbacks += 1

    def stats(self) -> Stats:
        """The counts as they are now."""
        with _lock:
            shown = {n: MappingProxyType(dict(c)) for n, c in self._counts.items()}
            return Stats(
                **shown,
                plan_seconds=MappingProxyType(dict(self._seconds)),
                fallbacks=self._fallbacks,
                counting=self.counting,
                seconds=time.monotonic() - self._start,
            )


#: The counts of this process.
COUNTERS = Counters()


def stats(*, reset: bool = False) -> Stats:
    """What was counted so far.

    Args:
        reset: Start from zero afterwards.

    Returns:
        The counts by backend and phase, and whether anything was counting.
    """
    found = COUNTERS.stats()
    if reset:
        with _lock:
            COUNTERS.clear()
    return found


__all__ = ["COUNTERS", "Counters", "Stats", "stats"]
