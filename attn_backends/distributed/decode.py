"""Decode with the keys of every sequence spread over ranks.

Each rank computes the state of all queries over its own keys, then the states are merged across
ranks. A rank without keys contributes the state of no keys, which changes nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..backend import AttentionBackend
from ..batch import Batch
from ..capacity import Capacity
from ..errors import InvalidInputError, Reason, UnsupportedCallError
from ..merge import apply_sinks
from ..merge.dispatch import steady_path
from ..output import AttentionOutput
from ..pieces import BackendLike, bind, refuse_positions
from ..plan import Plan
from ..spec import AttentionSpec
from .exchange import EXCHANGES, SMALL, exchange, heads_of
from .group import Group


class ShardedDecodePlan:
    """A rank's part of a decode step; made once per step, reused by every layer.

    Attributes:
        backend: Who computes this rank's keys.
        plan: That backend's plan of them.
        causal: Whether the layer is causal, so that each sequence may have one query only.
        group: The ranks.
        exchange: How states are merged across ranks; None goes by their size.
        replicate: Whether every rank gets all heads.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        plan: Plan,
        causal: bool,
        group: Group,
        exchange: str | None,
        replicate: bool,
    ) -> None:
        self.backend = backend
        self.plan = plan
        self.causal = causal
        self.group = group
        self.exchange = exchange
        self.replicate = replicate

    @property
    def heads(self) -> slice:
        """The query heads of the result on this rank: ``ceil(H / ranks)`` from rank to rank.

        The last ranks have fewer, or none, where H does not divide.
        """
        heads = self.backend.spec.num_heads
        if self.replicate:
            return slice(0, heads)
        return heads_of(self.group.rank, self.group.size, heads)

    def update(self, batch: Batch) -> None:
        """Refill the plan's fixed buffers before a graph replay; see ``Plan.update``.

        Args:
            batch: The next step's batch of this rank.
        """
        _check_queries(self.causal, batch)
        self.plan.update(batch)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        *,
        sinks: torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
    ) -> AttentionOutput:
        """Attention of one layer over the keys of all ranks; all ranks must call it.

        Args:
            q: ``[T, H, D]``, the same queries on every rank.
            k: This rank's keys, ragged or a cache, as its batch says.
            v: The same with width DV; None takes the first DV lanes of ``k`` (MLA).
            sinks: ``[H]`` float32, merged once, after all keys.
            k_scale: For fp8 keys of this rank, as in ``AttentionBackend.run``.
            v_scale: The same for values.

        Returns:
            The state over all keys, ``o [T, h, DV]`` and ``lse [T, h]`` of the heads ``heads``.
        """
        local = self.local(q, k, v, k_scale=k_scale, v_scale=v_scale)
        state = self.combine(local)
        return state if sinks is None else apply_sinks(state, sinks[self.heads])

    def local(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, **extras: Any
    ) -> AttentionOutput:
        """The state over this rank's keys alone.

        Args:
            q: As in ``run``.
            k: As in ``run``.
            v: As in ``run``.
            extras: Optional inputs of ``AttentionBackend.run``.

        Returns:
            ``o [T, H, DV]`` and ``lse [T, H]``, all heads.
        """
        return self.backend.run(q, k, v, self.plan, **extras)

    def combine(self, local: AttentionOutput) -> AttentionOutput:
        """Merge the states that ``local`` gave on each rank, as ``run`` does.

        Args:
            local: This rank's state, ``o [T, H, DV]`` and ``lse [T, H]``.

        Returns:
            The state over all keys, of the heads ``heads``.
        """
        spec, path = self.backend.spec, None
        if spec.batch_invariant:  # which exchange, and how many rows, then move no bit
            path = steady_path(local.o.device, local.o.dtype, spec.dv)
        return exchange(local, self.group, self._how(local), self.replicate, path)

    def _how(self, local: AttentionOutput) -> str:
        if self.exchange is not None:
            return self.exchange
        size = local.o.numel() * local.o.element_size() * self.group.size
        return "all_gather" if self.replicate and size <= SMALL else "all_to_all"


def plan_sharded_decode(
    spec: AttentionSpec,
    batch: Batch,
    mesh: DeviceMesh | dist.ProcessGroup,
    *,
    backend: BackendLike = None,
    exchange: str | None = None,
    replicate: bool = True,
    capacity: Capacity | None = None,
) -> ShardedDecodePlan:
    """Plan a decode step whose keys are spread over ranks in any way.

    Args:
        spec: What the layer fixes, with all its heads.
        batch: This rank's keys of every sequence (lengths may be 0), and all queries. Each query
            sees all of its sequence's keys here; ``shard_batch`` arranges that where a sequence
            has several causal queries.
        mesh: A device mesh of one dimension, or a process group.
        backend: A name, a backend whose class and options are taken, or None to choose.
        exchange: ``"all_to_all"``, ``"all_gather"``, ``"reduce_scatter"``, or None: all_gather
            for small states that are replicated, else all_to_all. The first two give the same
            bits; the last sums in the order of the transport.
        replicate: Whether every rank gets all heads, or each its own; see ``heads``.
        capacity: To capture a CUDA graph.

    Returns:
        A plan whose ``run`` serves every layer with this spec.

    Raises:
        UnsupportedCallError: The spec has a window, ALiBi or a mask, or a sequence several causal
            queries.
        InvalidInputError: An argument is malformed; the message names it.
    """
    if exchange is not None and exchange not in EXCHANGES:
        raise InvalidInputError.of("exchange", repr(exchange), ", ".join(EXCHANGES))
    refuse_positions(spec, "sharded decode")
    _check_queries(spec.causal, batch)
    group = Group.of(mesh)
    phase = "decode" if batch.max_seqlen_q <= 1 else "prefill"
    # One query at the end of its sequence sees every key: nothing is left for causality to hide.
    bound = bind(backend, replace(spec, causal=False), phase, batch.device)
    plan = bound.plan(batch, capacity)
    return ShardedDecodePlan(bound, plan, spec.causal, group, exchange, replicate)


def _check_queries(causal: bool, batch: Batch) -> None:
    if causal and batch.max_seqlen_q > 1:
        fix = "build the batch with shard_batch, which makes each query a sequence"
        reason = Reason("max_seqlen_q", str(batch.max_seqlen_q), "1 if causal", fix)
        raise UnsupportedCallError(f"sharded decode: {reason}", reasons=[reason])


__all__ = ["ShardedDecodePlan", "plan_sharded_decode"]
