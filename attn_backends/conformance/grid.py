"""The feature grid: cases on which values and LSEs are compared with the oracle.

``smoke`` tries every feature once, at sizes that an interpreter can run. ``full`` takes each
feature through all its values, then mixes features at random, by a fixed seed.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import torch

from .cases import DTYPE_NAMES, DTYPES, Case, case

DECODE = ((1, 1, 1), (1, 17, 40))
PREFILL = ((5, 1, 18), (5, 1, 18))
EXTEND = ((3, 1, 7), (20, 33, 7))
MIXED = ((0, 4, 1, 2), (3, 0, 9, 1))  # no query, no key, and fewer keys than queries
SHAPES = {"decode": DECODE, "prefill": PREFILL, "extend": EXTEND, "mixed": MIXED}

LONG = {
    "long-decode": ((1, 1, 1, 1), (1000, 3001, 64, 129)),
    "long-prefill": ((129, 300), (129, 300)),
    "long-extend": ((63, 5, 1), (1000, 515, 777)),
}
WINDOWS = (
    (True, (0, None)),
    (True, (3, 0)),
    (True, (16, None)),
    (False, (2, None)),
    (False, (None, 1)),
    (False, (4, 2)),
    (False, (0, 0)),
)
GROUPS = (
    (1, 1), (2, 2), (3, 1), (5, 1), (6, 1), (7, 1), (12, 1), (12, 2), (24, 4), (24, 8), (28, 4),
    (40, 8), (48, 1), (64, 4), (64, 1),
)  # fmt: skip
HEAD_DIMS = (8, 16, 40, 64, 72, 80, 88, 96, 100, 112, 120, 128, 160, 192, 224, 256, 288, 512, 576)
DIM_PAIRS = ((192, 128), (576, 512), (128, 64), (64, 128), (96, 80))
PAGE_SIZES = (1, 2, 3, 16, 32, 48, 64, 128, 256, 512)
FP8 = torch.float8_e4m3fn
MLA = {"num_heads": 16, "num_kv_heads": 1, "head_dim": 576, "head_dim_v": 512}


@cache
def value_cases(level: str) -> list[Case]:
    """The grid of a level."""
    found = _smoke()
    if level == "full":
        found += _full()
    names = [c.name for c in found]
    assert len(names) == len(set(names)), sorted(n for n in names if names.count(n) > 1)
    return found


def _smoke() -> list[Case]:
    found = [
        case(f"{keys}-{name}", *shape, keys=keys)
        for keys in ("ragged", "paged")
        for name, shape in SHAPES.items()
    ]
    found += [case(f"dtype-{DTYPE_NAMES[d]}", *EXTEND, dtype=d) for d in DTYPES]
    found += [
        case("full-extend", *EXTEND, causal=False),
        case("full-mixed", *MIXED, causal=False, keys="paged"),
        case("window-3-0", *EXTEND, window=(3, 0)),
        case("window-full-4-2", *EXTEND, causal=False, window=(4, 2), keys="paged"),
        case("window-decode", *DECODE, window=(5, 0), keys="paged"),
        case("softcap", *EXTEND, softcap=3.0),
        case("softcap-decode", *DECODE, softcap=3.0, keys="paged"),
        case("scale", *EXTEND, sm_scale=0.3),
        case("scale-zero", *DECODE, sm_scale=0.0),
        case("alibi", *EXTEND, has_alibi=True),
        case("alibi-full-decode", *DECODE, has_alibi=True, causal=False, keys="paged"),
        case("mask", *EXTEND, has_mask=True, causal=False),
        case("mask-causal-paged", *MIXED, has_mask=True, keys="paged"),
        case("sinks-prefill", *PREFILL, sinks=True),
        case("sinks-decode", *DECODE, sinks=True, keys="paged"),
        case("sinks-mixed-softcap", *MIXED, sinks=True, softcap=3.0),
        case("fp8-kv-unscaled", *DECODE, kv_dtype=FP8, keys="paged"),
        case("fp8-kv-float", *DECODE, kv_dtype=FP8, keys="paged", kv_scale="float"),
        case("fp8-kv-scalar-prefill", *EXTEND, kv_dtype=FP8, kv_scale="scalar", keys="ragged"),
        case("fp8-kv-head", *EXTEND, kv_dtype=FP8, kv_scale="head", keys="paged"),
        case("head-dim-16", *EXTEND, head_dim=16),
        case("head-dim-80", *DECODE, head_dim=80, keys="paged"),
        case("dims-192-128", *EXTEND, head_dim=192, head_dim_v=128, keys="ragged"),
        case("mla-decode", (1, 1), (5, 20), keys="paged", v_from_k=True, **MLA),
        case("group-3", *EXTEND, num_heads=3, num_kv_heads=1),
        case("group-7", *DECODE, num_heads=7, num_kv_heads=1, keys="paged"),
        case("page-1", *DECODE, page_size=1),
        case("page-3", *EXTEND, page_size=3),
        case("batch-invariant", *EXTEND, batch_invariant=True),
        case("batch-invariant-decode", *DECODE, batch_invariant=True, keys="paged"),
    ]
    return found + _random_mix(4, seed=1, name="mix")


def _full() -> list[Case]:
    found = [
        case(f"{keys}-{name}", *shape, keys=keys)
        for keys in ("ragged", "paged")
        for name, shape in LONG.items()
    ]
    for dtype in DTYPES:
        tag = DTYPE_NAMES[dtype]
        for name in ("decode", "prefill", "mixed"):
            found.append(case(f"dtype-{tag}-{name}", *SHAPES[name], dtype=dtype, keys="paged"))
        found.append(case(f"dtype-{tag}-long", *LONG["long-extend"], dtype=dtype, keys="ragged"))
    for causal, window in WINDOWS:
        tag = f"window-{'causal' if causal else 'full'}-{window[0]}-{window[1]}"
        for name in ("extend", "mixed"):
            shape = SHAPES[name]
            found.append(case(f"{tag}-{name}", *shape, causal=causal, window=window))
        shape = LONG["long-extend"]
        found.append(case(f"{tag}-long", *shape, causal=causal, window=window, keys="paged"))
    for name in ("decode", "prefill", "extend", "mixed"):
        shape = SHAPES[name]
        for keys in ("ragged", "paged"):
            tag = f"{keys}-{name}"
            found += [
                case(f"softcap-{tag}", *shape, softcap=5.0, keys=keys),
                case(f"alibi-{tag}", *shape, has_alibi=True, keys=keys),
                case(f"alibi-full-{tag}", *shape, has_alibi=True, causal=False, keys=keys),
                case(f"mask-{tag}", *shape, has_mask=True, causal=False, keys=keys),
                case(f"sinks-{tag}", *shape, sinks=True, keys=keys),
                case(f"invariant-{tag}", *shape, batch_invariant=True, keys=keys),
            ]
            for form in ("none", "float", "scalar", "head"):
                tag_fp8 = f"fp8-{form}-{tag}"
                found.append(case(tag_fp8, *shape, kv_dtype=FP8, kv_scale=form, keys=keys))
    found += [
        case("fp8-e5m2", *EXTEND, kv_dtype=torch.float8_e5m2, kv_scale="head", keys="paged"),
        case("sinks-window-long", *LONG["long-decode"], sinks=True, window=(99, 0), keys="paged"),
        case("softcap-long", *LONG["long-extend"], softcap=20.0, keys="paged"),
        case("alibi-long", *LONG["long-extend"], has_alibi=True, keys="paged"),
        case("mask-long", *LONG["long-extend"], has_mask=True, causal=False, keys="paged"),
    ]
    for size in PAGE_SIZES:
        found.append(case(f"page-{size}-decode", *DECODE, page_size=size))
        found.append(case(f"page-{size}-long", *LONG["long-extend"], page_size=size))
    for dim in HEAD_DIMS:
        found.append(case(f"dim-{dim}-decode", *DECODE, head_dim=dim, keys="paged"))
        found.append(case(f"dim-{dim}-extend", *EXTEND, head_dim=dim, keys="ragged"))
    for dim, dv in DIM_PAIRS:
        for kv_heads in (16, 1):
            pair = {"num_heads": 16, "num_kv_heads": kv_heads, "head_dim": dim, "head_dim_v": dv}
            tag = f"dims-{dim}-{dv}-HK{kv_heads}"
            found.append(case(f"{tag}-extend", (3, 1), (33, 9), keys="ragged", **pair))
            found.append(case(f"{tag}-decode", (1, 1), (33, 9), keys="paged", **pair))
    for heads in (1, 16, 64, 128):
        mla: dict[str, Any] = MLA | {"num_heads": heads}
        found.append(case(f"mla-H{heads}", (1, 1), (700, 33), v_from_k=True, keys="paged", **mla))
        found.append(case(f"mla-H{heads}-mtp", (3, 2), (40, 9), v_from_k=True, keys="paged", **mla))
    found.append(case("mla-extend", (40, 3), (200, 33), v_from_k=True, keys="paged", **MLA))
    for heads, kv_heads in GROUPS:
        pair = {"num_heads": heads, "num_kv_heads": kv_heads}
        tag = f"group-{heads}-{kv_heads}"
        found.append(case(f"{tag}-decode", *DECODE, keys="paged", **pair))
        found.append(case(f"{tag}-extend", *EXTEND, keys="ragged", **pair))
    return found + _random_mix(60, seed=2, name="full-mix")


def _random_mix(count: int, *, seed: int, name: str) -> list[Case]:
    """Features in combination, where single sweeps see nothing."""
    rng = random.Random(seed)
    found = []
    for n in range(count):
        causal = rng.random() < 0.6
        change: dict[str, Any] = {"causal": causal}
        if rng.random() < 0.4:
            windows = [w for c, w in WINDOWS if c == causal]
            change["window"] = rng.choice(windows)
        if rng.random() < 0.3:
            change["softcap"] = rng.choice((2.0, 10.0))
        if rng.random() < 0.2:
            change["has_alibi"] = True
        if rng.random() < 0.2:
            change["has_mask"] = True
        if rng.random() < 0.3:
            change["sm_scale"] = rng.choice((0.05, 0.4))
        if rng.random() < 0.3:
            change["batch_invariant"] = True
        heads = rng.choice(((2, 2), (4, 1), (6, 2), (8, 8)))
        change["num_heads"], change["num_kv_heads"] = heads
        kv_lens = [rng.choice((0, 1, 2, 15, 16, 17, 33)) for _ in range(rng.randint(1, 4))]
        q_lens = [rng.choice((0, 1, 1, 2, 9)) for _ in kv_lens]
        own = {
            "keys": rng.choice(("ragged", "paged")),
            "sinks": rng.random() < 0.3,
            "spare": rng.choice((0, 0, 2)),
            "layout": rng.choice(("plain", "plain", "packed", "heads_first", "wide")),
            "seed": n,
        }
        found.append(case(f"{name}-{n}", q_lens, kv_lens, **own, **change))
    return found


__all__ = ["DECODE", "EXTEND", "GROUPS", "HEAD_DIMS", "LONG", "MIXED", "PAGE_SIZES", "PREFILL",
           "SHAPES", "WINDOWS", "value_cases"]  # fmt: skip
