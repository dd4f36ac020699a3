"""Tile functions shared by the prefill and the split kernels.

The maths, for a tile of rows and the keys of a range, in units of log2:

    s = q . k * scale * log2(e)          (softcap, then ALiBi, then mask, each if asked)
    m' = max(m, max_n s)                 running maximum, -inf while no key was seen
    p  = exp2(s - m')                    with m' replaced by 0 while it is -inf
    l  = l * exp2(m - m') + sum_n p,     acc = acc * exp2(m - m') + p @ v

and in the end ``o = acc / l``, ``lse = (m + log2 l) * ln 2`` (Milakov and Gimelshein, 2018;
FlashAttention). Head dims that are no power of two are kept as two tiles, D0 + D1 lanes.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NEG_INF = tl.constexpr(float("-inf"))
#: Stands in for a scale of 0, so that masked scores stay -inf; exp2 of anything times it is 1.
TINY_SCALE = tl.constexpr(1.2e-38)


@triton.jit
def e4m3_to_fp16(x):
    """Decode e4m3fn bytes exactly, for targets without a conversion instruction."""
    wide = x.to(tl.int16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    # Same layout of fields, but the exponent bias is 15 instead of 7: a factor of 2**8.
    value = (bits.to(tl.float16, bitcast=True) * 256.0).to(tl.float16)
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), value).to(tl.float16)


@triton.jit
def to_compute(x, dtype: tl.constexpr, FP8: tl.constexpr):
    """Bring a loaded tile to the dtype that the products run in."""
    if FP8 == 2:
        return e4m3_to_fp16(x).to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def load_rows(ptr, offsets, keep, LANE: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
              MASK_ROWS: tl.constexpr):  # fmt: skip
    """Load lanes [LANE, LANE + LANES) of rows; lanes >= WIDTH and rows not kept are 0."""
    lane = LANE + tl.arange(0, LANES)
    ptrs = ptr + offsets[:, None] + lane[None, :]  # [ROWS, LANES]
    if LANE + LANES > WIDTH:
        if MASK_ROWS:
            x = tl.load(ptrs, mask=keep[:, None] & (lane[None, :] < WIDTH), other=0.0)
        else:
            x = tl.load(ptrs, mask=lane[None, :] < WIDTH, other=0.0)
    elif MASK_ROWS:
        x = tl.load(ptrs, mask=keep[:, None], other=0.0)
    else:
        x = tl.load(ptrs)
    return x


@triton.jit
def full_strides(stride_p, stride_n, stride_h, KV_ALIGN: tl.constexpr, NARROW: tl.constexpr):
    """Strides given in units of KV_ALIGN elements, so that the compiler knows their alignment.

    ``NARROW`` says what fits 32 bits, which saves registers and most of the arithmetic of a decode
    step: 1, offsets within a page; 2, those within the whole cache.
    """
    stride_p = stride_p if NARROW == 2 else stride_p.to(tl.int64)
    stride_n = stride_n if NARROW > 0 else stride_n.to(tl.int64)
    return stride_p * KV_ALIGN, stride_n * KV_ALIGN, stride_h.to(tl.int64) * KV_ALIGN


@triton.jit
def load_pages(table_ptr, start, key_lo, key_hi, PAGE_SIZE: tl.constexpr, CLAMP: tl.constexpr,
               BLOCK_N: tl.constexpr):  # fmt: skip
    """Page ids of the keys from ``start`` on: one if a page holds a whole tile, else [BLOCK_N]."""
    if PAGE_SIZE % BLOCK_N == 0:
        return tl.load(table_ptr + start // PAGE_SIZE, mask=start < key_hi, other=0)
    else:
        n = start + tl.arange(0, BLOCK_N)
        if CLAMP:
            n = tl.maximum(tl.minimum(n, key_hi - 1), key_lo)
        some = (n * 0 + key_lo if CLAMP else n) < key_hi
        return tl.load(table_ptr + n // PAGE_SIZE, mask=some, other=0)


@triton.jit
def row_offsets(pages, start, n, stride_page, stride_row, PAGE_SIZE: tl.constexpr,
                NARROW: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Element offsets [BLOCK_N] of the rows of keys ``n``, ``start ..``; see ``full_strides``."""
    if PAGE_SIZE == 0:
        return (n if NARROW == 2 else n.to(tl.int64)) * stride_row
    else:
        if PAGE_SIZE % BLOCK_N == 0:
            slot = start % PAGE_SIZE + (n - start)
        else:
            slot = n % PAGE_SIZE
        if NARROW == 0:
            slot = slot.to(tl.int64)
        if NARROW < 2:
            pages = pages.to(tl.int64)
        return pages * stride_page + slot * stride_row


