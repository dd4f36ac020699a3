"""Each adapter, over a stand-in of its library, keeps the whole contract.

The stand-ins have the libraries' signatures, LSE conventions and traps; the real libraries are
checked on a GPU, by ``test_real_libraries.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
from standin_flash import flash_attn_2, flash_attn_3, flash_attn_4, vllm
from standin_flashinfer import flashinfer
from standin_varlen import varlen

from attn_backends.adapters.flash_attention import FlashAttentionBackend
from attn_backends.adapters.flashinfer import FlashInferBackend
from attn_backends.adapters.torch_sdpa import TorchSdpaBackend
from attn_backends.adapters.torch_varlen import TorchVarlenBackend
from attn_backends.conformance import run_conformance

NAME = "torch.nn.attention.varlen"


def libraries() -> dict[str, tuple[Any, dict[str, Any], dict[str, Any]]]:
    """Backend, modules and options by name."""
    fa3, config = flash_attn_3()
    both = {"flash_attn_interface": fa3, "flash_attn_config": config}
    plain = {"flash_attn": flash_attn_2()}
    dsl = {"flash_attn": flash_attn_2(), "flash_attn.cute": flash_attn_4()}
    old, new = flashinfer("0.6.8.post1"), flashinfer("0.7.4")
    return {
        "fa2": (FlashAttentionBackend, plain, {"version": "2"}),
        "fa2-vllm": (FlashAttentionBackend, vllm(), {"version": "2"}),
        "fa3": (FlashAttentionBackend, both, {"version": "3"}),
        "fa3-vllm": (FlashAttentionBackend, vllm(), {"version": "3"}),
        "fa4": (FlashAttentionBackend, dsl, {"version": "4"}),
        "flashinfer-0.6": (FlashInferBackend, old, {}),
        "flashinfer-0.7": (FlashInferBackend, new, {}),
        "varlen-2.11": (TorchVarlenBackend, {NAME: varlen("2.11")}, {}),
        "varlen-2.13": (TorchVarlenBackend, {NAME: varlen("2.13")}, {}),
    }


@pytest.mark.parametrize("name", libraries())
def test_the_contract_holds(name: str, install: Any, on_cpu: None) -> None:
    backend, modules, options = libraries()[name]
    install(**modules)
    report = run_conformance(backend, options=backend.Options.model_validate(options))
    failed = [f"{r.requirement}/{r.case}: {r.detail}" for r in report.rows if r.status == "failed"]
    assert not failed, "\n".join(failed)
    assert sum(r.status == "passed" for r in report.rows) > 120


@pytest.mark.parametrize("kernel", ["auto", "flash", "efficient", "cudnn"])
def test_the_contract_holds_over_the_operators_for_cuda(kernel: str, sdpa_of_cuda: None) -> None:
    options = TorchSdpaBackend.Options(kernel=kernel)
    report = run_conformance(TorchSdpaBackend, options=options)
    failed = [f"{r.requirement}/{r.case}: {r.detail}" for r in report.rows if r.status == "failed"]
    assert not failed, "\n".join(failed)
    assert sum(r.status == "passed" for r in report.rows) > 120
