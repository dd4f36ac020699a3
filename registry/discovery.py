"""Plugins: backends that other distributions offer through entry points.

The scan reads metadata only; a plugin's code runs when its backend is first needed. So a broken
plugin costs nobody anything until it is asked for, and then it answers with its own error.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass

from ..environment import PREFIX, allowed_plugins
from ..errors import Reason
from .entry import BackendEntry

ENTRY_POINT_GROUP = "attn_backends.backends"


@dataclass(frozen=True)
class RejectedPlugin:
    """An entry point that could not become a backend.

    Attributes:
        name: Its name, as the distribution wrote it.
        origin: ``"plugin <distribution> <version>"``.
        target: Its target.
        error: Why it was rejected.
    """

    name: str
    origin: str
    target: str
    error: str


def scan() -> list[BackendEntry]:
    """Entries of all installed plugins, in order of distribution and name; imports nothing."""
    points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    found: dict[tuple[str, str, str], BackendEntry] = {}
    for point in points:
        where = "unknown distribution"
        if point.dist is not None:
            where = f"{point.dist.name} {point.dist.version}"
        # The same distribution may be seen twice, through two entries of sys.path.
        key = (where, point.name, point.value)
        value = point.value.split("[")[0].strip()
        found[key] = BackendEntry(point.name, value, f"plugin {where}", f"see {where}")
    return [found[key] for key in sorted(found)]


def plugin_reason(entry: BackendEntry) -> Reason | None:
    """The reason against a plugin that the allow-list leaves out; None if it may be loaded."""
    if not entry.is_plugin:
        return None
    allowed = allowed_plugins()
    if allowed is None or entry.name in allowed:
        return None
    return Reason("plugin", entry.name, ", ".join(allowed) or "none", f"add it to {PREFIX}PLUGINS")


__all__ = ["ENTRY_POINT_GROUP", "RejectedPlugin", "plugin_reason", "scan"]
