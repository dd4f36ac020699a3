"""PyTorch's ``torch.nn.attention.varlen``: its FlashAttention 2, without a further package.

- The operator returns the LSE as ``[H, T]``, although the documentation says ``[T, H]``. Which of
  the two a release does is told by the shapes, or, where T equals H, by the operator's own fake.
- Rows without keys get ``+inf``; they are not handed over, or overwritten from lengths.
- Bounds of the window and one-query batches need the same care as in FlashAttention 2.
- A block table and a choice of splits came with PyTorch 2.12, and windows with 2.11.
"""

from __future__ import annotations

import inspect
from functools import cache
from types import ModuleType
from typing import Any

import torch

from ..backend import BackendOptions, RunExtras
from ..batch import Batch
from ..capabilities import Capabilities, IntSet
from ..capacity import Capacity
from ..errors import Reason
from ..output import AttentionOutput
from ..packages import Probe, probe
from ..plan import Plan
from ..spec import AttentionSpec
from .adapter import AdapterBackend, AdapterPlan, Attend, state_of
from .arrange import arrange, empty_rows, no_keys, restore, take_rows, with_host_lengths
from .fa2 import safe_bounds
from .flash_build import kernel_query, kernel_scale, padded_dims_reasons, round_up
from .operators import attend_beneath
from .tensors import DenseKeysOfPlan, Tensors, aligned, leaves_keys_behind, widen

_NAME = "torch.nn.attention.varlen"
#: Arguments that the operator beneath calls the same.
_SAME_BENEATH = ("seqused_k", "block_table", "num_splits")


def probe_varlen() -> Probe:
    """PyTorch's varlen module, which came with 2.10."""
    return probe(_NAME, attribute="varlen_attn", distribution="torch")


def _module() -> ModuleType:
    module = probe_varlen().module
    assert module is not None
    return module


@cache
def accepts(name: str) -> bool:
    """Whether this PyTorch's ``varlen_attn`` has an argument."""
    module = probe_varlen().module
    return module is not None and name in inspect.signature(module.varlen_attn).parameters


@cache
def heads_first(module: ModuleType) -> bool:
    """Whether the operator's LSE is ``[H, T]``, asked of its fake with distinct sizes."""
    q = torch.empty(5, 3, 64, device="meta", dtype=torch.float16)
    kv = torch.empty(7, 3, 64, device="meta", dtype=torch.float16)
    starts = torch.empty(2, device="meta", dtype=torch.int32)
    aux = module.AuxRequest(lse=True)
    lse = module.varlen_attn(
        query=q,
        key=kv,
        value=kv,
        cu_seq_q=starts,
        cu_seq_k=starts,
        max_q=5,
        max_k=7,
        return_aux=aux,
    )[1]
    return tuple(lse.shape) == (3, 5)


def _flash(module: ModuleType, device: torch.device) -> bool:
    """Whether the module would take its FlashAttention kernel on a device, as far as it says."""
    other = getattr(module, "_should_use_cudnn", None)
    return other is not None and not other(device.index)


