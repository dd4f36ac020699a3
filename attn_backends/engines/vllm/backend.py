"""The class that vLLM's registry leads to: what it asks before it builds a layer."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, MultipleOf

from ...errors import AttnBackendsError
from .builder import Builder
from .impl import Impl
from .kv_cache import cache_shape, stride_order
from .layers import KV_DTYPES, layer_spec
from .phases import page_sizes, selection_reasons
from .registration import backend_name

_NAME = backend_name()


class Backend(AttentionBackend):
    """All backends of the library, behind one name of vLLM's."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", *KV_DTYPES]
    #: ``Impl.do_kv_cache_update`` writes the cache, as an operation of its own.
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        """The name under which this very class is registered: layers look it up again."""
        return _NAME

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        """The class that layers own one of."""
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        """The class that plans steps."""
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Block sizes that the backends named by the settings take.

        The choice of ``auto`` is judged for the size that vLLM then takes.
        """
        try:
            asked = page_sizes()
        except AttnBackendsError:  # told by ``supports_combination``, in its own words
            asked = ()
        sizes: list[int | MultipleOf] = [MultipleOf(1)]
        for size in asked:
            if size.values:
                return [each for each in size.values if all(each in other for other in asked)]
            if size.multiple_of > sizes[0].base:  # type: ignore[union-attr]
                sizes = [MultipleOf(size.multiple_of)]
        return sizes

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Shape of a layer's cache, where backends choose it."""
        return cache_shape(num_blocks, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Order of its dims in memory, by ``VLLM_KV_CACHE_LAYOUT``."""
        from vllm.v1.attention.backends.utils import get_kv_cache_layout

        return stride_order(get_kv_cache_layout(), include_num_layers_dimension)

    @classmethod
    def supports_sink(cls) -> bool:
        """Sinks are a merge, so every backend has them."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Windows are judged with the layer."""
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """Scales of a float8 cache may be ``[HK]``."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """``VLLM_BATCH_INVARIANT`` goes into the spec, and decides over backends there."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Plans may use lengths on the host."""
        return False

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        *rest: Any,
    ) -> str | None:
        """What the backends named by the settings have against such a layer, in full."""
        try:
            spec = layer_spec(
                num_heads=1,
                num_kv_heads=1,
                head_size=head_size,
                dtype=dtype,
                scale=1.0,
                kv_cache_dtype=kv_cache_dtype or "auto",
                page_size=block_size or 16,
            )
        except AttnBackendsError as error:
            return str(error)
        return "; ".join(map(str, selection_reasons(spec))) or None


__all__ = ["Backend"]
