"""From SGLang's ``RadixAttention`` to an ``AttentionSpec``."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from ...spec import AttentionSpec


def layer_spec(
    layer: Any,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    page_size: int,
    batch_invariant: bool = False,
) -> AttentionSpec:
    """What a layer fixes, in our words.

    SGLang has taken one off the window already: ``sliding_window_size`` is the number of keys
    before a query's own, our ``left``; -1 is none. An encoder sees as many to the right.

    Args:
        layer: SGLang's layer; ``layer_reasons`` has nothing against it.
        dtype: Of queries.
        kv_dtype: Of the pool.
        page_size: Of the pool.
        batch_invariant: Whether the server is to be deterministic.

    Raises:
        InvalidInputError: A number is out of its range; the message names it.
    """
    kind = str(getattr(layer.attn_type, "value", layer.attn_type))
    left = layer.sliding_window_size
    return _spec(
        layer.tp_q_head_num,
        layer.tp_k_head_num,
        layer.qk_head_dim,
        layer.v_head_dim,
        float(layer.scaling),
        float(layer.logit_cap or 0.0),
        -1 if left is None else left,
        kind == "decoder",
        dtype,
        kv_dtype,
        page_size,
        batch_invariant,
    )


@lru_cache(maxsize=256)
def _spec(
    heads: int,
    kv_heads: int,
    dim: int,
    dim_v: int,
    scaling: float,
    cap: float,
    left: int,
    causal: bool,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    page_size: int,
    batch_invariant: bool,
) -> AttentionSpec:
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        head_dim_v=dim_v,
        dtype=dtype,
        kv_dtype=kv_dtype,
        page_size=page_size,
        causal=causal,
        window=None if left < 0 else (left, 0 if causal else left),
        softcap=cap or None,
        sm_scale=scaling,
        batch_invariant=batch_invariant,
    )


__all__ = ["layer_spec"]
