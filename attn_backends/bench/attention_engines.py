"""The Triton kernels and the FlashAttention 3 build of serving engines, called as they call them.

They load from an installed vLLM or SGLang; without one, the peer says what could not be imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .attention_cases import Inputs

Call = Callable[[int], Any]
#: Parts of a sequence that the engines' MLA kernels are tried with; the first is vLLM's default.
VLLM_SPLITS, SGLANG_SPLITS = (4, 16, 64), (8, 32)


def vllm_mla(x: Inputs, splits: int) -> Call:
    """``decode_attention_fwd`` of vLLM's TRITON_MLA."""
    from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

    case = x.case
    shape = (case.batch, case.num_heads)
    o = torch.empty(*shape, case.head_dim_v, dtype=x.spec.dtype, device=x.device)
    lse = torch.empty(*shape, device=x.device)
    parts = torch.empty(*shape, splits, case.head_dim_v + 1, device=x.device)
    one = torch.ones(1, device=x.device)

    def call(i: int) -> Any:
        k = x.k[i]
        decode_attention_fwd(
            x.q[i], k, k[..., : case.head_dim_v], o, lse, x.table, x.batch.seqlens_k, parts,
            splits, x.spec.scale, page_size=case.page_size, k_scale=one, v_scale=one, is_mla=True,
        )  # fmt: skip
        return o, lse

    return call


def sglang_mla(x: Inputs, splits: int) -> Call:
    """``decode_attention_fwd`` of SGLang, on its pool of slots."""
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd

    case = x.case
    shape = (case.batch, case.num_heads, splits)
    o = torch.empty(*shape[:2], case.head_dim_v, dtype=x.spec.dtype, device=x.device)
    parts = torch.empty(*shape, case.head_dim_v, device=x.device)
    lse = torch.empty(shape, device=x.device)
    counts = torch.full((case.batch,), splits, dtype=torch.int32, device=x.device)
    slots = x.table.long()[:, :, None] * case.page_size + torch.arange(
        case.page_size, device=x.device
    )
    slots = torch.cat([row.reshape(-1)[:n] for row, n in zip(slots, x.kv_lens)])
    starts = torch.nn.functional.pad(x.batch.seqlens_k.cumsum(0), (1, 0)).int()

    def call(i: int) -> Any:
        k = x.k[i].view(-1, 1, case.head_dim)
        decode_attention_fwd(
            x.q[i], k, k[..., : case.head_dim_v], o, starts, slots, parts, lse, counts, splits,
            x.spec.scale, 1.0, 1.0, has_mla=True,
        )  # fmt: skip
        return o

    return call


def vllm_prefill(x: Inputs) -> Call:
    """``unified_attention`` of vLLM's TRITON_ATTN, whose keys lie in pages of 16."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    case, batch, size = x.case, x.batch, 16
    if case.page_size is None:
        if any(n % size for n in x.kv_lens):
            raise ValueError("key lengths that are no multiple of 16")
        pages = sum(x.kv_lens) // size
        table = torch.arange(pages, dtype=torch.int32, device=x.device).view(case.batch, -1)
    else:
        size, table = case.page_size, x.table
    o = torch.empty_like(x.q[0])
    one = torch.ones(1, device=x.device)

    def call(i: int) -> Any:
        k, v = (t.view(-1, size, *t.shape[-2:]) for t in (x.k[i], x.v[i]))
        unified_attention(
            q=x.q[i], k=k, v=v, out=o, cu_seqlens_q=batch.cu_seqlens_q, max_seqlen_q=case.q_len,
            seqused_k=batch.seqlens_k, max_seqlen_k=case.kv_len, softmax_scale=x.spec.scale,
            causal=case.causal, window_size=(-1, -1), block_table=table, softcap=0.0,
            q_descale=None, k_descale=one, v_descale=one,
        )  # fmt: skip
        return o

    return call


def fa3_mla(x: Inputs, contiguous: bool) -> Call:
    """The FlashAttention 3 in vLLM, whose build has unequal head dims, with scheduler metadata.

    Args:
        x: The inputs.
        contiguous: Put the keys of each sequence one after the other first, out of its pages.
    """
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    case, batch = x.case, x.batch
    size = None if contiguous else case.page_size
    meta = get_scheduler_metadata(
        case.batch, case.q_len, case.kv_len, case.num_heads, 1, case.head_dim - case.head_dim_v,
        batch.seqlens_k, qkv_dtype=x.spec.dtype, headdim_v=case.head_dim_v, page_size=size,
        causal=case.causal, cu_seqlens_q=batch.cu_seqlens_q,
    )  # fmt: skip
    keys, more = x.k, {"block_table": x.table}
    if contiguous:
        if any(n % case.page_size for n in x.kv_lens):
            raise ValueError("key lengths that are no multiple of the page")
        keys = [k[x.table.long()].view(case.batch, case.kv_len, 1, case.head_dim) for k in x.k]
        more = {}

    def call(i: int) -> Any:
        q, k = x.q[i], keys[i]
        return flash_attn_varlen_func(
            q[..., case.head_dim_v :], k[..., case.head_dim_v :], k[..., : case.head_dim_v],
            case.q_len, batch.cu_seqlens_q, case.kv_len, seqused_k=batch.seqlens_k,
            q_v=q[..., : case.head_dim_v], softmax_scale=x.spec.scale, causal=case.causal,
            return_softmax_lse=True, scheduler_metadata=meta, fa_version=3, **more,
        )  # fmt: skip

    return call


def mla_engines(x: Inputs) -> dict[str, Callable[[], Call]]:
    """Constructors of the MLA peers, by result name."""
    found: dict[str, Callable[[], Call]] = {
        "fa3": lambda: fa3_mla(x, True),
        "fa3-paged": lambda: fa3_mla(x, False),
    }
    for n in VLLM_SPLITS:
        found[f"vllm-triton-{n}"] = lambda n=n: vllm_mla(x, n)
    for n in SGLANG_SPLITS:
        found[f"sglang-triton-{n}"] = lambda n=n: sglang_mla(x, n)
    return found


__all__ = ["mla_engines", "vllm_prefill"]
