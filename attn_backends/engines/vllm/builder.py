"""The metadata builder: plans once per step what every layer of a group runs.

Three kinds of steps. A step that a captured graph replays refills that graph's plan; vLLM pads its
metadata to the size of the graph, so the numbers of requests, tokens and queries tell which one.
Any other step is planned anew: in one part where one backend serves both phases, else decode and
prefill apart, with decode requests in front, as ``reorder_batch_threshold`` asks vLLM to put them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder

from ...capacity import Capacity
from ...errors import Reason
from ...plan import Plan
from ...spec import AttentionSpec
from .context_parallel import ContextParallel
from .impl import Impl
from .layers import refusal
from .phases import Phases, choose
from .steps import Part, Requests, Step

logger = init_logger("vllm.attn_backends")


class Builder(AttentionMetadataBuilder[Step]):
    """Builds the ``Step`` of one group of layers, which share a block table.

    Attributes:
        reorder_batch_threshold: Most queries of the requests that vLLM puts in front; None where
            one backend serves both phases.

    Raises:
        AttnBackendsError: No backend, or not the one that the settings name, can do a layer.
    """

    reorder_batch_threshold: int | None

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.page_size: int = kv_cache_spec.block_size
        context = vllm_config.compilation_config.static_forward_context
        self.phases: dict[AttentionSpec, Phases] = {}
        self.context: dict[AttentionSpec, ContextParallel] = {}
        self.layers = layers_of(layer_names, context)
        for layer in self.layers:
            self._add(layer)
        self.exact = vllm_config.speculative_config is None
        self._init_reorder_batch_threshold(
            1, supports_spec_as_decode=True, supports_dcp_with_varlen=True
        )
        #: Most queries of a decode request: one, and those that speculation adds.
        self.longest_decode: int = self.reorder_batch_threshold or 1
        if all(phases.is_one for phases in self.phases.values()):
            self.reorder_batch_threshold = None
        self._rows = vllm_config.scheduler_config.max_num_batched_tokens
        self._lse: dict[int, torch.Tensor] = {}
        self._captured: dict[tuple[AttentionSpec, tuple[int, int, int]], Plan] = {}
        self._held: dict[tuple[int, int, int], Held] = {}
        self._capturing = False
        for spec, phases in self.phases.items():
            logger.info_once("attn_backends: %s for %s", str(phases), _describe(spec))
        for spec, context in self.context.items():
            logger.info_once("attn_backends: %s for %s", str(context), _describe(spec))

    def _add(self, layer: Any) -> None:
        impl: Impl = layer.impl
        width = getattr(layer, "head_size_v", impl.head_size)
        if width != impl.head_size:
            raise refusal(Reason("head_size_v", str(width), f"head_size={impl.head_size}"))
        if impl.spec in self.phases or impl.spec in self.context:
            return
        spec = replace(impl.spec, page_size=self.page_size)
        if impl.dcp_world_size > 1:
            parallel = self.vllm_config.parallel_config
            self.context[impl.spec] = ContextParallel.of(
                spec,
                impl.dcp_world_size,
                impl.dcp_rank,
                parallel.cp_kv_cache_interleave_size,
                self.device,
                getattr(parallel, "dcp_comm_backend", None) == "a2a",
            )
        else:
            self.phases[impl.spec] = choose(spec, self.device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Graphs of uniform decode steps, if the decode backends of all layers have them."""
        layers = vllm_config.compilation_config.static_forward_context.values()
        impls = [layer.impl for layer in layers if isinstance(getattr(layer, "impl", None), Impl)]
        if all(impl.has_graphs for impl in impls):
            return AttentionCGSupport.UNIFORM_BATCH
        return AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Step:
        """Plan a step.

        Args:
            common_prefix_len: 0, as cascades are never asked for.
            common_attn_metadata: vLLM's ``CommonAttentionMetadata``.
            fast_build: Makes no difference here.
        """
        if common_prefix_len:
            raise refusal(Reason("common_prefix_len", str(common_prefix_len), "0"))
        common = common_attn_metadata
        held = self._held.get((common.num_reqs, common.num_actual_tokens, common.max_query_len))
        if held is not None and held.refilled(common):
            return held.step
        # A subclass of vLLM's may have changed lengths on the device alone.
        exact = self.exact and type(self) is Builder
        requests = Requests.of(common_attn_metadata, exact=exact)
        step = Step(requests.num_tokens)
        for spec, context in self.context.items():
            capacity = self._capacity(requests) if self._capturing else None
            step.context[spec] = context.plan(requests, capacity)
        replayed = [self._graph_part(spec, requests) for spec in self.phases]
        if None not in replayed:
            step.parts = {spec: (part,) for spec, part in zip(self.phases, replayed) if part}
            if step.parts and not step.context:
                self._held[requests.key] = Held.of(step)
            return step
        batches: dict[bool, list[tuple[bool, Requests, Any]]] = {}
        for spec, phases in self.phases.items():
            if phases.is_one not in batches:
                batches[phases.is_one] = self._batches(requests, phases.is_one)
            row, parts = 0, []
            for is_decode, some, batch in batches[phases.is_one]:
                backend = phases.decode if is_decode else phases.prefill
                stop = row + some.num_tokens
                lse = self._lse_room(spec.num_heads, stop)[row:stop]
                parts.append(Part(backend, backend.plan(batch), row, stop, lse))
                row = stop
            step.parts[spec] = tuple(parts)
        return step

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Step:
        """Plan a step that is captured: its plans stay, and later steps of its size refill them."""
        self._capturing = True
        try:
            step = self.build(0, common_attn_metadata)
        finally:
            self._capturing = False
        self._warm_up(step)
        return step

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        """Never: one run over shared pages costs less than merging two."""
        return False

    def _warm_up(self, step: Step) -> None:
        """Run what a graph will hold once before, as no kernel can be compiled during a capture.

        On zeros, and writing to no slot. Layers that would launch the same are run once.
        """
        rows, done = step.num_actual_tokens, set()
        for layer in self.layers:
            impl, cache = layer.impl, layer.kv_cache
            kind = (impl.spec, impl.has_sinks, cache.stride(), cache.dtype)
            if cache.numel() == 0 or kind in done:
                continue
            done.add(kind)
            shape = (rows, impl.num_heads + impl.num_kv_heads, impl.head_size)
            both = torch.zeros(shape, dtype=impl.spec.dtype, device=self.device)
            q, k = both[:, : impl.num_heads], both[:, impl.num_heads :]
            slots = torch.full((rows,), -1, dtype=torch.int64, device=self.device)
            impl.do_kv_cache_update(layer, k, k, cache, slots)
            impl.forward(layer, q, k, k, cache, step, torch.empty_like(q).contiguous())

    def _batches(self, requests: Requests, is_one: bool) -> list[tuple[bool, Requests, Any]]:
        """(is decode, requests, batch) in order of rows."""
        decode, prefill = requests.split(self.longest_decode)
        if is_one:
            return [(prefill is None, requests, requests.batch())]
        both = ((True, decode), (False, prefill))
        return [(kind, some, some.batch()) for kind, some in both if some is not None]

    def _graph_part(self, spec: AttentionSpec, requests: Requests) -> Part | None:
        """The part of a step that a graph computes; None if no graph has this size."""
        key = (spec, requests.key)
        plan = self._captured.get(key)
        if plan is None and not self._capturing:
            return None
        backend = self.phases[spec].decode
        if plan is None:
            plan = backend.plan(requests.batch(), self._capacity(requests))
            self._captured[key] = plan
        else:
            plan.update(requests.batch())
        rows = requests.num_tokens
        return Part(backend, plan, 0, rows, self._lse_room(spec.num_heads, rows)[:rows])

    def _capacity(self, requests: Requests) -> Capacity:
        """Room for every step that replays a graph, in vLLM's own buffers."""
        width = requests.block_table.shape[1]
        most = max(self.vllm_config.model_config.max_model_len, requests.max_seq_len)
        return Capacity(
            num_seqs=requests.num_reqs,
            total_q=requests.num_tokens,
            max_seqlen_q=requests.max_query_len,
            max_seqlen_k=min(most, width * self.page_size),
            max_pages=width,
            in_place=True,
        )

    def _lse_room(self, num_heads: int, rows: int) -> torch.Tensor:
        """``[>= rows, H]`` float32 that graphs may keep the address of."""
        room = self._lse.get(num_heads)
        if room is None or room.shape[0] < rows:
            shape = (max(rows, self._rows), num_heads)
            room = self._lse[num_heads] = torch.empty(
                shape, dtype=torch.float32, device=self.device
            )
        return room


