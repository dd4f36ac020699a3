"""Watching plans and calls: counters, ranges for profilers, and inputs in the log.

While nothing is asked for, ``AttentionBackend.plan`` and ``run`` are the plain methods, and no line
of this module runs. Asking puts observed methods in their place, for all backends at once; asking
for nothing puts the plain ones back.
"""

from __future__ import annotations

import logging
import reprlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from . import environment
from .backend import AttentionBackend
from .counters import COUNTERS
from .errors import BackendUnavailableError, InvalidInputError, UnsupportedCallError
from .plan import Plan

logger = logging.getLogger("attn_backends")


@dataclass(frozen=True)
class Observed:
    """What is watched.

    Attributes:
        stats: Count plans and calls.
        ranges: Name plans and calls in traces of ``torch.profiler``.
        log: Level of the log; None leaves it to the program.
    """

    stats: bool = False
    ranges: bool = False
    log: str | None = None


_PLAIN: dict[tuple[type, str], Callable[..., Any]] = {
    (AttentionBackend, "plan"): AttentionBackend.plan,
    (AttentionBackend, "run"): AttentionBackend.run,
    (Plan, "update"): Plan.update,
}
_asked: dict[str, Any] = {}  # by ``observe``; goes before the environment
_environment = Observed()
_now = Observed()


def observe(
    *, stats: bool | None = None, ranges: bool | None = None, log: str | None = None
) -> Observed:
    """Watch plans and calls of all backends, from now on.

    An argument left out stays as it was, by an earlier call or by the environment
    (``ATTN_BACKENDS_STATS``, ``ATTN_BACKENDS_RANGES``, ``ATTN_BACKENDS_LOG``).

    Args:
        stats: Count plans and calls; see ``stats``.
        ranges: Open a range ``attn_backends.<backend>.<phase>`` around each run, and one named
            ``attn_backends.<backend>.plan`` or ``.update`` around each plan and refill, for
            ``torch.profiler`` and, through ``emit_nvtx``, Nsight.
        log: ``info`` tells choices, ``debug`` plans too, ``trace`` the inputs of each call before
            it is launched; ``warning`` and ``error`` tell less.

    Returns:
        What is watched now.

    Raises:
        InvalidInputError: An argument is malformed.
    """
    for name, value in (("stats", stats), ("ranges", ranges)):
        if value is not None and not isinstance(value, bool):
            raise InvalidInputError.of(name, repr(value), "True or False")
    if log is not None:
        environment.log_level(log, "log")
    given = {"stats": stats, "ranges": ranges, "log": log}
    _asked.update({name: value for name, value in given.items() if value is not None})
    return _apply()


@contextmanager
def observed(
    *, stats: bool | None = None, ranges: bool | None = None, log: str | None = None
) -> Iterator[Observed]:
    """``observe`` for the length of a ``with`` block; other threads are watched too.

    Args:
        stats: As in ``observe``.
        ranges: As in ``observe``.
        log: As in ``observe``.

    Yields:
        What is watched inside.

    Raises:
        InvalidInputError: An argument is malformed.
    """
    before, level = dict(_asked), logger.level
    try:
        yield observe(stats=stats, ranges=ranges, log=log)
    finally:
        _asked.clear()
        _asked.update(before)
        _apply()
        logger.setLevel(level)


def follow_environment() -> None:
    """Take over what the variables say now.

    Raises:
        InvalidInputError: A variable cannot be read; the message names it.
    """
    global _environment
    switches = {
        name.lower(): text is not None and environment.boolean(name, text)
        for name in ("STATS", "RANGES")
        for text in (environment.variable(name),)
    }
    level = environment.variable("LOG")
    _environment = Observed(**switches, log=None if level is None else level.lower())
    _apply()


def _apply() -> Observed:
    global _now
    wanted = replace(_environment, **_asked)
    if wanted.log is not None and wanted.log != _now.log:
        environment.set_log_level(wanted.log)
    _now = wanted
    COUNTERS.counting = wanted.stats
    on = wanted.stats or wanted.ranges or wanted.log in ("debug", "trace")
    methods = _OBSERVED if on else _PLAIN
    for (owner, name), method in methods.items():
        if getattr(owner, name) is not method:
            setattr(owner, name, method)
    return wanted


def _phase(plan: Plan) -> str:
    return "decode" if plan.batch.max_seqlen_q <= 1 else "prefill"


