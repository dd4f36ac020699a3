"""Merging n states in one pass: from a checked call to a launch.

States come stacked, ``(o [n, T, H, DV], lse [n, T, H])``, or as a sequence of separate pairs. A
short sequence is read where it lies; a long one is stacked first, which the kernels' single pass
still repays. As for pairs, what layouts decide is decided once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ..errors import InvalidInputError
from ..layouts import layout
from ..output import AttentionOutput
from . import checks, dispatch, pair, torch_merge
from .dispatch import MergePath
from .kept import GIVEN, Calls, form_of

MAX_SEPARATE = 8  # states that kernels take as separate pointers

#: ``o`` and ``lse`` of all states: one stacked tensor each, or a tuple each.
Stack = "torch.Tensor | tuple[torch.Tensor, ...]"


class ManyPlan(NamedTuple):
    """What an n-way call with known layouts needs; see ``PairPlan``."""

    path: MergePath
    launch: Callable[..., Any] | None  # launch(os, lses, counts, out_o, out_lse)
    shape: torch.Size
    dtype: torch.dtype
    extents: tuple[int, ...]  # bytes spanned by every input in order, then by the outputs
    num_os: int  # how many of the inputs are outputs of states; they come first


_PLANS: dict[Any, ManyPlan] = {}
_CALLS = Calls()


def forget() -> None:
    """Drop all plans, so that the next call of each layout chooses and compiles again."""
    _PLANS.clear()
    _CALLS.forget()


def merge(states: Any, out: Any, path: str | None, counts: Any) -> AttentionOutput:
    """Merge any number of states. See ``merge_states``."""
    os, lses = split_states(states)
    if torch.compiler.is_compiling() or type(os[0]) is not torch.Tensor:
        from . import ops

        return ops.merge_many(os, lses, out, path, counts)
    if isinstance(os, tuple):
        check_separate_counts(counts)
        return merge_separate(os, lses, out, path)
    return merge_eager(os, lses, out, path, counts)


def merge_separate(os: Any, lses: Any, out: Any, path: str | None) -> AttentionOutput:
    """Merge separate states on real tensors; two of them are a pair."""
    if len(os) == 2:
        return pair.merge(os[0], lses[0], os[1], lses[1], out, path, None, None, from_op=True)
    return merge_eager(os, lses, out, path, None)


def check_separate_counts(counts: Any) -> None:
    """Raise InvalidInputError if ``counts`` comes with separate states."""
    if counts is not None:
        fix = "stack the states: (o [n, T, H, DV], lse [n, T, H])"
        raise InvalidInputError.of("counts", "given", "None for separate states", fix)


def split_states(states: Any) -> tuple[Any, Any]:
    """Outputs and LSEs of ``states``: two stacked tensors, or two tuples of equal length.

    Raises:
        InvalidInputError: ``states`` is neither form, or holds no state.
    """
    allowed = "a sequence of (o [T, H, DV], lse [T, H]), or one (o [n, T, H, DV], lse [n, T, H])"
    if not isinstance(states, (tuple, list)):
        raise InvalidInputError.of("states", type(states).__name__, allowed)
    if len(states) == 2 and all(isinstance(x, torch.Tensor) for x in states):
        os, lses = states
        if os.dim() != 4:
            raise InvalidInputError.of("states[0].shape", list(os.shape), "[n, T, H, DV]")
        if not os.shape[0]:
            raise InvalidInputError.of("states", "0 states", "at least 1")
        return os, lses
    if not states:
        raise InvalidInputError.of("states", "0 states", "at least 1")
    for i, state in enumerate(states):
        if not isinstance(state, (tuple, list)) or len(state) != 2:
            raise InvalidInputError.of(f"states[{i}]", type(state).__name__, "a pair (o, lse)")
    return tuple(o for o, _ in states), tuple(lse for _, lse in states)


def merge_eager(os: Any, lses: Any, out: Any, path: str | None, counts: Any) -> AttentionOutput:
    """``merge`` on real tensors, without the dispatcher."""
    if path is None:
        path = dispatch.asked_path()
    stacked = isinstance(os, torch.Tensor)
    inputs = (os, lses) if stacked else (*os, *lses)
    if counts is not None:
        inputs = (*inputs, counts)
    try:
        name = os.shape if stacked else (len(os), os[0].shape)
        name = (name, counts is None)
        done = _repeat(name, path, inputs, out)
        if done is not None:
            return done
        key, pointers = _key(os, lses, out, counts)
        key = (key, pointers & 15, path)
        plan = _PLANS.get(key)
    except (AttributeError, TypeError, ValueError):  # something is no tensor: the checks name it
        plan = key = None
    if plan is None or (torch.is_grad_enabled() and _requires_grad(os, lses, out)):
        plan = _make_plan(os, lses, out, path, counts)
        if len(_PLANS) >= pair.MAX_PLANS:
            _PLANS.clear()
        if key is not None:
            _PLANS[key] = plan
    if out is None:
        o = torch.empty(plan.shape, dtype=plan.dtype, device=os[0].device)
        lse = torch.empty(plan.shape[:2], dtype=torch.float32, device=os[0].device)
    else:
        o, lse = out
        if _settle(plan, [x.data_ptr() for x in (*inputs, o, lse)]) is None:
            _check_overlap(os, lses, o, lse)
    if plan.launch is not None:
        plan.launch(os, lses, None if counts is None else counts.contiguous(), o, lse)
        if counts is None or counts.is_contiguous():
            _CALLS.keep(
                name, path, plan.path.path, plan.launch, inputs, out,
                partial(_settle, plan), pair.fresh(plan.shape, plan.dtype, os[0].device.index),
            )  # fmt: skip
    return AttentionOutput(o, lse)


def _repeat(
    name: Any, path: str | None, inputs: tuple[torch.Tensor, ...], out: Any
) -> AttentionOutput | None:
    """Repeat a kept call with these tensors; None if there is none like it."""
    form = form_of(out, inputs)
    tensors = (*inputs, *out) if form == GIVEN else inputs
    for call in _CALLS.known[form].get(name, ()):
        if call.asked == path and call.fits(*tensors):
            o, lse = call.fresh() if out is None else out
            if call.run(*[x.data_ptr() for x in inputs], o.data_ptr(), lse.data_ptr()):
                return AttentionOutput(o, lse)
    return None


def _settle(plan: ManyPlan, place: Sequence[int]) -> bool | None:
    """False if outputs are clear of inputs and of each other, and all outputs are whole vectors.

    None asks for a closer look: merging in place is among that.
    """
    o, lse = place[-2:]
    end_o, end_lse = o + plan.extents[-2], lse + plan.extents[-1]
    bits = o
    for p in place[: plan.num_os]:
        bits |= p
    if bits & 15 or not (end_o <= lse or end_lse <= o):
        return None
    for p, size in zip(place[:-2], plan.extents):
        if (p < end_o and o < p + size) or (p < end_lse and lse < p + size):
            return None
    return False


def check_many(os: Any, lses: Any, out: Any, counts: Any) -> None:
    """Raise InvalidInputError unless the layouts of an n-way merge fit together."""
    if isinstance(os, tuple):
        checks.check_states([(f"[{i}]", o, lse) for i, (o, lse) in enumerate(zip(os, lses))])
    else:
        checks.check_states([("", os, lses)], rank=4)
    shape = os[0].shape
    if counts is not None:
        checks.check_counts(counts, shape[0], os[0].device)
    if out is not None:
        checks.check_out(out, os[0], shape, False)


def _make_plan(os: Any, lses: Any, out: Any, path: str | None, counts: Any) -> ManyPlan:
    check_many(os, lses, out, counts)
    first = os[0]
    out_o, out_lse = (None, None) if out is None else out
    dtype = first.dtype if out_o is None else out_o.dtype
    flat = [*os, *lses] if isinstance(os, tuple) else [os, lses]
    contiguous = pair.are_contiguous(*flat, out_o, out_lse) and counts is None
    choice = dispatch.choose(pair.facts(_named(os), out_o, dtype, len(os), contiguous), path)
    launch: Callable[..., None] | None = None
    if first.shape[0] and first.shape[1]:
        launch = _launcher(choice.path, os, lses, counts, out_o, out_lse, dtype)
    separate = isinstance(os, tuple)
    flat = [*(os if separate else (os,)), *(lses if separate else (lses,))]
    flat += [] if counts is None else [counts]
    extents = [
        checks.extent(x) if x is not None and x.numel() else 0 for x in (*flat, out_o, out_lse)
    ]
    return ManyPlan(choice, launch, first.shape, dtype, tuple(extents), len(os) if separate else 1)


def _launcher(
    path: str, os: Any, lses: Any, counts: Any, out_o: Any, out_lse: Any, dtype: torch.dtype
) -> Callable[..., None]:
    if path == "torch":
        return torch_merge.merge_many
    rest: tuple[Any, ...] = (counts, out_o, out_lse, dtype)
    if path == "triton":
        from . import triton_merge as module

        rest = (*rest, pair.is_aligned(_named(os), out_o))
    else:
        from . import cuda_merge as module  # type: ignore[no-redef]
    if isinstance(os, torch.Tensor):
        return module.prepare_stacked(os, lses, *rest)
    if len(os) <= MAX_SEPARATE and _same_layouts(os) and _same_layouts(lses):
        return module.prepare_separate(os, lses, *rest)
    stacked = module.prepare_stacked(torch.stack(os), torch.stack(lses), *rest)

    def launch(os: Any, lses: Any, counts: Any, o: Any, lse: Any) -> None:
        stacked(torch.stack(os), torch.stack(lses), counts, o, lse)

    return launch


def _named(os: Any) -> list[tuple[str, torch.Tensor]]:
    if isinstance(os, torch.Tensor):
        return [("o", os)]
    return [(f"o[{i}]", o) for i, o in enumerate(os)]


def _same_layouts(tensors: Sequence[torch.Tensor]) -> bool:
    return all(x.stride() == tensors[0].stride() for x in tensors[1:])


def _key(os: Any, lses: Any, out: Any, counts: Any) -> tuple[Any, int]:
    if isinstance(os, torch.Tensor):
        key: Any = (layout(os), layout(lses), None if counts is None else layout(counts))
        pointers = os.data_ptr()
    else:
        key = (tuple(map(layout, os)), tuple(map(layout, lses)), counts is None)
        pointers = 0
        for o in os:
            pointers |= o.data_ptr()
    if out is not None:
        out_o, out_lse = out
        key = (key, layout(out_o), layout(out_lse))
        pointers |= out_o.data_ptr()
    return key, pointers


def _requires_grad(os: Any, lses: Any, out: Any) -> bool:
    groups = ((x,) if isinstance(x, torch.Tensor) else x for x in (os, lses, out or ()))
    return any(x.requires_grad for group in groups for x in group)


def _check_overlap(os: Any, lses: Any, o: torch.Tensor, lse: torch.Tensor) -> None:
    """Outputs may be one of the states exactly, whether separate or a slice of the stack."""
    outputs = (("out.o", o), ("out.lse", lse))
    named = [("o", os), ("lse", lses)]
    if isinstance(os, tuple) or any(checks.ranges_meet(x, y) for _, x in outputs for _, y in named):
        named = [(f"o[{i}]", x) for i, x in enumerate(os)]
        named += [(f"lse[{i}]", x) for i, x in enumerate(lses)]
    checks.check_overlap(outputs, named)


__all__ = ["ManyPlan", "check_many", "merge", "merge_eager", "split_states"]
