"""Attention by its definition: every score written down, softmax, weighted sum; in float64.

This is the oracle. It needs memory for ``q_len * kv_len`` scores and shares with the other
implementation only the rules for a score and for what is visible.
"""

from __future__ import annotations

import torch

from .keys import KeySource
from .rules import ScoreRules


def attend(
    q: torch.Tensor, keys: KeySource, rules: ScoreRules, *, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one sequence.

    Args:
        q: ``[q_len, H, D]``.
        keys: The sequence's keys and values.
        rules: Scale, softcap, bounds, ALiBi, mask.
        dtype: Compute dtype.

    Returns:
        ``o [q_len, H, DV]`` and ``lse [q_len, H]`` in the compute dtype.
    """
    rows, cols = range(q.shape[0]), range(keys.length)
    k, v = keys.tile(0, keys.length, dtype)
    group = q.shape[1] // k.shape[1]
    visible = rules.visible(rows, cols, q.device)  # [rows, cols]
    s = torch.where(visible, rules.scores(q.to(dtype), k, rows, cols), float("-inf"))
    lse = torch.logsumexp(s, dim=-1)  # [H, rows]
    p = torch.softmax(s, dim=-1)
    if bool(torch.isfinite(v).all()):
        o = torch.matmul(p, v.transpose(0, 1).repeat_interleave(group, dim=0)).transpose(0, 1)
    else:  # product by product: a hidden NaN is selected away, a visible one is not
        o = torch.stack(
            [_select_sum(p[h], v[:, h // group], visible) for h in range(q.shape[1])], 1
        )
    empty = ~visible.any(dim=-1)
    o = torch.where(empty[:, None, None], 0.0, o)
    return o, torch.where(empty, float("-inf"), lse).transpose(0, 1)


def _select_sum(p: torch.Tensor, v: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Sum of ``p[i, j] * v[j]`` over the j visible to i: ``[rows, DV]``, row by row."""
    rows = [(p[i][seen, None] * v[seen]).sum(dim=0) for i, seen in enumerate(visible)]
    return torch.stack(rows) if rows else v.new_zeros(0, v.shape[-1])


__all__ = ["attend"]
