"""Sequences packed into one batch entry: given by ``cu_seq_lens``, or by continuous batching.

``generate_batch`` keeps its keys in a ``PagedAttentionCache``. Newer releases update it before they
call the attention function; older ones leave that to the function. Either way the call holds
every sequence's keys in a row with their lengths, or the layer's pages (``paged.py``).
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from ...batch import Batch, index_tensor
from ...errors import Reason
from .arguments import refusal
from .paged import ARGUMENT, Pages, page_table, write_pages


@dataclass(frozen=True, eq=False)
class PackedLengths:
    """Lengths of packed sequences, on the device.

    Equal to another if they come from the same step, or hold the same tensors and nothing was
    written to those in between, so that the layers of a step share a plan without reading a length.

    Attributes:
        cu_q: ``[B+1]`` where each sequence's queries start.
        cu_k: ``[B+1]`` where its keys start.
        total_q: Query rows.
        total_k: Key rows.
        max_q_len: Longest query, or an upper bound.
        max_kv_len: Longest key count, or an upper bound.
        paged: Whether they come from continuous batching, which is always causal.
        sliding_window: Tokens that the layer sees, for continuous batching.
        rows: Cache row of every key, if they are read from pages; None if they lie in a row.
        page_size: Tokens per page; None if they lie in a row.
        capturing: Whether a CUDA graph is being captured. What was planned before a capture is not
            replayed with it, so such lengths never equal others.
        step: An object that the layers of one step of continuous batching share, and no other
            step: its list of indices. None outside.
    """

    cu_q: torch.Tensor
    cu_k: torch.Tensor
    total_q: int
    total_k: int
    max_q_len: int
    max_kv_len: int
    paged: bool
    sliding_window: int | None
    rows: torch.Tensor | None = None
    page_size: int | None = None
    capturing: bool = False
    step: object = None

    first_row: ClassVar[int] = 0
    _key: tuple[Any, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_key", self._state())

    def _state(self) -> tuple[Any, ...]:
        tensors = [x for x in (self.cu_q, self.cu_k, self.rows) if x is not None]
        bounds = (self.total_q, self.total_k, self.max_q_len, self.max_kv_len)
        sizes = (*bounds, self.page_size, self.capturing)
        if self.step is not None:
            return (id(self.step), *map(id, tensors), *sizes)
        if any(x.is_inference() for x in tensors):  # those do not count their writes
            return (id(self),)
        return (*map(id, tensors), *(x._version for x in tensors), *sizes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PackedLengths) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def batch(self, step: int, device: torch.device) -> Batch:
        """The batch; nothing is copied to the host."""
        cu_k = index_tensor("cu_seq_lens_k", self.cu_k, device)
        table = None
        if self.rows is not None and self.page_size is not None:
            table = page_table(self.rows, cu_k, self.max_kv_len, self.page_size)
        return Batch(
            cu_seqlens_q=self.cu_q,
            seqlens_k=cu_k.diff(),
            cu_seqlens_k=cu_k if table is None else None,
            page_table=table,
            total_q=self.total_q,
            total_k=self.total_k if table is None else 0,
            max_seqlen_q=self.max_q_len,
            max_seqlen_k=self.max_kv_len,
        )


def _is_paged(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("read_index") is not None or kwargs.get("write_index") is not None


def update_cache(
    name: str,
    module: torch.nn.Module,
    key: torch.Tensor,
    value: torch.Tensor,
    kwargs: dict[str, Any],
    read_pages: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, Pages | None]:
    """Write a layer's new keys to the paged cache and read all, where that is our part.

    Args:
        name: The attention function, for messages.
        module: The attention layer.
        key: ``[1, HK, T, D]``, the step's own keys where the cache is ours to update.
        value: The same with DV.
        kwargs: The call's further arguments; its lengths become this layer's.
        read_pages: Leave keys in their pages where that is possible.

    Returns:
        ``[1, HK, Tk, D]`` and ``[1, HK, Tk, DV]``; the arguments if there is nothing to do. With
        pages, those hold every key, and the tensors only the step's own.

    Raises:
        UnsupportedCallError: The call leaves writing and reading the pages to a flash kernel, or
            the model changed keys after they were written.
    """
    reasons = []
    for argument in ("block_table", "k_cache", "v_cache"):
        if kwargs.get(argument) is not None:
            fix = "set max_blocks_per_request=0 in the continuous batching config"
            reasons.append(Reason(argument, "given", "None", fix))
    if reasons:
        raise refusal(name, *reasons)
    pages: Pages | None = kwargs.get(ARGUMENT)
    if pages is not None and not _same(key, pages.new_key):
        fix = "enable(paged=False) gathers keys before the model changes them"
        raise refusal(name, Reason("key", "changed after cache.update", "as written", fix))
    cache: Any = kwargs.get("cache")
    if pages is not None or not hasattr(cache, "update") or not _is_paged(kwargs):
        return key, value, pages
    layer: int = module.layer_idx  # type: ignore[assignment]
    if read_pages and (pages := write_pages(cache, layer, key, value, kwargs)) is not None:
        return key, value, pages
    if "read_index" in inspect.signature(cache.update).parameters:
        kind = "full_attention" if _layer_window(name, module) is None else "sliding_attention"
        for argument in ("cu_seq_lens_k", "max_seqlen_k"):
            if isinstance(kwargs.get(argument), dict):
                kwargs[argument] = kwargs[argument][kind]
        key, value = cache.update(
            key_states=key,
            value_states=value,
            layer_idx=layer,
            read_index=kwargs["read_index"],
            write_index=kwargs["write_index"],
        )
    else:
        key, value = cache.update(key, value, layer, kwargs)
    if key.dim() == 3:  # [Tk, HK, D]
        key, value = key.transpose(0, 1).unsqueeze(0), value.transpose(0, 1).unsqueeze(0)
    return key, value, None


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def packed_lengths(
    name: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    kwargs: dict[str, Any],
    pages: Pages | None = None,
) -> PackedLengths | None:
    """Lengths of packed sequences, or None if the call is not packed.

    Raises:
        UnsupportedCallError: They are incomplete, or the batch is not one packed entry.
    """
    cu_q, cu_k = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if cu_q is None and cu_k is None:
        return None
    if not isinstance(cu_q, torch.Tensor) or not isinstance(cu_k, torch.Tensor):
        got = f"{type(cu_q).__name__}, {type(cu_k).__name__}"
        raise refusal(name, Reason("cu_seq_lens_q, cu_seq_lens_k", got, "two tensors [B+1]"))
    if query.shape[0] != 1:
        raise refusal(name, Reason("batch_size", str(query.shape[0]), "1 with cu_seq_lens_q"))
    paged = _is_paged(kwargs)
    return PackedLengths(
        cu_q=cu_q,
        cu_k=cu_k,
        total_q=query.shape[2],
        total_k=key.shape[2],
        max_q_len=_longest(kwargs, "q", cu_q),
        max_kv_len=_longest(kwargs, "k", cu_k),
        paged=paged,
        sliding_window=_layer_window(name, module) if paged else None,
        rows=None if pages is None else pages.rows,
        page_size=None if pages is None else pages.page_size,
        capturing=key.is_cuda and torch.cuda.is_current_stream_capturing(),
        step=kwargs.get("read_index"),
    )


def _longest(kwargs: dict[str, Any], which: str, starts: torch.Tensor) -> int:
    for argument in (f"max_length_{which}", f"max_seqlen_{which}"):
        if kwargs.get(argument) is not None:
            return int(kwargs[argument])
    return int(starts.diff().max()) if starts.shape[0] > 1 else 0


def _layer_window(name: str, module: torch.nn.Module) -> int | None:
    """Window of a layer under continuous batching, which reads it from the configuration."""
    config: Any = module.config
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return window
    kind = kinds[module.layer_idx]
    if kind not in ("full_attention", "sliding_attention"):
        raise refusal(name, Reason("layer_type", kind, "full_attention, sliding_attention"))
    return window if kind == "sliding_attention" else None


__all__ = ["PackedLengths", "packed_lengths", "update_cache"]
