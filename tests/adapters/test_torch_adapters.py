"""What PyTorch ships: varlen by release, SDPA and FlexAttention on the CPU."""

from __future__ import annotations

import importlib
import threading
import warnings
from functools import wraps
from typing import Any

import pytest
import torch
from standin_varlen import varlen
from support import assert_close, make_call, reference, run

from attn_backends.adapters import torch_flex, torch_sdpa
from attn_backends.adapters.torch_flex import TorchFlexBackend, TorchFlexPlan, score_mod
from attn_backends.adapters.torch_sdpa import TorchSdpaBackend
from attn_backends.adapters.torch_varlen import TorchVarlenBackend
from attn_backends.backend import RunExtras
from attn_backends.conformance import run_conformance
from attn_backends.errors import UnsupportedCallError
from attn_backends.spec import AttentionSpec

NAME = "torch.nn.attention.varlen"


def spec(**fields: Any) -> AttentionSpec:
    base = dict(num_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float16)
    return AttentionSpec(**{**base, **fields})


def varlen_on_cpu(fields: AttentionSpec) -> TorchVarlenBackend:
    return TorchVarlenBackend(fields, device="cpu")


@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize("tokens", [4, 7])
def test_varlen_returns_tokens_by_heads_whatever_the_operator_does(
    heads_first, tokens, install, on_cpu
) -> None:
    install(**{NAME: varlen("2.13", heads_first=heads_first)})
    call = make_call(spec(), [tokens], [9])  # T == H in one of the two
    assert_close(run(varlen_on_cpu(call.spec), call), reference(call))


@pytest.mark.parametrize("release", ["2.10", "2.11", "2.13"])
@pytest.mark.parametrize("host", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_varlen_works_in_every_release(release, host, causal, install, on_cpu) -> None:
    install(**{NAME: varlen(release)})
    call = make_call(spec(causal=causal), [5, 1, 0, 1], [2, 9, 3, 0], host=host, room=2)
    assert_close(run(varlen_on_cpu(call.spec), call), reference(call))


def test_varlen_refuses_what_its_release_lacks(install, on_cpu) -> None:
    install(**{NAME: varlen("2.10")})
    with pytest.raises(UnsupportedCallError, match=r"window=.*2\.11 has"):
        varlen_on_cpu(spec(window=(3, None)))
    install(**{NAME: varlen("2.11")})
    with pytest.raises(UnsupportedCallError, match=r"page_size=256 .*2\.12 has"):
        varlen_on_cpu(spec(page_size=256))


def test_varlen_avoids_the_form_for_one_query_each(install, on_cpu) -> None:
    module = varlen("2.13")
    install(**{NAME: module})
    run(varlen_on_cpu(spec()), make_call(spec(), [1, 1], [3, 5]))
    assert module.calls[0][0] == 2


def test_sdpa_keeps_the_contract_on_the_cpu() -> None:
    report = run_conformance(TorchSdpaBackend)
    failed = [f"{r.requirement}/{r.case}: {r.detail}" for r in report.rows if r.status == "failed"]
    assert not failed, "\n".join(failed)
    assert sum(r.status == "passed" for r in report.rows) > 200


FLEX = ("lengths", "windows", "empty_rows", "poison")


def test_flex_keeps_the_core_of_the_contract_on_the_cpu() -> None:
    report = run_conformance(TorchFlexBackend, requirements=FLEX)
    failed = [f"{r.requirement}/{r.case}: {r.detail}" for r in report.rows if r.status == "failed"]
    assert not failed, "\n".join(failed)


def test_flex_is_not_advised_to_compile_what_is_not_compiled_by_choice(monkeypatch) -> None:
    library = importlib.import_module("torch.nn.attention.flex_attention")
    monkeypatch.setattr(library, "_WARNINGS_SHOWN", set())
    monkeypatch.setattr(torch_flex, "_advised", threading.Event())
    call = make_call(spec(dtype=torch.float32), [3], [9])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        run(TorchFlexBackend(call.spec, device="cpu"), call)
        assert not warned
        assert library._WARNINGS_SHOWN  # it did try


FEATURES = {
    "window-softcap-alibi": dict(window=(3, None), softcap=2.0, has_alibi=True),
    "right-window": dict(causal=False, window=(1, 2)),
    "scale-zero": dict(sm_scale=0.0),
    "dims": dict(head_dim=24, head_dim_v=40),
    "fp8": dict(kv_dtype=torch.float8_e4m3fn),
    "mask": dict(has_mask=True, window=(4, None)),
    "group-3": dict(num_heads=3, num_kv_heads=1),
}


@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("backend", [TorchFlexBackend, TorchSdpaBackend])
def test_features_together_equal_the_reference(backend, feature, page_size) -> None:
    q_lens, kv_lens, more = [5, 0, 2, 1], [3, 4, 9, 0], {}
    if feature == "mask":
        count = sum(q * kv for q, kv in zip(q_lens, kv_lens))
        more["mask"] = torch.rand(count, generator=torch.Generator().manual_seed(3)) > 0.5
        more["mask"][-9:] = False  # a row whose mask hides every key
    if feature == "fp8":
        more = {"k_scale": torch.tensor([0.5, 1.5]), "v_scale": 2.0}
    fields = spec(dtype=torch.float32, page_size=page_size, **FEATURES[feature])
    if backend.unsupported_reasons(fields, device=torch.device("cpu")):
        with pytest.raises(UnsupportedCallError):
            backend(fields, device="cpu")
        return
    call = make_call(fields, q_lens, kv_lens, **more)
    assert_close(run(backend(fields, device="cpu"), call), reference(call))


def test_lengths_that_only_the_device_knows_give_the_same() -> None:
    for backend in (TorchFlexBackend, TorchSdpaBackend):
        call = make_call(spec(page_size=4), [3, 0, 1], [9, 4, 0], host=False)
        assert_close(run(backend(call.spec, device="cpu"), call), reference(call))


def test_sdpa_says_what_a_kernel_cannot_do() -> None:
    cuda = torch.device("cuda")
    flash = TorchSdpaBackend.Options(kernel="flash")
    reasons = TorchSdpaBackend.extra_reasons(spec(has_mask=True), None, cuda, flash)
    assert {r.argument for r in reasons} == {"has_mask"}
    efficient = TorchSdpaBackend.Options(kernel="efficient")
    with pytest.raises(UnsupportedCallError, match="kernel=efficient"):
        TorchSdpaBackend(spec(), device="cpu", options=efficient)


@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize("kernel", ["flash", "cudnn"])
def test_kernels_without_a_mask_are_causal_by_their_corner_or_by_merging(
    kernel: str, page_size: int | None, sdpa_of_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, bool]] = []
    function = torch_sdpa.operator(kernel)

    def watched(q, k, v, **named):
        seen.append((k.shape[2], named["is_causal"]))
        return function(q, k, v, **named)

    monkeypatch.setattr(torch_sdpa, "operator", lambda name: watched)
    fields = spec(dtype=torch.float16, page_size=page_size)
    call = make_call(fields, [5, 0, 3, 1, 3, 6], [3, 4, 9, 7, 9, 6])
    options = TorchSdpaBackend.Options(kernel=kernel)
    bound = TorchSdpaBackend(fields, device="cpu", options=options)
    assert_close(run(bound, call), reference(call))
    squares = [(3, True), (6, True), (7, False)]  # 7 keys of one query: none is hidden
    more = [(9, True)] if kernel == "flash" else [(3, True), (6, False)]
    assert sorted(seen) == sorted(squares + more)


