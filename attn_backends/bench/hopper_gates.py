"""The aims of the Hopper prefill beside its peers, and which of them a run meets.

An aim compares the variant that ships (``chosen``) with a peer at a point. A ratio is the median,
over the rounds of one process, of the peer's time divided by ours in the same round.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from .hopper_points import Point

FA3, VARLEN, PAGED = "fa3", "fa3 varlen", "fa3 paged"
FLASHINFER = ("flashinfer-fa2", "flashinfer-fa3")


def aims(point: Point) -> dict[str, float]:
    """The least ratio asked for, by peer; ``flashinfer`` is the faster of its kernels."""
    if point.head_dim in (64, 256):
        return {FA3: 0.95} if point.page_size is None else {}
    if point.head_dim != 128:
        return {}
    if point.page_size in (16, 64):
        if point.q_len >= 128 or point.mix:
            return {PAGED: 1.1, "flashinfer": 1.2}
        return {PAGED: 0.95}
    if point.page_size is None:
        first = 1.05 if (point.batch, point.q_len) == (16, 1024) else 0.97
        return {VARLEN: 1.0} if point.mix else {FA3: first, VARLEN: 1.0}
    return {}


def ratio(ours: list[float], peer: list[float]) -> dict[str, float]:
    """Median and quartiles of the peer's time over ours, round by round."""
    found = sorted(b / a for a, b in zip(ours, peer))
    n = len(found)
    return {
        "ratio": round(statistics.median(found), 4), "p25": round(found[n // 4], 4),
        "p75": round(found[3 * n // 4], 4), "rounds": n,
    }  # fmt: skip


def judge(point: Point, times: dict[str, list[float]], wrong: Iterable[str]) -> list[dict]:
    """One row per aim of a point: the ratio, what was asked, and whether it is met.

    Args:
        point: What was measured.
        times: Microseconds of each call, in the order of the rounds.
        wrong: Names whose answers were wrong; a wrong peer is no peer.
    """
    rows = []
    bad = set(wrong)
    ours = times.get("chosen")
    for peer, asked in aims(point).items():
        names = [n for n in (FLASHINFER if peer == "flashinfer" else (peer,)) if n in times]
        row: dict[str, Any] = {"point": point.name, "peer": peer, "asked": asked}
        if ours is None or "chosen" in bad:
            row |= {"met": False, "why": "no right answer"}
        elif not (names := [n for n in names if n not in bad]):
            row |= {"met": None, "why": "peer not measured"}
        else:
            fastest = min(names, key=lambda n: statistics.median(times[n]))
            row |= {"measured": fastest, **ratio(ours, times[fastest])}
            row["met"] = row["ratio"] >= asked
        rows.append(row)
    return rows


__all__ = ["FA3", "FLASHINFER", "PAGED", "VARLEN", "aims", "judge", "ratio"]
