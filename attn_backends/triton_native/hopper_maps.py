"""Tensor maps of the Hopper prefill: how TMA sees queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from .. import driver
from . import hopper_compat

_MOST_KEPT = 1024
#: The driver's numbers of dtypes.
_DTYPES = {torch.float16: 6, torch.bfloat16: 9}


@dataclass(frozen=True)
class MapForm:
    """What a tensor map says beside an address.

    Attributes:
        dtype: Of the tensor.
        shape: Its shape, of up to five dimensions.
        strides: Strides in elements; the last is 1.
        box: Shape of one copy.
        first: The lane of the tensor that is the first of the map.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    first: int = 0

    @classmethod
    def of(
        cls, x: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...],
        box: tuple[int, ...], first: int = 0,
    ) -> MapForm:  # fmt: skip
        """The form of a tensor, seen in a shape; strides of all dimensions, in elements."""
        # The stride of a dimension of one element says nothing, but TMA still checks it.
        checked = (*(16 if n == 1 else s for n, s in zip(shape[:-1], strides)), 1)
        return cls(x.dtype, tuple(shape), checked, box, first)

    def descriptor(self, x: torch.Tensor) -> Any:
        """Triton's own description of a tensor of this form, which it encodes when it launches."""
        gl = hopper_compat.gl
        element = gl.bfloat16 if self.dtype == torch.bfloat16 else gl.float16
        layout = gl.NVMMASharedLayout.get_default_for(list(self.box), element)
        return hopper_compat.TensorDescriptor(
            x[..., self.first :], list(self.shape), list(self.strides), list(self.box), layout
        )


class Encoder:
    """Encoded tensor maps of one form, kept by address.

    A map holds nothing but its form and an address, so an old one is right again when the address
    is used again.

    Args:
        form: What they share.
        swizzle: How Triton lays the box out in shared memory, as the driver numbers it.
        box: The box of one instruction, which may be a part of the form's.
    """

    __slots__ = ("_form", "_kept", "_more", "_offset", "rest")

    def __init__(self, form: MapForm, swizzle: int, box: tuple[int, ...]) -> None:
        self._form, self._more = form, (box, swizzle)
        self._offset = form.first * form.dtype.itemsize
        self._kept: dict[int, bytes] = {}
        #: What the compiled kernel takes behind the map.
        self.rest = (*form.shape, *form.strides)

    def __call__(self, address: int) -> bytes:
        """The map of a tensor that begins at an address."""
        found = self._kept.get(address)
        return self._encode(address) if found is None else found

    def _encode(self, address: int) -> bytes:
        form, size = self._form, self._form.dtype.itemsize
        if len(self._kept) >= _MOST_KEPT:
            self._kept = {}
        found = self._kept[address] = driver.tensor_map(
            address + self._offset, _DTYPES[form.dtype], form.shape,
            [size * s for s in form.strides[:-1]], *self._more,
        )  # fmt: skip
        return found


@lru_cache(maxsize=512)
def _encoder(form: MapForm, swizzle: int, box: tuple[int, ...]) -> Encoder:
    return Encoder(form, swizzle, box)


def encoder_of(form: MapForm, meta: Mapping[str, Any]) -> Encoder:
    """The encoder of a form, shared by all that use it; ``meta`` is Triton's of the argument."""
    return _encoder(form, int(meta["swizzle"]), tuple(meta["block_size"]))


__all__ = ["Encoder", "MapForm", "encoder_of"]
