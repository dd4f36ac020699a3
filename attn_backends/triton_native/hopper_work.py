"""The work list of the Hopper prefill: every query tile of a batch, longest first, from the device.

One entry is one tile of query tokens of one sequence; all heads share it. The place of an entry is
its rank by number of key tiles, which needs no sort: along a sequence that number never falls, so
how many of its entries exceed a value has a closed form. Rows after the last sequence form one more
sequence, without keys.

Layout, int32: a header ``[entries, counter, 0 x 6]``, then per entry
``[first row, tokens, kv_len, position of the first token, first key row or sequence, 0 x 3]``.
The counter hands out tiles and is 0 between launches; so one list must not be run by two streams at
once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

HEADER = 8
FIELDS = 8
_BLOCK_E = 32
_BLOCK_B = 64
_UNBOUNDED = 2**30


@triton.jit
def _sequence(cu_q_ptr, kv_len_ptr, b, num_seqs, total_q, skip):
    """Start, query count and key count of sequences; ``num_seqs`` itself is the rows left over.

    Sequences of at most ``skip`` queries are somebody else's, and count as empty.
    """
    start = tl.load(cu_q_ptr + b, mask=b <= num_seqs, other=0)
    end = tl.load(cu_q_ptr + b + 1, mask=b < num_seqs, other=0)
    end = tl.where(b < num_seqs, end, total_q)
    kv_len = tl.load(kv_len_ptr + b, mask=b < num_seqs, other=0)
    q_len = tl.where(b <= num_seqs, tl.maximum(end - start, 0), 0)
    q_len = tl.where((b < num_seqs) & (q_len <= skip), 0, q_len)
    return start, q_len, kv_len


@triton.jit
def _tiles_above(
    value, q_len, kv_len, right, cap, TILE: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """How many query tiles of a sequence see more than ``value`` (>= 0) key tiles."""
    tiles = (q_len + TILE - 1) // TILE
    below = value * BLOCK_N
    first = tl.zeros_like(below + tiles)
    if HAS_RIGHT:
        first = tl.minimum(tl.maximum(below - (kv_len - q_len) - right, 0) // TILE, tiles)
    return tl.where((kv_len > below) & (cap > value), tiles - first, 0)


@triton.jit
def _tiles_from(
    value, q_len, kv_len, right, cap, TILE: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """How many query tiles of a sequence see at least ``value`` key tiles."""
    above = _tiles_above(
        tl.maximum(value - 1, 0), q_len, kv_len, right, cap, TILE, BLOCK_N, HAS_RIGHT
    )
    return tl.where(value == 0, (q_len + TILE - 1) // TILE, above)


@triton.jit(do_not_specialize=["num_seqs", "total_q", "right", "cap", "skip"])
def _work_list_kernel(
    work_ptr, cu_q_ptr, kv_len_ptr, cu_k_ptr,
    num_seqs, total_q, right, cap, skip,
    TILE: tl.constexpr, BLOCK_N: tl.constexpr, HAS_RIGHT: tl.constexpr, PAGED: tl.constexpr,
    HEADER: tl.constexpr, FIELDS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    start, q_len, kv_len = _sequence(cu_q_ptr, kv_len_ptr, b, num_seqs, total_q, skip)
    tiles = (q_len + TILE - 1) // TILE
    offset = kv_len - q_len
    base = b
    if PAGED:
        base = tl.minimum(b, num_seqs - 1)
    elif b < num_seqs:
        base = tl.load(cu_k_ptr + b)
    for i0 in range(tl.program_id(1) * BLOCK_E, tiles, tl.num_programs(1) * BLOCK_E):
        i = i0 + tl.arange(0, BLOCK_E)
        end = kv_len + tl.zeros_like(i)
        if HAS_RIGHT:
            end = tl.minimum(end, offset + (i + 1) * TILE + right)
        value = tl.minimum((tl.maximum(end, 0) + BLOCK_N - 1) // BLOCK_N, cap)
        rank = i - tiles + _tiles_from(value, q_len, kv_len, right, cap, TILE, BLOCK_N, HAS_RIGHT)
        for b0 in range(0, num_seqs + 1, BLOCK_B):
            other = b0 + tl.arange(0, BLOCK_B)
            _, other_q, other_k = _sequence(cu_q_ptr, kv_len_ptr, other, num_seqs, total_q, skip)
            other_q = other_q[None, :]
            other_k = other_k[None, :]
            above = _tiles_above(
                value[:, None], other_q, other_k, right, cap, TILE, BLOCK_N, HAS_RIGHT
            )
            level = _tiles_from(
                value[:, None], other_q, other_k, right, cap, TILE, BLOCK_N, HAS_RIGHT
            )
            rank += tl.sum(tl.where((other < b)[None, :], level, above), 1)
        at = work_ptr + HEADER + rank * FIELDS
        keep = i < tiles
        tl.store(at, start + i * TILE, mask=keep)
        tl.store(at + 1, tl.minimum(q_len - i * TILE, TILE), mask=keep)
        tl.store(at + 2, kv_len + tl.zeros_like(i), mask=keep)
        tl.store(at + 3, offset + i * TILE, mask=keep)
        tl.store(at + 4, base + tl.zeros_like(i), mask=keep)
    if (b == 0) & (tl.program_id(1) == 0):
        entries = 0
        for b0 in range(0, num_seqs + 1, BLOCK_B):
            other = b0 + tl.arange(0, BLOCK_B)
            _, other_q, _ = _sequence(cu_q_ptr, kv_len_ptr, other, num_seqs, total_q, skip)
            entries += tl.sum((other_q + TILE - 1) // TILE, 0)
        tl.store(work_ptr, entries)
        tl.store(work_ptr + 1, 0)


def max_entries(total_q: int, num_seqs: int, tile: int) -> int:
    """Most entries that a batch can have; host facts alone decide it."""
    return total_q // tile + num_seqs + 1


def work_list(
    cu_seqlens_q: torch.Tensor,
    seqlens_k: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    *,
    total_q: int,
    tile: int,
    block_n: int,
    left: int | None = None,
    right: int | None = None,
    skip: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """List the query tiles of a batch, longest first, without a sync.

    Args:
        cu_seqlens_q: ``[B+1]`` int32.
        seqlens_k: ``[B]`` int32.
        cu_seqlens_k: ``[B+1]`` int32, or None if paged.
        total_q: Rows of the queries; those after the last sequence get entries without keys.
        tile: Query tokens per tile.
        block_n: Keys per key tile.
        left: Keys seen before a token's position; None is unbounded.
        right: Keys seen after it; 0 if causal, None is unbounded.
        skip: Leave out sequences of at most this many queries; their rows stay unwritten.
        out: A list to refill, for example one that a captured graph reads.

    Returns:
        The list, int32, in the layout that the head of this file describes.
    """
    num_seqs = seqlens_k.shape[0]
    size = HEADER + FIELDS * max_entries(total_q, num_seqs, tile)
    if out is None:
        out = torch.empty(size, dtype=torch.int32, device=seqlens_k.device)
    assert out.numel() >= size and out.dtype == torch.int32
    # With a left bound a tile sees a band of keys; longer ones are no more work.
    cap = _UNBOUNDED
    if left is not None and right is not None:
        cap = (left + right + tile) // block_n + 2
    per_program = triton.cdiv(triton.cdiv(total_q, tile), _BLOCK_E)
    grid = (num_seqs + 1, max(1, min(per_program, 64)))
    _work_list_kernel[grid](
        out, cu_seqlens_q, seqlens_k, cu_seqlens_k if cu_seqlens_k is not None else seqlens_k,
        num_seqs, total_q, 0 if right is None else right, cap, skip,
        TILE=tile, BLOCK_N=block_n, HAS_RIGHT=right is not None, PAGED=cu_seqlens_k is None,
        HEADER=HEADER, FIELDS=FIELDS, BLOCK_E=_BLOCK_E, BLOCK_B=_BLOCK_B,
    )  # fmt: skip
    return out


__all__ = ["FIELDS", "HEADER", "max_entries", "work_list"]
