"""Runs of a plan that are repeated with other tensors of the same layouts: once for every layer.

Within a step the layers of a model differ in addresses alone. A ``Repeat`` is a run that has been
checked and launched before: it recognises the layouts in one comparison, allocates the outputs and
hands their addresses to the driver. Whatever it does not recognise takes the ordinary way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .. import driver
from ..backend import RunExtras
from ..layouts import empty, guard
from ..output import AttentionOutput
from ..triton_compiled import is_hooked
from .call import Call
from .operands import TINY_SCALE

_ABSENT, _TENSOR, _NUMBER, _OTHER = range(4)
_new = tuple.__new__


def _never(*tensors: Any) -> bool:
    return False


class _Launch(NamedTuple):
    """A launch and how it takes addresses.

    Attributes:
        launch: Its first arguments change.
        ends: Whether it takes outputs, sinks and the scale of values alone, as ``Step`` says.
        own: Addresses of the plan's tensors, between those of the call; None of the
            warp-specialised prefill, which knows them and takes sinks alone of the options.
        maps: Gives the tensor maps of keys and values that it takes, by their addresses.
    """

    launch: Any
    ends: bool
    own: tuple[int, ...] | None
    maps: Callable[[int, int], tuple[Any, ...]] | None = None


class Repeat:
    """A run of known layouts; its tensors are not kept alive.

    Args:
        call: The launches of the plan for these layouts.
        launches: The same, ready for the driver.
        tensors: q, k, v or None, and o, lse if the caller gave them.
        extras: The optional inputs.
        out: Outputs as they were.
        given: Whether the caller gave them.
        spare: An address for absent options, which kernels never read.
    """

    def __init__(
        self, call: Call, launches: list[_Launch], tensors: tuple[Any, ...], extras: RunExtras,
        out: AttentionOutput, given: bool, spare: int,
    ) -> None:  # fmt: skip
        self._launches, self._given, self._spare = launches, given, spare
        self._index = out.o.device.index
        self._scale, self._softcap = call.scale, call.softcap
        starts = call.plan.mask_indptr
        self._mask_indptr = spare if starts is None else starts.data_ptr()
        _, k, v = tensors[:3]
        self._without_v = v is None
        self._shared = v is None or k.data_ptr() == v.data_ptr()
        self._kinds = kinds(extras)
        self._plain = not any(self._kinds)
        self.watch(tensors, extras)
        self._o, self._lse = ((tuple(x.shape), x.stride(), x.dtype) for x in out)

    def watch(self, tensors: tuple[Any, ...], extras: RunExtras) -> None:
        """Recognise tensors like these from now on: modes of torch, such as autocast, tell too.

        Args:
            tensors: q, k, v or None, and o, lse if the caller gave them.
            extras: The optional inputs.
        """
        held = [x for x in tensors if x is not None]
        self._fits = guard(*held, *[x for x in extras if isinstance(x, torch.Tensor)]) or _never

    def __call__(
        self, q: Any, k: Any, v: Any, extras: tuple[Any, ...], out: Any
    ) -> AttentionOutput | None:
        """Run on these tensors; None if they need the ordinary way.

        Args:
            q: Queries.
            k: Keys.
            v: Values, or None.
            extras: As ``RunExtras``; None stands for no option at all.
            out: Outputs, or None.
        """
        if (v is None) is not self._without_v or (extras is None) is not self._plain:
            return None
        tensors = (q, k) if v is None else (q, k, v)
        if out is not None:
            try:
                o, lse = out
            except (TypeError, ValueError):  # the checks will name it
                return None
            tensors = (*tensors, o, lse)
        if (out is not None) is not self._given:
            return None
        if extras is not None:
            if kinds(extras) != self._kinds:
                return None
            tensors = (*tensors, *[x for x in extras if isinstance(x, torch.Tensor)])
        index = self._index
        if not self._fits(*tensors) or driver.current_device() != index or is_hooked():
            return None
        if out is None:
            o, lse = empty(*self._o, index), empty(*self._lse, index)
        return _new(AttentionOutput, (o, lse)) if self.launch(q, k, v, extras, o, lse) else None

    def launch(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None,
        extras: tuple[Any, ...] | None, o: torch.Tensor, lse: torch.Tensor,
    ) -> bool:  # fmt: skip
        """Launch on tensors of these layouts, on the current device; False if an address is unfit.

        Args:
            q: Queries.
            k: Keys.
            v: Values, or None.
            extras: As ``RunExtras``; None stands for no option at all.
            o: Output to write.
            lse: LSE to write.
        """
        p_q, p_k, p_o, p_lse = q.data_ptr(), k.data_ptr(), o.data_ptr(), lse.data_ptr()
        p_v = p_k if v is None else v.data_ptr()
        if (p_q | p_k | p_v | p_o | p_lse) & 15 or (p_k == p_v) is not self._shared:
            return False
        stream = driver.current_stream(self._index)
        if extras is not None:
            return self._run_with(extras, stream, (p_q, p_k, p_v, p_o, p_lse))
        for launch, ends, _, maps in self._launches:
            if ends:
                launch(stream, p_o, p_lse)
            elif maps is not None:
                launch(stream, p_q, p_k, p_v, p_o, p_lse, *maps(p_k, p_v))
            else:
                launch(stream, p_q, p_k, p_v, p_o, p_lse)
        return True

    def _run_with(self, extras: tuple[Any, ...], stream: int, five: tuple[int, ...]) -> bool:
        """Launch with options; False if an address is unfit."""
        scale, v_factor, spare = self._scale, 1.0, self._spare
        sinks, slopes, mask, k_scale, v_scale = extras
        if type(k_scale) is float:
            scale, k_scale = max(scale * k_scale, TINY_SCALE), None
        if type(v_scale) is float:
            v_factor, v_scale = v_scale, None
        at = [spare if x is None else x.data_ptr() for x in (sinks, slopes, mask, k_scale, v_scale)]
        bits = 0
        for p in at:
            bits |= p
        if bits & 15:
            return False
        options = (*at[:3], self._mask_indptr, *at[3:])
        for launch, ends, own, maps in self._launches:
            if own is None:
                launch(stream, *five, at[0])
            elif ends:
                launch(stream, *five[3:], *own, at[0], at[4], v_factor)
            else:
                more = () if maps is None else maps(*five[1:3])
                launch(stream, *five, *more, *own, *options, scale, self._softcap, v_factor)
        return True


def repeat_of(
    call: Call, tensors: tuple[Any, ...], extras: RunExtras, out: AttentionOutput, given: bool
) -> Repeat | None:
    """A repeat of a call that has just been made; None if it cannot be told by addresses alone.

    Args:
        call: What was launched.
        tensors: q, k, v or None, and o, lse if the caller gave them.
        extras: The optional inputs.
        out: Outputs.
        given: Whether the caller gave them.
    """
    if call.bytes or not call.steps or _OTHER in kinds(extras):
        return None
    plain = all(x is None for x in extras)
    spare = next(x for x in call.steps[0].at if x is not None)
    starts = call.plan.mask_indptr
    mask_indptr = spare if starts is None else starts.data_ptr()
    launches = []
    for step in call.steps:
        if call.hopper is not None and step.launcher is call.prefill:
            kept = call.hopper.kept(tensors[0], call.plan.hopper_work, call.plan.batch.page_table)
            if kept is None:
                return None
            launches.append(_Launch(kept, False, None))
            continue
        form = step.launcher.form(call.key)
        if form is None:
            return None
        maps = None
        if step.ends:
            at: tuple[Any, ...] = (0, 0, *step.at, spare, spare)
            factors: tuple[float, ...] = (1.0,)
        else:
            own = step.at
            if step.maps is not None:
                step.maps.learn(form.compiled)
                k, v = tensors[1], tensors[1] if tensors[2] is None else tensors[2]
                own = (*step.maps.encoded(k.data_ptr(), v.data_ptr()), *own[2:])
                maps = step.maps.flat
            at = (0,) * 5 + own + (spare, spare, spare, mask_indptr, spare, spare)
            factors = (call.scale, call.softcap, 1.0)
        values = (*at, *factors, *step.numbers, *step.launcher.values)
        few = 2 if step.ends else 5 if maps is None else 7
        launch = form.launch(step.grid, values, few if plain else len(at) + len(factors))
        if launch is None:
            return None
        own = tuple([x for x in step.at if x is not None])
        launches.append(_Launch(launch, step.ends, own, maps))
    return Repeat(call, launches, tensors, extras, out, given, spare)


def kinds(extras: tuple[Any, ...]) -> tuple[int, ...]:
    """What each option is."""
    return tuple([_kind(x) for x in extras])


def _kind(x: Any) -> int:
    """What an option is: a number only if a run may pass it, else something for the checks."""
    if x is None:
        return _ABSENT
    if isinstance(x, torch.Tensor):
        return _TENSOR
    return _NUMBER if type(x) is float and 0.0 < x < 1e38 else _OTHER


__all__ = ["Repeat", "kinds", "repeat_of"]
