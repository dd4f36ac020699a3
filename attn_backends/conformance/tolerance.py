"""How far an answer may be from the exact one, worked out from the data of the call.

The bound of a row is twice the sum of two things, each at the row's own scale:

* the error that an honest low-precision kernel makes on the same data. ``emulate`` is one: float32
  sums, base-2 exponentials, and probabilities rounded to the input dtype, as tensor cores want;
* one rounding step of that precision.

The emulation's error is taken relative to ``sum p |v|``, the size of the sum that is rounded, and
the largest ratio of the call counts for all its rows: rows are samples of one error law.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..spec import AttentionSpec
from .oracle import Exact, Extras, Sequence, attend, scaled, visible_keys

LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Expected:
    """What a call must return, and how far it may stray.

    Attributes:
        o: ``[T, H, DV]`` float64.
        lse: ``[T, H]`` float64.
        o_tol: ``[T, H]`` bound on ``|o - exact|``, the same for all lanes of a row.
        lse_tol: ``[T, H]`` bound on ``|lse - exact|``.
        step: ``[T, H]`` one rounding step of the output dtype at the row's scale.
    """

    o: torch.Tensor
    lse: torch.Tensor
    o_tol: torch.Tensor
    lse_tol: torch.Tensor
    step: torch.Tensor


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding to nearest in ``dtype``."""
    return torch.finfo(dtype).eps / 2


def compute_dtype(spec: AttentionSpec) -> torch.dtype:
    """Dtype a kernel may accumulate in: float32, float64 for float64 inputs."""
    return torch.float64 if spec.dtype == torch.float64 else torch.float32


def emulate(
    spec: AttentionSpec, seq: Sequence, extras: Extras
) -> tuple[torch.Tensor, torch.Tensor]:
    """``o [q_len, H, DV]`` and ``lse [q_len, H]`` as a plain low-precision kernel gives them.

    Sums run in the compute dtype and are rounded or cut where a tensor-core kernel does so. With
    a softcap, half-precision kernels use the hardware's ``tanh``, whose 11 bits are imitated by a
    rounding to float16.
    """
    dtype = compute_dtype(spec)
    group = spec.num_heads // spec.num_kv_heads
    k = scaled(seq.k, extras.k_scale, dtype).repeat_interleave(group, dim=1)
    v = seq.v.to(dtype).repeat_interleave(group, dim=1)
    s = _products(spec, seq.q, k, dtype) * spec.scale
    if spec.softcap is not None:
        capped = torch.tanh(s / spec.softcap)
        if spec.dtype.itemsize <= 2:
            capped = capped.half().to(dtype)
        s = spec.softcap * capped
    if extras.slopes is not None:
        q_len, kv_len = seq.q.shape[0], seq.k.shape[0]
        i = torch.arange(q_len, device=s.device)[:, None] + (kv_len - q_len)
        j = torch.arange(kv_len, device=s.device)[None, :]
        s = s - extras.slopes.to(dtype)[:, None, None] * (i - j).abs()
    s = torch.where(visible_keys(spec, seq), s * LOG2_E, float("-inf"))
    column = s.new_full((*s.shape[:2], 1), float("-inf"))
    if extras.sinks is not None:
        column = (extras.sinks.to(dtype) * LOG2_E)[:, None, None].expand(-1, s.shape[1], 1)
    m = torch.cat([s, column], dim=-1).amax(dim=-1, keepdim=True)
    m = torch.where(m == float("-inf"), 0.0, m)
    p = torch.exp2(s - m)
    total = p.sum(dim=-1, keepdim=True) + torch.exp2(column - m)  # [H, q_len, 1]
    if spec.dtype.itemsize <= 2:
        p = p.to(spec.dtype).to(dtype)
    o = torch.einsum("hqk,khd->qhd", p, v)
    o = torch.where(total.transpose(0, 1) > 0, o / total.transpose(0, 1), 0.0)
    if extras.v_scale is not None:
        o = o * extras.v_scale.to(dtype).repeat_interleave(group)[None, :, None]
    lse = (m + torch.log2(total))[..., 0].transpose(0, 1) / LOG2_E
    return o.to(spec.out_dtype), lse.float()


