"""Times of a merge's kernel paths, written by ``python -m attn_backends.bench.merge_choice``."""

from __future__ import annotations

#: (compute capability, kind) -> (bytes of the merged output, us of ``cuda``, us of ``triton``),
#: by size. Kinds are named by ``dispatch.kind_of``.
TIMES: dict[tuple[tuple[int, int], str], tuple[tuple[int, float, float], ...]] = {
    ((9, 0), "few"): (
        (524288, 4.699, 4.249),
        (1048576, 8.677, 9.586),
        (8388608, 29.558, 22.518),
        (16777216, 25.884, 24.344),
        (67108864, 192.89, 149.28),
    ),
    ((9, 0), "pair"): (
        (8192, 0.984, 0.995),
        (32768, 0.977, 1.029),
        (131072, 1.048, 1.106),
        (524288, 1.292, 1.347),
        (2097152, 2.682, 2.578),
        (4194304, 4.468, 4.177),
        (5021696, 5.092, 5.087),
        (8388608, 7.993, 7.657),
        (12582912, 11.024, 10.702),
        (16777216, 14.862, 13.902),
        (33554432, 27.088, 25.72),
        (67108864, 50.14, 48.536),
        (134217728, 95.67, 93.52),
        (536870912, 374.75, 371.51),
    ),
    ((9, 0), "pair-padded"): (
        (20971520, 17.949, 20.832),
        (150994944, 107.5, 148.19),
    ),
}
