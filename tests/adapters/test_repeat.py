"""Layers of a step: after the first run a call is recognised and goes straight to the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from standin_flash import flash_attn_2, flash_attn_3, flash_attn_4, vllm
from standin_flashinfer import flashinfer
from standin_varlen import varlen
from support import Call, assert_close, make_call, reference, run

from attn_backends import backend as backend_module
from attn_backends.adapters.flash_attention import FlashAttentionBackend
from attn_backends.adapters.flashinfer import FlashInferBackend
from attn_backends.adapters.torch_flex import TorchFlexBackend
from attn_backends.adapters.torch_sdpa import TorchSdpaBackend
from attn_backends.adapters.torch_varlen import TorchVarlenBackend
from attn_backends.errors import InvalidInputError
from attn_backends.output import AttentionOutput
from attn_backends.spec import AttentionSpec


def flash(spec: AttentionSpec, **options: Any) -> FlashAttentionBackend:
    chosen = FlashAttentionBackend.Options.model_validate(options)
    return FlashAttentionBackend(spec, device="cpu", options=chosen)


def infer(spec: AttentionSpec) -> FlashInferBackend:
    return FlashInferBackend(spec, device="cpu", options=FlashInferBackend.Options(workspace_mb=1))


def modules_3() -> dict[str, Any]:
    module, config = flash_attn_3()
    return {"flash_attn_interface": module, "flash_attn_config": config}


#: Modules, what binds, page size; every way in which a plan calls its library.
WAYS: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[AttentionSpec], Any], int | None]] = {
    "fa2-ragged": (lambda: {"flash_attn": flash_attn_2()}, lambda s: flash(s, version="2"), None),
    "fa2-paged": (lambda: {"flash_attn": flash_attn_2()}, lambda s: flash(s, version="2"), 256),
    "fa2-vllm": (vllm, lambda s: flash(s, version="2", source="vllm"), 16),
    "fa3-ragged": (modules_3, lambda s: flash(s, version="3"), None),
    "fa3-paged": (modules_3, lambda s: flash(s, version="3"), 16),
    "fa3-vllm": (vllm, lambda s: flash(s, version="3", source="vllm"), 16),
    "fa4-paged": (
        lambda: {"flash_attn.cute": flash_attn_4()}, lambda s: flash(s, version="4"), 16,
    ),
    "flashinfer-ragged": (flashinfer, infer, None),
    "flashinfer-paged": (flashinfer, infer, 16),
    "torch-varlen": (
        lambda: {"torch.nn.attention.varlen": varlen("2.13")},
        lambda s: TorchVarlenBackend(s, device="cpu"), None,
    ),
}  # fmt: skip
LENGTHS = {"decode": ([1, 1, 1], [5, 40, 33]), "mixed": ([5, 3, 1], [9, 17, 4])}


def spec(**fields: Any) -> AttentionSpec:
    base = dict(num_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float16)
    return AttentionSpec(**{**base, **fields})


@pytest.fixture
def bound(install: Any, on_cpu: None) -> Callable[..., Any]:
    def bind(way: str, **fields: Any) -> Any:
        modules, make, page_size = WAYS[way]
        install(**modules())
        return make(spec(page_size=page_size, **fields))

    return bind


def layer(call: Call, seed: int) -> Call:
    """The same step with other tensors."""
    rng = torch.Generator().manual_seed(seed)

    def other(x: torch.Tensor) -> torch.Tensor:
        return torch.randn(x.shape, generator=rng).to(x.dtype)

    return call._replace(q=other(call.q), k=other(call.k), v=other(call.v))


@pytest.mark.parametrize("given", [False, True], ids=["fresh", "out"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("way", WAYS)
def test_later_layers_are_not_checked_again_and_are_right(
    way: str, lengths: str, given: bool, bound: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = bound(way)
    call = make_call(backend.spec, *LENGTHS[lengths])
    plan = backend.plan(call.batch)

    def attend(call: Call) -> AttentionOutput:
        if not given:
            return run(backend, call, plan)
        o = torch.full((*call.q.shape[:2], backend.spec.dv), float("nan"), dtype=torch.float16)
        out = (o, torch.full(o.shape[:2], float("nan")))
        got = backend.run(call.q, call.k, call.v, plan, out=out)
        assert got.o is o and got.lse is out[1]
        return got

    assert_close(attend(call), reference(call))
    layers = [layer(call, seed) for seed in (1, 2)]
    wanted = [reference(other) for other in layers]
    monkeypatch.setattr(backend_module, "check_qkv", None)
    monkeypatch.setattr(backend_module, "check_extras", None)  # calling either would raise
    for other, want in zip(layers, wanted):
        assert_close(attend(other), want)


#: Lengths under which kernels for equal lengths have no copies to make but of pages and LSE.
EQUAL = {
    "decode": ([1, 1, 1], [40, 40, 40]), "square": ([9, 9], [9, 9]), "extend": ([5, 5], [20, 20]),
    "alone": ([7], [33]),
}  # fmt: skip
SIDE_BY_SIDE: dict[str, Callable[[AttentionSpec], Any]] = {
    **{
        kernel: lambda s, kernel=kernel: TorchSdpaBackend(
            s, device="cpu", options=TorchSdpaBackend.Options(kernel=kernel)
        )
        for kernel in ("auto", "efficient", "cudnn")
    },
    "flex": lambda s: TorchFlexBackend(s, device="cpu"),
}  # fmt: skip


@pytest.mark.parametrize("given", [False, True], ids=["fresh", "out"])
@pytest.mark.parametrize("lengths", EQUAL)
@pytest.mark.parametrize("page_size", [None, 16, 512])
@pytest.mark.parametrize("way", SIDE_BY_SIDE)
def test_later_layers_of_equal_lengths_go_straight_to_the_kernel(
    way: str, page_size: int | None, lengths: str, given: bool,
    sdpa_of_cuda: None, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    backend = SIDE_BY_SIDE[way](spec(page_size=page_size))
    call = make_call(backend.spec, *EQUAL[lengths])
    plan = backend.plan(call.batch)
    checks = [backend_module.check_qkv]

    def attend(call: Call) -> AttentionOutput:
        out = None
        if given:
            o = torch.full((*call.q.shape[:2], backend.spec.dv), float("nan"), dtype=torch.float16)
            out = (o, torch.full(o.shape[:2], float("nan")))
        got = backend.run(call.q, call.k, call.v, plan, out=out)
        assert out is None or (got.o is out[0] and got.lse is out[1])
        return got

    assert_close(attend(call), reference(call))
    straight = plan.repeat is not None
    # cuDNN has two calls to make where causality is not square, and few keys of a large page are
    # gathered by themselves.
    twice = way == "cudnn" and lengths in ("extend", "alone")
    assert straight == (not twice and page_size != 512)
    layers = [layer(call, seed) for seed in (1, 2)]
    wanted = [reference(other) for other in layers]
    monkeypatch.setattr(backend_module, "check_qkv", None if straight else checks[0])
    for other, want in zip(layers, wanted):
        assert_close(attend(other), want)


@pytest.mark.parametrize("way", SIDE_BY_SIDE)
@pytest.mark.parametrize("page_size", [None, 16])
def test_views_that_start_between_multiples_of_16_bytes_are_copied(
    way: str, page_size: int | None, sdpa_of_cuda: None
) -> None:
    backend = SIDE_BY_SIDE[way](spec(page_size=page_size))
    call = make_call(backend.spec, *EQUAL["square"])
    plan = backend.plan(call.batch)

    def odd(x: torch.Tensor) -> torch.Tensor:
        room = torch.zeros(*x.shape[:-1], x.shape[-1] + 3, dtype=x.dtype)
        room[..., 2:-1] = x
        return room[..., 2:-1]

    for _ in range(2):
        ours = call._replace(q=odd(call.q), k=odd(call.k), v=odd(call.v))
        assert_close(run(backend, ours, plan), reference(call))
        assert_close(run(backend, call, plan), reference(call))


@pytest.mark.parametrize("way", WAYS)
def test_whatever_is_laid_out_otherwise_takes_the_ordinary_way(way: str, bound: Any) -> None:
    backend = bound(way)
    call = make_call(backend.spec, *LENGTHS["mixed"])
    plan = backend.plan(call.batch)
    run(backend, call, plan)
    odd = torch.empty(call.q.numel() + 1, dtype=call.q.dtype)[1:].view(call.q.shape)
    odd.copy_(call.q)  # rows at no multiple of 16 bytes
    wide = torch.zeros(*call.q.shape[:2], 2 * call.q.shape[2], dtype=call.q.dtype)
    wide[..., : call.q.shape[2]] = call.q
    for q in (odd, wide[..., : call.q.shape[2]]):
        assert_close(run(backend, call._replace(q=q), plan), reference(call))
        assert_close(run(backend, layer(call, 3), plan), reference(layer(call, 3)))


@pytest.mark.parametrize("way", WAYS)
def test_bad_input_is_named_as_on_the_first_run(way: str, bound: Any) -> None:
    backend = bound(way)
    call = make_call(backend.spec, *LENGTHS["mixed"])
    plan = backend.plan(call.batch)
    run(backend, call, plan)
    q, k, v = call.q, call.k, call.v
    sinks = torch.zeros(3)
    for field, bad, more in (
        ("q.dtype", (q.bfloat16(), k, v), {}),
        ("q.shape", (q[1:], k, v), {}),
        ("q", (None, k, v), {}),
        ("v", (q, k, v[..., :32]), {}),
        ("requires_grad", (q.clone().requires_grad_(), k, v), {}),
        ("sinks.shape", (q, k, v), {"sinks": sinks}),
        ("out.o", (q, k, v), {"out": (q[1:], sinks)}),
    ):
        with torch.enable_grad(), pytest.raises(InvalidInputError, match=field):
            backend.run(*bad, plan, **more)
    assert_close(run(backend, call, plan), reference(call))


@pytest.mark.parametrize("way", ["fa2-paged", "fa3-ragged", "flashinfer-paged", "torch-varlen"])
def test_rows_without_keys_and_a_scale_of_zero_are_never_left_to_the_library(
    way: str, bound: Any
) -> None:
    backend = bound(way)
    call = make_call(backend.spec, [2, 1, 4], [3, 0, 2])
    plan = backend.plan(call.batch)
    for seed in range(3):
        other = layer(call, seed)
        assert_close(run(backend, other, plan), reference(other))
    assert plan.repeat is None
    flat = bound(way, sm_scale=0.0)
    call = make_call(flat.spec, *LENGTHS["decode"])
    plan = flat.plan(call.batch)
    for _ in range(2):
        assert_close(run(flat, call, plan), reference(call))
    assert plan.repeat is None


def test_options_of_a_run_are_not_lost_on_later_layers(bound: Any) -> None:
    backend = bound("fa2-paged", has_alibi=True)
    call = make_call(backend.spec, *LENGTHS["mixed"])
    plan = backend.plan(call.batch)
    for seed in range(3):
        other = layer(call, seed)
        assert_close(run(backend, other, plan), reference(other))
    backend = bound("fa3-paged")
    call = make_call(backend.spec, *LENGTHS["mixed"])
    plan = backend.plan(call.batch)
    run(backend, call, plan)
    with_sinks = call._replace(kwargs={"sinks": torch.arange(4.0)})
    assert_close(run(backend, with_sinks, plan), reference(with_sinks))


@pytest.mark.parametrize("way", ["fa2-paged", "fa2-ragged", "fa3-paged", "flashinfer-paged"])
def test_layers_with_slopes_or_scales_of_their_own_are_not_checked_again(
    way: str, bound: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    slopes = way.startswith("fa2")
    fp8 = dict(kv_dtype=torch.float8_e4m3fn)
    if way.startswith("fa3"):
        fp8 = dict(dtype=torch.float8_e4m3fn)
    backend = bound(way, **(dict(has_alibi=True) if slopes else fp8))
    call = make_call(backend.spec, *LENGTHS["mixed"])
    plan = backend.plan(call.batch)
    layers = []
    for seed in range(3):
        other = layer(call, seed)
        if not slopes:
            other = other._replace(kwargs=dict(k_scale=0.5 + seed, v_scale=2.0 - seed / 2))
        layers.append(other)
    wanted = [reference(other) for other in layers]
    for other, want in zip(layers, wanted):
        assert_close(run(backend, other, plan), want)
    changed = dict(call.kwargs, k_scale=torch.tensor(0.25)) if not slopes else call.kwargs
    if slopes:
        changed = {"alibi_slopes": call.kwargs["alibi_slopes"] * 2}
    assert_close(run(backend, call._replace(kwargs=changed), plan),
                 reference(call._replace(kwargs=changed)))  # fmt: skip
    monkeypatch.setattr(backend_module, "check_extras", None)
    for other, want in zip(layers, wanted):
        assert_close(run(backend, other, plan), want)
