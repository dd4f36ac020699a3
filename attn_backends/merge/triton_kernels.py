"""The merge kernels in Triton: tiles of rows x head dim, one pass over memory.

A program owns ROWS rows (token, head), reads their LSEs, computes their weights once, and combines
``[ROWS, BLOCK_D]`` tiles with 16-byte accesses. As everywhere, with M the largest LSE:

    w_i = exp(l_i - M) / sum_j exp(l_j - M)    o = sum_i w_i o_i    l = M + ln sum_j exp(l_j - M)

+inf counts as -inf, and an output of weight 0 is not read; to know that takes one comparison.
IN_PLACE puts a barrier between the last read and the first write of a program, since a row's LSE
is read by several warps and written by one. With PDL a kernel may be launched while the one ahead
of it still runs; it waits for that one before it loads anything, and lets the next come as early.
With FETCH, for contiguous rows of whole vectors, the first RESIDENT programs, which wait, have
brought to L2 what the LSEs call for that lie there at the time, and each the LSEs of a later one.

Strides of outputs come in units of VEC elements, so that the compiler sees their alignment. This
module imports Triton; go through ``triton_merge``.
"""

from __future__ import annotations

import triton
import triton.language as tl

FP8_MAX = tl.constexpr(448.0)
NO_WEIGHT = tl.constexpr(103.9722)  # exp(-x) is 0 in float32 for any x beyond


@triton.jit
def _no_keys(lse):
    """LSEs with +inf, which says as -inf that there are no keys, as -inf."""
    return tl.where(lse == float("inf"), float("-inf"), lse)


@triton.jit
def _read_lse(ptrs, mask):
    """The same of what lies in memory; masked rows are -inf."""
    return _no_keys(tl.load(ptrs, mask=mask, other=float("-inf")))


@triton.jit
def _offsets(rows, num_heads, width, stride_t, stride_h, STRIDED: tl.constexpr):
    """64-bit offsets of 32-bit row numbers, by strides or of contiguous rows of ``width``."""
    if STRIDED:
        tokens = rows // num_heads
        heads = rows - tokens * num_heads
        offsets = tokens.to(tl.int64) * stride_t + heads.to(tl.int64) * stride_h
    else:
        offsets = rows.to(tl.int64) * width
    return offsets


@triton.jit
def _weighs(lse, other):
    """Whether a state has any weight beside another: told without exp, as rows.cuh does."""
    return (lse != float("-inf")) & ~(other - lse > NO_WEIGHT)


