"""Cascade attention: keys that several sequences share are read once, and the states merged.

Level 0 holds the keys that most sequences share, the last level each sequence's own suffix. At each
level the queries of a group are one long sequence over the group's keys, so shared keys are loaded
once per group and not once per sequence. The states of all levels are over disjoint keys; one n-way
merge gives attention over their union. Sinks enter once, after the merge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from .backend import AttentionBackend
from .batch import Batch
from .capacity import Capacity
from .errors import InvalidInputError, Reason, UnsupportedCallError
from .forms import spec_of
from .merge import apply_sinks, merge_states
from .merge.dispatch import steady_path
from .output import AttentionOutput
from .plan import Plan
from .prefixes import PrefixCut, cut_where_it_pays
from .registry import select
from .spec import AttentionSpec


def level_specs(spec: AttentionSpec, levels: int) -> list[AttentionSpec]:
    """The spec of each level: shared keys lie before every query, so only the last is causal.

    Raises:
        UnsupportedCallError: The spec needs a query's distance to shared keys, which the position
            inside a group does not tell.
    """
    reasons = []
    if spec.window is not None:
        reasons.append(Reason("window", str(spec.window), "None", "run without a cascade"))
    if spec.has_alibi:
        reasons.append(Reason("has_alibi", "True", "False", "run without a cascade"))
    if reasons and levels > 1:
        text = "; ".join(map(str, reasons))
        raise UnsupportedCallError(f"cascade cannot do this call: {text}", reasons=reasons)
    shared = replace(spec, causal=False, has_mask=False)
    return [shared] * (levels - 1) + [spec]


class CascadePlan:
    """The plans of all levels; made once per step, reused by every layer.

    Attributes:
        levels: Backend and plan of each level, most shared first.
        reason: Why there are as many.
    """

    def __init__(
        self, levels: Sequence[tuple[AttentionBackend, Plan]], reason: str = "as given"
    ) -> None:
        self.levels = tuple(levels)
        self.reason = reason

    def update(self, batches: Sequence[Batch]) -> None:
        """Refill the fixed buffers of every level before a graph replay.

        Args:
            batches: One batch per level, within each level's capacity.

        Raises:
            InvalidInputError: Another number of levels, or a batch that exceeds its capacity.
        """
        _check_levels(batches, len(self.levels))
        for (_, plan), batch in zip(self.levels, batches):
            plan.update(batch)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor | Sequence[torch.Tensor],
        v: torch.Tensor | Sequence[torch.Tensor | None] | None,
        *,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> AttentionOutput:
        """Attention of one layer over the keys of all levels.

        Args:
            q: ``[T, H, D]``, the same queries at every level.
            k: The cache ``[num_pages, page_size, HK, D]`` that all levels share, or one tensor
                per level, paged or ragged ``[Tk, HK, D]``.
            v: As ``k``; None takes the first DV lanes of ``k``.
            sinks: ``[H]`` float32, merged once at the end.
            alibi_slopes: ``[H]`` float32; only where there is one level.
            mask: Flat bool ``[sum of q_len * kv_len]`` over the last level's own keys, True =
                visible; exactly if the spec has a mask.
            k_scale: For fp8 caches, as in ``AttentionBackend.run``: a number, or float32 ``[]``,
                ``[1]`` or ``[HK]``.
            v_scale: The same for values.
            out: ``(o [T, H, DV], lse [T, H] float32)`` to write into.

        Returns:
            The state over all levels' keys, ``o [T, H, DV]`` and ``lse [T, H]``.

        Raises:
            InvalidInputError: An input does not fit its level; the message names it.
        """
        count = len(self.levels)
        keys, values = _per_level("k", k, count), _per_level("v", v, count)
        if count == 1:
            backend, plan = self.levels[0]
            return backend.run(
                q, keys[0], values[0], plan, sinks=sinks, alibi_slopes=alibi_slopes, mask=mask,
                k_scale=k_scale, v_scale=v_scale, out=out,
            )  # fmt: skip
        if alibi_slopes is not None:
            raise InvalidInputError.of("alibi_slopes", "given", f"None with {count} levels")
        states = []
        for i, (backend, plan) in enumerate(self.levels):
            own = mask if i == count - 1 else None
            state = backend.run(
                q, keys[i], values[i], plan, mask=own, k_scale=k_scale, v_scale=v_scale
            )
            states.append(state)
        spec, path = self.levels[-1][0].spec, None
        if spec.batch_invariant:
            path = steady_path(q.device, states[0].o.dtype, spec.dv)
        merged = merge_states(states, out=out, path=path)
        return merged if sinks is None else apply_sinks(merged, sinks, out=out)


def plan_cascade(
    spec: AttentionSpec,
    batches: Batch | Sequence[Batch],
    *,
    backend: str | Sequence[str] | None = None,
    capacities: Sequence[Capacity] | None = None,
    levels: int = 2,
) -> CascadePlan:
    """Plan attention over several levels of keys.

    Args:
        spec: What the layer fixes; causality and mask apply at the last level.
        batches: One batch per level, most shared first. Every level covers the same T queries:
            at a shared level a sequence is a group, its ``q_len`` the group's queries together.
            Or the step as one paged batch: pages that sequences share are then found, and taken
            together if an estimate of the traffic says that it pays; ``reason`` of the plan tells.
        backend: One name for all levels, one per level, or None to choose each.
        capacities: One per level, to capture a CUDA graph; the levels must then be given.
        levels: Most levels to cut one batch into, the suffix level included.

    Returns:
        A plan whose ``run`` serves every layer with this spec.

    Raises:
        InvalidInputError: Levels disagree about the number of queries, or capacities are given
            for levels that are not.
        UnsupportedCallError: Levels are given, and the spec has a window or ALiBi.
    """
    if isinstance(batches, Batch):
        return _plan_where_it_pays(spec, batches, backend, capacities, levels)
    return _plan_levels(spec, batches, backend, capacities, "as given")


def _plan_where_it_pays(
    spec: AttentionSpec,
    batch: Batch,
    backend: str | Sequence[str] | None,
    capacities: Sequence[Capacity] | None,
    levels: int,
) -> CascadePlan:
    if capacities is not None:
        fix = "a graph has fixed levels: cut the batch with split_prefixes"
        raise InvalidInputError.of("capacities", "given", "None with one batch", fix)
    if backend is not None and not isinstance(backend, str):
        allowed = "one name, or None, with one batch"
        raise InvalidInputError.of("backend", f"{len(backend)} names", allowed)
    cut = cut_where_it_pays(spec, batch, levels)
    if len(cut.batches) > 1:
        try:
            return _plan_levels(spec, cut.batches, backend, None, cut.reason)
        except UnsupportedCallError as error:  # the whole step may still be what it can do
            cut = PrefixCut((batch,), f"one level: {error}")
    return _plan_levels(spec, [batch], backend, None, cut.reason)


def _plan_levels(
    spec: AttentionSpec,
    batches: Sequence[Batch],
    backend: str | Sequence[str] | None,
    capacities: Sequence[Capacity] | None,
    reason: str,
) -> CascadePlan:
    _check_levels(batches, None)
    count = len(batches)
    names = [backend] * count if backend is None or isinstance(backend, str) else list(backend)
    if len(names) != count:
        raise InvalidInputError.of("backend", f"{len(names)} names", _one_or(count))
    if capacities is not None and len(capacities) != count:
        raise InvalidInputError.of("capacities", len(capacities), f"{count}, the levels")
    planned = []
    for i, level in enumerate(level_specs(spec, count)):
        batch = batches[i]
        phase = "decode" if batch.max_seqlen_q <= 1 else "prefill"
        chosen = select(level, phase=phase, device=batch.device, backend=names[i]).backend
        plan = chosen.plan(batch, None if capacities is None else capacities[i])
        planned.append((chosen, plan))
    return CascadePlan(planned, reason)


def cascade_attention(
    q: torch.Tensor,
    k: torch.Tensor | Sequence[torch.Tensor],
    v: torch.Tensor | Sequence[torch.Tensor | None] | None,
    batches: Batch | Sequence[Batch],
    *,
    causal: bool = True,
    softcap: float | None = None,
    sm_scale: float | None = None,
    head_dim_v: int | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    backend: str | Sequence[str] | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> AttentionOutput:
    """Attention over shared and own keys in one call.

    Args:
        q: ``[T, H, D]``.
        k: One paged cache ``[num_pages, page_size, HK, D]`` for all levels, or one tensor per
            level (all paged or all ragged).
        v: As ``k``; None takes the first ``head_dim_v`` lanes of ``k``.
        batches: One per level, most shared first, as ``split_prefixes`` cuts them; or one paged
            batch, cut where that pays. See ``plan_cascade``.
        causal: Whether the last level is causal; shared keys are seen by every query.
        softcap: c in ``c * tanh(s / c)``, or None.
        sm_scale: Factor on ``q . k``; None is ``1 / sqrt(D)``.
        head_dim_v: DV, if ``v`` is None.
        sinks: ``[H]`` float32, merged once at the end.
        k_scale: For fp8 caches: what a stored key is multiplied by; a number, or float32 ``[]``,
            ``[1]`` or ``[HK]``.
        v_scale: The same for values.
        backend: One name, one per level, or None.
        out: ``(o [T, H, DV], lse [T, H] float32)`` to write into.

    Returns:
        The state over all keys, ``o [T, H, DV]`` and ``lse [T, H]``.

    Raises:
        InvalidInputError: An input is malformed; the message names it.
    """
    if isinstance(batches, Batch):
        first, count = batches, 1
    else:
        _check_levels(batches, None)
        first, count = batches[0], len(batches)
    first_k, first_v = _per_level("k", k, count)[0], _per_level("v", v, count)[0]
    spec = spec_of(
        q,
        first_k,
        first_v,
        first.is_paged,
        head_dim_v=head_dim_v,
        causal=causal,
        softcap=softcap,
        sm_scale=sm_scale,
    )
    plan = plan_cascade(spec, batches, backend=backend)
    return plan.run(q, k, v, sinks=sinks, k_scale=k_scale, v_scale=v_scale, out=out)


def _check_levels(batches: Sequence[Batch], count: int | None) -> None:
    if not isinstance(batches, Sequence) or not all(isinstance(b, Batch) for b in batches):
        got = type(batches).__name__
        raise InvalidInputError.of("batches", got, "a Batch, or a list of one for each level")
    if not batches or (count is not None and len(batches) != count):
        want = "at least 1" if count is None else str(count)
        raise InvalidInputError.of("batches", f"{len(batches)} levels", f"{want}")
    for i, batch in enumerate(batches):
        if batch.q_lens is not None and batches[0].q_lens is not None:
            if batch.total_q != batches[0].total_q:
                allowed = f"{batches[0].total_q}, as batches[0]"
                raise InvalidInputError.of(f"batches[{i}].total_q", batch.total_q, allowed)


def _one_or(count: int) -> str:
    return "1, as there is one level" if count == 1 else f"1 or {count}, the levels"


def _per_level(name: str, value: Any, count: int) -> Sequence[Any]:
    if value is None or isinstance(value, torch.Tensor):
        return [value] * count
    if len(value) != count:
        raise InvalidInputError.of(name, f"{len(value)} tensors", _one_or(count))
    return list(value)


__all__ = ["CascadePlan", "cascade_attention", "level_specs", "plan_cascade"]
