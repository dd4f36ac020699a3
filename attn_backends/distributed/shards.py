"""Which rank holds which positions of each sequence, for queries and for keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from ..errors import InvalidInputError
from ..pieces import Span, Spans, length


@dataclass(frozen=True)
class Shards:
    """The positions of every sequence that each rank holds.

    A rank's tensors hold its rows sequence after sequence, in order of position. Positions count
    from the first key of a sequence; its ``q_len`` queries stand at the last of ``kv_len``.

    Attributes:
        q_lens: Queries of each sequence.
        kv_lens: Keys of each sequence.
        queries: ``queries[rank][b]``, spans of query positions, in order.
        keys: ``keys[rank][b]``, spans of key positions, in order.

    Raises:
        InvalidInputError: Some position is missing, or held twice.
    """

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    queries: tuple[tuple[tuple[Span, ...], ...], ...]
    keys: tuple[tuple[tuple[Span, ...], ...], ...]

    def __post_init__(self) -> None:
        if len(self.queries) != len(self.keys) or not self.queries:
            got = f"{len(self.queries)} and {len(self.keys)} ranks"
            raise InvalidInputError.of("queries, keys", got, "the same number of ranks, >= 1")
        for b, (q_len, kv_len) in enumerate(zip(self.q_lens, self.kv_lens)):
            _check_cover(f"queries[:][{b}]", self.queries, b, (kv_len - q_len, kv_len))
            _check_cover(f"keys[:][{b}]", self.keys, b, (0, kv_len))

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.queries)

    def num_queries(self, rank: int) -> int:
        """Query rows of a rank.

        Args:
            rank: Which one.

        Returns:
            Their number, T_r.
        """
        return sum(map(length, self.queries[rank]))

    def num_keys(self, rank: int) -> int:
        """Key rows of a rank.

        Args:
            rank: Which one.

        Returns:
            Their number, Tk_r.
        """
        return sum(map(length, self.keys[rank]))

    def query_rows(self, rank: int) -> torch.Tensor:
        """The rows of the whole ``q [T, H, D]`` that a rank holds.

        Args:
            rank: Which one.

        Returns:
            ``[T_r]`` int64, in the rank's order.
        """
        firsts = [kv - q for q, kv in zip(self.q_lens, self.kv_lens)]
        return _rows(self.queries[rank], self.q_lens, firsts)

    def key_rows(self, rank: int) -> torch.Tensor:
        """The rows of the whole ragged ``k [Tk, HK, D]`` that a rank holds.

        Args:
            rank: Which one.

        Returns:
            ``[Tk_r]`` int64, in the rank's order.
        """
        return _rows(self.keys[rank], self.kv_lens, [0] * len(self.kv_lens))

    def gather_queries(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Put the rows of all ranks' outputs back in order.

        Args:
            parts: One tensor ``[T_r, ...]`` per rank.

        Returns:
            ``[T, ...]``, as if one rank had computed it.

        Raises:
            InvalidInputError: A part has not the rows of its rank.
        """
        if len(parts) != self.world:
            raise InvalidInputError.of("parts", f"{len(parts)} tensors", f"{self.world}, the ranks")
        for rank, part in enumerate(parts):
            if part.shape[0] != self.num_queries(rank):
                want = f"{self.num_queries(rank)}, the rank's queries"
                raise InvalidInputError.of(f"parts[{rank}].shape[0]", part.shape[0], want)
        rows = torch.cat([self.query_rows(rank) for rank in range(self.world)])
        whole = parts[0].new_empty((rows.shape[0], *parts[0].shape[1:]))
        whole[rows.to(whole.device)] = torch.cat(list(parts))
        return whole


def zigzag_shards(
    q_lens: Sequence[int], world: int, *, kv_lens: Sequence[int] | None = None
) -> Shards:
    """Shards that give every rank the same causal work.

    The new tokens of a sequence are cut into ``2 * world`` parts, as equal as can be, and rank r
    holds parts r and ``2 * world - 1 - r``: an early part with little to see and a late one with
    much. Keys before the first query, which all queries see, are cut into ``world`` parts.

    Args:
        q_lens: New tokens of each sequence.
        world: Number of ranks, any.
        kv_lens: Keys of each sequence, cached ones included; None means ``q_lens``.

    Returns:
        The shards. Short sequences leave some ranks without tokens.

    Raises:
        InvalidInputError: A length is negative, or fewer keys than queries.
    """
    if isinstance(world, bool) or not isinstance(world, int) or world < 1:
        raise InvalidInputError.of("world", repr(world), "an int >= 1")
    kv_lens = q_lens if kv_lens is None else kv_lens
    if len(kv_lens) != len(q_lens):
        raise InvalidInputError.of("kv_lens", f"{len(kv_lens)} lengths", f"{len(q_lens)}")
    for b, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens)):
        if q_len < 0:
            raise InvalidInputError.of(f"q_lens[{b}]", q_len, ">= 0")
        if kv_len < q_len:
            raise InvalidInputError.of(f"kv_lens[{b}]", kv_len, f">= {q_len}, its queries")
    queries, keys = [], []
    for rank in range(world):
        own = [
            _pick(_parts(kv - q, kv, 2 * world), rank, 2 * world - 1 - rank)
            for q, kv in zip(q_lens, kv_lens)
        ]
        before = [_pick(_parts(0, kv - q, world), rank) for q, kv in zip(q_lens, kv_lens)]
        queries.append(tuple(own))
        keys.append(tuple(_joined((*a, *b)) for a, b in zip(before, own)))
    return Shards(tuple(q_lens), tuple(kv_lens), tuple(queries), tuple(keys))


def _parts(start: int, stop: int, count: int) -> list[Span]:
    return list(pairwise(start + (stop - start) * i // count for i in range(count + 1)))


def _pick(parts: list[Span], *wanted: int) -> tuple[Span, ...]:
    return _joined(tuple(parts[i] for i in wanted))


def _joined(spans: Spans) -> tuple[Span, ...]:
    """Spans in order, without empty ones, neighbors joined."""
    joined: list[Span] = []
    for start, stop in sorted(spans):
        if start == stop:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def _check_cover(name: str, held: Any, b: int, want: Span) -> None:
    """Raise InvalidInputError unless the ranks hold each position of a sequence exactly once."""
    spans = [span for rank in held for span in rank[b]]
    for rank in held:
        if any(a[1] > c[0] for a, c in pairwise(rank[b])):
            raise InvalidInputError.of(name, rank[b], "disjoint spans in order of position")
    joined = _joined(spans)
    if length(spans) != want[1] - want[0] or (joined != (want,) and want[0] != want[1]):
        raise InvalidInputError.of(name, spans, f"each position of {want} on one rank")


def _rows(
    spans: Sequence[Sequence[Span]], lens: Sequence[int], firsts: Sequence[int]
) -> torch.Tensor:
    parts, row = [], 0
    for b, own in enumerate(spans):
        parts += [torch.arange(row + a - firsts[b], row + z - firsts[b]) for a, z in own]
        row += lens[b]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


__all__ = ["Shards", "zigzag_shards"]
