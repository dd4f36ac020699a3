"""FlashInfer's page lists: a page table and lengths as index pointers and last page lengths."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from ..batch import Batch
from ..capacity import Capacity
from .arrange import to_device


class HostBatch(NamedTuple):
    """What FlashInfer's ``plan`` reads: exact lengths on the host, and where pages are listed.

    Attributes:
        q_lens: Queries of each sequence.
        kv_lens: Keys of each sequence.
        page_table: ``[>= sequences with keys, max_pages]`` on the device, or None.
        host_page_table: The same on the host, if known.
    """

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    page_table: torch.Tensor | None
    host_page_table: torch.Tensor | None

    @classmethod
    def of(cls, batch: Batch) -> HostBatch:
        """The facts of a batch that has exact lengths."""
        assert batch.q_lens is not None and batch.kv_lens is not None
        return cls(batch.q_lens, batch.kv_lens, batch.page_table, batch.host_page_table)

    def within_window(self, left: int) -> HostBatch:
        """Only the keys that some query sees, if a window reaches ``left`` keys back."""
        kept = tuple(min(kv, q + left) for q, kv in zip(self.q_lens, self.kv_lens))
        return self._replace(kv_lens=kept)

    def padded(self, capacity: Capacity) -> HostBatch:
        """Always as many sequences and rows: empty ones, and a last one with the unused rows."""
        missing = capacity.num_seqs - len(self.q_lens)
        unused = capacity.total_q - sum(self.q_lens)
        return self._replace(
            q_lens=(*self.q_lens, *[0] * missing, unused),
            kv_lens=(*self.kv_lens, *[0] * (missing + 1)),
        )


class PageLists(NamedTuple):
    """A page table as FlashInfer wants it.

    Attributes:
        indptr: ``[B+1]`` int32 on the host, where each sequence's pages start in ``indices``.
        indices: ``[indptr[-1]]`` int32 on the device, page ids of visible keys only.
        last_page_len: ``[B]`` int32 on the host, keys in the last page: 1..page_size, or 0 for a
            sequence without pages.
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor


def page_lists(batch: HostBatch, page_size: int) -> PageLists:
    """List the pages that hold visible keys.

    The page table is not copied to the host: what is sent is a list of places in it.
    """
    table, host_table = batch.page_table, batch.host_page_table
    assert table is not None
    pages = [-(-kv_len // page_size) for kv_len in batch.kv_lens]
    last = [kv - (n - 1) * page_size if n else 0 for kv, n in zip(batch.kv_lens, pages)]
    counts = torch.tensor(pages[: table.shape[0]], dtype=torch.int64)
    used = torch.arange(table.shape[1])[None] < counts[:, None]  # [B, max_pages]
    if host_table is not None:
        indices = to_device(host_table[: len(counts)][used], torch.int32, table.device)
    else:
        places = to_device(used.flatten().nonzero()[:, 0], torch.int64, table.device)
        indices = table.flatten().index_select(0, places)
    return PageLists(starts_of(pages), indices, torch.tensor(last, dtype=torch.int32))


def starts_of(lengths: Sequence[int]) -> torch.Tensor:
    """``[B+1]`` int32 on the host: the running sum of lengths, from 0."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


__all__ = ["HostBatch", "PageLists", "page_lists", "starts_of"]
