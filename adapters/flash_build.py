"""One build of FlashAttention: what it can do, and how a planned batch is handed to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from ..backend import RunExtras
from ..batch import Batch
from ..capabilities import Capabilities, IntSet
from ..capacity import Capacity
from ..errors import Reason
from ..output import AttentionOutput
from ..packages import Probe
from ..spec import AttentionSpec
from .adapter import Attend, state_of
from .arrange import Arrangement, arrange
from .tensors import Tensors, aligned, leaves_keys_behind


class FlashCall:
    """A planned batch in the hands of a build; everything that layers share is fixed.

    Args:
        tensors: Brings ``q [T', H, D]``, k and v into the form that the library takes, and adds
            what else is made of them.
        library: ``library(extras, *added)`` gives what computes the three,
            ``(o [T', H, >= DV], lse [T', H])``.
        dv: DV.
        beneath: ``beneath(extras)`` gives the same through an operator beneath the library's
            function, or None where a release has none that is known.
    """

    def __init__(
        self,
        tensors: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Tensors],
        library: Callable[..., Attend],
        dv: int,
        beneath: Callable[[RunExtras], Attend | None] | None = None,
    ) -> None:
        self.tensors = tensors
        self.library = library
        self.dv = dv
        self.beneath = beneath

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: RunExtras
    ) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """``(o [T', H, DV], lse [T', H])``, and whether the tensors needed no preparation."""
        ready = self.tensors(q, k, v)
        o, lse = self.library(extras, *ready[3:])(*ready[:3])
        as_given = len(ready) == 3 and ready[0] is q and ready[1] is k and ready[2] is v
        if o.shape[-1] != self.dv:
            return o[..., : self.dv], lse, False
        return o, lse, as_given

    def straight(self, extras: RunExtras) -> Attend:
        """What computes tensors that need no preparation, with the least on the way."""
        attend = None if self.beneath is None else self.beneath(extras)
        return self.library(extras) if attend is None else attend


def by_token(function: Callable[..., Any], **fixed: Any) -> Attend:
    """Attend through a function of q, k and v that gives the output and an LSE of ``[H, T]``."""

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: AttentionOutput | None = None
    ) -> AttentionOutput:
        found = function(q=q, k=k, v=v, **fixed)
        return state_of(found[0], found[1].mT, out)

    return attend


def by_token_cached(function: Callable[..., Any], **fixed: Any) -> Attend:
    """The same through a function that takes a cache."""

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: AttentionOutput | None = None
    ) -> AttentionOutput:
        found = function(q=q, k_cache=k, v_cache=v, **fixed)
        return state_of(found[0], found[1].mT, out)

    return attend


class FlashBuild(ABC):
    """A FlashAttention build behind the one name ``flash_attention``.

    Attributes:
        version: 2, 3 or 4.
        package: What provides it, for example ``flash-attn``.
        install: The command that installs it.
        capabilities: What it declares, over and above ``extra_reasons``.
    """

    version: ClassVar[int]
    package: ClassVar[str]
    install: ClassVar[str]
    capabilities: ClassVar[Capabilities]

    @property
    def label(self) -> str:
        """Version, package and release, for listings and errors."""
        return f"FlashAttention {self.version} ({self.package} {self.release or '?'})"

    @property
    def release(self) -> str | None:
        """The package's version; None if it has none, or is not there."""
        return self.probe().version

    @abstractmethod
    def probe(self) -> Probe:
        """Whether the package loads; cached, and never touches a device."""

    @property
    def module(self) -> Any:
        """The loaded module; only asked of a build that has no reasons against it."""
        module = self.probe().module
        assert module is not None
        return module

    def dependency_reasons(self) -> list[Reason]:
        """The reason of a missing or broken package, with the command that installs it."""
        reason = self.probe().reason(self.install)
        return [] if reason is None else [reason]

    def extra_reasons(self, spec: AttentionSpec, options: Any) -> list[Reason]:
        """Limits that the declared data cannot express."""
        return []

    def reasons(
        self, spec: AttentionSpec, phase: str | None, device: torch.device | None, options: Any
    ) -> list[Reason]:
        """Every reason against a call: package, device, dtype, shape, feature."""
        reasons = self.dependency_reasons()
        reasons += self.capabilities.device_reasons(device)
        reasons += self.capabilities.spec_reasons(spec, phase)
        reasons += self.extra_reasons(spec, options)
        return reasons

    def takes_dense_keys(self, spec: AttentionSpec, options: Any) -> bool:
        """Whether keys are handed over back to back.

        Ragged ones are, and what a window leaves of a cache whose expired slots may hold anything.
        """
        return spec.page_size is None or (leaves_keys_behind(spec) and not options.finite_cache)

    def arrange(self, batch: Batch, spec: AttentionSpec, capacity: Capacity | None) -> Arrangement:
        """The batch as this build wants it."""
        return arrange(batch, spec, capacity)

    @abstractmethod
    def prepare(self, work: Arrangement, spec: AttentionSpec, options: Any) -> FlashCall:
        """Fix everything that does not change from layer to layer."""


def padded_dims_reasons(
    spec: AttentionSpec, multiple: int, *, equal: bool, high: int
) -> list[Reason]:
    """Reasons against widths that only padding could serve, where padding would copy a cache.

    Args:
        spec: The layer.
        multiple: Widths the library takes are multiples of this.
        equal: Whether it wants D and DV equal.
        high: Largest width it takes.
    """
    reasons: list[Reason] = []
    if spec.page_size is None:
        return reasons
    for name, width in (("head_dim", spec.head_dim), ("head_dim_v", spec.dv)):
        if width % multiple:
            want = str(IntSet(multiple_of=multiple, high=high))
            fix = "ragged keys are padded, a paged cache would be copied whole"
            reasons.append(Reason(name, str(width), want, fix))
    if equal and spec.dv != spec.head_dim:
        reasons.append(Reason("head_dim_v", str(spec.dv), f"{spec.head_dim} for a paged cache"))
    return reasons


def aligned_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
    """Tensors that need nothing but rows at multiples of 16 bytes: those of a paged cache."""
    return aligned(q), aligned(k), aligned(v)


def kernel_scale(spec: AttentionSpec) -> float:
    """The scale for a kernel; 1 in place of 0, together with ``kernel_query``."""
    return spec.scale if spec.scale else 1.0


def kernel_query(q: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """Queries for a kernel that multiplies masked scores, ``-inf``, by the scale: never by 0."""
    return q if spec.scale else q * 0


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


__all__ = [
    "FlashBuild",
    "FlashCall",
    "aligned_tensors",
    "by_token",
    "by_token_cached",
    "kernel_query",
    "kernel_scale",
    "padded_dims_reasons",
    "round_up",
]
