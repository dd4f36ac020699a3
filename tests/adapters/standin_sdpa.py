"""Stand-ins of PyTorch's attention operators for CUDA, on the CPU, with their traps."""

from __future__ import annotations

from typing import Any

import torch


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, half: bool) -> None:
    """What all of them want of their inputs ``[n, H, L, D]``."""
    assert q.dtype == k.dtype == v.dtype
    assert not half or q.dtype in (torch.float16, torch.bfloat16)
    for x in (q, k, v):
        assert x.dim() == 4 and x.stride(-1) == 1 and x.shape[-1] % 8 == 0, x.shape
        assert x.data_ptr() % 16 == 0, "misaligned address"
        for size, stride in zip(x.shape[:-1], x.stride()[:-1]):
            assert size <= 1 or stride * x.element_size() % 16 == 0, "misaligned address"
        assert x.shape[2], "no rows"


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    causal: bool,
    scale: float,
    corner: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causality hides key j from query i if ``j > i + corner``; o lies in memory by tokens."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = q.float() @ k.transpose(2, 3) * scale
    if bias is not None:
        scores = scores + bias.float()
    if causal:
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1 + corner)
        scores = scores.masked_fill(hidden, float("-inf"))
    o = (scores.softmax(dim=-1) @ v).to(q.dtype)
    return o.transpose(1, 2).contiguous().transpose(1, 2), scores.logsumexp(dim=-1)


def flash(
    q: Any, k: Any, v: Any, *, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, scale: float,
) -> Any:  # fmt: skip
    """Shares heads of keys; one width; causal from the bottom right."""
    check(q, k, v, half=True)
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] and not dropout_p
    o, lse = attend(q, k, v, None, is_causal, scale, k.shape[2] - q.shape[2])
    return o, lse, None, None, q.shape[2], k.shape[2], None, None, None


def efficient(
    q: Any, k: Any, v: Any, *, attn_bias: Any, compute_log_sumexp: bool, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float,
) -> Any:  # fmt: skip
    """As many heads of keys as of queries; causal from the top left; pads its LSE."""
    check(q, k, v, half=False)
    assert compute_log_sumexp and not dropout_p and q.shape[1] == k.shape[1]
    assert not is_causal or q.shape[2] == k.shape[2]
    if attn_bias is not None:
        assert attn_bias.dtype == q.dtype and attn_bias.stride(-2) % 16 == 0
        assert attn_bias.shape == (*q.shape[:3], k.shape[2])
    o, lse = attend(q, k, v, attn_bias, is_causal, scale, 0)
    wide = torch.full((*lse.shape[:2], -(-lse.shape[2] // 32) * 32), float("inf"))
    wide[..., : lse.shape[2]] = lse
    return o, wide, None, None


def cudnn(
    q: Any, k: Any, v: Any, *, attn_bias: Any, compute_log_sumexp: bool, dropout_p: float = 0.0,
    is_causal: bool = False, return_debug_mask: bool = False, scale: float,
) -> Any:  # fmt: skip
    """No bias here; causal from the top left; its LSE has a dimension more."""
    check(q, k, v, half=True)
    assert attn_bias is None and compute_log_sumexp and not dropout_p
    assert q.shape[1] == k.shape[1] and (not is_causal or q.shape[2] == k.shape[2])
    o, lse = attend(q, k, v, None, is_causal, scale, 0)
    return o, lse[..., None], None, None, q.shape[2], k.shape[2], None, None, None


OPERATORS = {"flash": flash, "efficient": efficient, "cudnn": cudnn}
