"""Registered backends as ways to do the work of a case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from ..backend import AttentionBackend, BackendOptions
from ..batch import Batch
from ..capacity import Capacity
from ..config import AttentionConfig
from ..errors import BackendUnavailableError, InvalidInputError, UnsupportedCallError
from ..registry import select
from ..registry.registry import TABLE, lookup
from ..registry.target import judge, option_from_text, options_model
from ..spec import AttentionSpec
from .attention_cases import Inputs
from .runner import Call, Way


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """``name`` or ``name:option=value,...`` as a backend's name and options.

    Raises:
        UnknownBackendError: No backend has that name.
        InvalidInputError: An option is not of the form ``option=value``.
    """
    name, _, rest = text.partition(":")
    entry = lookup(name, where="backend")
    model = BackendOptions
    with suppress(BackendUnavailableError):  # choosing it will say so
        model = options_model(entry.load())
    options = {}
    for item in filter(None, rest.split(",")):
        option, equals, value = item.partition("=")
        if not equals:
            raise InvalidInputError.of("backend", repr(text), "name:option=value,...")
        options[option] = option_from_text(model, option, value)
    return entry.name, options


def every_backend() -> list[str]:
    """All registered names, plugins included."""
    TABLE.scan_plugins()
    return list(TABLE.entries)


def chooser(
    text: str, spec: AttentionSpec, phase: str, device: torch.device
) -> Callable[[], AttentionBackend]:
    """A call that selects the backend that ``text`` names.

    The call raises an AttnBackendsError if it is not available, or cannot do the call.
    """
    name, options = parse(text)
    config = AttentionConfig(options={name: options} if options else {})
    return lambda: select(spec, phase=phase, device=device, backend=name, config=config).backend


def why_not(text: str, spec: AttentionSpec, phase: str, device: torch.device) -> str:
    """Every reason against the backend that ``text`` names; empty if it can do the call.

    Raises:
        UnknownBackendError: No backend has that name.
        InvalidInputError: It does not have such an option.
    """
    name, options = parse(text)
    verdict = judge(lookup(name), spec, phase, device, options)
    return "; ".join(map(str, verdict.reasons))


def capacity_of(batch: Batch) -> Capacity:
    """Just enough for a batch."""
    width = 0 if batch.page_table is None else batch.page_table.shape[1]
    sizes = (batch.num_seqs, batch.total_q, batch.max_seqlen_q, batch.max_seqlen_k)
    return Capacity(*sizes, max_pages=width)


def no_graph(backend: AttentionBackend) -> str:
    """Why a backend is not captured: a failed capture can spoil what is measured after it."""
    declared = "cuda_graph" in backend.capabilities.features
    return "" if declared else "it does not declare cuda_graph"


def backend_way(backend: AttentionBackend, x: Inputs) -> Way:
    """A bound backend on the inputs, planned once; for graphs, if need be, with a capacity."""

    def planned(with_capacity: bool) -> Call:
        plan = backend.plan(x.batch, capacity_of(x.batch) if with_capacity else None)
        return lambda i: backend.run(x.q[i], x.k[i], x.v[i], plan)

    return Way(lambda: planned(False), lambda: planned(True), no_graph=no_graph(backend))


def backend_ways(x: Inputs, names: Sequence[str]) -> tuple[dict[str, Way], dict[str, str]]:
    """Ways of the named backends, and the reasons of those that cannot do the case.

    Args:
        x: The inputs.
        names: As ``parse`` takes them; empty is every registered backend.

    Raises:
        UnknownBackendError: A name that no backend has.
        InvalidInputError: An option that the backend does not have.
    """
    ways, refused = {}, {}
    for name in names or every_backend():
        if why := why_not(name, x.spec, x.case.phase, x.device):
            refused[name] = why
            continue
        try:
            ways[name] = backend_way(chooser(name, x.spec, x.case.phase, x.device)(), x)
        except (BackendUnavailableError, UnsupportedCallError) as error:  # settings forbid it
            refused[name] = str(error)
    return ways, refused


__all__ = ["backend_way", "backend_ways", "capacity_of", "chooser", "every_backend"]
__all__ += ["no_graph", "parse", "why_not"]
