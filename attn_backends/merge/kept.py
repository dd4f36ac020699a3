"""Merges kept to be repeated: known layouts, a known path, a kernel ready to be launched.

Serving engines merge the same layouts in every layer and step. A kept call recognises its layouts
in one comparison, remembers which addresses were found not to overlap, and passes addresses to the
driver: less time than the launch takes by itself. Whatever it does not recognise takes the ordinary
way, which checks, chooses and prepares.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import driver
from ..layouts import guard
from ..output import AttentionOutput

MAX_SHAPES = 1024  # token counts vary from step to step: forget all rather than grow
MAX_ALIKE = 4  # kept calls of one shape: other strides, dtypes, paths, modes of torch
MAX_PLACES = 64  # addresses whose overlap is remembered per kept call

Settle = Callable[[tuple[int, ...]], "bool | None"]
Fresh = Callable[[tuple[Any, ...]], tuple[torch.Tensor, torch.Tensor]]

_new = tuple.__new__


class Call:
    """A merge of known layouts on a GPU.

    Args:
        fits: Tells whether tensors are laid out as those of this call.
        asked: The path that was asked for.
        path: The path it takes.
        index: Device.
        launch: The prepared merge, with its ``ready`` launches.
        settle: ``settle(addresses)`` tells whether an output is an input; None if the addresses
            are unfit for the kernel or need a closer look.
        fresh: ``fresh(inputs)`` makes outputs.
    """

    __slots__ = ("_hooked", "_index", "_pack", "_places", "_ready", "_settle", "asked", "fits",
                 "fresh", "launch")  # fmt: skip

    def __init__(
        self, fits: Callable[..., bool], asked: str | None, path: str, index: int, launch: Any,
        settle: Settle, fresh: Fresh,
    ) -> None:  # fmt: skip
        self.fits, self.asked, self.launch, self.fresh = fits, asked, launch, fresh
        self._index, self._ready, self._settle = index, launch.ready, settle
        self._pack = getattr(launch, "pack", None)
        self._places: dict[tuple[int, ...], bool | None] = {}
        self._hooked: Any = None
        if path == "triton":  # profilers ask Triton, which does not see launches of the driver
            from ..triton_compiled import is_hooked

            self._hooked = is_hooked

    def __call__(self, tensors: tuple[torch.Tensor, ...]) -> bool:
        """Launch on inputs and outputs of these layouts; False if that takes a closer look."""
        place = tuple([x.data_ptr() for x in tensors])
        try:
            in_place = self._places[place]
        except KeyError:
            if len(self._places) >= MAX_PLACES:
                self._places.clear()
            in_place = self._places[place] = self._settle(place)
        if in_place is None:
            return False
        launch, index = self._ready[in_place], self._index
        if launch is None or driver.current_device() != index:
            return False
        if self._hooked is not None and self._hooked():
            return False
        if self._pack is not None:
            place = self._pack(*place)
        launch(driver.current_stream(index), *place)
        return True


class Calls:
    """Kept calls of one kind of merge, by a key that a shape gives quickly."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[Call, ...]] = {}

    def forget(self) -> None:
        """Drop all."""
        self._known.clear()

    def repeat(
        self, key: Any, asked: str | None, inputs: tuple[Any, ...], out: Any
    ) -> AttentionOutput | None:
        """Repeat a kept call with these tensors; None if there is none like it.

        Args:
            key: Of the shape.
            asked: The path asked for.
            inputs: All input tensors; of a pair, the first two are the first state.
            out: ``(o, lse)`` to write, or None.
        """
        if out is None:
            for call in self._known.get((key, 0), ()):
                if call.asked == asked and call.fits(*inputs):
                    o, lse = call.fresh(inputs)
                    if call((*inputs, o, lse)):
                        return _new(AttentionOutput, (o, lse))
            return None
        o, lse = out
        tensors = (*inputs, o, lse)
        own = o is inputs[0] and lse is inputs[1]
        for call in self._known.get((key, 1 if own else 2), ()):
            if call.asked == asked and call.fits(*(inputs if own else tensors)) and call(tensors):
                return _new(AttentionOutput, (o, lse))
        return None

    def keep(
        self, key: Any, asked: str | None, path: str, launch: Any, inputs: tuple[Any, ...],
        out: Any, settle: Settle, fresh: Fresh,
    ) -> None:  # fmt: skip
        """Keep a call that has just been done the ordinary way; arguments as in ``repeat``."""
        if not any(getattr(launch, "ready", ())):
            return
        own = out is not None and out[0] is inputs[0] and out[1] is inputs[1]
        key = (key, 0 if out is None else 1 if own else 2)
        known = self._known.get(key, ())
        tensors = inputs if out is None or own else (*inputs, *out)
        if any(c.launch is launch and c.asked == asked and c.fits(*tensors) for c in known):
            return
        fits = guard(*tensors)
        if fits is None:
            return
        if len(self._known) >= MAX_SHAPES:
            self._known.clear()
        call = Call(fits, asked, path, inputs[0].device.index, launch, settle, fresh)
        self._known[key] = (call, *known)[:MAX_ALIKE]


__all__ = ["Call", "Calls"]
