"""FlashInfer: ragged, paged and MLA attention through its planned wrappers.

What its kernels promise, and what is done about it here:

- The LSE is base 2, always: it is multiplied by ln 2, whatever a release may offer.
- A row without keys gets about -50000 up to 0.6.18 and ``-inf`` from 0.7.0. Such rows are not
  handed over, or, under CUDA graphs, overwritten from lengths; both releases come out alike.
- Window, softcap, scale and dtypes are fixed by ``plan``. They come from the spec, so a run cannot
  disagree with them.
- ``sinks=`` is accepted and ignored by these kernels, so it is never passed.
- The tile of queries follows the average length in the batch, so bits depend on batch mates.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from pydantic import Field
from torch.utils.weak import WeakIdKeyDictionary

from ..backend import BackendOptions, RunExtras
from ..batch import Batch
from ..capabilities import Capabilities, IntSet
from ..capacity import Capacity
from ..errors import InvalidInputError, Reason, UnsupportedCallError
from ..layouts import maker
from ..output import AttentionOutput
from ..packages import Probe, probe
from ..plan import Plan
from ..spec import FP8_DTYPES, AttentionSpec
from .adapter import AdapterBackend, AdapterPlan, Attend, state_of
from .arrange import arrange, empty_rows, no_keys, restore, take_rows, with_host_lengths
from .flashinfer_calls import calls_for, is_mla
from .flashinfer_pages import HostBatch
from .flashinfer_wrappers import POOL, explain_workspace, planned
from .tensors import DenseKeysOfPlan, leaves_keys_behind

LN2 = math.log(2.0)
#: Longest query for which the Hopper kernel is not worth its tiles.
_SHORT = 64


class FlashInferOptions(BackendOptions):
    """Options of ``flashinfer``."""

    workspace_mb: int = Field(default=256, ge=1, le=16384, strict=True)
    """Workspace for split keys, in MiB, per device, stream and thread."""
    kernel: Literal["auto", "fa2", "fa3"] = "auto"
    """``fa2`` runs everywhere; ``fa3`` is for Hopper. ``auto`` takes ``fa3`` there where it can do
    the call and queries are long, else ``fa2``."""
    finite_cache: bool = False
    """Promise that cache slots that a window has left behind hold finite values. Kernels load some
    of them, and 0 * NaN is NaN; without the promise windows over a cache are gathered first."""


def probe_flashinfer() -> Probe:
    """The ``flashinfer`` module; importing it creates its cache folder, and may fail for that."""
    return probe(
        "flashinfer",
        attribute="BatchPrefillWithPagedKVCacheWrapper",
        min_version="0.6",
        distribution="flashinfer-python",
    )


class FlashInferPlan(AdapterPlan):
    """A batch planned in a wrapper that no other plan uses.

    Attributes:
        work: The rows handed over.
        calls: The kind of wrapper.
        wrapper: FlashInfer's wrapper, planned; None if no row sees a key.
    """

    backend: FlashInferBackend

    def start(self, lengths: Batch) -> None:
        """Plan in FlashInfer; ``lengths`` is the batch with exact lengths on the host."""
        spec, capacity, device = self.spec, self.capacity, self.batch.device
        self.work = arrange(lengths if capacity is None else self.batch, spec, capacity)
        self.dense = DenseKeysOfPlan(self.work, spec)
        self.wrapper: Any = None
        self.scales = WeakIdKeyDictionary()
        if self.work.batch.num_seqs == 0:
            return
        module, megabytes = probe_flashinfer().module, self.backend.options.workspace_mb
        assert module is not None
        kernel = choose_kernel(spec, self.backend.options, lengths.max_seqlen_q, device, capacity)
        self.ragged = takes_dense_keys(spec, self.backend.options)
        self.calls = calls_for(module, spec, kernel, ragged=self.ragged)
        workspace = POOL.workspace(device, megabytes)
        if capacity is not None:
            # Always as many rows: FlashInfer sizes the grid of a graph by the first plan.
            self.wrapper = self.calls.make(workspace, capacity)
            self._plan(self._host(lengths).padded(capacity))
            return
        kind = (id(module), self.calls.name, kernel, megabytes)
        self.wrapper = POOL.take(device, kind, lambda: self.calls.make(workspace, None))
        self._plan(self._host(self.work.batch))
        POOL.lend(self, device, kind, self.wrapper)

    def _host(self, lengths: Batch) -> HostBatch:
        host, left = HostBatch.of(lengths), self.spec.bounds[0]
        return host if left is None or not self.ragged else host.within_window(left)

    def _plan(self, lengths: HostBatch) -> None:
        try:
            self.calls.plan(self.wrapper, lengths)
        except Exception as error:  # releases and wrappers raise classes of their own
            explained = explain_workspace(error, self.backend.options.workspace_mb)
            if explained is error:
                raise
            raise explained from error
        self.planned = planned(self.batch.device)

    def attend(self, extras: RunExtras) -> Attend:
        """What computes tensors that need no preparation; ``v`` is None or unused with MLA.

        Scales are numbers here.
        """
        k_scale = extras.k_scale
        assert not isinstance(k_scale, torch.Tensor)
        spec, device, rows = self.spec, self.batch.device, self.work.batch.total_q
        new_o = maker((rows, spec.num_heads, spec.dv), spec.out_dtype, device)
        new_lse = maker((rows, spec.num_heads), torch.float32, device)
        library = self.calls.library(self.wrapper, k_scale)
        v_scale = extras.v_scale

        def attend(
            q: torch.Tensor, k: torch.Tensor, v: Any, out: AttentionOutput | None = None
        ) -> AttentionOutput:
            o, lse = (new_o(), new_lse()) if out is None else out
            library(q, k, v, o, lse)
            lse.mul_(LN2)
            if v_scale is not None:
                o.mul_(v_scale)
            return state_of(o, lse) if out is None else out

        return attend

    def update(self, batch: Batch) -> None:
        """Plan another batch into the fixed buffers; see the base class.

        Waits for the copies of the plan before, since FlashInfer fills one host buffer for both.
        """
        self._next = with_host_lengths(batch)
        super().update(batch)

    def on_update(self) -> None:
        """Mark the empty rows of the new lengths, and let FlashInfer plan them."""
        assert self.capacity is not None and self.work.empty is not None
        self.work.empty.copy_(empty_rows(self.batch, self.spec))
        if self.wrapper is not None:
            if self.planned is not None:
                self.planned.synchronize()
            self._plan(self._host(self._next).padded(self.capacity))


class FlashInferBackend(AdapterBackend):
    """FlashInfer's wrappers for ragged, paged and MLA attention.

    Decode runs the same tensor-core kernels as prefill, at any ratio of heads. FlashInfer plans
    from lengths on the host. Where a batch has them, ``plan`` does not wait for the device, and
    neither does the library; where it lacks them, two copies are waited for, of the starts and of
    the lengths. ``run`` never waits, except to read a scale that is a tensor when it is first seen.
    ``update`` of a plan with a capacity waits for the copies of the plan before. The conformance
    suite's ``no_sync`` has held this with the library on a GPU.
    """

    name = "flashinfer"
    Options = FlashInferOptions
    packages = ("flashinfer-python",)
    variants = ({}, {"kernel": "fa2"}, {"kernel": "fa3"})
    options: FlashInferOptions
    capabilities = Capabilities(
        devices=("cuda",),
        dtypes=(torch.float16, torch.bfloat16),
        fp8_kv_dtypes=FP8_DTYPES,
        head_dims=IntSet((64, 128, 192, 256, 576)),
        head_dims_v=IntSet((128, 512)),
        head_dim_pairs=((192, 128), (576, 512)),
        min_compute_capability=(8, 0),
        features=frozenset(
            ("ragged", "paged", "causal", "bidirectional", "window", "softcap", "cuda_graph")
        ),
        host_lengths=True,
        rounds_row_sum=True,  # measured of kernel=fa2; granted to all, since auto mixes them
    )

    @classmethod
    def dependency_reasons(cls, options: BackendOptions | None = None) -> list[Reason]:
        """A missing or broken FlashInfer."""
        reason = probe_flashinfer().reason("pip install flashinfer-python")
        return [] if reason is None else [reason]

    @classmethod
    def library(
        cls, options: BackendOptions | None = None, device: torch.device | None = None
    ) -> tuple[str, str] | None:
        """Package and version, also of one that was not installed as a distribution."""
        version = probe_flashinfer().version
        return None if version is None else (cls.packages[0], version)

    @classmethod
    def extra_reasons(
        cls,
        spec: AttentionSpec,
        phase: str | None,
        device: torch.device | None,
        options: BackendOptions | None,
    ) -> list[Reason]:
        """Combinations that FlashInfer does not have."""
        reasons = []
        chosen = options if isinstance(options, FlashInferOptions) else cls.Options()
        dims, ragged = (spec.head_dim, spec.dv), takes_dense_keys(spec, chosen)
        if dims in ((192, 192), (576, 576)):
            want = "128 with head_dim=192" if dims[0] == 192 else "512 with head_dim=576"
            reasons.append(Reason("head_dim_v", str(spec.dv), want))
        if dims == (192, 128) and spec.page_size is not None:
            reasons.append(Reason("page_size", str(spec.page_size), "None with head_dim=192"))
        if ragged and spec.kv in FP8_DTYPES:
            fix = "its ragged kernels, which windows over a cache need too, drop k_scale"
            reasons.append(Reason("kv_dtype", str(spec.kv), "the query dtype if ragged", fix))
        right = spec.bounds[1]
        if right is not None and not spec.causal:
            fix = "only a left bound can be planned without causality"
            reasons.append(Reason("window", str(spec.window), "(left, None)", fix))
        if is_mla(spec):
            reasons += _mla_reasons(spec)
        if chosen.kernel == "fa3":
            why = fa3_obstacle(spec, device)
            if why is not None:
                reasons.append(Reason("kernel", "fa3", "auto, fa2", why))
        return reasons

    def plan(self, batch: Batch, capacity: Capacity | None = None) -> Plan:
        """Plan a batch; see the base class."""
        plan = super().plan(batch, capacity)
        assert isinstance(plan, FlashInferPlan)
        plan.start(with_host_lengths(batch))
        return plan

    def _plan(self, batch: Batch, capacity: Capacity | None) -> FlashInferPlan:
        return FlashInferPlan(self, batch, capacity)

    def _run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        plan: Plan,
        extras: RunExtras,
        out: AttentionOutput | None,
    ) -> AttentionOutput:
        assert isinstance(plan, FlashInferPlan)
        spec, work = self.spec, plan.work
        if plan.wrapper is None:
            return no_keys(q, spec, out)
        if v is not None and is_mla(spec):
            check_latent(k, v)
        keys, values = k, k[..., : spec.dv] if v is None else v
        rows = take_rows(q, work)
        if rows.shape[0] != work.batch.total_q:  # a captured graph takes the whole capacity
            raise InvalidInputError.of("q.shape[0]", q.shape[0], f"{work.batch.total_q}")
        direct = False
        if out is not None and work.rows is None and rows.shape[0] == q.shape[0]:
            direct = out.o.is_contiguous() and out.lse.is_contiguous()
        if out is not None and direct:
            o, lse = out
        else:
            o = torch.empty(*rows.shape[:2], spec.dv, dtype=spec.out_dtype, device=q.device)
            lse = torch.empty(rows.shape[:2], device=q.device)
        if plan.ragged:
            visible = plan.dense.of(k)
            keys, values = visible.take(keys), visible.take(values)
        ready = plan.calls.tensors(rows, keys, values)
        k_scale = host_scale(extras.k_scale, plan.scales)
        plan.calls.library(plan.wrapper, k_scale)(*ready, o, lse)
        lse.mul_(LN2)
        if extras.v_scale is not None:
            o.mul_(per_head(extras.v_scale, spec))
        result = restore(o, lse, work, q.shape[0], None if direct else out)
        as_given = ready[0] is q and ready[1] is k and (is_mla(spec) or ready[2] is v)
        if as_given and (direct or out is None):
            plan.learn(q, k, v, extras, out, plan.attend)
        return result


def takes_dense_keys(spec: AttentionSpec, options: FlashInferOptions) -> bool:
    """Whether keys are handed over back to back.

    Ragged ones are, and what a window leaves of a cache whose expired slots may hold anything.
    """
    return spec.page_size is None or (leaves_keys_behind(spec) and not options.finite_cache)


def choose_kernel(
    spec: AttentionSpec,
    options: FlashInferOptions,
    max_q: int,
    device: torch.device,
    capacity: Capacity | None,
) -> str:
    """Which of FlashInfer's kernels a plan uses: fixed here, so that a release cannot change it."""
    if options.kernel != "auto":
        return options.kernel
    long = max_q > _SHORT or is_mla(spec)
    fits = capacity is None and fa3_obstacle(spec, device) is None
    return "fa3" if long and fits else "fa2"