def _products(
    spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """``q . k`` as ``[H, q_len, kv_len]``; half types as tensor cores sum them.

    They add 16 products at a time to a float32 that is cut, not rounded, so that the error grows
    with the head dim.
    """
    if spec.dtype.itemsize > 2:
        return torch.einsum("qhd,khd->hqk", q.to(dtype), k)
    if spec.dtype.itemsize == 1:
        return _fp8_products(q, k, dtype)
    total = torch.zeros(q.shape[1], q.shape[0], k.shape[0], dtype=dtype, device=q.device)
    for d in range(0, q.shape[2], 16):
        lanes = slice(d, d + 16)
        exact = torch.einsum("qhd,khd->hqk", q[..., lanes].double(), k[..., lanes].double())
        exact = exact + total.double()
        total = exact.to(dtype)
        too_far = total.double().abs() > exact.abs()
        total = torch.where(too_far, torch.nextafter(total, torch.zeros_like(total)), total)
    return total


#: Bits after the leading one that fp8 products keep when a tensor core lines them up for a sum.
FP8_SUM_BITS = 13


def _fp8_products(q: torch.Tensor, k: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``q . k`` of fp8 numbers: 32 products at a time, each cut to the grid of the largest."""
    total = torch.zeros(q.shape[1], q.shape[0], k.shape[0], dtype=torch.float64, device=q.device)
    for d in range(0, q.shape[2], 32):
        lanes = slice(d, d + 32)
        left = q[..., lanes].double().transpose(0, 1)[:, :, None]  # [H, q_len, 1, 32]
        terms = left * k[..., lanes].double().transpose(0, 1)[:, None]  # [H, q_len, kv_len, 32]
        terms = torch.cat([terms, total[..., None]], dim=-1)
        largest = terms.abs().amax(dim=-1, keepdim=True).clamp_min(2.0**-60)
        grid = torch.exp2(largest.log2().floor() - FP8_SUM_BITS)
        total = ((terms / grid).trunc() * grid).sum(dim=-1)
    return total.to(dtype)


def expect(
    spec: AttentionSpec, sequences: list[Sequence], extras: Extras, *, rounds_row_sum: bool = False
) -> Expected:
    """Exact answers of a whole call, with bounds from its data.

    Args:
        spec: What the layer fixes.
        sequences: Queries, keys and values, sequence by sequence.
        extras: The optional inputs.
        rounds_row_sum: Whether the backend declares that it sums rounded probabilities: then the
            LSE may be off by the unit roundoff of the query dtype, which bounds what rounding
            every term of a sum of positive numbers can do to it.
    """
    exact = [attend(spec, seq, extras) for seq in sequences]
    if not exact:
        raise ValueError("sequences=[] (allowed: at least one)")
    o, lse = torch.cat([e.o for e in exact]), torch.cat([e.lse for e in exact])
    size, reach = torch.cat([e.size for e in exact]), torch.cat([e.reach for e in exact])
    low = [emulate(spec, seq, extras) for seq in sequences]
    o_low, lse_low = torch.cat([a for a, _ in low]), torch.cat([b for _, b in low])

    error = (o_low.double() - o).abs().amax(dim=-1) if o.numel() else size * 0
    ratio = _largest(error / torch.where(size > 0, size, 1.0))
    small = torch.finfo(spec.out_dtype).smallest_normal * unit_roundoff(spec.out_dtype)
    step = unit_roundoff(spec.out_dtype) * size + small
    # Rounding a score of size x in the compute dtype moves its exponential by a factor of x times
    # the unit roundoff.
    score_step = unit_roundoff(compute_dtype(spec)) * reach * size
    o_tol = 2 * (ratio * size + step + score_step)

    # One rounding of the LSE is relative to the largest number on the way: a score, or itself.
    scale = torch.maximum(reach, torch.where(torch.isinf(lse), 0.0, lse.abs())).clamp_min(1.0)
    lse_ratio = _largest(torch.where(torch.isinf(lse), 0.0, (lse_low.double() - lse).abs()) / scale)
    lse_tol = 2 * (lse_ratio + 2 * unit_roundoff(torch.float32)) * scale
    if rounds_row_sum and spec.dtype.itemsize <= 2:
        lse_tol = lse_tol + unit_roundoff(spec.dtype)
    return Expected(o, lse, o_tol, lse_tol, step)


def _largest(x: torch.Tensor) -> float:
    return float(x.max()) if x.numel() else 0.0


__all__ = ["Exact", "Expected", "emulate", "expect", "unit_roundoff"]
