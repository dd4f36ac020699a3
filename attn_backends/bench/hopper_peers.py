"""Other libraries beside the Hopper prefill, as they are installed; absent ones say why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .hopper_gates import FA3, PAGED, VARLEN
from .hopper_inputs import PointInputs, starts_of

Call = Callable[[int], Any]


def peers(x: PointInputs) -> tuple[dict[str, Call], dict[str, str]]:
    """Calls by name on the inputs of a point, and why others are missing."""
    out: dict[str, Call] = {}
    absent: dict[str, str] = {}
    paged, point = x.table is not None, x.point
    wanted: dict[str, Callable[[], Call]] = {}
    if point.head_dim == point.dv:
        if paged:
            wanted[PAGED] = lambda: _fa3_paged(x)
        else:
            wanted[VARLEN] = lambda: _fa3_varlen(x)
            if not point.mix:
                wanted[FA3] = lambda: _fa3(x)
    elif not paged:
        wanted["cudnn"] = lambda: _cudnn(x)
    if paged or point.head_dim != point.dv:
        for kernel in _flashinfer_kernels(x):
            wanted[f"flashinfer-{kernel}"] = lambda kernel=kernel: _flashinfer(x, kernel)
    for name, make in wanted.items():
        try:
            out[name] = make()
        except Exception as error:  # a foreign library may raise anything
            absent[name] = f"{type(error).__name__}: {str(error)[:160]}"
    return out, absent


def _flashinfer_kernels(x: PointInputs) -> tuple[str, ...]:
    """Those that may be the fastest; whole prompts take its Hopper kernel half of fa2's time."""
    if x.point.head_dim != 128 or x.point.dv != 128:
        return ("fa2",)
    return ("fa3", "fa2") if x.point.kv_len > x.point.q_len else ("fa3",)


def _fa3(x: PointInputs) -> Call:
    """FlashAttention 3 on sequences of equal length."""
    import flash_attn_interface as fa

    point, (heads, kv_heads) = x.point, x.point.heads
    return lambda i: fa.flash_attn_func(
        x.q[i].view(point.batch, point.q_len, heads, point.head_dim),
        x.k[i].view(point.batch, point.kv_len, kv_heads, point.head_dim),
        x.v[i].view(point.batch, point.kv_len, kv_heads, point.dv),
        causal=point.causal, softmax_scale=x.scale,
    )  # fmt: skip


def _fa3_varlen(x: PointInputs) -> Call:
    import flash_attn_interface as fa

    return lambda i: fa.flash_attn_varlen_func(
        x.q[i], x.k[i], x.v[i], x.starts_q, x.starts_k, max(x.q_lens), max(x.kv_lens),
        causal=x.point.causal, softmax_scale=x.scale,
    )  # fmt: skip


def _fa3_paged(x: PointInputs) -> Call:
    import flash_attn_interface as fa

    point = x.point
    common: dict[str, Any] = {
        "cache_seqlens": x.lens_k, "page_table": x.table, "causal": point.causal,
        "softmax_scale": x.scale,
    }  # fmt: skip
    if point.mix:
        common |= {"cu_seqlens_q": x.starts_q, "max_seqlen_q": max(x.q_lens)}
        return lambda i: fa.flash_attn_with_kvcache(x.q[i], x.k[i], x.v[i], **common)
    shape = (point.batch, point.q_len, point.heads[0], point.head_dim)
    return lambda i: fa.flash_attn_with_kvcache(x.q[i].view(shape), x.k[i], x.v[i], **common)


def _cudnn(x: PointInputs) -> Call:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    point = x.point

    def call(i: int) -> Any:
        q, k, v = (
            t[i].view(point.batch, -1, *t[i].shape[1:]).transpose(1, 2) for t in (x.q, x.k, x.v)
        )
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            o = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=point.causal, scale=x.scale,
                enable_gqa=point.heads[0] != point.heads[1],
            )  # fmt: skip
        return o.transpose(1, 2)

    return call


def _flashinfer(x: PointInputs, kernel: str) -> Call:
    """FlashInfer's paged or ragged wrapper; its plan is outside the timed region."""
    import flashinfer

    point, size = x.point, x.point.page_size
    workspace = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    if size is None:
        ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=kernel)
        ragged.plan(
            x.starts_q, x.starts_k, *point.heads, point.head_dim, head_dim_vo=point.dv,
            causal=point.causal, sm_scale=x.scale, q_data_type=torch.bfloat16,
        )  # fmt: skip
        return lambda i: ragged.run(x.q[i], x.k[i], x.v[i])
    counts = [-(-n // size) for n in x.kv_lens]
    last = [n - (c - 1) * size for n, c in zip(x.kv_lens, counts)]
    assert x.table is not None
    pages = torch.cat([x.table[i, :n] for i, n in enumerate(counts)])
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=kernel)
    wrapper.plan(
        x.starts_q, starts_of(counts), pages,
        torch.tensor(last, dtype=torch.int32, device="cuda"), *point.heads, point.head_dim, size,
        head_dim_vo=point.dv, causal=point.causal, sm_scale=x.scale, q_data_type=torch.bfloat16,
    )  # fmt: skip
    return lambda i: wrapper.run(x.q[i], (x.k[i], x.v[i]))


__all__ = ["Call", "peers"]
