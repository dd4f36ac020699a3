"""A registry that forgets, and backends to put into it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_backends import AttentionSpec, configure, environment, register_attention_backend
from attn_backends.config import PROCESS
from attn_backends.errors import Reason
from attn_backends.packages import forget_probes
from attn_backends.registry import selection
from attn_backends.registry.registry import TABLE
from attn_backends.torch_native.backend import TorchNativeBackend


@pytest.fixture(autouse=True)
def isolated() -> Iterator[None]:
    """Begin with the reference alone, and undo what a test does to the state of the process."""
    entries, rejected, scanned = dict(TABLE.entries), list(TABLE.rejected), TABLE.scanned
    for name in set(TABLE.entries) - {"torch_native"}:
        del TABLE.entries[name]
    TABLE.scanned, TABLE.rejected = True, []
    TABLE.generation += 1
    before = configure(None)
    PROCESS.environment = None
    selection._logged.clear()
    environment._warned.clear()
    forget_probes()
    yield
    TABLE.entries.clear()
    TABLE.entries.update(entries)
    TABLE.rejected[:] = rejected
    TABLE.scanned = scanned
    TABLE.generation += 1
    configure(before)
    forget_probes()


@pytest.fixture
def spec() -> AttentionSpec:
    return AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)


@pytest.fixture
def register() -> Callable[..., type[TorchNativeBackend]]:
    """Register a working backend; keywords narrow its capabilities or add reasons."""

    def make(
        name: str, *, missing: tuple[Reason, ...] = (), override: bool = False, **declared: Any
    ) -> type[TorchNativeBackend]:
        class Toy(TorchNativeBackend):
            """A toy for tests."""

            capabilities = replace(TorchNativeBackend.capabilities, **declared)

            @classmethod
            def dependency_reasons(cls, options: Any = None) -> list[Reason]:
                return list(missing)

        Toy.name = name
        Toy.__qualname__ = f"Toy_{name}"
        return register_attention_backend(name, Toy, override=override)

    return make
