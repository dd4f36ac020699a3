"""Other libraries on the same inputs, each at its best known settings; absent ones say why."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from .attention_cases import Inputs
from .attention_engines import mla_engines, vllm_prefill

Call = Callable[[int], Any]


def _paged_lists(x: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    size = x.case.page_size
    counts = [-(-n // size) for n in x.kv_lens]
    indptr = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    indices = torch.cat([x.table[b, :n] for b, n in enumerate(counts)])
    last = torch.tensor([n - (c - 1) * size for n, c in zip(x.kv_lens, counts)], dtype=torch.int32)
    return indptr.cuda(), indices, last.cuda()


def _workspace() -> torch.Tensor:
    return torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")


def flashinfer_decode(x: Inputs, backend: str = "fa2") -> Call:
    """FlashInfer's decode wrapper on tensor cores; its plan is outside the timed region."""
    import flashinfer

    case, spec = x.case, x.spec
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        _workspace(), "NHD", use_tensor_cores=True, backend=backend
    )
    wrapper.plan(
        *_paged_lists(x), case.num_heads, case.num_kv_heads, case.head_dim, case.page_size,
        q_data_type=spec.dtype, kv_data_type=spec.kv,
    )  # fmt: skip
    return lambda i: wrapper.run(x.q[i], (x.k[i], x.v[i]), return_lse=True)


def flashinfer_prefill(x: Inputs, backend: str = "fa2") -> Call:
    """FlashInfer's paged or ragged prefill wrapper."""
    import flashinfer

    case, spec, batch = x.case, x.spec, x.batch
    if case.page_size is None:
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
            _workspace(), "NHD", backend=backend
        )
        wrapper.plan(
            batch.cu_seqlens_q, batch.cu_seqlens_k, case.num_heads, case.num_kv_heads,
            case.head_dim, head_dim_vo=case.head_dim_v, causal=case.causal,
            q_data_type=spec.dtype, kv_data_type=spec.kv,
        )  # fmt: skip
        return lambda i: wrapper.run(x.q[i], x.k[i], x.v[i], return_lse=True)
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(), "NHD", backend=backend)
    paged.plan(
        batch.cu_seqlens_q, *_paged_lists(x), case.num_heads, case.num_kv_heads, case.head_dim,
        case.page_size, causal=case.causal, q_data_type=spec.dtype, kv_data_type=spec.kv,
    )  # fmt: skip
    return lambda i: paged.run(x.q[i], (x.k[i], x.v[i]), return_lse=True)


def flashinfer_mla(x: Inputs, backend: str = "fa3") -> Call:
    """FlashInfer's MLA wrapper on one cache of 576 lanes."""
    import flashinfer

    case, spec = x.case, x.spec
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(_workspace(), backend=backend)
    indptr, indices, _ = _paged_lists(x)
    wrapper.plan(
        x.batch.cu_seqlens_q, indptr, indices, x.batch.seqlens_k, case.num_heads, 512, 64,
        case.page_size, case.causal, spec.scale, spec.dtype, spec.kv,
    )  # fmt: skip

    def call(i: int) -> Any:
        q, k = x.q[i], x.k[i][:, :, 0]
        return wrapper.run(q[..., :512], q[..., 512:], k[..., :512], k[..., 512:], return_lse=True)

    return call


def fa3(x: Inputs) -> Call:
    """FlashAttention 3 with its scheduler metadata prepared outside the timed region."""
    import flash_attn_interface as fa

    case, batch, spec = x.case, x.batch, x.spec
    scale = spec.scale
    if case.page_size is None:

        def ragged(i: int) -> Any:
            return fa.flash_attn_varlen_func(
                x.q[i], x.k[i], x.v[i], batch.cu_seqlens_q, batch.cu_seqlens_k, case.q_len,
                case.kv_len, softmax_scale=scale, causal=case.causal,
            )  # fmt: skip

        return ragged
    most = max(x.kv_lens)
    common: dict[str, Any] = {
        "cache_seqlens": batch.seqlens_k, "page_table": x.table, "causal": case.causal,
        "softmax_scale": scale, "return_softmax_lse": True,
    }  # fmt: skip
    meta = fa.get_scheduler_metadata(
        case.batch, case.q_len, most, case.num_heads, case.num_kv_heads, case.head_dim,
        batch.seqlens_k, qkv_dtype=spec.dtype, headdim_v=case.head_dim_v,
        page_size=case.page_size, causal=case.causal,
    )  # fmt: skip

    def call(i: int) -> Any:
        q = x.q[i].view(case.batch, case.q_len, case.num_heads, case.head_dim)
        return fa.flash_attn_with_kvcache(q, x.k[i], x.v[i], scheduler_metadata=meta, **common)

    return call


