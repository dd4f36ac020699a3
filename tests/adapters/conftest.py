"""Stand-in libraries in place of the real ones, and adapters that may run on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from attn_backends.adapters import torch_varlen
from attn_backends.adapters.fa2 import FlashAttention2, VllmFlashAttention2
from attn_backends.adapters.fa3 import FlashAttention3, VllmFlashAttention3
from attn_backends.adapters.fa4 import FlashAttention4
from attn_backends.adapters.flash_attention import FlashAttentionBackend
from attn_backends.adapters.flashinfer import FlashInferBackend
from attn_backends.adapters.torch_varlen import TorchVarlenBackend
from attn_backends.packages import forget_probes

sys.path.insert(0, str(Path(__file__).parent))  # the stand-ins import each other by name

BUILDS = (
    FlashAttention2,
    VllmFlashAttention2,
    FlashAttention3,
    VllmFlashAttention3,
    FlashAttention4,
)
BACKENDS = (FlashAttentionBackend, FlashInferBackend, TorchVarlenBackend)


def _forget() -> None:
    forget_probes()
    torch_varlen.accepts.cache_clear()
    torch_varlen.heads_first.cache_clear()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Put modules where imports find them; None in place of a module makes its import fail."""
    hidden = ("flash_attn", "flash_attn_interface", "flash_attn_3", "flashinfer", "vllm")

    def put(**modules: ModuleType | None) -> None:
        for name in list(sys.modules):
            if name.split(".")[0] in hidden or name == "flash_attn_config":
                monkeypatch.delitem(sys.modules, name)
        for name in hidden:
            monkeypatch.setitem(sys.modules, name, None)
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        _forget()

    put()
    yield put
    monkeypatch.undo()
    _forget()


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the adapters of CUDA libraries run on the CPU, where their stand-ins do."""
    for owner in (*BUILDS, *BACKENDS):
        here = replace(
            owner.capabilities,
            devices=("cpu",),
            min_compute_capability=None,
            max_compute_capability=None,
        )
        monkeypatch.setattr(owner, "capabilities", here)


def options_of(backend: Any, **values: Any) -> Any:
    """A backend's options."""
    return backend.Options.model_validate(values)
