"""Prefill and extend: one program per tile of query rows, over all the keys that they see.

A tile holds rows of one query head (``PACK = 1``) or, for queries shorter than a tile, of all
query heads of a KV head, token by token (``PACK = GROUP``).

Grid: ``tiles * H / PACK`` programs, where ``tiles`` bounds the row tiles of the batch. A program
finds its sequence by counting in ``cu_seqlens_q``, so that lengths on the device alone decide and
one captured grid serves any lengths. The rows after the last sequence form one more sequence,
without keys. Keys [lo, hi) fall into a left part cut by the window, a middle that every row sees,
and a right part cut by causality or the end; only the outer parts pay for masks (``PHASES``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .primitives import (
    LOG2E,
    NEG_INF,
    add_sink,
    attend,
    forget,
    full_strides,
    key_range,
    load_query,
    natural_lse,
    normalise,
    scale_keys,
    score_unit,
    store_rows,
)


@triton.jit
def find_sequence(cu_q_ptr, tile, num_seqs, PACK: tl.constexpr, BLOCK_M: tl.constexpr,
                  BLOCK_B: tl.constexpr):  # fmt: skip
    """Sequence of a row tile; sequence b starts at tile ``cu_q[b] * PACK // BLOCK_M + b``."""
    count = tile * 0
    for first in range(0, num_seqs + 1, BLOCK_B):
        b = first + tl.arange(0, BLOCK_B)
        start = tl.load(cu_q_ptr + b, mask=b <= num_seqs, other=0)
        mine = (start * PACK // BLOCK_M + b <= tile) & (b <= num_seqs)
        count += tl.sum(mine.to(tl.int32), 0)
    return count - 1


@triton.jit
def lengths_of(cu_q_ptr, kv_len_ptr, cu_k_ptr, b, num_seqs, total_q, PAGE_SIZE: tl.constexpr):
    """First row, rows, keys and first key of sequence b; of ``num_seqs`` the rows without keys."""
    q_start = tl.load(cu_q_ptr + b)
    live = b < num_seqs
    q_len = tl.load(cu_q_ptr + b + 1, mask=live, other=total_q) - q_start
    kv_len = tl.load(kv_len_ptr + b, mask=live, other=0)
    k_start = b * 0
    if PAGE_SIZE == 0:
        k_start = tl.load(cu_k_ptr + b, mask=live, other=0)
    return q_start, q_len, kv_len, k_start.to(tl.int64)


@triton.jit
def keys_of(first, q_len, kv_len, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
            PHASES: tl.constexpr, PACK: tl.constexpr, BLOCK_M: tl.constexpr,
            BLOCK_N: tl.constexpr):  # fmt: skip
    """Keys [lo, hi) that rows ``first ..`` see, and whole tiles [mid_lo, mid_hi) that all do."""
    pos_first = first // PACK + kv_len - q_len
    pos_last = tl.minimum((first + BLOCK_M - 1) // PACK, q_len - 1) + kv_len - q_len
    lo, hi = key_range(pos_first, pos_last, kv_len, left, right, HAS_LEFT, HAS_RIGHT)
    start = lo // BLOCK_N * BLOCK_N
    mid_lo = start
    mid_hi = start
    if PHASES:
        mid_hi = hi
        if HAS_LEFT:
            mid_lo = tl.maximum(tl.cdiv(tl.maximum(pos_last - left, 0), BLOCK_N) * BLOCK_N, start)
        if HAS_RIGHT:
            mid_hi = tl.maximum(tl.minimum(mid_hi, pos_first + right + 1), 0)
        # Without a whole tile in the middle, one masked part covers everything.
        mid_hi = mid_hi // BLOCK_N * BLOCK_N
        none = mid_hi <= mid_lo
        mid_lo = tl.where(none, start, mid_lo)
        mid_hi = tl.where(none, start, mid_hi)
    return lo, hi, mid_lo, mid_hi


@triton.jit(
    do_not_specialize=[
        "num_seqs", "total_q", "num_tiles", "left", "right", "short_rows", "k_scale_step",
        "v_scale_step", "stride_kp", "stride_kn", "stride_kh", "stride_vp", "stride_vn",
        "stride_vh",
    ]
)  # fmt: skip
def _prefill_fwd_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, k_map, v_map,
    cu_q_ptr, kv_len_ptr, cu_k_ptr, table_ptr,
    sinks_ptr, slopes_ptr, mask_ptr, mask_indptr, k_scale_ptr, v_scale_ptr,
    scale, softcap, v_factor,
    stride_qt, stride_qh, stride_kp, stride_kn, stride_kh, stride_vp, stride_vn, stride_vh,
    stride_ot, stride_oh, stride_lt, stride_lh, stride_table,
    num_seqs, total_q, num_tiles, left, right, short_rows, k_scale_step, v_scale_step,
    H: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    DV: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr, HAS_MASK: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_K_SCALE: tl.constexpr, HAS_V_SCALE: tl.constexpr,
    PAGE_SIZE: tl.constexpr, SHARE_KV: tl.constexpr, SAME_STRIDES: tl.constexpr,
    NARROW: tl.constexpr, KV_ALIGN: tl.constexpr,
    COMPUTE: tl.constexpr, FP8: tl.constexpr, FP8_Q: tl.constexpr, ROW_SCALE: tl.constexpr,
    FUSE: tl.constexpr, LANE_SUMS: tl.constexpr, SETTLE: tl.constexpr, MAPS: tl.constexpr,
    SKIP_SHORT: tl.constexpr, PHASES: tl.constexpr, HEADS_INNER: tl.constexpr,
    PACK: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    units: tl.constexpr = H // PACK
    per_kv_head: tl.constexpr = GROUP // PACK
    if HEADS_INNER:
        unit = pid % units
        tile = num_tiles - 1 - pid // units
    else:
        # The heads of one KV head first, so that they meet in L2; then its tiles, longest first.
        unit = (pid // (num_tiles * per_kv_head)) * per_kv_head + pid % per_kv_head
        tile = num_tiles - 1 - (pid // per_kv_head) % num_tiles
    b = find_sequence(cu_q_ptr, tile, num_seqs, PACK, BLOCK_M, BLOCK_B)
    q_start, q_len, kv_len, k_start = lengths_of(
        cu_q_ptr, kv_len_ptr, cu_k_ptr, b, num_seqs, total_q, PAGE_SIZE
    )
    first = (tile - q_start * PACK // BLOCK_M - b) * BLOCK_M
    if first >= q_len * PACK:
        return
    if SKIP_SHORT:
        # Sequences this short are computed by the split kernel.
        if (b < num_seqs) & (q_len * GROUP <= short_rows):
            return

    row = first + tl.arange(0, BLOCK_M)
    row_valid = row < q_len * PACK
    i = row // PACK
    head = unit * PACK + row % PACK
    row_pos = i + (kv_len - q_len)
    token = q_start.to(tl.int64) + i
    kv_head = (unit * PACK // GROUP).to(tl.int64)
    head_off = head.to(tl.int64)
    q0, q1, q_factor = load_query(
        q_ptr, token * stride_qt + head_off * stride_qh, row_valid, D, D0, D1, COMPUTE, FP8_Q,
        ROW_SCALE,
    )  # fmt: skip
    if HAS_K_SCALE:
        scale = scale_keys(scale, k_scale_ptr + kv_head * k_scale_step)
    slope = tl.zeros([BLOCK_M], tl.float32)
    if HAS_ALIBI:
        slope = tl.load(slopes_ptr + head) * LOG2E
    mask_rows = row
    if HAS_MASK:
        start = tl.load(mask_indptr + b, mask=b < num_seqs, other=0)
        mask_rows = mask_ptr + start + i.to(tl.int64) * kv_len
    if ROW_SCALE:
        s_scale = scale * q_factor
    else:
        s_scale = scale

    acc0 = tl.zeros([BLOCK_M, DV0], tl.float32)
    acc1 = tl.zeros([BLOCK_M, DV1 if DV1 > 0 else 16], tl.float32)
    m = tl.full([BLOCK_M], NEG_INF, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
    key_lo, key_hi, mid_lo, mid_hi = keys_of(
        first, q_len, kv_len, left, right, HAS_LEFT, HAS_RIGHT, PHASES, PACK, BLOCK_M, BLOCK_N
    )
    stride_kp, stride_kn, stride_kh = full_strides(
        stride_kp, stride_kn, stride_kh, KV_ALIGN, NARROW
    )
    stride_vp, stride_vn, stride_vh = full_strides(
        stride_vp, stride_vn, stride_vh, KV_ALIGN, NARROW
    )
    k_base = k_ptr + kv_head * stride_kh + k_start * stride_kn.to(tl.int64)
    v_base = v_ptr + kv_head * stride_vh + k_start * stride_vn.to(tl.int64)
    table = table_ptr + b.to(tl.int64) * stride_table
    if PHASES:
        if HAS_LEFT:
            acc0, acc1, m, l = attend(  # noqa: E741
                q0, q1, acc0, acc1, m, l, k_base, v_base, table, mask_rows,
                row_pos, row_valid, slope, s_scale, softcap,
                key_lo // BLOCK_N * BLOCK_N, mid_lo, key_lo, key_hi, left, right,
                stride_kp, stride_kn, stride_vp, stride_vn,
                True, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, HAS_MASK, PAGE_SIZE, BLOCK_N,
                D, D0, D1, DV, DV0, DV1, SHARE_KV, SAME_STRIDES, NARROW, FP8,
                ROW_SCALE, FUSE, LANE_SUMS, SETTLE,
            )  # fmt: skip
        acc0, acc1, m, l = attend(  # noqa: E741
            q0, q1, acc0, acc1, m, l, k_base, v_base, table, mask_rows,
            row_pos, row_valid, slope, s_scale, softcap,
            mid_lo, mid_hi, key_lo, key_hi, left, right,
            stride_kp, stride_kn, stride_vp, stride_vn,
            False, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, HAS_MASK, PAGE_SIZE, BLOCK_N,
            D, D0, D1, DV, DV0, DV1, SHARE_KV, SAME_STRIDES, NARROW, FP8,
            ROW_SCALE, FUSE, LANE_SUMS, SETTLE, MAPS,
            k_map, v_map, k_start.to(tl.int32), (kv_head * stride_kh).to(tl.int32),
            (kv_head * stride_vh).to(tl.int32),
        )  # fmt: skip
    if SETTLE:
        # Registers are short in the loop above: what is needed here is made again.
        b, first, unit = forget(b), forget(first), forget(unit)
        q_start, q_len, kv_len, k_start = lengths_of(
            cu_q_ptr, kv_len_ptr, cu_k_ptr, b, num_seqs, total_q, PAGE_SIZE
        )
        row = first + tl.arange(0, BLOCK_M)
        row_valid = row < q_len * PACK
        row_pos = row // PACK + (kv_len - q_len)
        key_lo, key_hi, _, mid_hi = keys_of(
            first, q_len, kv_len, left, right, HAS_LEFT, HAS_RIGHT, PHASES, PACK, BLOCK_M, BLOCK_N
        )
        kv_head = (unit * PACK // GROUP).to(tl.int64)
        k_base = k_ptr + kv_head * stride_kh + k_start * stride_kn.to(tl.int64)
        v_base = v_ptr + kv_head * stride_vh + k_start * stride_vn.to(tl.int64)
        table = table_ptr + b.to(tl.int64) * stride_table
    acc0, acc1, m, l = attend(  # noqa: E741
        q0, q1, acc0, acc1, m, l, k_base, v_base, table, mask_rows,
        row_pos, row_valid, slope, s_scale, softcap,
        mid_hi, key_hi, key_lo, key_hi, left, right,
        stride_kp, stride_kn, stride_vp, stride_vn,
        True, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, HAS_MASK, PAGE_SIZE, BLOCK_N,
        D, D0, D1, DV, DV0, DV1, SHARE_KV, SAME_STRIDES, NARROW, FP8,
        ROW_SCALE, FUSE, LANE_SUMS, SETTLE,
    )  # fmt: skip

    if SETTLE:
        row = forget(first) + tl.arange(0, BLOCK_M)
        row_valid = row < q_len * PACK
        token = q_start.to(tl.int64) + row // PACK
        head = unit * PACK + row % PACK
        head_off = head.to(tl.int64)
    m *= score_unit(scale, HAS_SOFTCAP, HAS_ALIBI, ROW_SCALE)
    factor = v_factor
    if HAS_V_SCALE:
        factor *= tl.load(v_scale_ptr + kv_head * v_scale_step)
    factor = tl.full([BLOCK_M], 1.0, tl.float32) * factor
    empty = l == 0.0
    if HAS_SINKS:
        m, l, alpha = add_sink(m, l, tl.load(sinks_ptr + head))  # noqa: E741
        factor *= alpha
    o_rows = token * stride_ot + head_off * stride_oh
    store_rows(o_ptr, o_rows, normalise(acc0, empty, l, factor), row_valid, 0, DV0, DV)
    if DV1 > 0:
        store_rows(o_ptr, o_rows, normalise(acc1, empty, l, factor), row_valid, DV0, DV1, DV)
    lse_rows = token * stride_lt + head_off * stride_lh
    tl.store(lse_ptr + lse_rows, natural_lse(m, l), mask=row_valid)


__all__ = ["_prefill_fwd_kernel"]
