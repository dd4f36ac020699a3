"""Each adapter over the real library, on a GPU, by the conformance suite.

A library that is missing is skipped with the adapter's own reasons, and shows up as not run.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from support import make_call, on_device_only, reference, run

from attn_backends.adapters import torch_varlen
from attn_backends.adapters.flash_attention import FlashAttentionBackend
from attn_backends.adapters.flashinfer import FlashInferBackend
from attn_backends.adapters.torch_flex import TorchFlexBackend
from attn_backends.adapters.torch_sdpa import TorchSdpaBackend
from attn_backends.adapters.torch_varlen import TorchVarlenBackend
from attn_backends.backend import RunExtras
from attn_backends.batch import Batch
from attn_backends.conformance import run_conformance
from attn_backends.errors import InvalidInputError
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
    "torch_sdpa-flash": (TorchSdpaBackend, {"kernel": "flash"}),
    "torch_sdpa-cudnn": (TorchSdpaBackend, {"kernel": "cudnn"}),
    "torch_sdpa-efficient": (TorchSdpaBackend, {"kernel": "efficient"}),
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


#: Page size, and how often a plan waits for the device that has no lengths on the host.
WAITS = {
    "fa2": (256, 2),
    "fa2-vllm": (16, 2),
    "fa3": (16, 0),
    "fa3-vllm": (16, 0),
    "fa4": (16, 0),
    "flashinfer": (16, 2),
    "flashinfer-fa2": (16, 2),
    "torch_varlen": (None, 0),
}


@contextmanager
def counted_waits() -> Iterator[list[str]]:
    """What PyTorch reports of waits for the device."""
    waits: list[str] = []
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield waits
            waits += [str(w.message) for w in caught if "synchroniz" in str(w.message)]
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.gpu
@pytest.mark.parametrize("name", WAITS)
def test_a_library_is_waited_for_as_often_as_its_adapter_says(name: str) -> None:
    backend, values = TARGETS[name]
    options = backend.Options.model_validate(values)
    missing = backend.dependency_reasons(options)
    if missing:
        pytest.skip("not run: " + "; ".join(map(str, missing)))
    page_size, waits_without = WAITS[name]
    spec = AttentionSpec(8, 2, 64, page_size=page_size)
    call = make_call(spec, [3, 1, 2], [20, 9, 33])
    q, k, v = (x.cuda() for x in (call.q, call.k, call.v))
    batch = Batch.from_lengths(
        [3, 1, 2], [20, 9, 33], page_table=call.batch.page_table, device="cuda"
    )
    bound = backend(spec, device="cuda", options=options)
    for lengths, wanted in ((batch, 0), (on_device_only(batch), waits_without)):
        for last in (False, True):  # compiling, and asking for a workspace, may wait
            with counted_waits() as planning:
                plan = bound.plan(lengths)
            with counted_waits() as running:
                bound.run(q, k, v, plan)
            if last:
                assert len(planning) == wanted, planning
                assert not running


#: Page size, and whether layers after the first go straight to the library where lengths differ.
LAYERS = {
    **{name: (size, True) for name, (size, _) in WAITS.items()},
    "torch_sdpa": (16, False),
    "torch_sdpa-efficient": (16, False),
    "torch_sdpa-flash": (16, False),
    "torch_sdpa-cudnn": (16, False),
    "torch_flex": (16, False),
}
STEPS = {
    "decode": ([1, 1, 1], [64, 64, 64]),
    "square": ([17, 17], [17, 17]),
    "extend": ([5, 5], [48, 48]),
    "mixed": ([5, 3, 1], [9, 17, 4]),
}


@pytest.mark.gpu
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_after_the_first_are_right(name: str, paged: bool, steps: str) -> None:
    backend, values = TARGETS[name]
    options = backend.Options.model_validate(values)
    page_size, always = LAYERS[name]
    missing = backend.dependency_reasons(options)
    if missing:
        pytest.skip("not run: " + "; ".join(map(str, missing)))
    if paged and page_size is None:
        pytest.skip("this release has no pages")
    spec = AttentionSpec(8, 2, 64, page_size=page_size if paged else None)
    bound = backend(spec, device="cuda", options=options)
    q_lens, kv_lens = STEPS[steps]
    call = make_call(spec, q_lens, kv_lens)
    batch = Batch.from_lengths(q_lens, kv_lens, page_table=call.batch.page_table, device="cuda")
    plan = bound.plan(batch)
    rng = torch.Generator().manual_seed(1)
    for number in range(4):
        layer = call._replace(
            **{n: torch.randn(getattr(call, n).shape, generator=rng).bfloat16() for n in "qkv"}
        )
        want = reference(layer)
        got = bound.run(layer.q.cuda(), layer.k.cuda(), layer.v.cuda(), plan)
        twice = name == "torch_sdpa-cudnn" and steps == "extend"
        if number and not twice and (always or steps != "mixed"):
            assert plan.repeat is not None
        # Weights and outputs are rounded to bfloat16, and in FlashInfer the sum of a row too.
        step = 2.0**-8
        size = want.o.float().abs().amax().clamp_min(1.0)
        assert bool(((got.o.cpu().float() - want.o.float()).abs() <= 2 * step * size).all())
        assert bool(((got.lse.cpu() - want.lse).abs() <= step).all())


@pytest.mark.gpu
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("name", ["fa2", "fa2-vllm", "fa3", "fa3-vllm", "fa4", "torch_varlen"])
def test_layers_after_the_first_call_an_operator_and_get_the_same_bits(
    name: str, paged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, values = TARGETS[name]
    options = backend.Options.model_validate(values)
    missing = backend.dependency_reasons(options)
    if missing:
        pytest.skip("not run: " + "; ".join(map(str, missing)))
    spec = AttentionSpec(8, 2, 64, page_size=WAITS[name][0] if paged else None)
    if paged and spec.page_size is None:
        pytest.skip("this release has no pages")
    call = make_call(spec, [17, 5], [40, 33])
    batch = Batch.from_lengths([17, 5], [40, 33], page_table=call.batch.page_table, device="cuda")
    bound = backend(spec, device="cuda", options=options)
    plan = bound.plan(batch)
    q, k, v = call.q.cuda(), call.k.cuda(), call.v.cuda()
    first = bound.run(q, k, v, plan)
    if name == "torch_varlen":
        monkeypatch.setattr(torch_varlen._module(), "varlen_attn", None)
    else:  # whatever the repeat calls, it is none of the public functions
        for function in ("flash_attn_varlen_func", "flash_attn_with_kvcache"):
            monkeypatch.setattr(bound.build.module, function, None, raising=False)
        assert plan.call.beneath(RunExtras(None, None, None, None, None)) is not None
    again = bound.run(q, k, v, plan)
    assert plan.repeat is not None
    assert torch.equal(first.o, again.o) and torch.equal(first.lse, again.lse)


@pytest.mark.gpu
def test_flashinfer_s_own_complaint_about_its_workspace_names_the_option() -> None:
    options = FlashInferBackend.Options(workspace_mb=1)
    missing = FlashInferBackend.dependency_reasons(options)
    if missing:
        pytest.skip("not run: " + "; ".join(map(str, missing)))
    spec = AttentionSpec(32, 8, 128, page_size=16)
    table = torch.arange(8 * 512, dtype=torch.int32).view(8, 512)
    batch = Batch.from_lengths([1] * 8, [8192] * 8, page_table=table, device="cuda")
    with pytest.raises(InvalidInputError, match="workspace_mb=1"):
        FlashInferBackend(spec, device="cuda", options=options).plan(batch)


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
