"""Decode and short extends: the keys of a sequence split over programs, then one merge.

A program takes one item of the plan's work list (a sequence, a tile of its rows, a key range) and
one KV head. The rows of a tile are the query heads of the group, token by token: row r is token
``r // GROUP``, head ``r % GROUP``, so that a key is read once for all of them. An item that covers
all keys of its rows writes o and lse; others leave an unnormalised fp32 state (acc, m, l), and
``_merge_fwd_kernel`` folds the states of each row in key order and adds the sink. Where the host
knows that all sequences are alike (``EQUAL``), items follow from their numbers and no list is made:
a program's first load is then that of its pages.

``C0 > 0`` makes results batch invariant: the keys of a sequence are cut at fixed absolute positions
(``chunk_start``), each chunk is computed from a fresh state, and the chunks are folded in order,
within an item as between items, so that where the items were cut leaves no trace in the bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .primitives import (
    LOG2E,
    NEG_INF,
    add_sink,
    attend,
    fold,
    full_strides,
    key_range,
    load_query,
    natural_lse,
    normalise,
    scale_keys,
    score_unit,
    store_rows,
)
from .schedule import chunk_of, chunk_start

# Fields of an item, int32 each; the rest of its 64 bytes is padding.
ITEM_FIELDS = 16
ITEM_SEQ = tl.constexpr(0)  # -1: nothing to do; num_seqs: the rows after the last sequence
ITEM_Q_START = tl.constexpr(1)
ITEM_Q_LEN = tl.constexpr(2)
ITEM_TILE = tl.constexpr(3)
ITEM_LO = tl.constexpr(4)
ITEM_HI = tl.constexpr(5)
ITEM_KV_LEN = tl.constexpr(6)
ITEM_SLOT = tl.constexpr(7)  # where the partial state goes; -1: write the result
ITEM_K_START = tl.constexpr(8)
# Fields of a sequence's entry for the merge.
SEQ_FIELDS = 4  # first slot, number of parts (<= 1: nothing to merge), q_start, q_len


@triton.jit
def fill_empty_rows(o_ptr, lse_ptr, sinks_ptr, kv_head, first, total, stride_ot, stride_oh,
                    stride_lt, stride_lh, GROUP: tl.constexpr, GROUP_P2: tl.constexpr,
                    DV: tl.constexpr, DVP: tl.constexpr, HAS_SINKS: tl.constexpr):  # fmt: skip
    """Give the rows [first, total) of a KV head's query heads the state of no keys."""
    lane = tl.arange(0, GROUP_P2)
    head = kv_head * GROUP + lane
    lse = tl.full([GROUP_P2], NEG_INF, tl.float32)
    if HAS_SINKS:
        lse = tl.load(sinks_ptr + head, mask=lane < GROUP, other=0.0)
    d = tl.arange(0, DVP)
    zeros = tl.zeros([GROUP_P2, DVP], tl.float32).to(o_ptr.dtype.element_ty)
    inside = (lane[:, None] < GROUP) & (d[None, :] < DV)
    for t in range(first, total):
        row = tl.full([], 0, tl.int64) + t
        o_rows = o_ptr + row * stride_ot + head.to(tl.int64)[:, None] * stride_oh + d[None, :]
        tl.store(o_rows, zeros, mask=inside)
        lse_rows = lse_ptr + row * stride_lt + head.to(tl.int64) * stride_lh
        tl.store(lse_rows, lse, mask=lane < GROUP)


