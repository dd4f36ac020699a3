"""Variants of the Hopper prefill: what a launch is compiled for, and which one a shape takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ..errors import InvalidInputError

#: Lanes of queries and keys, and of values.
HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))


#: Keys up to which tiles of 64 rows, two programs on a multiprocessor, are faster (64 x 256).
SHORT_KEYS = 256


@dataclass(frozen=True)
class Variant:
    """What one launch is compiled for, apart from the call's own features.

    Attributes:
        block_n: Keys per tile.
        stages: Slots for tiles of keys, and as many for values.
        q_stages: Slots for tiles of queries; with two, those of the next tile come ahead.
        consumers: Warpgroups of 64 rows; with one, two programs share a multiprocessor.
        pack: Query heads of one KV head that share a tile, padded to a power of two; 1 is off.
        dynamic: Tiles are handed out by a counter instead of in fixed turns.
        snake: In fixed turns, every second turn runs backwards.
        held: Lanes of queries that consumers keep in registers, and spare shared memory reading:
            0, or half of what the first product reads.
        turns: The two consumers start their products in turn.
        head_group: Heads that finish together; 0 is all. Fewer share K and V in the L2 cache.
    """

    block_n: int = 128
    stages: int = 2
    q_stages: int = 1
    consumers: int = 2
    pack: int = 1
    dynamic: bool = True
    snake: bool = False
    head_group: int = 0
    held: int = 0
    turns: bool = False

    @property
    def tile(self) -> int:
        """Query tokens per tile."""
        return 64 * self.consumers // self.pack

    @property
    def order(self) -> int:
        """How tiles are taken, as the kernel numbers it."""
        return 2 if self.dynamic else int(self.snake)

    @property
    def max_registers(self) -> int:
        """Registers per thread that the launch reserves, before warps trade them."""
        return 168 if self.consumers == 2 else 128

    def warp_registers(
        self, paged: bool, gather: bool = False, head_dim_v: int = 128
    ) -> tuple[int, int]:
        """Registers per thread of consumers and producer, out of the same total."""
        if gather:  # with fewer, exponentials are moved behind the wait that they should fill
            two = (216, 72) if head_dim_v <= 128 else (224, 56)
            return {1: (168, 88), 2: two}[self.consumers]
        if paged:
            return {1: (216, 40), 2: (232, 40)}[self.consumers]
        return {1: (232, 24), 2: (240, 24)}[self.consumers]

    def gathers(self, page_size: int | None) -> bool:
        """Whether boxes of TMA, one per page, cannot tile a tile of keys."""
        if page_size is None:
            return False
        if page_size >= self.block_n:
            return page_size % self.block_n > 0
        return page_size < 16 or self.block_n % page_size > 0


def split_lanes(head_dim: int) -> tuple[int, int]:
    """Lanes of the first copy and product of queries and keys, and of the second; powers of two."""
    first = 1 << (head_dim.bit_length() - 1)
    return first, head_dim - first


def base_variant(head_dim: int) -> Variant:
    """The tiles and slots that fit a head dim."""
    return Variant(
        block_n=64 if head_dim == 256 else 128,
        stages=3 if head_dim == 64 else 2,
        q_stages=2 if head_dim <= 128 else 1,
    )


def pack_size(group: int) -> int:
    """Rows that the query heads of one KV head take in a packed tile."""
    return 1 << (group - 1).bit_length()


def _full_share(rows: int, tile: int = 128) -> float:
    """Share of a tile's rows that hold queries."""
    return rows / (-(-rows // tile) * tile)


def choose_variant(
    *,
    head_dim: int,
    num_heads: int,
    num_kv_heads: int,
    max_seqlen_q: int,
    total_q: int,
    num_seqs: int,
    num_sms: int,
    max_seqlen_k: int = 0,
    causal: bool = True,
    paged: bool = False,
    batch_invariant: bool = False,
) -> Variant:
    """The variant for a shape; host facts alone decide, so that it never needs a sync.

    Args:
        head_dim: D.
        num_heads: H.
        num_kv_heads: HK.
        max_seqlen_q: Longest query count, or a bound.
        total_q: Query tokens, or a bound.
        num_seqs: B.
        num_sms: Multiprocessors.
        max_seqlen_k: Longest key count, or a bound; 0 if unknown.
        causal: Whether later keys are masked, so that tiles differ in length.
        paged: Whether keys come in pages.
        batch_invariant: Let D alone decide. The bits of a row then depend on its own sequence
            only: its tiles of keys start at multiples of ``block_n``, and a tile that it does not
            see changes nothing.
    """
    variant = base_variant(head_dim)
    if batch_invariant:
        return variant
    group = num_heads // num_kv_heads
    longest = max(1, min(max_seqlen_q, total_q))
    pack = pack_size(group)
    if 1 < pack <= 32:
        packed = _full_share(longest * pack) * group / pack
        if packed > 1.1 * _full_share(longest):
            variant = replace(variant, pack=pack)
    heads = num_heads if variant.pack == 1 else num_kv_heads
    tiles = min(total_q // variant.tile + num_seqs, num_seqs * -(-longest // variant.tile))
    single = {"consumers": 1, "block_n": 128 if head_dim == 64 else 64, "stages": 2}
    if tiles * heads < num_sms and head_dim < 256:
        return replace(variant, **single)
    if head_dim == 128 and variant.pack == 1 and 0 < max_seqlen_k <= SHORT_KEYS:
        return replace(variant, **single)
    if head_dim == 128 and variant.pack == 1 and not paged:
        # 2 % at 1 x 16384, less on short sequences; pages leave consumers fewer registers.
        variant = replace(variant, held=64, turns=True)
    if causal and tiles * heads <= 2 * num_sms:
        # Each program has two tiles: the longest should go with the shortest.
        return replace(variant, dynamic=False, snake=True)
    return variant


def query_box(variant: Variant, lanes: int) -> tuple[int, ...]:
    """Tokens, heads and lanes of the queries that one copy brings a consumer."""
    return (64 // variant.pack, variant.pack, lanes)


def key_box(variant: Variant, lanes: int, page_size: int | None) -> tuple[int, ...]:
    """Pages, slots, heads and lanes of keys or values that one copy brings; ragged is one page."""
    slots = variant.block_n if page_size is None else min(page_size, variant.block_n)
    return (1, slots, 1, lanes)


def bounds(causal: bool, window: tuple[int | None, int | None] | None) -> tuple[int | None, ...]:
    """Left and right bound of what a token sees; None is unbounded."""
    left, right = (None, None) if window is None else window
    return left, 0 if causal else right


@lru_cache(maxsize=256)
def compile_arguments(
    variant: Variant,
    head_dim: int,
    head_dim_v: int,
    page_size: int | None,
    causal: bool,
    window: tuple[int | None, int | None] | None,
    softcap: float | None,
    sinks: bool = False,
) -> dict[str, Any]:
    """The compile-time arguments of a launch.

    Raises:
        InvalidInputError: The variant holds lanes that the head dim cannot be cut into.
    """
    left, right = bounds(causal, window)
    gather = variant.gathers(page_size)
    consumer, producer = variant.warp_registers(page_size is not None, gather, head_dim_v)
    first, more = split_lanes(head_dim)
    if variant.held not in (0, first // 2):  # both parts are powers of two
        allowed = f"0 or {first // 2} with head_dim={head_dim}"
        raise InvalidInputError.of("variant.held", variant.held, allowed)
    return {
        "D": first,
        "D1": more,
        "DV": head_dim_v,
        "BLOCK_N": variant.block_n,
        "STAGES": variant.stages,
        "Q_STAGES": variant.q_stages,
        "CONSUMERS": variant.consumers,
        "PACK": variant.pack,
        "PAGE_SIZE": page_size or 0,
        "GATHER": gather,
        "HAS_LEFT": left is not None,
        "HAS_RIGHT": right is not None,
        "HAS_SOFTCAP": softcap is not None,
        "HAS_SINKS": sinks,
        "HELD": variant.held,
        "TURNS": variant.turns,
        "CONSUMER_REGS": consumer,
        "PRODUCER_REGS": producer,
    }


__all__ = [
    "HEAD_DIMS",
    "Variant",
    "base_variant",
    "bounds",
    "choose_variant",
    "compile_arguments",
    "key_box",
    "pack_size",
    "query_box",
    "split_lanes",
]
