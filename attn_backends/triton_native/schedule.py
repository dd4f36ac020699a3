"""The work list of the split kernel, made on the device by the cut that ``cuts`` chooses.

The list is built from the lengths there, one small launch per plan or update, so that a captured
graph replays with new lengths and no length is ever copied to the host. What the host knows (exact
lengths, or only upper bounds) sizes the list, and, if exact, chooses the cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

import triton
import triton.language as tl

from .cuts import WAVES, choose_chunk, choose_chunk_on_device

#: Batch-invariant chunks: sizes double after this many, then after every half as many.
CHUNKS_BASE = tl.constexpr(64)


@triton.jit
def chunk_start(chunk, C0: tl.constexpr):
    """First key of a batch-invariant chunk: C0 keys each at first, later doubling."""
    half: tl.constexpr = CHUNKS_BASE // 2
    level = tl.maximum(chunk - CHUNKS_BASE, 0) // half
    inner = chunk - CHUNKS_BASE - level * half
    grown = ((CHUNKS_BASE * C0) << level) + inner * ((2 * C0) << level)
    return tl.where(chunk < CHUNKS_BASE, chunk * C0, grown)


@triton.jit
def chunk_of(key, C0: tl.constexpr):
    """The batch-invariant chunk that holds a key; by absolute position alone."""
    half: tl.constexpr = CHUNKS_BASE // 2
    level = key * 0
    for t in tl.static_range(1, 10):
        level += (key >= ((CHUNKS_BASE * C0) << t)).to(tl.int32)
    inner = (key - ((CHUNKS_BASE * C0) << level)) // ((2 * C0) << level)
    grown = CHUNKS_BASE + level * half + inner
    return tl.where(key < CHUNKS_BASE * C0, key // C0, grown)


def count_chunks(keys: int, c0: int) -> int:
    """Batch-invariant chunks of a sequence of ``keys`` keys, on the host."""
    base, half = 64, 32
    if keys <= base * c0:
        return -(-keys // c0)
    level = min(9, max(0, ((keys - 1) // (base * c0)).bit_length() - 1))
    return base + level * half + -(-(keys - ((base * c0) << level)) // ((2 * c0) << level))


@triton.jit
def _cut(span, rows, chunk, splits, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Parts per row tile and keys per part, for sequences of ``span`` keys."""
    parts = tl.cdiv(span, chunk)
    if splits > 0:
        parts = tl.minimum(tl.cdiv(span, BLOCK_N), splits + span * 0)
    parts = tl.maximum(parts, 1)
    size = tl.maximum(tl.cdiv(tl.cdiv(span, parts), BLOCK_N) * BLOCK_N, BLOCK_N)
    return tl.maximum(tl.cdiv(span, size), 1), size


