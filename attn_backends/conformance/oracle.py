"""Attention by its definition in float64: what every backend's answer is held against.

One sequence at a time, every score written down. It knows nothing of layouts, page tables or
tiles: it is given each sequence's own queries, keys and values. It shares no code with any backend.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..spec import AttentionSpec


@dataclass(frozen=True)
class Sequence:
    """One sequence's logical inputs, as stored.

    Attributes:
        q: ``[q_len, H, D]``.
        k: ``[kv_len, HK, D]``.
        v: ``[kv_len, HK, DV]``.
        mask: ``[q_len, kv_len]`` bool, True = visible, or None.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None = None


@dataclass(frozen=True)
class Extras:
    """The optional inputs that all sequences share.

    Attributes:
        sinks: ``[H]`` logits, or None.
        slopes: ``[H]`` ALiBi slopes, or None.
        k_scale: ``[HK]`` factors of stored keys, or None.
        v_scale: ``[HK]`` factors of stored values, or None.
    """

    sinks: torch.Tensor | None = None
    slopes: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


@dataclass(frozen=True)
class Exact:
    """The exact state of one sequence, and the size of the sum that made it.

    Attributes:
        o: ``[q_len, H, DV]`` float64.
        lse: ``[q_len, H]`` float64.
        size: ``[q_len, H]`` largest over lanes of ``sum_j p_j |v_j|``: the scale of errors.
        reach: ``[q_len, H]`` largest ``|score|`` among the visible keys, 0 if there is none.
    """

    o: torch.Tensor
    lse: torch.Tensor
    size: torch.Tensor
    reach: torch.Tensor


def visible_keys(spec: AttentionSpec, seq: Sequence) -> torch.Tensor:
    """``[q_len, kv_len]`` bool: the keys that each query sees."""
    q_len, kv_len = seq.q.shape[0], seq.k.shape[0]
    i = torch.arange(q_len, device=seq.q.device)[:, None] + (kv_len - q_len)
    j = torch.arange(kv_len, device=seq.q.device)[None, :]
    seen = torch.ones(q_len, kv_len, dtype=torch.bool, device=seq.q.device)
    if spec.causal:
        seen = seen & (j <= i)
    if spec.window is not None:
        left, right = spec.window
        if left is not None:
            seen = seen & (j >= i - left)
        if right is not None:
            seen = seen & (j <= i + right)
    if seq.mask is not None:
        seen = seen & seq.mask
    return seen


def scaled(x: torch.Tensor, factor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """``[n, HK, D]`` in ``dtype``, times its per-head factor."""
    return x.to(dtype) if factor is None else x.to(dtype) * factor.to(dtype)[None, :, None]


def attend(spec: AttentionSpec, seq: Sequence, extras: Extras | None = None) -> Exact:
    """The exact attention state of one sequence."""
    extras = extras or Extras()
    group = spec.num_heads // spec.num_kv_heads
    q = seq.q.double()
    k = scaled(seq.k, extras.k_scale, torch.float64).repeat_interleave(group, dim=1)
    v = scaled(seq.v, extras.v_scale, torch.float64).repeat_interleave(group, dim=1)
    scale = spec.head_dim**-0.5 if spec.sm_scale is None else spec.sm_scale
    s = torch.einsum("qhd,khd->hqk", q, k) * scale
    if spec.softcap is not None:
        s = spec.softcap * torch.tanh(s / spec.softcap)
    if extras.slopes is not None:
        q_len, kv_len = q.shape[0], k.shape[0]
        i = torch.arange(q_len, device=q.device)[:, None] + (kv_len - q_len)
        j = torch.arange(kv_len, device=q.device)[None, :]
        s = s - extras.slopes.double()[:, None, None] * (i - j).abs()
    s = torch.where(visible_keys(spec, seq), s, float("-inf"))

    # A sink is one more key of value 0. Without sinks the column stays, as a key nobody sees.
    column = s.new_full((*s.shape[:2], 1), float("-inf"))
    if extras.sinks is not None:
        column = extras.sinks.double()[:, None, None].expand(-1, s.shape[1], 1)
    everything = torch.cat([s, column], dim=-1)
    lse = torch.logsumexp(everything, dim=-1)  # [H, q_len]
    p = torch.where(lse[..., None] == float("-inf"), 0.0, torch.exp(s - lse[..., None]))
    o = torch.einsum("hqk,khd->qhd", p, v)
    reach = torch.where(everything.isinf(), 0.0, everything.abs()).amax(dim=-1)
    size = torch.einsum("hqk,khd->qhd", p, v.abs()).amax(dim=-1)
    return Exact(o, lse.transpose(0, 1), size, reach.transpose(0, 1))


__all__ = ["Exact", "Extras", "Sequence", "attend", "scaled", "visible_keys"]
