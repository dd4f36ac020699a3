"""Into how many parts keys are cut: a model of waves, on the host and on the device.

It counts time in keys that one program visits alone, at ``rate`` keys per microsecond. A program
alone on a multiprocessor cannot saturate its share of the memory, several together share what there
is: n programs that run at once take the longest of three bounds (``wave_keys``), the program's, the
multiprocessor's and the memory's. Starting and merging cost microseconds.

The constants were fitted to the points of the default tile at head dim 128 in
``docs/results/h200/decode-cuts.json``; the root mean square error there is 7 %, and
``tests/triton_native/test_cuts.py`` holds the choices at other head dims to the measurements.
"""

from __future__ import annotations

import math
from functools import lru_cache

import triton
import triton.language as tl

#: Cuts tried for equal lengths: up to this many full waves.
WAVES = 4
#: Programs per multiprocessor, each alone at full rate, that saturate the memory.
SATURATION = 1.24
#: Programs at full rate that one multiprocessor can feed.
FEED = 1.6
#: Microseconds: to start a program; more for each other one on its multiprocessor; to merge; more
#: for each part.
START, NEXT, MERGE, MERGE_PART = 4.0, 1.2, 0.8, 0.12
#: Rows that a multiprocessor merges at once.
MERGE_ROWS = 8
#: What cutting costs in memory throughput: partial states are written between reads.
CUT_LOSS = 1.04
#: Lengths count as equal while the longest is at most this times the mean.
EQUAL = 1.25
#: Unequal lengths: pieces of 1.5 times an equal share if that is short, else of 0.7 times.
SHORT_PIECE, FEW, MANY = 2048, 1.5, 0.7
#: Keys per multiprocessor that are few: the kernels of the next call then start early, and
#: ``configs.few_configs`` has tiles for them. With more it was slower (1 x 131072: 149 against 131
#: us), most likely as programs that start beside a merge are dealt out unevenly.
FEW_KEYS = 512
#: The same in programs that are not cut yet: at most one for as many multiprocessors.
FEW_PROGRAMS = 4
# The same for the device's copy of the model.
_WAVES, _SATURATION, _FEED = tl.constexpr(WAVES), tl.constexpr(SATURATION), tl.constexpr(FEED)
_START, _NEXT = tl.constexpr(START), tl.constexpr(NEXT)
_MERGE, _MERGE_PART = tl.constexpr(MERGE), tl.constexpr(MERGE_PART)
_MERGE_ROWS, _CUT_LOSS = tl.constexpr(MERGE_ROWS), tl.constexpr(CUT_LOSS)
_EQUAL, _SHORT_PIECE = tl.constexpr(EQUAL), tl.constexpr(SHORT_PIECE)
_FEW, _MANY = tl.constexpr(FEW), tl.constexpr(MANY)


@triton.jit
def _wave(n, size, processors):
    """``wave_keys`` on the device."""
    each = tl.ceil(n / processors)
    return tl.maximum(1.0, tl.maximum(each / _FEED, n / (processors * _SATURATION))) * size


