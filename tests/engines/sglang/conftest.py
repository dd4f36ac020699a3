"""SGLang for these tests: the real one where it is installed, else the stand-in."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def whole() -> bool:
    """Whether all of SGLang is there: kernels of it alone can be imported under its name too."""
    spec = importlib.util.find_spec("sglang")
    where = spec.submodule_search_locations if spec else None
    return any((Path(folder) / "srt").is_dir() for folder in where or ())


HAS_SGLANG = whole()


def load(name: str) -> ModuleType:
    """A module that lies beside this file."""
    full = f"attn_backends_tests_sglang_{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None and spec.loader is not None
        module = sys.modules[full] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[full]  # each test that needs it shall see why
            raise
    return sys.modules[full]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.get_closest_marker("engine") and not HAS_SGLANG:
            item.add_marker(pytest.mark.skip(reason="needs sglang"))


@pytest.fixture(scope="module")
def sglang() -> Iterator[str]:
    """``"sglang"`` or ``"stand-in"``, importable as ``sglang`` while the module's tests run."""
    if HAS_SGLANG:
        yield "sglang"
        return
    names = load("standin").install()
    yield "stand-in"
    plug = "attn_backends.engines.sglang.backend"  # bound to the stand-in's base class
    for name in (*names, plug):
        sys.modules.pop(name, None)


@pytest.fixture
def serve(sglang: str) -> Any:
    """``serve(**facts)`` makes a ``Server``: pools, layers and the plug's backend over them."""
    return load("server").Server


@pytest.fixture(scope="session")
def beside() -> Any:
    """``beside(name)`` loads a module that lies beside the tests."""
    return load
