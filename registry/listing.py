"""``list_backends``: every backend, where it comes from, and whether it works here."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..capabilities import Capabilities
from ..errors import BackendUnavailableError, Reason
from ..packages import installed_version
from ..spec import check_device
from .discovery import plugin_reason
from .entry import BackendEntry, Target, is_class
from .registry import TABLE, known_names
from .target import RaisedReason, load_reason, parse_options


@dataclass(frozen=True)
class BackendInfo:
    """What the listing says of a backend.

    Attributes:
        name: Its name.
        origin: ``builtin``, ``registered``, or ``plugin <distribution> <version>``.
        target: Its target as ``"module:attr"``.
        available: Whether it loads, has what it needs, and supports a device of this machine.
        reasons: Why it is not available.
        summary: The first line of its documentation.
        versions: Versions of the packages that the backend names in ``packages``.
        capabilities: What it declares; None for factories and for what does not load.
    """

    name: str
    origin: str
    target: str
    available: bool
    reasons: tuple[Reason, ...]
    summary: str
    versions: Mapping[str, str | None]
    capabilities: Capabilities | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "name": self.name,
            "origin": self.origin,
            "target": self.target,
            "available": self.available,
            "reasons": [str(reason) for reason in self.reasons],
            "summary": self.summary,
            "versions": dict(self.versions),
        }

    def __str__(self) -> str:
        state = "available" if self.available else "; ".join(map(str, self.reasons))
        return f"{self.name} ({self.origin}): {state}"


def list_backends(device: torch.device | str | None = None) -> tuple[BackendInfo, ...]:
    """Every backend that is registered or offered by a plugin, broken ones included.

    Loads each of them and imports the packages they need, because only that shows whether they
    work. Without ``device`` it does not start CUDA: it asks which kinds of device are visible.

    Args:
        device: Judge by this device, its architecture included.

    Returns:
        One entry per backend, in the order of registration; plugins that were left out come last.

    Raises:
        InvalidInputError: ``device`` is no device.
    """
    where = None if device is None else check_device(device)
    infos = [_info(TABLE.entries[name], where) for name in known_names()]
    for plugin in TABLE.rejected:
        reason = Reason("plugin", plugin.name, "a valid plugin", plugin.error)
        infos.append(
            BackendInfo(plugin.name, plugin.origin, plugin.target, False, (reason,), "", {}, None)
        )
    return tuple(infos)


def _info(entry: BackendEntry, device: torch.device | None) -> BackendInfo:
    reasons: list[Reason] = []
    target: Target | None = None
    excluded = plugin_reason(entry)
    if excluded is not None:
        reasons.append(excluded)
    else:
        try:
            target = entry.load()
        except BackendUnavailableError as error:
            cause = error.__cause__
            assert isinstance(cause, Exception)
            reasons.append(load_reason(entry, cause))
    capabilities = None
    if is_class(target):
        capabilities = target.capabilities
        try:
            reasons += target.dependency_reasons(parse_options(entry, None))
            reasons += _device_reasons(capabilities, device)
        except Exception as error:  # a foreign check may raise anything
            reasons.append(RaisedReason.of(error))
    document = inspect.getdoc(target) if target is not None else None
    return BackendInfo(
        name=entry.name,
        origin=entry.origin,
        target=entry.target_text,
        available=not reasons,
        reasons=tuple(reasons),
        summary=(document or "").split("\n")[0],
        versions={name: installed_version(name) for name in getattr(target, "packages", ())},
        capabilities=capabilities,
    )


def _device_reasons(declared: Capabilities, device: torch.device | None) -> list[Reason]:
    if device is not None:
        return list(declared.device_reasons(device))
    visible = ["cpu"]
    if torch.cuda.is_available():
        visible.append("cuda")
    others = (kind for kind in ("xpu", "mps") if _visible(kind))
    visible += others
    if any(kind in declared.devices for kind in visible):
        return []
    return [Reason("device", ", ".join(visible), ", ".join(declared.devices))]


def _visible(kind: str) -> bool:
    module = getattr(torch, kind, None)
    return bool(module is not None and module.is_available())


__all__ = ["BackendInfo", "list_backends"]
