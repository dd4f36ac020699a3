"""FlashAttention 4: ``flash_attn.cute``, compiled by its own DSL on the first call.

- A window bound of -1 is a literal bound, not "unbounded": None is passed.
- The LSE of ``[H, T]`` is transposed on its MLA path, which ``v is k`` with 512 lanes selects by
  itself; such widths are not declared here.
- Where a page is a whole tile, unused slots are loaded, so pages are limited to smaller sizes.
  The kernel for those takes widths in multiples of 16.
"""

from __future__ import annotations

from typing import Any

import torch

from ..backend import RunExtras
from ..capabilities import Capabilities, IntSet
from ..errors import Reason
from ..packages import Probe, probe
from ..spec import AttentionSpec
from .adapter import Attend
from .arrange import Arrangement
from .flash_build import (
    FlashBuild,
    FlashCall,
    by_token,
    kernel_scale,
    padded_dims_reasons,
    round_up,
)
from .operators import attend_beneath, operator_values, python_function
from .tensors import DenseKeysOfPlan, Tensors, aligned, widen

#: Keys in its smallest tile.
_TILE = 64


class FlashAttention4(FlashBuild):
    """The ``flash-attn-4`` package."""

    version = 4
    package = "flash-attn-4"
    install = "pip install --pre flash-attn-4"
    capabilities = Capabilities(
        devices=("cuda",),
        dtypes=(torch.float16, torch.bfloat16),
        head_dims=IntSet(low=1, high=128),
        head_dims_v=IntSet(low=1, high=128),
        min_compute_capability=(9, 0),
        max_compute_capability=(11, 9),
        features=frozenset(
            ("ragged", "paged", "causal", "bidirectional", "window", "softcap", "cuda_graph")
        ),
    )

    def probe(self) -> Probe:
        """The DSL's module; its own version string is not the package's."""
        return probe(
            "flash_attn.cute", attribute="flash_attn_varlen_func", distribution="flash-attn-4"
        )

    def extra_reasons(self, spec: AttentionSpec, options: Any) -> list[Reason]:
        """Widths that only a copy of the whole cache could serve, and pages of whole tiles."""
        reasons = padded_dims_reasons(spec, 16, equal=False, high=128)
        paged = not self.takes_dense_keys(spec, options)
        if paged and (spec.page_size or 0) >= _TILE and not options.finite_cache:
            fix = "set finite_cache=True if unused slots hold finite values"
            reasons.append(Reason("page_size", str(spec.page_size), f"1..{_TILE - 1}", fix))
        return reasons

    def prepare(self, work: Arrangement, spec: AttentionSpec, options: Any) -> FlashCall:
        """Varlen for everything; with pages, lengths come from ``seqused_k``."""
        batch = work.batch
        d, dv = round_up(spec.head_dim, 8), round_up(spec.dv, 8)
        common: dict[str, Any] = dict(
            cu_seqlens_q=batch.cu_seqlens_q,
            max_seqlen_q=max(batch.max_seqlen_q, 1),
            max_seqlen_k=max(batch.max_seqlen_k, 1),
            softmax_scale=kernel_scale(spec),
            causal=spec.causal,
            window_size=spec.bounds if spec.window is not None else (None, None),
            softcap=spec.softcap or 0.0,
            return_lse=True,
        )
        paged = not self.takes_dense_keys(spec, options)
        function = self.module.flash_attn_varlen_func
        dense = DenseKeysOfPlan(work, spec)

        if paged:
            common.update(seqused_k=batch.seqlens_k, page_table=batch.page_table)

        def tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
            if not paged:
                keys = dense.of(k)
                q, k, v = widen(q, d), widen(keys.take(k), d), widen(keys.take(v), dv)
            return aligned(q), aligned(k), aligned(v)

        def library(extras: RunExtras) -> Attend:
            return by_token(function, cu_seqlens_k=None if paged else dense.starts, **common)

        def beneath(extras: RunExtras) -> Attend | None:
            starts = None if paged else dense.starts
            values = operator_values(dict(common, cu_seqlens_k=starts))
            interface = getattr(self.module, "interface", None)
            operator = python_function(getattr(interface, "_flash_attn_fwd", None))
            return attend_beneath(operator, values)

        return FlashCall(tensors, library, spec.dv, beneath)


__all__ = ["FlashAttention4"]
