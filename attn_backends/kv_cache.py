"""Writing new keys and values into a paged cache."""

from __future__ import annotations

import math
from typing import Any

import torch

from .errors import InvalidInputError, Reason, UnsupportedCallError
from .spec import FP8_DTYPES
from .validation import (
    check_is_tensor,
    check_last_dim,
    check_no_grad,
    check_self_overlap,
    deep_checks,
)

PATHS = ("triton", "torch")
KV_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, *FP8_DTYPES)
INDEX_DTYPES = (torch.int32, torch.int64)
FP8_CAPABILITY = (8, 9)  # first with float8 conversions

Scale = "float | torch.Tensor | None"

#: Repeats a write of Triton's, once there was one.
_again: Any = None


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    *,
    path: str | None = None,
) -> None:
    """Write new keys and values into their slots of a paged cache.

    Token t goes to page ``slot_mapping[t] // page_size``, row ``slot_mapping[t] % page_size``. A
    negative slot is skipped, and so is one beyond the cache: nothing outside it is ever written.
    If two tokens name one slot, either may win. Nothing but the caches changes.

    Args:
        k: ``[T, HK, D]``, last dim contiguous, any other strides.
        v: ``[T, HK, DV]``, or None where values are part of the keys (MLA).
        k_cache: ``[num_pages, page_size, HK, D]`` in the dtype of ``k`` or a float8 dtype; last
            dim contiguous, any other strides.
        v_cache: ``[num_pages, page_size, HK, DV]``; None exactly if ``v`` is.
        slot_mapping: ``[T]`` int32 or int64, any stride.
        k_scale: For a float8 cache fed from a wider dtype: what a stored key is multiplied by to
            give the key; ``k / k_scale`` is stored, saturated. A number, or float32 ``[]``,
            ``[1]`` or ``[HK]``; None is 1.
        v_scale: The same for values.
        path: ``"triton"`` or ``"torch"``; None takes Triton on a GPU. On a GPU the torch path
            reads the slots back to the host.

    Raises:
        InvalidInputError: An input is malformed; the message names it.
        UnsupportedCallError: The path asked for cannot do this.
    """
    if torch.compiler.is_compiling() or type(k) is not torch.Tensor:
        k_parts, v_parts = _split(k_scale), _split(v_scale)
        _op()(k, v, k_cache, v_cache, slot_mapping, *k_parts, *v_parts, path)
        return
    if path is None and _again is not None and not deep_checks():
        # Layers of a step differ in addresses alone: what the last one checked is not looked at.
        if _again(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale):
            return
    _write(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, path)


def _write(
    k: torch.Tensor,
    v: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    slots: torch.Tensor,
    k_scale: float | torch.Tensor | None,
    v_scale: float | torch.Tensor | None,
    path: str | None,
) -> None:
    _check(k, v, k_cache, v_cache, slots, k_scale, v_scale)
    path = _choose(k, k_cache, path)
    if not k.shape[0] or not k.shape[1]:
        return
    if deep_checks():
        _check_slots(slots, k_cache.shape[0] * k_cache.shape[1])
    fp8_max = _fp8_max(k, k_cache)
    scales = (1.0 if k_scale is None else k_scale, 1.0 if v_scale is None else v_scale)
    if path == "torch":
        _write_torch(k, k_cache, slots, scales[0], fp8_max)
        if v is not None and v_cache is not None:
            _write_torch(v, v_cache, slots, scales[1], fp8_max)
        return
    from .triton_native.kv_write import again
    from .triton_native.kv_write import write_kv as write_triton

    global _again
    _again = again
    args = (k, v, k_cache, v_cache, slots, *scales, fp8_max)
    if k.is_cuda and torch.cuda.current_device() != k.device.index:
        with torch.cuda.device(k.device):  # Triton launches on the current device
            write_triton(*args)
    else:
        write_triton(*args)


