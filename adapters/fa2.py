"""FlashAttention 2: the ``flash-attn`` package, and the build inside vLLM.

What its kernels promise, and what is done about it here:

- A row without keys gets ``lse = +inf``, and so does a row with NaN. Rows without keys are never
  handed over, so ``+inf`` is left alone.
- The kernel for pages writes the LSE of a tile without visible keys at a wrong place. With such
  rows gone, no tile is without keys.
- Under CUDA graphs rows without keys cannot be left out, so the kernel for pages is avoided: the
  entry for decode, with one query for each sequence, writes its LSE where it belongs.
- With one query per sequence the kernel swaps heads and tokens, assumes exactly one query for every
  sequence, and in one of its forms permutes the LSE. A bound of two queries avoids the swap.
- A bound on the window that reaches ``max_seqlen_k`` is read as unbounded, and an absent right
  bound as ``max_seqlen_k``: both wrong where queries outnumber keys. The bound on keys is raised
  until neither can happen.
- Causal ALiBi adds ``slope * j`` and shifts the LSE by ``slope * (i + kv_len - q_len)``. A left
  bound that excludes nothing selects the kernel that adds the true distance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..backend import RunExtras
from ..batch import Batch
from ..capabilities import Capabilities, IntSet
from ..capacity import Capacity
from ..errors import Reason
from ..layouts import remembered
from ..output import AttentionOutput
from ..packages import Probe, probe
from ..spec import AttentionSpec
from .adapter import Attend, state_of
from .arrange import Arrangement, arrange, token_positions, with_host_lengths
from .flash_build import (
    FlashBuild,
    FlashCall,
    aligned_tensors,
    by_token,
    kernel_scale,
    padded_dims_reasons,
    round_up,
)
from .operators import attend_beneath, operator_values, python_function
from .tensors import DenseKeysOfPlan, Tensors, aligned, page_width, widen

_FEATURES = frozenset(
    ("ragged", "paged", "causal", "bidirectional", "window", "softcap", "alibi", "batch_invariant")
)


#: What vLLM's function takes and its operators do not.
_VLLM_ONLY = ("return_softmax_lse", "fa_version")


class Bounds(NamedTuple):
    """Window arguments that mean what the spec says.

    Attributes:
        window: ``(left, right)``, -1 for unbounded.
        max_seqlen_k: A bound on keys that keeps the library from rewriting the window.
    """

    window: tuple[int, int]
    max_seqlen_k: int


def safe_bounds(spec: AttentionSpec, max_q: int, max_k: int) -> Bounds:
    """Window arguments for sequences of up to ``max_q`` queries and ``max_k`` keys."""
    left, right = spec.bounds
    if spec.has_alibi and left is None:
        left = max(max_k - 1, 0)  # excludes no key, and selects the kernel that uses distances
    most = max(max_k, 1)
    if left is not None or (right is not None and not spec.causal):
        most = max(most, max_q + 1, (left or 0) + 1, (right or 0) + 1)
    return Bounds((-1 if left is None else left, -1 if right is None else right), most)


def wide_enough(table: torch.Tensor, page_size: int, keys: int) -> torch.Tensor:
    """The page table with room for ``keys`` keys; added entries lie past every length."""
    missing = -(-keys // page_size) - table.shape[1]
    return table if missing <= 0 else torch.nn.functional.pad(table, (0, missing))


class FlashAttention2(FlashBuild):
    """The ``flash-attn`` package."""

    version = 2
    package = "flash-attn"
    install = "pip install flash-attn --no-build-isolation"
    capabilities = Capabilities(
        devices=("cuda",),
        dtypes=(torch.float16, torch.bfloat16),
        head_dims=IntSet(low=1, high=256),
        head_dims_v=IntSet(low=1, high=256),
        page_sizes=IntSet(low=256, multiple_of=256),
        min_compute_capability=(8, 0),
        features=_FEATURES | {"cuda_graph"},
        host_lengths=True,
    )

    def probe(self) -> Probe:
        """The ``flash_attn`` module; FlashAttention 4 alone makes it an empty namespace."""
        return probe(
            "flash_attn",
            attribute="flash_attn_with_kvcache",
            min_version="2.7",
            distribution="flash-attn",
        )

    def extra_reasons(self, spec: AttentionSpec, options: Any) -> list[Reason]:
        """Widths that only a copy of the whole cache could serve."""
        return padded_dims_reasons(spec, 8, equal=True, high=256)

    def arrange(self, batch: Batch, spec: AttentionSpec, capacity: Capacity | None) -> Arrangement:
        """Exact lengths are needed, so a batch without host lengths costs a copy per plan.

        With a capacity nothing may depend on them, and rows without keys are handed over.
        """
        if capacity is not None:
            return arrange(batch, spec, capacity)
        return arrange(with_host_lengths(batch), spec)

    def prepare(self, work: Arrangement, spec: AttentionSpec, options: Any) -> FlashCall:
        """One token each: the decode entry point, which splits keys. Otherwise varlen."""
        if self.takes_dense_keys(spec, options):
            return self._ragged(work, spec)
        if work.replayed:
            # The kernel for pages cannot have rows without keys, so longer queries gather theirs.
            one = work.batch.max_seqlen_q == 1
            return self._decode(work, spec, options) if one else self._ragged(work, spec)
        # One kernel for all batches, if bits must not depend on who else is in them.
        decode = work.batch.max_seqlen_q == 1 and not spec.batch_invariant
        return self._decode(work, spec, options) if decode else self._paged(work, spec)

    def _ragged(self, work: Arrangement, spec: AttentionSpec) -> FlashCall:
        batch = work.batch
        width = round_up(max(spec.head_dim, spec.dv), 8)
        window, max_k = safe_bounds(spec, batch.max_seqlen_q, batch.max_seqlen_k)
        dense = DenseKeysOfPlan(work, spec)
        varlen, scores = self._varlen(spec)
        fixed = dict(
            scores,
            cu_seqlens_q=batch.cu_seqlens_q,
            max_seqlen_q=max(batch.max_seqlen_q, 2),
            max_seqlen_k=max_k,
            window_size=window,
        )

        def tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
            keys = dense.of(k)
            return tuple(aligned(widen(x, width)) for x in (q, keys.take(k), keys.take(v)))

        def library(extras: RunExtras) -> Attend:
            slopes = extras.alibi_slopes
            return by_token(varlen, cu_seqlens_k=dense.starts, alibi_slopes=slopes, **fixed)

        def beneath(extras: RunExtras) -> Attend | None:
            return self._beneath(extras, dict(fixed, cu_seqlens_k=dense.starts))

        return FlashCall(tensors, library, spec.dv, beneath)

    def _paged(self, work: Arrangement, spec: AttentionSpec) -> FlashCall:
        batch = work.batch
        window, max_k = safe_bounds(spec, batch.max_seqlen_q, batch.max_seqlen_k)
        varlen, scores = self._varlen(spec)
        fixed = dict(
            scores,
            block_table=batch.page_table,
            max_seqlen_q=max(batch.max_seqlen_q, 2),
            max_seqlen_k=max_k,
            window_size=window,
            **self._paged_lengths(batch),
        )

        def library(extras: RunExtras) -> Attend:
            return by_token(varlen, alibi_slopes=extras.alibi_slopes, **fixed)

        def beneath(extras: RunExtras) -> Attend | None:
            return self._beneath(extras, fixed)

        return FlashCall(aligned_tensors, library, spec.dv, beneath)

    def _decode(self, work: Arrangement, spec: AttentionSpec, options: Any) -> FlashCall:
        batch, page_size = work.batch, spec.page_size
        assert page_size is not None and batch.page_table is not None
        room = page_width(batch, page_size)
        window, needed = safe_bounds(spec, 1, room)
        table = wide_enough(batch.page_table, page_size, needed)
        function = self.module.flash_attn_with_kvcache
        fixed = dict(
            _scores(spec),
            cache_seqlens=batch.seqlens_k,
            block_table=table,
            window_size=window,
            num_splits=1 if spec.batch_invariant else options.num_splits,
            return_softmax_lse=True,
        )

        def library(extras: RunExtras, sequence: torch.Tensor | None = None) -> Attend:
            given = dict(fixed, alibi_slopes=extras.alibi_slopes)
            # Layers after the first are laid out like it.
            tall = remembered(lambda q: q.unsqueeze(1))
            flat, narrow = remembered(lambda o: o.squeeze(1)), remembered(lambda s: s.squeeze(2))

            def attend(
                q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: Any = None
            ) -> AttentionOutput:
                found = function(q=tall(q), k_cache=k, v_cache=v, **given)
                o, lse = flat(found[0]), narrow(found[1])  # lse [B, H, 1]
                if sequence is not None:
                    o, lse = o.index_select(0, sequence), lse.index_select(0, sequence)
                return state_of(o, lse, out)

            return attend

        def by_sequence(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
            """A query for every sequence, also those that have none, and each row's sequence."""
            first = batch.cu_seqlens_q[:-1].clamp(max=q.shape[0] - 1)
            sequence = token_positions(batch)[0][: q.shape[0]]
            return *aligned_tensors(q.index_select(0, first), k, v), sequence

        return FlashCall(by_sequence if work.replayed else aligned_tensors, library, spec.dv)

    def _varlen(self, spec: AttentionSpec) -> tuple[Callable[..., Any], dict[str, Any]]:
        """The varlen entry point, which gives o and the LSE first, and what the spec fixes."""
        return self.module.flash_attn_varlen_func, dict(_scores(spec), return_attn_probs=True)

    def _beneath(self, extras: RunExtras, fixed: dict[str, Any]) -> Attend | None:
        """What the varlen entry point's custom operator was made of, of what that is given."""
        interface = getattr(self.module, "flash_attn_interface", None)
        operator = python_function(getattr(interface, "_flash_attn_varlen_forward", None))
        values = operator_values(fixed, dropped=("return_attn_probs",))
        values.update(dropout_p=0.0, alibi_slopes=extras.alibi_slopes)
        return attend_beneath(operator, values)

    def _paged_lengths(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Lengths come from the running sum; with pages it says nothing about places."""
        starts = torch.zeros_like(batch.cu_seqlens_q)
        torch.cumsum(batch.seqlens_k, 0, dtype=torch.int32, out=starts[1:])
        return {"cu_seqlens_q": batch.cu_seqlens_q, "cu_seqlens_k": starts}


class VllmFlashAttention2(FlashAttention2):
    """The FlashAttention 2 inside vLLM, which takes pages in multiples of 16."""

    package = "vllm"
    install = "pip install vllm"
    capabilities = Capabilities(
        devices=("cuda",),
        dtypes=(torch.float16, torch.bfloat16),
        head_dims=IntSet(low=1, high=256),
        head_dims_v=IntSet(low=1, high=256),
        page_sizes=IntSet(low=16, multiple_of=16),
        min_compute_capability=(8, 0),
        features=_FEATURES,
        host_lengths=True,
    )

    def probe(self) -> Probe:
        """The attention module of vLLM, which loads without the rest of it."""
        return probe("vllm.vllm_flash_attn", attribute="flash_attn_varlen_func")

    @property
    def release(self) -> str | None:
        """The version of vLLM, which its attention module does not repeat."""
        return vllm_release()

    def dependency_reasons(self) -> list[Reason]:
        """A missing vLLM, or one whose extension for this version does not load."""
        reasons = super().dependency_reasons()
        return reasons or vllm_reasons(self.version)

    def prepare(self, work: Arrangement, spec: AttentionSpec, options: Any) -> FlashCall:
        """Varlen for everything: vLLM ships no other entry point."""
        dense = self.takes_dense_keys(spec, options)
        return self._ragged(work, spec) if dense else self._paged(work, spec)

    def _varlen(self, spec: AttentionSpec) -> tuple[Callable[..., Any], dict[str, Any]]:
        fixed = dict(_scores(spec), return_softmax_lse=True, fa_version=2)
        return self.module.flash_attn_varlen_func, fixed

    def _beneath(self, extras: RunExtras, fixed: dict[str, Any]) -> Attend | None:
        """The extension's operator; with lengths it looks at no starts of keys, but wants some."""
        given = {"cu_seqlens_k": fixed["cu_seqlens_q"], **fixed}
        values = operator_values(given, {"causal": "is_causal"}, _VLLM_ONLY)
        values.update(p_dropout=0.0, alibi_slopes=extras.alibi_slopes)
        otherwise = dict(zero_tensors=False, return_softmax=False, num_splits=0)
        return attend_beneath(vllm_operator(2, "varlen_fwd"), values, otherwise)

    def _paged_lengths(self, batch: Batch) -> dict[str, torch.Tensor]:
        return {"cu_seqlens_q": batch.cu_seqlens_q, "seqused_k": batch.seqlens_k}


def _scores(spec: AttentionSpec) -> dict[str, Any]:
    """What the spec says of scores, as both entry points take it."""
    return dict(softmax_scale=kernel_scale(spec), causal=spec.causal, softcap=spec.softcap or 0.0)


def vllm_release() -> str | None:
    """The version of vLLM, as installed or as it says itself."""
    found = probe("vllm")
    version: str | None = found.version or getattr(found.module, "__version__", None)
    return version


def vllm_operator(version: int, name: str) -> Any:
    """An operator of vLLM's extension of this version, or None."""
    interface = probe("vllm.vllm_flash_attn.flash_attn_interface").module
    if not hasattr(interface, f"_vllm_fa{version}_C"):
        return None
    return getattr(getattr(getattr(torch.ops, f"_vllm_fa{version}_C"), name, None), "default", None)


def vllm_reasons(version: int) -> list[Reason]:
    """Why vLLM's extension of this version does not load, in vLLM's own words."""
    interface = probe("vllm.vllm_flash_attn.flash_attn_interface").module
    why = getattr(interface, f"FA{version}_UNAVAILABLE_REASON", "no such extension")
    if getattr(interface, f"FA{version}_AVAILABLE", False):
        return []
    got = f"{vllm_release() or 'unknown version'}, {why}"
    return [Reason("vllm", got, f"a build with FlashAttention {version}", "reinstall vllm")]


__all__ = ["FlashAttention2", "VllmFlashAttention2", "safe_bounds", "vllm_reasons"]
__all__ += ["vllm_operator", "vllm_release", "wide_enough"]
