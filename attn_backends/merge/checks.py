"""Checks of a merge's inputs, on the host and without a sync."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import InvalidInputError
from ..validation import (
    check_is_tensor,
    check_last_dim,
    check_no_grad,
    check_pair,
    check_self_overlap,
)

MERGE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
HALF_DTYPES = (torch.float16, torch.bfloat16)
_DTYPE_NAMES = "float32, float16, bfloat16, float64"

Named = Sequence[tuple[str, torch.Tensor]]


def check_states(named: Sequence[tuple[str, Any, Any]], rank: int = 3) -> None:
    """Raise InvalidInputError unless all states agree in shape, dtype and device.

    Args:
        named: ``(suffix, o, lse)`` of each state; messages speak of ``o<suffix>``, ``lse<suffix>``.
        rank: Dims of ``o``: 3 for ``[T, H, DV]``, 4 for stacked ``[n, T, H, DV]``.
    """
    first = f"o{named[0][0]}"
    o_0 = named[0][1]
    check_is_tensor(first, o_0)
    if o_0.dim() != rank:
        want = "[T, H, DV]" if rank == 3 else "[n, T, H, DV]"
        raise InvalidInputError.of(f"{first}.shape", list(o_0.shape), want)
    if o_0.dtype not in MERGE_DTYPES:
        raise InvalidInputError.of(f"{first}.dtype", o_0.dtype, _DTYPE_NAMES)
    for suffix, o, lse in named:
        name = f"o{suffix}"
        check_is_tensor(name, o)
        _check_like(name, o, o_0.shape, o_0.dtype, o_0.device, first)
        check_last_dim(name, o)
        check_lse(f"lse{suffix}", lse, o_0.shape[:-1], o_0.device, first)


def check_lse(name: str, lse: Any, shape: Any, device: torch.device, like: str) -> None:
    """Raise InvalidInputError unless ``lse`` is float32 of ``shape``; any strides will do."""
    check_is_tensor(name, lse)
    if lse.shape != shape:
        fix = None
        if list(lse.shape) == [*shape[:-2], shape[-1], shape[-2]]:
            fix = f"a head-major LSE is passed as the view {name}.mT"
        allowed = f"{list(shape)}, [T, H] of {like}"
        raise InvalidInputError.of(f"{name}.shape", list(lse.shape), allowed, fix)
    if lse.dtype != torch.float32:
        raise InvalidInputError.of(f"{name}.dtype", lse.dtype, "float32")
    _check_device(name, lse, device, like)
    check_no_grad(name, lse)


def check_out(out: Any, o_like: torch.Tensor, shape: Any, scaled: bool) -> None:
    """Raise InvalidInputError unless ``out`` is ``(o, lse)`` that the result fits.

    Args:
        out: What the caller passed.
        o_like: An input's ``o``; fixes dtype and device.
        shape: ``[T, H, DV]`` of the result.
        scaled: Whether the call divides by an output scale, which makes the result float8.
    """
    check_pair(out)
    o, lse = out
    if o.shape != shape:
        raise InvalidInputError.of("out.o.shape", list(o.shape), f"{list(shape)}")
    allowed = out_dtypes(o_like.dtype, scaled)
    if o.dtype not in allowed:
        fix = None
        if o.dtype == torch.float8_e4m3fn:
            fix = "pass output_scale for a float8_e4m3fn result"
        names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
        raise InvalidInputError.of("out.o.dtype", o.dtype, names, fix)
    _check_device("out.o", o, o_like.device, "the states")
    check_last_dim("out.o", o)
    check_no_grad("out.o", o)
    check_lse("out.lse", lse, shape[:-1], o_like.device, "the states")
    check_self_overlap("out.o", o)
    check_self_overlap("out.lse", lse)


def out_dtypes(dtype: torch.dtype, scaled: bool) -> tuple[torch.dtype, ...]:
    """Dtypes of a result from inputs of ``dtype``: its own, or half types from float32 partials."""
    if scaled:
        return (torch.float8_e4m3fn,)
    return (dtype, *HALF_DTYPES) if dtype == torch.float32 else (dtype,)


def check_scale(scale: Any, device: torch.device) -> None:
    """Raise InvalidInputError unless ``output_scale`` is a positive number or a float32 scalar."""
    if isinstance(scale, torch.Tensor):
        if tuple(scale.shape) not in ((), (1,)):
            raise InvalidInputError.of("output_scale.shape", list(scale.shape), "[] or [1]")
        if scale.dtype != torch.float32:
            raise InvalidInputError.of("output_scale.dtype", scale.dtype, "float32")
        _check_device("output_scale", scale, device, "the states")
        check_no_grad("output_scale", scale)
        return
    number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    if not number or not math.isfinite(scale) or scale <= 0:
        allowed = "None, a finite number > 0, or a float32 scalar tensor"
        raise InvalidInputError.of("output_scale", repr(scale), allowed)


def check_num_prefix(value: Any, num_tokens: int) -> None:
    """Raise InvalidInputError unless ``num_tokens_with_prefix`` counts rows of this call."""
    if not hasattr(value, "__index__") or isinstance(value, (bool, torch.Tensor)):
        allowed = f"None or an int in 0..{num_tokens}"
        raise InvalidInputError.of("num_tokens_with_prefix", repr(value), allowed)
    if not 0 <= value <= num_tokens:
        raise InvalidInputError.of("num_tokens_with_prefix", value, f"0..{num_tokens} (T)")


def check_counts(counts: Any, num_tokens: int, device: torch.device) -> None:
    """Raise InvalidInputError unless ``counts`` is an int32 or int64 vector ``[T]``."""
    check_is_tensor("counts", counts)
    if tuple(counts.shape) != (num_tokens,):
        raise InvalidInputError.of("counts.shape", list(counts.shape), f"[T={num_tokens}]")
    if counts.dtype not in (torch.int32, torch.int64):
        raise InvalidInputError.of("counts.dtype", counts.dtype, "int32 or int64")
    _check_device("counts", counts, device, "the states")


def check_overlap(outputs: Named, inputs: Named) -> None:
    """Raise InvalidInputError if an output overlaps another tensor without being exactly it.

    A row is read in full before it is written, so an output may be one of the inputs (the same
    memory, shape and strides). Views that interleave without sharing an element are accepted.
    """
    for i, (name, out) in enumerate(outputs):
        for other_name, other in (*inputs, *outputs[i + 1 :]):
            if _share_memory(out, other) and not _is_same(out, other):
                allowed = "disjoint memory, or exactly an input (in place)"
                raise InvalidInputError.of(name, f"a view that overlaps {other_name}", allowed)
    (name_o, out_o), (name_lse, out_lse) = outputs
    if _share_memory(out_o, out_lse):
        raise InvalidInputError.of(name_o, f"a view that overlaps {name_lse}", "disjoint memory")


def _is_same(x: torch.Tensor, y: torch.Tensor) -> bool:
    if x.data_ptr() != y.data_ptr() or x.dtype != y.dtype or x.shape != y.shape:
        return False
    return all(a == b for a, b, n in zip(x.stride(), y.stride(), x.shape) if n > 1)


def _share_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors share a byte; True where a closer look cannot rule it out."""
    if not ranges_meet(x, y):
        return False
    start_x, start_y = x.data_ptr(), y.data_ptr()
    # Ranges meet. The elements still do not if, modulo some common stride, each side fills a
    # window and the windows are apart: halves of a padded row, or head slices of one buffer.
    dims_x = {s * x.element_size() for s, n in zip(x.stride(), x.shape) if n > 1}
    dims_y = {s * y.element_size() for s, n in zip(y.stride(), y.shape) if n > 1}
    for stride in (dims_x & dims_y) - {0}:
        window_x, window_y = _window(x, stride), _window(y, stride)
        gap = (start_y - start_x) % stride
        if window_x <= gap and gap + window_y <= stride:
            return False
    return True


