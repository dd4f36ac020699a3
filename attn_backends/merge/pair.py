"""Merging two states: from a checked call to a launch.

Everything that depends on layouts alone (shapes, strides, dtypes, devices) is checked and decided
once and kept as a plan; a call with known layouts costs a dictionary look-up, an overlap check of
the outputs and the launch. Serving engines merge the same layouts in every layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..errors import InvalidInputError
from ..output import AttentionOutput
from . import checks, dispatch, torch_merge
from .dispatch import MergePath

MAX_PLANS = 4096  # token counts vary from step to step: forget all rather than grow

#: ``launch(o_a, lse_a, o_b, lse_b, out_o, out_lse, num_prefix, scale)``; o_b None means zeros.
Launch = Callable[..., None]


class PairPlan(NamedTuple):
    """What a call with known layouts needs.

    Attributes:
        path: The path taken and why.
        launch: Runs it.
        shape: ``[T, H, DV]`` of the result.
        dtype: Of the result's ``o``.
        extents: Bytes spanned by o_a, lse_a, o_b, lse_b, out.o, out.lse.
        same_layout: Whether out.o is laid out as o_a, o_b, and out.lse as lse_a, lse_b.
    """

    path: MergePath
    launch: Launch | None
    shape: torch.Size
    dtype: torch.dtype
    extents: tuple[int, ...]
    same_layout: tuple[bool, bool, bool, bool]


_PLANS: dict[Any, PairPlan] = {}


def merge(
    o_a: torch.Tensor,
    lse_a: torch.Tensor,
    o_b: torch.Tensor | None,
    lse_b: torch.Tensor,
    out: Any,
    path: str | None,
    num_prefix: int | None,
    scale: float | torch.Tensor | None,
) -> AttentionOutput:
    """Merge two states; ``o_b`` None is an output of zeros. See ``merge_state``."""
    if torch.compiler.is_compiling() or type(o_a) is not torch.Tensor:
        from . import ops

        return ops.merge_pair(o_a, lse_a, o_b, lse_b, out, path, num_prefix, scale)
    return merge_eager(o_a, lse_a, o_b, lse_b, out, path, num_prefix, scale)


def merge_eager(
    o_a: torch.Tensor,
    lse_a: torch.Tensor,
    o_b: torch.Tensor | None,
    lse_b: torch.Tensor,
    out: Any,
    path: str | None,
    num_prefix: int | None,
    scale: float | torch.Tensor | None,
) -> AttentionOutput:
    """``merge`` on real tensors, without the dispatcher."""
    if path is None:
        path = dispatch.asked_path()
    try:
        key: Any = (layout(o_a), layout(lse_a), o_b is None or layout(o_b), layout(lse_b), path)
        pointers = o_a.data_ptr() | (0 if o_b is None else o_b.data_ptr())
        if out is not None:
            out_o, out_lse = out
            key = (*key, layout(out_o), layout(out_lse))
            pointers |= out_o.data_ptr()
        key = (*key, pointers & 15, scale is not None)
        plan = _PLANS.get(key)
    except (AttributeError, TypeError, ValueError):  # something is no tensor: the checks name it
        plan = key = None
    if plan is None or torch.is_grad_enabled():
        plan = _checked_plan(plan, key, o_a, lse_a, o_b, lse_b, out, path, scale)
    if num_prefix is not None:
        checks.check_num_prefix(num_prefix, plan.shape[0])
    if scale is not None:
        checks.check_scale(scale, o_a.device)
    if out is None:
        o = torch.empty(plan.shape, dtype=plan.dtype, device=o_a.device)
        lse = torch.empty(plan.shape[:2], dtype=torch.float32, device=o_a.device)
    else:
        o, lse = out
        if not _clearly_apart(plan, o_a, lse_a, o_b, lse_b, o, lse):
            checks.check_overlap(
                (("out.o", o), ("out.lse", lse)), _named_inputs(o_a, lse_a, o_b, lse_b)
            )
    if plan.launch is not None:
        prefix = -1 if num_prefix is None else num_prefix
        plan.launch(o_a, lse_a, o_b, lse_b, o, lse, prefix, scale)
    return AttentionOutput(o, lse)


def apply_sinks(state: Any, sinks: Any, out: Any) -> AttentionOutput:
    """Merge the state ``(0, sinks)`` into ``state``. See the public ``apply_sinks``."""
    if not isinstance(state, (tuple, list)) or len(state) != 2:
        raise InvalidInputError.of("state", type(state).__name__, "(o, lse), both tensors")
    o, lse = state
    if not isinstance(lse, torch.Tensor) or lse.dim() != 2:
        got = list(lse.shape) if isinstance(lse, torch.Tensor) else type(lse).__name__
        raise InvalidInputError.of("lse", got, "a tensor [T, H]")
    heads = lse.shape[1]
    if not isinstance(sinks, torch.Tensor) or tuple(sinks.shape) != (heads,):
        got = list(sinks.shape) if isinstance(sinks, torch.Tensor) else type(sinks).__name__
        raise InvalidInputError.of("sinks", got, f"a float32 tensor [H={heads}]")
    return merge(o, lse, None, sinks.expand(lse.shape), out, None, None, None)


def choose_path(o_a: Any, o_b: Any, out: Any, path: str | None) -> MergePath:
    """See ``choose_merge_path``."""
    named = [("o_a", o_a)] + ([] if o_b is None else [("o_b", o_b)])
    for name, o in named:
        if not isinstance(o, torch.Tensor):
            raise InvalidInputError.of(name, type(o).__name__, "a torch.Tensor")
    out_o = None if out is None else out[0]
    return dispatch.choose(facts(named, out_o, out_o.dtype if out is not None else o_a.dtype), path)


def layout(x: torch.Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.device


def _named_inputs(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any) -> list[tuple[str, torch.Tensor]]:
    sides = [("o_a", o_a), ("lse_a", lse_a), ("o_b", o_b), ("lse_b", lse_b)]
    return [(name, x) for name, x in sides if x is not None]


def _checked_plan(
    plan: PairPlan | None,
    key: Any,
    o_a: Any,
    lse_a: Any,
    o_b: Any,
    lse_b: Any,
    out: Any,
    path: str | None,
    scale: Any,
) -> PairPlan:
    """Check everything that layouts decide, and gradients, which are no part of a layout."""
    if plan is not None:
        outputs = () if out is None else tuple(out)
        tensors = (o_a, lse_a, o_b, lse_b, *outputs)
        if not any(x is not None and x.requires_grad for x in tensors):
            return plan
    check_pair(o_a, lse_a, o_b, lse_b, out, scale)
    dtype = result_dtype(o_a, out, scale)
    out_o, out_lse = (None, None) if out is None else out
    named = [("o_a", o_a)] + ([] if o_b is None else [("o_b", o_b)])
    choice = dispatch.choose(facts(named, out_o, dtype), path)
    launch = None
    if o_a.shape[0] and o_a.shape[1]:
        layouts = (o_a, lse_a, o_b, lse_b, out_o, out_lse)
        launch = _launcher(choice.path, layouts, dtype, named)
    plan = PairPlan(
        path=choice,
        launch=launch,
        shape=o_a.shape,
        dtype=dtype,
        extents=_extents(o_a, lse_a, o_b, lse_b, out_o, out_lse),
        same_layout=_same_layouts(o_a, lse_a, o_b, lse_b, out_o, out_lse),
    )
    if len(_PLANS) >= MAX_PLANS:
        _PLANS.clear()
    if key is not None:
        _PLANS[key] = plan
    return plan


def check_pair(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any, out: Any, scale: Any) -> None:
    """Raise InvalidInputError unless the layouts of a two-way merge fit together."""
    sides = [("_a", o_a, lse_a)]
    if o_b is not None:
        sides.append(("_b", o_b, lse_b))
    checks.check_states(sides)
    if o_b is None:
        checks.check_lse("sinks", lse_b, o_a.shape[:2], o_a.device, "the state")
    if scale is not None:
        checks.check_scale(scale, o_a.device)
        if o_a.dtype == torch.float64:
            allowed = "float32, float16, bfloat16 with output_scale"
            raise InvalidInputError.of("o_a.dtype", o_a.dtype, allowed)
    if out is not None:
        checks.check_out(out, o_a, o_a.shape, scale is not None)


def result_dtype(o: torch.Tensor, out: Any, scale: Any) -> torch.dtype:
    """Dtype of the result's ``o``."""
    if out is not None:
        return out[0].dtype
    return o.dtype if scale is None else torch.float8_e4m3fn