@triton.jit
def _facts(cu_q_ptr, kv_len_ptr, b, num_seqs, left, short_rows, GROUP: tl.constexpr,
           HAS_LEFT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Query length, key length, row tiles, first key and span of sequences ``b``."""
    live = b < num_seqs
    q_start = tl.load(cu_q_ptr + b, mask=live, other=0)
    q_len = tl.load(cu_q_ptr + b + 1, mask=live, other=0) - q_start
    kv_len = tl.load(kv_len_ptr + b, mask=live, other=0)
    rows = q_len * GROUP
    tiles = tl.where(rows <= short_rows, tl.cdiv(rows, BLOCK_M), 0)
    lo = kv_len * 0
    if HAS_LEFT:
        lo = tl.minimum(tl.maximum(kv_len - q_len - left, 0), kv_len) // BLOCK_N * BLOCK_N
    return q_start, q_len, kv_len, tiles, lo, tl.where(tiles > 0, kv_len - lo, 0)


@triton.jit(
    do_not_specialize=[
        "num_seqs", "max_items", "left", "short_rows", "chunk", "splits", "processors", "rate",
        "min_chunk",
    ]
)  # fmt: skip
def _schedule_kernel(
    cu_q_ptr, kv_len_ptr, cu_k_ptr, items_ptr, seqs_ptr,
    num_seqs, max_items, left, short_rows, chunk, splits, processors, rate, min_chunk,
    HK: tl.constexpr, GROUP: tl.constexpr, HAS_LEFT: tl.constexpr, RAGGED: tl.constexpr,
    PAD_ROWS: tl.constexpr, C0: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr, OCCUPANCY: tl.constexpr,
):  # fmt: skip
    """Write the items of one sequence (program b), or the end of the list (program num_seqs)."""
    me = tl.program_id(0)
    lanes = tl.arange(0, BLOCK_B)
    undecided = (chunk == 0) & (splits == 0)
    if C0 > 0:
        undecided = chunk < 0
    if undecided:
        work = 0.0
        programs = 0.0
        span_max = 0
        for first in range(0, num_seqs, BLOCK_B):
            _, _, _, tiles, _, span = _facts(
                cu_q_ptr, kv_len_ptr, first + lanes, num_seqs, left, short_rows, GROUP, HAS_LEFT,
                BLOCK_M, BLOCK_N,
            )  # fmt: skip
            work += tl.sum(tiles.to(tl.float32) * span.to(tl.float32), 0)
            programs += tl.sum(tiles.to(tl.float32), 0)
            span_max = tl.maximum(span_max, tl.max(span, 0))
        chunk = choose_chunk_on_device(work, programs, span_max, processors, rate, min_chunk, HK,
                                       GROUP, BLOCK_N, OCCUPANCY)  # fmt: skip
    chunk = tl.maximum(chunk, 1)

    my_q, my_q_len, my_kv, my_tiles, my_lo, my_span = _facts(
        cu_q_ptr, kv_len_ptr, me, num_seqs, left, short_rows, GROUP, HAS_LEFT, BLOCK_M, BLOCK_N
    )
    my_first_chunk = 0
    if C0 > 0:
        my_first_chunk = chunk_of(my_lo, C0)
        my_parts = chunk_of(tl.maximum(my_kv - 1, 0), C0) + 1 - my_first_chunk
        my_parts = tl.where((my_tiles == 1) & (my_span > 0), my_parts, 1)
        my_size = my_span
    else:
        my_parts, my_size = _cut(my_span, my_q_len * GROUP, chunk, splits, BLOCK_M, BLOCK_N)
    my_key = tl.minimum(my_size, my_span)

    # Where my items go: longest first; where my partial states go: in order of sequences.
    before = 0
    slots_before = 0
    total = 0
    for first in range(0, num_seqs, BLOCK_B):
        b = first + lanes
        _, q_len, kv_len, tiles, lo, span = _facts(
            cu_q_ptr, kv_len_ptr, b, num_seqs, left, short_rows, GROUP, HAS_LEFT, BLOCK_M, BLOCK_N
        )
        if C0 > 0:
            parts = chunk_of(tl.maximum(kv_len - 1, 0), C0) + 1 - chunk_of(lo, C0)
            parts = tl.where((tiles == 1) & (span > 0), parts, 1)
            key = span
        else:
            parts, size = _cut(span, q_len * GROUP, chunk, splits, BLOCK_M, BLOCK_N)
            key = tl.minimum(size, span)
        count = tiles * parts
        total += tl.sum(count, 0)
        ahead = (key > my_key) | ((key == my_key) & (b < me))
        before += tl.sum(tl.where(ahead, count, 0), 0)
        slots_before += tl.sum(tl.where((b < me) & (parts > 1), count, 0), 0)

    fields = tl.arange(0, 16)
    if me < num_seqs:
        k_start = 0
        if RAGGED:
            k_start = tl.load(cu_k_ptr + me)
        tl.store(seqs_ptr + me * 4 + 0, slots_before)
        tl.store(seqs_ptr + me * 4 + 1, tl.where(my_tiles > 0, my_parts, 0))
        tl.store(seqs_ptr + me * 4 + 2, my_q)
        tl.store(seqs_ptr + me * 4 + 3, my_q_len)
        for j in range(0, my_tiles * my_parts):
            part = j % my_parts
            if C0 > 0:
                lo = my_lo
                hi = my_kv
                if my_parts > 1:
                    lo = tl.maximum(chunk_start(my_first_chunk + part, C0), my_lo)
                    hi = tl.minimum(chunk_start(my_first_chunk + part + 1, C0), my_kv)
            else:
                lo = my_lo + part * my_size
                hi = tl.minimum(lo + my_size, my_kv)
            slot = tl.where(my_parts > 1, slots_before + j, -1)
            x = tl.where(fields == 0, me, 0)
            x = tl.where(fields == 1, my_q, x)
            x = tl.where(fields == 2, my_q_len, x)
            x = tl.where(fields == 3, j // my_parts, x)
            x = tl.where(fields == 4, lo, x)
            x = tl.where(fields == 5, hi, x)
            x = tl.where(fields == 6, my_kv, x)
            x = tl.where(fields == 7, slot, x)
            x = tl.where(fields == 8, k_start, x)
            at = before + j + fields * 0
            tl.store(items_ptr + at.to(tl.int64) * 16 + fields, x, mask=at < max_items)
    else:
        if PAD_ROWS:
            last = tl.load(cu_q_ptr + num_seqs)
            x = tl.where(fields == 0, num_seqs, tl.where(fields == 1, last, 0))
            at = total + fields * 0
            tl.store(items_ptr + at.to(tl.int64) * 16 + fields, x, mask=at < max_items)
            total += 1
        for first in range(total, max_items, BLOCK_B):
            i = first + lanes
            tl.store(items_ptr + i.to(tl.int64) * 16, lanes * 0 - 1, mask=i < max_items)


@dataclass(frozen=True)
class SplitBounds:
    """What the host must know about the work list before it exists.

    Attributes:
        items: Most items the list can hold.
        slots: Most partial states; 0 means that no sequence is cut.
        chunk: Keys per part that the host chose; 0 leaves the choice to the device.
    """

    items: int
    slots: int
    chunk: int


def split_bounds(
    q_lens: Sequence[int] | None, kv_lens: Sequence[int] | None, num_seqs: int, total_q: int,
    max_seqlen_q: int, max_seqlen_k: int, left: int | None, short_rows: int, block_m: int,
    block_n: int, processors: int, occupancy: int, rate: float, min_chunk: int, num_kv_heads: int,
    group: int, chunk: int, splits: int, c0: int, pad_rows: bool,
) -> SplitBounds:  # fmt: skip
    """Size the work list from what the host knows; exact lengths also choose the cut."""
    pad = int(pad_rows)
    if q_lens is None or kv_lens is None:
        max_tiles = min(num_seqs, total_q)
        rows = min(max_seqlen_q * group, short_rows)
        max_tiles = min(max_tiles * -(-rows // block_m), total_q * group // block_m + num_seqs)
        if c0:
            parts = count_chunks(max_seqlen_k, c0)
            cut = num_seqs * parts
        elif splits or chunk:
            cut = max_tiles * (splits or -(-max_seqlen_k // chunk))
        else:
            cut = max_tiles * -(-max_seqlen_k // min_chunk)
            slots = processors * occupancy
            cut = min(cut, WAVES * -(-slots // num_kv_heads) + 2 * max_tiles)
        items = cut + max_tiles if c0 else max(cut, max_tiles)
        return SplitBounds(items + pad, cut, chunk)
    return _exact_bounds(
        q_lens, kv_lens, left, short_rows, block_m, block_n, processors, occupancy, rate, min_chunk,
        num_kv_heads, group, chunk, splits, c0, pad,
    )  # fmt: skip


def _exact_bounds(
    q_lens: Sequence[int], kv_lens: Sequence[int], left: int | None, short_rows: int, block_m: int,
    block_n: int, processors: int, occupancy: int, rate: float, min_chunk: int, num_kv_heads: int,
    group: int, chunk: int, splits: int, c0: int, pad: int,
) -> SplitBounds:  # fmt: skip
    longest_q = max(q_lens, default=0)
    uniform = longest_q == min(q_lens, default=0)
    if uniform and left is None and longest_q * group <= short_rows and not c0:
        # The common step: equal queries, so lists of lengths are all there is to look at.
        each, spans = -(-longest_q * group // block_m), kv_lens
        tiles = [each] * len(spans) if each > 1 else None
    else:
        each, tiles, spans = 1, [], []
        states = items = 0
        for q_len, kv_len in zip(q_lens, kv_lens):
            rows = q_len * group
            if not 0 < rows <= short_rows:
                continue
            lo = 0
            if left is not None:
                lo = min(max(kv_len - q_len - left, 0), kv_len) // block_n * block_n
            tiles.append(-(-rows // block_m))
            spans.append(kv_len - lo)
            if c0:
                parts = 1
                if tiles[-1] == 1 and kv_len > lo:
                    parts = count_chunks(kv_len, c0) - count_chunks(lo + 1, c0) + 1
                items += tiles[-1] * parts
                states += parts if parts > 1 else 0
        if c0:
            return SplitBounds(items + pad, states, 1)
    if not spans or not each:
        return SplitBounds(pad, 0, 1)
    programs = len(spans) if tiles is None else sum(tiles)
    longest = max(spans)
    if not (chunk or splits):
        work = sum(spans) if tiles is None else sum(map(mul, tiles, spans))
        chunk = choose_chunk(
            work, programs, longest, processors=processors, occupancy=occupancy, rate=rate,
            min_chunk=min_chunk, num_kv_heads=num_kv_heads, group=group, block_n=block_n,
        )  # fmt: skip
    if splits:
        items = programs * splits
        return SplitBounds(items + pad, items if splits > 1 and longest > block_n else 0, chunk)
    if longest <= chunk:
        return SplitBounds(programs + pad, 0, chunk)
    # Rounding to key tiles can only make fewer parts than these.
    parts = [(n + chunk - 1) // chunk or 1 for n in spans]
    items = sum(parts) if tiles is None else sum(map(mul, tiles, parts))
    return SplitBounds(items + pad, items, chunk)


__all__ = [
    "CHUNKS_BASE", "SplitBounds", "_schedule_kernel", "chunk_of", "chunk_start", "count_chunks",
    "split_bounds",
]  # fmt: skip
