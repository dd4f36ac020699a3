"""Decode context parallelism: the cache is dealt out over ranks by token, and states are merged.

Every rank gathers the queries of all, attends to its own tokens of the context without causality,
and vLLM's collective combines these partial states by their LSE and leaves each rank its heads.
The new tokens, which every rank holds, are one more state, causal, with the sinks in it once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...batch import Batch
from ...capacity import Capacity
from ...errors import Reason
from ...merge import merge_state
from ...plan import Plan
from ...spec import AttentionSpec
from .layers import refusal
from .phases import Phases, choose
from .steps import Requests


def specs(spec: AttentionSpec, ranks: int) -> tuple[AttentionSpec, AttentionSpec]:
    """Specs of the context (paged, the heads of all ranks) and of the new tokens (ragged).

    Raises:
        UnsupportedCallError: The layer depends on positions, which shards do not keep.
    """
    reasons = []
    if spec.window is not None:
        reasons.append(Reason("sliding_window", str(spec.window), "None with context parallelism"))
    if spec.has_alibi:
        reasons.append(Reason("alibi_slopes", "given", "None with context parallelism"))
    if reasons:
        raise refusal(*reasons)
    context = replace(spec, num_heads=spec.num_heads * ranks, causal=False)
    return context, replace(spec, page_size=None, kv_dtype=None)


def check_layer(spec: AttentionSpec, ranks: int, device: torch.device) -> bool:
    """Whether graphs can hold the decode of a layer; raises if no backend can do it."""
    context, own = specs(replace(spec, page_size=16), ranks)
    return choose(context, device).has_graphs and choose(own, device).has_graphs


@dataclass
class ContextParallel:
    """What a group of layers with one spec needs beyond a single rank.

    Attributes:
        ranks: Size of the group.
        rank: Ours in it.
        interleave: Tokens in a row on one rank.
        context: Backends of the context.
        own: Backends of the new tokens.
        all_to_all: Whether states are exchanged by ``--dcp-comm-backend a2a``.
    """

    ranks: int
    rank: int
    interleave: int
    context: Phases
    own: Phases
    all_to_all: bool = False
    _captured: dict[tuple[int, int, int], tuple[Plan, Plan]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        spec: AttentionSpec,
        ranks: int,
        rank: int,
        interleave: int,
        device: torch.device,
        all_to_all: bool = False,
    ) -> ContextParallel:
        """Choose the backends of a layer; see ``specs``."""
        context, own = (choose(each, device) for each in specs(spec, ranks))
        return cls(ranks, rank, interleave, context, own, all_to_all)

    def __str__(self) -> str:
        return f"{self.context} over {self.ranks} ranks, new tokens {self.own}"

    def plan(self, requests: Requests, capacity: Capacity | None) -> ContextStep:
        """Plan both states of a step; the plans of a captured step are refilled.

        Args:
            requests: The step.
            capacity: Of the graph that is being captured, if one is.
        """
        new = requests.starts.diff()
        context = replace(
            requests,
            seq_lens=self._context_lens(requests.seq_lens - new),
            max_seq_len=self._most(requests.max_seq_len),
            host_seq_lens=None,  # only the device knows
        ).batch()
        own = Batch(
            cu_seqlens_q=requests.starts,
            seqlens_k=new,
            cu_seqlens_k=requests.starts,
            total_q=requests.num_tokens,
            max_seqlen_q=requests.max_query_len,
            max_seqlen_k=requests.max_query_len,
        )
        plans = self._captured.get(requests.key)
        if plans is not None:
            plans[0].update(context)
            plans[1].update(own)
        elif capacity is not None:
            short = replace(capacity, max_seqlen_k=requests.max_query_len, max_pages=0)
            plans = (
                self.context.decode.plan(context, capacity),
                self.own.decode.plan(own, short),
            )
            self._captured[requests.key] = plans
        else:
            decode = requests.max_query_len == 1
            sides = [p.decode if decode else p.prefill for p in (self.context, self.own)]
            plans = (sides[0].plan(context), sides[1].plan(own))
        return ContextStep(*plans, all_to_all=self.all_to_all)

    def _most(self, length: int) -> int:
        """Most tokens of a sequence that one rank has; block tables are no wider than that."""
        return min(length, -(-length // (self.ranks * self.interleave)) * self.interleave)

    def _context_lens(self, lengths: torch.Tensor) -> torch.Tensor:
        from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

        return get_dcp_local_seq_lens(lengths, self.ranks, self.rank, self.interleave)


@dataclass
class ContextStep:
    """The plans of a step.

    Attributes:
        context: Over the shard of the cache.
        own: Over the new tokens.
        all_to_all: How states are exchanged.
    """

    context: Plan
    own: Plan
    all_to_all: bool = False

    def run(
        self,
        new: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        cache: tuple[torch.Tensor, torch.Tensor],
        output: torch.Tensor,
        *,
        sinks: torch.Tensor | None,
        alibi_slopes: torch.Tensor | None,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
    ) -> None:
        """Attention of one layer.

        Args:
            new: ``q [T, H, D]``, ``k`` and ``v [T, HK, D]`` of the new tokens.
            cache: Views ``[blocks, block_size, HK, D]`` of this rank's shard.
            output: ``[T, H, D]``, written.
            sinks: ``[H]`` float32 or None.
            alibi_slopes: None.
            k_scale: Of the cache.
            v_scale: The same for values.
        """
        q, k, v = new
        group, combine = _collective(self.all_to_all)
        gathered = group.all_gather(q.contiguous(), dim=1)
        shard = self.context.backend.run(
            gathered, *cache, self.context, k_scale=k_scale, v_scale=v_scale
        )
        o, lse = combine(shard.o, shard.lse, group, return_lse=True)
        own = self.own.backend.run(q, k, v, self.own, sinks=sinks, alibi_slopes=alibi_slopes)
        merge_state(o, lse, own.o, own.lse, out=(output, own.lse))


def _collective(all_to_all: bool) -> tuple[Any, Any]:
    """The group of ranks, and vLLM's combination of partial states over it."""
    from vllm.distributed.parallel_state import get_dcp_group

    name = "dcp_a2a_lse_reduce" if all_to_all else "cp_lse_ag_out_rs"
    try:
        from vllm.v1.attention.ops import dcp as operations
    except ImportError:  # before 0.30
        if all_to_all:
            from vllm.v1.attention.ops import dcp_alltoall as operations
        else:
            from vllm.v1.attention.ops import common as operations
    return get_dcp_group(), getattr(operations, name)


__all__ = ["ContextParallel", "ContextStep", "check_layer", "specs"]
