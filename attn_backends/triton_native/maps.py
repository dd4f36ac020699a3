"""Keys and values as tensor maps, by which a program asks for whole tiles without addresses.

A map sees ragged keys as a matrix: a row a token, and as many lanes as reach the last head, so that
a head is a lane to begin at, whatever lies between heads. Triton encodes maps anew in every launch;
here they are kept by address.
"""

from __future__ import annotations

from typing import Any

import torch

from .hopper_maps import Encoder, MapForm, encoder_of

_DTYPES = (torch.float16, torch.bfloat16)


class KeyMaps:
    """The maps of keys and values of one layout, for tiles of as many rows.

    Args:
        k: Keys ``[Tk, HK, D]``.
        v: Values ``[Tk, HK, DV]``.
        rows: Of a tile.
    """

    def __init__(self, k: torch.Tensor, v: torch.Tensor, rows: int) -> None:
        self.forms = tuple(_form(x, rows) for x in (k, v))
        self._encoders: tuple[Encoder, ...] = ()

    @staticmethod
    def fit(k: torch.Tensor, v: torch.Tensor) -> bool:
        """Whether maps can describe keys and values: TMA wants everything in units of 16 bytes."""
        for x in (k, v):
            units = (x.stride(0), x.stride(1), x.shape[2])
            if x.dtype not in _DTYPES or x.numel() == 0 or any(n % 8 for n in units):
                return False
            if x.data_ptr() % 16 or x.stride(0) <= 0 or x.stride(1) < 0:
                return False
        return True

    def described(self, k: torch.Tensor, v: torch.Tensor) -> tuple[Any, ...]:
        """Triton's own descriptions, which it encodes when it launches."""
        from triton.tools.tensor_descriptor import TensorDescriptor

        return tuple(
            TensorDescriptor(x, list(f.shape), list(f.strides), list(f.box))
            for x, f in zip((k, v), self.forms)
        )

    def learn(self, compiled: Any) -> None:
        """Take from a compiled kernel how it wants its tiles laid out, in order to encode maps."""
        if not self._encoders:
            meta = compiled.metadata.tensordesc_meta
            self._encoders = tuple(encoder_of(f, m) for f, m in zip(self.forms, meta))

    def encoded(self, k: int, v: int) -> tuple[tuple[Any, ...], ...]:
        """What the kernel takes for the maps of keys and values at these addresses."""
        return tuple((e(at), *e.rest) for e, at in zip(self._encoders, (k, v)))

    def flat(self, k: int, v: int) -> tuple[Any, ...]:
        """The same as one tuple."""
        keys, values = self._encoders
        return (keys(k), *keys.rest, values(v), *values.rest)


def _form(x: torch.Tensor, rows: int) -> MapForm:
    tokens, heads, lanes = x.shape
    shape = (tokens, (heads - 1) * x.stride(1) + lanes)
    return MapForm.of(x, shape, (x.stride(0), 1), (rows, lanes))


__all__ = ["KeyMaps"]
