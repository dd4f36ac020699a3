"""The producer of the Hopper prefill: takes tiles from the work list and streams them in.

It is one warp that starts copies by TMA, a box per page if there are pages. Pages that boxes cannot
tile are gathered: four warps start one copy of 16 bytes per thread and row (cp.async), and the slot
is full once the copies of every thread have landed.
"""

from __future__ import annotations

from .hopper_compat import copies_arrive, copy_rows, gl, gluon, mbarrier, tma_load
from .hopper_parts import (
    FORTH_AND_BACK,
    HANDED_OUT,
    K_EMPTY,
    RING,
    RING_FIELDS,
    V_EMPTY,
    WORK_FIELDS,
    WORK_HEADER,
    advance,
    first_key,
    gather_layout,
    key_tiles,
    meet,
)


@gluon.jit
def _load_tile(desc, full, slot, tile, key_start, head, table, seen_from, kv_len, C):
    """Start the copy of one tile of keys or values; pages that nobody sees arrive as zeros."""
    if C.PAGE_SIZE == 0:
        tma_load(desc, [0, key_start + tile * C.BLOCK_N, head, 0], full, slot)
    elif C.PAGE_SIZE >= C.BLOCK_N:
        first = tile * C.BLOCK_N
        page = gl.load(table + first // C.PAGE_SIZE)
        tma_load(desc, [page, first % C.PAGE_SIZE, head, 0], full, slot)
    else:
        PAGES: gl.constexpr = C.BLOCK_N // C.PAGE_SIZE
        for i in gl.static_range(PAGES):
            number = tile * PAGES + i
            # A page before the first: outside the tensor, so nothing is read.
            some = (number * C.PAGE_SIZE < kv_len) & ((number + 1) * C.PAGE_SIZE > seen_from)
            page = gl.load(table + number, mask=some, other=-1)
            box = slot.slice(i * C.PAGE_SIZE, C.PAGE_SIZE, 1)
            tma_load(desc, [page, 0, head, 0], full, box)


@gluon.jit
def _gather_lanes(
    at_ptr, slot, tile, table, seen_from, kv_len, stride_page, stride_slot, LANES: gl.constexpr, C
):
    """Start the copies of the rows of one tile, 16 bytes a thread; rows unseen are zeros."""
    layout: gl.constexpr = gather_layout(LANES)
    row = tile * C.BLOCK_N + gl.arange(0, C.BLOCK_N, gl.SliceLayout(1, layout))
    lane = gl.arange(0, LANES, gl.SliceLayout(0, layout))
    keep = (row >= seen_from) & (row < kv_len)
    page = gl.load(table + row // C.PAGE_SIZE, mask=keep, other=0)
    at = page.to(gl.int64) * stride_page + (row % C.PAGE_SIZE) * stride_slot  # [BLOCK_N]
    copy_rows(
        slot.reshape([C.BLOCK_N, LANES]), at_ptr + (at[:, None] * 8 + lane[None, :]),
        mask=keep[:, None],
    )  # fmt: skip


@gluon.jit
def _load_keys(
    shared, k, k1, stage, tile, key_start, head, table, seen_from, kv_len,
    stride_page, stride_slot, stride_head, C,
):  # fmt: skip
    """Start the copy of one tile of keys."""
    full = shared.k_full.index(stage)
    if C.GATHER:
        at = k + head.to(gl.int64) * stride_head * 8
        _gather_lanes(
            at,
            shared.k.index(stage),
            tile,
            table,
            seen_from,
            kv_len,
            stride_page,
            stride_slot,
            C.D,
            C,
        )
        if C.D1 > 0:
            _gather_lanes(
                at + C.D, shared.k1.index(stage), tile, table, seen_from, kv_len,
                stride_page, stride_slot, C.D1, C,
            )  # fmt: skip
        copies_arrive(full, increment_count=False)
    else:
        BYTES: gl.constexpr = C.BLOCK_N * (C.D + C.D1) * k.dtype.primitive_bitwidth // 8
        mbarrier.expect(full, BYTES)
        _load_tile(
            k, full, shared.k.index(stage), tile, key_start, head, table, seen_from, kv_len, C
        )
        if C.D1 > 0:
            _load_tile(
                k1, full, shared.k1.index(stage), tile, key_start, head, table, seen_from, kv_len, C
            )


@gluon.jit
def _load_values(
    shared, v, stage, tile, key_start, head, table, seen_from, kv_len,
    stride_page, stride_slot, stride_head, C,
):  # fmt: skip
    """Start the copy of one tile of values."""
    full = shared.v_full.index(stage)
    if C.GATHER:
        _gather_lanes(
            v + head.to(gl.int64) * stride_head * 8, shared.v.index(stage), tile, table,
            seen_from, kv_len, stride_page, stride_slot, C.DV, C,
        )  # fmt: skip
        copies_arrive(full, increment_count=False)
    else:
        BYTES: gl.constexpr = C.BLOCK_N * C.DV * v.dtype.primitive_bitwidth // 8
        mbarrier.expect(full, BYTES)
        _load_tile(
            v, full, shared.v.index(stage), tile, key_start, head, table, seen_from, kv_len, C
        )


@gluon.jit
def _put(shared, index, value, C):
    """Write one int for the consumers, and for this producer itself."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [C.PRODUCER_WARPS], [0])
    shared.ring.index(index).store(gl.full([1], value, gl.int32, layout))


@gluon.jit
def _get(shared, index, C):
    """Read it again."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [C.PRODUCER_WARPS], [0])
    return gl.sum(shared.ring.index(index).load(layout), 0)


@gluon.jit
def _announce(shared, slot, phase, work, work_ptr, num_rows, heads, head_group, C):
    """Look a tile up and tell the consumers; ``rows`` of -1 ends their work."""
    entries = gl.load(work_ptr)
    first = 0
    rows = -1
    kv_len = 0
    pos0 = 0
    head = 0
    key_start = 0
    if work < entries * heads:
        per_group = entries * head_group
        section = work // per_group
        rest = work - section * per_group
        entry = rest // head_group
        head = section * head_group + rest - entry * head_group
        at = work_ptr + WORK_HEADER + entry * WORK_FIELDS
        first = gl.load(at)
        # The list may have been made for more rows than there are; -1 would end the work.
        rows = gl.maximum(gl.minimum(gl.load(at + 1), num_rows - first), 0)
        kv_len = gl.load(at + 2)
        pos0 = gl.load(at + 3)
        key_start = gl.load(at + 4)
    mbarrier.wait(shared.ring_empty.index(slot), phase ^ 1)
    base = slot * RING_FIELDS
    _put(shared, base, first, C)
    _put(shared, base + 1, rows, C)
    _put(shared, base + 2, kv_len, C)
    _put(shared, base + 3, pos0, C)
    _put(shared, base + 4, head, C)
    _put(shared, base + 5, key_start, C)
    mbarrier.arrive(shared.ring_full.index(slot), count=1)


@gluon.jit
def _draw(work_ptr, heads, turn, order):
    """The number of the tile to be taken after ``turn`` others, if there are so many."""
    programs = gl.num_programs(0)
    place = gl.program_id(0)
    work = turn * programs + place
    if order == HANDED_OUT:
        ticket = gl.atomic_add(work_ptr + 1, 1, sem="relaxed")
        # Every ticket up to the number of tiles is drawn once; the last puts the counter back.
        if ticket == gl.load(work_ptr) * heads - 1:
            gl.store(work_ptr + 1, 0)
        work = programs + ticket
    elif order == FORTH_AND_BACK:
        if turn % 2 == 1:
            work = turn * programs + programs - 1 - place
    return work


@gluon.jit
def produce(
    C, shared, q, q1, k, k1, v, work_ptr, table_ptr, stride_table, num_rows, left, right_end,
    heads, group, head_group, order, stride_kp, stride_ks, stride_kh,
    stride_vp, stride_vs, stride_vh,
):  # fmt: skip
    """The producer: announce each tile ahead, and keep its slots filled."""
    Q_BYTES: gl.constexpr = 64 * C.CONSUMERS * (C.D + C.D1) * q.dtype.primitive_bitwidth // 8
    turn = 0
    ring = 0
    ring_phase = 0
    q_stage = 0
    q_phase = 0
    k_stage = 0
    k_used = 0
    v_stage = 0
    v_used = 0
    _announce(shared, 0, 0, gl.program_id(0), work_ptr, num_rows, heads, head_group, C)
    rows = _get(shared, 1, C)
    while rows >= 0:
        base = ring * RING_FIELDS
        first = _get(shared, base, C)
        kv_len = _get(shared, base + 2, C)
        pos0 = _get(shared, base + 3, C)
        head = _get(shared, base + 4, C)
        key_start = _get(shared, base + 5, C)
        ring, ring_phase = advance(ring, ring_phase, RING)
        turn += 1
        low, end = key_tiles(kv_len, pos0, rows, left, right_end, C)
        if end > low:
            kv_head = head
            q_head = head
            if C.PACK == 1:
                kv_head = head // group
            else:
                q_head = head * group
            seen_from = first_key(pos0, left, C)
            table = table_ptr
            if C.PAGE_SIZE > 0:
                table = table_ptr + key_start.to(gl.int64) * stride_table
            mbarrier.wait(shared.q_empty.index(q_stage), q_phase ^ 1)
            q_full = shared.q_full.index(q_stage)
            mbarrier.expect(q_full, Q_BYTES)
            for i in gl.static_range(C.CONSUMERS):
                token = first + i * C.TOKENS
                slot = q_stage * C.CONSUMERS + i
                tma_load(q, [token, q_head, 0], q_full, shared.q.index(slot))
                if C.D1 > 0:
                    tma_load(q1, [token, q_head, 0], q_full, shared.q1.index(slot))
            q_stage, q_phase = advance(q_stage, q_phase, C.Q_STAGES)
            tile = end - 1
            # Keys run one tile ahead of values, as the consumers want them.
            while tile >= low - 1:
                if tile >= low:
                    if k_used >= C.STAGES:
                        meet(K_EMPTY + k_stage, C.SLOT_THREADS)
                    k_used += 1
                    _load_keys(
                        shared, k, k1, k_stage, tile, key_start, kv_head, table, seen_from, kv_len,
                        stride_kp, stride_ks, stride_kh, C,
                    )  # fmt: skip
                    k_stage, _ = advance(k_stage, 0, C.STAGES)
                if tile < end - 1:
                    if v_used >= C.STAGES:
                        meet(V_EMPTY + v_stage, C.SLOT_THREADS)
                    v_used += 1
                    _load_values(
                        shared, v, v_stage, tile + 1, key_start, kv_head, table, seen_from, kv_len,
                        stride_vp, stride_vs, stride_vh, C,
                    )  # fmt: skip
                    v_stage, _ = advance(v_stage, 0, C.STAGES)
                if tile == end - 2:
                    # The first slots are filled, so nobody waits for what the next tile is.
                    work = _draw(work_ptr, heads, turn, order)
                    _announce(
                        shared, ring, ring_phase, work, work_ptr, num_rows, heads, head_group, C
                    )  # fmt: skip
                tile -= 1
        else:
            work = _draw(work_ptr, heads, turn, order)
            _announce(shared, ring, ring_phase, work, work_ptr, num_rows, heads, head_group, C)
        rows = _get(shared, ring * RING_FIELDS + 1, C)


__all__ = ["produce"]
