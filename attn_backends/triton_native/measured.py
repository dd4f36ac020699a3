"""Measured tiles, written by ``python -m attn_backends.bench.attention configs``."""

from __future__ import annotations

#: (arch, block_m, D, DV, product bytes, KV bytes, shared KV)
#: -> the fields of ``SplitConfig`` after block_m
SPLIT: dict[tuple[int, int, int, int, int, int, bool], tuple[int | bool, ...]] = {}

#: (arch, small, D, DV, product bytes, KV bytes) -> the fields of ``PrefillConfig``
PREFILL: dict[tuple[int, bool, int, int, int, int], tuple[int | bool, ...]] = {
    (90, False, 128, 128, 2, 2): (128, 64, 8, 2, True, True, True, False, 128, True),
    (90, True, 128, 128, 2, 2): (64, 64, 4, 3, True, True, True, False, 0),
}