class TorchVarlenPlan(AdapterPlan):
    """A batch as ``varlen_attn`` takes it."""

    backend: TorchVarlenBackend

    def __init__(
        self, backend: TorchVarlenBackend, batch: Batch, capacity: Capacity | None
    ) -> None:
        super().__init__(backend, batch, capacity)
        # With pages, a tile without visible keys would write its LSE at a wrong place.
        lengths = with_host_lengths(batch) if batch.is_paged else batch
        self.work = arrange(lengths, self.spec, capacity)
        self.dense = DenseKeysOfPlan(self.work, self.spec)
        self.idle = self.work.batch.num_seqs == 0
        self.gathers = self.spec.page_size is None or leaves_keys_behind(self.spec)
        width = round_up(max(self.spec.head_dim, self.spec.dv), 8)
        self.width = width if self.gathers else self.spec.head_dim
        self._arguments = {} if self.idle else self._fixed()
        self._by_head: bool | None = None  # whether the LSE is [H, T]; known after a run

    def _fixed(self) -> dict[str, Any]:
        """Arguments that all layers share, of those that this PyTorch has."""
        spec, batch = self.spec, self.work.batch
        max_q = max(batch.max_seqlen_q, 2)  # with 1 it assumes one query for every sequence
        window, max_k = safe_bounds(spec, max_q, batch.max_seqlen_k)
        arguments: dict[str, Any] = dict(
            cu_seq_q=batch.cu_seqlens_q,
            max_q=max_q,
            max_k=max_k,
            return_aux=_module().AuxRequest(lse=True),
            scale=kernel_scale(spec),
        )
        if accepts("window_size"):
            arguments["window_size"] = window
        else:
            arguments["is_causal"] = spec.causal
        if accepts("enable_gqa"):
            arguments["enable_gqa"] = spec.group_size > 1
        if accepts("num_splits") and spec.batch_invariant:
            arguments["num_splits"] = 1
        if not self.gathers:
            arguments.update(seqused_k=batch.seqlens_k, block_table=batch.page_table)
        return arguments

    def tensors(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
        """Tensors as the operator takes them; the same objects if they fit."""
        if self.gathers:
            keys = self.dense.of(k)
            k, v = keys.take(k), keys.take(v)
        q, k, v = (widen(x, self.width) for x in (q, k, v))
        return aligned(kernel_query(q, self.spec)), aligned(k), aligned(v)

    def attend(self) -> Attend:
        """What computes tensors like those that ``tensors`` gave, ``(o [T', H, >= DV], lse)``."""
        module = _module()
        function, fixed = module.varlen_attn, dict(self._arguments)
        fixed["cu_seq_k"] = self.dense.starts if self.gathers else None

        def attend(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: AttentionOutput | None = None
        ) -> AttentionOutput:
            o, lse = function(query=q, key=k, value=v, **fixed)
            if self._by_head is None:  # a release does it one way or the other
                rows, heads, _ = q.shape
                unclear = rows == heads
                self._by_head = heads_first(module) if unclear else lse.shape[0] == heads
            return state_of(o, lse.mT if self._by_head else lse, out)

        return attend

    def straight(self) -> Attend:
        """The same for layers after the first, where it can through the operator beneath."""
        module, fixed = _module(), self._arguments
        device = self.work.batch.device
        if module.__name__ != _NAME or not _flash(module, device) or self._by_head is None:
            return self.attend()
        window = fixed.get("window_size", (-1, 0 if fixed.get("is_causal") else -1))
        values = dict(
            cum_seq_q=fixed["cu_seq_q"],
            cum_seq_k=self.dense.starts if self.gathers else None,
            max_q=fixed["max_q"],
            max_k=fixed["max_k"],
            is_causal=window == (-1, 0),
            scale=fixed["scale"],
        )
        if accepts("window_size"):
            values.update(window_size_left=window[0], window_size_right=window[1])
        values.update({k: v for k, v in fixed.items() if k in _SAME_BENEATH})
        attend = attend_beneath(
            torch.ops.aten._flash_attention_forward.default,
            values,
            {"dropout_p": 0.0, "return_debug_mask": False},
            by_head=self._by_head,
        )
        return self.attend() if attend is None else attend

    def on_update(self) -> None:
        """Mark the empty rows of the new lengths, in the buffer a captured graph reads."""
        if self.work.empty is not None:
            self.work.empty.copy_(empty_rows(self.batch, self.spec))


class TorchVarlenBackend(AdapterBackend):
    """FlashAttention 2 as PyTorch ships it, for packed sequences.

    With pages (PyTorch 2.12 and newer) lengths are needed on the host: a batch without them costs
    a copy per plan.
    """

    name = "torch_varlen"
    packages = ("torch",)
    capabilities = Capabilities(
        devices=("cuda",),
        dtypes=(torch.float16, torch.bfloat16),
        head_dims=IntSet(low=1, high=256),
        head_dims_v=IntSet(low=1, high=256),
        page_sizes=IntSet(low=256, multiple_of=256),
        min_compute_capability=(8, 0),
        features=frozenset(
            ("ragged", "paged", "causal", "bidirectional", "window", "batch_invariant")
        ),
        host_lengths=True,
    )

    @classmethod
    def dependency_reasons(cls, options: BackendOptions | None = None) -> list[Reason]:
        """A PyTorch without the module."""
        reason = probe_varlen().reason("pip install --upgrade torch; 2.10 or newer")
        return [] if reason is None else [reason]

    @classmethod
    def extra_reasons(
        cls,
        spec: AttentionSpec,
        phase: str | None,
        device: torch.device | None,
        options: BackendOptions | None,
    ) -> list[Reason]:
        """What this PyTorch lacks, and widths that only a copy of the cache could serve."""
        reasons = []
        if spec.page_size is not None and not accepts("block_table"):
            fix = f"torch {torch.__version__} has no block table, 2.12 has"
            reasons.append(Reason("page_size", str(spec.page_size), "None", fix))
        if spec.window is not None and not accepts("window_size"):
            fix = f"torch {torch.__version__} has no window, 2.11 has"
            reasons.append(Reason("window", str(spec.window), "None", fix))
        return reasons + padded_dims_reasons(spec, 8, equal=True, high=256)

    def _plan(self, batch: Batch, capacity: Capacity | None) -> TorchVarlenPlan:
        return TorchVarlenPlan(self, batch, capacity)

    def _run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        plan: Plan,
        extras: RunExtras,
        out: AttentionOutput | None,
    ) -> AttentionOutput:
        assert isinstance(plan, TorchVarlenPlan)
        spec, work = self.spec, plan.work
        if plan.idle:
            return no_keys(q, spec, out)
        values = k[..., : spec.dv] if v is None else v
        ready = plan.tensors(take_rows(q, work), k, values)
        attend = plan.attend()
        o, lse = attend(*ready)
        result = restore(o[..., : spec.dv], lse, work, q.shape[0], out)
        as_given = ready[0] is q and ready[1] is k and ready[2] is v
        if as_given and plan.width == spec.dv:
            plan.learn(q, k, v, extras, out, lambda extras: plan.straight())
        return result


__all__ = ["TorchVarlenBackend", "probe_varlen"]
