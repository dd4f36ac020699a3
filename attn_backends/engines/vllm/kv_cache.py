"""vLLM's KV cache as ours: shapes that the engine allocates, and views over what it allocated."""

from __future__ import annotations

import torch

from ...errors import Reason
from .layers import refusal

_SHAPES = "[blocks, 2, block_size, HK, D] or [blocks, HK, block_size, 2 * D]"


def cache_shape(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
) -> tuple[int, ...]:
    """The shape that vLLM 0.20 asks a backend for; blocks first, so that caches can be shared."""
    return num_blocks, 2, block_size, num_kv_heads, head_size


def stride_order(layout: str, with_layers: bool) -> tuple[int, ...]:
    """How the dims of ``cache_shape`` follow each other in memory.

    Args:
        layout: vLLM's ``NHD`` (slot before head) or ``HND``.
        with_layers: Whether a dim of layers leads the shape.

    Raises:
        UnsupportedCallError: The layout has another name.
    """
    if layout == "NHD":
        return (1, 0, 2, 3, 4, 5) if with_layers else (0, 1, 2, 3, 4)
    if layout == "HND":
        return (1, 2, 4, 0, 3, 5) if with_layers else (0, 1, 3, 2, 4)
    raise refusal(Reason("kv_cache_layout", layout, "NHD, HND"))


def cache_views(kv_cache: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a layer, without a copy.

    Args:
        kv_cache: ``[blocks, 2, block_size, HK, D]`` (0.20), or ``[blocks, HK, block_size, 2 * D]``
            with values behind keys; float8 may come as bytes. Any strides.
        dtype: What the bytes are.

    Returns:
        ``[blocks, block_size, HK, D]`` each.

    Raises:
        UnsupportedCallError: The cache has another shape.
    """
    if kv_cache.dtype != dtype and kv_cache.element_size() == 1:
        kv_cache = kv_cache.view(dtype)
    if kv_cache.dim() == 5 and kv_cache.shape[1] == 2:
        k, v = kv_cache.unbind(1)
        return k, v
    if kv_cache.dim() == 4 and kv_cache.shape[3] % 2 == 0:
        k, v = kv_cache.transpose(1, 2).tensor_split(2, dim=3)
        return k, v
    raise refusal(Reason("kv_cache.shape", str([*kv_cache.shape]), _SHAPES))


__all__ = ["cache_shape", "cache_views", "stride_order"]