def _write_torch(
    x: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    scale: float | torch.Tensor,
    fp8_max: float,
) -> None:
    page_size = cache.shape[1]
    if fp8_max:  # a float8 conversion does not saturate by itself
        divisor = scale.reshape(-1, 1) if isinstance(scale, torch.Tensor) else scale
        x = (x.float() / divisor).clamp(-fp8_max, fp8_max)
    x = x.to(cache.dtype)
    if cache.dtype in FP8_DTYPES:  # which cannot be indexed everywhere
        x, cache = x.view(torch.uint8), cache.view(torch.uint8)
    known = (slots >= 0) & (slots < cache.shape[0] * page_size)
    slots = slots[known].long()
    cache[slots // page_size, slots % page_size] = x[known]


def _fp8_max(k: torch.Tensor, k_cache: torch.Tensor) -> float:
    """Largest finite number of a cache that is narrower than its input; 0 for a plain copy."""
    if k_cache.dtype == k.dtype or k_cache.dtype not in FP8_DTYPES:
        return 0.0
    return float(torch.finfo(k_cache.dtype).max)


def _choose(k: torch.Tensor, k_cache: torch.Tensor, path: str | None) -> str:
    if path is not None and path not in PATHS:
        raise InvalidInputError.of("path", repr(path), "None, 'triton', 'torch'")
    if path == "torch" or (path is None and not k.is_cuda):
        return "torch"
    reasons = _triton_reasons(k, k_cache)
    if not reasons:
        return "triton"
    if path is None:
        return "torch"
    text = "; ".join(map(str, reasons))
    message = f"write_kv path {path!r} cannot do this call: {text}"
    raise UnsupportedCallError(message, backend="write_kv:triton", reasons=reasons)


def _triton_reasons(k: torch.Tensor, k_cache: torch.Tensor) -> list[Reason]:
    from .merge import triton_merge  # what this process can do with Triton

    interpreted = triton_merge.interpreted()
    if not k.is_cuda and not (interpreted and k.device.type == "cpu"):
        return [Reason("device", k.device.type, "cuda, or cpu under TRITON_INTERPRET=1")]
    reasons = triton_merge.missing()
    if k.dtype == torch.float64:
        reasons.append(Reason("k.dtype", "float64", "float32, float16, bfloat16, float8"))
    if _fp8_max(k, k_cache):
        if interpreted:
            reasons.append(Reason("k_cache.dtype", str(k_cache.dtype), "k.dtype when interpreted"))
        elif torch.cuda.get_device_capability(k.device) < FP8_CAPABILITY:
            got = "{}.{}".format(*torch.cuda.get_device_capability(k.device))
            reasons.append(Reason("compute_capability", got, ">= 8.9 for float8"))
    return reasons


def _check(
    k: Any, v: Any, k_cache: Any, v_cache: Any, slots: Any, k_scale: Any, v_scale: Any
) -> None:
    """Raise InvalidInputError unless everything that shapes, dtypes and devices decide fits."""
    _check_tensor("k", k, 3, "[T, HK, D]")
    if k.dtype not in KV_DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in KV_DTYPES)
        raise InvalidInputError.of("k.dtype", k.dtype, names)
    tokens, heads, dim = k.shape
    _check_cache("k_cache", k_cache, k, (None, None, heads, dim))
    if (v is None) != (v_cache is None):
        got = "None" if v is None else "given"
        raise InvalidInputError.of("v", got, "None exactly if v_cache is None")
    if v is not None:
        _check_tensor("v", v, 3, "[T, HK, DV]")
        if v.shape[:2] != k.shape[:2]:
            raise InvalidInputError.of("v.shape", list(v.shape), f"[{tokens}, {heads}, DV], as k")
        if v.dtype != k.dtype or v.device != k.device:
            got = f"{v.dtype} on {v.device}"
            raise InvalidInputError.of("v", got, f"{k.dtype} on {k.device}, as k")
        _check_cache("v_cache", v_cache, k, (*k_cache.shape[:2], heads, v.shape[2]))
        if v_cache.dtype != k_cache.dtype:
            allowed = f"{k_cache.dtype}, as k_cache"
            raise InvalidInputError.of("v_cache.dtype", v_cache.dtype, allowed)
    _check_index(slots, tokens, k.device)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            _check_scale(name, scale, k, k_cache)
    if v is None and v_scale is not None:
        raise InvalidInputError.of("v_scale", "given", "None, since v is None")


def _check_tensor(name: str, x: Any, dims: int, want: str) -> None:
    check_is_tensor(name, x)
    if x.dim() != dims:
        raise InvalidInputError.of(f"{name}.shape", list(x.shape), want)
    check_last_dim(name, x)
    check_no_grad(name, x)


