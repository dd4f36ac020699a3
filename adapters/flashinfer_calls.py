"""How FlashInfer's three wrappers are made, planned and run: keywords only, all releases alike."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from ..capacity import Capacity
from ..spec import AttentionSpec
from .flash_build import kernel_query, kernel_scale
from .flashinfer_pages import HostBatch, page_lists, starts_of
from .tensors import Tensors, aligned

#: ``(q, k, v, o, lse)``: writes ``o [T, H, DV]`` and the base-2 ``lse [T, H]``.
Library = Callable[..., None]

LATENT, ROPE = 512, 64


def is_mla(spec: AttentionSpec) -> bool:
    """Whether this is absorbed MLA, whose values are the first lanes of its keys."""
    return (spec.head_dim, spec.dv) == (LATENT + ROPE, LATENT)


class WrapperCalls:
    """One kind of wrapper. Every argument that a kernel is compiled for comes from the spec.

    Args:
        module: The ``flashinfer`` module.
        spec: What the layer fixes.
        kernel: ``fa2`` or ``fa3``.
    """

    name: str

    def __init__(self, module: ModuleType, spec: AttentionSpec, kernel: str) -> None:
        self.module = module
        self.spec = spec
        self.kernel = kernel

    def make(self, workspace: torch.Tensor, capacity: Capacity | None) -> Any:
        """A new wrapper; with a capacity, one that a CUDA graph can hold."""
        buffers = {} if capacity is None else self.buffers(capacity, workspace.device)
        return getattr(self.module, self.name)(workspace, backend=self.kernel, **buffers)

    def buffers(self, capacity: Capacity, device: torch.device) -> dict[str, Any]:
        """Fixed buffers for the index arrays, one sequence more than the capacity has."""
        raise NotImplementedError

    def plan(self, wrapper: Any, batch: HostBatch) -> None:
        """Plan a batch; FlashInfer copies what kernels read without waiting."""
        raise NotImplementedError

    def library(self, wrapper: Any, k_scale: float | None = None) -> Library:
        """What computes tensors like those that ``tensors`` gave, through a planned wrapper."""
        raise NotImplementedError

    def planned_options(self) -> dict[str, Any]:
        """What both prefill wrappers fix when they plan."""
        spec = self.spec
        left, right = spec.bounds
        options: dict[str, Any] = dict(
            num_qo_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim_qk=spec.head_dim,
            head_dim_vo=spec.dv,
            causal=spec.causal,
            sm_scale=kernel_scale(spec),
            window_left=-1 if left is None else left,
            logits_soft_cap=spec.softcap or 0.0,
            q_data_type=spec.dtype,
            kv_data_type=spec.kv,
            o_data_type=spec.out_dtype,
        )
        if left is not None and right is None:
            # Splits are sized for keys up to the diagonal; without causality there are more.
            options["disable_split_kv"] = True
        return options

    def tensors(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
        """Queries, keys and values as the kernels want them; the same objects if they fit."""
        return aligned(kernel_query(q, self.spec)), aligned(k), aligned(v)


class PagedCalls(WrapperCalls):
    """``BatchPrefillWithPagedKVCacheWrapper``: prefill, extend and decode on tensor cores."""

    name = "BatchPrefillWithPagedKVCacheWrapper"

    def buffers(self, capacity: Capacity, device: torch.device) -> dict[str, Any]:
        """Index pointers, page ids and last page lengths."""
        return dict(
            use_cuda_graph=True,
            qo_indptr_buf=ints(capacity.num_seqs + 2, device),
            paged_kv_indptr_buf=ints(capacity.num_seqs + 2, device),
            paged_kv_indices_buf=ints(capacity.num_seqs * capacity.max_pages, device),
            paged_kv_last_page_len_buf=ints(capacity.num_seqs + 1, device),
        )

    def plan(self, wrapper: Any, batch: HostBatch) -> None:
        """Lengths as index pointers; all on the host but the page ids."""
        assert self.spec.page_size is not None
        pages = page_lists(batch, self.spec.page_size)
        wrapper.plan(
            qo_indptr=starts_of(batch.q_lens),
            paged_kv_indptr=pages.indptr,
            paged_kv_indices=pages.indices,
            paged_kv_last_page_len=pages.last_page_len,
            page_size=self.spec.page_size,
            **self.planned_options(),
        )

    def tensors(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
        """The kernels read K and V with one set of strides."""
        q, k, v = super().tensors(q, k, v)
        if k.stride() != v.stride():
            k, v = k.contiguous(), v.contiguous()
        return q, k, v

    def library(self, wrapper: Any, k_scale: float | None = None) -> Library:
        """The scale of keys goes into the scale of scores."""
        run, scale = wrapper.run, {} if k_scale is None else {"k_scale": k_scale}

        def call(q: Any, k: Any, v: Any, o: torch.Tensor, lse: torch.Tensor) -> None:
            run(q=q, paged_kv_cache=(k, v), out=o, lse=lse, return_lse=True, **scale)

        return call


class RaggedCalls(WrapperCalls):
    """``BatchPrefillWithRaggedKVCacheWrapper``: keys that lie back to back."""

    name = "BatchPrefillWithRaggedKVCacheWrapper"

    def buffers(self, capacity: Capacity, device: torch.device) -> dict[str, Any]:
        """Index pointers."""
        return dict(
            use_cuda_graph=True,
            qo_indptr_buf=ints(capacity.num_seqs + 2, device),
            kv_indptr_buf=ints(capacity.num_seqs + 2, device),
        )

    def plan(self, wrapper: Any, batch: HostBatch) -> None:
        """Lengths as index pointers, on the host."""
        wrapper.plan(
            qo_indptr=starts_of(batch.q_lens),
            kv_indptr=starts_of(batch.kv_lens),
            **self.planned_options(),
        )

    def library(self, wrapper: Any, k_scale: float | None = None) -> Library:
        """K and V may have strides of their own here."""
        run = wrapper.run

        def call(q: Any, k: Any, v: Any, o: torch.Tensor, lse: torch.Tensor) -> None:
            run(q=q, k=k, v=v, out=o, lse=lse, return_lse=True)

        return call


class MlaCalls(WrapperCalls):
    """``BatchMLAPagedAttentionWrapper``: latent lanes and rope lanes of one cache."""

    name = "BatchMLAPagedAttentionWrapper"

    def make(self, workspace: torch.Tensor, capacity: Capacity | None) -> Any:
        """The wrapper lives in ``flashinfer.mla``."""
        buffers = {} if capacity is None else self.buffers(capacity, workspace.device)
        return getattr(self.module.mla, self.name)(workspace, backend=self.kernel, **buffers)

    def buffers(self, capacity: Capacity, device: torch.device) -> dict[str, Any]:
        """Index pointers, page ids and lengths."""
        return dict(
            use_cuda_graph=True,
            qo_indptr=ints(capacity.num_seqs + 2, device),
            kv_indptr=ints(capacity.num_seqs + 2, device),
            kv_indices=ints(capacity.num_seqs * capacity.max_pages, device),
            kv_len_arr=ints(capacity.num_seqs + 1, device),
        )

    def plan(self, wrapper: Any, batch: HostBatch) -> None:
        """Newer releases take the index arrays as one object."""
        assert self.spec.page_size is not None
        pages = page_lists(batch, self.spec.page_size)
        arrays: dict[str, Any] = dict(
            qo_indptr=starts_of(batch.q_lens),
            kv_indptr=pages.indptr,
            kv_indices=pages.indices,
            kv_len_arr=torch.tensor(batch.kv_lens, dtype=torch.int32),
        )
        metadata = getattr(self.module.mla, "MLAPlanMetadata", None)
        if metadata is not None:
            arrays = dict(
                metadata=metadata.csr(**arrays),
                query_layout="split",
                kv_cache_layout="split",
                lse_mode="base2",
            )
        wrapper.plan(
            num_heads=self.spec.num_heads,
            head_dim_ckv=LATENT,
            head_dim_kpe=ROPE,
            page_size=self.spec.page_size,
            causal=self.spec.causal,
            sm_scale=kernel_scale(self.spec),
            q_data_type=self.spec.dtype,
            kv_data_type=self.spec.kv,
            **arrays,
        )

    def tensors(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
        """Values are lanes of ``k``, and are not looked at."""
        return aligned(kernel_query(q, self.spec)), aligned(k), v

    def library(self, wrapper: Any, k_scale: float | None = None) -> Library:
        """``q [T, H, 576]`` and a cache ``[num_pages, page_size, 1, 576]``, each in two parts."""
        run, in_pairs = wrapper.run, hasattr(self.module.mla, "MLAPlanMetadata")

        def call(q: Any, k: Any, v: Any, o: torch.Tensor, lse: torch.Tensor) -> None:
            k = k.squeeze(2)
            queries, keys = (q[..., :LATENT], q[..., LATENT:]), (k[..., :LATENT], k[..., LATENT:])
            if in_pairs:
                run(query=queries, kv_cache=keys, out=o, lse=lse, return_lse=True)
                return
            run(
                q_nope=queries[0],
                q_pe=queries[1],
                ckv_cache=keys[0],
                kpe_cache=keys[1],
                out=o,
                lse=lse,
                return_lse=True,
            )

        return call


def calls_for(
    module: ModuleType, spec: AttentionSpec, kernel: str, *, ragged: bool
) -> WrapperCalls:
    """The kind of wrapper that serves a spec, with keys back to back or in pages."""
    if is_mla(spec):
        return MlaCalls(module, spec, kernel)
    kind = RaggedCalls if ragged else PagedCalls
    return kind(module, spec, kernel)


def ints(count: int, device: torch.device) -> torch.Tensor:
    """A buffer for indices; zeros, since kernels may read past what a plan fills."""
    return torch.zeros(max(count, 1), dtype=torch.int32, device=device)


__all__ = ["WrapperCalls", "calls_for", "is_mla"]
