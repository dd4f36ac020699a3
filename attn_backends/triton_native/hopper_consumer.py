"""A consumer warpgroup of the Hopper prefill: scores, softmax, output of 64 rows of each tile."""

from __future__ import annotations

from .hopper_compat import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .hopper_math import clear, hold, rescale
from .hopper_parts import (
    K_EMPTY,
    LAZY_GROWTH,
    LN2,
    LOG2E,
    RING,
    RING_FIELDS,
    TURN,
    V_EMPTY,
    advance,
    come,
    first_key,
    key_tiles,
    meet,
    rows_layout,
)


@gluon.jit
def _field(shared, index):
    """One announced int."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.sum(shared.ring.index(index).load(layout), 0)


@gluon.jit
def _release_queries(shared, stage, last, C):
    """Give the queries back once their last scores are there, if nothing else holds the next."""
    if C.Q_STAGES == 1:
        if last:
            mbarrier.arrive(shared.q_empty.index(stage), count=1)


@gluon.jit
def _held_queries(shared, q_slot, C):
    """The lanes of the queries that stay in registers, or 0."""
    held = 0
    if C.HELD > 0:
        q = shared.q.index(q_slot).reshape([64, C.D])
        held = q.slice(0, C.HELD, 1).load(C.Q_LAYOUT)
    return held


@gluon.jit
def _issue_scores(shared, held, q_slot, stage, C):
    """Start S = Q K^T of the tile in a slot."""
    q = shared.q.index(q_slot).reshape([64, C.D])
    k = shared.k.index(stage).reshape([C.BLOCK_N, C.D]).permute((1, 0))
    zero = gl.zeros([64, C.BLOCK_N], gl.float32, C.S_LAYOUT)
    q_rest = q.slice(C.HELD, C.D - C.HELD, 1)
    k_rest = k.slice(C.HELD, C.D - C.HELD, 0)
    s = warpgroup_mma(q_rest, k_rest, zero, use_acc=False, is_async=True)  # [64, BLOCK_N]
    if C.HELD > 0:
        s = warpgroup_mma(held, k.slice(0, C.HELD, 0), s, is_async=True)
    if C.D1 > 0:
        q1 = shared.q1.index(q_slot).reshape([64, C.D1])
        k1 = shared.k1.index(stage).reshape([C.BLOCK_N, C.D1]).permute((1, 0))
        s = warpgroup_mma(q1, k1, s, is_async=True)
    return s


@gluon.jit
def _see_copies(C):
    """Make copies of other threads, which a barrier has shown to be done, seen by tensor cores.

    TMA writes as tensor cores read; cp.async writes as threads do, and needs a fence between.
    """
    if C.GATHER:
        fence_async_shared()


@gluon.jit
def _key_range(kv_len, pos_first, left, right_end, C):
    """First key and end of the keys that each row sees; the first may be negative."""
    row = gl.arange(0, 64, gl.SliceLayout(1, C.S_LAYOUT))
    position = pos_first + row // C.PACK  # [64]
    hi_row = gl.zeros_like(position) + kv_len
    lo_row = gl.zeros_like(position)
    if C.HAS_RIGHT:
        hi_row = gl.minimum(hi_row, position + right_end)
    if C.HAS_LEFT:
        lo_row = position - left
    return lo_row, hi_row


@gluon.jit
def _mask(s, start, lo_row, hi_row, safe_lo, safe_hi, C):
    """Set the scores of keys outside a row's ``[lo, hi)`` to -inf, if the tile has any."""
    masked = start + C.BLOCK_N > safe_hi
    if C.HAS_LEFT:
        masked = masked | (start < safe_lo)
    if masked:
        # Columns as 8 i + j, with i in registers: comparisons with constants, not with registers.
        parts = gl.reshape(s, [64, C.BLOCK_N // 8, 8])
        outer: gl.constexpr = gl.SliceLayout(1, parts.type.layout)
        i = gl.arange(0, C.BLOCK_N // 8, gl.SliceLayout(0, gl.SliceLayout(2, parts.type.layout)))
        i = gl.expand_dims(i[None, :], 2) * 8
        j = start + gl.arange(0, 8, gl.SliceLayout(0, outer))
        limit = gl.convert_layout(hi_row, gl.SliceLayout(1, outer))[:, None] - j[None, :]
        keep = i < gl.expand_dims(limit, 1)
        if C.HAS_LEFT:
            limit = gl.convert_layout(lo_row, gl.SliceLayout(1, outer))[:, None] - j[None, :]
            keep = keep & (i >= gl.expand_dims(limit, 1))
        parts = gl.where(keep, parts, float("-inf"))
        s = gl.convert_layout(gl.reshape(parts, [64, C.BLOCK_N]), C.S_LAYOUT)
    return s


@gluon.jit
def _cap(s, softcap_in, softcap_out, C):
    """Softcap; the result is in the unit that ``scale`` then takes to log2."""
    if C.HAS_SOFTCAP:
        # tanh x = 1 - 2 / (1 + exp 2x), with both factors of x folded into softcap_in.
        s = softcap_out - 2.0 * softcap_out / (1.0 + gl.exp2(s * softcap_in))
    return s


@gluon.jit
def _row_max(s, C):
    """Maximum of each row, in eight chains a thread and row: one chain would be all latency."""
    parts = gl.max(gl.reshape(s, [64, C.BLOCK_N // 32, 4, 8]), 1)
    return gl.convert_layout(gl.max(gl.max(parts, 1), 1), gl.SliceLayout(1, C.S_LAYOUT))


@gluon.jit
def _limits(s, m, scale, C):
    """The maximum that scores are taken relative to, that in log2 units, and O's factor."""
    m_new = gl.maximum(m, _row_max(s, C))
    # Any number near the maximum serves; one that stays spares O its factor.
    m_new = gl.where((m_new - m) * scale > LAZY_GROWTH, m_new, m)
    # A row without any key so far keeps its -inf, but must not subtract it from itself.
    m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    return m_new, m_safe * scale, gl.exp2((m - m_safe) * scale)  # [64] each


@gluon.jit
def _halves(s, C):
    """Left and right half of the columns."""
    return gl.split(gl.permute(gl.reshape(s, [64, 2, C.BLOCK_N // 2]), (0, 2, 1)))


@gluon.jit
def _joined(left, right, C):
    """Both halves as the operand of the product with V; moves no data."""
    whole = gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), [64, C.BLOCK_N])
    return gl.convert_layout(whole, C.P_LAYOUT)


@gluon.jit
def _row_sums(p):
    """Sums over what each thread holds of a row; the rest of the sum waits until the end."""
    return gl.sum(gl.reshape(p, [64, p.shape[1] // 8, 8]), 1)  # [64, 8]


@gluon.jit
def _weights(s, limit, sums, scale):
    """Probabilities of half of the keys, and the sums with them."""
    limit = gl.convert_layout(limit, gl.SliceLayout(1, s.type.layout))
    p = gl.exp2(s * scale - limit[:, None])  # [64, BLOCK_N / 2]
    return p, sums + gl.convert_layout(_row_sums(p), sums.type.layout)


@gluon.jit
def _zero_outside(slot, first, end, C):
    """Zero the rows of V outside ``[first, end)``, ahead of tensor cores that read all of them.

    Both consumers do so, and write the same bytes; neither waits for the other.
    """
    layout: gl.constexpr = rows_layout(C.DV)
    tile = slot.reshape([C.BLOCK_N, C.DV])
    row = gl.arange(0, 64, gl.SliceLayout(1, layout))
    for i in gl.static_range(C.BLOCK_N // 64):
        if (first > i * 64) | (end < (i + 1) * 64):
            part = tile.slice(i * 64, 64, 0)
            x = part.load(layout)
            keep = (row >= first - i * 64) & (row < end - i * 64)
            part.store(gl.where(keep[:, None], x, gl.zeros_like(x)))
    fence_async_shared()
    # Here, and not where the compiler would put it: before every later read of V.
    barrier()


@gluon.jit
def _attend(
    C, shared, wg: gl.constexpr, acc, m, low, end, kv_len, pos_first, seen_from, safe_lo, safe_hi,
    left, right_end, scale, softcap_in, softcap_out, q_stage, k_stage, k_phase, v_stage, v_phase,
):  # fmt: skip
    """Softmax over the key tiles ``[low, end)`` of one query tile, from the last to the first."""
    V_DTYPE: gl.constexpr = shared.v.dtype
    lo_row, hi_row = _key_range(kv_len, pos_first, left, right_end, C)
    sums = _row_sums(gl.zeros([64, C.BLOCK_N], gl.float32, C.S_LAYOUT))

    q_slot = q_stage * C.CONSUMERS + wg
    tile = end - 1
    mbarrier.wait(shared.k_full.index(k_stage), k_phase)
    _see_copies(C)
    held = _held_queries(shared, q_slot, C)
    s = warpgroup_mma_wait(0, deps=(_issue_scores(shared, held, q_slot, k_stage, C),))
    come(K_EMPTY + k_stage, C.SLOT_THREADS)
    _release_queries(shared, q_stage, tile == low, C)
    k_stage, k_phase = advance(k_stage, k_phase, C.STAGES)
    s = _cap(s, softcap_in, softcap_out, C)
    s = _mask(s, tile * C.BLOCK_N, lo_row, hi_row, safe_lo, safe_hi, C)
    m, limit, alpha = _limits(s, m, scale, C)
    left_s, right_s = _halves(s, C)
    left_p, sums = _weights(left_s, limit, sums, scale)
    right_p, sums = _weights(right_s, limit, sums, scale)
    p = _joined(left_p.to(V_DTYPE), right_p.to(V_DTYPE), C)
    if not C.GATHER:  # which copies zeros there
        if end * C.BLOCK_N > kv_len:
            mbarrier.wait(shared.v_full.index(v_stage), v_phase)
            _zero_outside(shared.v.index(v_stage), 0, kv_len - tile * C.BLOCK_N, C)
    mbarrier.wait(shared.k_full.index(k_stage), k_phase, pred=tile > low)

    while tile > low:
        tile -= 1
        if C.TURNS:
            meet(TURN + wg, 256)
        _see_copies(C)
        s_token = _issue_scores(shared, held, q_slot, k_stage, C)
        mbarrier.wait(shared.v_full.index(v_stage), v_phase)
        _see_copies(C)
        v = shared.v.index(v_stage).reshape([C.BLOCK_N, C.DV])
        o_token = warpgroup_mma(p, v, acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s_token,))
        if C.TURNS:
            come(TURN + 1 - wg, 256)
        come(K_EMPTY + k_stage, C.SLOT_THREADS)
        _release_queries(shared, q_stage, tile == low, C)
        k_stage, k_phase = advance(k_stage, k_phase, C.STAGES)
        s = _cap(s, softcap_in, softcap_out, C)
        s = _mask(s, tile * C.BLOCK_N, lo_row, hi_row, safe_lo, safe_hi, C)
        m, limit, alpha = _limits(s, m, scale, C)
        left_s, right_s = _halves(s, C)
        sums *= gl.convert_layout(alpha, gl.SliceLayout(1, sums.type.layout))[:, None]
        left_p, sums = _weights(left_s, limit, sums, scale)
        hold(sums)
        # The branch of this wait keeps the one for the output below it. By now that is there, and
        # its operand may be overwritten: conversions go between the other exponentials.
        mbarrier.wait(shared.k_full.index(k_stage), k_phase, pred=tile > low)
        acc = warpgroup_mma_wait(0, deps=(o_token,))
        come(V_EMPTY + v_stage, C.SLOT_THREADS)
        v_stage, v_phase = advance(v_stage, v_phase, C.STAGES)
        o_alpha = gl.convert_layout(alpha, gl.SliceLayout(1, C.O_LAYOUT))[:, None]
        acc = rescale(acc, o_alpha, C.DV // 2)
        right_p, sums = _weights(right_s, limit, sums, scale)
        p = _joined(left_p.to(V_DTYPE), right_p.to(V_DTYPE), C)

    if C.Q_STAGES > 1:
        mbarrier.arrive(shared.q_empty.index(q_stage), count=1)
    mbarrier.wait(shared.v_full.index(v_stage), v_phase)
    _see_copies(C)
    if C.HAS_LEFT:
        if not C.GATHER:
            # What lies before the window of the first row may have been given to another sequence.
            if seen_from > low * C.BLOCK_N:
                _zero_outside(
                    shared.v.index(v_stage), seen_from - low * C.BLOCK_N, C.BLOCK_N, C
                )  # fmt: skip
    v = shared.v.index(v_stage).reshape([C.BLOCK_N, C.DV])
    acc = warpgroup_mma_wait(0, deps=(warpgroup_mma(p, v, acc, is_async=True),))
    come(V_EMPTY + v_stage, C.SLOT_THREADS)
    v_stage, v_phase = advance(v_stage, v_phase, C.STAGES)
    total = gl.convert_layout(gl.sum(sums, 1), gl.SliceLayout(1, C.S_LAYOUT))
    return acc, m, total, k_stage, k_phase, v_stage, v_phase


@gluon.jit
def _store(o, lse, o_ptr, lse_ptr, first, rows, head, wg: gl.constexpr,
           group, stride_ot, stride_oh, stride_lt, stride_lh, C):  # fmt: skip
    """Write the rows of the tile that exist, 16 bytes a thread, never another sequence's."""
    # The layout of the accumulator with the columns of four neighbouring threads transposed.
    layout: gl.constexpr = rows_layout(C.DV)
    o = gl.convert_layout(o, layout)
    row = gl.arange(0, 64, gl.SliceLayout(1, layout))
    col = gl.arange(0, C.DV, gl.SliceLayout(0, layout))
    token = row // C.PACK + wg * C.TOKENS
    keep = token < rows
    row_head = gl.zeros_like(row) + head
    if C.PACK > 1:
        row_head = head * group + row % C.PACK
        keep = keep & (row % C.PACK < group)
    at = (first + token).to(gl.int64) * stride_ot + row_head.to(gl.int64) * stride_oh
    gl.store(o_ptr + at[:, None] + col[None, :], o, mask=keep[:, None])

    row = gl.arange(0, 64, gl.SliceLayout(1, C.S_LAYOUT))
    token = row // C.PACK + wg * C.TOKENS
    keep = token < rows
    row_head = gl.zeros_like(row) + head
    if C.PACK > 1:
        row_head = head * group + row % C.PACK
        keep = keep & (row % C.PACK < group)
    at = (first + token).to(gl.int64) * stride_lt + row_head.to(gl.int64) * stride_lh
    gl.store(lse_ptr + at, lse, mask=keep)


@gluon.jit
def _with_sinks(m, total, seen, sinks_ptr, head, group, lse_scale, C):
    """LSE and factor of the output where each row sees one more key, of value 0."""
    row = gl.arange(0, 64, gl.SliceLayout(1, C.S_LAYOUT))
    row_head = gl.zeros_like(row) + head
    keep = row >= 0
    if C.PACK > 1:
        row_head = head * group + row % C.PACK
        keep = row % C.PACK < group
    sink = gl.load(sinks_ptr + row_head, mask=keep, other=0.0)
    m = gl.where(seen, m * lse_scale, float("-inf"))
    peak = gl.maximum(m, sink)
    # Neither a key nor a sink: -inf must not be subtracted from itself.
    peak = gl.where(peak == float("-inf"), 0.0, peak)
    own = gl.exp2((m - peak) * LOG2E)
    total = total * own + gl.exp2((sink - peak) * LOG2E)
    return peak + gl.log2(total) * LN2, gl.where(seen, own / total, 0.0)


@gluon.jit
def consume(
    C, shared, wg: gl.constexpr, o_ptr, lse_ptr, sinks_ptr, scale, lse_scale, softcap_in,
    softcap_out, stride_ot, stride_oh, stride_lt, stride_lh, left, right_end, group,
):  # fmt: skip
    """A consumer warpgroup: 64 rows of every tile that the producer announces."""
    if C.TURNS:
        if wg == 1:
            come(TURN, 256)
    ring = 0
    ring_phase = 0
    q_stage = 0
    q_phase = 0
    k_stage = 0
    k_phase = 0
    v_stage = 0
    v_phase = 0
    mbarrier.wait(shared.ring_full.index(0), 0)
    rows = _field(shared, 1)
    kv_len = _field(shared, 2)
    pos0 = _field(shared, 3)
    low, end = key_tiles(kv_len, pos0, rows, left, right_end, C)
    while rows >= 0:
        pos_first = pos0 + wg * C.TOKENS
        # Tiles of keys inside [safe_lo, safe_hi) are seen whole by every row.
        safe_lo = 0
        safe_hi = kv_len
        seen_from = 0
        if C.HAS_LEFT:
            safe_lo = gl.maximum(pos_first + C.TOKENS - 1 - left, 0)
            seen_from = first_key(pos0, left, C)
        if C.HAS_RIGHT:
            safe_hi = gl.minimum(safe_hi, pos_first + right_end)
        acc = gl.zeros([64, C.DV], gl.float32, C.O_LAYOUT)
        m = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, C.S_LAYOUT))
        total = gl.full([64], 1.0, gl.float32, gl.SliceLayout(1, C.S_LAYOUT))
        if end > low:
            mbarrier.wait(shared.q_full.index(q_stage), q_phase)
            acc, m, total, k_stage, k_phase, v_stage, v_phase = _attend(
                C, shared, wg, acc, m, low, end, kv_len, pos_first, seen_from, safe_lo, safe_hi,
                left, right_end, scale, softcap_in, softcap_out, q_stage, k_stage, k_phase,
                v_stage, v_phase,
            )  # fmt: skip
            q_stage, q_phase = advance(q_stage, q_phase, C.Q_STAGES)

        # Read once more, instead of held in registers through the loop over keys.
        base = ring * RING_FIELDS
        first = _field(shared, base)
        rows_now = _field(shared, base + 1)
        kv_len = _field(shared, base + 2)
        pos_first = _field(shared, base + 3) + wg * C.TOKENS
        head = _field(shared, base + 4)
        mbarrier.arrive(shared.ring_empty.index(ring), count=1)
        ring, ring_phase = advance(ring, ring_phase, RING)
        lo_row, hi_row = _key_range(kv_len, pos_first, left, right_end, C)
        seen = hi_row > gl.maximum(lo_row, 0)
        lse = gl.where(seen, m * lse_scale + gl.log2(total) * LN2, float("-inf"))
        inverse = gl.where(seen, 1.0 / total, 0.0)
        if C.HAS_SINKS:
            lse, inverse = _with_sinks(m, total, seen, sinks_ptr, head, group, lse_scale, C)
        o = acc * gl.convert_layout(inverse, gl.SliceLayout(1, C.O_LAYOUT))[:, None]
        # Rows without a key: 0 times what others of the tile saw may be NaN.
        keep = gl.convert_layout(gl.where(seen, 1.0, 0.0), gl.SliceLayout(1, C.O_LAYOUT))
        o = clear(o, keep[:, None], C.DV // 2)
        o = o.to(o_ptr.dtype.element_ty)

        base = ring * RING_FIELDS
        mbarrier.wait(shared.ring_full.index(ring), ring_phase)
        rows = _field(shared, base + 1)
        kv_len = _field(shared, base + 2)
        pos0 = _field(shared, base + 3)
        low, end = key_tiles(kv_len, pos0, rows, left, right_end, C)
        _store(
            o, lse, o_ptr, lse_ptr, first, rows_now, head, wg, group,
            stride_ot, stride_oh, stride_lt, stride_lh, C,
        )  # fmt: skip


__all__ = ["consume"]
