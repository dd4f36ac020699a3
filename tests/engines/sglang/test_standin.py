"""The stand-in has the signatures that were recorded from SGLang."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest


@pytest.fixture(scope="module")
def standin(beside):
    made = beside("standin").modules()

    def find(path: str) -> Any:
        module, _, name = path.partition(":")
        found: Any = made[module]
        for part in filter(None, name.split(".")):
            found = getattr(found, part)
        return found

    return find


def test_parameters(standin, beside) -> None:
    for path, want in beside("recorded").PARAMETERS.items():
        got = list(inspect.signature(standin(path)).parameters)
        assert got[: len(want)] == list(want), path


def test_fields(standin, beside) -> None:
    for path, want in beside("recorded").FIELDS.items():
        assert [f.name for f in dataclasses.fields(standin(path))] == list(want), path


def test_names(standin, beside) -> None:
    for path, want in beside("recorded").NAMES.items():
        assert not [name for name in want if not hasattr(standin(path), name)], path
