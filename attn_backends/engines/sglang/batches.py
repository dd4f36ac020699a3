"""SGLang's ``ForwardBatch`` as batches of ours: one per pool, alike but for the page table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ...batch import Batch
from .pool import Pool
from .reasons import batch_reasons, refusal


class Batches(NamedTuple):
    """One step's sequences.

    Attributes:
        full: With pages in the pool for full attention.
        windowed: With pages in the pool for sliding windows; None if there is none.
    """

    full: Batch
    windowed: Batch | None

    def of(self, windowed: bool) -> Batch:
        """The batch of a layer by the pool that it is in."""
        if not windowed:
            return self.full
        assert self.windowed is not None
        return self.windowed


class Tables:
    """SGLang's table of slots, ``req_to_token [requests, context]``, read as tables of pages.

    Slots of a request follow each other within a page, and pages start at multiples of their
    size; so the first slot of every page says it all.

    Args:
        req_to_token: The table.
        pool: What the slots lie in.
    """

    def __init__(self, req_to_token: torch.Tensor, pool: Pool) -> None:
        self.req_to_token, self.pool = req_to_token, pool

    @property
    def most_keys(self) -> int:
        """Slots that a request can have."""
        return self.req_to_token.shape[1]

    def width(self, keys: int) -> int:
        """Pages of that many keys."""
        return -(-min(keys, self.most_keys) // self.pool.page_size)

    def pages(self, requests: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Page tables ``[B, width]`` of requests: for full attention, and for sliding windows.

        Columns past a request's last key hold whatever the table has there.

        Args:
            requests: ``[B]`` rows of the table.
            width: Pages per request.
        """
        size = self.pool.page_size
        slots = self.req_to_token[:, : width * size : size][requests]
        full = slots if size == 1 else slots // size
        if not self.pool.has_windows:
            return full, None
        mapped = self.pool.window_slots(slots)
        return full, mapped if size == 1 else mapped // size


def phase_of(batch: Any) -> str | None:
    """The phase of a step in our words; None where there is nothing to do.

    Raises:
        UnsupportedCallError: The step is of a kind that the plug does not know.
    """
    if reasons := batch_reasons(batch):
        raise refusal(*reasons)
    if batch.forward_mode.is_idle():
        return None
    return "decode" if batch.forward_mode.is_decode() else "prefill"


def decode_batches(batch: Any, tables: Tables) -> Batches:
    """One query per request; ``seq_lens`` counts its own key."""
    kv_lens = host_lengths(batch)
    num = batch.batch_size
    longest = tables.most_keys if kv_lens is None else max(kv_lens, default=0)
    starts = torch.arange(num + 1, dtype=torch.int32, device=batch.seq_lens.device)
    return _batches(batch, tables, starts, (1,) * num, kv_lens, num, min(num, 1), longest)


def extend_batches(batch: Any, tables: Tables) -> Batches:
    """New tokens after a prefix that is in the pool already, each request its own number."""
    q_lens = _ints(batch.extend_seq_lens_cpu)
    prefixes = _ints(batch.extend_prefix_lens_cpu)
    kv_lens = host_lengths(batch)
    if q_lens is not None and prefixes is not None:
        kv_lens = tuple(p + n for p, n in zip(prefixes, q_lens))
    if q_lens is None:
        total = batch.extend_num_tokens
        most = total = batch.input_ids.shape[0] if total is None else total
    else:
        total, most = sum(q_lens), max(q_lens, default=0)
    longest = tables.most_keys if kv_lens is None else max(kv_lens, default=0)
    lens = batch.extend_seq_lens
    starts = lens.new_zeros(lens.shape[0] + 1, dtype=torch.int32)
    torch.cumsum(lens, 0, dtype=torch.int32, out=starts[1:])
    return _batches(batch, tables, starts, q_lens, kv_lens, total, most, longest)


def _batches(
    batch: Any,
    tables: Tables,
    starts: torch.Tensor,
    q_lens: tuple[int, ...] | None,
    kv_lens: tuple[int, ...] | None,
    total: int,
    most: int,
    longest: int,
) -> Batches:
    num = batch.batch_size
    pages, window_pages = tables.pages(batch.req_pool_indices[:num], tables.width(longest))
    exact = q_lens is not None and kv_lens is not None
    full = Batch(
        cu_seqlens_q=starts,
        seqlens_k=batch.seq_lens[:num],
        page_table=pages,
        total_q=total,
        max_seqlen_q=most,
        max_seqlen_k=longest,
        q_lens=q_lens if exact else None,
        kv_lens=kv_lens if exact else None,
    )
    if window_pages is None:
        return Batches(full, None)
    return Batches(full, replace(full, page_table=window_pages))


def host_lengths(batch: Any) -> tuple[int, ...] | None:
    """Keys of each request on the host, where SGLang keeps a mirror of them."""
    mirror = _ints(getattr(batch, "seq_lens_cpu", None))
    if mirror is None or len(mirror) < batch.batch_size:
        return None
    return mirror[: batch.batch_size]


def _ints(values: Any) -> tuple[int, ...] | None:
    if values is None:
        return None
    if isinstance(values, torch.Tensor):
        return tuple(values.tolist())
    return tuple(int(n) for n in values)


__all__ = ["Batches", "Tables", "decode_batches", "extend_batches", "host_lengths", "phase_of"]
