"""Times of a merge's kernel paths, written by ``python -m attn_backends.bench.merge_choice``."""

from __future__ import annotations

#: (compute capability, kind) -> (bytes of the merged output, us of ``cuda``, us of ``triton``),
#: by size. Kinds are named by ``dispatch.kind_of``.
TIMES: dict[tuple[tuple[int, int], str], tuple[tuple[int, float, float], ...]] = {}
