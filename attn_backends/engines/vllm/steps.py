"""What a step fixes, in our words: vLLM's metadata as batches, and what the builder hands on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ...backend import AttentionBackend
from ...batch import Batch
from ...errors import Reason
from ...plan import Plan
from ...spec import AttentionSpec
from .layers import refusal


class Part(NamedTuple):
    """The rows of a step that one backend computes.

    Attributes:
        backend: Bound to the layer's spec.
        plan: Of these rows, shared by every layer with the spec.
        start: First row.
        stop: Row after the last.
        lse: ``[stop - start, H]`` float32, room for what every run must return.
    """

    backend: AttentionBackend
    plan: Plan
    start: int
    stop: int
    lse: torch.Tensor


@dataclass
class Step:
    """The metadata that layers get; vLLM passes it on without looking inside.

    Attributes:
        num_actual_tokens: Rows that hold tokens, or padding that a graph computes too.
        parts: By the layer's spec without a page size: what is to be run, in order of rows.
        context: The same for context parallelism, see ``context_parallel``.
    """

    num_actual_tokens: int
    parts: dict[AttentionSpec, tuple[Part, ...]] = field(default_factory=dict)
    context: dict[AttentionSpec, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Requests:
    """vLLM's ``CommonAttentionMetadata``, as far as it is needed here.

    Attributes:
        starts: ``[B+1]`` int32, where each request's queries start.
        seq_lens: ``[B]`` int32, keys of each request, the new ones included.
        block_table: ``[B, max_blocks]`` int32.
        num_tokens: Rows of queries, padding of a graph included.
        max_query_len: Longest query, or an upper bound.
        max_seq_len: Most keys, or an upper bound.
        host_starts: ``starts`` on the host.
        host_seq_lens: Exact ``seq_lens`` on the host, if known.
    """

    starts: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    host_starts: torch.Tensor
    host_seq_lens: torch.Tensor | None

    @classmethod
    def of(cls, common: Any, *, exact: bool) -> Requests:
        """Read vLLM's metadata; nothing is copied.

        Args:
            common: vLLM's ``CommonAttentionMetadata``.
            exact: Whether its bounds of lengths on the host are the lengths themselves.

        Raises:
            UnsupportedCallError: The step is not causal.
        """
        if common.causal is not True:
            raise refusal(Reason("causal", str(common.causal), "True"))
        host = common.seq_lens_cpu_upper_bound if exact else None
        if host is not None and host.shape[0] != common.num_reqs:
            host = None
        return cls(
            starts=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            num_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            host_starts=common.query_start_loc_cpu,
            host_seq_lens=host,
        )

    @property
    def num_reqs(self) -> int:
        """B, requests of padding included."""
        return self.seq_lens.shape[0]

    @property
    def key(self) -> tuple[int, int, int]:
        """What vLLM tells graphs of a decode step apart by."""
        return self.num_reqs, self.num_tokens, self.max_query_len

    def split(self, longest_decode: int) -> tuple[Requests | None, Requests | None]:
        """Decode requests, which come first, and those with longer queries.

        Args:
            longest_decode: Most queries of a request that still counts as decode.
        """
        if self.max_query_len <= longest_decode:
            return self, None
        longer = self.host_starts.diff() > longest_decode
        first = int(longer.int().argmax()) if bool(longer.any()) else self.num_reqs
        if first == 0:
            return None, self
        if first == self.num_reqs:
            return self, None
        row = int(self.host_starts[first])
        known = self.host_seq_lens
        decode = Requests(
            starts=self.starts[: first + 1],
            seq_lens=self.seq_lens[:first],
            block_table=self.block_table[:first],
            num_tokens=row,
            max_query_len=longest_decode,
            max_seq_len=self.max_seq_len,
            host_starts=self.host_starts[: first + 1],
            host_seq_lens=None if known is None else known[:first],
        )
        prefill = Requests(
            starts=self.starts[first:] - row,
            seq_lens=self.seq_lens[first:],
            block_table=self.block_table[first:],
            num_tokens=self.num_tokens - row,
            max_query_len=self.max_query_len,
            max_seq_len=self.max_seq_len,
            host_starts=self.host_starts[first:] - row,
            host_seq_lens=None if known is None else known[first:],
        )
        return decode, prefill

    def batch(self) -> Batch:
        """The paged batch; with lengths on the host where they are exact."""
        q_lens, kv_lens = None, None
        if self.host_seq_lens is not None and int(self.host_starts[-1]) == self.num_tokens:
            q_lens = tuple(self.host_starts.diff().tolist())
            kv_lens = tuple(self.host_seq_lens.tolist())
        return Batch(
            cu_seqlens_q=self.starts,
            seqlens_k=self.seq_lens,
            page_table=self.block_table,
            total_q=self.num_tokens,
            max_seqlen_q=self.max_query_len,
            max_seqlen_k=self.max_seq_len,
            q_lens=q_lens,
            kv_lens=kv_lens,
        )


__all__ = ["Part", "Requests", "Step"]
