"""The attention function that is registered with transformers.

It turns a call of a model's layer into a spec and a batch, asks the registry for the backend, and
gives back ``[B, Sq, H, DV]``. What is visible comes from exactly one place, in this order:
packed lengths (``cu_seq_lens_q``), the mask, and without a mask causality and the sliding window.
A mask decides alone, as in eager attention: it already contains causality and window.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from ...backend import AttentionBackend
from ...errors import Reason, UnsupportedCallError
from ...plan import Plan
from ...registry import select
from ...spec import AttentionSpec
from .arguments import argument_reasons, refusal
from .lse import record
from .masks import LazyMask, Lengths, Rule, check_sliding_window
from .packed import PackedLengths, packed_lengths, update_cache
from .paged import MARK, Pages
from .rows import kv_rows

_MAX_PLANS = 8

#: Backends whose plans are made on the device alone, so that a capture records the planning too.
CAPTURABLE = ("triton",)


@dataclass
class Visible:
    """What the queries of one call may see.

    Attributes:
        rule: Causality and window.
        lengths: The sequences; None if they are packed.
        packed: Packed lengths; None if every batch entry is a sequence of its own.
        mask: Bool ``[B, 1, Sq, Skv]`` that says it all, or None.
    """

    rule: Rule
    lengths: Lengths | None = None
    packed: PackedLengths | None = None
    mask: torch.Tensor | None = None


@dataclass
class Attention:
    """One registered attention function.

    Attributes:
        name: The name it is registered under, for messages.
        backend: The backend it is tied to; None leaves the choice to the configuration.
        ignore: Arguments of models that the user declared harmless.
        paged: Whether pages of continuous batching are read where they lie.
    """

    name: str
    backend: str | None = None
    ignore: frozenset[str] = frozenset()
    paged: bool = True
    _local: threading.local = field(default_factory=threading.local, repr=False)

    def function(self) -> Callable[..., tuple[torch.Tensor, None]]:
        """The function in transformers' form; ``torch.compile`` leaves it as it is."""

        def attn_backends_forward(
            module: torch.nn.Module,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: torch.Tensor | None,
            dropout: float = 0.0,
            scaling: float | None = None,
            is_causal: bool | None = None,
            sliding_window: int | None = None,
            softcap: float | None = None,
            s_aux: torch.Tensor | None = None,
            **kwargs: Any,
        ) -> tuple[torch.Tensor, None]:
            """Attention of one layer; see ``attn_backends.engines.transformers``.

            Args:
                module: The attention layer.
                query: ``[B, H, Sq, D]``.
                key: ``[B, HK, Skv, D]``, heads not repeated.
                value: ``[B, HK, Skv, DV]``.
                attention_mask: ``[B, 1, Sq, Skv]`` or None.
                dropout: Must be 0.
                scaling: Factor on ``q . k``; None is ``1 / sqrt(D)``.
                is_causal: Without a mask; None asks ``module.is_causal``.
                sliding_window: Tokens a query sees, its own included; without a mask.
                softcap: Cap of the scores, or None.
                s_aux: Attention sinks ``[H]``, or None.
                **kwargs: Packed lengths, arguments that change nothing, or refused.

            Returns:
                Output ``[B, Sq, H, DV]``, contiguous, and None: weights are never formed.

            Raises:
                UnsupportedCallError: Something asked for cannot be honoured; it is named.
            """
            reasons = argument_reasons(dropout, (query, key, value), kwargs, self.ignore)
            if reasons:
                raise refusal(self.name, *reasons)
            key, value, pages = update_cache(self.name, module, key, value, kwargs, self.paged)
            causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            query, key, value = _one_batch(query, key, value)
            visible = self._visible(
                module, query, key, attention_mask, bool(causal), sliding_window, kwargs, pages
            )
            return self._run(query, key, value, visible, scaling, softcap, s_aux, pages), None

        why = "plans are made on the host: compile without fullgraph"
        disable: Callable[..., Any] = torch.compiler.disable
        function: Callable[..., tuple[torch.Tensor, None]] = disable(
            attn_backends_forward, reason=why
        )
        setattr(function, MARK, self.paged)
        return function

    def _visible(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        sliding_window: int | None,
        kwargs: dict[str, Any],
        pages: Pages | None,
    ) -> Visible:
        lengths = packed_lengths(self.name, module, query, key, kwargs, pages)
        if lengths is not None:
            if lengths.paged:  # its mask, if any, only repeats the lengths
                return Visible(_rule(True, lengths.sliding_window), packed=lengths)
            if mask is None:
                return Visible(_rule(causal, sliding_window), packed=lengths)
            if isinstance(mask, LazyMask) and mask.lengths is not None and not mask.padded:
                return Visible(mask.rule, packed=lengths)
            fix = "a mask already tells packed sequences apart: leave cu_seq_lens_q out"
            raise refusal(self.name, Reason("cu_seq_lens_q", "given", "None beside this mask", fix))
        batch, _, q_len, _ = query.shape
        kv_len = key.shape[2]
        if mask is None:
            if causal and 1 < q_len != kv_len:
                got = f"None with {q_len} queries and {kv_len} keys"
                fix = "keys may be cache slots that are not filled; a mask says which are real"
                raise refusal(self.name, Reason("attention_mask", got, "a mask", fix))
            # One query at the end sees the same either way, and causal is what decoding asks for.
            rule = _rule(causal or (q_len == 1 and sliding_window is None), sliding_window)
            return Visible(rule, Lengths.full(batch, q_len, kv_len))
        if isinstance(mask, LazyMask) and mask.lengths is not None:
            if tuple(mask.shape) == (batch, 1, q_len, kv_len):
                return Visible(mask.rule, mask.lengths)
            mask = mask.dense()
        dense = self._bool_mask(mask, (batch, 1, q_len, kv_len))
        return Visible(Rule(False), Lengths.full(batch, q_len, kv_len), mask=dense)

    def _bool_mask(self, mask: torch.Tensor, shape: tuple[int, int, int, int]) -> torch.Tensor:
        """A mask of any source as contiguous bool ``[B, 1, Sq, Skv]``."""
        want = f"[{shape[0]}, 1, {shape[2]}, {shape[3]}]"
        fits = mask.dim() == 4 and all(m in (1, s) for m, s in zip(mask.shape, shape))
        if not fits or mask.shape[3] != shape[3]:
            fix = "a mask that differs between heads is not supported"
            raise refusal(self.name, Reason("attention_mask.shape", str([*mask.shape]), want, fix))
        if mask.is_floating_point():
            hidden = mask <= torch.finfo(mask.dtype).min
            if not bool((hidden | (mask == 0)).all()):
                want = "0 where visible, finfo.min or -inf where hidden"
                fix = "scores take no additive bias"
                raise refusal(self.name, Reason("attention_mask", "other values", want, fix))
            mask = ~hidden
        elif mask.dtype != torch.bool:
            want = "bool or floating point"
            raise refusal(self.name, Reason("attention_mask.dtype", str(mask.dtype), want))
        return mask.expand(shape).contiguous()

    def _run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        visible: Visible,
        scaling: float | None,
        softcap: float | None,
        s_aux: torch.Tensor | None,
        pages: Pages | None,
    ) -> torch.Tensor:
        batch, heads, q_len, dim = query.shape
        spec = _spec(
            heads,
            key.shape[1],
            dim,
            value.shape[3],
            query.dtype,
            key.dtype,
            visible.rule.causal,
            visible.rule.window,
            softcap,
            None if scaling is None else float(scaling),
            None if pages is None else pages.page_size,
            visible.mask is not None,
        )
        lengths = visible.lengths if visible.packed is None else visible.packed
        assert lengths is not None
        phase = "decode" if lengths.max_q_len == 1 else "prefill"
        backend = self._select(spec, phase, query.device)
        if isinstance(lengths, PackedLengths) and lengths.paged and lengths.capturing:
            self._check_capture(backend)
        k, v, step = (pages.k, pages.v, 0) if pages is not None else kv_rows(key, value)
        q = query.transpose(1, 2).reshape(batch * q_len, heads, dim)
        out = backend.run(
            q if dim == 1 or q.stride(2) == 1 else q.contiguous(),
            k[lengths.first_row :] if lengths.first_row else k,
            v[lengths.first_row :] if lengths.first_row else v,
            self._plan(backend, lengths, step, query.device),
            sinks=None if s_aux is None else s_aux.detach().float().contiguous(),
            mask=None if visible.mask is None else visible.mask.reshape(-1),
        )
        record(out.lse.view(batch, q_len, heads))
        return out.o.view(batch, q_len, heads, value.shape[3])

    def _select(self, spec: AttentionSpec, phase: str, device: torch.device) -> AttentionBackend:
        try:
            return select(spec, phase=phase, device=device, backend=self.backend).backend
        except UnsupportedCallError as error:
            if spec.page_size is None:
                raise
            fix = "enable(paged=False) gathers the keys of a step instead of reading their pages"
            raise UnsupportedCallError(
                f"{error}; {fix}", backend=error.backend, reasons=error.reasons
            ) from error

    def _check_capture(self, backend: AttentionBackend) -> None:
        if backend.name not in CAPTURABLE:
            fix = "set use_cuda_graph=False in the continuous batching config, or take that backend"
            got = f"True with {backend.name}"
            raise refusal(self.name, Reason("use_cuda_graph", got, f"{', '.join(CAPTURABLE)}", fix))

    def _plan(
        self,
        backend: AttentionBackend,
        lengths: Lengths | PackedLengths,
        step: int,
        device: torch.device,
    ) -> Plan:
        """The plan of a step, made by its first layer and found again by the others.

        Found by what the lengths are, never by the identity of a mask, so that no plan outlives
        its lengths. Each thread has its own, because a plan may hold buffers that runs write.
        """
        key: Hashable = (backend, lengths, step, device)
        plans: OrderedDict[Hashable, Plan] = self._local.__dict__.setdefault("plans", OrderedDict())
        plan = plans.get(key)
        if plan is None:
            plan = plans[key] = backend.plan(lengths.batch(step, device))
            if len(plans) > _MAX_PLANS:
                plans.popitem(last=False)
        else:
            plans.move_to_end(key)
        return plan


def _one_batch(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Broadcast query, key and value over the batch, as ``scaled_dot_product_attention`` does."""
    batch = max(x.shape[0] for x in tensors)
    return [x if x.shape[0] == batch else x.expand(batch, -1, -1, -1) for x in tensors]


def _rule(causal: bool, sliding_window: int | None) -> Rule:
    """The rule of a call without a mask; W tokens reach W - 1 back, and forward if not causal."""
    if sliding_window is None:
        return Rule(causal)
    reach = check_sliding_window(sliding_window) - 1
    return Rule(causal, reach, 0 if causal else reach)


@lru_cache(maxsize=256)
def _spec(*fields: Any) -> AttentionSpec:
    heads, kv_heads, dim, dim_v, dtype, kv_dtype, causal, window, softcap, scale = fields[:10]
    page_size, mask = fields[10:]
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        head_dim_v=dim_v,
        dtype=dtype,
        kv_dtype=kv_dtype,
        page_size=page_size,
        causal=causal,
        window=window,
        softcap=softcap,
        sm_scale=scale,
        has_mask=mask,
    )


__all__ = ["Attention"]
