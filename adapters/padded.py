"""Sequences side by side: ``[n, H, L, D]``, for kernels that know batches but not lengths."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from ..batch import Batch
from .arrange import to_device
from .tensors import take

#: Slots that may be copied in vain, so that whole pages can be.
_FEW_SLOTS = 256


class PagesAlike(NamedTuple):
    """Pages of sequences that have equally many keys, from the same slot of their first page.

    Attributes:
        ids: ``[n * pages]`` int64, the pages of each sequence in order.
        num: n.
        start: The slot of the first key.
        stop: The slot after the last, counted from the first page.
    """

    ids: torch.Tensor
    num: int
    start: int
    stop: int

    @staticmethod
    def of(
        batch: Batch, members: torch.Tensor, page_size: int, skipped: int, keys: int
    ) -> PagesAlike:
        """Of some sequences of a batch: ``keys`` of each, after the first ``skipped``."""
        assert batch.page_table is not None
        first, last = skipped // page_size, -(-(skipped + keys) // page_size)
        index = batch.page_table[members, first:last].long().flatten()
        start = skipped - first * page_size
        return PagesAlike(index, len(members), start, start + keys)

    def room(self, page_size: int) -> int:
        """Slots of one sequence that are taken, wanted or not."""
        return self.ids.shape[0] // self.num * page_size

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """The pages of a cache ``[P, page_size, HK, D]``, back to back."""
        if x.dtype.itemsize == 1:  # not defined for every fp8 dtype
            return x.view(torch.uint8).index_select(0, self.ids).view(x.dtype)
        return x.index_select(0, self.ids)

    def view(self, pages: torch.Tensor) -> torch.Tensor:
        """The keys in pages taken, ``[n, keys, HK, D]``."""
        return pages.view(self.num, -1, *pages.shape[2:])[:, self.start : self.stop]


class Padded:
    """Some sequences of a batch, padded to the longest of them.

    Each sequence keeps its keys to itself, so that a NaN in one never meets another. What is
    beyond a sequence's keys is zero, and never what lies there in memory.

    Args:
        batch: A batch with exact lengths on the host.
        members: The sequences, by number.
        page_size: Of a paged cache, or None.
        left: How far back a window reaches; keys that no query sees are left out.
        dense: Ragged keys lie back to back, each sequence with exactly those that are wanted.

    Attributes:
        whole: The members are all rows of the batch, in order, and nothing is padded: then
            queries and rows are views.
        pages: How keys are taken by whole pages, or None.
        dense_views: Keys are views too.
        q_lens: ``[n]`` int32 on the device.
        kv_lens: ``[n]`` int32 on the device: keys that some query sees.
        max_q: Longest query count.
        max_k: Longest key count.
    """

    def __init__(
        self,
        batch: Batch,
        members: Sequence[int],
        page_size: int | None,
        left: int | None,
        *,
        dense: bool = False,
    ) -> None:
        assert batch.q_lens is not None and batch.kv_lens is not None
        device = batch.device
        q_lens = [batch.q_lens[b] for b in members]
        all_keys = [batch.kv_lens[b] for b in members]
        kv_lens = [kept_keys(q, kv, left) for q, kv in zip(q_lens, all_keys)]
        q_starts = [0, *accumulate(batch.q_lens)]
        self.max_q, self.max_k = max(q_lens), max(kv_lens)
        every = list(members) == list(range(batch.num_seqs))
        self.whole = every and min(q_lens) == self.max_q
        self.pages: PagesAlike | None = None
        self.dense_views = dense and every and min(kv_lens) == self.max_k
        skipped = {kv - kept for kv, kept in zip(all_keys, kv_lens)}
        alike = min(kv_lens) == self.max_k and len(skipped) == 1
        self.q_lens = to_device(q_lens, torch.int32, device)
        self.kv_lens = to_device(kv_lens, torch.int32, device)
        starts = to_device([q_starts[b] for b in members], torch.int64, device)
        places = torch.arange(self.max_q, device=device)
        self._query_rows = starts[:, None] + places  # [n, max_q]
        self._short_q = None if len(set(q_lens)) == 1 else places >= self.q_lens[:, None]
        if self._short_q is not None:
            self._query_rows = self._query_rows.masked_fill(self._short_q, q_starts[members[0]])
        rows = [(m, i) for m, n in enumerate(q_lens) for i in range(n)]
        self._rows = to_device([m * self.max_q + i for m, i in rows], torch.int64, device)
        self.targets = to_device(
            [q_starts[b] + i for b, n in zip(members, q_lens) for i in range(n)],
            torch.int64,
            device,
        )
        self._all_keys = to_device(all_keys, torch.int64, device)
        self._skipped = self._all_keys - self.kv_lens  # [n]
        slots = torch.arange(self.max_k, device=device)
        self._short_k = None if len(set(kv_lens)) == 1 else slots >= self.kv_lens[:, None]
        chosen = to_device(list(members), torch.int64, device)
        if page_size is None:
            assert batch.cu_seqlens_k is not None
            first = batch.cu_seqlens_k[:-1].long()[chosen] + self._skipped
            self._where: tuple[torch.Tensor, ...] = (self._fill(first[:, None] + slots, first),)
        else:
            assert batch.page_table is not None
            first = self._skipped[:, None]  # [n, 1]
            if alike:  # then whole pages are taken, and what is wanted of them is a view
                pages = PagesAlike.of(batch, chosen, page_size, skipped.pop(), self.max_k)
                few = pages.room(page_size) <= 2 * self.max_k + _FEW_SLOTS
                self.pages = pages if few else None
            places = self._fill(first + slots, first[:, 0])  # [n, max_k]
            page = batch.page_table[chosen].long().gather(1, places // page_size)
            self._where = (page, places % page_size)

    def _fill(self, index: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Indices past a sequence's keys point to its own first: valid, and never used."""
        if self._short_k is None:
            return index
        return torch.where(self._short_k, own[:, None], index)

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        """``q [T, H, D]`` as ``[n, H, max_q, D]``; rows past a sequence repeat some other row."""
        if self.whole:
            return q.view(-1, self.max_q, *q.shape[1:]).transpose(1, 2)
        return q[self._query_rows].transpose(1, 2)

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """Ragged or paged ``k`` or ``v`` as ``[n, HK, max_k, D]``, zero past a sequence's keys."""
        if self.dense_views:
            used = x[: len(self._all_keys) * self.max_k]
            return used.view(-1, self.max_k, *x.shape[1:]).transpose(1, 2)
        if self.pages is not None:
            return self.pages.view(self.pages.take(x)).transpose(1, 2)
        found = take(x, self._where)
        if self._short_k is not None:
            bits = found.view(torch.uint8) if found.dtype.itemsize == 1 else found
            bits.masked_fill_(self._short_k[:, :, None, None], 0)
        return found.transpose(1, 2)

    def mask(self, mask: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """A flattened mask as ``[n, max_q, max_k]``; False past a sequence.

        Args:
            mask: Flat bool, per sequence ``q_len * kv_len``.
            starts: ``[n]`` where each member's part starts.
        """
        i = torch.arange(self.max_q, device=mask.device)[:, None]
        j = torch.arange(self.max_k, device=mask.device)[None, :]
        inside = (i < self.q_lens[:, None, None]) & (j < self.kv_lens[:, None, None])
        first = starts + self._skipped
        place = first[:, None, None] + i * self._all_keys[:, None, None] + j
        return mask[torch.where(inside, place, starts[:, None, None])] & inside

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """``[n, H, max_q, ...]`` as the rows that exist, ``[rows, H, ...]``, in order."""
        rows = x.transpose(1, 2).flatten(0, 1)
        return rows if self.whole else rows[self._rows]


def kept_keys(q_len: int, kv_len: int, left: int | None) -> int:
    """Keys of a sequence that some query sees, if a window reaches ``left`` keys back."""
    return kv_len if left is None else min(kv_len, q_len + left)


def mask_starts(batch: Batch, members: Sequence[int]) -> torch.Tensor:
    """``[n]`` int64 on the device: where each member's part of a flattened mask starts."""
    assert batch.q_lens is not None and batch.kv_lens is not None
    if batch.mask_indptr is not None:
        index = to_device(list(members), torch.int64, batch.device)
        return batch.mask_indptr.to(torch.int64).index_select(0, index)
    starts = [0, *accumulate(q * kv for q, kv in zip(batch.q_lens, batch.kv_lens))]
    return to_device([starts[b] for b in members], torch.int64, batch.device)


__all__ = ["Padded", "kept_keys", "mask_starts"]