def _range(name: str) -> AbstractContextManager[Any]:
    if not _now.ranges:
        return nullcontext()
    return torch.profiler.record_function(f"attn_backends.{name}")


@contextmanager
def _refusals(backend: AttentionBackend) -> Iterator[None]:
    """Count what a plan or run raises on purpose."""
    try:
        yield
    except (UnsupportedCallError, BackendUnavailableError):
        COUNTERS.add("refusals", backend.name)
        raise
    except InvalidInputError:
        COUNTERS.add("mistakes", backend.name)
        raise


def _timed(what: str, method: Callable[[], Any], backend: AttentionBackend) -> Any:
    """Make or refill a plan under observation."""
    start = time.perf_counter()
    with _refusals(backend), _range(f"{backend.name}.{what}"):
        plan = method()
    seconds = time.perf_counter() - start
    return plan, seconds


def _plan(self: AttentionBackend, batch: Any, capacity: Any = None) -> Plan:
    plain = _PLAIN[AttentionBackend, "plan"]
    plan: Plan
    plan, seconds = _timed("plan", lambda: plain(self, batch, capacity), self)
    if _now.stats:
        COUNTERS.add("plans", f"{self.name}.{_phase(plan)}", seconds)
    if logger.isEnabledFor(logging.DEBUG):
        text = "%s plans %s in %.1f us: %s"
        logger.debug(text, self.name, _phase(plan), seconds * 1e6, _batch_text(plan))
    return plan


def _update(self: Plan, batch: Any) -> None:
    plain = _PLAIN[Plan, "update"]
    _, seconds = _timed("update", lambda: plain(self, batch), self.backend)
    if _now.stats:
        COUNTERS.add("updates", f"{self.backend.name}.{_phase(self)}", seconds)
    if logger.isEnabledFor(logging.DEBUG):
        text = "%s refills a plan in %.1f us: %s sequences"
        logger.debug(text, self.backend.name, seconds * 1e6, batch.num_seqs)


def _run(self: AttentionBackend, q: Any, k: Any, v: Any, plan: Any, **extras: Any) -> Any:
    phase = _phase(plan) if isinstance(plan, Plan) else "unplanned"
    name = f"{self.name}.{phase}"
    if logger.isEnabledFor(environment.TRACE):  # before the launch: what a crash leaves behind
        logger.log(
            environment.TRACE, "%s runs: %s", name, _inputs_text(self, q, k, v, plan, extras)
        )
    with _refusals(self), _range(name):
        result = _PLAIN[AttentionBackend, "run"](self, q, k, v, plan, **extras)
    if _now.stats:
        COUNTERS.add("calls", name)
    return result


_OBSERVED: dict[tuple[type, str], Callable[..., Any]] = {
    (AttentionBackend, "plan"): _plan,
    (AttentionBackend, "run"): _run,
    (Plan, "update"): _update,
}


def _batch_text(plan: Plan) -> str:
    batch = plan.batch
    keys = "ragged" if batch.page_table is None else f"pages {list(batch.page_table.shape)}"
    fixed = "" if plan.capacity is None else f", capacity {plan.capacity}"
    return (
        f"{batch.num_seqs} sequences, total_q {batch.total_q}, max_seqlen_q {batch.max_seqlen_q}, "
        f"max_seqlen_k {batch.max_seqlen_k}, {keys}{fixed}"
    )


def _inputs_text(
    backend: AttentionBackend, q: Any, k: Any, v: Any, plan: Any, extras: dict[str, Any]
) -> str:
    """Shapes, strides and addresses; no value is read, so nothing waits for a device."""
    tensors = {"q": q, "k": k, "v": v, **extras}
    given = [f"{name} {_tensor_text(x)}" for name, x in tensors.items() if x is not None]
    work = _batch_text(plan) if isinstance(plan, Plan) else type(plan).__name__
    return f"{', '.join(given)}; {work}; {backend.spec}"


def _tensor_text(x: Any) -> str:
    if isinstance(x, torch.Tensor):
        dtype = str(x.dtype).removeprefix("torch.")
        return f"{dtype}{list(x.shape)} strides {x.stride()} on {x.device} at {x.data_ptr():#x}"
    if isinstance(x, tuple):
        return f"({', '.join(map(_tensor_text, x))})"
    return reprlib.repr(x)


__all__ = ["Observed", "follow_environment", "observe", "observed"]
