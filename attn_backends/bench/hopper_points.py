"""What the benchmark of the Hopper prefill measures: points, variants of the kernel, and aims."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

#: Multiprocessors of an H100 or H200; only names of variants depend on it, no launch does.
_PROCESSORS = 132
_DENSE = ((16, 1024), (4, 4096), (2, 8192), (1, 16384))


@dataclass(frozen=True)
class Point:
    """One measured call: ``batch`` sequences of ``q_len`` over ``kv_len``, or a drawn mix."""

    name: str
    batch: int
    q_len: int
    kv_len: int
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    causal: bool = True
    page_size: int | None = None
    mix: bool = False
    head_dim_v: int = 0

    @property
    def dv(self) -> int:
        """Head dim of values."""
        return self.head_dim_v or self.head_dim

    def lengths(self) -> tuple[list[int], list[int]]:
        """Query and key lengths."""
        if not self.mix:
            return [self.q_len] * self.batch, [self.kv_len] * self.batch
        rng = random.Random(7)
        q = [min(8192, max(16, int(rng.lognormvariate(6.8, 1.0)))) for _ in range(self.batch)]
        return q, q


def points(which: str) -> list[Point]:
    """The points of a named set."""
    sets = {
        "causal": [Point(f"causal {b}x{n}", b, n, n) for b, n in _DENSE],
        "full": [Point(f"full {b}x{n}", b, n, n, causal=False) for b, n in _DENSE],
        "mix": [
            Point("mix 20", 20, 0, 0, mix=True),
            Point("mix 20 p16", 20, 0, 0, mix=True, page_size=16),
            Point("causal 64x256", 64, 256, 256), Point("causal 4x1000", 4, 1000, 1000),
            Point("causal 1x1024", 1, 1024, 1024),
        ],
        "d64": [Point(f"d64 causal {b}x{n}", b, n, n, head_dim=64) for b, n in _DENSE[:3]]
        + [Point("d64 full 4x4096", 4, 4096, 4096, head_dim=64, causal=False)],
        "d256": [Point(f"d256 causal {b}x{n}", b, n, n, (16, 8), 256) for b, n in _DENSE[:3]]
        + [Point("d256 full 4x4096", 4, 4096, 4096, (16, 8), 256, False)],
        "d192": [
            Point(f"d192/128 causal {b}x{n}", b, n, n, (32, 32), 192, head_dim_v=128)
            for b, n in _DENSE[:3]
        ] + [
            Point("d192/128 p16 causal 2x8192", 2, 8192, 8192, (32, 32), 192, page_size=16,
                  head_dim_v=128),
        ],
        "paged": [Point(f"p16 causal {b}x{n}", b, n, n, page_size=16) for b, n in _DENSE]
        + [Point(f"p64 causal {b}x{n}", b, n, n, page_size=64) for b, n in _DENSE[:3:2]],
        "odd": [
            Point(f"p{size} {b}x{q} over {n}", b, q, q + n, page_size=size)
            for size, b, q, n in [(1, 4, 4096, 0), (1, 8, 512, 8192), (48, 8, 512, 8192)]
        ],
        "choice": [
            *(Point(f"choice causal {b}x{n}", b, n, n) for b, n in (*_DENSE, (64, 256), (1, 1024))),
            Point("choice full 2x8192", 2, 8192, 8192, causal=False),
            Point("choice p16 causal 4x4096", 4, 4096, 4096, page_size=16),
            Point("choice d64 causal 4x4096", 4, 4096, 4096, head_dim=64),
            Point("choice d64 full 4x4096", 4, 4096, 4096, head_dim=64, causal=False),
            Point("choice d256 causal 4x4096", 4, 4096, 4096, (16, 8), 256),
        ],
        "extend": [
            Point(f"p16 {b}x{q} over {n}", b, q, q + n, page_size=16)
            for b, q, n in [(8, 512, 8192), (2, 2048, 32768), (32, 128, 4096), (64, 64, 4096)]
        ],
    }  # fmt: skip
    return sets[which]


#: Sets with aims, and those beyond; ``choice`` has the points that the rule of shapes is made from.
SETS = ("causal", "full", "mix", "d64", "d256", "d192", "paged", "odd", "extend")
ALL_SETS = (*SETS, "choice")
#: Sets that one process measures; processes take turns, the first aims first.
PROCESSES = (("causal", "full", "mix", "d64", "d256", "odd", "paged", "extend", "d192"),
             ("choice",))  # fmt: skip


def is_shape(point: Point) -> dict[str, Any]:
    """What ``choose_variant`` is told of a point."""
    q_lens, kv_lens = point.lengths()
    return {
        "head_dim": point.head_dim, "num_heads": point.heads[0], "num_kv_heads": point.heads[1],
        "max_seqlen_q": max(q_lens), "total_q": sum(q_lens), "num_seqs": point.batch,
        "num_sms": _PROCESSORS, "max_seqlen_k": max(kv_lens), "causal": point.causal,
        "paged": point.page_size is not None,
    }  # fmt: skip


def variants(point: Point) -> dict[str, Any]:
    """Variants worth measuring at a point, by name; ``chosen`` is what the launcher takes."""
    from ..triton_native.hopper_variant import Variant, choose_variant

    chosen = choose_variant(**is_shape(point))
    dim = point.head_dim
    n, stages, q_stages = (64 if dim == 256 else 128), (3 if dim == 64 else 2), int(dim <= 128) + 1

    def of(**changes: Any) -> Any:
        base = {"block_n": n, "stages": stages, "q_stages": q_stages}
        return Variant(**{**base, **changes})

    dense = point.page_size is None
    out = {"chosen": chosen, "dyn": of()}
    if dim == 128:
        out |= {"turns": of(turns=True), "held": of(held=64, turns=True)}
    if point.causal:
        out["snake"] = of(dynamic=False, snake=True)
    if q_stages > 1:
        out["q1"] = of(q_stages=1)
    if point.kv_len > 4096:
        out["g8"] = of(head_group=8)
    if dim <= 128 and point.q_len <= 1024:
        out["1c"] = of(block_n=64 if dim == 128 else 128, consumers=1, stages=2)
    if not dense and point.kv_len > point.q_len:
        out["pack"] = of(pack=4)
    seen: dict[Any, str] = {}
    return {k: v for k, v in out.items() if k == "chosen" or seen.setdefault(v, k) == k}


__all__ = ["ALL_SETS", "PROCESSES", "SETS", "Point", "is_shape", "points", "variants"]
