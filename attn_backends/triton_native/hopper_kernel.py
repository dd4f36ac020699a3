"""Warp-specialised prefill for Hopper in Gluon: one producer warp, one or two consumer warpgroups.

A persistent program takes tiles from a work list (``hopper_work``). Its producer warp streams Q, K
and V by TMA; each consumer warpgroup owns 64 rows and keeps S, P and O in registers. With s the
scores, c the scale in log2 units, and keys visited from the last tile to the first:

    m' = max(m, rowmax s);  p = exp2(c s - c m');  a = exp2(c m - c m')
    l = a l + rowsum p;     o = a o + p v;         lse = c m ln 2 + ln l

The product of P and V of one step runs on the tensor cores while the next step's exponentials run
beside it. What keeps ptxas from hoisting the wait above the exponentials is the branch of the wait
for the next key tile: do not move it. Masks sit behind a run-time branch, so that one loop serves
tiles with and without them. Values past the last key are zeroed in shared memory, since a
probability of 0 times NaN is NaN.
"""

# No `from __future__ import annotations`: the fields of an aggregate are read as objects.
from .hopper_compat import (
    aggregate,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)

WORK_HEADER = gl.constexpr(8)  # ints before the first entry of the work list
WORK_FIELDS = gl.constexpr(8)  # ints per entry
RING = gl.constexpr(2)  # tiles the producer may announce ahead
RING_FIELDS = gl.constexpr(8)
LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)
# Named barriers; Triton itself takes the low ones.
TURN = gl.constexpr(6)
K_EMPTY = gl.constexpr(8)
V_EMPTY = gl.constexpr(12)


@gluon.constexpr_function
def _rows_layout(width):
    """Layout ``[64, width]`` in which a thread holds 8 columns side by side.

    Rows lie as in the accumulator, so that only four neighbouring threads exchange columns.
    """
    registers = [[0, 1], [0, 2], [0, 4]]
    column = 32
    while column < width:
        registers.append([0, column])
        column *= 2
    registers.append([8, 0])
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, width])


@aggregate
class Config:
    """What a variant of the kernel is compiled for."""

    D: gl.constexpr
    BLOCK_N: gl.constexpr
    STAGES: gl.constexpr
    CONSUMERS: gl.constexpr
    PACK: gl.constexpr
    PAGE_SIZE: gl.constexpr
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    HAS_SOFTCAP: gl.constexpr
    DYNAMIC: gl.constexpr
    SNAKE: gl.constexpr
    PING_PONG: gl.constexpr
    NAMED_EMPTY: gl.constexpr
    TOKENS: gl.constexpr  # query tokens per consumer warpgroup
    SLOT_THREADS: gl.constexpr  # threads that meet where a slot is given back
    S_LAYOUT: gl.constexpr
    O_LAYOUT: gl.constexpr
    P_LAYOUT: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, D, BLOCK_N, STAGES, CONSUMERS, PACK, PAGE_SIZE,
        HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, DYNAMIC, SNAKE, PING_PONG, NAMED_EMPTY,
    ):  # fmt: skip
        self.D = gl.constexpr(D)
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.STAGES = gl.constexpr(STAGES)
        self.CONSUMERS = gl.constexpr(CONSUMERS)
        self.PACK = gl.constexpr(PACK)
        self.PAGE_SIZE = gl.constexpr(PAGE_SIZE)
        self.HAS_LEFT = gl.constexpr(HAS_LEFT)
        self.HAS_RIGHT = gl.constexpr(HAS_RIGHT)
        self.HAS_SOFTCAP = gl.constexpr(HAS_SOFTCAP)
        self.DYNAMIC = gl.constexpr(DYNAMIC)
        self.SNAKE = gl.constexpr(SNAKE)
        self.PING_PONG = gl.constexpr(PING_PONG)
        self.NAMED_EMPTY = gl.constexpr(NAMED_EMPTY)
        self.TOKENS = gl.constexpr(64 // PACK)
        self.SLOT_THREADS = gl.constexpr(128 * CONSUMERS + 32)
        self.S_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16]))
        o_layout = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
        self.O_LAYOUT = gl.constexpr(o_layout)
        self.P_LAYOUT = gl.constexpr(gl.DotOperandLayout(0, o_layout, 2))