@triton.jit
def tanh(x, ACCURATE: tl.constexpr):
    """Tanh that cannot overflow: exp2 may reach inf or 0, and both give the right limit."""
    y = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)
    if ACCURATE:
        # Near 0 the difference above cancels; the odd series is exact to fp32 there.
        xx = x * x
        series = x * (1.0 - xx * (0.33333334 - xx * (0.13333334 - xx * 0.05396825)))
        y = tl.where(tl.abs(x) < 0.1, series, y)
    return y


@triton.jit
def key_range(pos_first, pos_last, kv_len, left, right, HAS_LEFT: tl.constexpr,
              HAS_RIGHT: tl.constexpr):  # fmt: skip
    """Keys [lo, hi) that any row between two positions sees; lo == hi if none."""
    lo = kv_len * 0
    hi = kv_len
    if HAS_LEFT:
        lo = tl.maximum(pos_first - left, 0)
    if HAS_RIGHT:
        hi = tl.minimum(kv_len, pos_last + right + 1)
    return lo, tl.maximum(hi, lo)


@triton.jit
def exponent_form(m, scale):
    """``factor`` and ``base`` [ROWS] such that ``exp2(s * factor - base)`` is a row's softmax term.

    One fused step a score: ``(s - m) * scale`` but for the rounding of ``base = m * scale``, which
    all terms of a row share, so that it cancels, as long as it is small. From 2**28 on it is not;
    but scores that differ at all are then so far apart that only the peak counts, and a power of
    two, whose product is exact, serves as the factor.
    """
    power = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    base = m * scale
    large = tl.abs(base) >= 268435456.0
    return tl.where(large, power, scale), tl.where(large, m * power, base)


