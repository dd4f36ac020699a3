"""SGLang's Triton kernels: extend for prompts and chunks, split decode for single tokens.

As in the engine, keys before a chunk come from the pool through a list of slots, keys of the chunk
from contiguous tensors, and a cache is a pool of slots of one stride.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch

import attn_backends as ab
from attn_backends.capabilities import Capabilities, IntSet

from . import sources
from .calls import LengthsPlan, Stranger, outputs

DECODE, EXTEND = (f"{sources.SGLANG}.{name}_attention" for name in ("decode", "extend"))
#: What the engine uses by default.
KV_SPLITS = 8


class SglangPlan(LengthsPlan):
    """Slots of every visible key, as pairs (page, place in it), and their starts."""

    def __init__(self, backend: Any, batch: ab.Batch, capacity: Any = None) -> None:
        super().__init__(backend, batch, capacity)
        for b, (q_len, kv_len) in enumerate(zip(self.q_lens, self.kv_lens)):
            if kv_len < q_len:  # a chunk's own keys are among its keys, or there is no prefix
                raise backend.refuse(f"kv_lens[{b}]", kv_len, f">= q_lens[{b}]={q_len}")
        left = self.spec.bounds[0]
        # One kernel for all batches, if bits must not depend on who else is in them.
        split = not (self.spec.has_mask or self.spec.batch_invariant)
        self.decodes = self.one_each and split
        pages, places = self._slots()
        device = batch.device
        chunk = [range(kv - q, kv) for q, kv in zip(self.q_lens, self.kv_lens)]
        if self.decodes:  # the engine hands the kernel the slots in the window and no others
            first = [0 if left is None else max(0, n - left - 1) for n in self.kv_lens]
            listed = [range(a, n) for a, n in zip(first, self.kv_lens)]
        else:
            listed = [range(n - q) for q, n in zip(self.q_lens, self.kv_lens)]

        def pick(wanted: list[range]) -> tuple[torch.Tensor, torch.Tensor]:
            both = [
                torch.tensor([x[i] for x, r in zip(rows, wanted) for i in r], dtype=torch.int64)
                for rows in (pages, places)
            ]
            return both[0].to(device), both[1].to(device)

        self.listed, self.chunk = pick(listed), pick(chunk)
        starts = list(accumulate(map(len, listed), initial=0))
        self.kv_indptr = torch.tensor(starts, dtype=torch.int32, device=device)

    def _slots(self) -> tuple[list[list[int]], list[list[int]]]:
        batch, size = self.batch, self.spec.page_size
        if batch.page_table is None:
            starts = batch.cu_seqlens_k.tolist()
            rows = [list(range(a, a + n)) for a, n in zip(starts, self.kv_lens)]
            return [[0] * len(r) for r in rows], rows
        table = batch.page_table.tolist()
        pages = [[t[i // size] for i in range(n)] for t, n in zip(table, self.kv_lens)]
        return pages, [[i % size for i in range(n)] for n in self.kv_lens]


class SglangTriton(Stranger):
    """``extend_attention_fwd`` and ``decode_attention_fwd`` of SGLang."""

    name = "sglang_triton"
    modules = (DECODE, EXTEND)
    capabilities = Capabilities(
        devices=("cuda", "cpu"),
        dtypes=(torch.float16, torch.bfloat16, torch.float32),
        fp8_kv_dtypes=(torch.float8_e4m3fn,),
        head_dims=IntSet(low=16, high=576),
        head_dims_v=IntSet(low=16, high=512),
        features=frozenset(
            (
                *("ragged", "paged", "causal", "bidirectional"),
                *("window", "softcap", "mask", "batch_invariant"),
            )
        ),
        fused_sinks=True,
    )

    @classmethod
    def extra_reasons(cls, spec: Any, phase: Any, device: Any, options: Any) -> list[ab.Reason]:
        """Windows and masks that the kernels have no argument for."""
        left, right = spec.bounds
        reasons = super().extra_reasons(spec, phase, device, options)
        if spec.window is not None and (left is None or left < 1):
            reasons.append(ab.Reason("window.left", str(left), ">= 1: 0 means off"))
        elif spec.window is not None and not spec.causal and right != left:
            reasons.append(
                ab.Reason("window", f"{spec.window}", "equal bounds beside causal=False")
            )
        if spec.has_mask and spec.causal:
            reasons.append(ab.Reason("has_mask/causal", "True", "one of them: the mask says it"))
        if spec.has_mask and spec.window is not None:
            reasons.append(ab.Reason("has_mask/window", f"{spec.window}", "one of them"))
        return reasons

    def _plan(self, batch: ab.Batch, capacity: Any) -> SglangPlan:
        return SglangPlan(self, batch, capacity)

    def _run(self, q, k, v, plan, extras, out):  # type: ignore[no-untyped-def]
        out = outputs(self.spec, q, out)
        v = k[..., : self.spec.dv] if v is None else v
        k_pool, v_pool, page = self._pools(k, v)
        call = self._decode if plan.decodes else self._extend
        call(q, k_pool, v_pool, page, plan, extras, out)
        return out

    def _pools(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Caches as ``[slots, HK, D]`` views, and how many slots apart pages are."""
        if k.dim() == 3:
            return k, v, 0
        found = []
        for name, x in (("k_cache", k), ("v_cache", v)):
            page, slot = x.stride(0), x.stride(1)
            if page % slot:
                raise self.refuse(f"{name}.stride", x.stride(), "pages whole slots apart")
            count = (x.shape[0] - 1) * (page // slot) + x.shape[1]
            view = x.as_strided((count, *x.shape[2:]), (slot, *x.stride()[2:]))
            found.append((view, page // slot))
        (k_pool, step), (v_pool, other) = found
        if step != other:
            raise self.refuse("v_cache.stride", v.stride(), "pages as far apart as in k_cache")
        return k_pool, v_pool, step

    def _decode(self, q, k, v, page, plan, extras, out):  # type: ignore[no-untyped-def]
        spec = self.spec
        k_scale, v_scale = self.scales(extras, q.device)
        rows, heads = len(plan.kv_lens), spec.num_heads
        partial = q.new_empty(rows, heads, KV_SPLITS, spec.dv, dtype=torch.float32)
        # The kernel hands out no LSE, but leaves those of its splits in the caller's scratch.
        partial_lse = torch.full((rows, heads, KV_SPLITS), float("-inf"), device=q.device)
        self.kernels(DECODE).decode_attention_fwd(
            q[:rows],
            k,
            v,
            out.o[:rows],
            plan.kv_indptr,
            plan.listed[0] * page + plan.listed[1],
            partial,
            partial_lse,
            torch.full((rows,), KV_SPLITS, dtype=torch.int32, device=q.device),
            KV_SPLITS,
            spec.scale,
            float(k_scale),
            float(v_scale),
            logit_cap=spec.softcap or 0.0,
            sinks=extras.sinks,
            has_mla=v.data_ptr() == k.data_ptr(),
        )
        lse = partial_lse.logsumexp(-1)
        if extras.sinks is not None:
            lse = torch.logaddexp(lse, extras.sinks[None])
        out.lse[:rows] = lse

    def _extend(self, q, k, v, page, plan, extras, out):  # type: ignore[no-untyped-def]
        spec, batch = self.spec, plan.batch
        k_scale, v_scale = self.scales(extras, q.device)
        chunk = plan.chunk[0] * page + plan.chunk[1]
        own = [_take(x, chunk) for x in (k, v)]
        if spec.kv != spec.dtype:  # in the engine a chunk is not quantized yet
            own = [(x.float() * s).to(q.dtype) for x, s in zip(own, (k_scale, v_scale))]
        mask, starts = None, None
        if spec.has_mask:
            mask = extras.mask.to(torch.int8)
            sizes = [a * b for a, b in zip(plan.q_lens, plan.kv_lens)]
            starts = torch.tensor(list(accumulate(sizes, initial=0)), device=q.device)
        self.kernels(EXTEND).extend_attention_fwd(
            q,
            own[0].contiguous(),
            own[1].contiguous(),
            out.o,
            k,
            v,
            batch.cu_seqlens_q,
            plan.kv_indptr,
            plan.listed[0] * page + plan.listed[1],
            mask,
            spec.causal,
            starts,
            max(plan.q_lens, default=0),
            float(k_scale),
            float(v_scale),
            sm_scale=spec.scale,
            logit_cap=spec.softcap or 0.0,
            skip_prefix_custom_mask=False,
            sliding_window_size=-1 if spec.window is None else spec.window[0],
            sinks=extras.sinks,
            lse_extend=out.lse,
        )


def _take(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``x[rows]``, for fp8 too."""
    if x.dtype.itemsize == 1:
        return x.view(torch.uint8)[rows].view(x.dtype)
    return x[rows]


__all__ = ["SglangTriton"]
