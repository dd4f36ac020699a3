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

# No `from __future__ import annotations`: Triton reads the types of the strides as objects.
from .hopper_compat import fence_async_shared, gl, gluon, mbarrier
from .hopper_consumer import consume
from .hopper_parts import RING, RING_FIELDS, Config, Shared
from .hopper_producer import produce


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

    consumer0 = (
        C, shared, 0, o_ptr, lse_ptr, scale, lse_scale, softcap_in, softcap_out,
        stride_ot, stride_oh, stride_lt, stride_lh, left, right_end, group,
    )  # fmt: skip
    consumer1 = (
        C, shared, 1, o_ptr, lse_ptr, scale, lse_scale, softcap_in, softcap_out,
        stride_ot, stride_oh, stride_lt, stride_lh, left, right_end, group,
    )  # fmt: skip
    producer = (
        C, shared, q_desc, k_desc, v_desc, work_ptr, table_ptr, stride_table, left, right_end,
        heads, group, head_group,
    )  # fmt: skip
    if CONSUMERS == 2:
        gl.warp_specialize(
            [(consume, consumer0), (consume, consumer1), (produce, producer)],
            [4, 1],
            [CONSUMER_REGS, PRODUCER_REGS],
        )
    else:
        gl.warp_specialize([(consume, consumer0), (produce, producer)], [1], [PRODUCER_REGS])


__all__ = ["_hopper_prefill_kernel"]
