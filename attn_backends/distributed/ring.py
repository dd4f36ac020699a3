"""Ring attention: queries stay where they are, keys and values travel from rank to rank.

At every step a rank computes the attention between its own queries and the keys it holds, while
those keys are on their way to the next rank and the previous rank's are arriving. After as many
steps as there are ranks every query has met every key. The states of the steps are over disjoint
keys, so they merge. With zig-zag shards each step is one call of the same work on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import InvalidInputError
from ..output import AttentionOutput
from ..pieces import BackendLike, Call, Work, length, plan_calls, refuse_positions
from ..running import RunningState
from ..spec import AttentionSpec
from .group import Group
from .shards import Shards


class RingPlan:
    """The calls of every step of the ring; made once per step of the model, for all its layers.

    Attributes:
        group: The ranks of the ring.
        shards: Which of them holds what.
        steps: ``steps[t]`` are this rank's calls with the keys of rank ``rank - t``.
    """

    def __init__(
        self, spec: AttentionSpec, shards: Shards, group: Group, steps: list[list[Call]]
    ) -> None:
        self.spec = spec
        self.shards = shards
        self.group = group
        self.steps = tuple(map(tuple, steps))

    def origin(self, step: int) -> int:
        """The rank whose keys are here at a step.

        Args:
            step: From 0, where they are this rank's own.

        Returns:
            A rank of the group.
        """
        return (self.group.rank - step) % self.group.size

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        *,
        sinks: torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> AttentionOutput:
        """Attention of this rank's queries over the keys of all ranks; all ranks must call it.

        Args:
            q: ``[T_r, H, D]``, the rank's queries in the order of ``Shards.query_rows``.
            k: ``[Tk_r, HK, D]``, its keys in the order of ``Shards.key_rows``.
            v: ``[Tk_r, HK, DV]``; None takes the first DV lanes of ``k``, and only ``k`` travels.
            sinks: ``[H]`` float32, merged once at the end.
            k_scale: For fp8 keys, the same on every rank.
            v_scale: The same for values.
            out: ``(o [T_r, H, DV], lse [T_r, H])`` to write into.

        Returns:
            The state of the rank's queries over all keys, ``o [T_r, H, DV]``, ``lse [T_r, H]``.

        Raises:
            InvalidInputError: Rows do not fit the shards; the message names the tensor.
        """
        self._check(q, k, v)
        state = RunningState(self.spec, q.shape[0], q.device)
        held = _travelling(k, v)
        arriving = _Buffers(held, self._most_keys())
        for step, calls in enumerate(self.steps):
            pending, following = self._exchange(step, held, arriving)
            values = None if v is None else held[1]
            for call in calls:
                part = call.run(q, held[0], values, k_scale=k_scale, v_scale=v_scale)
                state.add(part, call.rows)
            for work in pending:
                work.wait()
            held = following
        return state.finish(sinks, out)

    def exchange_only(self, k: torch.Tensor, v: torch.Tensor | None) -> None:
        """Send keys around as ``run`` does, without attention: what communication costs alone.

        Args:
            k: ``[Tk_r, HK, D]``, as in ``run``.
            v: The same with width DV, or None.
        """
        held = _travelling(k, v)
        arriving = _Buffers(held, self._most_keys())
        for step in range(len(self.steps)):
            pending, held = self._exchange(step, held, arriving)
            for work in pending:
                work.wait()

    def compute_only(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None
    ) -> AttentionOutput:
        """Compute the calls and merges of ``run`` on keys at hand: what compute costs alone.

        Args:
            q: As in ``run``.
            k: Any ``[n, HK, D]`` with at least as many rows as the largest shard.
            v: As ``k``, with width DV.

        Returns:
            A state of the right shape over the wrong keys.
        """
        state = RunningState(self.spec, q.shape[0], q.device)
        for calls in self.steps:
            for call in calls:
                state.add(call.run(q, k, v), call.rows)
        return state.finish()

    def _most_keys(self) -> int:
        """Most keys of one rank that arrive here."""
        steps = range(1, self.group.size)
        return max((self.shards.num_keys(self.origin(t)) for t in steps), default=0)

    def _exchange(
        self, step: int, held: list[torch.Tensor], arriving: _Buffers
    ) -> tuple[list[Any], list[torch.Tensor]]:
        """Start to pass on what is held at a step; what is under way, and what will be held."""
        if step + 1 == len(self.steps):
            return [], held
        rows = self.shards.num_keys(self.origin(step + 1))
        following = arriving.at(step, rows)
        group, ops = self.group.process_group, []
        # Nobody sends nothing: both sides know the sizes, and not every transport takes 0 bytes.
        if held[0].shape[0]:
            to = self.group.global_rank(self.group.rank + 1)
            ops += [dist.P2POp(dist.isend, _as_bytes(x), to, group) for x in held]
        if rows:
            source = self.group.global_rank(self.group.rank - 1)
            ops += [dist.P2POp(dist.irecv, _as_bytes(x), source, group) for x in following]
        return (dist.batch_isend_irecv(ops) if ops else []), following

    def _check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None) -> None:
        rank = self.group.rank
        rows = {
            "q": (q, self.shards.num_queries(rank)),
            "k": (k, self.shards.num_keys(rank)),
            "v": (v, self.shards.num_keys(rank)),
        }
        for name, (x, want) in rows.items():
            if x is not None and x.shape[0] != want:
                allowed = f"{want}, what rank {rank} holds"
                raise InvalidInputError.of(f"{name}.shape[0]", x.shape[0], allowed)


class _Buffers:
    """Two places for arriving keys, used in turn: one is read while the other is filled."""

    def __init__(self, like: list[torch.Tensor], rows: int) -> None:
        self.like = like
        self.rows = rows
        self.pairs: list[list[torch.Tensor]] = []

    def at(self, step: int, rows: int) -> list[torch.Tensor]:
        if len(self.pairs) <= step % 2:
            pair = [x.new_empty((self.rows, *x.shape[1:])) for x in self.like]
            self.pairs.append(pair)
        return [x[:rows] for x in self.pairs[step % 2]]


def _travelling(k: torch.Tensor, v: torch.Tensor | None) -> list[torch.Tensor]:
    """What is sent: dense, because transports know no strides."""
    return [k.contiguous()] if v is None else [k.contiguous(), v.contiguous()]


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    """fp8 travels as bytes, which every transport knows."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def plan_ring(
    spec: AttentionSpec,
    shards: Shards,
    mesh: DeviceMesh | dist.ProcessGroup,
    *,
    backend: BackendLike = None,
    device: torch.device | str | None = None,
) -> RingPlan:
    """Plan causal or full attention of queries and keys that are spread over ranks.

    Args:
        spec: What the layer fixes, with ragged keys.
        shards: Which rank holds what, the same on all of them; see ``zigzag_shards``.
        mesh: A device mesh of one dimension, or a process group. Its ranks form the ring.
        backend: A name, a backend whose class and options are taken, or None to choose.
        device: Where this rank computes; default: ``cuda`` if a CUDA device is visible.

    Returns:
        A plan whose ``run`` serves every layer with this spec.

    Raises:
        UnsupportedCallError: The spec has pages, a window, ALiBi or a mask.
        InvalidInputError: The shards are for another number of ranks.
    """
    refuse_positions(spec, "ring attention")
    group = Group.of(mesh)
    if spec.page_size is not None:
        fix = "gather the pages into ragged keys first"
        raise InvalidInputError.of("spec.page_size", spec.page_size, "None: keys travel", fix)
    if shards.world != group.size:
        allowed = f"{group.size}, as the mesh"
        raise InvalidInputError.of("shards.world", shards.world, allowed)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.device(device)
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    steps = plan_steps(spec, shards, group.rank, backend, where)
    if not all(shards.num_keys(rank) for rank in range(group.size)):
        # The first exchange of a group must be one that all take part in, says NCCL; a rank with
        # nothing to pass on would stay away.
        dist.barrier(group.process_group)
    return RingPlan(spec, shards, group, steps)


def plan_steps(
    spec: AttentionSpec, shards: Shards, rank: int, backend: BackendLike, device: torch.device
) -> list[list[Call]]:
    """The calls of one rank at every step of the ring, without a ring.

    Args:
        spec: What the layer fixes.
        shards: Which rank holds what.
        rank: Whose calls.
        backend: As in ``plan_ring``.
        device: Where.

    Returns:
        ``steps[t]``: the calls with the keys of rank ``rank - t``.
    """
    steps = []
    for step in range(shards.world):
        keys = shards.keys[(rank - step) % shards.world]
        work, row, key = [], 0, 0
        for own, theirs in zip(shards.queries[rank], keys):
            work.append(Work(own, theirs, row, key))
            row, key = row + length(own), key + length(theirs)
        steps.append(plan_calls(spec, work, backend, device))
    return steps


__all__ = ["RingPlan", "plan_ring", "plan_steps"]
