"""transformers' ``[B, HK, S, D]`` keys and values as the rows ``[Tk, HK, D]`` of our contract."""

from __future__ import annotations

import torch

_INT32_MAX = 2**31 - 1


def kv_rows(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Keys and values as rows, without a copy wherever the strides allow.

    A cache ``[B, HK, S, D]`` keeps a head's tokens together, so its tokens have one stride within a
    batch entry and another between entries. If the second is a multiple of the first, entry b
    simply begins ``b * step`` rows further on: the rows between are those of other heads, which
    the lengths leave out.

    Args:
        key: ``[B, HK, S, D]``, any strides.
        value: ``[B, HK, S, DV]``, any strides.

    Returns:
        ``k [Tk, HK, D]``, ``v [Tk, HK, DV]``, and the rows from one batch entry to the next.
    """
    step = _step(key)
    if step is not None and step == _step(value):
        return _view(key, step), _view(value, step), step
    return _copy(key), _copy(value), key.shape[2]


def _step(x: torch.Tensor) -> int | None:
    """Rows between batch entries, or None if no single row stride reaches every token."""
    batch, _, length, dim = x.shape
    if (dim > 1 and x.stride(3) != 1) or x.numel() == 0:
        return None
    if batch == 1 or length == 1:
        return length
    step, rest = divmod(x.stride(0), x.stride(2)) if x.stride(2) > 0 else (0, 0)
    fits = rest == 0 and step >= length and (batch - 1) * step + length <= _INT32_MAX
    return step if fits else None


def _view(x: torch.Tensor, step: int) -> torch.Tensor:
    batch, heads, length, dim = x.shape
    row = x.stride(0) if length == 1 and batch > 1 else x.stride(2)
    return x.as_strided(((batch - 1) * step + length, heads, dim), (row, x.stride(1), 1))


def _copy(x: torch.Tensor) -> torch.Tensor:
    batch, heads, length, dim = x.shape
    return x.transpose(1, 2).reshape(batch * length, heads, dim).contiguous()


__all__ = ["kv_rows"]