def facts(named: Any, out_o: Any, out_dtype: torch.dtype) -> dispatch.MergeFacts:
    o = named[0][1]
    tensors = named if out_o is None else [*named, ("out.o", out_o)]
    fault = None
    if o.device.type == "cuda" and o.dtype in dispatch.KERNEL_DTYPES:
        fault = dispatch.vector_fault(tensors, o.dtype)
    rows = o.shape[-3] * o.shape[-2]
    return dispatch.MergeFacts(o.device, o.dtype, out_dtype, rows, o.shape[-1], fault)


def _launcher(path: str, layouts: Any, dtype: torch.dtype, named: Any) -> Launch:
    if path == "torch":
        return torch_merge.merge_pair
    if path == "triton":
        from . import triton_merge

        return triton_merge.prepare_pair(*layouts, dtype, is_aligned(named, layouts[-2]))
    from . import cuda_merge

    return cuda_merge.prepare_pair(*layouts, dtype)


def is_aligned(named: Any, out_o: torch.Tensor | None) -> bool:
    """Whether rows, strides and pointers of all outputs are whole 16-byte vectors."""
    o = named[0][1]
    outputs = [x for _, x in named] + ([] if out_o is None else [out_o])
    if o.shape[-1] % dispatch.vector_elements(o.dtype) or any(x.data_ptr() % 16 for x in outputs):
        return False
    return dispatch.vector_fault([("o", x) for x in outputs], o.dtype) is None


