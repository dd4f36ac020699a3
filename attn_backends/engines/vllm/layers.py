"""From what vLLM tells a layer about itself to an ``AttentionSpec``, or to a refusal."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import Reason, UnsupportedCallError
from ...spec import AttentionSpec

#: vLLM's names of cache dtypes, beside ``auto``.
KV_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}

#: Further constructor arguments, with the value that asks for nothing.
NEUTRAL: dict[str, Any] = {"chunk_lookback": -1, "use_alibi_sqrt": False}


def refusal(*reasons: Reason) -> UnsupportedCallError:
    """The error of a layer or a step that the plug cannot do."""
    text = f"attn_backends under vLLM cannot do this: {'; '.join(map(str, reasons))}"
    return UnsupportedCallError(text, backend="vllm", reasons=reasons)


def kv_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a cache by vLLM's name.

    Raises:
        UnsupportedCallError: The name stands for a format that is not a plain dtype.
    """
    if name == "auto":
        return dtype
    if name not in KV_DTYPES:
        raise refusal(Reason("kv_cache_dtype", name, ", ".join(("auto", *KV_DTYPES))))
    return KV_DTYPES[name]


def layer_spec(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    scale: float,
    kv_cache_dtype: str = "auto",
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    has_alibi: bool = False,
    batch_invariant: bool = False,
    page_size: int | None = None,
) -> AttentionSpec:
    """The spec of a decoder layer.

    Args:
        num_heads: H of this rank.
        num_kv_heads: HK of this rank.
        head_size: D, and DV.
        dtype: Of queries.
        scale: Factor on ``q . k``.
        kv_cache_dtype: vLLM's name of the cache dtype.
        sliding_window: Tokens that a query sees, its own included; None is all.
        logits_soft_cap: None or 0 is off.
        has_alibi: Whether the layer has ALiBi slopes.
        batch_invariant: Whether ``VLLM_BATCH_INVARIANT`` is set.
        page_size: Tokens per block; None leaves it open.

    Raises:
        UnsupportedCallError: The cache dtype is not a plain one.
        InvalidInputError: A number is out of its range; the message names it.
    """
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_size,
        dtype=dtype,
        kv_dtype=kv_dtype(kv_cache_dtype, dtype),
        page_size=page_size,
        causal=True,
        window=None if sliding_window is None else (sliding_window - 1, 0),
        softcap=logits_soft_cap or None,
        sm_scale=float(scale),
        has_alibi=has_alibi,
        batch_invariant=batch_invariant,
    )


def extra_reasons(attn_type: str, extra: dict[str, Any]) -> list[Reason]:
    """Reasons against a layer from what has no place in a spec.

    Args:
        attn_type: vLLM's kind of attention.
        extra: Constructor arguments beyond the common ones.
    """
    reasons = []
    if attn_type != "decoder":
        reasons.append(Reason("attn_type", str(getattr(attn_type, "value", attn_type)), "decoder"))
    for name, value in extra.items():
        neutral = NEUTRAL.get(name)
        if value is not None and value != neutral:
            reasons.append(Reason(name, repr(value), repr(neutral)))
    return reasons


__all__ = ["extra_reasons", "kv_dtype", "layer_spec", "refusal"]
