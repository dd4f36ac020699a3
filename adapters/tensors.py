"""Tensors in the form a library takes: aligned, padded, back to back."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..batch import Batch
from ..spec import AttentionSpec
from .arrange import Arrangement

Tensors = tuple[torch.Tensor, ...]

#: Kernels load 16 bytes at a time, so rows must start at multiples of that.
_BYTES = 16


def aligned(x: torch.Tensor) -> torch.Tensor:
    """``x`` itself if every row starts at a multiple of 16 bytes, else a contiguous copy."""
    size = x.element_size()
    if x.is_contiguous() and x.data_ptr() % _BYTES == 0 and x.shape[-1] * size % _BYTES == 0:
        return x  # the usual case, asked about on every call
    ok = x.data_ptr() % _BYTES == 0 and (x.shape[-1] <= 1 or x.stride(-1) == 1)
    for length, stride in zip(x.shape[:-1], x.stride()[:-1]):
        ok = ok and (length <= 1 or (stride * size) % _BYTES == 0)
    # A contiguous view into other memory may start anywhere, and `contiguous` would return it.
    return x if ok else x.clone(memory_format=torch.contiguous_format)


def widen(x: torch.Tensor, width: int) -> torch.Tensor:
    """``x`` with its last dim filled with zeros up to ``width``."""
    missing = width - x.shape[-1]
    if not missing:
        return x
    return torch.nn.functional.pad(x, (0, missing))


class DenseKeys(NamedTuple):
    """Visible keys back to back, each sequence with exactly its own.

    Attributes:
        cu_seqlens: ``[B+1]`` int32, starts that are exactly the running sum of the lengths.
        rows: How many rows of ragged ``k`` may be handed over as they are; None means all.
        gather: Where to gather from: rows of ragged ``k``, or pages and slots of a cache, each
            ``[count]`` int64. None means no gather.
    """

    cu_seqlens: torch.Tensor
    rows: int | None
    gather: tuple[torch.Tensor, ...] | None

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of ``k`` or ``v`` that are visible, ``[count, HK, D]``, in order."""
        if self.gather is not None:
            return take(x, self.gather)
        return x if self.rows is None or self.rows == x.shape[0] else x[: self.rows]


def take(x: torch.Tensor, index: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """``x[index]`` for any dtype; indexing is not defined for every fp8 dtype."""
    if x.dtype.itemsize == 1:
        return x.view(torch.uint8)[index].view(x.dtype)
    return x[index]


def leaves_keys_behind(spec: AttentionSpec) -> bool:
    """Whether a window can hide keys of a cache from every query there is."""
    return spec.page_size is not None and spec.bounds[0] is not None


def dense_keys(arrangement: Arrangement, spec: AttentionSpec, rows: int) -> DenseKeys:
    """Visible keys for libraries that take lengths from starts alone, or load whole tiles.

    A ragged sequence may have room beyond its keys, and a window leaves keys behind. A library
    would see the former, and load both with its tiles; masked or not, a NaN there reaches the
    output as 0 * NaN. So keys that some query sees are gathered, unless they are known to be all
    there is.

    Args:
        arrangement: The batch, ragged or paged.
        spec: What the layer fixes.
        rows: Rows of ragged ``k``: the bound on what is gathered if lengths are only on the device.
    """
    batch, left = arrangement.batch, spec.bounds[0]
    if arrangement.dense:
        assert batch.kv_lens is not None and batch.cu_seqlens_k is not None
        return DenseKeys(batch.cu_seqlens_k, sum(batch.kv_lens), None)
    lengths, skipped = batch.seqlens_k, torch.zeros_like(batch.seqlens_k)
    if left is not None:
        kept = torch.minimum(lengths, batch.cu_seqlens_q.diff() + left)
        skipped, lengths = lengths - kept, kept
    starts = torch.zeros(batch.num_seqs + 1, dtype=torch.int32, device=batch.device)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=starts[1:])
    place = torch.arange(_count(batch, left, rows), device=batch.device, dtype=torch.int32)
    # Places past the last visible key repeat it, so that no unused slot is ever loaded.
    place = torch.minimum(place, (starts[-1:] - 1).clamp(min=0))
    sequence = torch.searchsorted(starts[1:], place, right=True).clamp(max=batch.num_seqs - 1)
    position = (place - starts[:-1][sequence] + skipped[sequence]).long()
    if batch.page_table is None:
        assert batch.cu_seqlens_k is not None
        row = (batch.cu_seqlens_k[:-1][sequence] + position).clamp(max=max(rows - 1, 0))
        return DenseKeys(starts, None, (row,))
    assert spec.page_size is not None
    column = (position // spec.page_size).clamp(max=batch.page_table.shape[1] - 1)
    page = batch.page_table[sequence, column].long()
    nothing = starts[-1] == 0  # then no entry of the table may be followed
    page = page.masked_fill(nothing, 0)
    return DenseKeys(starts, None, (page, position % spec.page_size))


def _count(batch: Batch, left: int | None, rows: int) -> int:
    """How many visible keys there are, or may be at most."""
    if batch.q_lens is not None and batch.kv_lens is not None:
        pairs = zip(batch.q_lens, batch.kv_lens)
        return sum(kv if left is None else min(kv, q + left) for q, kv in pairs)
    if batch.page_table is None:
        return rows
    most = (
        batch.max_seqlen_k if left is None else min(batch.max_seqlen_k, batch.max_seqlen_q + left)
    )
    return batch.num_seqs * most


class DenseKeysOfPlan:
    """``dense_keys`` of one plan: made once, or on every call where lengths change in place."""

    def __init__(self, arrangement: Arrangement, spec: AttentionSpec) -> None:
        self.arrangement = arrangement
        self.spec = spec
        self.rows = -1
        self.keys: DenseKeys | None = None

    def of(self, k: torch.Tensor) -> DenseKeys:
        """Starts and rows for ragged keys ``k [Tk, HK, D]``, or for a cache."""
        if self.keys is None or self.rows != k.shape[0] or self.arrangement.replayed:
            self.keys = dense_keys(self.arrangement, self.spec, k.shape[0])
            self.rows = k.shape[0]
        return self.keys

    @property
    def starts(self) -> torch.Tensor:
        """``[B+1]`` int32, starts of the keys that were asked for last."""
        assert self.keys is not None
        return self.keys.cu_seqlens


def page_width(batch: Batch, page_size: int) -> int:
    """Keys that the page table has room for, per sequence."""
    assert batch.page_table is not None
    return batch.page_table.shape[1] * page_size


__all__ = [
    "DenseKeys",
    "DenseKeysOfPlan",
    "Tensors",
    "aligned",
    "dense_keys",
    "leaves_keys_behind",
    "page_width",
    "take",
    "widen",
]