def fa3_batched(x: Inputs) -> Call:
    """FlashAttention 3 on sequences of one length, which it need not be told: its fastest form."""
    import flash_attn_interface as fa

    case = x.case
    if case.page_size is not None or case.ragged:
        raise ValueError("keys of one length without pages only")

    def dense(t: torch.Tensor) -> torch.Tensor:
        return t.view(case.batch, -1, *t.shape[1:])

    return lambda i: fa.flash_attn_func(
        dense(x.q[i]), dense(x.k[i]), dense(x.v[i]), softmax_scale=x.spec.scale, causal=case.causal
    )


def sdpa(x: Inputs, name: str) -> Call:
    """One of torch's fused kernels on dense tensors; without an LSE."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    case = x.case
    if case.page_size is not None or case.q_len != case.kv_len:
        raise ValueError("dense square problems only")
    which = {"cudnn": SDPBackend.CUDNN_ATTENTION, "torch-flash": SDPBackend.FLASH_ATTENTION}[name]

    def dense(t: torch.Tensor) -> torch.Tensor:
        return t.view(case.batch, case.q_len, *t.shape[1:]).transpose(1, 2)

    def call(i: int) -> Any:
        with sdpa_kernel([which]):
            out = torch.nn.functional.scaled_dot_product_attention(
                dense(x.q[i]), dense(x.k[i]), dense(x.v[i]), is_causal=case.causal, enable_gqa=True
            )
        return out.transpose(1, 2)

    return call


#: What ``peers`` knows, by benchmark; numbers are the parts that sequences are cut into.
PEER_NAMES: dict[str, tuple[str, ...]] = {
    "mla": (
        "fa3", "fa3-paged", "flashinfer-fa3", "flashinfer-fa2", "vllm-triton-4", "vllm-triton-16",
        "vllm-triton-64", "sglang-triton-8", "sglang-triton-32",
    ),
    "decode": ("flashinfer-fa2", "fa3"),
    "extend": ("fa3", "flashinfer-fa2", "flashinfer-fa3", "vllm-triton"),
    "prefill": (
        "fa3", "fa3-varlen", "flashinfer-fa2", "flashinfer-fa3", "cudnn", "torch-flash",
        "vllm-triton",
    ),
}  # fmt: skip


def peers(x: Inputs) -> dict[str, Callable[[], Call]]:
    """Constructors of the peers that a case can be put to, by result name."""
    bench = "mla" if x.share else x.case.bench
    if bench == "mla":
        known: dict[str, Callable[[], Call]] = {
            **mla_engines(x),
            "flashinfer-fa3": lambda: flashinfer_mla(x, "fa3"),
            "flashinfer-fa2": lambda: flashinfer_mla(x, "fa2"),
        }
    elif bench == "decode":
        known = {"flashinfer-fa2": lambda: flashinfer_decode(x), "fa3": lambda: fa3(x)}
    else:
        known = {
            "fa3": lambda: fa3_batched(x) if x.case.page_size is None else fa3(x),
            "fa3-varlen": lambda: fa3(x),
            "flashinfer-fa2": lambda: flashinfer_prefill(x, "fa2"),
            "flashinfer-fa3": lambda: flashinfer_prefill(x, "fa3"),
            "cudnn": lambda: sdpa(x, "cudnn"),
            "torch-flash": lambda: sdpa(x, "torch-flash"),
            "vllm-triton": lambda: vllm_prefill(x),
        }
    return {name: known[name] for name in PEER_NAMES[bench]}


__all__ = ["PEER_NAMES", "peers"]
