"""The backends that ship with the library. This table is the only place that names them all."""

from __future__ import annotations

from .entry import BackendEntry

_TABLE: tuple[tuple[str, str, str | None], ...] = (
    ("torch_native", "attn_backends.torch_native.backend:TorchNativeBackend", None),
)


def builtin_entries() -> dict[str, BackendEntry]:
    """Entries of the shipped backends, in order; nothing is imported."""
    return {
        name: BackendEntry(name, target, "builtin", install_hint)
        for name, target, install_hint in _TABLE
    }


__all__ = ["builtin_entries"]