@triton.jit
def choose_chunk_on_device(
    work, programs, span_max, processors, rate, min_chunk, HK: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr, OCCUPANCY: tl.constexpr,
):  # fmt: skip
    """``choose_chunk`` on the device."""
    slots = processors * OCCUPANCY
    chunk = tl.maximum(span_max, 1)
    if span_max * programs <= work * _EQUAL:
        base = tl.maximum(programs, 1.0) * HK
        best = 3.0e38
        for k in tl.static_range(0, OCCUPANCY + _WAVES):
            wanted = k if k <= OCCUPANCY else OCCUPANCY * (k - OCCUPANCY + 1)
            parts = tl.floor(processors * wanted / base).to(tl.int32)
            parts = tl.maximum(tl.minimum(parts, span_max // min_chunk), 1)
            size = tl.cdiv(tl.cdiv(span_max, parts), BLOCK_N) * BLOCK_N
            parts = tl.cdiv(span_max, tl.maximum(size, 1))
            n = base * parts
            full = tl.ceil(n / slots) - 1.0
            rest = n - full * slots
            cost = full * _wave(slots, size, processors)
            cost += _wave(rest, size, processors)
            rows = tl.maximum(base * GROUP / (processors * _MERGE_ROWS), 1.0)
            merging = cost * _CUT_LOSS + (parts * rows * _MERGE_PART + _MERGE) * rate
            cost = tl.where(parts > 1, merging, cost)
            cost += ((tl.ceil(rest / processors) - 1.0) * _NEXT + _START) * rate
            better = cost < best
            best = tl.where(better, cost, best)
            chunk = tl.where(better, size, chunk)
    else:
        share = work * HK / slots
        piece = tl.where(share * _FEW <= _SHORT_PIECE, share * _FEW, share * _MANY)
        chunk = tl.minimum(chunk, tl.maximum(tl.ceil(piece).to(tl.int32), min_chunk))
    return tl.maximum(chunk, 1)


def wave_keys(n: int, size: int, processors: int) -> float:
    """Time, in keys of a program alone, of ``n`` programs that run at once over ``size`` keys."""
    return size * max(1.0, -(-n // processors) / FEED, n / (processors * SATURATION))


def prefers_many(n: int, processors: int, occupancy: int, many: int) -> bool:
    """Whether ``n`` uncut programs should rather run all at once, in tiles of higher occupancy.

    That is so where the tiles of ``occupancy`` would leave a last wave that idles, and where the
    smaller ones, each about half as fast alone, still saturate the memory together.
    """
    slots = processors * occupancy
    if not slots < n <= processors * many or n < 2 * processors * SATURATION:
        return False
    full, rest = divmod(n - 1, slots)
    waves = full * wave_keys(slots, 1, processors) + wave_keys(rest + 1, 1, processors)
    return n / (processors * SATURATION) < 0.97 * waves


def few_chunk(n: int, span: int, processors: int, occupancy: int, block_n: int) -> int:
    """Keys per part where ``n`` uncut programs are cut so that all parts run at once."""
    each = -(-span // (processors * occupancy // n))
    return max(-(-each // block_n), 1) * block_n


def choose_chunk(
    work: int, programs: int, span_max: int, *, processors: int, occupancy: int, rate: float,
    min_chunk: int, num_kv_heads: int, group: int, block_n: int,
) -> int:  # fmt: skip
    """Keys per part that the model finds fastest.

    Args:
        work: Keys visited by all row tiles of one KV head.
        programs: Row tiles of one KV head.
        span_max: Longest key range of a sequence.
        processors: Multiprocessors.
        occupancy: Programs that run at once on one.
        rate: Keys per microsecond of a program alone.
        min_chunk: Never cut finer.
        num_kv_heads: HK.
        group: Query heads per KV head.
        block_n: Keys per tile.
    """
    chunk = max(span_max, 1)
    if span_max * programs > EQUAL * work:
        share = work * num_kv_heads / (processors * occupancy)
        piece = FEW * share if FEW * share <= SHORT_PIECE else MANY * share
        return min(chunk, max(math.ceil(piece), min_chunk))
    tiles = max(-(-span_max // block_n), 1)
    base = max(programs, 1) * num_kv_heads
    return _choose_equal(
        base, tiles, span_max // min_chunk, processors, occupancy, rate, group, block_n
    )


@lru_cache(maxsize=4096)
def _choose_equal(
    base: int, tiles: int, most: int, processors: int, occupancy: int, rate: float, group: int,
    block_n: int,
) -> int:  # fmt: skip
    """``choose_chunk`` for sequences of equal lengths: the same while they stay in one key tile.

    Args:
        base: Row tiles of all KV heads.
        tiles: Key tiles of the longest sequence.
        most: Parts that it may be cut into.
        processors: As in ``choose_chunk``, like the others.
        occupancy: Programs per multiprocessor.
        rate: Keys per microsecond.
        group: Query heads per KV head.
        block_n: Keys per tile.
    """
    slots = processors * occupancy
    span, chunk = tiles * block_n, 1
    best, seen = math.inf, 0
    rows = max(base * group / (processors * MERGE_ROWS), 1.0)
    for wanted in (*range(occupancy + 1), *(occupancy * k for k in range(2, WAVES + 1))):
        parts = max(min(processors * wanted // base, most), 1)
        if parts == seen:
            continue
        seen = parts
        parts, size = cut(span, 0, parts, block_n)
        full, rest = divmod(base * parts - 1, slots)
        rest += 1
        cost = full * wave_keys(slots, size, processors) + wave_keys(rest, size, processors)
        if parts > 1:
            cost = CUT_LOSS * cost + (MERGE + MERGE_PART * parts * rows) * rate
        cost += (START + (-(-rest // processors) - 1) * NEXT) * rate
        if cost < best:
            best, chunk = cost, size
    return chunk


def cut(span: int, chunk: int, splits: int, block_n: int) -> tuple[int, int]:
    """Parts of ``span`` keys, and keys per part, for a wanted size or number of parts."""
    parts = min(-(-span // block_n), splits) if splits else -(-span // chunk)
    parts = max(parts, 1)
    each = -(-span // parts)
    size = max(-(-each // block_n) * block_n, block_n)
    return max(-(-span // size), 1), size


__all__ = [
    "WAVES", "choose_chunk", "choose_chunk_on_device", "cut", "few_chunk", "prefers_many",
    "wave_keys",
]  # fmt: skip
