"""The table of backends: registering, looking up, and a read-only view."""

from __future__ import annotations

import difflib
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, overload

from ..errors import InvalidInputError, UnknownBackendError
from .builtin import builtin_entries
from .discovery import ENTRY_POINT_GROUP, RejectedPlugin, scan
from .entry import BackendEntry, check_target

AUTO = "auto"
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_RESERVED = (AUTO, "none")
_T = TypeVar("_T")

logger = logging.getLogger("attn_backends")


class _Table:
    """All entries, and a number that grows with every change, so that caches can tell."""

    def __init__(self) -> None:
        self.entries = builtin_entries()
        self.rejected: list[RejectedPlugin] = []
        self.generation = 0
        self.scanned = False
        self.lock = threading.RLock()

    def add(self, entry: BackendEntry) -> None:
        with self.lock:
            self.entries[entry.name] = entry
            self.generation += 1

    def scan_plugins(self) -> None:
        """Add the backends of installed plugins, once per process."""
        with self.lock:
            if self.scanned:
                return
            self.scanned = True
            try:
                found = scan()
            except Exception as error:  # broken metadata of an unrelated distribution
                logger.warning("entry points of %s cannot be read: %s", ENTRY_POINT_GROUP, error)
                return
            for entry in found:
                problem = _name_problem(entry.name)
                if problem is None and entry.name in self.entries:
                    problem = f"the name is taken by {self.entries[entry.name].origin}"
                if problem is None:
                    self.add(entry)
                    continue
                logger.warning("%s: backend %r is left out: %s", entry.origin, entry.name, problem)
                self.rejected.append(
                    RejectedPlugin(entry.name, entry.origin, entry.target_text, problem)
                )


TABLE = _Table()


def _name_problem(name: Any) -> str | None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return "a name matches [a-z][a-z0-9_]*"
    return f"{name} is reserved" if name in _RESERVED else None


@overload
def register_attention_backend(
    name: str, *, override: bool = False, install_hint: str | None = None
) -> Callable[[_T], _T]: ...


@overload
def register_attention_backend(
    name: str, target: _T, *, override: bool = False, install_hint: str | None = None
) -> _T: ...


def register_attention_backend(
    name: str,
    target: Any = None,
    *,
    override: bool = False,
    install_hint: str | None = None,
) -> Any:
    """Register a backend under a name, as a decorator or directly.

    Example:
        >>> @register_attention_backend("mine")
        ... class MyBackend(AttentionBackend): ...
        >>> register_attention_backend("lazy", "package.module:Backend")

    Args:
        name: Matches ``[a-z][a-z0-9_]*``; neither ``auto`` nor ``none``.
        target: A subclass of ``AttentionBackend``, a factory
            ``factory(spec, *, device=None, options=None)``, or ``"module:attr"``, imported when
            first needed. Without it, a decorator is returned.
        override: Replace a backend of this name.
        install_hint: Shown when a lazy target cannot be imported.

    Returns:
        The decorated object, unchanged; the target in the direct form.

    Raises:
        InvalidInputError: The name is malformed or taken, or the target cannot be a backend.
    """
    if target is None:
        return lambda decorated: register_attention_backend(
            name, decorated, override=override, install_hint=install_hint
        )
    problem = _name_problem(name)
    if problem is not None:
        raise InvalidInputError.of("name", repr(name), "[a-z][a-z0-9_]*", problem)
    if isinstance(target, str):
        if not re.fullmatch(r"[\w.]+:[\w.]+", target):
            raise InvalidInputError.of("target", repr(target), "'module:attr'")
    else:
        try:
            check_target(target)
        except TypeError as error:
            allowed = "an AttentionBackend class, a factory, or 'module:attr'"
            raise InvalidInputError.of("target", repr(target), allowed, str(error)) from None
    with TABLE.lock:
        known = TABLE.entries.get(name)
        if known is not None and not override:
            got = f"{known.target_text} ({known.origin})"
            fix = f"pass override=True to replace {got}"
            raise InvalidInputError.of("name", repr(name), "a name that is free", fix)
        TABLE.add(BackendEntry(name, target, "registered", install_hint))
    return target


def lookup(name: str, *, where: str = "backend") -> BackendEntry:
    """The entry of a backend, by any spelling of its name.

    Args:
        name: Case and surrounding blanks do not matter.
        where: The setting the name comes from, for the message.

    Raises:
        UnknownBackendError: No backend has this name; lists those there are, and the closest.
    """
    key = _key(name, where)
    entry = TABLE.entries.get(key)
    if entry is None:
        TABLE.scan_plugins()
        entry = TABLE.entries.get(key)
    if entry is None:
        raise UnknownBackendError(_unknown(name, where, known_names()))
    return entry


def normalize(name: str, *, where: str = "backend") -> str:
    """The registered spelling of a backend's name, or ``"auto"``.

    Raises:
        UnknownBackendError: Neither ``auto`` nor a backend.
    """
    if _key(name, where) == AUTO:
        return AUTO
    try:
        return lookup(name, where=where).name
    except UnknownBackendError:
        raise UnknownBackendError(_unknown(name, where, (AUTO, *known_names()))) from None


def _key(name: Any, where: str) -> str:
    if not isinstance(name, str):
        raise InvalidInputError.of(where, repr(name), "the name of a backend, a str")
    return name.strip().lower()


def known_names() -> tuple[str, ...]:
    """Names of all backends, plugins included, whether they work here or not."""
    TABLE.scan_plugins()
    return tuple(TABLE.entries)


def _unknown(name: str, where: str, valid: tuple[str, ...]) -> str:
    plain = {re.sub(r"[-_\s]", "", known): known for known in valid}
    asked = re.sub(r"[-_\s]", "", name.lower())
    close = difflib.get_close_matches(asked, plain, n=1, cutoff=0.5)
    text = f"{where}={name!r} is no backend (valid: {', '.join(valid)})"
    if not name.strip():
        return f"{text}; leave it unset to leave the choice open (in a list: a comma too many)"
    if close:
        return f"{text}; the closest is {plain[close[0]]}"
    if re.fullmatch("fa[234]?", asked) and "flash_attention" in valid:  # as engines call them
        return f"{text}; it is flash_attention, whose option version picks 2, 3 or 4"
    return text


class _View(Mapping[str, BackendEntry]):
    """Read-only view of the registry; looking at all of it includes plugins."""

    def __getitem__(self, name: str) -> BackendEntry:
        return lookup(name)

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return lookup(name)
        except UnknownBackendError:
            return default

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.get(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(known_names())

    def __len__(self) -> int:
        return len(known_names())

    def __repr__(self) -> str:
        return f"ATTENTION_BACKENDS({', '.join(self)})"


#: Every backend by name; ``register_attention_backend`` is the way to add one.
ATTENTION_BACKENDS: Mapping[str, BackendEntry] = _View()

__all__ = [
    "ATTENTION_BACKENDS",
    "AUTO",
    "TABLE",
    "known_names",
    "lookup",
    "normalize",
    "register_attention_backend",
]
