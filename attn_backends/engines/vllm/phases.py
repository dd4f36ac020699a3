"""Which backends stand behind a layer: one for prefill and one for decode, by the settings."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ...backend import AttentionBackend
from ...capabilities import PHASES, IntSet
from ...errors import AttnBackendsError, Reason
from ...registry import ATTENTION_BACKENDS, select
from ...registry.entry import is_class
from ...registry.layers import resolve
from ...registry.registry import AUTO
from ...spec import AttentionSpec


@dataclass(frozen=True)
class Phases:
    """The backends of a layer, both over one KV cache.

    Attributes:
        prefill: For steps with a longer query; the same object as ``decode`` where one does both.
        decode: For steps of decode alone, and their CUDA graphs.
    """

    prefill: AttentionBackend
    decode: AttentionBackend

    @property
    def is_one(self) -> bool:
        """Whether one backend does both, so that a mixed step needs no split."""
        return self.prefill is self.decode

    @property
    def has_graphs(self) -> bool:
        """Whether decode can be captured in a CUDA graph."""
        return "cuda_graph" in self.decode.capabilities.features

    def __str__(self) -> str:
        return f"prefill={self.prefill.name}, decode={self.decode.name}"


def choose(spec: AttentionSpec, device: torch.device) -> Phases:
    """Ask the registry for both phases.

    Raises:
        AttnBackendsError: A setting is malformed, or its backend cannot do the layer; says why.
    """
    prefill, decode = (select(spec, phase=p, device=device).backend for p in PHASES)
    return Phases(prefill, decode)


def page_sizes() -> tuple[IntSet, ...]:
    """Page sizes that the backends named by the settings take; ``auto`` leaves them open.

    Raises:
        AttnBackendsError: A setting is malformed.
    """
    sizes: dict[IntSet, None] = {}
    for phase in PHASES:
        target = _target(phase)
        if target is not None:
            sizes[target.capabilities.page_sizes] = None
    return tuple(sizes)


def selection_reasons(spec: AttentionSpec) -> list[Reason]:
    """What the backends named by the settings have against a layer, without asking the device.

    The numbers of heads need not be known yet: vLLM asks before it builds the layer.
    """
    reasons: list[Reason] = []
    for phase in PHASES:
        try:
            target = _target(phase)
        except AttnBackendsError as error:
            return [Reason("attn_backends", str(error), "valid settings")]
        if target is None:
            continue
        asked = (
            spec if spec.page_size in target.capabilities.page_sizes else _any_page(spec, target)
        )
        reasons += target.unsupported_reasons(asked, phase)
    return list(dict.fromkeys(reasons))


def _any_page(spec: AttentionSpec, target: type[AttentionBackend]) -> AttentionSpec:
    """The spec with a page size that the backend takes: block sizes are judged apart."""
    sizes = target.capabilities.page_sizes
    return replace(spec, page_size=sizes.values[0] if sizes.values else sizes.low)


def _target(phase: str) -> type[AttentionBackend] | None:
    """The class that the settings name for a phase; None if that is left open, or a factory."""
    name = resolve(phase, None, None).name
    if name == AUTO:
        return None
    target = ATTENTION_BACKENDS[name].load()
    return target if is_class(target) else None


__all__ = ["Phases", "choose", "page_sizes", "selection_reasons"]
