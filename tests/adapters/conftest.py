"""Stand-in libraries in place of the real ones, and adapters that may run on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from attn_backends.adapters import torch_sdpa, torch_varlen
from attn_backends.adapters.fa2 import FlashAttention2, VllmFlashAttention2
from attn_backends.adapters.fa3 import FlashAttention3, VllmFlashAttention3
from attn_backends.adapters.fa4 import FlashAttention4
from attn_backends.adapters.flash_attention import FlashAttentionBackend
from attn_backends.adapters.flashinfer import FlashInferBackend
from attn_backends.adapters.torch_sdpa import TorchSdpaBackend
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


@pytest.fixture
def sdpa_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``torch_sdpa`` choose on the CPU as on CUDA, among stand-ins of the operators there."""
    from standin_sdpa import OPERATORS

    on_cuda, without_bias = torch_sdpa._kernel, torch_sdpa._without_bias
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch_sdpa, "operator", OPERATORS.__getitem__)
    monkeypatch.setattr(torch_sdpa, "_kernel", lambda asked, _, *rest: on_cuda(asked, cuda, *rest))
    monkeypatch.setattr(torch_sdpa, "_without_bias", lambda asked, _: without_bias(asked, cuda))
    reasons = TorchSdpaBackend.unsupported_reasons.__func__

    def elsewhere(cls: Any, spec: Any, phase: Any = None, device: Any = None, options: Any = None):
        return reasons(cls, spec, phase, None, options)

    monkeypatch.setattr(TorchSdpaBackend, "unsupported_reasons", classmethod(elsewhere))


def options_of(backend: Any, **values: Any) -> Any:
    """A backend's options."""
    return backend.Options.model_validate(values)