@triton.jit
def settle(x):
    """``x``, used: an empty instruction that the compiler must have the values of a product for.

    It otherwise leaves a product running into the next turn, whose registers are then taken twice.
    """
    return tl.inline_asm_elementwise("", "=f,0", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def forget(x):
    """The integer ``x``, of which the compiler knows nothing: what follows from it is made anew.

    It otherwise keeps what a program needs at its begin and at its end in registers in between.
    """
    return tl.inline_asm_elementwise("", "=r,0", [x], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def attend(
    q0, q1, acc0, acc1, m, l,  # noqa: E741
    k_ptr, v_ptr, table_ptr, mask_rows,
    row_pos, row_valid, slope, scale, softcap,
    lo, hi, key_lo, key_hi, left, right,
    stride_kp, stride_kn, stride_vp, stride_vn,
    MASKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_MASK: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    DV: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr,
    SHARE_KV: tl.constexpr, SAME_STRIDES: tl.constexpr, NARROW: tl.constexpr,
    FP8: tl.constexpr, ROW_SCALE: tl.constexpr, FUSE: tl.constexpr, LANE_SUMS: tl.constexpr,
    SETTLE: tl.constexpr = False, MAPS: tl.constexpr = False,
    k_map=None, v_map=None, map_row=0, k_lane=0, v_lane=0,
):  # fmt: skip
    """Fold the keys [lo, hi), lo a multiple of BLOCK_N, into the state (acc, m, l) of a row tile.

    ``m`` is in units of the scores as they leave this loop: times ``score_unit`` it is in log2.
    Keys outside [key_lo, key_hi) are not read: their slots may hold anything. ``MASKED`` says that
    the range may hold keys that some row does not see. ``scale`` includes log2(e) unless there is
    a softcap, whose unit is natural; ``slope`` includes log2(e). With ``MAPS`` whole tiles of keys
    come through tensor maps, from row ``map_row`` and lane ``k_lane`` on, which takes no addresses.
    """
    dtype: tl.constexpr = q0.dtype
    accurate: tl.constexpr = dtype == tl.float32
    # Keys out of range are not read: others are in their place, which takes fewer registers than
    # masks, but for the many rows that a thread has of wide tiles.
    clamp: tl.constexpr = not SHARE_KV
    masks: tl.constexpr = MASKED and not clamp
    lanes = tl.arange(0, BLOCK_N)
    # The last key that a row sees. Before key_lo there is none that the window would show.
    last = row_pos * 0 + (key_hi - 1)
    if HAS_RIGHT:
        last = tl.minimum(row_pos + right, key_hi - 1)
    fused: tl.constexpr = FUSE and not (HAS_SOFTCAP or HAS_ALIBI or ROW_SCALE)
    sums = tl.zeros([q0.shape[0], BLOCK_N if LANE_SUMS else 1], tl.float32)
    if LANE_SUMS:
        sums = tl.where(lanes[None, :] == 0, l[:, None], sums)
    pages = lo * 0
    if PAGE_SIZE > 0:
        pages = load_pages(table_ptr, lo, key_lo, key_hi, PAGE_SIZE, clamp, BLOCK_N)
    for start in range(lo, hi, BLOCK_N):
        n = start + lanes
        keep = (n >= key_lo) & (n < key_hi)
        row = n
        if MASKED and clamp:
            row = tl.minimum(n, key_hi - 1)
            if HAS_LEFT:
                row = tl.maximum(row, key_lo)
        if MAPS:
            k0 = k_map.load([map_row + start, k_lane])
        else:
            k_off = row_offsets(pages, start, row, stride_kp, stride_kn, PAGE_SIZE, NARROW, BLOCK_N)
            k0 = to_compute(load_rows(k_ptr, k_off, keep, 0, D0, D, masks), dtype, FP8)
        s = tl.dot(q0, tl.trans(k0), input_precision="ieee")  # [BLOCK_M, BLOCK_N] fp32
        if D1 > 0:
            k1 = to_compute(load_rows(k_ptr, k_off, keep, D0, D1, D, masks), dtype, FP8)
            s = tl.dot(q1, tl.trans(k1), s, input_precision="ieee")
        row_scale = scale
        if ROW_SCALE:
            s = s * scale[:, None]
            row_scale = 1.0
        if HAS_SOFTCAP:
            s = (softcap * LOG2E) * tanh(s * (row_scale / softcap), accurate)
            row_scale = 1.0
        if HAS_ALIBI:
            distance = tl.abs(row_pos[:, None] - n[None, :]).to(tl.float32)
            s = s * row_scale - slope[:, None] * distance
            row_scale = 1.0
        if MASKED:
            see = n[None, :] <= last[:, None]
            if HAS_LEFT:
                see = see & (n[None, :] >= (row_pos - left)[:, None])
            if HAS_MASK:
                inside = row_valid[:, None] & keep[None, :]
                bits = tl.load(mask_rows[:, None] + n[None, :], mask=inside, other=0)
                see = see & (bits != 0)
            s = tl.where(see, s, NEG_INF)
        m_new = tl.maximum(m, tl.max(s, 1))
        m_safe = m_new
        if MASKED:
            m_safe = tl.where(m_new == NEG_INF, 0.0, m_new)
        if fused:
            factor, base_new = exponent_form(m_safe, scale)
            p = tl.exp2(s * factor[:, None] - base_new[:, None])
            _, base = exponent_form(m, scale)  # -inf at first; not carried, registers are short
            alpha = tl.exp2(base - base_new)
        else:
            # The difference first: scaled scores of 1e30 round further apart than exp2 can bridge.
            p = tl.exp2((s - m_safe[:, None]) * row_scale)
            alpha = tl.exp2((m - m_safe) * row_scale)
        if LANE_SUMS:
            sums = sums * alpha[:, None] + p
        else:
            l = l * alpha + tl.sum(p, 1)  # noqa: E741
        m = m_new
        acc0 = acc0 * alpha[:, None]
        if SHARE_KV:
            acc0 = tl.dot(p.to(dtype), k0, acc0, input_precision="ieee")
        elif MAPS:
            v0 = v_map.load([map_row + start, v_lane])
            acc0 = tl.dot(p.to(dtype), v0, acc0, input_precision="ieee")
        else:
            v_off = k_off
            if not SAME_STRIDES:
                v_off = row_offsets(
                    pages, start, row, stride_vp, stride_vn, PAGE_SIZE, NARROW, BLOCK_N
                )
            v0 = to_compute(load_rows(v_ptr, v_off, keep, 0, DV0, DV, masks), dtype, FP8)
            acc0 = tl.dot(p.to(dtype), v0, acc0, input_precision="ieee")
            if DV1 > 0:
                v1 = to_compute(load_rows(v_ptr, v_off, keep, DV0, DV1, DV, masks), dtype, FP8)
                acc1 = acc1 * alpha[:, None]
                acc1 = tl.dot(p.to(dtype), v1, acc1, input_precision="ieee")
        if SETTLE:
            acc0 = settle(acc0)
            if DV1 > 0:
                acc1 = settle(acc1)
        if PAGE_SIZE > 0:
            # Carried into the next turn: a table load in the turn that uses it would leave the
            # key and value loads nothing to be pipelined behind.
            pages = load_pages(
                table_ptr, start + BLOCK_N, key_lo, key_hi, PAGE_SIZE, clamp, BLOCK_N
            )
    if LANE_SUMS:
        l = tl.sum(sums, 1)  # noqa: E741
    return acc0, acc1, m, l


@triton.jit
def scale_keys(scale, k_scale_ptr):
    """The scale of scores times that of keys, which may be 0 or come close; NaN stays visible."""
    scale *= tl.load(k_scale_ptr)
    return tl.where(scale < TINY_SCALE, TINY_SCALE, scale)


@triton.jit
def score_unit(scale, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, ROW_SCALE: tl.constexpr):
    """What ``attend`` leaves to be multiplied: the scale, unless it was applied on the way."""
    if HAS_SOFTCAP or HAS_ALIBI or ROW_SCALE:
        return 1.0
    else:
        return scale


@triton.jit
def fold(acc_a, m_a, l_a, acc_b, m_b, l_b):
    """Combine two unnormalised states; b after a. The order and the fused steps are fixed."""
    m = tl.maximum(m_a, m_b)
    m_safe = tl.where(m == NEG_INF, 0.0, m)
    w_a = tl.exp2(m_a - m_safe)
    w_b = tl.exp2(m_b - m_safe)
    l = tl.fma(l_a, w_a, l_b * w_b)  # noqa: E741
    acc = tl.fma(acc_a, tl.broadcast_to(w_a[:, None], acc_a.shape), acc_b * w_b[:, None])
    return acc, m, l


@triton.jit
def add_sink(m, l, sink):  # noqa: E741
    """Count one more key of logit ``sink`` (natural units); returns m, l and the factor on acc."""
    logit = sink * LOG2E
    m_new = tl.maximum(m, logit)
    m_safe = tl.where(m_new == NEG_INF, 0.0, m_new)
    alpha = tl.exp2(m - m_safe)
    return m_new, l * alpha + tl.exp2(logit - m_safe), alpha


@triton.jit
def natural_lse(m, l):  # noqa: E741
    """Natural log of the softmax mass; -inf for a row that saw nothing."""
    return tl.where(l == 0.0, NEG_INF, (m + tl.log2(l)) * LN2)


@triton.jit
def normalise(acc, empty, l, factor):  # noqa: E741
    """``acc * factor / l``, exactly 0 for the rows that saw no key."""
    inverse = factor / tl.where(l == 0.0, 1.0, l)
    return tl.where(empty[:, None], 0.0, acc * inverse[:, None])


@triton.jit
def store_rows(ptr, offsets, x, keep, LANE: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """Store lanes [LANE, LANE + LANES) of the rows kept; lanes >= WIDTH are dropped."""
    lane = LANE + tl.arange(0, LANES)
    ptrs = ptr + offsets[:, None] + lane[None, :]
    x = x.to(ptr.dtype.element_ty)
    if LANE + LANES > WIDTH:
        tl.store(ptrs, x, mask=keep[:, None] & (lane[None, :] < WIDTH))
    else:
        tl.store(ptrs, x, mask=keep[:, None])


@triton.jit
def load_query(q_ptr, offsets, keep, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
               COMPUTE: tl.constexpr, FP8_Q: tl.constexpr, ROW_SCALE: tl.constexpr):  # fmt: skip
    """Query tiles in the compute dtype, and the factor [ROWS] that undoes their scaling.

    Keys in e4m3 are exact in fp16 but bf16 queries may exceed its range: each row is then divided
    by the power of two below its largest magnitude, which loses no bits.
    """
    rows: tl.constexpr = offsets.shape[0]
    x0 = load_rows(q_ptr, offsets, keep, 0, D0, D, True)
    factor = tl.full([rows], 1.0, tl.float32)
    if ROW_SCALE:
        x0 = x0.to(tl.float32)
        factor = tl.max(tl.abs(x0), 1)
        if D1 > 0:
            x1 = load_rows(q_ptr, offsets, keep, D0, D1, D, True).to(tl.float32)
            factor = tl.maximum(factor, tl.max(tl.abs(x1), 1))
        factor = (factor.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        factor = tl.where(factor > 0.0, factor, 1.0)
        q0 = (x0 / factor[:, None]).to(COMPUTE)
        q1 = q0
        if D1 > 0:
            q1 = (x1 / factor[:, None]).to(COMPUTE)
    else:
        q0 = to_compute(x0, COMPUTE, FP8_Q)
        q1 = q0
        if D1 > 0:
            q1 = to_compute(load_rows(q_ptr, offsets, keep, D0, D1, D, True), COMPUTE, FP8_Q)
    return q0, q1, factor
