"""Times of a merge's kernel paths, written by ``python -m attn_backends.bench.merge_choice``."""

from __future__ import annotations

#: (compute capability, kind) -> (bytes of the merged output, us of ``cuda``, us of ``triton``),
#: by size. Kinds are named by ``dispatch.kind_of``.
TIMES: dict[tuple[tuple[int, int], str], tuple[tuple[int, float, float], ...]] = {
    ((9, 0), "few"): (
        (524288, 3.31, 4.239),
        (1048576, 7.068, 9.693),
        (8388608, 20.051, 22.595),
        (16777216, 22.464, 24.42),
        (67108864, 139.45, 149.38),
    ),
    ((9, 0), "pair"): (
        (8192, 1.13, 1.035),
        (32768, 1.152, 0.977),
        (131072, 1.163, 1.13),
        (524288, 1.475, 1.527),
        (2097152, 2.668, 2.722),
        (4194304, 4.426, 4.6),
        (5021696, 5.208, 5.091),
        (8388608, 7.447, 7.707),
        (12582912, 10.35, 10.94),
        (16777216, 13.536, 14.994),
        (33554432, 25.536, 26.708),
        (67108864, 48.104, 49.772),
        (134217728, 93.84, 98.22),
        (536870912, 370.95, 381.53),
    ),
    ((9, 0), "pair-padded"): (
        (20971520, 16.618, 23.498),
        (150994944, 105.87, 160.54),
    ),
}
