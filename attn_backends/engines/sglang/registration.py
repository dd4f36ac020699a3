"""Telling SGLang the name of the backend and how one is made."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ...errors import BackendUnavailableError

#: What goes behind ``--attention-backend``; SGLang asks for its own names in many places, so this
#: one is none of them.
NAME = "attn_backends"

#: Lists of names that the command line accepts, and what extends each.
_CHOICES = (
    ("ATTENTION_BACKEND_CHOICES", "add_attention_backend_choices"),
    # Batch invariance is what SGLang calls deterministic. It is not on the list of those that keep
    # it over a cut of the prompt, so SGLang turns its prefix cache off in that mode.
    ("DETERMINISTIC_ATTENTION_BACKEND_CHOICES", "add_deterministic_attention_backend_choices"),
)
#: Where those lists have been, the newest place first.
_HOMES = ("sglang.srt.arg_groups.choices", "sglang.srt.server_args")


def register() -> None:
    """Make ``--attention-backend attn_backends`` known to this process; again is harmless.

    SGLang logs what a plugin raises and goes on; the name is then an invalid choice.

    Raises:
        BackendUnavailableError: SGLang is missing, has another registry, or the name is taken.
    """
    try:
        registry = import_module("sglang.srt.layers.attention.attention_registry")
        table, decorate = registry.ATTENTION_BACKENDS, registry.register_attention_backend
        lists = [_choices(names, adder) for names, adder in _CHOICES]
    except Exception as error:  # an unknown SGLang may fail in any way
        raise BackendUnavailableError(
            f"sglang={_version()} (supported: 0.5.17 to 0.5.23, with register_attention_backend "
            f"and add_attention_backend_choices): {type(error).__name__}: {error}"
        ) from error
    holder = table.get(NAME)
    if holder is not None and holder is not create:
        where = f"{getattr(holder, '__module__', '?')}:{getattr(holder, '__qualname__', '?')}"
        raise BackendUnavailableError(
            f"SGLang's attention backend {NAME!r} already belongs to {where}; not registered"
        )
    decorate(NAME)(create)
    for names, add in lists:
        if NAME not in names:
            add([NAME])


def create(runner: Any) -> Any:
    """The factory that SGLang calls with its ``ModelRunner``, once the model is loaded.

    Args:
        runner: SGLang's model runner.

    Returns:
        SGLang's ``AttentionBackend``, see ``backend.Backend``.

    Raises:
        UnsupportedCallError: The model or a setting asks for what cannot be done; every reason.
    """
    from .backend import Backend

    return Backend(runner)


def _choices(names: str, adder: str) -> tuple[Any, Any]:
    """A list of choices, and the function that extends it."""
    for home in _HOMES:
        try:
            module = import_module(home)
        except ModuleNotFoundError as error:
            if error.name != home:
                raise
            continue
        if hasattr(module, names) and hasattr(module, adder):
            return getattr(module, names), getattr(module, adder)
    raise ImportError(f"{names} with {adder} in none of {', '.join(_HOMES)}")


def _version() -> str:
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "none"


__all__ = ["NAME", "create", "register"]
