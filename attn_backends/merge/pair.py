"""Merging two states: from a checked call to a launch.

Everything that depends on layouts alone (shapes, strides, dtypes, devices) is checked and decided
once and kept as a plan. Plain merges (every token has a prefix, no scale) that a kernel does are
kept a second time, as calls to be repeated: see ``kept``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from .. import driver
from ..driver import Filled
from ..errors import InvalidInputError
from ..layouts import empty, layout
from ..output import AttentionOutput
from . import checks, dispatch, torch_merge
from .dispatch import MergePath, asked_path
from .kept import FRESH, GIVEN, OWN, UNSEEN, Calls

MAX_PLANS = 4096  # token counts vary from step to step: forget all rather than grow


class PairPlan(NamedTuple):
    """What a call with known layouts needs.

    Attributes:
        path: The path taken and why.
        launch: ``launch(*six, num_prefix, scale, in_place)``, where six are o_a, lse_a, o_b,
            lse_b, out.o, out.lse as addresses or tensors; None if there is nothing to do.
        by_address: Whether ``launch`` takes addresses.
        shape: ``[T, H, DV]`` of the result.
        dtype: Of the result's ``o``.
        extents: Bytes spanned by the six.
        same_layout: Whether out.o is laid out as o_a and o_b, and out.lse as lse_a and lse_b.
    """

    path: MergePath
    launch: Callable[..., None] | None
    by_address: bool
    shape: torch.Size
    dtype: torch.dtype
    extents: tuple[int, int, int, int, int, int]
    same_layout: tuple[bool, bool, bool, bool]


_PLANS: dict[Any, PairPlan] = {}
_CALLS = Calls()
_KNOWN = _CALLS.known
_is_traced = torch.compiler.is_dynamo_compiling  # other tracers show by the type of their tensors
_Tensor = torch.Tensor
_new = tuple.__new__


def forget() -> None:
    """Drop all plans, so that the next call of each layout chooses and compiles again."""
    _PLANS.clear()
    _CALLS.forget()


def merge(
    o_a: torch.Tensor,
    lse_a: torch.Tensor,
    o_b: torch.Tensor | None,
    lse_b: torch.Tensor,
    out: Any,
    path: str | None,
    num_prefix: int | None,
    scale: float | torch.Tensor | None,
    from_op: bool = False,
) -> AttentionOutput:
    """Merge two states. See ``merge_state``.

    Args:
        o_a: First output.
        lse_a: Its LSE.
        o_b: Second output; None is an output of zeros.
        lse_b: Its LSE.
        out: Pair to write, or None.
        path: Path asked for, or None.
        num_prefix: Tokens that have the first state, or None for all.
        scale: Divisor of a float8 result, or None.
        from_op: Called by the registered operator, whatever the tensors' types.
    """
    if (_is_traced() or type(o_a) is not _Tensor) and not from_op:
        from . import ops

        return ops.merge_pair(o_a, lse_a, o_b, lse_b, out, path, num_prefix, scale)
    if path is None:
        path = asked_path()
    plain = num_prefix is None and scale is None and o_b is not None
    if plain:
        try:
            done = _repeat(o_a, lse_a, o_b, lse_b, out, path)
        except (AttributeError, TypeError, ValueError):  # something is no tensor
            done = None
        if done is not None:
            return done
    key: Any
    p_a = l_a = p_b = l_b = p_o = l_o = 0
    try:
        p_a, l_a, l_b = o_a.data_ptr(), lse_a.data_ptr(), lse_b.data_ptr()
        key = (layout(o_a), layout(lse_a), layout(lse_b), path, scale is None)
        if o_b is not None:
            p_b = o_b.data_ptr()
            key += (layout(o_b),)
        if out is not None:
            o, lse = out
            p_o, l_o = o.data_ptr(), lse.data_ptr()
            key += (None, layout(o), layout(lse))
        key += ((p_a | p_b | p_o) & 15,)
        plan = _PLANS.get(key)
    except (AttributeError, TypeError, ValueError):  # something is no tensor: the checks name it
        plan = key = None
    if plan is None or (torch.is_grad_enabled() and _needs_grad(o_a, lse_a, o_b, lse_b, out)):
        plan = _make_plan(key, o_a, lse_a, o_b, lse_b, out, path, scale)
    if scale is not None:
        checks.check_scale(scale, o_a.device)
    prefix = -1
    if num_prefix is not None:
        checks.check_num_prefix(num_prefix, plan.shape[0])
        prefix = int(num_prefix)
    in_place = False
    if out is None:
        o = torch.empty(plan.shape, dtype=plan.dtype, device=o_a.device)
        lse = torch.empty(plan.shape[:2], dtype=torch.float32, device=o_a.device)
        p_o, l_o = o.data_ptr(), lse.data_ptr()
    else:
        in_place = p_o == p_a or p_o == p_b or l_o == l_a or l_o == l_b
        if not _clearly_apart(plan, p_a, l_a, p_b, l_b, p_o, l_o):
            inputs = _named_inputs(o_a, lse_a, o_b, lse_b)
            checks.check_overlap((("out.o", o), ("out.lse", lse)), inputs)
    if plan.launch is None:
        pass
    elif plan.by_address:
        plan.launch(p_a, l_a, p_b, l_b, p_o, l_o, prefix, scale, in_place)
        if plain:
            _CALLS.keep(
                o_a.shape, path, plan.path.path, plan.launch, (o_a, lse_a, o_b, lse_b), out,
                partial(_settle, plan), fresh(plan.shape, plan.dtype, o_a.device.index),
            )  # fmt: skip
    else:
        plan.launch(o_a, lse_a, o_b, lse_b, o, lse, prefix, scale, in_place)
    return AttentionOutput(o, lse)


def _settle(plan: PairPlan, place: tuple[int, ...]) -> bool | None:
    """Whether an output is an input, for kept calls; None if vectors or overlaps stand against."""
    p_a, l_a, p_b, l_b, p_o, l_o = place
    if (p_a | p_b | p_o) & 15 or not _clearly_apart(plan, *place):
        return None
    return p_o == p_a or p_o == p_b or l_o == l_a or l_o == l_b


def _repeat(
    o_a: Any, lse_a: Any, o_b: Any, lse_b: Any, out: Any, path: str | None
) -> AttentionOutput | None:
    """Repeat a kept call with these tensors; None if there is none like it.

    Written out in one function, as ``Call.run`` over no list of tensors: a third off its time.
    """
    o: Any = None
    lse: Any = None
    form = FRESH
    if out is not None:
        o, lse = out
        form = OWN if o is o_a and lse is lse_a else GIVEN
    for call in _KNOWN[form].get(o_a.shape, ()):
        if call.asked != path:
            continue
        if form == GIVEN:
            if not call.fits(o_a, lse_a, o_b, lse_b, o, lse):
                continue
        elif not call.fits(o_a, lse_a, o_b, lse_b):
            continue
        index = call.index
        if driver.current_device() != index or (call.hooked is not None and call.hooked()):
            return None
        if form == FRESH:
            o, lse = call.fresh()
        place = (
            driver.current_stream(index),
            (
                o_a.data_ptr(), lse_a.data_ptr(), o_b.data_ptr(), lse_b.data_ptr(),
                o.data_ptr(), lse.data_ptr(),
            ),
        )  # fmt: skip
        known = call.places.get(place, UNSEEN)
        if type(known) is Filled:
            code = known.call(*known.args)
            if code:
                driver.retry(code, known.args)
        elif not call.settle(place, known):
            continue
        return _new(AttentionOutput, (o, lse))
    return None


def fresh(
    shape: torch.Size, dtype: torch.dtype, index: int | None
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """A function that makes outputs ``[T, H, DV]`` and ``[T, H]``, for kept calls."""
    tokens, heads, dim = shape
    o_size, o_stride = (tokens, heads, dim), (heads * dim, dim, 1)
    lse_size, lse_stride, fp32 = (tokens, heads), (heads, 1), torch.float32

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        return empty(o_size, o_stride, dtype, index), empty(lse_size, lse_stride, fp32, index)

    return make


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
    dtype = o_a.dtype if out_o is None else out_o.dtype
    states = o_a.shape[0] if o_a.dim() == 4 else 2
    contiguous = are_contiguous(out_o, *[o for _, o in named])
    return dispatch.choose(facts(named, out_o, dtype, states, contiguous), path)


def _named_inputs(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any) -> list[tuple[str, torch.Tensor]]:
    sides = [("o_a", o_a), ("lse_a", lse_a), ("o_b", o_b), ("lse_b", lse_b)]
    return [(name, x) for name, x in sides if x is not None]


def _needs_grad(*tensors: Any) -> bool:
    flat = (*tensors[:4], *(tensors[4] or ()))
    return any(x is not None and x.requires_grad for x in flat)


def _make_plan(
    key: Any, o_a: Any, lse_a: Any, o_b: Any, lse_b: Any, out: Any, path: str | None, scale: Any
) -> PairPlan:
    """Check everything that layouts decide (and gradients), and prepare the launch."""
    check_pair(o_a, lse_a, o_b, lse_b, out, scale)
    dtype = result_dtype(o_a, out, scale)
    out_o, out_lse = (None, None) if out is None else out
    named = [("o_a", o_a)] + ([] if o_b is None else [("o_b", o_b)])
    six = (o_a, lse_a, o_b, lse_b, out_o, out_lse)
    choice = dispatch.choose(facts(named, out_o, dtype, 2, are_contiguous(*six)), path)
    launch = None
    if o_a.shape[0] and o_a.shape[1]:
        launch = _launcher(choice.path, six, dtype, named)
    plan = PairPlan(
        path=choice,
        launch=launch,
        by_address=choice.path == "cuda" or (choice.path == "triton" and o_a.is_cuda),
        shape=o_a.shape,
        dtype=dtype,
        extents=tuple(0 if x is None or not x.numel() else checks.extent(x) for x in six),  # type: ignore[arg-type]
        same_layout=_same_layouts(*six),
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


def result_dtype(o: torch.Tensor, out: Any, scale: Any) -> Any:
    """Dtype of the result's ``o``."""
    if out is not None:
        return out[0].dtype
    return o.dtype if scale is None else torch.float8_e4m3fn


