"""Checks of a call against its spec and plan, on the host and without a sync.

``ATTN_BACKENDS_VALIDATE=1`` adds checks of device tensors, which do sync.
"""

from __future__ import annotations

import os
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from .batch import Batch
from .environment import boolean
from .errors import InvalidInputError
from .spec import FP8_DTYPES, AttentionSpec

if TYPE_CHECKING:
    from .plan import Plan


_SWITCH = "ATTN_BACKENDS_VALIDATE"
_ENCODED = os.fsencode(_SWITCH) if os.name == "posix" else _SWITCH


def deep_checks() -> bool:
    """Whether the debug switch asks for checks that read device memory."""
    raw = getattr(os.environ, "_data", None)
    if type(raw) is dict and _ENCODED not in raw:  # nearly always, and asked for every plan
        return False
    text = os.environ.get(_SWITCH)
    return text is not None and boolean("VALIDATE", text.strip())


def check_batch(batch: Batch, spec: AttentionSpec) -> None:
    """Raise InvalidInputError unless the batch can belong to the spec."""
    if not isinstance(batch, Batch):
        raise InvalidInputError.of("batch", type(batch).__name__, "a Batch")
    if batch.is_paged != (spec.page_size is not None):
        got = "paged" if batch.is_paged else "ragged"
        want = f"spec.page_size={spec.page_size}"
        raise InvalidInputError.of(
            "batch", got, f"{'ragged' if batch.is_paged else 'paged'}: {want}"
        )
    if spec.page_size is not None and batch.page_table is not None and batch.kv_lens is not None:
        room = batch.page_table.shape[1] * spec.page_size
        for i, length in enumerate(batch.kv_lens):
            if length > room:
                allowed = f"0..{room} (page_table width * page_size)"
                raise InvalidInputError.of(f"kv_lens[{i}]", length, allowed)
        ids = batch.page_id_range(spec.page_size)
        if ids is not None and ids[0] < 0:
            raise InvalidInputError.of("page_table", ids[0], ">= 0 within the lengths")
    if deep_checks():
        _check_batch_deep(batch, spec)


def _check_batch_deep(batch: Batch, spec: AttentionSpec) -> None:
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        if (starts := getattr(batch, name)) is None:
            continue
        host = starts.tolist()
        if host[0] != 0:
            raise InvalidInputError.of(f"{name}[0]", host[0], "0")
        for i in range(1, len(host)):
            if host[i] < host[i - 1]:
                raise InvalidInputError.of(f"{name}[{i}]", host[i], f">= {host[i - 1]}")
    q_starts, kv_lens = batch.cu_seqlens_q.tolist(), batch.seqlens_k.tolist()
    q_lens = [b - a for a, b in pairwise(q_starts)]
    bounds = {
        "total_q": (batch.total_q, q_starts[-1]),
        "max_seqlen_q": (batch.max_seqlen_q, max(q_lens, default=0)),
        "max_seqlen_k": (batch.max_seqlen_k, max(kv_lens, default=0)),
    }
    for name, (bound, actual) in bounds.items():
        if bound < actual:
            raise InvalidInputError.of(name, bound, f">= {actual}, what the device tensors hold")
    rooms: list[int] = []
    if batch.cu_seqlens_k is not None:
        k_starts = batch.cu_seqlens_k.tolist()
        rooms = [b - a for a, b in pairwise(k_starts)]
    elif batch.page_table is not None and spec.page_size is not None:
        rooms = [batch.page_table.shape[1] * spec.page_size] * batch.num_seqs
    for i, (length, room) in enumerate(zip(kv_lens, rooms)):
        if not 0 <= length <= room:
            raise InvalidInputError.of(f"seqlens_k[{i}]", length, f"0..{room}")


def check_is_tensor(name: str, x: Any) -> None:
    """Raise InvalidInputError unless ``x`` is a tensor."""
    if not isinstance(x, torch.Tensor):
        raise InvalidInputError.of(name, type(x).__name__, "a torch.Tensor")


def check_last_dim(name: str, x: torch.Tensor) -> None:
    """Raise InvalidInputError unless the last dim is contiguous."""
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        # A copy of an output would be written in its place.
        fix = None if name.startswith("out.") else f"pass {name}.contiguous()"
        raise InvalidInputError.of(f"{name}.stride(-1)", x.stride(-1), "1", fix)


