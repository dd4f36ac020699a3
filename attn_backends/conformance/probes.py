"""Zero-query probes: calls whose exact answers can be counted on fingers.

With q = 0 every visible score is 0, and with ``v[j] = j`` the output is the mean of the visible
positions and the LSE the logarithm of their number. A wrong mask, page table, length or head map
shows as a wrong number that tells what went wrong. Scale, softcap and fp8 scales do not show.
"""

from __future__ import annotations

import math

import torch

from ..spec import AttentionSpec
from .tolerance import Expected, unit_roundoff


def visible_positions(spec: AttentionSpec, i: int, q_len: int, kv_len: int) -> list[int]:
    """Key positions that query ``i`` of a sequence sees, by the words of the contract."""
    place = i + kv_len - q_len
    left, right = spec.window if spec.window is not None else (None, None)
    return [
        j
        for j in range(kv_len)
        if (not spec.causal or j <= place)
        and (left is None or j >= place - left)
        and (right is None or j <= place + right)
    ]


def probe_answers(
    spec: AttentionSpec, q_lens: tuple[int, ...], kv_lens: tuple[int, ...], device: torch.device
) -> Expected:
    """Exact answers of a probe, and the few float32 roundings that a kernel may make."""
    means, logs, tops = [], [], []
    for q_len, kv_len in zip(q_lens, kv_lens):
        for i in range(q_len):
            seen = visible_positions(spec, i, q_len, kv_len)
            means.append(sum(seen) / len(seen) if seen else 0.0)
            logs.append(math.log(len(seen)) if seen else -math.inf)
            tops.append(float(max(seen, default=0)))
    mean, log, top = (torch.tensor(x, dtype=torch.float64) for x in (means, logs, tops))
    heads = spec.num_heads
    o = mean[:, None, None].expand(-1, heads, spec.dv)
    # Sums of whole numbers are exact; a division and a merge of splits are not. A kernel that
    # normalises first rounds each of n weights, and errs by a part of n steps.
    single = unit_roundoff(torch.float32) * (8 + torch.exp(log) / 4)
    step = 2 * unit_roundoff(spec.out_dtype) * mean
    o_tol = step + single * top
    lse_tol = single * torch.where(torch.isinf(log), 0.0, log).clamp_min(1.0)

    def wide(x: torch.Tensor) -> torch.Tensor:
        return x[:, None].expand(-1, heads).to(device)

    return Expected(o.to(device), wide(log), wide(o_tol), wide(lse_tol), wide(step))


__all__ = ["probe_answers", "visible_positions"]