def are_contiguous(*tensors: Any) -> bool:
    """Whether all tensors are; None is."""
    return all(x is None or x.is_contiguous() for x in tensors)


def facts(
    named: Any, out_o: Any, out_dtype: torch.dtype, states: int, contiguous: bool
) -> dispatch.MergeFacts:
    o = named[0][1]
    tensors = named if out_o is None else [*named, ("out.o", out_o)]
    fault = None
    if o.device.type == "cuda" and o.dtype in dispatch.KERNEL_DTYPES:
        fault = dispatch.vector_fault(tensors, o.dtype)
    rows = o.shape[-3] * o.shape[-2]
    return dispatch.MergeFacts(
        o.device, o.dtype, out_dtype, rows, o.shape[-1], fault, states, contiguous
    )


def _launcher(path: str, six: Any, dtype: torch.dtype, named: Any) -> Callable[..., None]:
    if path == "torch":
        return torch_merge.merge_pair
    if path == "triton":
        from . import triton_merge

        prepare: Any = triton_merge.prepare_pair
        return prepare(*six, dtype, is_aligned(named, six[-2]))
    from . import cuda_merge

    prepare = cuda_merge.prepare_pair
    return prepare(*six, dtype)


def is_aligned(named: Any, out_o: torch.Tensor | None) -> bool:
    """Whether rows, strides and pointers of all outputs are whole 16-byte vectors."""
    o = named[0][1]
    outputs = [x for _, x in named] + ([] if out_o is None else [out_o])
    if o.shape[-1] % dispatch.vector_elements(o.dtype) or any(x.data_ptr() % 16 for x in outputs):
        return False
    return dispatch.vector_fault([("o", x) for x in outputs], o.dtype) is None


