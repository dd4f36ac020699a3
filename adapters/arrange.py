"""What a library is asked to compute: the batch without the rows that see no key.

Libraries disagree about rows without keys: some report ``+inf``, some a finite stand-in, some write
the LSE of such a row elsewhere. Whether a row is empty follows from lengths, causality and window,
so it is settled here and never read off a library's LSE. With exact lengths on the host the empty
rows are not handed over at all; otherwise they are overwritten afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from ..batch import Batch
from ..capacity import Capacity
from ..output import AttentionOutput
from ..spec import AttentionSpec


class Arrangement(NamedTuple):
    """A batch as a library gets it, and how its rows relate to the caller's.

    Attributes:
        batch: The sequences to hand over.
        rows: ``[T']`` int64, the caller's rows that ``batch`` covers; None means all of them.
        empty: ``[T]`` bool, rows to overwrite with the state of no keys; None means none.
        dense: Ragged keys lie back to back, each sequence with exactly the keys that some query
            sees.
        exact: Lengths are known on the host, and every row handed over sees a key.
        replayed: Under CUDA graphs: lengths change in place, so nothing derived may be kept.
    """

    batch: Batch
    rows: torch.Tensor | None
    empty: torch.Tensor | None
    dense: bool
    exact: bool
    replayed: bool = False


def to_device(
    ints: Sequence[int] | torch.Tensor, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Integers on a device, copied without waiting for it."""
    host = torch.as_tensor(ints, dtype=dtype)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def with_host_lengths(batch: Batch) -> Batch:
    """The batch with exact lengths on the host; copies them from the device if it lacks them."""
    if batch.q_lens is not None and batch.kv_lens is not None:
        return batch
    starts = batch.cu_seqlens_q.tolist()
    q_lens = tuple(b - a for a, b in pairwise(starts))
    kv_lens = tuple(batch.seqlens_k.tolist())
    return replace(
        batch,
        q_lens=q_lens,
        kv_lens=kv_lens,
        total_q=starts[-1],
        max_seqlen_q=max(q_lens, default=0),
        max_seqlen_k=max(kv_lens, default=0),
    )


def arrange(batch: Batch, spec: AttentionSpec, capacity: Capacity | None = None) -> Arrangement:
    """Arrange a batch for a library; never waits for the device.

    Args:
        batch: The step's batch, or the fixed buffers of a plan with a capacity.
        spec: What the layer fixes.
        capacity: Given for CUDA graphs: then nothing may depend on host lengths.
    """
    if capacity is not None or batch.q_lens is None or batch.kv_lens is None:
        empty = empty_rows(batch, spec)
        return Arrangement(batch, None, empty, False, False, replayed=capacity is not None)
    left, right = spec.bounds
    dense = not batch.is_paged and batch.total_k == sum(batch.kv_lens)
    if left is not None:
        dense = dense and all(kv <= q + left for q, kv in zip(batch.q_lens, batch.kv_lens))
    skips = []  # leading rows of each sequence that see no key
    for q_len, kv_len in zip(batch.q_lens, batch.kv_lens):
        early = 0 if right is None else max(0, q_len - kv_len - right)
        skips.append(q_len if kv_len == 0 else min(q_len, early))
    kept = [b for b, q_len in enumerate(batch.q_lens) if q_len > skips[b]]
    if len(kept) == batch.num_seqs and not any(skips):
        return Arrangement(batch, None, None, dense, True)
    return _without(batch, spec, skips, kept, dense)


def _without(
    batch: Batch, spec: AttentionSpec, skips: list[int], kept: list[int], dense: bool
) -> Arrangement:
    """The arrangement of the ``kept`` sequences without their first ``skips`` rows."""
    assert batch.q_lens is not None and batch.kv_lens is not None
    device = batch.device
    q_starts = [0, *accumulate(batch.q_lens)]
    rows = [t for b in kept for t in range(q_starts[b] + skips[b], q_starts[b + 1])]
    q_lens = tuple(batch.q_lens[b] - skips[b] for b in kept)
    kv_lens = tuple(batch.kv_lens[b] for b in kept)
    index = to_device(kept, torch.int64, device)
    starts = batch.cu_seqlens_k
    if starts is not None:
        # A start per kept sequence and the end of the last: dropped keys become unused room.
        starts = torch.cat([starts.index_select(0, index), starts[-1:]])
    table, host_table = batch.page_table, batch.host_page_table
    mask_starts = None
    if spec.has_mask:
        if batch.mask_indptr is None:
            sizes = (q * kv for q, kv in zip(batch.q_lens, batch.kv_lens))
            old = to_device([0, *accumulate(sizes)], torch.int64, device)
        else:
            old = batch.mask_indptr.to(torch.int64)
        ahead = [skips[b] * batch.kv_lens[b] for b in kept]
        firsts = old.index_select(0, index) + to_device(ahead, torch.int64, device)
        mask_starts = torch.cat([firsts, old[-1:]])
    smaller = replace(
        batch,
        cu_seqlens_q=to_device([0, *accumulate(q_lens)], torch.int32, device),
        seqlens_k=batch.seqlens_k.index_select(0, index),
        cu_seqlens_k=starts,
        page_table=None if table is None else table.index_select(0, index),
        host_page_table=None if host_table is None else host_table[kept],
        total_q=len(rows),
        max_seqlen_q=max(q_lens, default=0),
        max_seqlen_k=max(kv_lens, default=0),
        q_lens=q_lens,
        kv_lens=kv_lens,
        mask_indptr=mask_starts,
    )
    dropped = set(range(batch.num_seqs)) - set(kept)
    dense = dense and all(batch.kv_lens[b] == 0 for b in dropped)
    return Arrangement(smaller, to_device(rows, torch.int64, device), None, dense, True)


def token_positions(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where each row stands, computed on the device and without a wait.

    Returns:
        ``(sequence [T], row [T], inside [T])``: its sequence, its index there, and whether it
        belongs to a sequence at all; T is ``batch.total_q``.
    """
    starts = batch.cu_seqlens_q
    tokens = torch.arange(batch.total_q, device=batch.device, dtype=torch.int32)
    last = max(batch.num_seqs - 1, 0)
    sequence = torch.searchsorted(starts[1:], tokens, right=True)
    inside = sequence < batch.num_seqs
    sequence = sequence.clamp(max=last)
    return sequence, tokens - starts[sequence], inside


def no_keys(q: torch.Tensor, spec: AttentionSpec, out: AttentionOutput | None) -> AttentionOutput:
    """The state of no keys for every row of ``q``."""
    rows, heads = q.shape[0], q.shape[1]
    if out is None:
        o = torch.empty(rows, heads, spec.dv, dtype=spec.out_dtype, device=q.device)
        out = AttentionOutput(o, torch.empty(rows, heads, device=q.device))
    out.o.zero_()
    out.lse.fill_(float("-inf"))
    return out


def empty_rows(batch: Batch, spec: AttentionSpec) -> torch.Tensor:
    """``[total_q]`` bool: rows that see no key by lengths and bounds, or belong to no sequence."""
    if batch.num_seqs == 0:
        return torch.ones(batch.total_q, dtype=torch.bool, device=batch.device)
    sequence, row, inside = token_positions(batch)
    q_lens = batch.cu_seqlens_q[1:] - batch.cu_seqlens_q[:-1]
    kv_len = batch.seqlens_k[sequence]
    empty = ~inside | (kv_len == 0)
    right = spec.bounds[1]
    if right is not None:
        empty |= row + kv_len - q_lens[sequence] + right < 0
    return empty


def take_rows(q: torch.Tensor, arrangement: Arrangement) -> torch.Tensor:
    """The rows of ``q`` that are handed over, ``[T', H, D]``."""
    if arrangement.rows is not None:
        return q.index_select(0, arrangement.rows)
    if arrangement.exact and q.shape[0] > arrangement.batch.total_q:
        return q[: arrangement.batch.total_q]  # the rest belongs to no sequence
    return q


def restore(
    o: torch.Tensor,
    lse: torch.Tensor,
    arrangement: Arrangement,
    rows: int,
    out: AttentionOutput | None,
) -> AttentionOutput:
    """The caller's state from a library's, with empty rows as the contract wants them.

    Args:
        o: ``[T', H, DV]`` from the library.
        lse: ``[T', H]`` float32, natural log.
        arrangement: How T' relates to the caller's rows.
        rows: T, the caller's rows.
        out: Where to write, or None.
    """
    if o.shape[0] != rows or arrangement.rows is not None:
        if out is None:
            full = torch.empty(rows, *o.shape[1:], dtype=o.dtype, device=o.device)
            out = AttentionOutput(full, torch.empty(rows, o.shape[1], device=o.device))
        out.o.zero_()
        out.lse.fill_(float("-inf"))
        if arrangement.rows is None:
            out.o[: o.shape[0]].copy_(o)
            out.lse[: o.shape[0]].copy_(lse)
        else:
            out.o.index_copy_(0, arrangement.rows, o.to(out.o.dtype))
            out.lse.index_copy_(0, arrangement.rows, lse)
        return out
    if out is not None:
        out.o.copy_(o)
        out.lse.copy_(lse)
    else:
        out = AttentionOutput(o, lse)
    if arrangement.empty is not None:
        empty = arrangement.empty[:rows]
        out.o.masked_fill_(empty[:, None, None], 0)
        out.lse.masked_fill_(empty[:, None], float("-inf"))
    return out


__all__ = [
    "Arrangement",
    "arrange",
    "empty_rows",
    "no_keys",
    "restore",
    "take_rows",
    "to_device",
    "token_positions",
    "with_host_lengths",
]
