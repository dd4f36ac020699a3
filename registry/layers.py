"""The layers of settings, and which of them answers each question.

Argument, then ``use()``, then configuration, then environment, then ``auto``. Each question (the
backend of a phase, allow, deny, ...) is answered by the first layer that sets it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from .. import environment
from ..config import PROCESS, AttentionConfig, environment_layer
from ..errors import InvalidInputError
from .registry import AUTO, normalize

#: Backend names of (prefill, decode) that ``use()`` set; None where it left the choice open.
context: ContextVar[tuple[str | None, str | None]] = ContextVar(
    "attn_backends_use", default=(None, None)
)
_PHASE_INDEX = {"prefill": 0, "decode": 1}


@contextmanager
def use(
    name: str | None = None, *, prefill: str | None = None, decode: str | None = None
) -> Iterator[None]:
    """Choose backends for everything called inside a ``with`` block.

    Goes before configuration and environment, after arguments. Holds for the current thread or
    task only. Blocks nest: what the inner one leaves open, the outer one decides.

    Example:
        >>> with use("triton", decode="flashinfer"):
        ...     run_model()

    Args:
        name: Backend of both phases, or ``"auto"``; None leaves the choice as it is.
        prefill: Backend of prefill; goes before ``name``.
        decode: Backend of decode; goes before ``name``.

    Yields:
        Nothing; the choice ends with the block.

    Raises:
        UnknownBackendError: No backend has that name.
    """
    pairs = (("prefill", prefill), ("decode", decode))
    both = None if name is None else normalize(name, where="name")
    outer = context.get()
    chosen = tuple(
        both if value is None else normalize(value, where=where) for where, value in pairs
    )
    token = context.set((chosen[0] or outer[0], chosen[1] or outer[1]))
    try:
        yield
    finally:
        context.reset(token)


@dataclass(frozen=True)
class Settings:
    """The answers for one call.

    Attributes:
        name: Backend that was asked for, or ``"auto"``.
        layer: Who asked: argument, context, config, environment, or auto.
        setting: The setting that decided, as the user would write it; empty if none did.
        allow: Names that may be used, and who said so; None if open.
        deny: Names that may not be used, and who said so; None if open.
        batch_invariant: Whether the settings demand it.
        merge: Path of merges that the settings ask for; None leaves it open.
        options: Options by backend name.
        tuning_file: Path of the measured ranking.
        files: Files that the answers depend on.
    """

    name: str
    layer: str
    setting: str
    allow: tuple[tuple[str, ...], str] | None
    deny: tuple[tuple[str, ...], str] | None
    batch_invariant: bool
    merge: str | None
    options: Mapping[str, Mapping[str, Any]]
    tuning_file: str | None
    files: tuple[str, ...]


def resolve(phase: str, backend: str | None, config: AttentionConfig | None) -> Settings:
    """Find the answer to every question for a call.

    Raises:
        InvalidInputError: A setting of the environment is malformed, whether it would win or not.
        UnknownBackendError: A layer names a backend that does not exist.
    """
    if config is not None and not isinstance(config, AttentionConfig):
        raise InvalidInputError.of("config", type(config).__name__, "an AttentionConfig or None")
    env = environment_layer()
    own = config if config is not None else PROCESS.config
    source = "config argument" if config is not None else "configure()"
    layers = [(own, source)] if own is not None else []
    layers.append((env, "environment"))
    name, layer, setting = _requested(phase, backend, own, source, env)

    def first(field: str) -> tuple[Any, str] | None:
        for candidate, where in layers:
            value = getattr(candidate, field)
            if value is not None:
                return value, where
        return None

    invariant, merge, tuning = first("batch_invariant"), first("merge"), first("tuning_file")
    files = [tuning[0]] if tuning is not None else []
    if PROCESS.environment is not None:
        files += [path for path, _ in PROCESS.environment[1]]
    return Settings(
        name=name,
        layer=AUTO if name == AUTO else layer,
        setting=setting,
        allow=first("allow"),
        deny=first("deny"),
        batch_invariant=invariant is not None and bool(invariant[0]),
        merge=None if merge is None or merge[0] == AUTO else merge[0],
        options={**env.options, **(own.options if own is not None else {})},
        tuning_file=None if tuning is None else tuning[0],
        files=tuple(files),
    )


def _requested(
    phase: str,
    backend: str | None,
    own: AttentionConfig | None,
    source: str,
    env: AttentionConfig,
) -> tuple[str, str, str]:
    """Name, layer and setting of the first layer that names a backend for the phase."""
    if backend is not None:
        return normalize(backend), "argument", f"backend={backend!r}"
    name = context.get()[_PHASE_INDEX[phase]]
    if name is not None:
        return name, "context", f"use({name!r})"
    if own is not None:
        for field in (phase, "backend"):
            if (name := getattr(own, field)) is not None:
                return name, "config", f"{field}={name!r} of {source}"
    for field in (phase, "backend"):
        if (name := getattr(env, field)) is not None:
            variable = environment.PREFIX + field.upper()
            where = variable if variable in os.environ else f"{environment.PREFIX}CONFIG"
            return name, "environment", f"{where} ({field}={name!r})"
    return AUTO, AUTO, ""


__all__ = ["Settings", "context", "resolve", "use"]