def _extents(*tensors: torch.Tensor | None) -> tuple[int, ...]:
    return tuple(0 if x is None or not x.numel() else checks.extent(x) for x in tensors)


def _same_layouts(
    o_a: Any, lse_a: Any, o_b: Any, lse_b: Any, out_o: Any, out_lse: Any
) -> tuple[bool, bool, bool, bool]:
    if out_o is None:
        return (False,) * 4
    pairs = ((o_a, out_o), (lse_a, out_lse), (o_b, out_o), (lse_b, out_lse))
    return tuple(x is not None and layout(x) == layout(y) for x, y in pairs)  # type: ignore


def _clearly_apart(
    plan: PairPlan, o_a: Any, lse_a: Any, o_b: Any, lse_b: Any, o: Any, lse: Any
) -> bool:
    """Whether each output is an input exactly or clear of its byte range; cheap."""
    start_o, start_lse = o.data_ptr(), lse.data_ptr()
    size_o, size_lse = plan.extents[4], plan.extents[5]
    end_o, end_lse = start_o + size_o, start_lse + size_lse
    same = plan.same_layout
    for i, x in enumerate((o_a, lse_a, o_b, lse_b)):
        if x is None:
            continue
        start = x.data_ptr()
        end = start + plan.extents[i]
        if start < end_o and start_o < end and not (i % 2 == 0 and same[i] and start == start_o):
            return False
        if start < end_lse and start_lse < end and not (i % 2 and same[i] and start == start_lse):
            return False
    return not (start_o < end_lse and start_lse < end_o)


__all__ = ["PairPlan", "apply_sinks", "check_pair", "choose_path", "merge", "merge_eager"]