@triton.jit(
    do_not_specialize=[
        "num_seqs", "total_q", "part_rows", "left", "right", "k_scale_step", "v_scale_step",
        "equal_q", "equal_k", "equal_tiles", "equal_parts", "equal_size",
        "stride_kp", "stride_kn", "stride_kh", "stride_vp", "stride_vn", "stride_vh",
    ]
)  # fmt: skip
def _split_fwd_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,
    items_ptr, part_acc_ptr, part_ml_ptr, table_ptr,
    sinks_ptr, slopes_ptr, mask_ptr, mask_indptr, k_scale_ptr, v_scale_ptr,
    scale, softcap, v_factor,
    stride_qt, stride_qh, stride_kp, stride_kn, stride_kh, stride_vp, stride_vn, stride_vh,
    stride_ot, stride_oh, stride_lt, stride_lh, stride_table,
    num_seqs, total_q, part_rows, left, right, k_scale_step, v_scale_step,
    equal_q, equal_k, equal_tiles, equal_parts, equal_size,
    HK: tl.constexpr, GROUP: tl.constexpr, GROUP_P2: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    DV: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr, DVP: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr, HAS_MASK: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_K_SCALE: tl.constexpr, HAS_V_SCALE: tl.constexpr,
    PAGE_SIZE: tl.constexpr, SHARE_KV: tl.constexpr, SAME_STRIDES: tl.constexpr,
    NARROW: tl.constexpr, KV_ALIGN: tl.constexpr,
    COMPUTE: tl.constexpr, FP8: tl.constexpr, FP8_Q: tl.constexpr, ROW_SCALE: tl.constexpr,
    FUSE: tl.constexpr, LANE_SUMS: tl.constexpr, PHASES: tl.constexpr,
    C0: tl.constexpr, EQUAL: tl.constexpr, PDL: tl.constexpr, CHAIN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    if CHAIN:
        # Started early itself: nothing is read before the kernel ahead has ended.
        tl.extra.cuda.gdc_wait()
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    kv_head = (pid % HK).to(tl.int64)
    if EQUAL:
        slot = pid // HK
        place = slot % equal_parts
        b = slot // equal_parts // equal_tiles
        first = (slot // equal_parts % equal_tiles) * BLOCK_M
        q_start = b * equal_q
        q_len = equal_q
        lo = place * equal_size
        hi = tl.minimum(lo + equal_size, equal_k)
        kv_len = equal_k
        slot = tl.where(equal_parts > 1, slot, -1)
        k_start = tl.full([], 0, tl.int64)
    else:
        item = items_ptr + (pid // HK).to(tl.int64) * 16
        b = tl.load(item + ITEM_SEQ)
        q_start = tl.load(item + ITEM_Q_START)
        q_len = tl.load(item + ITEM_Q_LEN)
        first = tl.load(item + ITEM_TILE) * BLOCK_M
        lo = tl.load(item + ITEM_LO)
        hi = tl.load(item + ITEM_HI)
        kv_len = tl.load(item + ITEM_KV_LEN)
        slot = tl.load(item + ITEM_SLOT)
        k_start = tl.load(item + ITEM_K_START).to(tl.int64)
        if b < 0:
            return
        if b >= num_seqs:
            fill_empty_rows(o_ptr, lse_ptr, sinks_ptr, kv_head, q_start, total_q, stride_ot,
                            stride_oh, stride_lt, stride_lh, GROUP, GROUP_P2, DV, DVP,
                            HAS_SINKS)  # fmt: skip
            return

    row = first + tl.arange(0, BLOCK_M)
    row_valid = row < q_len * GROUP
    i = row // GROUP
    head = kv_head * GROUP + row % GROUP
    token = q_start.to(tl.int64) + i
    row_pos = i + (kv_len - q_len)
    q0, q1, q_factor = load_query(
        q_ptr, token * stride_qt + head * stride_qh, row_valid, D, D0, D1, COMPUTE, FP8_Q, ROW_SCALE
    )
    if HAS_K_SCALE:
        scale = scale_keys(scale, k_scale_ptr + kv_head * k_scale_step)
    slope = tl.zeros([BLOCK_M], tl.float32)
    if HAS_ALIBI:
        slope = tl.load(slopes_ptr + head) * LOG2E
    mask_rows = row
    if HAS_MASK:
        mask_rows = mask_ptr + tl.load(mask_indptr + b) + i.to(tl.int64) * kv_len
    if ROW_SCALE:
        s_scale = scale * q_factor
    else:
        s_scale = scale

    acc0 = tl.zeros([BLOCK_M, DV0], tl.float32)
    acc1 = tl.zeros([BLOCK_M, DV1 if DV1 > 0 else 16], tl.float32)
    m = tl.full([BLOCK_M], NEG_INF, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
    last = tl.minimum((first + BLOCK_M - 1) // GROUP, q_len - 1)
    key_lo, key_hi = key_range(
        first // GROUP + kv_len - q_len, last + kv_len - q_len, kv_len, left, right,
        HAS_LEFT, HAS_RIGHT,
    )  # fmt: skip
    lo = tl.maximum(lo, key_lo // BLOCK_N * BLOCK_N)
    hi = tl.minimum(hi, key_hi)
    stride_kp, stride_kn, stride_kh = full_strides(
        stride_kp, stride_kn, stride_kh, KV_ALIGN, NARROW
    )
    stride_vp, stride_vn, stride_vh = full_strides(
        stride_vp, stride_vn, stride_vh, KV_ALIGN, NARROW
    )
    k_base = k_ptr + kv_head * stride_kh + k_start * stride_kn.to(tl.int64)
    v_base = v_ptr + kv_head * stride_vh + k_start * stride_vn.to(tl.int64)
    table = table_ptr + b.to(tl.int64) * stride_table
    unit = score_unit(scale, HAS_SOFTCAP, HAS_ALIBI, ROW_SCALE)
    if C0 == 0:
        mid = lo
        if PHASES:
            # Whole tiles that every row sees need no masks.
            mid = hi
            if HAS_RIGHT:
                mid = tl.minimum(mid, first // GROUP + kv_len - q_len + right + 1)
            mid = tl.maximum(lo, mid // BLOCK_N * BLOCK_N)
            acc0, acc1, m, l = attend(  # noqa: E741
                q0, q1, acc0, acc1, m, l, k_base, v_base, table, mask_rows,
                row_pos, row_valid, slope, s_scale, softcap,
                lo, mid, key_lo, key_hi, left, right,
                stride_kp, stride_kn, stride_vp, stride_vn,
                False, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, HAS_MASK, PAGE_SIZE, BLOCK_N,
                D, D0, D1, DV, DV0, DV1, SHARE_KV, SAME_STRIDES, NARROW, FP8,
                ROW_SCALE, FUSE, LANE_SUMS,
            )  # fmt: skip
        acc0, acc1, m, l = attend(  # noqa: E741
            q0, q1, acc0, acc1, m, l, k_base, v_base, table, mask_rows,
            row_pos, row_valid, slope, s_scale, softcap,
            mid, hi, key_lo, key_hi, left, right,
            stride_kp, stride_kn, stride_vp, stride_vn,
            True, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, HAS_MASK, PAGE_SIZE, BLOCK_N,
            D, D0, D1, DV, DV0, DV1, SHARE_KV, SAME_STRIDES, NARROW, FP8,
            ROW_SCALE, FUSE, LANE_SUMS,
        )  # fmt: skip
        m *= unit
    else:
        last_chunk = tl.where(hi > lo, chunk_of(tl.maximum(hi - 1, 0), C0), -1)
        for chunk in range(chunk_of(lo, C0), last_chunk + 1):
            part0 = tl.zeros([BLOCK_M, DV0], tl.float32)
            part1 = tl.zeros([BLOCK_M, DV1 if DV1 > 0 else 16], tl.float32)
            m_part = tl.full([BLOCK_M], NEG_INF, tl.float32)
            l_part = tl.zeros([BLOCK_M], tl.float32)
            part0, part1, m_part, l_part = attend(
                q0, q1, part0, part1, m_part, l_part, k_base, v_base, table, mask_rows,
                row_pos, row_valid, slope, s_scale, softcap,
                tl.maximum(lo, chunk_start(chunk, C0)), tl.minimum(hi, chunk_start(chunk + 1, C0)),
                key_lo, key_hi, left, right, stride_kp, stride_kn, stride_vp, stride_vn,
                True, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, HAS_MASK, PAGE_SIZE, BLOCK_N,
                D, D0, D1, DV, DV0, DV1, SHARE_KV, SAME_STRIDES, NARROW, FP8,
                ROW_SCALE, FUSE, LANE_SUMS,
            )  # fmt: skip
            m_part *= unit
            if DV1 > 0:
                acc1, _, _ = fold(acc1, m, l, part1, m_part, l_part)
            acc0, m, l = fold(acc0, m, l, part0, m_part, l_part)  # noqa: E741

    if slot >= 0:
        part = (slot.to(tl.int64) * HK + kv_head) * part_rows + tl.arange(0, BLOCK_M)
        store_rows(part_acc_ptr, part * DV, acc0, row_valid, 0, DV0, DV)
        if DV1 > 0:
            store_rows(part_acc_ptr, part * DV, acc1, row_valid, DV0, DV1, DV)
        tl.store(part_ml_ptr + part * 2, m, mask=row_valid)
        tl.store(part_ml_ptr + part * 2 + 1, l, mask=row_valid)
    else:
        factor = v_factor
        if HAS_V_SCALE:
            factor *= tl.load(v_scale_ptr + kv_head * v_scale_step)
        factor = tl.full([BLOCK_M], 1.0, tl.float32) * factor
        empty = l == 0.0
        if HAS_SINKS:
            m, l, alpha = add_sink(m, l, tl.load(sinks_ptr + head))  # noqa: E741
            factor *= alpha
        o_rows = token * stride_ot + head * stride_oh
        store_rows(o_ptr, o_rows, normalise(acc0, empty, l, factor), row_valid, 0, DV0, DV)
        if DV1 > 0:
            store_rows(o_ptr, o_rows, normalise(acc1, empty, l, factor), row_valid, DV0, DV1, DV)
        tl.store(lse_ptr + token * stride_lt + head * stride_lh, natural_lse(m, l), mask=row_valid)


@triton.jit(
    do_not_specialize=[
        "rows_per_seq", "part_rows", "v_scale_step", "equal_q", "equal_tiles", "equal_parts"
    ]
)  # fmt: skip
def _merge_fwd_kernel(
    o_ptr, lse_ptr, seqs_ptr, part_acc_ptr, part_ml_ptr, sinks_ptr, v_scale_ptr, v_factor,
    stride_ot, stride_oh, stride_lt, stride_lh, rows_per_seq, part_rows, v_scale_step,
    equal_q, equal_tiles, equal_parts,
    HK: tl.constexpr, GROUP: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_V_SCALE: tl.constexpr, IN_ORDER: tl.constexpr,
    EQUAL: tl.constexpr, PDL: tl.constexpr, CHAIN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One program per KV head, row, sequence and block of lanes, in this order from the fastest."""
    pid = tl.program_id(0)
    first_lane = tl.program_id(1) * BLOCK_D
    kv_head = (pid % HK).to(tl.int64)
    r = (pid // HK) % rows_per_seq
    b = pid // HK // rows_per_seq
    if EQUAL:
        parts = equal_parts
        slot = b * equal_tiles * parts
        q_start = b * equal_q
        q_len = equal_q
    else:
        # The sequence entries are older than the split kernel, but its partial states are not.
        seq = seqs_ptr + b.to(tl.int64) * 4
        slot = tl.load(seq)
        parts = tl.load(seq + 1)
        q_start = tl.load(seq + 2)
        q_len = tl.load(seq + 3)
    if CHAIN:
        tl.extra.cuda.gdc_launch_dependents()
    if PDL:
        tl.extra.cuda.gdc_wait()
    if (parts <= 1) | (r >= q_len * GROUP):
        return
    tile = (r // BLOCK_M).to(tl.int64)
    base = ((slot + tile * parts) * HK + kv_head) * part_rows + r % BLOCK_M
    step = part_rows.to(tl.int64) * HK
    lane = first_lane + tl.arange(0, BLOCK_D)
    m = tl.full([1], NEG_INF, tl.float32)
    l = tl.zeros([1], tl.float32)  # noqa: E741
    acc = tl.zeros([1, BLOCK_D], tl.float32)
    if IN_ORDER:
        for s in range(0, parts):
            part = base + (tl.full([1], 0, tl.int64) + s) * step
            m_part = tl.load(part_ml_ptr + part * 2)
            l_part = tl.load(part_ml_ptr + part * 2 + 1)
            rows = part_acc_ptr + part[:, None] * DV + lane[None, :]
            x = tl.load(rows, mask=lane[None, :] < DV, other=0.0)
            x = tl.where(m_part[:, None] == NEG_INF, 0.0, x)  # a row may have seen other rows' NaN
            acc, m, l = fold(acc, m, l, x, m_part, l_part)  # noqa: E741
    else:
        for s0 in range(0, parts, BLOCK_S):
            s = s0 + tl.arange(0, BLOCK_S)
            part = base + s.to(tl.int64) * step
            live = s < parts
            m_part = tl.load(part_ml_ptr + part * 2, mask=live, other=NEG_INF)
            l_part = tl.load(part_ml_ptr + part * 2 + 1, mask=live, other=0.0)
            rows = part_acc_ptr + part[:, None] * DV + lane[None, :]
            inside = live[:, None] & (lane[None, :] < DV)
            x = tl.load(rows, mask=inside, other=0.0)  # [BLOCK_S, BLOCK_D]
            x = tl.where(m_part[:, None] == NEG_INF, 0.0, x)  # a row may have seen other rows' NaN
            m_new = tl.maximum(m, tl.max(m_part, 0))
            m_safe = tl.where(m_new == NEG_INF, 0.0, m_new)
            weight = tl.exp2(m_part - m_safe)  # [BLOCK_S]
            alpha = tl.exp2(m - m_safe)
            l = l * alpha + tl.sum(l_part * weight, 0)  # noqa: E741
            acc = acc * alpha[:, None] + tl.sum(x * weight[:, None], 0)[None, :]
            m = m_new

    factor = v_factor
    if HAS_V_SCALE:
        factor *= tl.load(v_scale_ptr + kv_head * v_scale_step)
    factor = tl.full([1], 1.0, tl.float32) * factor
    empty = l == 0.0
    head = kv_head * GROUP + r % GROUP
    if HAS_SINKS:
        m, l, alpha = add_sink(m, l, tl.load(sinks_ptr + head))  # noqa: E741
        factor *= alpha
    token = q_start.to(tl.int64) + r // GROUP
    o_row = tl.full([1], 0, tl.int64) + (token * stride_ot + head * stride_oh)
    x = normalise(acc, empty, l, factor).to(o_ptr.dtype.element_ty)
    tl.store(o_ptr + o_row[:, None] + lane[None, :], x, mask=lane[None, :] < DV)
    lse_row = tl.full([1], 0, tl.int64) + (token * stride_lt + head * stride_lh)
    tl.store(lse_ptr + lse_row, natural_lse(m, l), mask=tl.full([1], 0, tl.int32) == first_lane)


__all__ = ["ITEM_FIELDS", "SEQ_FIELDS", "_merge_fwd_kernel", "_split_fwd_kernel"]
