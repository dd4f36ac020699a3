"""What a backend prepares once per step and every layer reuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from .batch import Batch
from .capacity import Capacity
from .errors import InvalidInputError
from .output import AttentionOutput
from .validation import deep_checks

if TYPE_CHECKING:
    from .backend import AttentionBackend


class Plan:
    """A batch made ready for one backend and one spec.

    Backends subclass it to keep what they computed. Without a capacity a plan serves exactly its
    batch. With one, it owns fixed buffers: a CUDA graph captured over ``run`` reads them, and
    ``update`` refills them before a replay.

    Attributes:
        backend: The backend that made the plan.
        spec: The spec that backend is bound to.
        batch: The batch; with a capacity, the fixed buffers, whose host facts are upper bounds.
        capacity: The bounds, or None.
    """

    def __init__(
        self, backend: AttentionBackend, batch: Batch, capacity: Capacity | None = None
    ) -> None:
        self.backend = backend
        self.spec = backend.spec
        self.batch = batch
        self.capacity = capacity
        #: Layouts of q, k, v that were found to fit; a layer after the first pays one look-up.
        self.checked: set[object] = set()
        self.check_always = deep_checks()
        #: ``repeat(q, k, v, extras or None, out)``: a run like the last, checked already, on other
        #: tensors; None where there is none, and the result is None if these are not like it.
        self.repeat: Callable[..., AttentionOutput | None] | None = None

    def update(self, batch: Batch) -> None:
        """Refill the fixed buffers with another batch, before a graph replay.

        Copies on the current stream, without a sync. Lengths may change freely in the capacity.

        Args:
            batch: The next step's batch, on the same device.

        Raises:
            InvalidInputError: The plan has no capacity, or the batch exceeds it; nothing changed.
        """
        if self.capacity is None:
            raise InvalidInputError.of("capacity", None, "a Capacity, given to plan()")
        self.backend.check_batch(batch)
        check_fits(batch, self.capacity, self.batch.device)
        fill_buffers(self.batch, batch)
        self.on_update()

    def update_in_place(self) -> bool:
        """Update after the tensors of an ``in_place`` capacity were refilled, if that is all.

        It spares the batch and its checks: the caller answers for lengths within the capacity.

        Returns:
            Whether the plan is up to date; if not, ``update`` needs the batch.
        """
        return False

    def on_update(self) -> None:
        """Hook for backends: recompute what depends on the lengths, into fixed buffers."""


def check_fits(batch: Batch, capacity: Capacity, device: torch.device) -> None:
    """Raise InvalidInputError unless the batch fits the capacity."""
    if batch.device != device:
        raise InvalidInputError.of("batch.device", batch.device, f"{device}, as the plan")
    if batch.mask_indptr is not None:
        fix = "under a capacity the starts of masks follow from the lengths"
        raise InvalidInputError.of("batch.mask_indptr", "given", "None", fix)
    for name in ("num_seqs", "total_q", "max_seqlen_q", "max_seqlen_k"):
        got, most = getattr(batch, name), getattr(capacity, name)
        if got > most:
            fix = "plan again with a larger capacity"
            raise InvalidInputError.of(f"batch.{name}", got, f"0..{most}, the capacity", fix)


def make_buffers(batch: Batch, capacity: Capacity, page_size: int | None) -> Batch:
    """A batch of fixed buffers of the size of the capacity, filled from ``batch``.

    With ``capacity.in_place`` they are the tensors of ``batch`` itself.

    Raises:
        InvalidInputError: The batch exceeds the capacity, or its pages hold fewer keys than it
            promises.
    """
    check_fits(batch, capacity, batch.device)
    if page_size is not None and capacity.max_pages * page_size < capacity.max_seqlen_k:
        need = -(-capacity.max_seqlen_k // page_size)
        allowed = f">= {need}, to hold max_seqlen_k={capacity.max_seqlen_k}"
        raise InvalidInputError.of("capacity.max_pages", capacity.max_pages, allowed)

    bounds = replace(
        batch,
        total_q=capacity.total_q,
        total_k=0,
        max_seqlen_q=capacity.max_seqlen_q,
        max_seqlen_k=capacity.max_seqlen_k,
        q_lens=None,
        kv_lens=None,
        host_page_table=None,
        mask_indptr=None,
    )
    if capacity.in_place:
        _check_in_place(batch, capacity)
        return bounds

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=batch.device)

    num = capacity.num_seqs
    buffers = replace(
        bounds,
        cu_seqlens_q=zeros(num + 1),
        seqlens_k=zeros(num),
        cu_seqlens_k=None if batch.cu_seqlens_k is None else zeros(num + 1),
        page_table=None if batch.page_table is None else zeros(num, capacity.max_pages),
    )
    fill_buffers(buffers, batch)
    return buffers


def _check_in_place(batch: Batch, capacity: Capacity) -> None:
    """Raise InvalidInputError unless the batch's tensors have the size of the capacity."""
    if batch.num_seqs != capacity.num_seqs:
        allowed = f"{capacity.num_seqs}, as the capacity is in place"
        raise InvalidInputError.of("batch.num_seqs", batch.num_seqs, allowed)
    if batch.page_table is not None and batch.page_table.shape[1] != capacity.max_pages:
        allowed = f"{capacity.max_pages}, as the capacity is in place"
        raise InvalidInputError.of("page_table.shape[1]", batch.page_table.shape[1], allowed)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two index tensors are one and the same memory."""
    return a is b or (a.data_ptr() == b.data_ptr() and a.shape == b.shape)


def fill_buffers(buffers: Batch, batch: Batch) -> None:
    """Copy a batch into fixed buffers; sequences beyond it become empty.

    A tensor that is the buffer is left as it is.
    """
    if buffers.is_paged != batch.is_paged:
        want = "paged" if buffers.is_paged else "ragged"
        raise InvalidInputError.of("batch", "ragged" if buffers.is_paged else "paged", want)
    num = batch.num_seqs
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        target, source = getattr(buffers, name), getattr(batch, name)
        if target is not None and not _same(target, source):
            target[: num + 1].copy_(source)
            target[num + 1 :].copy_(source[-1:].expand(target.shape[0] - num - 1))
    if not _same(buffers.seqlens_k, batch.seqlens_k):
        buffers.seqlens_k[:num].copy_(batch.seqlens_k)
        buffers.seqlens_k[num:].zero_()
    if buffers.page_table is None or batch.page_table is None:
        return
    if not _same(buffers.page_table, batch.page_table):
        # Columns beyond the capacity hold no visible key; columns beyond the batch are not read.
        width = min(buffers.page_table.shape[1], batch.page_table.shape[1])
        buffers.page_table[:num, :width].copy_(batch.page_table[:, :width])


__all__ = ["Plan"]
