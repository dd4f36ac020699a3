"""Each adapter over the real library, on a GPU, by the conformance suite.

A library that is missing is skipped with the adapter's own reasons, and shows up as not run.
"""

from __future__ import annotations

import pytest
import torch

from attn_backends.adapters.flash_attention import FlashAttentionBackend
from attn_backends.adapters.flashinfer import FlashInferBackend
from attn_backends.adapters.torch_flex import TorchFlexBackend
from attn_backends.adapters.torch_sdpa import TorchSdpaBackend
from attn_backends.adapters.torch_varlen import TorchVarlenBackend
from attn_backends.conformance import run_conformance

TARGETS = {
    "fa2": (FlashAttentionBackend, {"version": "2", "source": "package"}),
    "fa2-vllm": (FlashAttentionBackend, {"version": "2", "source": "vllm"}),
    "fa3": (FlashAttentionBackend, {"version": "3", "source": "package"}),
    "fa3-vllm": (FlashAttentionBackend, {"version": "3", "source": "vllm"}),
    "fa4": (FlashAttentionBackend, {"version": "4"}),
    "flashinfer": (FlashInferBackend, {}),
    "flashinfer-fa2": (FlashInferBackend, {"kernel": "fa2"}),
    "torch_varlen": (TorchVarlenBackend, {}),
    "torch_flex": (TorchFlexBackend, {}),
    "torch_sdpa": (TorchSdpaBackend, {}),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", TARGETS)
def test_the_contract_holds_on_the_gpu(name: str) -> None:
    backend, values = TARGETS[name]
    options = backend.Options.model_validate(values)
    device = torch.device("cuda", torch.cuda.current_device())
    missing = backend.dependency_reasons(options)
    if missing:
        pytest.skip("not run: " + "; ".join(map(str, missing)))
    report = run_conformance(backend, device=device, options=options)
    failed = [f"{r.requirement}/{r.case}: {r.detail}" for r in report.rows if r.status == "failed"]
    assert not failed, "\n".join(failed)
    assert any(r.status == "passed" for r in report.rows)
