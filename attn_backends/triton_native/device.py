"""What a device means for the kernels: its kind, and how stored numbers reach its tensor cores."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from ..spec import AttentionSpec
from .decode import _split_fwd_kernel
from .launch import is_interpreted


@dataclass(frozen=True)
class Device:
    """What kernels need to know about where they run."""

    arch: int
    processors: int
    interpreted: bool


@cache
def device_of(kind: str, index: int | None) -> Device:
    """A device by type and index; without a GPU a Hopper of few multiprocessors stands in."""
    interpreted = is_interpreted(_split_fwd_kernel)
    if kind != "cuda":
        return Device(90, 4, interpreted)
    found = torch.cuda.get_device_properties(index)
    return Device(found.major * 10 + found.minor, found.multi_processor_count, interpreted)


@dataclass(frozen=True)
class Formats:
    """How stored numbers reach the tensor cores, for a spec on a device.

    Attributes:
        compute: Dtype of the products.
        fp8: Keys are fp8: 0 no, 1 converted by an instruction, 2 by arithmetic on their bytes.
        fp8_q: The same for queries.
        row_scale: Queries are scaled per row into the range of the compute dtype.
    """

    compute: torch.dtype
    fp8: int
    fp8_q: int
    row_scale: bool

    @classmethod
    def of(cls, spec: AttentionSpec, device: Device) -> Formats:
        """Products run in the query dtype; in fp16, where e4m3 is exact, if anything is fp8."""
        if spec.kv != torch.float8_e4m3fn:
            upcast = device.interpreted and spec.dtype == torch.bfloat16
            return cls(torch.float32 if upcast else spec.dtype, 0, 0, False)
        how = 2 if device.interpreted or device.arch < 89 else 1
        if spec.dtype == torch.float32 or (device.interpreted and spec.dtype == torch.bfloat16):
            return cls(torch.float32, how, 0, False)
        fp8_q = how if spec.dtype == torch.float8_e4m3fn else 0
        return cls(torch.float16, how, fp8_q, spec.dtype == torch.bfloat16)


__all__ = ["Device", "Formats", "device_of"]
