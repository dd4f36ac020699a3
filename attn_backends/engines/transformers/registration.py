"""Registering the plug with transformers, and taking it back."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from types import TracebackType
from typing import Any

from ...errors import BackendUnavailableError, InvalidInputError
from ...registry import ATTENTION_BACKENDS
from .attention import Attention
from .masks import mask_function
from .paged import HOOK

OLDEST = "5.17"

#: transformers takes names with these parts for its own kernels: a Hub repository, its flash or
#: flex integrations, its paged ones.
_TAKEN = ("/", "|", "flash", "flex_attention", "sdpa")
_SHORT = (("flash_attention", "fa"), ("flashinfer", "fi"), ("flash", "fl"), ("sdpa", "dpa"))

#: Continuous batching's own form of a name; from 5.19 only ``paged|eager`` is left of them.
_PAGED = "paged|"
_NEEDED = (
    "AttentionMaskInterface",
    "and_masks",
    "bidirectional_mask_function",
    "causal_mask_function",
    "sdpa_mask",
    "sliding_window_bidirectional_overlay",
    "sliding_window_overlay",
)
_OVERRIDABLE = ("sdpa", "paged|eager")


class _Slot:
    """One name in one of transformers' tables, with everything we put there, oldest first."""

    def __init__(self, table: Any, name: str) -> None:
        self.table, self.name = table, name
        self.before = table._global_mapping.get(name)
        self.ours: list[tuple[object, Callable[..., Any]]] = []

    def push(self, owner: object, function: Callable[..., Any]) -> None:
        self.ours.append((owner, function))
        self.table.register(self.name, function)

    def pull(self, owner: object) -> None:
        """Take an owner's function out; what lies under the top is only forgotten."""
        current = self.table._global_mapping.get(self.name)
        was_top = bool(self.ours) and current is self.ours[-1][1]
        self.ours = [(o, f) for o, f in self.ours if o is not owner]
        if not was_top:  # somebody registered over us, and stays
            return
        restored = self.ours[-1][1] if self.ours else self.before
        if restored is None:
            self.table._global_mapping.pop(self.name, None)
        else:
            self.table.register(self.name, restored)


_slots: dict[tuple[Any, str], _Slot] = {}
_lock = threading.RLock()


@dataclass(eq=False)
class Handle:
    """What ``enable`` registered.

    A context manager: leaving the block disables it.

    Attributes:
        name: The name whose backend the configuration chooses, or that ``backend=`` fixed.
        names: The ``attn_implementation`` of every backend.
        overridden: Names of transformers itself that now lead here.
        paged: Whether continuous batching reads pages where they lie.
    """

    name: str
    names: dict[str, str] = field(default_factory=dict)
    overridden: tuple[str, ...] = ()
    paged: bool = True
    _held: list[tuple[Any, str]] = field(default_factory=list, repr=False)

    def disable(self) -> None:
        """Restore what was registered before. Again is harmless."""
        with _lock:
            HOOK.drop(self)
            while self._held:
                key = self._held.pop()
                _slots[key].pull(self)
                if not _slots[key].ours:
                    del _slots[key]

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.disable()

    def _register(self, tables: tuple[Any, Any], name: str, attention: Attention) -> None:
        """Put attention and mask under a name; the paged forms, where they exist, need no mask."""
        table, masks = tables
        function = attention.function()
        self._put(table, name, function)
        if name.startswith(_PAGED):
            return
        self._put(masks, name, mask_function)
        if f"{_PAGED}sdpa" in table._global_mapping:
            self._put(table, f"{_PAGED}{name}", function)

    def _put(self, table: Any, name: str, function: Callable[..., Any]) -> None:
        key = (table, name)
        if key not in _slots:
            _slots[key] = _Slot(table, name)
        self._held.append(key)
        _slots[key].push(self, function)
        if table._global_mapping.get(name) is not function:
            raise BackendUnavailableError(
                f"transformers={_version()}: {table.__name__} does not keep {name!r}. A model "
                "without its mask function would ignore padding, so nothing is registered"
            )


