"""One thread, a table that forgets, and backends that are slow or wrong on purpose."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from attn_backends.output import AttentionOutput
from attn_backends.registry import register_attention_backend
from attn_backends.registry.registry import TABLE
from attn_backends.torch_native.backend import TorchNativeBackend

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def register() -> Iterator[Callable[..., str]]:
    """Register a backend that sleeps, scales its output or its LSE, or raises."""
    TABLE.scan_plugins()
    before = dict(TABLE.entries)

    def make(
        name: str,
        *,
        sleep: float = 0.0,
        scale: float = 1.0,
        lse_scale: float = 1.0,
        error: str = "",
    ) -> str:
        class Toy(TorchNativeBackend):
            def _run(self, *args: Any) -> AttentionOutput:
                if error:
                    raise RuntimeError(error)
                out = super()._run(*args)
                time.sleep(sleep)
                return AttentionOutput(out.o * scale, out.lse * lse_scale)

        Toy.name = name
        register_attention_backend(name, Toy)
        return name

    yield make
    with TABLE.lock:
        TABLE.entries.clear()
        TABLE.entries.update(before)
        TABLE.generation += 1
