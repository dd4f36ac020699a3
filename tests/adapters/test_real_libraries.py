"""Each adapter over the real library, on a GPU, by the conformance suite.

A library that is missing is skipped with the adapter's own reasons, and shows up as not run.
"""

from __future__ import annotations

import pytest
import torch
from support import make_call, reference, run

from attn_backends.adapters.flash_attention import FlashAttentionBackend
from attn_backends.adapters.flashinfer import FlashInferBackend
from attn_backends.adapters.torch_flex import TorchFlexBackend
from attn_backends.adapters.torch_sdpa import TorchSdpaBackend
from attn_backends.adapters.torch_varlen import TorchVarlenBackend
from attn_backends.batch import Batch
from attn_backends.conformance import run_conformance
from attn_backends.spec import AttentionSpec

TARGETS = {
    "fa2": (FlashAttentionBackend, {"version": "2", "source": "package"}),
    "fa2-vllm": (FlashAttentionBackend, {"version": "2", "source": "vllm"}),
    "fa3": (FlashAttentionBackend, {"version": "3", "source": "package"}),
    "fa3-vllm": (FlashAttentionBackend, {"version": "3", "source": "vllm"}),
    "fa4": (FlashAttentionBackend, {"version": "4"}),
    "flashinfer": (FlashInferBackend, {}),
    "flashinfer-fa2": (FlashInferBackend, {"kernel": "fa2"}),
    "torch_varlen": (TorchVarlenBackend, {}),
    "torch_flex": (TorchFlexBackend, {"compile": "never"}),
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


COMPILED = {
    "causal": {},
    "window-softcap": dict(window=(40, None), softcap=20.0),
    "alibi": dict(has_alibi=True),
    "wide-values": dict(head_dim=192, head_dim_v=128),
}


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("feature", COMPILED)
def test_compiled_flex_equals_the_reference(feature: str) -> None:
    fields = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, **COMPILED[feature]}
    spec = AttentionSpec(page_size=16, **fields)
    call = make_call(spec, [300, 1, 17], [300, 515, 40])
    want = reference(call)
    batch = call.batch
    cuda = Batch.from_lengths(
        batch.q_lens, batch.kv_lens, page_table=batch.page_table, device="cuda"
    )
    kwargs = {name: x.cuda() for name, x in call.kwargs.items()}
    here = call._replace(
        batch=cuda, q=call.q.cuda(), k=call.k.cuda(), v=call.v.cuda(), kwargs=kwargs
    )
    options = TorchFlexBackend.Options(compile="always")
    got = run(TorchFlexBackend(spec, device="cuda", options=options), here)
    o, lse = got.o.cpu().float(), got.lse.cpu()
    assert bool(((o - want.o.float()).abs() <= 0.02 * want.o.float().abs().amax()).all())
    assert bool(((lse - want.lse).abs() <= 1e-3).all())
