"""The implementation that a layer owns: per layer and step only a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from ...errors import Reason
from ...kv_cache import write_kv
from ...spec import FP8_DTYPES
from .kv_cache import cache_views
from .layers import extra_reasons, layer_spec, refusal
from .phases import choose, page_sizes
from .steps import Step


class Impl(AttentionImpl[Step]):
    """Attention of one layer.

    Attributes:
        spec: What the layer fixes, without a page size, which is the builder's to know.
        has_graphs: Whether its decode backend can be captured in a CUDA graph.

    Raises:
        AttnBackendsError: The layer has something that cannot be honoured; all of it is named.
    """

    can_return_lse_for_decode = True
    lse_base_on_e = True
    supports_dcp = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **extra: Any,
    ) -> None:
        reasons = extra_reasons(attn_type, extra)
        if reasons:
            raise refusal(*reasons)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.spec = layer_spec(
            num_heads=num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=head_size,
            dtype=torch.get_default_dtype(),
            scale=scale,
            kv_cache_dtype=kv_cache_dtype,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            has_alibi=alibi_slopes is not None,
            batch_invariant=bool(getattr(envs, "VLLM_BATCH_INVARIANT", False)),
        )
        config = get_current_vllm_config()
        device = torch.device(config.device_config.device)
        self.alibi_slopes = None
        if alibi_slopes is not None:
            self.alibi_slopes = torch.tensor(alibi_slopes, dtype=torch.float32, device=device)
        self._given_sinks = sinks
        self.sinks: torch.Tensor | None = None
        self.is_fp8 = self.spec.kv in FP8_DTYPES
        if self.dcp_world_size > 1:
            from .context_parallel import check_layer

            self.has_graphs = check_layer(self.spec, self.dcp_world_size, device)
        else:
            page = min((s.values[0] if s.values else s.low for s in page_sizes()), default=16)
            phases = choose(replace(self.spec, page_size=max(page, 16)), device)
            self.has_graphs = phases.has_graphs

    @property
    def has_sinks(self) -> bool:
        """Whether the layer has sinks, loaded or not."""
        return self._given_sinks is not None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Take the sinks as float32, now that they are loaded."""
        if self._given_sinks is not None:
            self.sinks = self._given_sinks.detach().float().contiguous()

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Step | None,
        output: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention over the cache, which holds the new keys already.

        Args:
            layer: vLLM's layer, for the scales of its cache.
            query: ``[T, H, D]``; rows from ``num_actual_tokens`` on are ignored.
            key: ``[T, HK, D]``, used by context parallelism alone.
            value: The same.
            kv_cache: See ``cache_views``.
            attn_metadata: The step; None while vLLM measures memory.
            output: ``[T, H, D]``, written in place.
            output_scale: Must be None.
            output_block_scale: Must be None.

        Returns:
            ``output``.

        Raises:
            AttnBackendsError: Something does not fit the plan, or cannot be honoured.
        """
        assert output is not None
        if output_scale is not None or output_block_scale is not None:
            raise refusal(Reason("output_scale", "given", "None"))
        if attn_metadata is None:
            return output.fill_(0)
        k, v = cache_views(kv_cache, self.spec.kv)
        k_scale, v_scale = (layer._k_scale, layer._v_scale) if self.is_fp8 else (None, None)
        sinks = self.sinks
        if sinks is None and self._given_sinks is not None:
            self.process_weights_after_loading(query.dtype)
            sinks = self.sinks
        if attn_metadata.context:
            rows = attn_metadata.num_actual_tokens
            attn_metadata.context[self.spec].run(
                (query[:rows], key[:rows], value[:rows]),
                (k, v),
                output[:rows],
                sinks=sinks,
                alibi_slopes=self.alibi_slopes,
                k_scale=k_scale,
                v_scale=v_scale,
            )
            return output
        for part in attn_metadata.parts[self.spec]:
            q, o = query, output
            if part.start or part.stop != query.shape[0]:
                q, o = query[part.start : part.stop], output[part.start : part.stop]
            part.backend.run(
                q,
                k,
                v,
                part.plan,
                sinks=sinks,
                alibi_slopes=self.alibi_slopes,
                k_scale=k_scale,
                v_scale=v_scale,
                out=(o, part.lse),
            )
        return output

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write new keys and values to their slots; those of padding are negative.

        Args:
            layer: vLLM's layer, for the scales of its cache.
            key: ``[T, HK, D]``, with padding behind.
            value: The same.
            kv_cache: See ``cache_views``.
            slot_mapping: ``[at most T]`` int64.
        """
        k_cache, v_cache = cache_views(kv_cache, self.spec.kv)
        rows = slot_mapping.shape[0]
        if rows != key.shape[0]:
            key, value = key[:rows], value[:rows]
        k_scale, v_scale = (layer._k_scale, layer._v_scale) if self.is_fp8 else (None, None)
        write_kv(key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale)


__all__ = ["Impl"]
