"""The reference backend: plain torch, every feature, any device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Literal

import torch
from pydantic import Field

from ..backend import AttentionBackend, BackendOptions, RunExtras
from ..batch import Batch
from ..capabilities import FEATURES, Capabilities, IntSet
from ..capacity import Capacity
from ..output import AttentionOutput
from ..plan import Plan
from ..spec import FP8_DTYPES
from . import naive, online
from .keys import KeySource
from .rules import ScoreRules, kv_scale


class TorchNativeOptions(BackendOptions):
    """Options of ``torch_native``."""

    implementation: Literal["online", "naive"] = "online"
    """``online``: one pass, memory linear in length. ``naive``: the float64 definition."""
    tile_q: int = Field(default=256, ge=1, le=1 << 20, strict=True)
    """Queries per tile of the online form."""
    tile_k: int = Field(default=512, ge=1, le=1 << 20, strict=True)
    """Keys per tile of the online form."""


class TorchNativePlan(Plan):
    """A batch with its lengths on the host.

    Attributes:
        sequences: Per sequence ``(q_start, q_len, k_start, kv_len, mask_start)``.
    """

    def __init__(self, backend: AttentionBackend, batch: Batch) -> None:
        super().__init__(backend, batch)
        # A batch built from device tensors is copied here: this reference loops over sequences.
        if batch.q_lens is not None:
            q_starts, q_lens = [0, *accumulate(batch.q_lens)], list(batch.q_lens)
        else:
            q_starts = batch.cu_seqlens_q.tolist()
            q_lens = [b - a for a, b in pairwise(q_starts)]
        kv_lens = batch.seqlens_k.tolist() if batch.kv_lens is None else batch.kv_lens
        k_starts = [0] * len(q_lens)
        if batch.cu_seqlens_k is not None:
            k_starts = batch.cu_seqlens_k.tolist()
        mask_starts = [0, *accumulate(q * kv for q, kv in zip(q_lens, kv_lens))]
        if batch.mask_indptr is not None:
            mask_starts = batch.mask_indptr.tolist()
        self.sequences = list(zip(q_starts, q_lens, k_starts, kv_lens, mask_starts))


@contextmanager
def _ieee_float32(device: torch.device) -> Iterator[None]:
    """Keep float32 products in float32, whatever the process allows elsewhere."""
    if device.type != "cuda":
        yield
        return
    flags = torch.backends.cuda.matmul
    saved = flags.fp32_precision
    flags.fp32_precision = "ieee"
    try:
        yield
    finally:
        flags.fp32_precision = saved


class TorchNativeBackend(AttentionBackend):
    """Attention states in plain torch: exact, readable, and what every other backend is held to.

    Computes in float32 (float64 for float64 inputs and in the naive form), sequence by sequence,
    so results never depend on batch mates. Reads lengths on the host: a batch built from device
    tensors costs a copy in ``plan``, and CUDA graphs are refused.
    """

    name = "torch_native"
    Options = TorchNativeOptions
    capabilities = Capabilities(
        devices=("cpu", "cuda", "xpu", "mps"),
        dtypes=(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn),
        fp8_kv_dtypes=FP8_DTYPES,
        head_dims=IntSet(),
        head_dims_v=IntSet(),
        features=frozenset(FEATURES) - {"cuda_graph"},
    )

    def _plan(self, batch: Batch, capacity: Capacity | None) -> TorchNativePlan:
        return TorchNativePlan(self, batch)

    def _run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        plan: Plan,
        extras: RunExtras,
        out: AttentionOutput | None,
    ) -> AttentionOutput:
        assert isinstance(plan, TorchNativePlan)
        spec, table = self.spec, plan.batch.page_table
        values = k[..., : spec.dv] if v is None else v
        if out is None:
            rows, heads = q.shape[0], spec.num_heads
            o = torch.empty(rows, heads, spec.dv, dtype=spec.out_dtype, device=q.device)
            out = AttentionOutput(o, torch.empty(rows, heads, device=q.device))
        k_scale = kv_scale(extras.k_scale, spec.num_kv_heads, q.device)
        v_scale = kv_scale(extras.v_scale, spec.num_kv_heads, q.device)
        end = 0
        with torch.no_grad(), _ieee_float32(q.device):
            for b, (q_start, q_len, k_start, kv_len, mask_start) in enumerate(plan.sequences):
                end = q_start + q_len
                if q_len == 0:
                    continue
                mask = extras.mask
                if mask is not None:
                    mask = mask[mask_start : mask_start + q_len * kv_len].view(q_len, kv_len)
                pages = None if table is None else table[b]
                source = KeySource(k, values, kv_len, start=k_start, pages=pages)
                rules = ScoreRules.of(spec, q_len, kv_len, extras.alibi_slopes, mask, k_scale)
                o, lse = self._attend(q[q_start:end], source, rules)
                if v_scale is not None:
                    o = o * v_scale.repeat_interleave(spec.group_size)[:, None].to(o.dtype)
                out.o[q_start:end] = o.to(out.o.dtype)
                out.lse[q_start:end] = lse.to(torch.float32)
            out.o[end:] = 0  # rows of no sequence
            out.lse[end:] = float("-inf")
        return out

    def _attend(
        self, q: torch.Tensor, source: KeySource, rules: ScoreRules
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert isinstance(self.options, TorchNativeOptions)
        if self.options.implementation == "naive":
            return naive.attend(q, source, rules)
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        return online.attend(
            q,
            source,
            rules,
            dtype=dtype,
            tile_q=self.options.tile_q,
            tile_k=self.options.tile_k,
        )


__all__ = ["TorchNativeBackend", "TorchNativeOptions"]
