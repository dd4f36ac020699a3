"""What a docstring owes its readers: every parameter, shapes of tensors, results and errors."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

#: Words by which an entry may point to another one instead of giving a shape again.
_ELSEWHERE = re.compile(r"\[|\b(as|same|other|scalar|shapes?|like)\b", re.IGNORECASE)
_SECTION = re.compile(r"^(Args|Returns|Yields|Raises|Attributes|Example|Examples|Note):\s*$")
_OWN_ERRORS = {
    "InvalidInputError", "UnsupportedCallError", "UnknownBackendError",
    "BackendUnavailableError", "ConformanceError",
}  # fmt: skip


def sections(doc: str) -> dict[str, str]:
    """The sections of a Google-style docstring by name; the summary is under ``""``."""
    found, name = {"": ""}, ""
    for line in doc.splitlines():
        if match := _SECTION.match(line):
            name = match[1]
            found[name] = ""
        else:
            if name and line and not line.startswith(" "):
                name = ""
            found[name] += line + "\n"
    return found


def entries(section: str) -> dict[str, str]:
    """``name: text`` entries of a section."""
    text = textwrap.dedent(section)
    parts = re.split(r"^(?=\S)", text, flags=re.MULTILINE)
    named = (part.partition(":") for part in parts if ":" in part)
    return {name.strip().lstrip("*").split(" ")[0]: rest.strip() for name, _, rest in named}


def function_gaps(name: str, function: Any) -> Iterator[str]:
    """What is missing from the docstring of a function or method."""
    doc = inspect.getdoc(function)
    if not doc:
        yield f"{name}: no docstring"
        return
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    node = next(n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))
    spec = node.args
    arguments = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs]
    arguments += [a for a in (spec.vararg, spec.kwarg) if a is not None]
    arguments = [a for a in arguments if a.arg not in ("self", "cls") and a.arg[0] != "_"]
    parts = sections(doc)
    told = entries(parts.get("Args", ""))
    for argument in arguments:
        if argument.arg not in told:
            yield f"{name}: Args does not tell of {argument.arg}"
        elif "Tensor" in ast.unparse(argument.annotation or ast.Constant("")):
            if not _ELSEWHERE.search(told[argument.arg]):
                yield f"{name}: no shape for {argument.arg}"
    for extra in told.keys() - {a.arg for a in arguments}:
        yield f"{name}: Args tells of {extra}, which is no parameter"
    silent = node.returns is None or ast.unparse(node.returns) in ("None", "NoReturn")
    if arguments and not silent and not ({"Returns", "Yields"} & parts.keys()):
        yield f"{name}: no Returns"
    raises = [n.exc for n in ast.walk(node) if isinstance(n, ast.Raise) and n.exc is not None]
    raised = {e for e in _OWN_ERRORS for exc in raises if re.search(rf"\b{e}\b", ast.unparse(exc))}
    for error in sorted(raised & _OWN_ERRORS - entries(parts.get("Raises", "")).keys()):
        yield f"{name}: Raises does not tell of {error}"


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, bool]]:
    """Public annotated fields of a class body, and whether a string stands below each."""
    for here, below in zip(node.body, [*node.body[1:], None]):
        if not isinstance(here, ast.AnnAssign) or not isinstance(here.target, ast.Name):
            continue
        if here.target.id.startswith("_") or "field(init=False" in ast.unparse(here):
            continue
        told = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        yield here.target.id, told


def class_gaps(name: str, cls: type) -> Iterator[str]:
    """What is missing from the docstrings of a class and of its public members."""
    doc = cls.__doc__
    if not doc:
        yield f"{name}: no docstring"
        return
    parts = sections(inspect.cleandoc(doc))
    told = {**entries(parts.get("Args", "")), **entries(parts.get("Attributes", ""))}
    node = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(node, ast.ClassDef)
    for field, string_below in _fields(node):
        if field not in told and not string_below and field != "model_config":
            yield f"{name}.{field}: not told of"
    for member, value in vars(cls).items():
        if member.startswith("_"):
            continue
        raw = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        if inspect.isfunction(raw) and raw.__qualname__.startswith(cls.__qualname__):
            inherited = any(member in vars(base) for base in cls.__mro__[1:-1])
            if not inherited:  # an override keeps the promises of its base
                yield from function_gaps(f"{name}.{member}", raw)
        elif isinstance(value, property) and not value.__doc__:
            yield f"{name}.{member}: no docstring"


def gaps(name: str, value: Any) -> list[str]:
    """What is missing from the documentation of a public name."""
    if inspect.isclass(value):
        return list(class_gaps(name, value))
    if inspect.isfunction(value):
        return list(function_gaps(name, inspect.unwrap(value)))
    return []
