"""Which keys of a decoded sequence lie on which rank, and the batch that a rank sees of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..batch import Batch
from ..errors import InvalidInputError


@dataclass(frozen=True)
class Interleaved:
    """Key j of a sequence lies on rank ``j // block % world``, after the earlier ones there.

    A block of 1 or a page spreads growing sequences evenly; one of at least
    ``ceil(kv_len / world)`` gives each rank one contiguous part.

    Attributes:
        block: Consecutive keys on one rank.
    """

    block: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.block, bool) or not isinstance(self.block, int) or self.block < 1:
            raise InvalidInputError.of("block", repr(self.block), "an int >= 1")

    def count(self, keys: int, rank: int, world: int) -> int:
        """How many of a sequence's first keys a rank holds.

        Args:
            keys: How many of the sequence's keys are counted.
            rank: Which rank.
            world: Number of ranks.

        Returns:
            Their number on the rank.
        """
        rounds, rest = divmod(max(keys, 0), self.block * world)
        return rounds * self.block + min(max(rest - rank * self.block, 0), self.block)

    def positions(self, keys: int, rank: int, world: int) -> torch.Tensor:
        """Which of a sequence's first keys a rank holds.

        Args:
            keys: How many of the sequence's keys are counted.
            rank: Which rank.
            world: Number of ranks.

        Returns:
            ``[n]`` int64 positions, in the order they lie in.
        """
        position = torch.arange(keys)
        return position[position // self.block % world == rank]


def shard_batch(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    layout: Interleaved,
    rank: int,
    world: int,
    *,
    causal: bool = True,
    page_table: Any = None,
    device: torch.device | str | None = None,
) -> Batch:
    """The batch that one rank computes in a sharded decode step.

    A causal query sees, of the keys on a rank, the first few. With several queries in a sequence
    (speculative decoding) each becomes a sequence of its own, with its own count and the same
    pages, so that every backend can compute it.

    Args:
        q_lens: Queries of each sequence.
        kv_lens: All its keys, on all ranks together.
        layout: Where they lie.
        rank: This rank.
        world: Number of ranks.
        causal: Whether the queries are the sequence's last tokens.
        page_table: ``[B, max_pages]`` of this rank's own cache; None is ragged.
        device: As in ``Batch.from_lengths``.

    Returns:
        Lengths of this rank's keys only. Give it to ``plan_sharded_decode``.

    Raises:
        InvalidInputError: A length is out of range, or several causal queries have ragged keys.
    """
    if len(q_lens) != len(kv_lens):
        raise InvalidInputError.of("kv_lens", f"{len(kv_lens)} lengths", f"{len(q_lens)}")
    if not 0 <= rank < world:
        raise InvalidInputError.of("rank", rank, f"0..{world - 1}")
    if not causal or max(q_lens, default=0) <= 1:
        local = [layout.count(kv, rank, world) for kv in kv_lens]
        return Batch.from_lengths(q_lens, local, page_table=page_table, device=device)
    if page_table is None:
        allowed = "at most 1 with ragged keys, which two sequences cannot share"
        raise InvalidInputError.of("max(q_lens)", max(q_lens), allowed, "pass a page_table")
    table = torch.as_tensor(page_table)
    local = [
        layout.count(kv - q + i + 1, rank, world)
        for q, kv in zip(q_lens, kv_lens)
        for i in range(q)
    ]
    rows = torch.arange(len(q_lens)).repeat_interleave(torch.tensor(list(q_lens)))
    return Batch.from_lengths(
        [1] * len(local), local, page_table=table[rows.to(table.device)], device=device
    )


__all__ = ["Interleaved", "shard_batch"]