def fa3_obstacle(spec: AttentionSpec, device: torch.device | None) -> str | None:
    """Why the Hopper kernel cannot do a call, or None."""
    if device is not None and device.type == "cuda" and torch.cuda.is_available():
        if torch.cuda.get_device_capability(device)[0] != 9:
            return "fa3 needs compute capability 9.x"
    elif device is not None:
        return "fa3 needs compute capability 9.x"
    if spec.kv != spec.dtype:
        return "fa3 needs keys in the query dtype"
    if spec.window is not None and not spec.causal:
        return "fa3 has windows only with causality"
    return None


def _mla_reasons(spec: AttentionSpec) -> list[Reason]:
    reasons = []
    wants = {
        "page_size": (spec.page_size is None, "None", "a page size with head_dim=576"),
        "num_kv_heads": (spec.num_kv_heads != 1, spec.num_kv_heads, "1 with head_dim=576"),
        "window": (spec.window is not None, spec.window, "None with head_dim=576"),
        "softcap": (spec.softcap is not None, spec.softcap, "None with head_dim=576"),
        "kv_dtype": (spec.kv in FP8_DTYPES, spec.kv, "the query dtype with head_dim=576"),
    }
    for name, (wrong, got, want) in wants.items():
        if wrong:
            reasons.append(Reason(name, str(got), want))
    return reasons


