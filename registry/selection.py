"""``select``: which backend a call gets, and the cache that makes asking again cheap."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ..backend import AttentionBackend
from ..capabilities import PHASES
from ..config import PROCESS, AttentionConfig, stamp
from ..counters import COUNTERS
from ..environment import snapshot
from ..errors import (
    AttnBackendsError,
    BackendUnavailableError,
    InvalidInputError,
    Reason,
    UnsupportedCallError,
)
from ..packages import is_broken
from ..spec import AttentionSpec, check_device
from .entry import BackendEntry
from .layers import Settings, context, resolve
from .ranking import Ranking, ranking
from .registry import AUTO, TABLE, known_names, lookup
from .target import RaisedReason, Verdict, bind, judge, parse_options

logger = logging.getLogger("attn_backends")


@dataclass(frozen=True, eq=False)
class Selection:
    """The backend that a call gets, and why.

    Attributes:
        backend: The backend, bound to the spec; equal questions get the same instance.
        name: Its name in the registry.
        layer: Who chose it: argument, context, config, environment, or auto.
        setting: The setting that decided, as the user would write it; empty if none did.
        phase: ``"prefill"`` or ``"decode"``.
        device: The device that was asked about.
        considered: Backends that ``auto`` rejected before this one, each with its reasons.
        ranking: Under ``auto``, the order that was followed: a measured row or the shipped one.
        merge: Path that the settings ask for merges; None leaves it to the merge.
    """

    backend: AttentionBackend
    name: str
    layer: str
    setting: str
    phase: str
    device: torch.device
    considered: Mapping[str, tuple[Reason, ...]]
    ranking: str | None
    merge: str | None


class _Cached(NamedTuple):
    selection: Selection
    config: AttentionConfig | None  # kept alive: the key holds its id
    files: tuple[tuple[str, Any], ...]


_MOST_CACHED = 4096
_cache: dict[Any, _Cached] = {}
_logged: set[Any] = set()


def select(
    spec: AttentionSpec,
    *,
    phase: str = "prefill",
    device: torch.device | str | None = None,
    backend: str | None = None,
    config: AttentionConfig | None = None,
) -> Selection:
    """Choose the backend of a layer for one phase.

    Precedence: ``backend`` > ``use()`` > ``config``, or else that of ``configure()`` >
    ``ATTN_BACKENDS_*`` > auto. A backend chosen by name is used or refused, never replaced.

    Args:
        spec: What the layer fixes.
        phase: ``"prefill"`` or ``"decode"``.
        device: Where the layer runs; default: ``cuda`` if a CUDA device is visible, else ``cpu``.
        backend: Name of a backend, or ``"auto"``.
        config: Configuration of this call, in place of the process's.

    Returns:
        The selection. With nothing changed, asking again is answered from a cache.

    Raises:
        UnknownBackendError: A setting names a backend that does not exist.
        BackendUnavailableError: The backend asked for does not load, or misses a package.
        UnsupportedCallError: The backend asked for, or under ``auto`` every one, cannot do it.
        InvalidInputError: An argument, option or setting is malformed.
    """
    # Everything that can change the answer is in the key, by value or by a number that grows.
    key = (
        spec,
        phase,
        device,
        backend,
        id(config),
        context.get(),
        PROCESS.generation,
        TABLE.generation,
        snapshot(),
    )
    try:
        known = _cache.get(key)
    except TypeError:  # an unhashable argument: the checks below name it
        known = None
    if known is not None and (not known.files or all(stamp(f) == s for f, s in known.files)):
        return known.selection
    where = check_call(spec, phase, device)
    settings = resolve(phase, backend, config)
    # Stamps come first: a file that changes while it is read is then read again.
    files = tuple((path, stamp(path)) for path in settings.files)
    try:
        selection = choose(spec, phase, where, settings)
    except (UnsupportedCallError, BackendUnavailableError):
        COUNTERS.add("refusals", settings.name)
        raise
    asked = None if settings.name == AUTO else lookup(settings.name).name
    COUNTERS.chosen(selection.name, phase, asked)
    _log_named(selection)
    if len(_cache) >= _MOST_CACHED:
        _cache.clear()
    _cache[key] = _Cached(selection, config, files)
    return selection


def check_call(spec: Any, phase: Any, device: Any) -> torch.device:
    """Check the arguments of a question, and fill in the device.

    Raises:
        InvalidInputError: One of them is malformed; the message names it.
    """
    if not isinstance(spec, AttentionSpec):
        raise InvalidInputError.of("spec", type(spec).__name__, "an AttentionSpec")
    if phase not in PHASES:
        raise InvalidInputError.of("phase", repr(phase), ", ".join(PHASES))
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return check_device(device)


def choose(spec: AttentionSpec, phase: str, device: torch.device, settings: Settings) -> Selection:
    """Find the backend for settings that are already resolved; see ``select``."""
    spec = demanded(spec, settings)
    if settings.name == AUTO:
        return _auto(spec, phase, device, settings)
    return _named(spec, phase, device, settings)


def demanded(spec: AttentionSpec, settings: Settings) -> AttentionSpec:
    """The spec with what the settings demand on top of it."""
    if settings.batch_invariant and not spec.batch_invariant:
        return dataclasses.replace(spec, batch_invariant=True)
    return spec


def policy_reasons(name: str, settings: Settings) -> tuple[Reason, ...]:
    """Reasons of allow and deny lists against a backend."""
    reasons = []
    if settings.allow is not None and name not in settings.allow[0]:
        names, source = settings.allow
        want = ", ".join(names) or "none"
        reasons.append(Reason("backend", name, want, f"it is not in allow ({source})"))
    if settings.deny is not None and name in settings.deny[0]:
        names, source = settings.deny
        want = ", ".join(n for n in known_names() if n not in names) or "none"
        reasons.append(Reason("backend", name, want, f"it is in deny ({source})"))
    return tuple(reasons)


def describe(spec: AttentionSpec, phase: str | None, device: torch.device) -> str:
    """A call in one line, for messages."""
    return f"phase={phase}, device={device}, {spec}"


def _named(spec: AttentionSpec, phase: str, device: torch.device, settings: Settings) -> Selection:
    entry = lookup(settings.name)
    denied = policy_reasons(entry.name, settings)
    verdict = Verdict(denied)
    if not denied:
        verdict = judge(entry, spec, phase, device, settings.options.get(entry.name))
    if verdict.reasons:
        raise _refusal(entry, spec, phase, device, settings, verdict)
    options = parse_options(entry, settings.options.get(entry.name))
    try:
        bound = bind(entry, spec, device, options)
    except AttnBackendsError:
        raise
    except Exception as error:  # foreign constructors
        text = f"backend {entry.name} cannot be built: {type(error).__name__}: {error}"
        raise BackendUnavailableError(text) from error
    return Selection(
        backend=bound,
        name=entry.name,
        layer=settings.layer,
        setting=settings.setting,
        phase=phase,
        device=device,
        considered=MappingProxyType({}),
        ranking=None,
        merge=settings.merge,
    )


def _refusal(
    entry: BackendEntry,
    spec: AttentionSpec,
    phase: str,
    device: torch.device,
    settings: Settings,
    verdict: Verdict,
) -> AttnBackendsError:
    """The error for a backend that was asked for and cannot do the call."""
    reasons = "; ".join(map(str, verdict.reasons))
    kind = "is not available here" if verdict.unavailable else "cannot do this call"
    text = f"backend {entry.name}, chosen by {settings.setting}, {kind}: {reasons}"
    text += f" [{describe(spec, phase, device)}; torch {torch.__version__}]"
    error: AttnBackendsError
    if verdict.unavailable:
        error = BackendUnavailableError(text)
    else:
        error = UnsupportedCallError(text, backend=entry.name, reasons=verdict.reasons)
    error.__cause__ = verdict.cause
    return error


def _auto(spec: AttentionSpec, phase: str, device: torch.device, settings: Settings) -> Selection:
    order = ranking(spec, phase, device, settings.tuning_file)
    rejected: dict[str, tuple[Reason, ...]] = {}
    for name in order:
        entry = TABLE.entries[name]
        reasons = policy_reasons(name, settings)
        if not reasons:
            verdict = judge(entry, spec, phase, device, settings.options.get(name))
            reasons = verdict.reasons
            if verdict.unavailable:
                _log_unavailable(name, verdict)
        if not reasons:
            options = parse_options(entry, settings.options.get(name))
            try:
                bound = bind(entry, spec, device, options)
            except Exception as error:  # foreign constructors
                reasons = (RaisedReason.of(error, "constructor"),)
                _log_unavailable(name, Verdict(reasons, cause=error))
            else:
                _log_choice(name, phase, device, order, rejected)
                return Selection(
                    backend=bound,
                    name=name,
                    layer=AUTO,
                    setting=settings.setting,
                    phase=phase,
                    device=device,
                    considered=MappingProxyType(rejected),
                    ranking=order.source,
                    merge=settings.merge,
                )
        rejected[name] = reasons
    raise nothing_left(spec, phase, device, rejected)


def nothing_left(
    spec: AttentionSpec,
    phase: str,
    device: torch.device,
    rejected: Mapping[str, tuple[Reason, ...]],
) -> UnsupportedCallError:
    """The error of ``auto`` when every backend has a reason against it."""
    lines = [f"no backend can do this call [{describe(spec, phase, device)}]:"]
    for name, reasons in rejected.items():
        lines.append(f"  {name}: {'; '.join(map(str, reasons))}")
    every = [reason for reasons in rejected.values() for reason in reasons]
    return UnsupportedCallError("\n".join(lines), backend=AUTO, reasons=every)


def _log_choice(
    name: str,
    phase: str,
    device: torch.device,
    order: Ranking,
    rejected: Mapping[str, tuple[Reason, ...]],
) -> None:
    key = (name, phase, device)
    if key in _logged:
        return
    _logged.add(key)
    passed = "".join(f"; {n}: {'; '.join(map(str, r))}" for n, r in rejected.items())
    logger.info("auto chose %s for %s on %s (%s)%s", name, phase, device, order.source, passed)


def _log_named(selection: Selection) -> None:
    """Say once that a setting chose; ``auto`` says more, where it knows more."""
    key = (selection.name, selection.phase, selection.device, selection.setting)
    if selection.layer == AUTO or key in _logged:
        return
    _logged.add(key)
    text = "%s chosen by %s for %s on %s"
    logger.info(text, selection.name, selection.setting, selection.phase, selection.device)


def _log_unavailable(name: str, verdict: Verdict) -> None:
    """Say once that ``auto`` moves on; loudly if something installed is broken."""
    text = "; ".join(map(str, verdict.reasons))
    if (name, text) in _logged:
        return
    _logged.add((name, text))
    broken = verdict.cause is not None or any(is_broken(r.argument) for r in verdict.reasons)
    level = logging.WARNING if broken else logging.INFO
    logger.log(level, "auto leaves out %s, which is not available here: %s", name, text)


__all__ = [
    "Selection",
    "check_call",
    "choose",
    "demanded",
    "policy_reasons",
    "select",
]
