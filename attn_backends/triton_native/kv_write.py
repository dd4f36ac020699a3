"""Writing new keys and values into a paged cache, in Triton.

A program takes one token and a block of KV heads: it reads the token's slot, skips a slot that is
negative or beyond the cache, and copies ``[BLOCK_H, BLOCK_D]`` tiles of K and V to page
``slot // page_size``, row ``slot % page_size``. Into a float8 cache goes ``value / scale``,
saturated to the largest finite number.

Layout: k ``[T, HK, D]``, v ``[T, HK, DV]``, caches ``[num_pages, page_size, HK, D or DV]``, any
strides with a contiguous last dim; offsets are 64-bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .. import driver
from ..layouts import guard
from ..triton_compiled import is_hooked
from .launch import Launcher

WARPS = 4
TILE = 1024  # elements of a tile: 8 per thread


@triton.jit
def _store(cache_ptr, at, x, mask, divisor, FP8_MAX: tl.constexpr):
    """Store ``x [BLOCK_H, BLOCK_D]``, scaled and saturated if the cache is float8."""
    if FP8_MAX > 0:
        x = tl.div_rn(x.to(tl.float32), tl.zeros(x.shape, tl.float32) + divisor[:, None])
        x = tl.maximum(x, -FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
        x = tl.minimum(x, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    tl.store(cache_ptr + at, x.to(cache_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _divisor(scale_ptr, scale, stride, heads, live, KIND: tl.constexpr):
    """The scale of each head: a number, or one or ``[HK]`` numbers on the device."""
    if KIND == 0:
        divisor = tl.zeros(heads.shape, tl.float32) + scale
    else:
        divisor = tl.load(scale_ptr + heads * stride, mask=live, other=1.0)
    return divisor


@triton.jit(do_not_specialize=["k_scale", "v_scale", "num_slots"])
def _write_kv_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    k_scale_ptr,
    v_scale_ptr,
    k_scale,
    v_scale,
    num_slots,
    page_size,
    num_heads,
    stride_slot,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_kc_page,
    stride_kc_row,
    stride_kc_head,
    stride_vc_page,
    stride_vc_row,
    stride_vc_head,
    stride_k_scale,
    stride_v_scale,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HAS_V: tl.constexpr,
    FP8_MAX: tl.constexpr,
    K_SCALE: tl.constexpr,
    V_SCALE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token * stride_slot).to(tl.int64)
    if (slot >= 0) & (slot < num_slots):
        page = slot // page_size
        row = slot - page * page_size
        heads = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
        live = heads < num_heads
        columns = tl.arange(0, BLOCK_D)
        mask = live[:, None] & (columns < HEAD_DIM)[None, :]
        at = token * stride_kt + heads[:, None] * stride_kh + columns[None, :]
        x = tl.load(k_ptr + at, mask=mask)
        at = page * stride_kc_page + row * stride_kc_row + heads[:, None] * stride_kc_head
        divisor = _divisor(k_scale_ptr, k_scale, stride_k_scale, heads, live, K_SCALE)
        _store(k_cache_ptr, at + columns[None, :], x, mask, divisor, FP8_MAX)
        if HAS_V:
            columns_v = tl.arange(0, BLOCK_DV)
            mask_v = live[:, None] & (columns_v < HEAD_DIM_V)[None, :]
            at = token * stride_vt + heads[:, None] * stride_vh + columns_v[None, :]
            y = tl.load(v_ptr + at, mask=mask_v)
            at = page * stride_vc_page + row * stride_vc_row + heads[:, None] * stride_vc_head
            divisor = _divisor(v_scale_ptr, v_scale, stride_v_scale, heads, live, V_SCALE)
            _store(v_cache_ptr, at + columns_v[None, :], y, mask_v, divisor, FP8_MAX)


@lru_cache(maxsize=256)
def _launcher(
    dim: int, dim_v: int, block_h: int, has_v: bool, fp8_max: float, k_kind: int, v_kind: int
) -> Launcher:
    constants = {
        "HEAD_DIM": dim,
        "HEAD_DIM_V": dim_v,
        "BLOCK_D": triton.next_power_of_2(dim),
        "BLOCK_DV": triton.next_power_of_2(dim_v),
        "BLOCK_H": block_h,
        "HAS_V": has_v,
        "FP8_MAX": fp8_max,
        "K_SCALE": k_kind,
        "V_SCALE": v_kind,
    }
    return Launcher(_write_kv_kernel, constants, warps=WARPS)


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    slots: torch.Tensor,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    fp8_max: float,
) -> None:
    """Launch the kernel on checked arguments, on the current device and stream.

    Args:
        k: ``[T, HK, D]``, T and HK at least 1.
        v: ``[T, HK, DV]`` or None.
        k_cache: ``[num_pages, page_size, HK, D]``.
        v_cache: ``[num_pages, page_size, HK, DV]`` or None.
        slots: ``[T]`` int32 or int64.
        k_scale: Number, or float32 ``[]``, ``[1]``, ``[HK]``.
        v_scale: The same for values.
        fp8_max: Largest finite number of a float8 cache; 0 for others.
    """
    tokens, heads, dim = k.shape
    has_v = v is not None
    v_ = k if v is None else v
    v_cache_ = k_cache if v_cache is None else v_cache
    dim_v = v_.shape[-1]
    pages, page_size = k_cache.shape[:2]
    block_h = triton.next_power_of_2(heads)
    block_h = max(1, min(block_h, TILE // triton.next_power_of_2(max(dim, dim_v))))
    k_kind, k_where, k_number, k_step = _scale(k_scale, k)
    v_kind, v_where, v_number, v_step = _scale(v_scale, k)
    tensors = (k, v_, k_cache, v_cache_, slots, k_where, v_where)
    strides = (*k.stride()[:2], *v_.stride()[:2], *k_cache.stride()[:3], *v_cache_.stride()[:3])
    sizes = (page_size, heads, slots.stride(0), *strides, k_step, v_step)
    numbers = (k_number, v_number, pages * page_size, *sizes)
    launcher = _launcher(dim, dim_v, block_h, has_v, fp8_max, k_kind, v_kind)
    grid = (tokens, -(-heads // block_h), 1)
    addresses = tuple([x.data_ptr() for x in tensors])
    bits = 0
    for address in addresses:
        bits |= address
    dtypes = (k.dtype, v_.dtype, k_cache.dtype, slots.dtype)
    # Beyond 32 bits an integer changes type: the number of slots is not in the signature as such.
    signature = None if bits % 16 else (dtypes, sizes, numbers[2] < 2**31)
    if signature is None or not launcher.again(grid, addresses, numbers, signature):
        launcher.first(grid, tensors, numbers, signature)
    if signature is not None:
        what = (launcher, grid, numbers, signature)
        _keep((k, v, k_cache, v_cache, slots), (k_scale, v_scale), what)


class _Kept(NamedTuple):
    """A write that layers repeat: checked once, on tensors of one layout.

    Attributes:
        what: Launcher, grid, numbers and signature of it.
        fits: Whether tensors are laid out like its own; None until it came a second time, since
            finding out how they are laid out costs more than a write.
        scales: Numbers among the scales; None for a tensor.
        index: Of the device.
        launch: Takes the addresses; None if only Triton can launch it.
    """

    what: tuple[Any, ...]
    fits: Callable[..., bool] | None = None
    scales: tuple[float | None, ...] = ()
    index: int = -1
    launch: driver.Launch | None = None


_kept: list[_Kept] = []  # the last write, if any


def _keep(tensors: tuple[Any, ...], scales: tuple[Any, ...], what: tuple[Any, ...]) -> None:
    """Remember a write; the second of its kind, as the launch that the next layers repeat."""
    launcher, grid, numbers, signature = what
    if not _kept or _kept[0].what != what:
        _kept[:] = [_Kept(what)]
        return
    watched = [*tensors, *(x for x in scales if isinstance(x, torch.Tensor))]
    if tensors[1] is None or (_kept[0].fits is not None and _kept[0].fits(*watched)):
        return  # without values, or something else than a layout was in the way
    form, fits = launcher.form(signature), guard(*watched)
    if form is None or fits is None:
        return
    launch = form.launch(grid, (*(0,) * 7, *numbers, *launcher.values), 7)
    known = tuple(None if isinstance(x, torch.Tensor) else float(x) for x in scales)
    if launch is not None:
        _kept[:] = [_Kept(what, fits, known, driver.current_device(), launch)]


def again(
    k: Any, v: Any, k_cache: Any, v_cache: Any, slots: Any, k_scale: Any, v_scale: Any
) -> bool:
    """Repeat the last write on tensors of the same layouts, as the layers of a step do.

    Args:
        k: As ``write_kv``, but nothing is known of it yet; so are the others.
        v: Values.
        k_cache: Cache of keys.
        v_cache: Cache of values.
        slots: Slots.
        k_scale: Number, tensor, or None for 1.
        v_scale: The same for values.

    Returns:
        Whether it was launched; if not, the ordinary way will see what is different.
    """
    try:
        _, fits, scales, index, launch = _kept[0]
    except IndexError:
        return False
    if fits is None or launch is None:
        return False
    tensors, where = [k, v, k_cache, v_cache, slots], []
    for scale, known in zip((k_scale, v_scale), scales):
        if known is None:
            tensors.append(scale)
            where.append(scale)
            continue
        number = 1.0 if scale is None else scale
        if type(number) is not float or number != known:
            return False
        where.append(k)  # stands in where no tensor is
    if not fits(*tensors) or driver.current_device() != index or is_hooked():
        return False
    addresses = [x.data_ptr() for x in (k, v, k_cache, v_cache, slots, *where)]
    bits = 0
    for address in addresses:
        bits |= address
    if bits & 15:
        return False
    launch(driver.current_stream(index), *addresses)
    return True


def _scale(scale: float | torch.Tensor, stand_in: torch.Tensor) -> tuple[int, Any, float, int]:
    """Kind, tensor, number and stride of a scale."""
    if isinstance(scale, torch.Tensor):
        return 1, scale, 1.0, scale.stride(0) if scale.numel() > 1 else 0
    return 0, stand_in, float(scale), 0


__all__ = ["again", "write_kv"]
