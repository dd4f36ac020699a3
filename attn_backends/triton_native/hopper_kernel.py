"""Warp-specialised prefill for Hopper in Gluon: a producer, and one or two consumer warpgroups.

A persistent program takes tiles from a work list (``hopper_work``). Its producer streams Q, K and V
in: one warp by TMA, or four by cp.async where the pages of a cache are not such as TMA can address.
Each consumer warpgroup owns 64 rows and keeps S, P and O in registers. With s the
scores, c the scale in log2 units, and keys visited from the last tile to the first:

    m' = max(m, rowmax s);  p = exp2(c s - c m');  a = exp2(c m - c m')
    l = a l + rowsum p;     o = a o + p v;         lse = c m ln 2 + ln l

The product of P and V of one step runs on the tensor cores while the next step's softmax runs
beside it. What keeps ptxas from hoisting the wait for it above the exponentials is the branch of
the wait for the next key tile, in their middle: do not move it. Each consumer's softmax is kept
short besides: maxima are taken in many chains, and sums and conversions stand between exponentials.
Consumers may start their products in turn, so that one's softmax runs beside the other's products,
and keep half of the queries in registers, which spares shared memory.

Masks sit behind a run-time branch, so that one loop serves tiles with and without them. Values past
the last key are zeroed in shared memory, since a probability of 0 times NaN is NaN.
"""

# No `from __future__ import annotations`: Triton reads the types of the strides as objects.
from .hopper_compat import fence_async_shared, gl, gluon, mbarrier
from .hopper_consumer import consume
from .hopper_parts import RING, RING_FIELDS, Config, Shared
from .hopper_producer import produce


@gluon.jit(
    do_not_specialize=[
        "scale", "lse_scale", "softcap_in", "softcap_out", "stride_lt", "stride_lh",
        "stride_table", "num_rows", "left", "right_end", "heads", "group", "head_group", "order",
        "stride_kp", "stride_ks", "stride_kh", "stride_vp", "stride_vs", "stride_vh",
    ]
)  # fmt: skip
def _hopper_prefill_kernel(
    # Tensor maps of queries, keys and values; q1 and k1 of their lanes beyond D, or None. With
    # GATHER, k and v are pointers, with the strides of pages, slots and heads in 16 bytes.
    q, q1, k, k1, v,
    o_ptr, lse_ptr, work_ptr, table_ptr, sinks_ptr,
    scale, lse_scale, softcap_in, softcap_out,
    stride_ot: gl.int64, stride_oh: gl.int64, stride_lt: gl.int64, stride_lh: gl.int64,
    stride_table: gl.int64, num_rows, left, right_end, heads, group, head_group, order,
    stride_kp: gl.int64, stride_ks: gl.int64, stride_kh: gl.int64,
    stride_vp: gl.int64, stride_vs: gl.int64, stride_vh: gl.int64,
    D: gl.constexpr, D1: gl.constexpr, DV: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, PACK: gl.constexpr, PAGE_SIZE: gl.constexpr, GATHER: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    HAS_SINKS: gl.constexpr, HELD: gl.constexpr, TURNS: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    C = Config(
        D, D1, DV, BLOCK_N, STAGES, Q_STAGES, CONSUMERS, PACK, PAGE_SIZE, GATHER,
        HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_SINKS, HELD, TURNS,
    )  # fmt: skip
    dtype: gl.constexpr = q.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C.TOKENS, PACK, D], dtype)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, BLOCK_N, 1, D], dtype)
    v_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, BLOCK_N, 1, DV], dtype)
    ring_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    bar_layout: gl.constexpr = mbarrier.MBarrierLayout()
    q_slots = gl.allocate_shared_memory(dtype, [Q_STAGES * CONSUMERS, C.TOKENS, PACK, D], q_layout)
    k_slots = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_N, 1, D], k_layout)
    q1_slots = q_slots
    k1_slots = k_slots
    if D1 > 0:
        q1_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C.TOKENS, PACK, D1], dtype)
        k1_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, BLOCK_N, 1, D1], dtype)
        q1_slots = gl.allocate_shared_memory(
            dtype, [Q_STAGES * CONSUMERS, C.TOKENS, PACK, D1], q1_layout
        )
        k1_slots = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_N, 1, D1], k1_layout)
    shared = Shared(
        q_slots, q1_slots, k_slots, k1_slots,
        gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_N, 1, DV], v_layout),
        gl.allocate_shared_memory(gl.int32, [RING * RING_FIELDS, 1], ring_layout),
        gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], bar_layout),
        gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], bar_layout),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout),
        gl.allocate_shared_memory(gl.int64, [RING, 1], bar_layout),
        gl.allocate_shared_memory(gl.int64, [RING, 1], bar_layout),
    )  # fmt: skip
    # One arrival of the thread that starts copies by TMA, or one of each thread that gathers.
    FULL: gl.constexpr = 32 * C.PRODUCER_WARPS if GATHER else 1
    for i in gl.static_range(Q_STAGES):
        mbarrier.init(shared.q_full.index(i), 1)
        mbarrier.init(shared.q_empty.index(i), CONSUMERS)
    for i in gl.static_range(STAGES):
        mbarrier.init(shared.k_full.index(i), FULL)
        mbarrier.init(shared.v_full.index(i), FULL)
    for i in gl.static_range(RING):
        mbarrier.init(shared.ring_full.index(i), 1)
        mbarrier.init(shared.ring_empty.index(i), CONSUMERS)
    fence_async_shared()

    rest = (
        o_ptr, lse_ptr, sinks_ptr, scale, lse_scale, softcap_in, softcap_out,
        stride_ot, stride_oh, stride_lt, stride_lh, left, right_end, group,
    )  # fmt: skip
    # Sums of tuples, since Triton knows no stars in them.
    consumer0 = (C, shared, 0) + rest  # noqa: RUF005
    consumer1 = (C, shared, 1) + rest  # noqa: RUF005
    producer = (
        C, shared, q, q1, k, k1, v, work_ptr, table_ptr, stride_table, num_rows, left, right_end,
        heads, group, head_group, order, stride_kp, stride_ks, stride_kh,
        stride_vp, stride_vs, stride_vh,
    )  # fmt: skip
    P: gl.constexpr = C.PRODUCER_WARPS
    if CONSUMERS == 2:
        gl.warp_specialize(
            [(consume, consumer0), (consume, consumer1), (produce, producer)],
            [4, P],
            [CONSUMER_REGS, PRODUCER_REGS],
        )
    else:
        gl.warp_specialize([(consume, consumer0), (produce, producer)], [P], [PRODUCER_REGS])


__all__ = ["_hopper_prefill_kernel"]
