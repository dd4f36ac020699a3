"""Times of a merge's kernel paths, written by ``python -m attn_backends.bench.merge_choice``."""

from __future__ import annotations

#: (compute capability, kind) -> (bytes of the merged output, us of ``cuda``, us of ``triton``),
#: by size. Kinds are named by ``dispatch.kind_of``.
TIMES: dict[tuple[tuple[int, int], str], tuple[tuple[int, float, float], ...]] = {
    ((9, 0), "few"): (
        (524288, 3.25, 4.229),
        (1048576, 7.152, 9.434),
        (8388608, 20.099, 22.035),
        (16777216, 22.592, 23.66),
        (67108864, 140.42, 148.42),
    ),
    ((9, 0), "pair"): (
        (8192, 1.111, 1.044),
        (524288, 1.532, 1.599),
        (2097152, 2.676, 2.845),
        (4194304, 4.392, 5.048),
        (8388608, 7.407, 7.894),
        (16777216, 13.522, 14.208),
        (33554432, 25.58, 26.744),
        (67108864, 48.748, 50.24),
        (134217728, 95.15, 97.5),
        (536870912, 374.16, 386.78),
    ),
}