def enable(
    name: str = "attn_backends",
    backend: str | None = None,
    override: Iterable[str] = (),
    *,
    ignore: Iterable[str] = (),
    paged: bool = True,
) -> Handle:
    """Make the library available to every transformers model of this process.

    Registers an attention and a mask function under ``name``, whose backend is chosen by the
    configuration call by call, and under ``name:<backend>`` for every backend registered by now.
    Parts of a backend's name that transformers claims for itself are shortened: ``handle.names``
    tells.

    Example:
        >>> with enable() as handle:
        ...     model.set_attn_implementation(handle.name)
        ...     model.generate(input_ids)

    Args:
        name: The ``attn_implementation`` to register.
        backend: Tie ``name`` to this backend; None leaves it to ``use()``, the configuration, the
            environment and ``auto``.
        override: Names of transformers itself that shall lead here, as ``generate_batch`` accepts
            no others: ``"sdpa"``, and ``"paged|eager"``, which it uses for models set to
            ``eager``, such as those with sinks or softcap.
        ignore: Arguments that a model passes to its attention, and of which you know that they
            change nothing; all others that are unknown are refused.
        paged: Let ``generate_batch`` read the pages of layers of full attention where they lie;
            the backend must then take its page size. With an override this wraps
            ``PagedAttentionCache.update`` until ``disable``. False gathers the keys of each step,
            as transformers does.

    Returns:
        A handle with ``disable()``; also a context manager.

    Raises:
        BackendUnavailableError: transformers is missing, too old, or has no mask interface.
        InvalidInputError: transformers would take the name for something else.
        UnknownBackendError: No such backend.
    """
    tables = _tables()
    _check_name(name)
    chosen = None if backend is None else ATTENTION_BACKENDS[backend].name
    overridden = _overridden(override)
    harmless = frozenset(ignore)
    if not isinstance(paged, bool):
        raise InvalidInputError.of("paged", repr(paged), "True or False")
    handle = Handle(name, overridden=overridden, paged=paged)

    with _lock:
        try:
            for each in (name, *overridden):
                handle._register(tables, each, Attention(each, chosen, harmless, paged))
            for each in ATTENTION_BACKENDS:
                handle.names[each] = f"{name}:{_short(each)}"
                where = handle.names[each]
                handle._register(tables, where, Attention(where, each, harmless, paged))
            if overridden and paged:
                HOOK.hold(handle)
        except BaseException:
            handle.disable()
            raise
    return handle


def _tables() -> tuple[Any, Any]:
    """The tables of attention and mask functions in transformers, checked to be what we know."""
    try:
        from transformers import AttentionInterface, masking_utils

        for part in _NEEDED:
            getattr(masking_utils, part)
        if "q_offset" not in inspect.signature(masking_utils.sdpa_mask).parameters:
            raise ImportError("sdpa_mask has no q_offset")
        return AttentionInterface, masking_utils.AttentionMaskInterface
    except Exception as error:
        raise BackendUnavailableError(
            f"transformers={_version()} (supported: >= {OLDEST}, with AttentionInterface and "
            f"AttentionMaskInterface); pip install 'transformers>={OLDEST}': {error}"
        ) from error


def _version() -> str:
    try:
        return version("transformers")
    except PackageNotFoundError:
        return "none"


def _check_name(name: str) -> None:
    taken = [part for part in _TAKEN if isinstance(name, str) and part in name]
    if not isinstance(name, str) or not name or name == "eager" or taken:
        fix = "transformers would take it for something else; override=('sdpa',) replaces sdpa"
        allowed = f"a name without {', '.join(map(repr, _TAKEN))}, not 'eager'"
        raise InvalidInputError.of("name", repr(name), allowed, fix)


def _short(backend: str) -> str:
    for part, instead in _SHORT:
        backend = backend.replace(part, instead)
    return backend.replace("flex_attention", "flex")


def _overridden(override: Iterable[str]) -> tuple[str, ...]:
    if isinstance(override, str):
        allowed = "a tuple of names"
        raise InvalidInputError.of("override", repr(override), allowed, f"pass ({override!r},)")
    names = tuple(dict.fromkeys(override))
    for each in names:
        if each not in _OVERRIDABLE:
            allowed = ", ".join(map(repr, _OVERRIDABLE))
            raise InvalidInputError.of("override", repr(each), allowed)
    return names


__all__ = ["Handle", "enable"]
