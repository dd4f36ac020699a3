"""What producer and consumers of the Hopper prefill share: variant, shared memory, barriers."""

# No `from __future__ import annotations`: the fields of an aggregate are read as objects.
from .hopper_compat import aggregate, gl, gluon

WORK_HEADER = gl.constexpr(8)  # ints before the first entry of the work list
WORK_FIELDS = gl.constexpr(8)  # ints per entry
RING = gl.constexpr(2)  # tiles the producer may announce ahead
RING_FIELDS = gl.constexpr(8)
#: A maximum is kept until it is exceeded by this in log2 units; probabilities stay below 2 to
#: this power, far from overflow even in float16.
LAZY_GROWTH = gl.constexpr(8.0)
# In which order tiles are taken; 0 is in fixed turns.
FORTH_AND_BACK = gl.constexpr(1)
HANDED_OUT = gl.constexpr(2)
LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)
# Named barriers; Triton itself takes the low ones.
TURN = gl.constexpr(6)
K_EMPTY = gl.constexpr(8)
V_EMPTY = gl.constexpr(12)


@gluon.constexpr_function
def rows_layout(width):
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


@gluon.constexpr_function
def gather_layout(width):
    """Layout ``[rows, width]`` of four warps in which a thread copies 16 bytes of a row."""
    across = min(width // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])


@aggregate
class Config:
    """What a variant of the kernel is compiled for."""

    D: gl.constexpr  # lanes of queries and keys: the first of them, if D1 holds the others
    D1: gl.constexpr  # lanes beyond D; 0 if their number is a power of two
    DV: gl.constexpr  # lanes of values
    BLOCK_N: gl.constexpr
    STAGES: gl.constexpr
    Q_STAGES: gl.constexpr
    CONSUMERS: gl.constexpr
    PACK: gl.constexpr
    PAGE_SIZE: gl.constexpr
    GATHER: gl.constexpr  # keys and values come row by row, through pointers
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    HAS_SOFTCAP: gl.constexpr
    HAS_SINKS: gl.constexpr
    HELD: gl.constexpr  # lanes of queries that consumers keep in registers
    TURNS: gl.constexpr  # consumers start their products in turn
    TOKENS: gl.constexpr  # query tokens per consumer warpgroup
    PRODUCER_WARPS: gl.constexpr
    SLOT_THREADS: gl.constexpr  # threads that meet where a slot is given back
    Q_LAYOUT: gl.constexpr
    S_LAYOUT: gl.constexpr
    O_LAYOUT: gl.constexpr
    P_LAYOUT: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, D, D1, DV, BLOCK_N, STAGES, Q_STAGES, CONSUMERS, PACK, PAGE_SIZE, GATHER,
        HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_SINKS, HELD, TURNS,
    ):  # fmt: skip
        self.D = gl.constexpr(D)
        self.D1 = gl.constexpr(D1)
        self.DV = gl.constexpr(DV)
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.STAGES = gl.constexpr(STAGES)
        self.Q_STAGES = gl.constexpr(Q_STAGES)
        self.CONSUMERS = gl.constexpr(CONSUMERS)
        self.PACK = gl.constexpr(PACK)
        self.PAGE_SIZE = gl.constexpr(PAGE_SIZE)
        self.GATHER = gl.constexpr(GATHER)
        self.HAS_LEFT = gl.constexpr(HAS_LEFT)
        self.HAS_RIGHT = gl.constexpr(HAS_RIGHT)
        self.HAS_SOFTCAP = gl.constexpr(HAS_SOFTCAP)
        self.HAS_SINKS = gl.constexpr(HAS_SINKS)
        self.HELD = gl.constexpr(HELD)
        self.TURNS = gl.constexpr(TURNS)
        self.TOKENS = gl.constexpr(64 // PACK)
        producer_warps = 4 if GATHER else 1
        self.PRODUCER_WARPS = gl.constexpr(producer_warps)
        self.SLOT_THREADS = gl.constexpr(128 * CONSUMERS + 32 * producer_warps)
        s_layout = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
        self.Q_LAYOUT = gl.constexpr(gl.DotOperandLayout(0, s_layout, 2))
        self.S_LAYOUT = gl.constexpr(s_layout)
        o_layout = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
        self.O_LAYOUT = gl.constexpr(o_layout)
        self.P_LAYOUT = gl.constexpr(gl.DotOperandLayout(0, o_layout, 2))


@aggregate
class Shared:
    """Shared memory: tiles, and the barriers that say when a tile is full or free again."""

    q: gl.shared_memory_descriptor  # [Q_STAGES * CONSUMERS, TOKENS, PACK, D]
    q1: gl.shared_memory_descriptor  # [Q_STAGES * CONSUMERS, TOKENS, PACK, D1]; q if D1 is 0
    k: gl.shared_memory_descriptor  # [STAGES, 1, BLOCK_N, 1, D]
    k1: gl.shared_memory_descriptor  # [STAGES, 1, BLOCK_N, 1, D1]; k itself if D1 is 0
    v: gl.shared_memory_descriptor  # [STAGES, 1, BLOCK_N, 1, DV]
    ring: gl.shared_memory_descriptor  # [RING * RING_FIELDS, 1]
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    ring_full: gl.shared_memory_descriptor
    ring_empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(
        self, q, q1, k, k1, v, ring, q_full, q_empty, k_full, v_full, ring_full, ring_empty,
    ):  # fmt: skip
        self.q = q
        self.q1 = q1
        self.k = k
        self.k1 = k1
        self.v = v
        self.ring = ring
        self.q_full = q_full
        self.q_empty = q_empty
        self.k_full = k_full
        self.v_full = v_full
        self.ring_full = ring_full
        self.ring_empty = ring_empty


@gluon.constexpr_function
def _barrier_text(verb, threads):
    """PTX of a named barrier; an inline instruction must return something."""
    return f"bar.{verb} $1, {threads}; mov.u32 $0, 0;"


@gluon.jit
def meet(index, THREADS: gl.constexpr):
    """Wait until ``THREADS`` threads came to a named barrier."""
    asm: gl.constexpr = _barrier_text("sync", THREADS)
    gl.inline_asm_elementwise(asm, "=r,r", [index], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def come(index, THREADS: gl.constexpr):
    """Come to a named barrier without waiting there."""
    asm: gl.constexpr = _barrier_text("arrive", THREADS)
    gl.inline_asm_elementwise(asm, "=r,r", [index], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """The slot after this one, and the parity of its barrier."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def first_key(pos0, left, C: gl.constexpr):
    """The first key that a token at ``pos0`` or later may see."""
    lo = 0
    if C.HAS_LEFT:
        lo = gl.maximum(pos0 - left, 0)
    return lo


@gluon.jit
def key_tiles(kv_len, pos0, rows, left, right_end, C: gl.constexpr):
    """First key tile and end of the key tiles seen by ``rows`` tokens from position ``pos0``."""
    hi = kv_len
    lo = first_key(pos0, left, C)
    if C.HAS_RIGHT:
        hi = gl.minimum(hi, pos0 + (rows - 1) + right_end)
    some = (hi > lo) & (rows > 0)
    first = gl.where(some, lo // C.BLOCK_N, 0)
    end = gl.where(some, (hi + C.BLOCK_N - 1) // C.BLOCK_N, 0)
    return first, end


__all__ = [
    "Config",
    "FORTH_AND_BACK",
    "HANDED_OUT",
    "K_EMPTY",
    "LAZY_GROWTH",
    "LN2",
    "LOG2E",
    "RING",
    "RING_FIELDS",
    "Shared",
    "TURN",
    "V_EMPTY",
    "WORK_FIELDS",
    "WORK_HEADER",
    "advance",
    "come",
    "first_key",
    "gather_layout",
    "key_tiles",
    "meet",
    "rows_layout",
]
