"""FlashAttention 2, 3 and 4 behind one name: which build serves a layer, and why."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from ..backend import BackendOptions, RunExtras
from ..batch import Batch
from ..capabilities import Capabilities, IntSet
from ..capacity import Capacity
from ..errors import Reason
from ..output import AttentionOutput
from ..plan import Plan
from ..spec import AttentionSpec
from .adapter import AdapterBackend, AdapterPlan
from .arrange import empty_rows, no_keys, restore, take_rows
from .fa2 import FlashAttention2, VllmFlashAttention2
from .fa3 import FlashAttention3, VllmFlashAttention3
from .fa4 import FlashAttention4
from .flash_build import FlashBuild, kernel_query

_FA2 = (FlashAttention2(), VllmFlashAttention2())
_FA3 = (FlashAttention3(), VllmFlashAttention3())
_FA4 = (FlashAttention4(),)
BUILDS: dict[str, tuple[FlashBuild, ...]] = {"2": _FA2, "3": _FA3, "4": _FA4}

#: Which version ``auto`` prefers, by major compute capability: the one written for it first.
_ORDER = {8: ("2", "4", "3"), 9: ("3", "4", "2"), 10: ("4", "2", "3"), 11: ("4", "2", "3")}
_ORDER_ELSEWHERE = ("2", "4", "3")


class FlashAttentionOptions(BackendOptions):
    """Options of ``flash_attention``."""

    version: Literal["auto", "2", "3", "4"] = "auto"
    """``auto`` takes the newest one written for the device that can do the call."""
    source: Literal["auto", "package", "vllm"] = "auto"
    """``package``: FlashAttention's own; ``vllm``: the build inside vLLM; ``auto``: either."""
    num_splits: int = Field(default=0, ge=0, le=256, strict=True)
    """Parts that keys are split into, where the build lets one choose. 0 lets it decide; 1 is
    what ``batch_invariant`` uses."""
    finite_cache: bool = False
    """Promise that cache slots that no query sees, past the lengths or left behind by a window,
    hold finite values. Kernels load them with their tiles, and 0 * NaN is NaN; without the promise
    windows over a cache are gathered first, and some loads by tile are avoided or refused."""


class FlashAttentionPlan(AdapterPlan):
    """A batch as the chosen build takes it."""

    def __init__(
        self, backend: FlashAttentionBackend, batch: Batch, capacity: Capacity | None
    ) -> None:
        super().__init__(backend, batch, capacity)
        build, spec = backend.build_for(batch.device), backend.spec
        self.work = build.arrange(batch, spec, capacity)
        self.idle = self.work.batch.num_seqs == 0
        self.call = None if self.idle else build.prepare(self.work, spec, backend.options)

    def on_update(self) -> None:
        """Mark the empty rows of the new lengths, in the buffer a captured graph reads."""
        if self.work.empty is not None:
            self.work.empty.copy_(empty_rows(self.batch, self.spec))


