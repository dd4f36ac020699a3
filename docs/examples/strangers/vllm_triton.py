"""vLLM's Triton kernels: the unified one of TRITON_ATTN, and the decode one of TRITON_MLA."""

from __future__ import annotations

from typing import Any

import torch

import attn_backends as ab
from attn_backends.capabilities import Capabilities, IntSet

from . import sources
from .calls import LengthsPlan, Stranger, outputs

UNIFIED = f"{sources.VLLM}.triton_unified_attention"
DECODE = f"{sources.VLLM}.triton_decode_attention"
#: The engine's own numbers: segments of a split sequence, and when it splits.
SEGMENTS, GRID, KV_SPLITS = 16, 128, 4


class VllmTriton(Stranger):
    """``unified_attention`` of vLLM, prefill and decode over pages in one kernel.

    It returns no LSE. Where it splits sequences, the maxima and sums of the parts stay in scratch
    of the caller and give one; where it does not, ``lse`` is NaN here, which is what a caller gets.
    """

    name = "vllm_triton"
    modules = (UNIFIED,)
    capabilities = Capabilities(
        devices=("cuda", "cpu"),
        dtypes=(torch.float16, torch.bfloat16, torch.float32),
        fp8_kv_dtypes=(torch.float8_e4m3fn,),
        head_dims=IntSet(low=16, high=512),
        features=frozenset(
            ("paged", "causal", "bidirectional", "window", "softcap", "alibi", "batch_invariant")
        ),
        fused_sinks=True,
    )

    @classmethod
    def extra_reasons(cls, spec: Any, phase: Any, device: Any, options: Any) -> list[ab.Reason]:
        """Windows that one number cannot say."""
        left, right = spec.bounds
        reasons = super().extra_reasons(spec, phase, device, options)
        if spec.window is not None and left is None:
            reasons.append(ab.Reason("window.left", "None", "a number"))
        elif spec.window is not None and not spec.causal and right != left:
            reasons.append(
                ab.Reason("window", f"{spec.window}", "equal bounds beside causal=False")
            )
        return reasons

    def _plan(self, batch: ab.Batch, capacity: Any) -> LengthsPlan:
        return LengthsPlan(self, batch, capacity)

    def _run(self, q, k, v, plan, extras, out):  # type: ignore[no-untyped-def]
        spec, batch = self.spec, plan.batch
        out = outputs(spec, q, out)
        v = k[..., : spec.dv] if v is None else v
        k_scale, v_scale = self.scales(extras, q.device)
        shape = (q.shape[0], spec.num_heads, SEGMENTS)
        width = 1 << (spec.dv - 1).bit_length()
        tops = torch.full(shape, float("-inf"), device=q.device)
        sums = torch.zeros(shape, device=q.device)
        parts = torch.empty(*shape, width, device=q.device)
        fp8 = spec.kv != spec.dtype
        module = self.kernels(UNIFIED)
        mode = module.KVQuantMode.FP8_PER_TENSOR if fp8 else module.KVQuantMode.NONE
        module.unified_attention(
            q=q,
            k=k,
            v=v,
            out=out.o,
            cu_seqlens_q=batch.cu_seqlens_q,
            max_seqlen_q=max(plan.q_lens, default=0),
            seqused_k=batch.seqlens_k,
            max_seqlen_k=max(plan.kv_lens, default=0),
            softmax_scale=spec.scale,
            causal=spec.causal,
            window_size=(-1, -1) if spec.window is None else (spec.window[0], 0),
            block_table=batch.page_table,
            softcap=spec.softcap or 0.0,
            q_descale=None,
            k_descale=k_scale,
            v_descale=v_scale,
            # The engine's batch-invariant mode turns splitting off; so does giving no scratch.
            seq_threshold_3D=None if spec.batch_invariant else GRID // spec.num_kv_heads,
            num_par_softmax_segments=SEGMENTS,
            softmax_segm_output=parts,
            softmax_segm_max=tops,
            softmax_segm_expsum=sums,
            alibi_slopes=extras.alibi_slopes,
            sinks=extras.sinks,
            kv_quant_mode=mode,
        )
        used = int(batch.cu_seqlens_q[-1])
        split = bool((sums[:used] != 0).any())
        lse = (tops + sums.log()).logsumexp(-1) if split else torch.full(shape[:2], float("nan"))
        out.lse[:used] = lse[:used].to(q.device)
        return out


class VllmDecode(Stranger):
    """``decode_attention_fwd`` of vLLM: one query a sequence, with its LSE; MLA's kernel."""

    name = "vllm_decode"
    modules = (DECODE,)
    capabilities = Capabilities(
        devices=("cuda", "cpu"),
        dtypes=(torch.float16, torch.bfloat16, torch.float32),
        fp8_kv_dtypes=(torch.float8_e4m3fn,),
        head_dims=IntSet(low=16, high=576),
        head_dims_v=IntSet(low=16, high=512),
        phases=("decode",),
        features=frozenset(("paged", "causal", "bidirectional", "softcap", "batch_invariant")),
    )

    def _plan(self, batch: ab.Batch, capacity: Any) -> LengthsPlan:
        plan = LengthsPlan(self, batch, capacity)
        if not plan.one_each:
            raise self.refuse("q_lens", plan.q_lens, "1 for every sequence")
        return plan

    def _run(self, q, k, v, plan, extras, out):  # type: ignore[no-untyped-def]
        spec, rows = self.spec, len(plan.q_lens)
        out = outputs(spec, q, out)
        k_scale, v_scale = self.scales(extras, q.device)
        splits = 1 if spec.batch_invariant else KV_SPLITS
        o = q.new_empty(rows, spec.num_heads, spec.dv, dtype=spec.out_dtype)
        lse = torch.empty(rows, spec.num_heads, device=q.device)
        self.kernels(DECODE).decode_attention_fwd(
            q[:rows],
            k,
            k[..., : spec.dv] if v is None else v,
            o,
            lse,
            plan.batch.page_table,
            plan.batch.seqlens_k,
            torch.empty(rows, spec.num_heads, splits, spec.dv + 1, device=q.device),
            splits,
            spec.scale,
            page_size=spec.page_size,
            logit_cap=spec.softcap or 0.0,
            k_scale=k_scale,
            v_scale=v_scale,
            is_mla=v is None,
        )
        out.o[:rows] = o
        out.lse[:rows] = lse
        return out


__all__ = ["VllmDecode", "VllmTriton"]
