"""Reading the pages of ``generate_batch`` where they lie, without gathering them first.

transformers writes a layer's new keys into a ``PagedAttentionCache`` and copies all keys of the
step into a row before it calls the attention function. The copy is as large as all keys in use,
for every layer and step. For layers of full attention it is left out here: the new keys are
written, and the attention function gets the layer's pages. Layers with a sliding window keep
their keys in a ring that the new keys overwrite, so they are gathered as before, at most a
window per sequence.

Where the function itself updates the cache (5.17 to 5.20), nothing of transformers changes. Where
the model does it before the call (5.24), ``PagedAttentionCache.update`` is wrapped while a handle
asks for it; for models of other attention functions the wrapper only passes on.
"""

from __future__ import annotations

import functools
import inspect
import threading
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import BackendUnavailableError
from ...kv_cache import write_kv

#: Where the wrapper leaves a layer's pages among the arguments of its attention call.
ARGUMENT = "attn_backends_pages"
#: Set on attention functions that read pages.
MARK = "attn_backends_reads_pages"


@dataclass(frozen=True, eq=False)
class Pages:
    """One layer's keys and values in the paged cache.

    Attributes:
        k: ``[num_pages, page_size, HK, D]``.
        v: ``[num_pages, page_size, HK, DV]``.
        rows: Cache row of every key of the step, sequences in order, at least ``cu_k[-1]``.
        new_key: The step's own keys as they were written; the call must bring the same.
    """

    k: torch.Tensor
    v: torch.Tensor
    rows: torch.Tensor
    new_key: torch.Tensor

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.k.shape[1]


def page_table(rows: torch.Tensor, cu_k: torch.Tensor, max_kv_len: int, size: int) -> torch.Tensor:
    """Page ids ``[B, max_pages]`` int32, from the cache row of every key; nothing is synced.

    A sequence's rows are consecutive within a page and a page starts at a multiple of its size, so
    every ``size``-th row names a page. Entries past a sequence's keys belong to others, and are
    not read.

    Args:
        rows: ``[>= cu_k[-1]]`` cache rows, sequences in order.
        cu_k: ``[B+1]`` where each sequence's keys start.
        max_kv_len: Longest key count, or an upper bound.
        size: Tokens per page.
    """
    width = -(-max_kv_len // size)
    steps = torch.arange(width, device=rows.device) * size
    firsts = cu_k[:-1, None] + steps  # [B, max_pages]
    return (rows[firsts.clamp_(max=rows.shape[0] - 1)] // size).int()


def write_pages(
    cache: Any, layer: int, key: torch.Tensor, value: torch.Tensor, kwargs: dict[str, Any]
) -> Pages | None:
    """Write a step's keys and values ``[1, HK, T, D]`` into their pages.

    Returns:
        The layer's pages, and the layer's own lengths in ``kwargs``; None, with nothing done, if
        the keys have to be gathered or there are none before this step.
    """
    if kwargs.get("block_table") is not None:
        return None
    found = _locate(cache, layer)
    if found is None:
        return None
    group, k_pages, v_pages = found
    rows, slots = kwargs["read_index"][group], kwargs["write_index"][group]
    if rows.numel() == 0:  # no key before this step: those of the call are all there are
        return None
    for name in ("cu_seq_lens_k", "max_seqlen_k", "max_length_k"):
        if isinstance(kwargs.get(name), dict):
            kwargs[name] = kwargs[name]["full_attention"]
    new_k, new_v = key.squeeze(0).transpose(0, 1), value.squeeze(0).transpose(0, 1)  # [T, HK, D]
    write_kv(new_k, new_v, k_pages, v_pages, slots)
    return Pages(k_pages, v_pages, rows, key)


def _locate(cache: Any, layer: int) -> tuple[int, torch.Tensor, torch.Tensor] | None:
    """Group and pages of a layer of full attention; None for others, and unknown caches."""
    allocators = getattr(cache, "layer_to_allocator", None)
    if allocators is not None:  # from 5.18
        allocator = allocators[layer]
        if allocator is not cache.cache_allocators.get("full_attention"):
            return None
        k_pages, v_pages = allocator.get_cache_for_block_table(layer)
        return allocator.index, k_pages, v_pages
    groups = getattr(cache, "layer_index_to_group_indices", None)
    if groups is None or cache.sliding_windows[layer] != 1:
        return None
    group, place = groups[layer]
    shape = (-1, cache.block_size, *cache.key_cache[place].shape[1:])
    return group, cache.key_cache[place].view(shape), cache.value_cache[place].view(shape)


class CacheHook:
    """The wrapper around ``PagedAttentionCache.update``, kept while anybody holds it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.holders: list[object] = []
        self.original: Any = None
        self.wrapper: Any = None

    def hold(self, owner: object) -> None:
        """Wrap, unless it is done already.

        Raises:
            BackendUnavailableError: This transformers has no such cache.
        """
        with self.lock:
            if not self.holders:
                cache = _cache_class()
                self.original = cache.update
                self.wrapper = _wrap(cache.update)
                cache.update = self.wrapper
            self.holders.append(owner)

    def drop(self, owner: object) -> None:
        """Forget an owner; after the last, what was there before is there again."""
        with self.lock:
            if owner not in self.holders:
                return
            self.holders.remove(owner)
            cache = _cache_class()
            if (
                not self.holders and cache.update is self.wrapper
            ):  # else others wrapped us, and stay
                cache.update = self.original


HOOK = CacheHook()


def _cache_class() -> Any:
    try:
        from transformers.generation.continuous_batching.cache import PagedAttentionCache

        inspect.signature(PagedAttentionCache.update)
        return PagedAttentionCache
    except Exception as error:
        raise BackendUnavailableError(
            "continuous batching of this transformers has no PagedAttentionCache.update: "
            f"enable(paged=False) does without it: {error}"
        ) from error


def _wrap(original: Any) -> Any:
    if "kwargs" not in inspect.signature(original).parameters:
        return (
            original  # 5.17, 5.18: the attention function updates the cache, and may do it its way
        )

    disable: Any = torch.compiler.disable

    @disable
    @functools.wraps(original)
    def update(
        self: Any,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pages = None
        if HOOK.holders and _reads_pages(self.config):
            pages = write_pages(self, layer_idx, key_states, value_states, kwargs)
        if pages is None:
            states: tuple[torch.Tensor, torch.Tensor] = original(
                self, key_states, value_states, layer_idx, kwargs
            )
            return states
        kwargs[ARGUMENT] = pages
        return key_states, value_states

    return update


def _reads_pages(config: Any) -> bool:
    """Whether a model's attention function is one of ours that reads pages."""
    from transformers import AttentionInterface

    function = AttentionInterface._global_mapping.get(config._attn_implementation)
    return bool(getattr(function, MARK, False))


__all__ = ["ARGUMENT", "HOOK", "MARK", "CacheHook", "Pages", "page_table", "write_pages"]
