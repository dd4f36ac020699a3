"""SGLang's KV pool: slots seen as pages, and new keys and values written the engine's way."""

from __future__ import annotations

from typing import Any

import torch

from ...spec import FP8_DTYPES


class Pool:
    """A ``token_to_kv_pool`` that ``pool_reasons`` has nothing against.

    A pool of models with sliding windows is two pools; slots of the table name places in the one
    for full attention, and a map leads from there to the other.

    Args:
        pool: SGLang's pool.
        page_size: Tokens per page, as the runner says.
    """

    def __init__(self, pool: Any, page_size: int) -> None:
        self.pool = pool
        self.page_size = page_size
        self.has_windows = type(pool).__name__ == "SWAKVPool"
        part = pool.full_kv_pool if self.has_windows else pool
        self.dtype: torch.dtype = part.dtype
        self.is_hnd = getattr(part, "kv_cache_layout", "nhd") == "hnd"

    def is_windowed(self, layer: Any) -> bool:
        """Whether a layer's keys are in the pool for sliding windows."""
        return self.has_windows and bool(self.pool.layers_mapping[layer.layer_id][1])

    def window_slots(self, slots: torch.Tensor) -> torch.Tensor:
        """Slots in the pool for sliding windows, of slots in the one for full attention."""
        mapped: torch.Tensor = self.pool.translate_loc_from_full_to_swa(slots)
        return mapped

    def caches(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer as ``[num_pages, page_size, HK, D or DV]`` views."""
        keys, values = self.pool.get_kv_buffer(layer.layer_id)
        return self._pages(keys), self._pages(values)

    def _pages(self, buffer: torch.Tensor) -> torch.Tensor:
        if self.is_hnd:  # [num_pages, HK, page_size, D]
            return buffer.transpose(1, 2)
        whole = buffer.shape[0] // self.page_size * self.page_size  # no page is given out in part
        return buffer[:whole].view(-1, self.page_size, *buffer.shape[1:])

    def write(self, layer: Any, loc: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write the step's keys ``[T, HK, D]`` and values ``[T, HK, DV]`` through the pool.

        Args:
            layer: SGLang's layer.
            loc: SGLang's ``KVWriteLoc``.
            k: New keys; unchanged.
            v: New values; unchanged.
        """
        k_scale, v_scale = layer.k_scale, layer.v_scale
        if k.dtype != self.dtype:  # the pool divides in place what it then converts
            k = k if k_scale is None else k.clone()
            v = v if v_scale is None else v.clone()
        self.pool.set_kv_buffer(layer, loc, k, v, k_scale, v_scale)

    def scales(
        self, layer: Any, device: torch.device
    ) -> tuple[float | torch.Tensor | None, float | torch.Tensor | None]:
        """What stored keys and values are multiplied by; None: they are stored as they come."""
        if self.dtype not in FP8_DTYPES:
            return None, None
        return _scale(layer.k_scale, device), _scale(layer.v_scale, device)


def _scale(scale: Any, device: torch.device) -> float | torch.Tensor | None:
    if isinstance(scale, torch.Tensor):
        return scale.detach().to(device=device, dtype=torch.float32)
    return None if scale is None else float(scale)


__all__ = ["Pool"]
