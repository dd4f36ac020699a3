"""Attention as a registered torch operator, for ``torch.compile`` and tensor subclasses.

Eager calls skip it: the dispatcher would cost more than choosing the backend. The operator takes
the ragged or paged form with index tensors and bounds, and chooses the backend when it runs, so a
setting that changes between two runs of a compiled function is honoured. Lengths are symbolic and
nothing is read back, so one compilation serves all lengths.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from .backend import RunExtras
from .batch import Batch
from .config import AttentionConfig
from .errors import InvalidInputError
from .forms import Lengths
from .output import AttentionOutput
from .spec import FP8_DTYPES, AttentionSpec, Window

# Kept alive here, because it owns the operator.
_LIB: Any = torch.library.Library("attn_backends", "FRAGMENT")  # type: ignore[no-untyped-call]
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
_SCHEMA = (
    "attention(Tensor q, Tensor k, Tensor? v, Tensor cu_seqlens_q, Tensor seqlens_k, "
    "Tensor? cu_seqlens_k, Tensor? page_table, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "SymInt head_dim_v, bool causal, SymInt? window_left, SymInt? window_right, float? softcap, "
    "float? sm_scale, bool batch_invariant, Tensor? sinks, Tensor? alibi_slopes, Tensor? mask, "
    "float? k_scale, Tensor? k_scale_tensor, float? v_scale, Tensor? v_scale_tensor, "
    "str? backend, str? config) -> (Tensor o, Tensor lse)"
)


class Layer(NamedTuple):
    """What a call fixes beside the tensors; fields as in ``AttentionSpec``."""

    head_dim_v: int
    causal: bool
    window: Window | None
    softcap: float | None
    sm_scale: float | None
    batch_invariant: bool


def call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    lengths: Lengths,
    layer: Layer,
    extras: RunExtras,
    backend: str | None,
    config: AttentionConfig | None,
) -> AttentionOutput:
    """The operator, with the arguments of the eager form.

    Args:
        q: ``[T, H, D]``.
        k: ``[Tk, HK, D]`` or ``[num_pages, page_size, HK, D]``.
        v: The same with width DV, or None.
        lengths: Index tensors on the queries' device, and bounds.
        layer: What the call fixes beside the tensors.
        extras: Optional inputs of ``run``.
        backend: Name of a backend.
        config: Configuration of this call.
    """
    left, right = layer.window if layer.window is not None else (None, None)
    k_scale, k_tensor = _number_or_tensor(extras.k_scale)
    v_scale, v_tensor = _number_or_tensor(extras.v_scale)
    o, lse = torch.ops.attn_backends.attention(
        q,
        k,
        v,
        lengths.cu_seqlens_q,
        lengths.seqlens_k,
        lengths.cu_seqlens_k,
        lengths.page_table,
        lengths.max_seqlen_q,
        lengths.max_seqlen_k,
        layer.head_dim_v,
        layer.causal,
        left,
        right,
        layer.softcap,
        layer.sm_scale,
        layer.batch_invariant,
        extras.sinks,
        extras.alibi_slopes,
        extras.mask,
        k_scale,
        k_tensor,
        v_scale,
        v_tensor,
        backend,
        None if config is None else config.as_json,
    )
    return AttentionOutput(o, lse)


def layer_spec(
    q: torch.Tensor, k: torch.Tensor, layer: Layer, *, paged: bool, has_alibi: bool, has_mask: bool
) -> AttentionSpec:
    """The spec of a call; equal arguments give the same object."""
    return _spec(
        q.shape[-2],
        k.shape[-2],
        q.shape[-1],
        layer.head_dim_v,
        q.dtype,
        k.dtype,
        k.shape[1] if paged else None,
        layer.causal,
        layer.window,
        layer.softcap,
        layer.sm_scale,
        has_alibi,
        has_mask,
        layer.batch_invariant,
    )


@lru_cache(maxsize=1024, typed=True)  # 1 is not True
def _spec(*fields: Any) -> AttentionSpec:
    return AttentionSpec(*fields)


@lru_cache(maxsize=64)
def _config(text: str) -> AttentionConfig:
    return AttentionConfig.model_validate_json(text)


def _number_or_tensor(scale: Any) -> tuple[float | None, torch.Tensor | None]:
    return (None, scale) if isinstance(scale, torch.Tensor) else (scale, None)


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    batch: Batch,
    spec: AttentionSpec,
    extras: RunExtras,
    backend: str | None,
    config: AttentionConfig | None,
    out: tuple[torch.Tensor, torch.Tensor] | None,
) -> AttentionOutput:
    """Choose, plan and run one ragged or paged call on real tensors."""
    from .registry import select

    phase = "decode" if batch.max_seqlen_q <= 1 else "prefill"
    chosen = select(spec, phase=phase, device=q.device, backend=backend, config=config).backend
    return chosen.run(q, k, v, chosen.plan(batch), out=out, **extras._asdict())


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    seqlens_k: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    page_table: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    head_dim_v: int,
    causal: bool,
    window_left: int | None,
    window_right: int | None,
    softcap: float | None,
    sm_scale: float | None,
    batch_invariant: bool,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    mask: torch.Tensor | None,
    k_scale: float | None,
    k_scale_tensor: torch.Tensor | None,
    v_scale: float | None,
    v_scale_tensor: torch.Tensor | None,
    backend: str | None,
    config: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    window = (window_left, window_right)
    layer = Layer(head_dim_v, causal, window, softcap, sm_scale, batch_invariant)
    spec = layer_spec(
        q,
        k,
        layer,
        paged=page_table is not None,
        has_alibi=alibi_slopes is not None,
        has_mask=mask is not None,
    )
    on_host = cu_seqlens_q.device.type == "cpu"
    where = Lengths(
        cu_seqlens_q, seqlens_k, cu_seqlens_k, page_table, max_seqlen_q, max_seqlen_k, on_host
    )
    extras = RunExtras(
        sinks,
        alibi_slopes,
        mask,
        k_scale if k_scale_tensor is None else k_scale_tensor,
        v_scale if v_scale_tensor is None else v_scale_tensor,
    )
    # Fresh contiguous results, as the fake says, whatever a backend would allocate.
    o, lse = _fresh(q, head_dim_v)
    with torch.no_grad():
        run(
            q,
            k,
            v,
            where.batch(q.device, q.shape[0]),
            spec,
            extras,
            backend,
            None if config is None else _config(config),
            (o, lse),
        )
    return o, lse


def _attention_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    seqlens_k: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    page_table: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    head_dim_v: int,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    if q.dim() != 3:
        raise InvalidInputError.of("q.shape", list(q.shape), "[T, H, D]")
    return _fresh(q, head_dim_v)


def _fresh(q: torch.Tensor, head_dim_v: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Results of the right shapes: ``[T, H, DV]`` in the output dtype, ``[T, H]`` float32."""
    dtype = torch.bfloat16 if q.dtype in FP8_DTYPES else q.dtype
    rows, heads = q.shape[0], q.shape[1]
    o = torch.empty((rows, heads, head_dim_v), dtype=dtype, device=q.device)
    return o, torch.empty((rows, heads), dtype=torch.float32, device=q.device)


_LIB.define(_SCHEMA, tags=_TAGS)
_LIB.impl("attention", _attention, "CompositeExplicitAutograd")
torch.library.register_fake("attn_backends::attention", _attention_fake, lib=_LIB)

__all__ = ["Layer", "call", "layer_spec", "run"]
