"""Attention of one sequence, plainly: what the stand-ins of the libraries compute with."""

from __future__ import annotations

import torch


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    left: int | None = None,
    right: int | None = None,
    softcap: float = 0.0,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``o [q_len, H, DV]`` and natural ``lse [q_len, H]``, float32; rows without keys: 0, -inf.

    Masked keys take part with weight 0, as in a kernel that loads whole tiles: a NaN in a value
    that nobody sees still reaches the output.
    """
    q_len, kv_len, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    if not kv_len:
        o = torch.zeros(q_len, q.shape[1], v.shape[-1])
        return o, torch.full((q_len, q.shape[1]), float("-inf"))
    k = k.float().repeat_interleave(group, dim=1)
    v = v.float().repeat_interleave(group, dim=1)
    s = torch.einsum("qhd,khd->hqk", q.float(), k)
    i = torch.arange(q_len)[:, None] + kv_len - q_len
    j = torch.arange(kv_len)[None, :]
    hidden = torch.zeros(q_len, kv_len, dtype=torch.bool)
    if left is not None:
        hidden |= j < i - left
    if right is not None:
        hidden |= j > i + right
    if softcap:
        s = softcap * torch.tanh(s * scale / softcap)
        scale = 1.0
    if bias is not None:
        s = s + bias / scale if scale else s
    # Kernels multiply masked scores by the scale, so a scale of 0 makes NaN of -inf.
    s = s.masked_fill(hidden, float("-inf")) * scale
    m = s.amax(dim=-1, keepdim=True)
    m = torch.where(m == float("-inf"), 0.0, m)
    p = torch.exp(s - m)
    total = p.sum(dim=-1, keepdim=True)
    o = torch.einsum("hqk,khd->qhd", p, v)
    o = torch.where(total.transpose(0, 1) == 0, 0.0, o / total.transpose(0, 1))
    lse = (m + torch.log(total))[..., 0].transpose(0, 1)
    return o, lse


def pages(cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """The first ``length`` keys of a paged cache ``[num_pages, page_size, HK, D]``."""
    page_size = cache.shape[1]
    used = table[: -(-length // page_size)].long()
    return take(cache, used).flatten(0, 1)[:length]


def take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows by index, of any dtype."""
    if x.dtype.itemsize == 1:
        return x.view(torch.uint8)[index].view(x.dtype)
    return x[index]