@aggregate
class Shared:
    """Shared memory: tiles, and the barriers that say when a tile is full or free again."""

    q: gl.shared_memory_descriptor  # [CONSUMERS, TOKENS, PACK, D]
    k: gl.shared_memory_descriptor  # [STAGES, 1, BLOCK_N, 1, D]
    v: gl.shared_memory_descriptor  # [STAGES, 1, BLOCK_N, 1, D]
    ring: gl.shared_memory_descriptor  # [RING * RING_FIELDS, 1]
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    ring_full: gl.shared_memory_descriptor
    ring_empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(
        self, q, k, v, ring, q_full, q_empty, k_full, k_empty, v_full, v_empty, ring_full,
        ring_empty,
    ):  # fmt: skip
        self.q = q
        self.k = k
        self.v = v
        self.ring = ring
        self.q_full = q_full
        self.q_empty = q_empty
        self.k_full = k_full
        self.k_empty = k_empty
        self.v_full = v_full
        self.v_empty = v_empty
        self.ring_full = ring_full
        self.ring_empty = ring_empty


@gluon.constexpr_function
def _barrier_text(verb, threads):
    """PTX of a named barrier; an inline instruction must return something."""
    return f"bar.{verb} $1, {threads}; mov.u32 $0, 0;"


@gluon.jit
def _meet(index, THREADS: gl.constexpr):
    """Wait until ``THREADS`` threads came to a named barrier."""
    asm: gl.constexpr = _barrier_text("sync", THREADS)
    gl.inline_asm_elementwise(asm, "=r,r", [index], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _come(index, THREADS: gl.constexpr):
    """Come to a named barrier without waiting there."""
    asm: gl.constexpr = _barrier_text("arrive", THREADS)
    gl.inline_asm_elementwise(asm, "=r,r", [index], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _advance(stage, phase, STAGES: gl.constexpr):
    """The slot after this one, and the parity of its barrier."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _key_tiles(kv_len, pos0, rows, left, right_end, C: gl.constexpr):
    """First key tile and end of the key tiles seen by ``rows`` tokens from position ``pos0``."""
    hi = kv_len
    lo = 0
    if C.HAS_RIGHT:
        hi = gl.minimum(hi, pos0 + (rows - 1) + right_end)
    if C.HAS_LEFT:
        lo = gl.maximum(pos0 - left, 0)
    some = (hi > lo) & (rows > 0)
    first = gl.where(some, lo // C.BLOCK_N, 0)
    end = gl.where(some, (hi + C.BLOCK_N - 1) // C.BLOCK_N, 0)
    return first, end


# ----------------------------------------------------------------------------- producer


@gluon.jit
def _load_tile(desc, full, slot, tile, key_start, head, table, kv_len, C):
    """Start the copy of one tile of keys or values; pages past the last key arrive as zeros."""
    BYTES: gl.constexpr = C.BLOCK_N * C.D * desc.dtype.primitive_bitwidth // 8
    mbarrier.expect(full, BYTES)
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
            page = gl.load(table + number, mask=number * C.PAGE_SIZE < kv_len, other=-1)
            box = slot.slice(i * C.PAGE_SIZE, C.PAGE_SIZE, 1)
            tma_load(desc, [page, 0, head, 0], full, box)


@gluon.jit
def _announce(shared, slot, phase, first, rows, kv_len, pos0, head):
    """Tell the consumers which tile comes next; ``rows`` of -1 ends their work."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    mbarrier.wait(shared.ring_empty.index(slot), phase ^ 1)
    base = slot * RING_FIELDS
    shared.ring.index(base).store(gl.full([1], first, gl.int32, layout))
    shared.ring.index(base + 1).store(gl.full([1], rows, gl.int32, layout))
    shared.ring.index(base + 2).store(gl.full([1], kv_len, gl.int32, layout))
    shared.ring.index(base + 3).store(gl.full([1], pos0, gl.int32, layout))
    shared.ring.index(base + 4).store(gl.full([1], head, gl.int32, layout))
    mbarrier.arrive(shared.ring_full.index(slot), count=1)


@gluon.jit
def _draw(work_ptr, C):
    """The next ticket for a tile, if tiles are handed out."""
    ticket = 0
    if C.DYNAMIC:
        ticket = gl.atomic_add(work_ptr + 1, 1, sem="relaxed")
    return ticket


@gluon.jit
def _produce(
    C, shared, q_desc, k_desc, v_desc, work_ptr, table_ptr, stride_table, left, right_end,
    heads, group, head_group,
):  # fmt: skip
    """The producer warp: announce each tile, and keep its slots filled."""
    Q_BYTES: gl.constexpr = 64 * C.CONSUMERS * C.D * q_desc.dtype.primitive_bitwidth // 8
    entries = gl.load(work_ptr)
    total = entries * heads
    programs = gl.num_programs(0)
    work = gl.program_id(0)
    turn = 0
    ring = 0
    ring_phase = 0
    q_phase = 0
    k_stage = 0
    k_phase = 0
    k_used = 0
    v_stage = 0
    v_phase = 0
    v_used = 0
    ticket = 0
    while work < total:
        per_group = entries * head_group
        section = work // per_group
        rest = work - section * per_group
        entry = rest // head_group
        head = section * head_group + rest - entry * head_group
        at = work_ptr + WORK_HEADER + entry * WORK_FIELDS
        first = gl.load(at)
        rows = gl.load(at + 1)
        kv_len = gl.load(at + 2)
        pos0 = gl.load(at + 3)
        key_start = gl.load(at + 4)
        _announce(shared, ring, ring_phase, first, rows, kv_len, pos0, head)
        ring, ring_phase = _advance(ring, ring_phase, RING)
        low, end = _key_tiles(kv_len, pos0, rows, left, right_end, C)
        if end > low:
            kv_head = head
            q_head = head
            if C.PACK == 1:
                kv_head = head // group
            else:
                q_head = head * group
            table = table_ptr
            if C.PAGE_SIZE > 0:
                table = table_ptr + key_start.to(gl.int64) * stride_table
            mbarrier.wait(shared.q_empty, q_phase ^ 1)
            q_phase ^= 1
            mbarrier.expect(shared.q_full, Q_BYTES)
            for i in gl.static_range(C.CONSUMERS):
                tma_load(
                    q_desc, [first + i * C.TOKENS, q_head, 0], shared.q_full, shared.q.index(i)
                )
            tile = end - 1
            # Keys run one tile ahead of values, as the consumers want them.
            while tile >= low - 1:
                if tile >= low:
                    if C.NAMED_EMPTY:
                        if k_used >= C.STAGES:
                            _meet(K_EMPTY + k_stage, C.SLOT_THREADS)
                        k_used += 1
                    else:
                        mbarrier.wait(shared.k_empty.index(k_stage), k_phase ^ 1)
                    _load_tile(
                        k_desc, shared.k_full.index(k_stage), shared.k.index(k_stage), tile,
                        key_start, kv_head, table, kv_len, C,
                    )  # fmt: skip
                    k_stage, k_phase = _advance(k_stage, k_phase, C.STAGES)
                if tile < end - 1:
                    if C.NAMED_EMPTY:
                        if v_used >= C.STAGES:
                            _meet(V_EMPTY + v_stage, C.SLOT_THREADS)
                        v_used += 1
                    else:
                        mbarrier.wait(shared.v_empty.index(v_stage), v_phase ^ 1)
                    _load_tile(
                        v_desc, shared.v_full.index(v_stage), shared.v.index(v_stage), tile + 1,
                        key_start, kv_head, table, kv_len, C,
                    )  # fmt: skip
                    v_stage, v_phase = _advance(v_stage, v_phase, C.STAGES)
                if tile == end - 2:
                    # The first slots are filled: nobody waits for the round trip of the ticket.
                    ticket = _draw(work_ptr, C)
                tile -= 1
        else:
            ticket = _draw(work_ptr, C)
        if C.DYNAMIC:
            # Every ticket up to the number of tiles is drawn once; the last puts the counter back.
            if ticket == total - 1:
                gl.store(work_ptr + 1, 0)
            work = programs + ticket
        else:
            turn += 1
            offset = gl.program_id(0)
            if C.SNAKE:
                offset = gl.where(turn % 2 == 1, programs - 1 - offset, offset)
            work = turn * programs + offset
    _announce(shared, ring, ring_phase, 0, -1, 0, 0, 0)


# ----------------------------------------------------------------------------- consumers


@gluon.jit
def _field(shared, index):
    """One announced int."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.sum(shared.ring.index(index).load(layout), 0)


@gluon.jit
def _release_keys(shared, stage, C):
    """Give a slot of keys back to the producer."""
    if C.NAMED_EMPTY:
        _come(K_EMPTY + stage, C.SLOT_THREADS)
    else:
        mbarrier.arrive(shared.k_empty.index(stage), count=1)


@gluon.jit
def _release_values(shared, stage, C):
    """Give a slot of values back to the producer."""
    if C.NAMED_EMPTY:
        _come(V_EMPTY + stage, C.SLOT_THREADS)
    else:
        mbarrier.arrive(shared.v_empty.index(stage), count=1)


@gluon.jit
def _issue_scores(shared, wg, stage, C):
    """Start S = Q K^T of the tile in a slot."""
    q = shared.q.index(wg).reshape([64, C.D])
    k = shared.k.index(stage).reshape([C.BLOCK_N, C.D]).permute((1, 0))
    zero = gl.zeros([64, C.BLOCK_N], gl.float32, C.S_LAYOUT)
    return warpgroup_mma(q, k, zero, use_acc=False, is_async=True)  # [64, BLOCK_N]


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
def _row_sums(p, BLOCK_N: gl.constexpr):
    """Sums over what each thread holds of a row; the rest of the sum waits until the end."""
    return gl.sum(gl.reshape(p, [64, BLOCK_N // 8, 8]), 1)  # [64, 8]


@gluon.jit
def _softmax(s, m, sums, scale, C):
    """One step of the online softmax: p, and the new maximum, sum and factor of what was."""
    m_new = gl.maximum(m, gl.max(s, 1))
    # A row without any key so far keeps its -inf, but must not subtract it from itself.
    m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = gl.exp2((m - m_safe) * scale)  # [64]
    p = gl.exp2(s * scale - (m_safe * scale)[:, None])  # [64, BLOCK_N]
    sums_alpha = gl.convert_layout(alpha, gl.SliceLayout(1, sums.type.layout))
    sums = sums * sums_alpha[:, None] + _row_sums(p, C.BLOCK_N)
    return p, m_new, sums, alpha


@gluon.jit
def _zero_tail(slot, keys, C):
    """Zero the rows of V from ``keys`` on, ahead of tensor cores that read all of them.

    Both consumers do so, and write the same bytes; neither waits for the other.
    """
    layout: gl.constexpr = _rows_layout(C.D)
    tile = slot.reshape([C.BLOCK_N, C.D])
    row = gl.arange(0, 64, gl.SliceLayout(1, layout))
    for i in gl.static_range(C.BLOCK_N // 64):
        if keys < (i + 1) * 64:
            part = tile.slice(i * 64, 64, 0)
            x = part.load(layout)
            part.store(gl.where((row < keys - i * 64)[:, None], x, gl.zeros_like(x)))
    fence_async_shared()
    # Here, and not where the compiler would put it: before every later read of V.
    barrier()


@gluon.jit
def _attend(
    C, shared, wg: gl.constexpr, low, end, kv_len, pos_first, safe_lo, safe_hi, left, right_end,
    scale, softcap_in, softcap_out, k_stage, k_phase, v_stage, v_phase,
):  # fmt: skip
    """Softmax over the key tiles ``[low, end)`` of one query tile, from the last to the first."""
    V_DTYPE: gl.constexpr = shared.v.dtype
    lo_row, hi_row = _key_range(kv_len, pos_first, left, right_end, C)
    acc = gl.zeros([64, C.D], gl.float32, C.O_LAYOUT)
    m = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, C.S_LAYOUT))
    none = gl.zeros([64, C.BLOCK_N], gl.float32, C.S_LAYOUT)
    sums = _row_sums(none, C.BLOCK_N)

    tile = end - 1
    mbarrier.wait(shared.k_full.index(k_stage), k_phase)
    s = warpgroup_mma_wait(0, deps=(_issue_scores(shared, wg, k_stage, C),))
    _release_keys(shared, k_stage, C)
    k_stage, k_phase = _advance(k_stage, k_phase, C.STAGES)
    s = _cap(s, softcap_in, softcap_out, C)
    s = _mask(s, tile * C.BLOCK_N, lo_row, hi_row, safe_lo, safe_hi, C)
    p, m, sums, alpha = _softmax(s, m, sums, scale, C)
    p = gl.convert_layout(p.to(V_DTYPE), C.P_LAYOUT)
    if end * C.BLOCK_N > kv_len:
        mbarrier.wait(shared.v_full.index(v_stage), v_phase)
        _zero_tail(shared.v.index(v_stage), kv_len - tile * C.BLOCK_N, C)
    mbarrier.wait(shared.k_full.index(k_stage), k_phase, pred=tile > low)

    while tile > low:
        tile -= 1
        if C.PING_PONG:
            _meet(TURN + wg, 256)
        s_token = _issue_scores(shared, wg, k_stage, C)
        mbarrier.wait(shared.v_full.index(v_stage), v_phase)
        v = shared.v.index(v_stage).reshape([C.BLOCK_N, C.D])
        o_token = warpgroup_mma(p, v, acc, is_async=True)
        if C.PING_PONG:
            _come(TURN + 1 - wg, 256)
        s = warpgroup_mma_wait(1, deps=(s_token,))
        _release_keys(shared, k_stage, C)
        k_stage, k_phase = _advance(k_stage, k_phase, C.STAGES)
        s = _cap(s, softcap_in, softcap_out, C)
        s = _mask(s, tile * C.BLOCK_N, lo_row, hi_row, safe_lo, safe_hi, C)
        p_next, m, sums, alpha = _softmax(s, m, sums, scale, C)
        p_next = p_next.to(V_DTYPE)
        # This branch keeps the wait below it.
        mbarrier.wait(shared.k_full.index(k_stage), k_phase, pred=tile > low)
        acc = warpgroup_mma_wait(0, deps=(o_token,))
        _release_values(shared, v_stage, C)
        v_stage, v_phase = _advance(v_stage, v_phase, C.STAGES)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, C.O_LAYOUT))[:, None]
        p = gl.convert_layout(p_next, C.P_LAYOUT)

    mbarrier.arrive(shared.q_empty, count=1)
    mbarrier.wait(shared.v_full.index(v_stage), v_phase)
    v = shared.v.index(v_stage).reshape([C.BLOCK_N, C.D])
    acc = warpgroup_mma_wait(0, deps=(warpgroup_mma(p, v, acc, is_async=True),))
    _release_values(shared, v_stage, C)
    v_stage, v_phase = _advance(v_stage, v_phase, C.STAGES)
    total = gl.convert_layout(gl.sum(sums, 1), gl.SliceLayout(1, C.S_LAYOUT))
    return acc, m, total, k_stage, k_phase, v_stage, v_phase


@gluon.jit
def _store(acc, lse, o_ptr, lse_ptr, first, rows, head, wg: gl.constexpr,
           group, stride_ot, stride_oh, stride_lt, stride_lh, C):  # fmt: skip
    """Write the rows of the tile that exist, 16 bytes a thread, never another sequence's."""
    # The layout of the accumulator with the columns of four neighbouring threads transposed.
    layout: gl.constexpr = _rows_layout(C.D)
    o = gl.convert_layout(acc.to(o_ptr.dtype.element_ty), layout)
    row = gl.arange(0, 64, gl.SliceLayout(1, layout))
    col = gl.arange(0, C.D, gl.SliceLayout(0, layout))
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
def _consume(
    C, shared, wg: gl.constexpr, o_ptr, lse_ptr, scale, lse_scale, softcap_in, softcap_out,
    stride_ot, stride_oh, stride_lt, stride_lh, left, right_end, group,
):  # fmt: skip
    """A consumer warpgroup: 64 rows of every tile that the producer announces."""
    if C.PING_PONG:
        if wg == 1:
            _come(TURN, 256)
    ring = 0
    ring_phase = 0
    q_phase = 0
    k_stage = 0
    k_phase = 0
    v_stage = 0
    v_phase = 0
    mbarrier.wait(shared.ring_full.index(0), 0)
    rows = _field(shared, 1)
    while rows >= 0:
        base = ring * RING_FIELDS
        kv_len = _field(shared, base + 2)
        pos0 = _field(shared, base + 3)
        pos_first = pos0 + wg * C.TOKENS
        # Tiles of keys inside [safe_lo, safe_hi) are seen whole by every row.
        safe_lo = 0
        safe_hi = kv_len
        if C.HAS_LEFT:
            safe_lo = gl.maximum(pos_first + C.TOKENS - 1 - left, 0)
        if C.HAS_RIGHT:
            safe_hi = gl.minimum(safe_hi, pos_first + right_end)
        low, end = _key_tiles(kv_len, pos0, rows, left, right_end, C)
        acc = gl.zeros([64, C.D], gl.float32, C.O_LAYOUT)
        m = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, C.S_LAYOUT))
        total = gl.full([64], 1.0, gl.float32, gl.SliceLayout(1, C.S_LAYOUT))
        if end > low:
            mbarrier.wait(shared.q_full, q_phase)
            q_phase ^= 1
            acc, m, total, k_stage, k_phase, v_stage, v_phase = _attend(
                C, shared, wg, low, end, kv_len, pos_first, safe_lo, safe_hi, left, right_end,
                scale, softcap_in, softcap_out, k_stage, k_phase, v_stage, v_phase,
            )  # fmt: skip

        # Read once more, instead of held in registers through the loop over keys.
        first = _field(shared, base)
        rows = _field(shared, base + 1)
        kv_len = _field(shared, base + 2)
        pos_first = _field(shared, base + 3) + wg * C.TOKENS
        head = _field(shared, base + 4)
        mbarrier.arrive(shared.ring_empty.index(ring), count=1)
        ring, ring_phase = _advance(ring, ring_phase, RING)
        lo_row, hi_row = _key_range(kv_len, pos_first, left, right_end, C)
        seen = hi_row > gl.maximum(lo_row, 0)
        lse = gl.where(seen, m * lse_scale + gl.log2(total) * LN2, float("-inf"))
        inverse = gl.where(seen, 1.0 / total, 0.0)
        o_inverse = gl.convert_layout(inverse, gl.SliceLayout(1, C.O_LAYOUT))[:, None]
        o_seen = gl.convert_layout(seen, gl.SliceLayout(1, C.O_LAYOUT))[:, None]
        _store(
            gl.where(o_seen, acc * o_inverse, 0.0), lse, o_ptr, lse_ptr, first, rows, head, wg,
            group, stride_ot, stride_oh, stride_lt, stride_lh, C,
        )  # fmt: skip
        mbarrier.wait(shared.ring_full.index(ring), ring_phase)
        rows = _field(shared, ring * RING_FIELDS + 1)