class FlashAttentionBackend(AdapterBackend):
    """FlashAttention 2, 3 or 4, as separate packages or inside vLLM.

    The build is chosen when the backend is bound to a spec and a device: ``backend.build.label``
    says which. FlashAttention 2 needs lengths on the host and copies them once per plan where the
    batch lacks them; 3 and 4 never wait for the device. Nor does 2 with a capacity: one query per
    sequence is then decoded from its pages, and longer ones from keys gathered out of them. The
    FlashAttention 2 inside vLLM has no entry point for that, and takes no capacity.
    """

    name = "flash_attention"
    Options = FlashAttentionOptions
    packages = ("flash-attn", "tokenspeed-fa3", "flash-attn-3", "flash-attn-4", "vllm")
    variants = (
        {"version": "2", "source": "package"},
        {"version": "2", "source": "vllm"},
        {"version": "3", "source": "package"},
        {"version": "3", "source": "vllm"},
        {"version": "4"},
    )
    builds = variants
    #: What any of the builds can do; a bound backend holds those of its build.
    capabilities = Capabilities(
        devices=("cuda",),
        dtypes=(torch.float16, torch.bfloat16, torch.float8_e4m3fn),
        head_dims=IntSet((*range(1, 257), 576)),
        head_dims_v=IntSet(low=1, high=512),
        min_compute_capability=(8, 0),
        features=FlashAttention2.capabilities.features | FlashAttention3.capabilities.features,
    )

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        device: torch.device | str | None = None,
        options: BackendOptions | None = None,
    ) -> None:
        super().__init__(spec, device=device, options=options)
        self.build: FlashBuild | None = None
        if device is not None:
            self.build_for(torch.device(device))

    def build_for(self, device: torch.device) -> FlashBuild:
        """The build that serves this spec on a device where some build does; chosen once."""
        if self.build is None:
            assert isinstance(self.options, FlashAttentionOptions)
            able = (
                build
                for build in candidates(self.options, device)
                if not build.reasons(self.spec, None, device, self.options)
            )
            self.build = next(able)
            self.capabilities = self.build.capabilities  # type: ignore[misc]
        return self.build

    @classmethod
    def dependency_reasons(cls, options: BackendOptions | None = None) -> list[Reason]:
        """Nothing if any of the builds loads, else what is wrong with each.

        The first that loads ends the search: FlashAttention 4 takes seconds to import.
        """
        found: list[list[Reason]] = []
        for build in candidates(_options(options), None):
            found.append(build.dependency_reasons())
            if not found[-1]:
                return []
        return _unique(found)

    @classmethod
    def unsupported_reasons(
        cls,
        spec: AttentionSpec,
        phase: str | None = None,
        device: torch.device | None = None,
        options: BackendOptions | None = None,
    ) -> list[Reason]:
        """Nothing if one build can do the call; else the reasons of every build.

        A build that loads speaks for the name: where one does, the builds that are merely absent
        are left out, so that the first reason is what stands in the way. Where none does, the
        limits told are those that no build would lift.
        """
        chosen = _options(options)
        if not candidates(chosen, device):  # a version that the source does not have
            want = f"auto, package for version={chosen.version}"
            return [Reason("source", chosen.source, want)]
        all_reasons: list[list[Reason]] = []
        loaded: list[list[Reason]] = []
        for build in candidates(chosen, device):
            reasons = build.reasons(spec, phase, device, chosen)
            if not reasons:
                return []
            all_reasons.append(reasons)
            if not build.dependency_reasons():
                loaded.append(reasons)
        if loaded:
            return _unique(loaded)
        own = [
            *cls.capabilities.device_reasons(device),
            *cls.capabilities.spec_reasons(spec, phase),
        ]
        shared = set.intersection(*({r.argument for r in reasons} for reasons in all_reasons))
        shared -= {reason.argument for reason in own}
        rest = [reason for reason in all_reasons[0] if reason.argument in shared]
        return _unique([cls.dependency_reasons(chosen), own, rest])

    @classmethod
    def kernels(
        cls,
        spec: AttentionSpec,
        phase: str,
        device: torch.device,
        options: BackendOptions | None = None,
    ) -> list[str]:
        """The build that would be taken, and the reasons against better ones."""
        chosen = _options(options)
        lines: list[str] = []
        for build in candidates(chosen, device):
            reasons = build.reasons(spec, phase, device, chosen)
            if not reasons:
                return [build.label, *lines]
            lines.append(f"not {build.label}: {'; '.join(map(str, reasons))}")
        return lines

    @classmethod
    def library(
        cls, options: BackendOptions | None = None, device: torch.device | None = None
    ) -> tuple[str, str] | None:
        """Package and version of the first build that the options allow and that loads."""
        for build in candidates(_options(options), device):
            if not build.dependency_reasons():
                return None if build.release is None else (build.package, build.release)
        return None

    @classmethod
    def versions(cls) -> dict[str, str]:
        """Versions of the builds that load, by package: what reports name beside the result."""
        builds = [build for builds in BUILDS.values() for build in builds]
        loaded = [build for build in builds if not build.dependency_reasons()]
        return {build.package: build.release for build in loaded if build.release is not None}

    def plan(self, batch: Batch, capacity: Capacity | None = None) -> Plan:
        """Prepare a batch; see the base class. Binds to a build if no device was given before."""
        if capacity is not None and self.build is None:
            self.plan(batch)  # whether graphs can be captured is a matter of the build
        return super().plan(batch, capacity)

    def _plan(self, batch: Batch, capacity: Capacity | None) -> FlashAttentionPlan:
        return FlashAttentionPlan(self, batch, capacity)

    def _run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        plan: Plan,
        extras: RunExtras,
        out: AttentionOutput | None,
    ) -> AttentionOutput:
        assert isinstance(plan, FlashAttentionPlan)
        if plan.call is None:
            return no_keys(q, self.spec, out)
        values = k[..., : self.spec.dv] if v is None else v
        rows = kernel_query(take_rows(q, plan.work), self.spec)
        o, lse, as_given = plan.call(rows, k, values, extras)
        result = restore(o, lse, plan.work, q.shape[0], out)
        if as_given:
            plan.learn(q, k, v, extras, out, plan.call.straight)
        return result


def candidates(options: FlashAttentionOptions, device: torch.device | None) -> list[FlashBuild]:
    """The builds that the options allow, best first; asks the driver only about CUDA devices."""
    order: tuple[str, ...] = _ORDER_ELSEWHERE
    if device is not None and device.type == "cuda" and torch.cuda.is_available():
        order = _ORDER.get(torch.cuda.get_device_capability(device)[0], _ORDER_ELSEWHERE)
    if options.version != "auto":
        order = (options.version,)
    builds = [build for version in order for build in BUILDS[version]]
    if options.source == "auto":
        return builds
    return [b for b in builds if (b.package == "vllm") == (options.source == "vllm")]


def _options(options: BackendOptions | None) -> FlashAttentionOptions:
    return options if isinstance(options, FlashAttentionOptions) else FlashAttentionOptions()


def _unique(lists: list[list[Reason]]) -> list[Reason]:
    return list(dict.fromkeys(reason for reasons in lists for reason in reasons))


__all__ = ["FlashAttentionBackend", "FlashAttentionOptions", "candidates"]
