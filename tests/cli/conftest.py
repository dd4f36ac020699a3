"""Running the command line inside the process, with backends that vanish after the test."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs the extra [cli]")

from typer.testing import CliRunner

from attn_backends.cli.app import build_app
from attn_backends.registry.registry import TABLE


@dataclass
class Answer:
    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from threads, and lose much beside other test processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_fixed_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test runners set the width of a terminal that nobody looks at."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def cli() -> Callable[..., Answer]:
    app = build_app()

    def call(*arguments: str) -> Answer:
        result = CliRunner().invoke(app, list(arguments))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Answer(result.exit_code, result.stdout, result.stderr)

    return call


@pytest.fixture
def own_table() -> Iterator[None]:
    """Forget what a test registers."""
    TABLE.scan_plugins()
    before = dict(TABLE.entries)
    yield
    with TABLE.lock:
        TABLE.entries.clear()
        TABLE.entries.update(before)
        TABLE.generation += 1
