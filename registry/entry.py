"""One registered backend: its name, where it comes from, and its loaded target."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from ..backend import AttentionBackend
from ..errors import BackendUnavailableError
from ..packages import installed_version

#: A backend class, or a function ``factory(spec, *, device=None, options=None)``.
Target = type[AttentionBackend] | Callable[..., AttentionBackend]


def is_class(target: Target | None) -> TypeGuard[type[AttentionBackend]]:
    """Whether a checked target is a backend class rather than a factory."""
    return isinstance(target, type)


@dataclass(frozen=True, eq=False)
class BackendEntry:
    """What a name in the registry stands for.

    Attributes:
        name: The name that selects it.
        target: A class, a factory, or ``"module:attr"`` that is imported when first needed.
        origin: ``"builtin"``, ``"registered"``, or ``"plugin <distribution> <version>"``.
        install_hint: What to do if it cannot be loaded.
    """

    name: str
    target: str | Target
    origin: str = "registered"
    install_hint: str | None = None
    _loaded: list[Target | Exception] = field(default_factory=list, init=False, repr=False)

    @property
    def is_plugin(self) -> bool:
        """Whether it was found through an entry point."""
        return self.origin.startswith("plugin")

    @property
    def target_text(self) -> str:
        """The target as ``"module:attr"``."""
        if isinstance(self.target, str):
            return self.target
        return f"{self.target.__module__}:{self.target.__qualname__}"

    def load(self) -> Target:
        """The class or factory; imported on the first call, and a failure is remembered.

        Raises:
            BackendUnavailableError: The import failed; carries the original message and versions.
        """
        if not self._loaded:
            try:
                self._loaded.append(check_target(_resolve(self.target)))
            except Exception as error:  # a plugin may raise anything while it is imported
                self._loaded.append(error)
        loaded = self._loaded[0]
        if isinstance(loaded, Exception):
            raise BackendUnavailableError(self._failure(loaded)) from loaded
        return loaded

    def load_error(self) -> str | None:
        """Why it cannot be loaded, with the original message; None if it can."""
        try:
            self.load()
        except BackendUnavailableError as error:
            return str(error)
        return None

    def _failure(self, error: Exception) -> str:
        text = f"backend {self.name} does not load: {type(error).__name__}: {error}"
        text += f" (target {self.target_text}, {self.origin}, torch {installed_version('torch')})"
        return f"{text}; {self.install_hint}" if self.install_hint else text


def _resolve(target: str | Target) -> Any:
    if not isinstance(target, str):
        return target
    module, _, attribute = target.partition(":")
    value: Any = importlib.import_module(module)
    for part in attribute.split("."):
        value = getattr(value, part)
    return value


def check_target(target: Any) -> Target:
    """Return a class or factory that can serve as a backend, or raise TypeError."""
    if inspect.isclass(target):
        if not issubclass(target, AttentionBackend):
            raise TypeError(f"{target.__qualname__} is not a subclass of AttentionBackend")
        missing = [name for name in ("name", "capabilities") if not hasattr(target, name)]
        if missing:
            raise TypeError(f"{target.__qualname__} does not declare {' and '.join(missing)}")
        if inspect.isabstract(target):
            raise TypeError(f"{target.__qualname__} does not implement _run")
        return target
    if not callable(target):
        raise TypeError(f"{target!r} is neither an AttentionBackend class nor a factory")
    return target  # type: ignore[no-any-return]


__all__ = ["BackendEntry", "Target", "check_target", "is_class"]