def check_latent(k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise UnsupportedCallError unless ``v`` is the first lanes of ``k``, which MLA reads once."""
    if v.data_ptr() != k.data_ptr() or v.stride() != k.stride():
        reason = Reason("v", "a tensor of its own", "None, or the first 512 lanes of k")
        raise UnsupportedCallError(f"flashinfer: {reason}", backend="flashinfer", reasons=[reason])


def host_scale(scale: float | torch.Tensor | None, seen: WeakIdKeyDictionary) -> float | None:
    """``k_scale`` as the number FlashInfer takes; a tensor is read once, when it is first seen.

    Raises:
        UnsupportedCallError: The scale differs from head to head.
    """
    if not isinstance(scale, torch.Tensor):
        return scale
    if scale.numel() != 1:
        got = f"a tensor of {scale.numel()}"
        reason = Reason("k_scale", got, "a number, or a tensor that holds one")
        raise UnsupportedCallError(f"flashinfer: {reason}", backend="flashinfer", reasons=[reason])
    known: tuple[int, float] | None = seen[scale] if scale in seen else None
    if known is None or known[0] != scale._version:
        known = (scale._version, float(scale))
        seen[scale] = known
    return known[1]


def per_head(scale: float | torch.Tensor, spec: AttentionSpec) -> float | torch.Tensor:
    """``v_scale`` as a factor of ``o [T, H, DV]``."""
    if not isinstance(scale, torch.Tensor):
        return scale
    return scale.expand(spec.num_kv_heads).repeat_interleave(spec.group_size)[:, None]


__all__ = ["FlashInferBackend", "FlashInferOptions", "choose_kernel", "probe_flashinfer"]
