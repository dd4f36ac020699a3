"""Asking an entry about a call, and binding it: classes and factories alike.

Foreign code runs here, so everything it raises turns into a reason against the call.
"""

from __future__ import annotations

import difflib
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError

from ..backend import AttentionBackend, BackendOptions
from ..errors import (
    BackendUnavailableError,
    InvalidInputError,
    Reason,
    UnsupportedCallError,
)
from ..spec import AttentionSpec
from .discovery import plugin_reason
from .entry import BackendEntry, Target, is_class


class RaisedReason(Reason):
    """A foreign check that failed: reads ``check raised ValueError: ...``."""

    @classmethod
    def of(cls, error: Exception, what: str = "check") -> RaisedReason:
        """Write down an exception of a check or a constructor."""
        return cls(what, f"{type(error).__name__}: {error}", "no exception")

    def __str__(self) -> str:
        return f"{self.argument} raised {self.got}"


class Verdict(NamedTuple):
    """What stands against a backend for one call.

    Attributes:
        reasons: Every reason; empty if it can do the call.
        unavailable: The reasons say that it does not work here at all, whatever the call.
        cause: The exception behind them, if there is one.
    """

    reasons: tuple[Reason, ...]
    unavailable: bool = False
    cause: Exception | None = None


def options_model(target: Target) -> type[BackendOptions]:
    """The pydantic model of a target's options; a factory without ``Options`` takes none."""
    model: type[BackendOptions] = getattr(target, "Options", BackendOptions)
    return model


def parse_options(
    entry: BackendEntry, values: Mapping[str, Any] | None, *, where: str = "options"
) -> BackendOptions:
    """Validate options by the backend's own model; types are strict.

    Raises:
        BackendUnavailableError: The backend does not load.
        InvalidInputError: An option is unknown or out of range; the message names it.
    """
    model = options_model(entry.load())
    try:
        return model.model_validate(dict(values or {}), strict=True)
    except ValidationError as error:
        raise invalid_fields(error, f"{where}.{entry.name}", model) from None


def option_from_text(model: type[BackendOptions], name: str, text: str) -> Any:
    """What a text says for an option, as YAML would read it: ``true``, ``3``, ``[16, 64]``.

    It stays the text where only that is allowed, such as ``2`` for one of several words.
    """
    import yaml  # only tools read options from text

    read: Any = text
    with suppress(yaml.YAMLError):
        read = yaml.safe_load(text)
    for value in (read, text):
        try:
            model.model_validate({name: value}, strict=True)
        except ValidationError as error:
            if any(item["loc"][:1] == (name,) for item in error.errors()):
                continue
        return value
    return read


def invalid_fields(error: ValidationError, where: str, model: type) -> InvalidInputError:
    """One InvalidInputError for all fields that pydantic refused."""
    fields = tuple(getattr(model, "model_fields", {}))
    parts = []
    for item in error.errors(include_url=False):
        name = ".".join(str(part) for part in (where, *item["loc"]) if part != "")
        raised = item.get("ctx", {}).get("error")
        if isinstance(raised, InvalidInputError):  # by a validator: it says all this already
            parts.append(str(raised))
        elif item["type"] == "extra_forbidden":
            allowed = f"only the fields {', '.join(fields) or 'none'}"
            close = difflib.get_close_matches(str(item["loc"][-1]), fields, n=1)
            fix = f"the closest is {close[0]}" if close else None
            parts.append(str(InvalidInputError.of(name, repr(item["input"]), allowed, fix)))
        else:
            allowed = item["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
            parts.append(str(InvalidInputError.of(name, repr(item["input"]), allowed)))
    return InvalidInputError("; ".join(parts))


def judge(
    entry: BackendEntry,
    spec: AttentionSpec,
    phase: str | None,
    device: torch.device,
    values: Mapping[str, Any] | None,
) -> Verdict:
    """Everything that stands against a backend for a call.

    Raises:
        InvalidInputError: The options are invalid: a mistake, which no other backend makes good.
    """
    excluded = plugin_reason(entry)
    if excluded is not None:
        return Verdict((excluded,), unavailable=True)
    try:
        target = entry.load()
    except BackendUnavailableError as error:
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        return Verdict((load_reason(entry, cause),), unavailable=True, cause=cause)
    options = parse_options(entry, values)
    try:
        if is_class(target):
            missing = list(target.dependency_reasons(options))
            found = list(target.unsupported_reasons(spec, phase, device, options))
        else:
            missing = []
            bound = bind(entry, spec, device, options)
            found = list(bound.unsupported_reasons(spec, phase, device, bound.options))
        for item in (*missing, *found):
            if not isinstance(item, Reason):
                raise TypeError(f"a check gave {item!r} instead of a Reason")
    except UnsupportedCallError as error:
        return Verdict(error.reasons or (RaisedReason.of(error),), cause=error)
    except BackendUnavailableError as error:
        return Verdict((RaisedReason.of(error, "factory"),), unavailable=True, cause=error)
    except Exception as error:  # a foreign check may raise anything
        return Verdict((RaisedReason.of(error),), cause=error)
    return Verdict(tuple(found), unavailable=bool(missing))


def load_reason(entry: BackendEntry, cause: Exception) -> Reason:
    """The reason of a target that does not import, with its own message."""
    got = f"{type(cause).__name__}: {cause}"
    return Reason("import", got, "a target that loads", entry.install_hint)


_bound: dict[tuple[Any, ...], AttentionBackend] = {}
_bound_lock = threading.RLock()


def bind(
    entry: BackendEntry, spec: AttentionSpec, device: torch.device, options: BackendOptions
) -> AttentionBackend:
    """The instance of a backend for a spec; equal arguments give the same instance."""
    try:
        hash(options)
        key: tuple[Any, ...] = (entry, spec, device, options)
    except TypeError:  # options that hold lists or dicts
        key = (entry, spec, device, options.model_dump_json())
    instance = _bound.get(key)
    if instance is None:
        with _bound_lock:
            instance = _bound.get(key)
            if instance is None:
                instance = entry.load()(spec, device=device, options=options)
                if not isinstance(instance, AttentionBackend):
                    got = type(instance).__name__
                    raise TypeError(f"the factory of {entry.name} returned a {got}")
                _bound[key] = instance
    return instance


__all__ = [
    "RaisedReason",
    "Verdict",
    "bind",
    "invalid_fields",
    "judge",
    "load_reason",
    "option_from_text",
    "options_model",
    "parse_options",
]
