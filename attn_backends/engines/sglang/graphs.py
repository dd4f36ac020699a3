"""Decode under CUDA graphs: tensors at fixed addresses, shared by the graphs of all batch sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...batch import Batch
from ...capacity import Capacity
from .batches import Batches, Tables, host_lengths
from .steps import Step


class Graphs:
    """What captured graphs read, refilled before each replay.

    Only one graph runs at a time, and each is refilled before its own replay; so they share one
    page table as wide as the context, of which a graph reads its first rows.

    Args:
        tables: Where requests have their keys.
        max_bs: Most requests of a graph.
        device: Where they are.
    """

    def __init__(self, tables: Tables, max_bs: int, device: torch.device) -> None:
        self.tables, self.max_bs, self.device = tables, max_bs, device
        self.columns = tables.width(tables.most_keys)
        self.starts = torch.arange(max_bs + 1, dtype=torch.int32, device=device)
        self.seqlens = self._zeros(max_bs)
        self.pages = self._zeros(max_bs, self.columns)
        self.window_pages = self.pages
        if tables.pool.has_windows:
            self.window_pages = self._zeros(max_bs, self.columns)
        self.steps: dict[int, Step] = {}

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.device)

    def capture(self, batch: Any) -> Step:
        """The step that a graph of ``batch.batch_size`` requests is captured over."""
        num = batch.batch_size
        capacity = Capacity(
            num_seqs=num,
            total_q=num,
            max_seqlen_q=1,
            max_seqlen_k=self.tables.most_keys,
            max_pages=self.columns,
            in_place=True,
        )
        step = self.steps[num] = Step("decode", self._fill(batch), capacity)
        return step

    def replay(self, batch: Any) -> Step:
        """Refill what the graph of ``batch.batch_size`` requests reads."""
        step = self.steps[batch.batch_size]
        step.update(self._fill(batch))
        return step

    def _fill(self, batch: Any) -> Batches:
        """Copy a step's lengths and tables to their places; the batches over those places."""
        num = batch.batch_size
        kv_lens = host_lengths(batch)
        longest = self.tables.most_keys if kv_lens is None else max(kv_lens, default=0)
        width = self.tables.width(longest)
        pages, window_pages = self.tables.pages(batch.req_pool_indices[:num], width)
        self.seqlens[:num].copy_(batch.seq_lens[:num])
        self.pages[:num, :width].copy_(pages)
        full = Batch(
            cu_seqlens_q=self.starts[: num + 1],
            seqlens_k=self.seqlens[:num],
            page_table=self.pages[:num],
            total_q=num,
            max_seqlen_q=1,
            max_seqlen_k=longest,
            q_lens=None if kv_lens is None else (1,) * num,
            kv_lens=kv_lens,
        )
        if window_pages is None:
            return Batches(full, None)
        self.window_pages[:num, :width].copy_(window_pages)
        return Batches(full, replace(full, page_table=self.window_pages[:num]))


__all__ = ["Graphs"]
