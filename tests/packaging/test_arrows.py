"""Who may import whom: contract <- merge <- backends <- registry <- api <- what is built on it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import attn_backends as ab

PACKAGE = "attn_backends"
ROOT = Path(ab.__file__).resolve().parent
FOLDERS = {
    "": ROOT,
    "registry": (ROOT / "registry").resolve(),
    "adapters": (ROOT / "adapters").resolve(),
}

CONTRACT = """backend batch capabilities capacity config counters environment errors observation
    output packages plan provenance settings spec validation version""".split()
#: Each floor may import its own and those below it. Order is that of the arrows.
FLOORS: tuple[tuple[str, ...], ...] = (
    tuple(CONTRACT),
    ("driver", "layouts", "triton_compiled"),  # what launches of kernels share
    ("merge",),
    ("torch_native", "triton_native", "adapters"),
    ("registry",),
    ("api", "cascade", "chunked", "distributed", "forms", "kv_cache", "mla", "ops", "pieces",
     "prefixes", "running"),
    ("engines", "conformance", "bench", "cli", "__main__"),
)  # fmt: skip
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}

#: Packages of one floor that know nothing of each other.
STRANGERS = [("torch_native", "triton_native", "adapters"), ("engines", "conformance")]

#: Imports against the arrows, all of them inside a function: what needs them is a method of the
#: contract that is defined by a module above it.
UPWARD = {
    ("output", "merge"): "AttentionOutput.merge is merge_state",
    ("backend", "merge"): "sinks that a kernel does not fold in are merged after the run",
    ("config", "registry"): "names are checked by the registry, options by each backend's model",
}

#: What the contract may import beside the standard library when it is loaded.
CONTRACT_NEEDS = {"torch", "pydantic"}
#: ``AttentionSettings`` alone needs this one, and is loaded only by those who ask for it.
SETTINGS_NEEDS = {"pydantic_settings"}


class Import(NamedTuple):
    source: str  # module under attn_backends, dots and all
    target: str  # module, ours without the package's name
    ours: bool
    line: int
    loading: bool  # runs when the source is imported

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.target}"


def modules() -> Iterator[tuple[str, bool, Path]]:
    for prefix, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if not prefix and parts[0] in FOLDERS:  # a link, where the package has it
                continue
            is_package = parts[-1] == "__init__"
            names = [*filter(None, [prefix]), *(parts[:-1] if is_package else parts)]
            yield ".".join(names), is_package, path


def imports() -> Iterator[Import]:
    for name, is_package, path in modules():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        typing_only = {
            id(node)
            for branch in ast.walk(tree)
            if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.dump(branch.test)
            for statement in branch.body
            for node in ast.walk(statement)
        }
        inside = {
            id(node)
            for function in ast.walk(tree)
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            for node in ast.walk(function)
        }
        for node in ast.walk(tree):
            if not isinstance(node, (ast.Import, ast.ImportFrom)) or id(node) in typing_only:
                continue
            for target in targets(node, name, is_package):
                ours = target == PACKAGE or target.startswith(f"{PACKAGE}.")
                bare = target.removeprefix(PACKAGE).removeprefix(".") if ours else target
                yield Import(name, bare, ours, node.lineno, id(node) not in inside)


def targets(node: ast.Import | ast.ImportFrom, name: str, is_package: bool) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    module = node.module or ""
    if node.level:
        here = [PACKAGE, *filter(None, name.split("."))]
        up = node.level - (1 if is_package else 0)
        module = ".".join([*here[: len(here) - up], *filter(None, [module])])
    if module == PACKAGE:  # "from .. import ops" names a module
        yield from (f"{PACKAGE}.{alias.name}" for alias in node.names)
    else:
        yield module


ALL = list(imports())


def top(module: str) -> str:
    return module.split(".")[0]


def test_every_module_has_a_floor() -> None:
    found = {top(name) for name, _, _ in modules()} - {""}
    assert found == set(FLOOR), "a new module needs its place among the arrows"


def test_imports_point_down_or_along_a_floor() -> None:
    upward = [
        i for i in ALL
        if i.ours and i.source and i.target and FLOOR[top(i.target)] > FLOOR[top(i.source)]
    ]  # fmt: skip
    wrong = [str(i) for i in upward if (top(i.source), top(i.target)) not in UPWARD or i.loading]
    assert not wrong
    used = {(top(i.source), top(i.target)) for i in upward}
    assert used == set(UPWARD), "an exception that nobody needs any more"


@pytest.mark.parametrize("names", STRANGERS, ids=" ".join)
def test_neighbors_know_nothing_of_each_other(names: tuple[str, ...]) -> None:
    wrong = [
        str(i) for i in ALL
        if i.ours and top(i.source) in names and top(i.target) in names
        and top(i.source) != top(i.target)
    ]  # fmt: skip
    assert not wrong


def test_engines_know_nothing_of_each_other_and_of_no_backend() -> None:
    kernels = {"torch_native", "triton_native", "adapters"}
    wrong = []
    for i in ALL:
        if not i.ours or top(i.source) != "engines":
            continue
        there = i.target.split(".")
        other = there[0] == "engines" and len(there) > 1 and there[1] != i.source.split(".")[1]
        if other or there[0] in kernels:
            wrong.append(str(i))
    assert not wrong


def test_the_contract_needs_torch_and_pydantic_only() -> None:
    wrong = []
    for i in ALL:
        if i.ours or not i.loading or top(i.source) not in CONTRACT:
            continue
        allowed = CONTRACT_NEEDS | (SETTINGS_NEEDS if i.source == "settings" else set())
        if top(i.target) not in allowed | set(sys.stdlib_module_names):
            wrong.append(str(i))
    assert not wrong
    assert any(not i.ours and i.target == "torch" for i in ALL)


def test_the_registry_imports_no_kernels() -> None:
    kernels = {"merge", "torch_native", "triton_native", "adapters", "triton"}
    wrong = [str(i) for i in ALL if top(i.source) == "registry" and top(i.target) in kernels]
    assert not wrong


def test_the_reader_of_imports_sees_each_form() -> None:
    code = "from .. import ops\nfrom .a import b\nfrom ..merge.api import c\nimport d.e\n"
    found = [
        t for node in ast.parse(code).body
        for t in targets(node, "registry.selection", is_package=False)  # type: ignore[arg-type]
    ]  # fmt: skip
    assert found == [
        "attn_backends.ops", "attn_backends.registry.a", "attn_backends.merge.api", "d.e",
    ]  # fmt: skip
    package = ast.parse("from .pair import merge").body[0]
    assert list(targets(package, "merge", is_package=True)) == ["attn_backends.merge.pair"]
    assert len({i.source for i in ALL}) > 150
