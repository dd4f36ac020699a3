"""Merges kept to be repeated: known layouts, a known path, a kernel ready to be launched.

Serving engines merge the same layouts in every layer and step. A kept call recognises its layouts
in one comparison, remembers which addresses were found not to overlap, and holds launches whose
arguments are already written: less time than the driver takes for the launch itself. Whatever it
does not recognise takes the ordinary way, which checks, chooses and prepares.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import driver
from ..driver import Filled
from ..layouts import guard

MAX_SHAPES = 512  # token counts vary from step to step: forget all rather than grow
MAX_ALIKE = 4  # kept calls of one shape: other strides, dtypes, paths, modes of torch
MAX_PLACES = 32  # addresses remembered per kept call

#: Forms of a call: results are fresh, or have the memory of the first state, or other memory.
FRESH, OWN, GIVEN = range(3)

#: Stands for a place that a call was not at.
UNSEEN: Any = object()

Place = tuple[int, tuple[int, ...]]  # stream and addresses
Settle = Callable[[tuple[int, ...]], "bool | None"]
Fresh = Callable[[], "tuple[torch.Tensor, torch.Tensor]"]


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
        fresh: Makes outputs.
    """

    __slots__ = ("_pack", "_ready", "_settle", "asked", "fits", "fresh", "hooked", "index",
                 "launch", "places")  # fmt: skip

    def __init__(
        self, fits: Callable[..., bool], asked: str | None, path: str, index: int, launch: Any,
        settle: Settle, fresh: Fresh,
    ) -> None:  # fmt: skip
        self.fits, self.asked, self.launch, self.fresh = fits, asked, launch, fresh
        self.index, self._ready, self._settle = index, launch.ready, settle
        self._pack = getattr(launch, "pack", None)
        #: By stream and addresses: whether to merge in place (None: do not repeat), or from the
        #: second time on the launch itself.
        self.places: dict[Place, bool | Filled | None] = {}
        self.hooked: Any = None
        if path == "triton":  # profilers ask Triton, which does not see launches of the driver
            from ..triton_compiled import is_hooked

            self.hooked = is_hooked

    def run(self, *addresses: int) -> bool:
        """Launch on inputs and outputs of these layouts; False if that takes a closer look."""
        index = self.index
        if driver.current_device() != index or (self.hooked is not None and self.hooked()):
            return False
        place = (driver.current_stream(index), addresses)
        known = self.places.get(place, UNSEEN)
        if type(known) is Filled:
            known()
            return True
        return self.settle(place, known)

    def settle(self, place: Place, known: Any) -> bool:
        """Launch at a place for the first or the second time.

        Args:
            place: Stream and addresses.
            known: What ``places`` holds for it, or ``UNSEEN``.

        Returns:
            False if that takes a closer look.
        """
        stream, addresses = place
        in_place = known
        if known is UNSEEN:
            if len(self.places) >= MAX_PLACES:
                self.places.clear()
            in_place = self.places[place] = self._settle(addresses)
        launch = None if in_place is None else self._ready[in_place]
        if launch is None:
            return False
        args = addresses if self._pack is None else self._pack(*addresses)
        if known is UNSEEN:
            launch(stream, *args)
        else:
            filled = self.places[place] = launch.filled(stream, *args)
            filled()
        return True


class Calls:
    """Kept calls of one kind of merge, by form and a key that a shape gives quickly."""

    def __init__(self) -> None:
        #: By form, then by key.
        self.known: tuple[dict[Any, tuple[Call, ...]], ...] = ({}, {}, {})

    def forget(self) -> None:
        """Drop all."""
        for known in self.known:
            known.clear()

    def keep(
        self, key: Any, asked: str | None, path: str, launch: Any, inputs: tuple[Any, ...],
        out: Any, settle: Settle, fresh: Fresh,
    ) -> None:  # fmt: skip
        """Keep a call that has just been done the ordinary way.

        Args:
            key: Of the shape.
            asked: The path asked for.
            path: The path taken.
            launch: The prepared merge.
            inputs: All input tensors; of a pair, the first two are the first state.
            out: ``(o, lse)`` that were written, or None.
            settle: See ``Call``.
            fresh: See ``Call``.
        """
        if not any(getattr(launch, "ready", ())):
            return
        form = form_of(out, inputs)
        known = self.known[form].get(key, ())
        tensors = (*inputs, *out) if form == GIVEN else inputs
        if any(c.launch is launch and c.asked == asked and c.fits(*tensors) for c in known):
            return
        fits = guard(*tensors)
        if fits is None:
            return
        if len(self.known[form]) >= MAX_SHAPES:
            self.known[form].clear()
        call = Call(fits, asked, path, inputs[0].device.index, launch, settle, fresh)
        self.known[form][key] = (call, *known)[:MAX_ALIKE]


def form_of(out: Any, inputs: tuple[Any, ...]) -> int:
    """The form of a call: ``FRESH``, ``OWN`` or ``GIVEN``."""
    if out is None:
        return FRESH
    return OWN if out[0] is inputs[0] and out[1] is inputs[1] else GIVEN


__all__ = ["FRESH", "GIVEN", "OWN", "UNSEEN", "Call", "Calls", "form_of"]