def test_a_device_that_only_the_batch_names_is_checked() -> None:
    always = TorchFlexBackend.Options(compile="always")
    call = make_call(spec(), [1], [4])
    with pytest.raises(UnsupportedCallError, match="compile=always"):
        TorchFlexBackend(call.spec, options=always).plan(call.batch)
    if not TorchVarlenBackend.dependency_reasons():
        with pytest.raises(UnsupportedCallError, match="device=cpu"):
            TorchVarlenBackend(call.spec).plan(call.batch)


@pytest.mark.parametrize("page_size", [None, 4])
def test_later_layers_call_what_was_compiled_for_the_first(
    page_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    module = torch_flex.flex_module()

    def named(name: str) -> Any:
        function = getattr(module, name)

        def inner(*args: Any, **kwargs: Any) -> Any:
            calls.append("inner")
            assert not torch.is_grad_enabled()
            with torch_flex.without_advice():
                return function(*args, **kwargs)

        @wraps(inner)
        def outer(*args: Any, **kwargs: Any) -> Any:
            calls.append("outer")
            return inner(*args, **kwargs)

        return outer

    monkeypatch.setattr(torch_flex, "compiled", named)
    monkeypatch.setattr(torch_flex, "_compiles", lambda options, device: True)
    monkeypatch.setattr(TorchFlexBackend, "extra_reasons", classmethod(lambda *_: []))
    fields = spec(dtype=torch.float32, page_size=page_size)
    backend = TorchFlexBackend(fields, device="cpu")
    plan = None
    for seed in range(3):
        call = make_call(fields, [3, 3], [9, 9], seed=seed)
        plan = backend.plan(call.batch) if plan is None or page_size else plan
        for _ in range(2):
            assert_close(run(backend, call, plan), reference(call))
    first, later = ["outer", "inner"], ["inner"]
    assert calls == (first + later) * 3 if page_size else first + later * 5


@pytest.mark.parametrize("fields", [{"softcap": 20.0}, {"softcap": 20.0, "has_alibi": True}])
def test_modified_scores_hold_no_floats_which_the_compiler_could_not_place(
    fields: dict[str, Any],
) -> None:
    layer = spec(dtype=torch.float32, **fields)
    call = make_call(layer, [3, 2], [5, 2])
    plan = TorchFlexBackend(layer, device="cpu").plan(call.batch)
    assert isinstance(plan, TorchFlexPlan) and plan.padded is not None
    extras = RunExtras(None, call.kwargs.get("alibi_slopes"), None, 2.0, None)
    mod = score_mod(layer, plan.padded, extras)
    held = [cell.cell_contents for cell in mod.__closure__ or ()]
    assert any(isinstance(x, torch.Tensor) for x in held)
    assert not any(isinstance(x, float) for x in held)


def test_flex_keeps_float64_where_slopes_meet_distances() -> None:
    layer = spec(dtype=torch.float64, has_alibi=True)
    call = make_call(layer, [3, 300], [300, 300])
    got = run(TorchFlexBackend(layer, device="cpu"), call)
    assert float((got.o - reference(call).o).abs().max()) < 1e-12
