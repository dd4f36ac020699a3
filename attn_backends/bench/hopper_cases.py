"""The calls on which the Hopper prefill is checked: lengths, shapes, features, variants."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

RAGGED = ([100, 333, 64, 1, 200], [100, 333, 64, 1, 200])
UNEQUAL = ([130, 5, 0, 700, 128, 1], [1000, 3, 50, 650, 0, 129])
LONG = ([3000, 4097, 1, 2500], [5000, 4097, 1000, 9001])
SHORT = ([64, 3, 1, 17, 40, 64], [900, 4097, 77, 17, 0, 64])


@dataclass(frozen=True)
class CheckCase:
    """One call: lengths, shapes, features, the variant, and how its tensors lie in memory."""

    name: str
    lens: tuple[list[int], list[int]] = RAGGED
    heads: tuple[int, int] = (8, 2)
    head_dim: int = 128
    head_dim_v: int = 0
    dtype: torch.dtype = torch.bfloat16
    causal: bool = True
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    sinks: bool = False
    scale: float | None = None
    page_size: int | None = None
    layout: str = "NHD"
    spare: int = 0
    listed: int = 0
    expired: bool = False
    views: bool = False
    logits: float = 0.0
    variant: dict[str, Any] = field(default_factory=dict)
    forced: bool = True


def groups() -> dict[str, list[CheckCase]]:
    """All cases; those of one group mostly share their compiled kernels."""
    half = torch.float16
    c = CheckCase
    return {
        "causal": [
            c("ragged"), c("unequal", UNEQUAL), c("long", LONG), c("one", ([1], [1])),
            c("no keys", ([100, 3], [0, 0])), c("mha", UNEQUAL, (4, 4)), c("group7", heads=(28, 4)),
            c("group8", UNEQUAL, (8, 1)), c("spare rows", UNEQUAL, spare=300),
            c("views", UNEQUAL, views=True), c("long list", UNEQUAL, listed=500),
            c("long list, spare rows", spare=70, listed=100), c("scale 0", scale=0.0),
            c("low logits", UNEQUAL, logits=-300.0), c("high logits", UNEQUAL, logits=300.0),
            c("head groups", LONG, (16, 8), variant={"head_group": 4}),
        ],
        "full": [
            c("full", causal=False), c("full unequal", UNEQUAL, causal=False),
            c("full long", LONG, causal=False), c("full low", UNEQUAL, causal=False, logits=-300.0),
        ],
        "half": [c("fp16", dtype=half), c("fp16 full", UNEQUAL, causal=False, dtype=half)],
        "d64": [
            c("d64", head_dim=64), c("d64 unequal", UNEQUAL, head_dim=64),
            c("d64 2 stages", LONG, head_dim=64, variant={"stages": 2}),
            c("d64 4 stages", UNEQUAL, head_dim=64, variant={"stages": 4}),
            c("d64 full", UNEQUAL, head_dim=64, causal=False),
        ],
        "d256": [
            c("d256", head_dim=256), c("d256 unequal", UNEQUAL, head_dim=256),
            c("d256 long", LONG, head_dim=256), c("d256 full", UNEQUAL, head_dim=256, causal=False),
        ],
        "schedule": [
            c("static", LONG, variant={"dynamic": False}),
            c("snake", LONG, variant={"dynamic": False, "snake": True}),
            c("in turn", LONG, variant={"turns": True}),
            c("held", UNEQUAL, variant={"held": 64, "turns": True}),
            c("held, one slot", LONG, variant={"held": 64, "turns": True, "q_stages": 1}),
            c("held full", LONG, causal=False, variant={"held": 64, "turns": True}),
            c("held steep", LONG, scale=1.0, variant={"held": 64, "turns": True}),
            c("held window", LONG, window=(300, 0), variant={"held": 64, "turns": True}),
            c("held p16", LONG, page_size=16, variant={"held": 64, "turns": True}),
            c("one slot of queries", LONG, variant={"q_stages": 1}),
            c("one slot of queries ragged", variant={"q_stages": 1}),
        ],
        "single": [
            c("one consumer", LONG, variant={"consumers": 1, "block_n": 64, "q_stages": 1}),
            c("one consumer ragged", UNEQUAL, variant={"consumers": 1, "block_n": 64}),
            c("narrow tiles", UNEQUAL, variant={"block_n": 64, "stages": 3}),
            c("one consumer d64", LONG, head_dim=64, variant={"consumers": 1, "stages": 2}),
        ],
        "paged16": [
            c("p16", page_size=16), c("p16 unequal", UNEQUAL, page_size=16),
            c("p16 long", LONG, page_size=16), c("p16 HND", UNEQUAL, page_size=16, layout="HND"),
            c("p16 packed", UNEQUAL, page_size=16, layout="packed"),
            c("p16 spare", UNEQUAL, page_size=16, spare=200, views=True),
            c("p16 no keys", ([100, 3], [0, 0]), page_size=16),
        ],
        "paged": [
            c(f"p{n}", UNEQUAL, page_size=n) for n in (32, 64, 128, 256)
        ] + [c("p64 HND long", LONG, page_size=64, layout="HND")],
        "paged_dims": [
            c("p16 d64", UNEQUAL, head_dim=64, page_size=16),
            c("p16 d256", UNEQUAL, head_dim=256, page_size=16),
            c("p64 d256 full", UNEQUAL, head_dim=256, page_size=64, causal=False),
        ],
        "packed": [
            c("pack 4", SHORT, variant={"pack": 4}),
            c("pack 4 long", LONG, variant={"pack": 4}),
            c("pack 8 of 7", SHORT, (28, 4), variant={"pack": 8}),
            c("pack 8", SHORT, (16, 2), variant={"pack": 8}, page_size=16),
            c("pack 4 p64", SHORT, variant={"pack": 4}, page_size=64),
            c("pack 4 d64", SHORT, head_dim=64, variant={"pack": 4}),
        ],
        "window": [
            c("window", LONG, window=(300, 0)), c("window 0", UNEQUAL, window=(0, 0)),
            c("window p16", UNEQUAL, window=(100, 0), page_size=16),
            c("window both", UNEQUAL, causal=False, window=(70, 33)),
            c("window right", UNEQUAL, causal=False, window=(None, 33)),
            c("window pack", SHORT, window=(50, 0), variant={"pack": 4}),
        ],
        "expired": [
            c("expired p16", LONG, window=(300, 0), page_size=16, expired=True),
            c("expired p64", LONG, window=(300, 0), page_size=64, expired=True),
            c("expired p256", LONG, window=(300, 0), page_size=256, expired=True),
            c("expired p1", LONG, window=(300, 0), page_size=1, expired=True),
            c("expired ragged", LONG, window=(300, 0), expired=True),
            c("expired short", SHORT, window=(50, 0), page_size=16, expired=True),
            c("expired pack", SHORT, window=(50, 0), expired=True, variant={"pack": 4}),
            c("expired both", UNEQUAL, causal=False, window=(70, 33), expired=True),
            c("expired d64", SHORT, head_dim=64, window=(3, 0), page_size=16, expired=True),
            c("expired d256", LONG, head_dim=256, window=(300, 0), page_size=16, expired=True),
            c("expired d192", LONG, (4, 4), 192, 128, window=(300, 0), expired=True),
            c("expired one consumer", SHORT, window=(50, 0), expired=True,
              variant={"consumers": 1, "block_n": 64}),
        ],
        "softcap": [
            c("softcap", UNEQUAL, softcap=30.0), c("softcap full", causal=False, softcap=5.0),
            c("softcap window", LONG, softcap=50.0, window=(1000, 0)),
        ],
        "d192": [
            c("d192", head_dim=192, head_dim_v=128),
            c("d192 unequal", UNEQUAL, head_dim=192, head_dim_v=128),
            c("d192 long", LONG, (4, 4), 192, 128), c("d192 views", UNEQUAL, (4, 4), 192, 128,
                                                      views=True),
            c("d192 full", UNEQUAL, (4, 4), 192, 128, causal=False),
            c("d192 low", UNEQUAL, (4, 4), 192, 128, logits=-300.0),
            c("d192 fp16", UNEQUAL, (4, 4), 192, 128, half),
        ],
        "d192_more": [
            c("d192 p16", UNEQUAL, (4, 4), 192, 128, page_size=16),
            c("d192 p64 long", LONG, (4, 4), 192, 128, page_size=64),
            c("d192 one consumer", UNEQUAL, (4, 4), 192, 128,
              variant={"consumers": 1, "block_n": 64}),
            c("d192 pack", SHORT, (8, 2), 192, 128, variant={"pack": 4}),
            c("d192 p1", UNEQUAL, (4, 4), 192, 128, page_size=1),
            c("d192 chosen", UNEQUAL, (4, 4), 192, 128, forced=False),
        ],
        "gather": [
            c("p1", page_size=1), c("p1 unequal", UNEQUAL, page_size=1),
            c("p1 long", LONG, page_size=1), c("p1 HND", UNEQUAL, page_size=1, layout="HND"),
            c("p1 packed", UNEQUAL, page_size=1, layout="packed"),
            c("p1 spare", UNEQUAL, page_size=1, spare=200, views=True),
            c("p1 no keys", ([100, 3], [0, 0]), page_size=1),
            c("p1 full", UNEQUAL, page_size=1, causal=False),
            c("p1 window", LONG, page_size=1, window=(300, 0)),
        ],
        "gather_sizes": [
            c(f"p{n}", UNEQUAL, page_size=n) for n in (3, 5, 24, 48, 192)
        ] + [
            c("p48 HND long", LONG, page_size=48, layout="HND"),
            c("p7 packed", UNEQUAL, page_size=7, layout="packed"),
        ],
        "gather_dims": [
            c("p1 d64", UNEQUAL, head_dim=64, page_size=1),
            c("p1 d64 2 stages", LONG, head_dim=64, page_size=1, variant={"stages": 2}),
            c("p1 d256", UNEQUAL, head_dim=256, page_size=1),
            c("p1 fp16", UNEQUAL, page_size=1, dtype=half),
            c("p1 one consumer", LONG, page_size=1, variant={"consumers": 1, "block_n": 64}),
            c("p1 pack", SHORT, page_size=1, variant={"pack": 4}),
            c("p1 static", LONG, page_size=1, variant={"dynamic": False}),
        ],
        "sinks": [
            c("sinks", sinks=True), c("sinks unequal", UNEQUAL, sinks=True),
            c("sinks no keys", ([100, 3], [0, 0]), sinks=True),
            c("sinks spare", UNEQUAL, sinks=True, spare=200),
            c("sinks window", LONG, sinks=True, window=(300, 0)),
            c("sinks pack", SHORT, sinks=True, variant={"pack": 4}),
            c("sinks pack 8 of 7", SHORT, (28, 4), sinks=True, variant={"pack": 8}, page_size=16),
            c("sinks low", UNEQUAL, sinks=True, logits=-300.0),
            c("sinks d64 p1", UNEQUAL, head_dim=64, sinks=True, page_size=1),
        ],
        "steep": [  # maxima that move far: what is kept, and what is rescaled
            c("steep", LONG, scale=1.0), c("steep fp16", LONG, dtype=half, scale=0.5),
            c("steep window", LONG, scale=1.0, window=(300, 0)),
            c("steep sinks", UNEQUAL, scale=1.0, sinks=True),
            c("steep pack", SHORT, page_size=16, scale=1.0, variant={"pack": 4}),
            c("steep d64", LONG, head_dim=64, scale=0.5),
            c("steep d192", LONG, (4, 4), 192, 128, scale=0.5),
            c("steep d256", LONG, head_dim=256, scale=0.5),
            c("fp16 low", UNEQUAL, dtype=half, logits=-300.0),
            c("fp16 high", UNEQUAL, dtype=half, logits=300.0),
        ],
        "chosen": [
            c("chosen ragged", forced=False), c("chosen short", SHORT, (32, 8), forced=False),
            c("chosen long", LONG, (32, 8), forced=False),
            c("chosen p16", SHORT, (32, 8), page_size=16, forced=False),
            c("chosen d64", UNEQUAL, head_dim=64, forced=False),
            c("chosen d256", SHORT, (16, 8), head_dim=256, forced=False),
        ],
        "graph": [],
        "streams": [],
        "invariant": [],
    }  # fmt: skip


__all__ = ["LONG", "RAGGED", "SHORT", "UNEQUAL", "CheckCase", "groups"]
