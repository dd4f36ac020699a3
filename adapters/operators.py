"""Operators beneath a library's public functions: the same kernel, without the way to it.

Public functions lead through autograd, custom operators written in Python and checks for tracing,
which can take several times as long as queueing the kernel. Layers after the first have tensors of
known layouts, ask for no gradient and are not traced, so they may call what lies beneath.

Operators are private to a library. Their arguments are therefore looked up by name, and where a
release has others than those known here, the public function serves on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..output import AttentionOutput
from .adapter import Attend, state_of

_ABSENT = object()
_TENSORS = 3


class Argument(NamedTuple):
    """An argument of an operator.

    Attributes:
        name: Its name.
        by_name: Whether it can only be given by name.
        default: What it is if it is not given, if anything.
    """

    name: str
    by_name: bool
    default: Any


def arguments_of(operator: Any) -> list[Argument]:
    """Arguments of an overload of ``torch.ops`` by its schema, else of a Python function."""
    schema = getattr(operator, "_schema", None)
    if schema is not None:
        found = []
        for x in schema.arguments:
            default = None if isinstance(x.type, torch.OptionalType) else _ABSENT
            default = x.default_value if x.has_default_value() else default
            found.append(Argument(x.name, x.kwarg_only, default))
        return found
    return [
        Argument(x.name, x.kind is x.KEYWORD_ONLY, _ABSENT if x.default is x.empty else x.default)
        for x in inspect.signature(operator).parameters.values()
    ]


def operator_values(
    given: Mapping[str, Any], renamed: Mapping[str, str] | None = None, dropped: Sequence[str] = ()
) -> dict[str, Any]:
    """Arguments of a public function by the names of the operator, which has two for a window.

    Args:
        given: Of the function, ``window_size`` among them.
        renamed: The operator's names where they differ.
        dropped: What only the function takes.
    """
    names, left_out = renamed or {}, ("window_size", *dropped)
    values = {names.get(k, k): v for k, v in given.items() if k not in left_out}
    values["window_size_left"], values["window_size_right"] = given["window_size"]
    return values


def python_function(operator: Any) -> Callable[..., Any] | None:
    """The function that ``torch.library.custom_op`` made an operator of, or a plain one itself.

    A plain one may have attributes of its own, for example a cache of kernels.
    """
    function = getattr(operator, "_init_fn", operator)
    return function if inspect.isfunction(function) else None


def attend_beneath(
    operator: Any,
    values: Mapping[str, Any],
    otherwise: Mapping[str, Any] | None = None,
    *,
    by_head: bool = True,
) -> Attend | None:
    """Attend through an operator of query, key and value that gives the output and the LSE first.

    Args:
        operator: An overload of ``torch.ops`` or a Python function, or None.
        values: Its arguments after the first three, by name.
        otherwise: Values for arguments that not every release has, where they have no default.
        by_head: The LSE is ``[H, T]``, else ``[T, H]``.

    Returns:
        What attends; None if there is no operator, or if it takes other arguments than these.
    """
    if operator is None:
        return None
    known = {**(otherwise or {}), **values}
    arguments = arguments_of(operator)[_TENSORS:]
    if not set(values) <= {x.name for x in arguments}:
        return None
    tail: list[Any] = []
    named: dict[str, Any] = {}
    for x in arguments:
        value = known.get(x.name, x.default)
        if value is _ABSENT:
            return None
        if isinstance(value, torch.Tensor) and value.dim() and value.stride(-1) != 1:
            return None  # public functions copy it
        if not x.by_name:
            tail.append(value)
        elif value is not x.default:
            named[x.name] = value

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: AttentionOutput | None = None
    ) -> AttentionOutput:
        found = operator(q, k, v, *tail, **named)
        lse = found[1]
        return state_of(found[0], lse.mT if by_head else lse, out)

    return attend


__all__ = ["arguments_of", "attend_beneath", "operator_values", "python_function"]