@gluon.jit(
    do_not_specialize=[
        "scale", "lse_scale", "softcap_in", "softcap_out", "stride_table", "left", "right_end",
        "heads", "group", "head_group",
    ]
)  # fmt: skip
def _hopper_prefill_kernel(
    q_desc, k_desc, v_desc, o_ptr, lse_ptr, work_ptr, table_ptr,
    scale, lse_scale, softcap_in, softcap_out,
    stride_ot: gl.int64, stride_oh: gl.int64, stride_lt: gl.int64, stride_lh: gl.int64,
    stride_table: gl.int64, left, right_end, heads, group, head_group,
    D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
    PACK: gl.constexpr, PAGE_SIZE: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    DYNAMIC: gl.constexpr, SNAKE: gl.constexpr, PING_PONG: gl.constexpr,
    NAMED_EMPTY: gl.constexpr, CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    C = Config(
        D, BLOCK_N, STAGES, CONSUMERS, PACK, PAGE_SIZE,
        HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, DYNAMIC, SNAKE, PING_PONG, NAMED_EMPTY,
    )  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C.TOKENS, PACK, D], dtype)
    kv_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, BLOCK_N, 1, D], dtype)
    ring_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    bar_layout: gl.constexpr = mbarrier.MBarrierLayout()
    shared = Shared(
        gl.allocate_shared_memory(dtype, [CONSUMERS, C.TOKENS, PACK, D], q_layout),
        gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_N, 1, D], kv_layout),
        gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_N, 1, D], kv_layout),
        gl.allocate_shared_memory(gl.int32, [RING * RING_FIELDS, 1], ring_layout),
        gl.allocate_shared_memory(gl.int64, [1], bar_layout),
        gl.allocate_shared_memory(gl.int64, [1], bar_layout),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout),
        gl.allocate_shared_memory(gl.int64, [RING, 1], bar_layout),
        gl.allocate_shared_memory(gl.int64, [RING, 1], bar_layout),
    )
    mbarrier.init(shared.q_full, 1)
    mbarrier.init(shared.q_empty, CONSUMERS)
    for i in gl.static_range(STAGES):
        mbarrier.init(shared.k_full.index(i), 1)
        mbarrier.init(shared.k_empty.index(i), CONSUMERS)
        mbarrier.init(shared.v_full.index(i), 1)
        mbarrier.init(shared.v_empty.index(i), CONSUMERS)
    for i in gl.static_range(RING):
        mbarrier.init(shared.ring_full.index(i), 1)
        mbarrier.init(shared.ring_empty.index(i), CONSUMERS)
    fence_async_shared()

    consume0 = (
        C, shared, 0, o_ptr, lse_ptr, scale, lse_scale, softcap_in, softcap_out,
        stride_ot, stride_oh, stride_lt, stride_lh, left, right_end, group,
    )  # fmt: skip
    consume1 = (
        C, shared, 1, o_ptr, lse_ptr, scale, lse_scale, softcap_in, softcap_out,
        stride_ot, stride_oh, stride_lt, stride_lh, left, right_end, group,
    )  # fmt: skip
    produce = (
        C, shared, q_desc, k_desc, v_desc, work_ptr, table_ptr, stride_table, left, right_end,
        heads, group, head_group,
    )  # fmt: skip
    if CONSUMERS == 2:
        gl.warp_specialize(
            [(_consume, consume0), (_consume, consume1), (_produce, produce)],
            [4, 1],
            [CONSUMER_REGS, PRODUCER_REGS],
        )
    else:
        gl.warp_specialize([(_consume, consume0), (_produce, produce)], [1], [PRODUCER_REGS])


__all__ = ["WORK_FIELDS", "WORK_HEADER", "_hopper_prefill_kernel"]
