"""The attention backend that SGLang drives.

It turns the step's metadata into batches once, and each layer's call into a run of the backend
that the configuration chooses for the phase. Keys and values are written to the pool first; then
every query reads them from there, those of its own step too.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

# This module is imported by the factory only, which SGLang itself calls.
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from ...errors import Reason
from ...registry import select
from ...spec import AttentionSpec
from .batches import Tables, decode_batches, extend_batches, phase_of
from .graphs import Graphs
from .layers import layer_spec
from .pool import Pool
from .reasons import call_reasons, layer_reasons, refusal, runner_reasons
from .registration import NAME
from .steps import Step

logger = logging.getLogger(__name__)


class Backend(AttentionBackend):
    """SGLang's ``AttentionBackend`` over the registry.

    Args:
        runner: SGLang's ``ModelRunner``, its model loaded.

    Raises:
        UnsupportedCallError: Something asked for cannot be honored; it carries every reason.
        AttnBackendsError: The configuration chooses a backend that cannot do a layer.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        if reasons := runner_reasons(runner):
            raise refusal(*reasons)
        # SGLang and its models look for these two here.
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self.kv_index_translator = getattr(runner, "kv_index_translator", None)
        self.device = torch.device(runner.device)
        self.forward_metadata: Step | None = None

        self._pool = Pool(runner.token_to_kv_pool, runner.page_size)
        self._tables = Tables(runner.req_to_token_pool.req_to_token, self._pool)
        self._deterministic = bool(
            getattr(runner.server_args, "enable_deterministic_inference", False)
        )
        config = getattr(runner.model_config, "hf_config", None)
        self._chunked = getattr(config, "attention_chunk_size", None) is not None
        self._checked: dict[int, Any] = {}  # layers by id, kept alive so that ids stay theirs
        self._graphs: Graphs | None = None
        self._window_loc: torch.Tensor | None = None
        self._specs = self._model_specs(runner)

    def _model_specs(self, runner: Any) -> list[tuple[AttentionSpec, bool]]:
        """Specs of the model's layers and whether each is in the pool for windows; all checked."""
        model = getattr(runner, "model", None)
        if not isinstance(model, torch.nn.Module):
            return []
        layers = [m for m in model.modules() if isinstance(m, RadixAttention)]
        reasons = [r for layer in layers for r in layer_reasons(layer, self._chunked)]
        if reasons:
            raise refusal(*dict.fromkeys(reasons))
        dtype = runner.model_config.dtype
        found = dict.fromkeys(self._spec(layer, dtype) for layer in layers)
        phases = [p for p in ("prefill", "decode") if _chosen(runner, p) in (None, NAME)]
        for spec in dict.fromkeys(spec for spec, _ in found):
            names = [
                f"{phase}={select(spec, phase=phase, device=self.device).name}" for phase in phases
            ]
            logger.info("attn_backends: %s for %s", ", ".join(names), spec)
        return list(found)

    def _spec(self, layer: Any, dtype: torch.dtype) -> tuple[AttentionSpec, bool]:
        if id(layer) not in self._checked:
            if reasons := layer_reasons(layer, self._chunked):
                raise refusal(*reasons)
            self._checked[id(layer)] = layer
        spec = layer_spec(layer, dtype, self._pool.dtype, self._pool.page_size, self._deterministic)
        return spec, self._pool.is_windowed(layer)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Make a step of a batch that runs without a graph.

        Args:
            forward_batch: SGLang's ``ForwardBatch``.

        Raises:
            UnsupportedCallError: The batch is of a kind that the plug does not know.
        """
        phase = phase_of(forward_batch)
        if phase is None:
            self.forward_metadata = None
            return
        batches = extend_batches if phase == "prefill" else decode_batches
        self.forward_metadata = Step(phase, batches(forward_batch, self._tables))
        self.init_forward_metadata_in_graph(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Make room for what captured graphs read.

        Args:
            max_bs: Most requests of a graph.
            max_num_tokens: Most tokens of one; the same, as a decode step has one of each request.
        """
        self._graphs = Graphs(self._tables, max_bs, self._tables.req_to_token.device)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before a capture: the step it is captured over. Before a replay: refill it.

        Args:
            forward_batch: SGLang's ``ForwardBatch``, or a view of what a replay is padded to.
            in_capture: Whether a capture follows.

        Raises:
            UnsupportedCallError: The graph is not one of decode.
        """
        phase = phase_of(forward_batch)
        captures_decode = forward_batch.forward_mode.is_decode_or_idle()
        if not captures_decode or self._graphs is None:
            fix = "--cuda-graph-backend-prefill breakable; prefill plans follow each step's lengths"
            mode = str(getattr(forward_batch.forward_mode, "name", phase))
            raise refusal(Reason("forward_mode in a graph", mode, "DECODE", fix))
        if not in_capture:
            self.forward_metadata = self._graphs.replay(forward_batch)
            return
        step = self.forward_metadata = self._graphs.capture(forward_batch)
        for spec, windowed in self._specs:
            step.plan(spec, windowed, self._graphs.device)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Find where the pool for sliding windows takes the step's keys; a graph records it.

        Args:
            forward_batch: SGLang's ``ForwardBatch``.
        """
        loc = getattr(forward_batch, "out_cache_loc", None)
        if self._pool.has_windows and loc is not None:
            self._window_loc = self._pool.window_slots(loc)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Keys of a padding request; it reads the slot that SGLang keeps for padding."""
        return 1

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """New tokens after a cached prefix; see ``forward_decode``."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of one layer over the step.

        Args:
            q: ``[T, H * D]`` or ``[T, H, D]``.
            k: ``[T, HK, D]`` new keys, or None where another layer wrote them.
            v: ``[T, HK, DV]``, likewise.
            layer: SGLang's ``RadixAttention``.
            forward_batch: The ``ForwardBatch`` of the step.
            save_kv_cache: Whether ``k`` and ``v`` are yet to be written to the pool.
            **kwargs: ``sinks [H]`` and ``return_lse``; anything else that asks for something is
                refused.

        Returns:
            ``[T, H * DV]``. Where an LSE is asked for, ``(o [T, H, DV], lse [T, H])``: float32,
            natural logarithm, sinks included if there are any.

        Raises:
            UnsupportedCallError: An argument or the layer asks for what cannot be done.
        """
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
        kwargs: dict[str, Any],
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        sinks = kwargs.pop("sinks", None)
        wants_lse = kwargs.pop("return_lse", False) or getattr(
            forward_batch, "mha_return_lse", False
        )
        if kwargs and (reasons := call_reasons(kwargs)):
            raise refusal(*reasons)
        step = self.forward_metadata
        if step is None:
            raise refusal(Reason("init_forward_metadata", "not called", "once before the layers"))
        spec, windowed = self._spec(layer, q.dtype)
        if step.capacity is None and q.is_cuda and torch.cuda.is_current_stream_capturing():
            raise refusal(Reason("capture", step.phase, "decode graphs"))
        if save_kv_cache and k is not None and v is not None:
            k = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
            v = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
            self._pool.write(layer, self._write_loc(forward_batch), k, v)
        k_cache, v_cache = self._pool.caches(layer)
        k_scale, v_scale = self._pool.scales(layer, q.device)
        backend, plan = step.plan(spec, windowed, q.device)
        q = q.reshape(-1, spec.num_heads, spec.head_dim)
        rows = min(step.rows, q.shape[0])
        out = None
        if rows < q.shape[0]:  # padding gets the state of no keys
            o = q.new_zeros(q.shape[0], spec.num_heads, spec.dv)
            lse = q.new_full(o.shape[:2], float("-inf"), dtype=torch.float32)
            out = (o[:rows], lse[:rows])
        state = backend.run(
            q[:rows],
            k_cache,
            v_cache,
            plan,
            sinks=None if sinks is None else sinks.detach().float().contiguous(),
            k_scale=k_scale,
            v_scale=v_scale,
            out=out,
        )
        if out is None:
            o, lse = state
        return (o, lse) if wants_lse else o.view(o.shape[0], -1)

    def _write_loc(self, forward_batch: Any) -> Any:
        """Where the pool writes the step's tokens, in the form of this SGLang."""
        window = self._window_loc if self._pool.has_windows else None
        if hasattr(KVWriteLoc, "for_batch"):
            return KVWriteLoc.for_batch(forward_batch, swa_loc=window)
        return KVWriteLoc(forward_batch.out_cache_loc, window)


def _chosen(runner: Any, phase: str) -> str | None:
    """The attention backend that SGLang uses in a phase, if it says."""
    args = runner.server_args
    names = (
        getattr(runner, f"{phase}_attention_backend_str", None),
        getattr(args, f"{phase}_attention_backend", None),
        getattr(args, "attention_backend", None),
    )
    return next((name for name in names if isinstance(name, str)), None)


__all__ = ["Backend"]
