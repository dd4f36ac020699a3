"""Layouts of tensors: telling in one step whether some were seen before, and making more of one.

Reading shape, strides, dtype and device of every tensor from Python takes longer than a launch, and
so does allocating. torch has both in C++ for its compiler; where a version of torch lacks them, or
has changed them, the ordinary ways serve.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch


def layout(x: torch.Tensor) -> tuple[Any, ...]:
    """What a check of a tensor looks at, as a key."""
    return x.shape, x.stride(), x.dtype, x.device


try:  # what torch's compiled code allocates by: no argument is looked at
    from torch._C._dynamo import guards as _guards

    _empty_strided_cuda: Any = getattr(_guards, "_empty_strided_cuda", None)
    _reinterpret: Any = getattr(_guards, "_reinterpret_tensor", None)
except ImportError:
    _guards, _empty_strided_cuda, _reinterpret = None, None, None  # type: ignore[assignment]


def empty(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, index: int | None
) -> torch.Tensor:
    """An uninitialised tensor on the current CUDA device, whose index is ``index``."""
    if _empty_strided_cuda is not None:
        return _empty_strided_cuda(shape, stride, dtype)
    return torch.empty_strided(shape, stride, dtype=dtype, device=f"cuda:{index}")


def maker(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Callable[[], torch.Tensor]:
    """A function that makes uninitialised, contiguous tensors, on a device that is current then."""
    if device.type != "cuda" or _empty_strided_cuda is None:
        return partial(torch.empty, shape, dtype=dtype, device=device)
    stride = [1]
    for size in shape[:0:-1]:
        stride.insert(0, size * stride[0])
    return partial(_empty_strided_cuda, shape, tuple(stride), dtype)


def _as_strided(
    x: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0
) -> torch.Tensor:
    return x.as_strided(shape, stride, x.storage_offset() + offset)


#: ``restride(x, shape, stride, offset=0)``: a view of ``x``, without a gradient, that starts
#: ``offset`` elements after it. Nothing is checked.
restride: Callable[..., torch.Tensor] = _as_strided if _reinterpret is None else _reinterpret


def remembered(view: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], torch.Tensor]:
    """A view that starts where its tensor does, of tensors that are all laid out alike.

    Its layout is asked for once; after that the view is made of the layout.
    """
    layout: tuple[Any, ...] | None = None

    def call(x: torch.Tensor) -> torch.Tensor:
        nonlocal layout
        if layout is not None:
            return restride(x, *layout)
        made = view(x)
        layout = (tuple(made.shape), made.stride())
        return made

    return call


def guard(*tensors: Any) -> Callable[..., bool] | None:
    """A function that tells whether as many tensors are laid out like these.

    Alike are type, device, dtype, shape, strides and that no gradient is asked for. Addresses are
    left out. One tensor given twice may count as unlike.

    Returns:
        The function; None for tensors that ask for a gradient or are of a subclass, which need a
        closer look each time.
    """
    for x in tensors:
        if type(x) is not torch.Tensor or x.requires_grad:
            return None
    compiled = _compiled_guard(tensors) if _COMPILED else None
    return _plain_guard(tensors) if compiled is None else compiled


def _compiled_guard(tensors: tuple[torch.Tensor, ...]) -> Callable[..., bool] | None:
    try:
        # None: no dimension is left open.
        check = _guards.TensorGuards(
            *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
        ).check
        return check if check(*tensors) is True else None
    except Exception:  # private to torch: any change is met by the other way
        return None


def _plain_guard(tensors: tuple[torch.Tensor, ...]) -> Callable[..., bool]:
    wanted = tuple(layout(x) for x in tensors)

    def check(*others: Any) -> bool:
        for x, want in zip(others, wanted):
            if type(x) is not torch.Tensor or x.requires_grad or layout(x) != want:
                return False
        return True

    return check


def _works() -> bool:
    """Whether torch's comparison tells apart what must be told apart."""
    with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"):
        x = torch.zeros(2, 3)
        check = _compiled_guard((x, torch.ones(2, 3)))
        if check is None:
            return False
        others = (
            torch.zeros(2, 4), torch.zeros(3, 2).mT, x.double(), torch.zeros(2, 3, 1),
            torch.zeros(2, 3, device="meta"), torch.zeros(2, 3, requires_grad=True),
            torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False),
        )  # fmt: skip
        try:
            return check(x, x.clone()) and not any(check(x, other) for other in others)
        except Exception:
            return False


_COMPILED = _works()

__all__ = ["empty", "guard", "layout", "maker", "remembered", "restride"]
