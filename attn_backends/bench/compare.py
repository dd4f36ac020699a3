"""Comparing two results files: what became slower beyond the noise of its samples.

A row is slower if its median grew by more than the threshold **and** the quartiles of its samples
lie apart: the new first quartile above the old third. A median that moves inside the bands of both
runs is noise, however large the ratio.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InvalidInputError

SLOWER, FASTER, SAME = "slower", "faster", "same"
WRONG, MISSING, NEW = "wrong", "missing", "new"
#: Verdicts that fail a comparison.
BAD = (SLOWER, WRONG, MISSING)


@dataclass(frozen=True)
class Change:
    """What became of one row.

    Attributes:
        bench: Name of the benchmark.
        case: The case, in the words of the file.
        backend: Backend or peer.
        mode: How it was timed.
        verdict: ``slower``, ``faster``, ``same``, ``wrong`` (was right), ``missing`` (no such row
            any more) or ``new``.
        old_us: Old median; None without one.
        new_us: New median.
        ratio: New over old; above 1 is slower.
        old_band: Quartiles of the old samples.
        new_band: Quartiles of the new ones.
    """

    bench: str
    case: Mapping[str, Any]
    backend: str
    mode: str
    verdict: str
    old_us: float | None = None
    new_us: float | None = None
    ratio: float | None = None
    old_band: tuple[float, float] | None = None
    new_band: tuple[float, float] | None = None

    @property
    def bad(self) -> bool:
        """Whether it fails the comparison."""
        return self.verdict in BAD


@dataclass(frozen=True)
class Comparison:
    """Two files, row by row.

    Attributes:
        old: Where the old results come from.
        new: Where the new results come from.
        threshold: Growth of a median that counts, 0.05 for 5 %.
        changes: In the order of the old file, then the new rows.
    """

    old: Mapping[str, Any]
    new: Mapping[str, Any]
    threshold: float
    changes: tuple[Change, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is slower, wrong or missing."""
        return not any(change.bad for change in self.changes)

    def counts(self) -> dict[str, int]:
        """How many rows have each verdict."""
        verdicts = [change.verdict for change in self.changes]
        return {v: verdicts.count(v) for v in (SLOWER, FASTER, SAME, WRONG, MISSING, NEW)}


def read_results(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a results file.

    Raises:
        InvalidInputError: It cannot be read, or is not a results file of a benchmark.
    """
    name = os.fspath(path)
    try:
        data = json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInputError.of("results file", name, "readable JSON", str(error)) from None
    rows = data.get("rows") if isinstance(data, dict) else None
    needed = ("bench", "case", "backend", "mode")
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and all(field in row for field in needed) for row in rows
    ):
        allowed = "an object with rows that have bench, case, backend and mode"
        raise InvalidInputError.of("results file", name, allowed)
    data.setdefault("meta", {})
    return data


def compare(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    *,
    threshold: float = 0.05,
    across_devices: bool = False,
) -> Comparison:
    """Compare two results files.

    Args:
        old: From ``read_results``.
        new: The same.
        threshold: Growth of a median that counts.
        across_devices: Compare although the files come from different devices.

    Raises:
        InvalidInputError: The threshold is negative, the devices differ, a row stands twice in a
            file, or the files have no row in common.
    """
    if not threshold >= 0:
        raise InvalidInputError.of("threshold", threshold, "a number >= 0")
    devices = [f["meta"].get("gpu") or f["meta"].get("device", "") for f in (old, new)]
    if devices[0] != devices[1] and not across_devices:
        fix = "--across-devices compares nevertheless"
        raise InvalidInputError.of("device of the new file", devices[1], repr(devices[0]), fix)
    before, after = _keyed("old", old["rows"]), _keyed("new", new["rows"])
    if not before.keys() & after.keys():
        allowed = "files with the same cases, backends and modes"
        raise InvalidInputError.of("results files", "no row in common", allowed)
    changes = [_change(row, after.get(key), threshold) for key, row in before.items()]
    for key, row in after.items():
        if key not in before:
            changes.append(_named(row, NEW, new_us=row.get("median_us"), new_band=_band(row)))
    return Comparison(old["meta"], new["meta"], threshold, tuple(changes))


def _keyed(which: str, rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    keyed: dict[str, dict[str, Any]] = {}
    for row in rows:
        # A field that a case did not have yet is one that is off.
        case = {k: v for k, v in row["case"].items() if v not in (None, False)}
        key = json.dumps([row["bench"], row["backend"], row["mode"], case], sort_keys=True)
        if key in keyed:
            text = f"{row['bench']}, {row['backend']}, {row['mode']}, {case}"
            raise InvalidInputError.of(f"{which} file", f"twice {text}", "each row once")
        keyed[key] = row
    return keyed


def _band(row: Mapping[str, Any]) -> tuple[float, float] | None:
    """Quartiles; files without them have the 20th and 80th percentile, a wider band."""
    for low, high in (("p25_us", "p75_us"), ("p20_us", "p80_us")):
        if low in row and high in row:
            return row[low], row[high]
    median = row.get("median_us")
    return None if median is None else (median, median)


def _named(row: Mapping[str, Any], verdict: str, **more: Any) -> Change:
    return Change(row["bench"], row["case"], row["backend"], row["mode"], verdict, **more)


def _change(old: Mapping[str, Any], new: Mapping[str, Any] | None, threshold: float) -> Change:
    old_us, old_band = old.get("median_us"), _band(old)
    known = {"old_us": old_us, "old_band": old_band}
    if new is None:
        return _named(old, MISSING, **known)
    new_us, new_band = new.get("median_us"), _band(new)
    known |= {"new_us": new_us, "new_band": new_band}
    if not new.get("right", True) or new_us is None:
        return _named(old, WRONG if old.get("right", True) else SAME, **known)
    if old_us is None or old_band is None or new_band is None:
        return _named(old, NEW, **known)  # it was wrong, and is right now
    ratio = new_us / old_us
    verdict = SAME
    if ratio > 1 + threshold and new_band[0] > old_band[1]:
        verdict = SLOWER
    elif ratio < 1 / (1 + threshold) and new_band[1] < old_band[0]:
        verdict = FASTER
    return _named(old, verdict, ratio=round(ratio, 4), **known)


__all__ = ["Change", "Comparison", "compare", "read_results"]