def check_no_grad(name: str, x: torch.Tensor) -> None:
    """Raise InvalidInputError for a tensor that wants a gradient where gradients are recorded."""
    if x.requires_grad and torch.is_grad_enabled():
        fix = f"pass {name}.detach(), or call under torch.no_grad()"
        raise InvalidInputError.of(f"{name}.requires_grad", True, "False: forward only", fix)


def check_self_overlap(name: str, x: torch.Tensor) -> None:
    """Raise InvalidInputError if two elements of an output share memory, as in an expanded one."""
    reach = 0
    dims = sorted((s, n) for s, n in zip(x.stride(), x.shape) if n > 1)
    for stride, size in dims:
        if stride <= reach:
            allowed = "strides under which no two elements share memory"
            raise InvalidInputError.of(f"{name}.stride()", tuple(x.stride()), allowed)
        reach += stride * (size - 1)


def check_pair(out: Any) -> None:
    """Raise InvalidInputError unless ``out`` is a pair of tensors."""
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        raise InvalidInputError.of("out", type(out).__name__, "(o, lse), both tensors")
    check_is_tensor("out.o", out[0])
    check_is_tensor("out.lse", out[1])


def _check_tensor(
    name: str,
    x: Any,
    shape: tuple[int | None, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    by_spec: bool = True,
) -> None:
    """Shape (None is free), dtype, device, unit stride of the last dim, and no gradient."""
    check_is_tensor(name, x)
    got = x.shape
    if len(got) != len(shape) or any(w is not None and w != g for g, w in zip(got, shape)):
        want = "[" + ", ".join("*" if w is None else str(w) for w in shape) + "]"
        raise InvalidInputError.of(f"{name}.shape", list(got), want)
    if x.dtype != dtype:
        allowed = f"{dtype}, as the spec says" if by_spec else str(dtype)
        raise InvalidInputError.of(f"{name}.dtype", x.dtype, allowed)
    if x.device != device:
        raise InvalidInputError.of(f"{name}.device", x.device, f"{device}, as the plan's batch")
    check_last_dim(name, x)
    check_no_grad(name, x)


def check_qkv(q: Any, k: Any, v: Any, plan: Plan) -> None:
    """Raise InvalidInputError unless q, k, v fit the plan's spec and batch."""
    spec, batch = plan.spec, plan.batch
    device = batch.device
    _check_tensor("q", q, (None, spec.num_heads, spec.head_dim), spec.dtype, device)
    names = ("k", "v") if spec.page_size is None else ("k_cache", "v_cache")
    lead: tuple[int | None, ...] = (None,) if spec.page_size is None else (None, spec.page_size)
    heads = spec.num_kv_heads
    _check_tensor(names[0], k, (*lead, heads, spec.head_dim), spec.kv, device)
    if v is not None:
        want = (*k.shape[: len(lead)], heads, spec.dv)
        _check_tensor(names[1], v, want, spec.kv, device)
    elif spec.dv > spec.head_dim:
        allowed = f"a tensor, since head_dim_v={spec.dv} > head_dim={spec.head_dim}"
        raise InvalidInputError.of(names[1], None, allowed)
    _check_rows(q, k, plan)


def _check_rows(q: torch.Tensor, k: torch.Tensor, plan: Plan) -> None:
    spec, batch = plan.spec, plan.batch
    exact = batch.q_lens is not None and plan.capacity is None
    if q.shape[0] != batch.total_q if exact else q.shape[0] > batch.total_q:
        allowed = f"{'' if exact else 'at most '}{batch.total_q}, the batch's total_q"
        raise InvalidInputError.of("q.shape[0]", q.shape[0], allowed)
    if spec.page_size is None:
        if k.shape[0] < batch.total_k:
            raise InvalidInputError.of("k.shape[0]", k.shape[0], f">= {batch.total_k}")
        return
    ids = batch.page_id_range(spec.page_size)
    if ids is None and deep_checks() and batch.page_table is not None:
        ids = _device_page_ids(batch, spec.page_size)
    if ids is not None and (ids[0] < 0 or ids[1] >= k.shape[0]):
        bad = ids[0] if ids[0] < 0 else ids[1]
        raise InvalidInputError.of("page_table", bad, f"0..{k.shape[0] - 1} (num_pages - 1)")


def _device_page_ids(batch: Batch, page_size: int) -> tuple[int, int]:
    assert batch.page_table is not None
    table, lens = batch.page_table, batch.seqlens_k
    used = (lens + page_size - 1) // page_size
    seen = table[torch.arange(table.shape[1], device=table.device)[None] < used[:, None]]
    return (int(seen.min()), int(seen.max())) if seen.numel() else (0, -1)


def check_vector(name: str, x: Any, length: int, device: torch.device) -> None:
    """Raise InvalidInputError unless ``x`` is a contiguous float32 vector on the device."""
    _check_tensor(name, x, (length,), torch.float32, device, by_spec=False)


def check_extras(
    plan: Plan, sinks: Any, alibi_slopes: Any, mask: Any, k_scale: Any, v_scale: Any
) -> None:
    """Raise InvalidInputError unless the optional inputs fit the spec; none is ever dropped."""
    spec, device = plan.spec, plan.batch.device
    if sinks is not None:
        check_vector("sinks", sinks, spec.num_heads, device)
    if (alibi_slopes is not None) != spec.has_alibi:
        got = "None" if alibi_slopes is None else "given"
        allowed = f"{'a tensor [H]' if spec.has_alibi else 'None'}, as has_alibi={spec.has_alibi}"
        raise InvalidInputError.of("alibi_slopes", got, allowed)
    if alibi_slopes is not None:
        check_vector("alibi_slopes", alibi_slopes, spec.num_heads, device)
    if (mask is not None) != spec.has_mask:
        got = "None" if mask is None else "given"
        allowed = f"{'a tensor' if spec.has_mask else 'None'}, as has_mask={spec.has_mask}"
        raise InvalidInputError.of("mask", got, allowed)
    if mask is not None:
        _check_mask(mask, plan.batch, device)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            _check_kv_scale(name, scale, spec, device)


def _check_mask(mask: Any, batch: Batch, device: torch.device) -> None:
    check_is_tensor("mask", mask)
    if mask.dim() != 1:
        allowed = "flat [sum of q_len * kv_len], row-major by sequence"
        raise InvalidInputError.of("mask.shape", list(mask.shape), allowed)
    _check_tensor("mask", mask, (None,), torch.bool, device, by_spec=False)
    if batch.q_lens is not None and batch.kv_lens is not None and batch.mask_indptr is None:
        want = sum(q * kv for q, kv in zip(batch.q_lens, batch.kv_lens))
        if mask.shape[0] != want:
            raise InvalidInputError.of("mask.shape", list(mask.shape), f"[sum q_len*kv_len={want}]")


def _check_kv_scale(name: str, scale: Any, spec: AttentionSpec, device: torch.device) -> None:
    if spec.kv not in FP8_DTYPES:
        raise InvalidInputError.of(name, scale, f"None, since kv_dtype={spec.kv} is not fp8")
    if isinstance(scale, torch.Tensor):
        sizes = {(), (1,), (spec.num_kv_heads,)}
        if tuple(scale.shape) not in sizes:
            allowed = f"[], [1] or [num_kv_heads={spec.num_kv_heads}]"
            raise InvalidInputError.of(f"{name}.shape", list(scale.shape), allowed)
        if scale.dtype != torch.float32 or scale.device != device:
            got = f"{scale.dtype} on {scale.device}"
            raise InvalidInputError.of(name, got, f"float32 on {device}")
    elif isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 < scale < 1e38:
        raise InvalidInputError.of(name, repr(scale), "a finite number > 0, or a tensor")


def check_out(out: Any, rows: int, spec: AttentionSpec, device: torch.device) -> None:
    """Raise InvalidInputError unless ``out`` is ``(o, lse)`` that a kernel can write."""
    check_pair(out)
    o, lse = out
    if spec.dtype in FP8_DTYPES and o.is_floating_point():
        dtype = o.dtype  # fp8 queries: the caller asks for a dtype by passing one
    else:
        dtype = spec.out_dtype
    _check_tensor("out.o", o, (rows, spec.num_heads, spec.dv), dtype, device)
    if list(lse.shape) != [rows, spec.num_heads]:
        allowed = f"[{rows}, {spec.num_heads}]"
        raise InvalidInputError.of("out.lse.shape", list(lse.shape), allowed)
    if lse.dtype != torch.float32 or lse.device != device:
        raise InvalidInputError.of(
            "out.lse", f"{lse.dtype} on {lse.device}", f"float32 on {device}"
        )
    check_self_overlap("out.o", o)
    check_self_overlap("out.lse", lse)


__all__ = [
    "check_batch",
    "check_extras",
    "check_is_tensor",
    "check_last_dim",
    "check_no_grad",
    "check_out",
    "check_pair",
    "check_qkv",
    "check_self_overlap",
    "check_vector",
    "deep_checks",
]
