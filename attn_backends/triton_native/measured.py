"""Measured tile choices, written by ``python -m attn_backends.bench.attention configs``."""

from __future__ import annotations

#: (arch, block_m, D, DV, product bytes, KV bytes, shared KV)
#: -> (block_n, warps, stages, occupancy, min_chunk)
SPLIT: dict[tuple[int, int, int, int, int, int, bool], tuple[int, int, int, int, int]] = {}

#: (arch, small, D, DV, product bytes, KV bytes)
#: -> (block_m, block_n, warps, stages, phases, heads_inner)
PREFILL: dict[tuple[int, bool, int, int, int, int], tuple[int, int, int, int, bool, bool]] = {}