def ranges_meet(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether the byte ranges from first to last element meet."""
    if not x.numel() or not y.numel():
        return False
    start_x, start_y = x.data_ptr(), y.data_ptr()
    return start_x < start_y + extent(y) and start_y < start_x + extent(x)


def _window(x: torch.Tensor, stride: int) -> int:
    """Bytes from the first to the last element of ``x`` over its dims below ``stride``.

    Dims that are multiples of ``stride`` do not move an element modulo it.
    """
    size = x.element_size()
    window = size
    for s, n in zip(x.stride(), x.shape):
        if n > 1 and (s * size) % stride:
            window += s * size * (n - 1)
    return window


def extent(x: torch.Tensor) -> int:
    """Bytes from the first to the end of the last element of a non-empty tensor."""
    last = sum(s * (n - 1) for s, n in zip(x.stride(), x.shape))
    return (last + 1) * x.element_size()


def _check_like(
    name: str, x: torch.Tensor, shape: Any, dtype: torch.dtype, device: torch.device, like: str
) -> None:
    if x.shape != shape:
        raise InvalidInputError.of(f"{name}.shape", list(x.shape), f"{list(shape)}, as {like}")
    if x.dtype != dtype:
        raise InvalidInputError.of(f"{name}.dtype", x.dtype, f"{dtype}, as {like}")
    _check_device(name, x, device, like)
    check_no_grad(name, x)


def _check_device(name: str, x: torch.Tensor, device: torch.device, like: str) -> None:
    if x.device != device:
        raise InvalidInputError.of(f"{name}.device", x.device, f"{device}, where {like} is")


__all__ = [
    "MERGE_DTYPES",
    "check_counts",
    "check_lse",
    "check_num_prefix",
    "check_out",
    "check_overlap",
    "check_scale",
    "check_states",
    "extent",
    "out_dtypes",
    "ranges_meet",
]