def _same_layouts(
    o_a: Any, lse_a: Any, o_b: Any, lse_b: Any, out_o: Any, out_lse: Any
) -> tuple[bool, bool, bool, bool]:
    if out_o is None:
        return (False,) * 4
    pairs = ((o_a, out_o), (lse_a, out_lse), (o_b, out_o), (lse_b, out_lse))
    return tuple(x is not None and layout(x) == layout(y) for x, y in pairs)  # type: ignore


def _clearly_apart(
    plan: PairPlan, p_a: int, l_a: int, p_b: int, l_b: int, p_o: int, l_o: int
) -> bool:
    """Whether each output is one input exactly, or its byte range is clear of all others."""
    size_p_a, size_l_a, size_p_b, size_l_b, size_o, size_lse = plan.extents
    end_o, end_lse = p_o + size_o, l_o + size_lse
    o_as_a, lse_as_a, o_as_b, lse_as_b = plan.same_layout
    if p_a < end_o and p_o < p_a + size_p_a and not (o_as_a and p_a == p_o):
        return False
    if p_b < end_o and p_o < p_b + size_p_b and not (o_as_b and p_b == p_o):
        return False
    if l_a < end_lse and l_o < l_a + size_l_a and not (lse_as_a and l_a == l_o):
        return False
    if l_b < end_lse and l_o < l_b + size_l_b and not (lse_as_b and l_b == l_o):
        return False
    if (l_a < end_o and p_o < l_a + size_l_a) or (l_b < end_o and p_o < l_b + size_l_b):
        return False
    if (p_a < end_lse and l_o < p_a + size_p_a) or (p_b < end_lse and l_o < p_b + size_p_b):
        return False
    return end_o <= l_o or end_lse <= p_o


__all__ = ["PairPlan", "apply_sinks", "check_pair", "choose_path", "merge"]
