"""Where a sequence's keys and values lie, read tile by tile and never beyond its length."""

from __future__ import annotations

import torch


class KeySource:
    """Keys and values of one sequence, ragged or paged.

    Args:
        k: ``[Tk, HK, D]``, or ``[num_pages, page_size, HK, D]`` if ``pages`` is given.
        v: The same with width DV.
        length: Keys the sequence sees; nothing past it is read.
        start: Ragged: first row of the sequence.
        pages: Paged: ``[max_pages]`` page ids in order of position.
    """

    def __init__(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        length: int,
        *,
        start: int = 0,
        pages: torch.Tensor | None = None,
    ) -> None:
        self.k, self.v = k, v
        self.length = length
        self.start = start
        self.pages = pages

    def tile(self, start: int, stop: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys ``[n, HK, D]`` and values ``[n, HK, DV]`` at positions ``[start, stop)``."""
        assert 0 <= start <= stop <= self.length
        if self.pages is None:
            rows = slice(self.start + start, self.start + stop)
            return self.k[rows].to(dtype), self.v[rows].to(dtype)
        page_size = self.k.shape[1]
        position = torch.arange(start, stop, device=self.k.device)
        page = self.pages[position // page_size].long()
        slot = position % page_size
        return _pick(self.k, page, slot).to(dtype), _pick(self.v, page, slot).to(dtype)


def _pick(cache: torch.Tensor, page: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
    if cache.dtype.itemsize == 1:  # indexing is not defined for every fp8 dtype on every device
        return cache.view(torch.uint8)[page, slot].view(cache.dtype)
    return cache[page, slot]


__all__ = ["KeySource"]
