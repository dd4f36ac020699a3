"""The Hopper prefill in one call, and what stands against it.

``hopper_reasons`` says what stands against a call, ``hopper_work`` lists the tiles of a step
(reusable by every layer with the same variant), and ``hopper_prefill`` launches. Nothing here
synchronizes.
"""

from __future__ import annotations

import torch

from ..errors import Reason
from ..spec import AttentionSpec
from . import hopper_compat
from .hopper_call import HopperCall, device_facts, on_device
from .hopper_variant import HEAD_DIMS, Variant, bounds, choose_variant

DTYPES = (torch.bfloat16, torch.float16)
_INT32_MAX = 2**31 - 1


# ----------------------------------------------------------------------------- reasons


def _tensor_reasons(name: str, x: torch.Tensor) -> list[Reason]:
    """What TMA cannot address: base and strides come in 16 bytes, coordinates in 32 bits."""
    out = []
    if x.data_ptr() % 16:
        out.append(Reason(f"{name}.data_ptr() % 16", str(x.data_ptr() % 16), "0"))
    if x.stride(-1) != 1:
        out.append(Reason(f"{name}.stride(-1)", str(x.stride(-1)), "1"))
    for dim in range(x.dim() - 1):
        step = x.stride(dim) * x.element_size()
        if x.shape[dim] > 1 and (step % 16 or not 0 < step < 2**40):
            want = f"multiples of {16 // x.element_size()} from 1"
            out.append(Reason(f"{name}.stride({dim})", str(x.stride(dim)), want))
    if max(x.shape) > _INT32_MAX:
        out.append(Reason(f"max({name}.shape)", str(max(x.shape)), f"<= {_INT32_MAX}"))
    return out


def hopper_reasons(
    spec: AttentionSpec,
    device: torch.device | None = None,
    q: torch.Tensor | None = None,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
) -> list[Reason]:
    """Every reason against the Hopper kernel for a spec, and for the tensors of a call if given.

    Args:
        spec: What the layer fixes.
        device: Where the call runs; None leaves the device out of it.
        q: ``[T, H, D]``.
        k: ``[Tk, HK, D]`` or ``[num_pages, page_size, HK, D]``.
        v: As ``k``.
    """
    out = []
    if hopper_compat.REASON is not None:
        out.append(hopper_compat.REASON)
    if device is not None:
        if device.type != "cuda":
            out.append(Reason("device", device.type, "cuda"))
        elif torch.cuda.is_available():
            index = torch.cuda.current_device() if device.index is None else device.index
            capability, _ = device_facts(index)
            if capability != (9, 0):
                out.append(Reason("compute_capability", "{}.{}".format(*capability), "9.0"))
        else:
            out.append(Reason("device", "cuda", "a visible CUDA device", "check the driver"))
    if spec.dtype not in DTYPES:
        out.append(Reason("dtype", str(spec.dtype).removeprefix("torch."), "bfloat16, float16"))
    if spec.kv != spec.dtype:
        want = str(spec.dtype).removeprefix("torch.")
        out.append(Reason("kv_dtype", str(spec.kv).removeprefix("torch."), want))
    widths = dict(HEAD_DIMS)
    if spec.head_dim not in widths:
        out.append(Reason("head_dim", str(spec.head_dim), ", ".join(map(str, widths))))
    elif spec.dv != widths[spec.head_dim]:
        want = f"{widths[spec.head_dim]} with head_dim={spec.head_dim}"
        out.append(Reason("head_dim_v", str(spec.dv), want))
    if spec.has_alibi:
        out.append(Reason("has_alibi", "True", "False"))
    if spec.has_mask:
        out.append(Reason("has_mask", "True", "False"))
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x is not None:
            out += _tensor_reasons(name, x)
    return out


# ----------------------------------------------------------------------------- launch


def hopper_work(
    variant: Variant,
    *,
    cu_seqlens_q: torch.Tensor,
    seqlens_k: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    total_q: int,
    causal: bool,
    window: tuple[int | None, int | None] | None = None,
    skip: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The work list of a step; pass it to every ``hopper_prefill`` with the same variant.

    One list serves one stream at a time, since its counter is part of it.

    Args:
        variant: As given to ``hopper_prefill``.
        cu_seqlens_q: ``[B+1]`` int32.
        seqlens_k: ``[B]`` int32.
        cu_seqlens_k: ``[B+1]`` int32, or None if paged.
        total_q: Rows of the queries, T.
        causal: As given to ``hopper_prefill``.
        window: As given to ``hopper_prefill``.
        skip: Leave out sequences of at most this many queries.
        out: A list to refill, as before the replay of a captured graph.
    """
    from .hopper_work import work_list

    left, right = bounds(causal, window)
    with on_device(seqlens_k.device):
        return work_list(
            cu_seqlens_q, seqlens_k, cu_seqlens_k, total_q=total_q, tile=variant.tile,
            block_n=variant.block_n, left=left, right=right, skip=skip,
            out=out,
        )  # fmt: skip


def hopper_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    seqlens_k: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    max_seqlen_q: int,
    scale: float,
    causal: bool,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    o: torch.Tensor,
    lse: torch.Tensor,
    variant: Variant | None = None,
    work: torch.Tensor | None = None,
) -> None:
    """Attention of ragged queries over ragged or paged keys, into ``o`` and ``lse``; once.

    Every row of ``o`` and ``lse`` is written, those after the last sequence too. The caller has
    asked ``hopper_reasons``; here only what a wrong call could corrupt is asserted.

    Args:
        q: As in ``HopperCall``.
        k: Likewise.
        v: Likewise.
        cu_seqlens_q: ``[B+1]`` int32.
        seqlens_k: ``[B]`` int32, keys of each sequence.
        cu_seqlens_k: ``[B+1]`` int32, where the keys of each sequence start; None if paged.
        page_table: ``[B, max_pages]`` int32; entries past the last key are never read.
        max_seqlen_q: Longest query count, or a bound; chooses the variant, nothing else.
        scale: As in ``HopperCall``.
        causal: Likewise.
        window: Likewise.
        softcap: Likewise.
        sinks: ``[H]`` float32 logits of one more key of value 0, or None.
        o: Output.
        lse: Output.
        variant: What to launch; None chooses by shape.
        work: The step's list from ``hopper_work`` for the same variant; None makes one, which
            costs a small launch.
    """
    total_q, num_heads, head_dim = q.shape
    num_seqs = seqlens_k.shape[0]
    assert (cu_seqlens_k is None) == (page_table is not None)
    if variant is None:
        variant = choose_variant(
            head_dim=head_dim, num_heads=num_heads, num_kv_heads=k.shape[-2],
            max_seqlen_q=max_seqlen_q, total_q=total_q, num_seqs=num_seqs,
            num_sms=device_facts(q.device.index)[1], causal=causal, paged=page_table is not None,
        )  # fmt: skip
    call = HopperCall(
        q, k, v, o, lse, variant=variant, num_seqs=num_seqs, page_table=page_table, scale=scale,
        causal=causal, window=window, softcap=softcap, sinks=sinks is not None,
    )  # fmt: skip
    if work is None:
        work = hopper_work(
            variant, cu_seqlens_q=cu_seqlens_q, seqlens_k=seqlens_k, cu_seqlens_k=cu_seqlens_k,
            total_q=total_q, causal=causal, window=window,
        )  # fmt: skip
    call(q, k, v, o, lse, work=work, page_table=page_table, sinks=sinks)


__all__ = ["DTYPES", "hopper_prefill", "hopper_reasons", "hopper_work"]