def _check_cache(name: str, cache: Any, k: torch.Tensor, shape: tuple[int | None, ...]) -> None:
    want = ", ".join("*" if n is None else str(n) for n in shape)
    _check_tensor(name, cache, 4, f"[{want}]")
    if any(n is not None and n != got for n, got in zip(shape, cache.shape)):
        raise InvalidInputError.of(f"{name}.shape", list(cache.shape), f"[{want}]")
    if cache.dtype != k.dtype and cache.dtype not in FP8_DTYPES:
        allowed = f"{k.dtype}, as k, or a float8 dtype"
        raise InvalidInputError.of(f"{name}.dtype", cache.dtype, allowed)
    if cache.dtype != k.dtype and k.dtype in FP8_DTYPES:
        raise InvalidInputError.of(f"{name}.dtype", cache.dtype, f"{k.dtype}, as k")
    if cache.device != k.device:
        raise InvalidInputError.of(f"{name}.device", cache.device, f"{k.device}, where k is")
    check_self_overlap(name, cache)


def _check_index(slots: Any, tokens: int, device: torch.device) -> None:
    check_is_tensor("slot_mapping", slots)
    if tuple(slots.shape) != (tokens,):
        raise InvalidInputError.of("slot_mapping.shape", list(slots.shape), f"[T={tokens}]")
    if slots.dtype not in INDEX_DTYPES:
        raise InvalidInputError.of("slot_mapping.dtype", slots.dtype, "int32 or int64")
    if slots.device != device:
        raise InvalidInputError.of("slot_mapping.device", slots.device, f"{device}, where k is")


def _check_scale(name: str, scale: Any, k: torch.Tensor, k_cache: torch.Tensor) -> None:
    if k_cache.dtype == k.dtype:
        got = "a tensor" if isinstance(scale, torch.Tensor) else scale
        allowed = f"None, since the cache holds {k.dtype} as it comes"
        raise InvalidInputError.of(name, got, allowed)
    if isinstance(scale, torch.Tensor):
        heads = k.shape[1]
        if tuple(scale.shape) not in {(), (1,), (heads,)}:
            allowed = f"[], [1] or [num_kv_heads={heads}]"
            raise InvalidInputError.of(f"{name}.shape", list(scale.shape), allowed)
        if scale.dtype != torch.float32 or scale.device != k.device:
            got = f"{scale.dtype} on {scale.device}"
            raise InvalidInputError.of(name, got, f"float32 on {k.device}")
        return
    number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    if not number or not math.isfinite(scale) or scale <= 0:
        raise InvalidInputError.of(name, repr(scale), "a finite number > 0, or a tensor")


def _check_slots(slots: torch.Tensor, num_slots: int) -> None:
    """The debug switch: read the slots, and name the first beyond the cache."""
    beyond = (slots >= num_slots).nonzero()
    if beyond.numel():
        i = int(beyond[0])
        allowed = f"-1 (skip) or 0..{num_slots - 1}"
        raise InvalidInputError.of(f"slot_mapping[{i}]", int(slots[i]), allowed)


def _split(scale: float | torch.Tensor | None) -> tuple[float | None, torch.Tensor | None]:
    return (None, scale) if isinstance(scale, torch.Tensor) else (scale, None)


_SCHEMA = (
    "write_kv(Tensor k, Tensor? v, Tensor(a!) k_cache, Tensor(b!)? v_cache, Tensor slot_mapping, "
    "float? k_scale, Tensor? k_scale_tensor, float? v_scale, Tensor? v_scale_tensor, str? path)"
    " -> ()"
)
_LIB = torch.library.Library("attn_backends", "FRAGMENT")  # must stay alive: it owns the operator
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)


def _real(k, v, k_cache, v_cache, slots, k_scale, k_tensor, v_scale, v_tensor, path):  # type: ignore
    scales = (k_scale if k_tensor is None else k_tensor, v_scale if v_tensor is None else v_tensor)
    _write(k, v, k_cache, v_cache, slots, *scales, path)


def _fake(k, v, k_cache, v_cache, slots, k_scale, k_tensor, v_scale, v_tensor, path):  # type: ignore
    scales = (k_scale if k_tensor is None else k_tensor, v_scale if v_tensor is None else v_tensor)
    _check(k, v, k_cache, v_cache, slots, *scales)


_LIB.define(_SCHEMA, tags=_TAGS)
_LIB.impl("write_kv", _real, "CompositeExplicitAutograd")
torch.library.register_fake("attn_backends::write_kv", _fake, lib=_LIB)


def _op() -> Any:
    return torch.ops.attn_backends.write_kv


__all__ = ["write_kv"]