class Held(NamedTuple):
    """A step of a captured size, and whose lengths its plans read.

    Attributes:
        step: What layers get.
        plans: Its plans.
        addresses: Of the tensors that vLLM refills: starts of queries, lengths, blocks.
        width: Columns of the block table.
        most: Most keys of a request.
    """

    step: Step
    plans: tuple[Plan, ...]
    addresses: tuple[int, int, int]
    width: int
    most: int

    @classmethod
    def of(cls, step: Step) -> Held:
        """Look at the buffers of its plans, which are alike."""
        plans = tuple(part.plan for parts in step.parts.values() for part in parts)
        batch, table = plans[0].batch, plans[0].batch.page_table
        assert table is not None
        at = (batch.cu_seqlens_q.data_ptr(), batch.seqlens_k.data_ptr(), table.data_ptr())
        return cls(step, plans, at, table.shape[1], batch.max_seqlen_k)

    def refilled(self, common: Any) -> bool:
        """Whether plans are up to date again, as vLLM wrote this step where the last one was."""
        table = common.block_table_tensor
        at = (common.query_start_loc.data_ptr(), common.seq_lens.data_ptr(), table.data_ptr())
        if at != self.addresses or table.shape[1] != self.width or table.stride(0) != self.width:
            return False
        if common.max_seq_len > self.most or common.causal is not True:
            return False
        return all([plan.update_in_place() for plan in self.plans])


def layers_of(names: Iterable[str], layers: dict[str, Any]) -> list[Any]:
    """The layers that are ours; a group may hold others that share its blocks."""
    named = (layers[name] for name in names)
    return [layer for layer in named if isinstance(getattr(layer, "impl", None), Impl)]


def _describe(spec: AttentionSpec) -> str:
    text = f"H={spec.num_heads} HK={spec.num_kv_heads} D={spec.head_dim} {spec.dtype}"
    return text if spec.window is None else f"{text} window={spec.window}"


__all__ = ["Builder"]
