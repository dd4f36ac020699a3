"""The merge written as the algebra it is, in torch operations on any device.

For each row, with states ``(o_i, l_i)``:

    M   = max_i l_i                          any common shift is legal; this one cannot overflow
    w_i = exp(l_i - M) / sum_j exp(l_j - M)  weights first, so that o stays within its inputs
    o   = sum_i w_i * o_i                    over w_i != 0: the output of an empty state is garbage
    l   = M + ln sum_j exp(l_j - M)

The state of no keys is ``(0, -inf)``: where every ``l_i`` is -inf, M is replaced by 0 before the
subtraction, the sum is 0, and the weights are set to 0 instead of 0/0. An ``l_i`` of +inf, with
which some kernels mark an empty row, counts as -inf. NaN in an ``l_i`` passes through ``maximum``
and stays visible.

Layout: outputs ``[T, H, DV]``, LSEs ``[T, H]`` float32. Arithmetic is float32, or float64 for
float64 outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

NEG_INF = float("-inf")
FP8_MAX = 448.0  # largest finite float8_e4m3fn


def merge_pair(
    o_a: torch.Tensor,
    lse_a: torch.Tensor,
    o_b: torch.Tensor | None,
    lse_b: torch.Tensor,
    out_o: torch.Tensor,
    out_lse: torch.Tensor,
    num_prefix: int,
    scale: float | torch.Tensor | None,
    in_place: bool = False,
) -> None:
    """Merge two states into ``out_o``, ``out_lse``, which may be the inputs themselves.

    Args:
        o_a: ``[T, H, DV]`` output of the first state.
        lse_a: ``[T, H]`` float32.
        o_b: The second state's output; None is an output of zeros (a sink).
        lse_b: ``[T, H]`` float32.
        out_o: ``[T, H, DV]`` to write.
        out_lse: ``[T, H]`` float32 to write.
        num_prefix: Rows from here on take the second state alone; negative means no such row.
        scale: Divide by this and saturate, for a float8_e4m3fn ``out_o``.
        in_place: Whether an output is an input; all is read before anything is written.
    """
    math = _math_dtype(o_a)
    a, b = _readable_lse(lse_a, math), _readable_lse(lse_b, math)
    if num_prefix >= 0:
        rows = torch.arange(a.shape[0], device=a.device)[:, None]
        a = torch.where(rows < num_prefix, a, NEG_INF)
    weights, lse = _weights(torch.stack((a, b)))
    o = _weighted(o_a, weights[0])
    if o_b is not None:
        o = o + _weighted(o_b, weights[1])
    _store(o, lse, out_o, out_lse, scale)


def merge_many(
    os: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    counts: torch.Tensor | None,
    out_o: torch.Tensor,
    out_lse: torch.Tensor,
) -> None:
    """Merge any number of states into ``out_o``, ``out_lse``, in one pass over them.

    Args:
        os: Outputs, each ``[T, H, DV]``; a stacked ``[n, T, H, DV]`` tensor will do.
        lses: Their LSEs, each ``[T, H]`` float32.
        counts: ``[T]``; row t merges its first ``counts[t]`` states only. None merges all.
        out_o: ``[T, H, DV]`` to write.
        out_lse: ``[T, H]`` float32 to write.
    """
    math = _math_dtype(os[0])
    stacked = lses if isinstance(lses, torch.Tensor) else torch.stack(tuple(lses))
    stacked = _readable_lse(stacked, math)
    if counts is not None:
        index = torch.arange(len(os), device=counts.device)[:, None]
        stacked = torch.where((index < counts)[:, :, None], stacked, NEG_INF)
    weights, lse = _weights(stacked)
    o = torch.zeros(out_o.shape, dtype=math, device=out_o.device)
    for o_i, w_i in zip(os, weights):
        o += _weighted(o_i, w_i)
    _store(o, lse, out_o, out_lse, None)


def _math_dtype(o: torch.Tensor) -> torch.dtype:
    return torch.float64 if o.dtype == torch.float64 else torch.float32


def _readable_lse(lse: torch.Tensor, math: torch.dtype) -> torch.Tensor:
    return torch.where(lse == float("inf"), NEG_INF, lse).to(math)


def _weights(lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised weights ``[n, T, H]`` and merged LSE ``[T, H]`` of ``lse [n, T, H]``."""
    peak = lse.amax(0)
    shift = torch.where(peak == NEG_INF, 0.0, peak)
    e = torch.exp(lse - shift)
    total = e.sum(0)
    weights = torch.where(total == 0, 0.0, e / total)
    return weights, shift + torch.log(total)


def _weighted(o: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    w = weight[..., None]
    return torch.where(w == 0, 0.0, w * o.to(weight.dtype))


def _store(
    o: torch.Tensor,
    lse: torch.Tensor,
    out_o: torch.Tensor,
    out_lse: torch.Tensor,
    scale: float | torch.Tensor | None,
) -> None:
    if scale is not None:  # a float8 conversion does not saturate by itself
        o = (o / scale).clamp(-FP8_MAX, FP8_MAX)
    out_o.copy_(o)
    out_lse.copy_(lse)


__all__ = ["FP8_MAX", "merge_many", "merge_pair"]