@triton.jit
def _fetch_lines(a, b):
    """Have two lines brought to L2 by one thread; no read, see rows.cuh."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .b32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        @first prefetch.global.L2 [$1];
        @first prefetch.global.L2 [$2];
        mov.b32 $0, 0;
        }""",
        "=r,l,l",
        [a.to(tl.int64), b.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _fetch_bulk(a, size_a, b, size_b):
    """The same for so many bytes, which may be none."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred first, some_a, some_b;
        .reg .b32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        setp.ne.and.s32 some_a, $2, 0, first;
        setp.ne.and.s32 some_b, $4, 0, first;
        @some_a cp.async.bulk.prefetch.L2.global [$1], $2;
        @some_b cp.async.bulk.prefetch.L2.global [$3], $4;
        mov.b32 $0, 0;
        }""",
        "=r,l,r,l,r",
        [a.to(tl.int64), size_a, b.to(tl.int64), size_b],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _fetch_tile(
    o_a_ptr, lse_a_ptr, o_b_ptr, lse_b_ptr, first, num_rows, num_prefix_rows,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, HAS_B: tl.constexpr,
):  # fmt: skip
    """Have a tile of contiguous rows brought to L2: a side of it if all rows need that.

    What they need is told by the LSEs that lie there now. A kernel ahead may still change them:
    then too much is brought, or too little, but nothing is merged by them.
    """
    rows = first + tl.arange(0, ROWS)
    live, has_prefix = rows < num_rows, rows < num_prefix_rows
    lse_a = tl.load(lse_a_ptr + rows, mask=live & has_prefix, other=float("-inf"), volatile=True)
    lse_b = tl.load(lse_b_ptr + rows, mask=live, other=float("-inf"), volatile=True)
    lse_a, lse_b = _no_keys(lse_a), _no_keys(lse_b)
    all_a = tl.min((_weighs(lse_a, lse_b) | ~live).to(tl.int32), 0)
    all_b = tl.min((_weighs(lse_b, lse_a) | ~live).to(tl.int32), 0)
    num = tl.minimum(num_rows - first, ROWS).to(tl.int32)
    size = num * (HEAD_DIM * o_a_ptr.dtype.element_ty.primitive_bitwidth // 8)
    at = first.to(tl.int64) * HEAD_DIM
    _fetch_bulk(o_a_ptr + at, size * all_a, o_b_ptr + at, size * all_b if HAS_B else size * 0)


@triton.jit
def _read(o_ptr, rows, columns, mask, inside):
    """A tile of outputs, 0 where masked."""
    at = rows[:, None] + columns[None, :]
    return tl.load(o_ptr + at, mask=mask[:, None] & inside[None, :], other=0.0)


@triton.jit
def _weighted(w, o):
    """Outputs times their weights in float32; of weight 0 whatever they hold is nothing."""
    return tl.where((w != 0.0)[:, None], w[:, None] * o.to(tl.float32), 0.0)


def _merge_pair_kernel(
    o_a_ptr,
    lse_a_ptr,
    o_b_ptr,
    lse_b_ptr,
    o_ptr,
    lse_ptr,
    scale_ptr,
    scale: tl.float32,
    num_tokens: tl.int64,
    num_heads: tl.int32,
    num_prefix: tl.int64,
    stride_o_a_t: tl.int64,
    stride_o_a_h: tl.int64,
    stride_lse_a_t: tl.int64,
    stride_lse_a_h: tl.int64,
    stride_o_b_t: tl.int64,
    stride_o_b_h: tl.int64,
    stride_lse_b_t: tl.int64,
    stride_lse_b_h: tl.int64,
    stride_o_t: tl.int64,
    stride_o_h: tl.int64,
    stride_lse_t: tl.int64,
    stride_lse_h: tl.int64,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    VEC: tl.constexpr,
    STRIDED: tl.constexpr,
    HAS_B: tl.constexpr,
    SCALED: tl.constexpr,
    FETCH: tl.constexpr,
    RESIDENT: tl.constexpr,
    IN_PLACE: tl.constexpr,
    PDL: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = rows < num_tokens * num_heads
    at_lse_a = lse_a_ptr + _offsets(rows, num_heads, 1, stride_lse_a_t, stride_lse_a_h, STRIDED)
    at_lse_b = lse_b_ptr + _offsets(rows, num_heads, 1, stride_lse_b_t, stride_lse_b_h, STRIDED)
    width: tl.constexpr = HEAD_DIM // VEC
    at_a = _offsets(rows, num_heads, width, stride_o_a_t, stride_o_a_h, STRIDED) * VEC
    at_b = _offsets(rows, num_heads, width, stride_o_b_t, stride_o_b_h, STRIDED) * VEC
    at_o = _offsets(rows, num_heads, width, stride_o_t, stride_o_h, STRIDED) * VEC
    has_prefix = rows < tl.where(num_prefix < 0, num_tokens, num_prefix) * num_heads
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if FETCH:
            num_rows = num_tokens * num_heads
            first = tl.program_id(0) * ROWS
            ahead = first + RESIDENT * ROWS
            ahead = tl.where(ahead < num_rows, ahead, first)
            _fetch_lines(lse_a_ptr + ahead, lse_b_ptr + ahead)
            if tl.program_id(0) < RESIDENT:
                prefix_rows = tl.where(num_prefix < 0, num_tokens, num_prefix) * num_heads
                _fetch_tile(
                    o_a_ptr, lse_a_ptr, o_b_ptr, lse_b_ptr, first, num_rows, prefix_rows,
                    HEAD_DIM, ROWS, HAS_B,
                )  # fmt: skip
        tl.extra.cuda.gdc_wait()
    lse_a = _read_lse(at_lse_a, live & has_prefix)
    lse_b = _read_lse(at_lse_b, live)
    need_a = live & _weighs(lse_a, lse_b)
    need_b = live & _weighs(lse_b, lse_a)
    if HEAD_DIM <= BLOCK_D:  # asked for before the weights are computed
        columns = tl.arange(0, BLOCK_D)
        a = _read(o_a_ptr, at_a, columns, need_a, columns < HEAD_DIM)
        if HAS_B:
            b = _read(o_b_ptr, at_b, columns, need_b, columns < HEAD_DIM)
    peak = tl.maximum(lse_a, lse_b)  # drops a NaN, which exp brings back
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    e_a = tl.exp(lse_a - peak)
    e_b = tl.exp(lse_b - peak)
    total = e_a + e_b
    empty = total == 0.0
    # Rounded to nearest: with an approximate quotient the weights may sum to more than 1.
    w_a = tl.where(empty, 0.0, tl.div_rn(e_a, total))
    w_b = tl.where(empty, 0.0, tl.div_rn(e_b, total))

    for start in tl.static_range(0, HEAD_DIM, BLOCK_D):
        columns = start + tl.arange(0, BLOCK_D)
        inside = columns < HEAD_DIM
        if HEAD_DIM > BLOCK_D:
            a = _read(o_a_ptr, at_a, columns, need_a, inside)
            if HAS_B:
                b = _read(o_b_ptr, at_b, columns, need_b, inside)
        o = _weighted(w_a, a)
        if HAS_B:
            o += _weighted(w_b, b)
        if SCALED:
            divisor = tl.load(scale_ptr) if SCALED == 2 else scale  # 2: the scale is on the device
            o = tl.div_rn(o, tl.zeros_like(o) + divisor)
            o = tl.maximum(o, -FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
            o = tl.minimum(o, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
        if IN_PLACE:
            tl.debug_barrier()
        tl.store(
            o_ptr + at_o[:, None] + columns[None, :],
            o.to(o_ptr.dtype.element_ty),
            mask=live[:, None] & inside[None, :],
        )
    at = _offsets(rows, num_heads, 1, stride_lse_t, stride_lse_h, STRIDED)
    tl.store(lse_ptr + at, peak + tl.log(total), mask=live)


@triton.jit
def _jump(states, stride, j1, j2, j3, j4, j5, j6, j7, SEPARATE: tl.constexpr):
    """Distance of states from the first: multiples of a stride, or one number each."""
    if SEPARATE:
        jump = tl.where(states == 1, j1, 0)
        jump = tl.where(states == 2, j2, jump)
        jump = tl.where(states == 3, j3, jump)
        jump = tl.where(states == 4, j4, jump)
        jump = tl.where(states == 5, j5, jump)
        jump = tl.where(states == 6, j6, jump)
        jump = tl.where(states == 7, j7, jump)
    else:
        jump = states * stride
    return jump


def _merge_many_kernel(
    o_0_ptr,
    lse_0_ptr,
    counts_ptr,
    o_ptr,
    lse_ptr,
    num_states: tl.int64,
    num_tokens: tl.int64,
    num_heads: tl.int32,
    stride_o_n: tl.int64,
    stride_lse_n: tl.int64,
    o_1: tl.int64,
    o_2: tl.int64,
    o_3: tl.int64,
    o_4: tl.int64,
    o_5: tl.int64,
    o_6: tl.int64,
    o_7: tl.int64,
    lse_1: tl.int64,
    lse_2: tl.int64,
    lse_3: tl.int64,
    lse_4: tl.int64,
    lse_5: tl.int64,
    lse_6: tl.int64,
    lse_7: tl.int64,
    stride_o_in_t: tl.int64,
    stride_o_in_h: tl.int64,
    stride_lse_in_t: tl.int64,
    stride_lse_in_h: tl.int64,
    stride_o_t: tl.int64,
    stride_o_h: tl.int64,
    stride_lse_t: tl.int64,
    stride_lse_h: tl.int64,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_O: tl.constexpr,
    SHORT: tl.constexpr,
    VEC: tl.constexpr,
    STRIDED: tl.constexpr,
    SEPARATE: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    IN_PLACE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = rows < num_tokens * num_heads
    width: tl.constexpr = HEAD_DIM // VEC
    at_in = _offsets(rows, num_heads, width, stride_o_in_t, stride_o_in_h, STRIDED)
    at_lse_in = _offsets(rows, num_heads, 1, stride_lse_in_t, stride_lse_in_h, STRIDED)
    if HAS_COUNTS:
        count = tl.load(counts_ptr + rows // num_heads, mask=live, other=0).to(tl.int64)
        count = tl.minimum(count, num_states)
    else:
        count = tl.where(live, num_states, 0)
    if SHORT:  # a loop of one turn, which the compiler inlines
        longest: tl.constexpr = BLOCK_O
    else:
        longest = tl.max(count, 0)

    # Peak and sum of each row: the recurrence of the online softmax, one state at a time. A
    # reduction over a tile of states would tie these vectors to a layout of its own, and every
    # later use would go through shared memory.
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for first in range(0, longest, BLOCK_O):
        for s in tl.static_range(BLOCK_O):
            state = tl.zeros([], tl.int64) + first + s
            at = _jump(
                state, stride_lse_n, lse_1, lse_2, lse_3, lse_4, lse_5, lse_6, lse_7, SEPARATE
            )
            lse = _read_lse(lse_0_ptr + at + at_lse_in, state < count)
            new_peak = tl.maximum(peak, lse)
            shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            total = total * tl.exp(peak - shift) + tl.exp(lse - shift)
            peak = new_peak
    shift = tl.where(peak == float("-inf"), 0.0, peak)

    at_o = _offsets(rows, num_heads, width, stride_o_t, stride_o_h, STRIDED)
    for start in tl.static_range(0, HEAD_DIM, BLOCK_D):
        columns = start + tl.arange(0, BLOCK_D)
        inside = columns < HEAD_DIM
        o = tl.zeros([ROWS, BLOCK_D], tl.float32)
        for first in range(0, longest, BLOCK_O):
            for s in tl.static_range(BLOCK_O):
                state = tl.zeros([], tl.int64) + first + s
                known = state < count
                at = _jump(
                    state, stride_lse_n, lse_1, lse_2, lse_3, lse_4, lse_5, lse_6, lse_7, SEPARATE
                )
                lse = _read_lse(lse_0_ptr + at + at_lse_in, known)
                w = tl.where(total == 0.0, 0.0, tl.div_rn(tl.exp(lse - shift), total))  # [ROWS]
                at = _jump(state, stride_o_n, o_1, o_2, o_3, o_4, o_5, o_6, o_7, SEPARATE)
                o_i = tl.load(
                    o_0_ptr + (at + at_in[:, None]) * VEC + columns[None, :],
                    mask=(known & (w != 0.0))[:, None] & inside[None, :],
                    other=0.0,
                )  # [ROWS, BLOCK_D]
                o += w[:, None] * o_i.to(tl.float32)
        if IN_PLACE:
            tl.debug_barrier()
        tl.store(
            o_ptr + at_o[:, None] * VEC + columns[None, :],
            o.to(o_ptr.dtype.element_ty),
            mask=live[:, None] & inside[None, :],
        )
    if IN_PLACE:
        tl.debug_barrier()
    at_lse = _offsets(rows, num_heads, 1, stride_lse_t, stride_lse_h, STRIDED)
    tl.store(lse_ptr + at_lse, shift + tl.log(total), mask=live)


_INTS = (
    "num_states num_tokens num_heads num_prefix scale stride_o_n stride_lse_n "
    "o_1 o_2 o_3 o_4 o_5 o_6 o_7 lse_1 lse_2 lse_3 lse_4 lse_5 lse_6 lse_7 "
    "stride_o_a_t stride_o_a_h stride_lse_a_t stride_lse_a_h stride_o_b_t stride_o_b_h "
    "stride_lse_b_t stride_lse_b_h stride_o_in_t stride_o_in_h stride_lse_in_t stride_lse_in_h "
    "stride_o_t stride_o_h stride_lse_t stride_lse_h"
).split()
_LSES = "lse_a_ptr lse_b_ptr lse_0_ptr lse_ptr scale_ptr counts_ptr".split()
_OUTPUTS = "o_a_ptr o_b_ptr o_0_ptr o_ptr".split()


def _jit(kernel, aligned: bool):
    """Compile so that nothing but the alignment of outputs, which is known, is specialised on."""
    names = kernel.__code__.co_varnames[: kernel.__code__.co_argcount]
    loose = _LSES if aligned else _LSES + _OUTPUTS
    return triton.jit(
        kernel,
        do_not_specialize=[n for n in names if n in _INTS],
        do_not_specialize_on_alignment=[n for n in names if n in loose],
    )


merge_pair_aligned = _jit(_merge_pair_kernel, True)
merge_pair_any = _jit(_merge_pair_kernel, False)
merge_many_aligned = _jit(_merge_many_kernel, True)
merge_many_any = _jit(_merge_many_kernel, False)

__all__ = ["merge_many_aligned", "merge_many_any", "merge_pair_aligned", "merge_pair_any"]
