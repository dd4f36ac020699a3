"""Times of a merge's kernel paths, written by ``python -m attn_backends.bench.merge_choice``."""

from __future__ import annotations

#: (compute capability, kind) -> (bytes of the merged output, us of ``cuda``, us of ``triton``),
#: by size. Kinds are named by ``dispatch.kind_of``.
TIMES: dict[tuple[tuple[int, int], str], tuple[tuple[int, float, float], ...]] = {
    ((9, 0), "pair"): (
        (8192, 1.207, 1.442),
        (524288, 1.983, 2.071),
        (2097152, 3.035, 3.164),
        (8388608, 8.192, 8.478),
        (67108864, 53.61, 49.936),
        (536870912, 408.21, 377.06),
    ),
}
