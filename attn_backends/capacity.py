"""How much a plan for CUDA graphs must be able to hold."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import InvalidInputError


@dataclass(frozen=True)
class Capacity:
    """Upper bounds that a graph-capturable plan reserves buffers for.

    Any batch within these bounds can be replayed through one captured graph after
    ``plan.update(batch)``; a larger batch is refused before anything is launched.

    Attributes:
        num_seqs: Most sequences, B.
        total_q: Most query tokens, T; captured tensors have exactly this many rows.
        max_seqlen_q: Most query tokens of one sequence.
        max_seqlen_k: Most keys of one sequence.
        max_pages: Paged only: width of the page table.
        in_place: The tensors of the batch that is planned are the fixed buffers. Their owner
            refills them where they are and then calls ``plan.update`` with them, which copies
            nothing; the batch has exactly ``num_seqs`` sequences and ``max_pages`` columns.

    Raises:
        InvalidInputError: A bound is negative, or no sequence or token fits.
    """

    num_seqs: int
    total_q: int
    max_seqlen_q: int
    max_seqlen_k: int
    max_pages: int = 0
    in_place: bool = False

    def __post_init__(self) -> None:
        for name in ("num_seqs", "total_q", "max_seqlen_q", "max_seqlen_k", "max_pages"):
            value = getattr(self, name)
            low = 0 if name in ("max_seqlen_k", "max_pages") else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise InvalidInputError.of(f"capacity.{name}", repr(value), f"an int >= {low}")
        if not isinstance(self.in_place, bool):
            raise InvalidInputError.of("capacity.in_place", repr(self.in_place), "True or False")


__all__ = ["Capacity"]
