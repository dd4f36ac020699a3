"""What lies beneath a library's functions: found by name, or left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import pytest
import torch
from standin_flash import (
    OPERATOR_CALLS,
    VLLM_OPERATORS,
    _fa2_operator,
    _fa2_varlen,
    flash_attn_2,
    flash_attn_3,
    flash_attn_4,
    vllm,
)
from support import Call, assert_close, make_call, reference, run

from attn_backends.adapters import fa2, fa3, torch_varlen
from attn_backends.adapters.flash_attention import FlashAttentionBackend
from attn_backends.adapters.operators import attend_beneath, python_function
from attn_backends.adapters.torch_varlen import TorchVarlenBackend
from attn_backends.spec import AttentionSpec

T, H, D = 5, 2, 8


def operator(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, scale: float,
    most: int = 7, *, causal: bool = False,
) -> tuple[Any, torch.Tensor]:  # fmt: skip
    return (q, k, v, starts, scale, most, causal), torch.arange(float(H * T)).view(H, T)


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.rand(T, H, D), torch.rand(T, H, D), torch.rand(T, H, D)


STARTS = torch.tensor([0, T])


def test_arguments_are_given_by_their_names_whatever_their_order() -> None:
    attend = attend_beneath(operator, {"scale": 0.5, "causal": True, "starts": STARTS})
    assert attend is not None
    x = tensors()
    o, lse = attend(*x)
    assert all(a is b for a, b in zip(o, (*x, STARTS))) and o[4:] == (0.5, 7, True)
    assert torch.equal(lse, torch.arange(float(H * T)).view(H, T).T)


def test_an_lse_by_token_is_left_as_it_is() -> None:
    attend = attend_beneath(operator, {"scale": 1.0, "starts": STARTS}, by_head=False)
    assert attend is not None and attend(*tensors()).lse.shape == (H, T)


@pytest.mark.parametrize(
    "values",
    [
        {"scale": 1.0, "starts": STARTS, "renamed": 1},
        {"scale": 1.0},
        {"scale": 1.0, "starts": torch.arange(4)[::2]},
    ],
    ids=["unknown to it", "unknown to us", "a tensor that must be copied"],
)
def test_other_arguments_than_those_known_are_not_guessed_at(values: dict[str, Any]) -> None:
    assert attend_beneath(operator, values) is None


def test_no_operator_gives_nothing() -> None:
    assert attend_beneath(None, {}) is None
    assert attend_beneath(python_function(None), {}) is None


def test_values_for_some_releases_only_are_used_where_there_is_no_default() -> None:
    given = {"starts": STARTS}
    attend = attend_beneath(operator, given, {"scale": 2.0, "most": 9, "elsewhere": 1})
    assert attend is not None and attend(*tensors()).o[4:6] == (2.0, 9)


def test_a_custom_operator_is_traced_back_to_its_function() -> None:
    function = python_function(_fa2_operator)
    assert function is not None and function.__name__ == "_fa2_operator"
    assert python_function(operator) is operator
    assert python_function(torch.ops.aten.add.Tensor) is None


LENGTHS = {"decode": ([1, 1, 1], [5, 40, 33]), "mixed": ([5, 3, 1], [9, 17, 4])}
FIELDS: dict[str, dict[str, Any]] = {
    "causal": {}, "full": {"causal": False}, "window": {"window": (7, 0)},
    "both sides": {"window": (7, 2), "causal": False}, "softcap": {"softcap": 8.0},
    "invariant": {"batch_invariant": True},
}  # fmt: skip


def spec(**fields: Any) -> AttentionSpec:
    base = dict(num_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float16)
    return AttentionSpec(**{**base, **fields})


def another(call: Call, seed: int = 1) -> Call:
    """The same step with other tensors."""
    rng = torch.Generator().manual_seed(seed)
    made = (torch.randn(x.shape, generator=rng).to(x.dtype) for x in (call.q, call.k, call.v))
    q, k, v = made
    return call._replace(q=q, k=k, v=v)


@pytest.fixture
def flash(
    install: Any, on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., FlashAttentionBackend]:
    def bind(build: str, spec: AttentionSpec) -> FlashAttentionBackend:
        version, _, source = build.partition("-")
        if source:
            install(**vllm())
            for module in (fa2, fa3):
                monkeypatch.setattr(module, "vllm_operator", lambda v, name: VLLM_OPERATORS[v])
        elif version == "2":
            install(flash_attn=flash_attn_2(operators=True))
        elif version == "4":
            install(**{"flash_attn.cute": flash_attn_4(operators=True)})
        else:
            module, config = flash_attn_3(operators=True)
            install(flash_attn_interface=module, flash_attn_config=config)
        values = dict(version=version, source=source or "package", finite_cache=True)
        options = FlashAttentionBackend.Options.model_validate(values)
        cpu = torch.device("cpu")
        reasons = FlashAttentionBackend.unsupported_reasons(spec, None, cpu, options)
        if reasons:
            pytest.skip("refused: " + "; ".join(map(str, reasons)))
        OPERATOR_CALLS.clear()
        return FlashAttentionBackend(spec, device="cpu", options=options)

    return bind


@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("page_size", [None, 256])
@pytest.mark.parametrize("build", ["2", "2-vllm", "3", "3-vllm", "4"])
def test_later_layers_of_flash_attention_call_the_operator_and_are_right(
    build: str, page_size: int | None, lengths: str, fields: str, flash: Any
) -> None:
    layer = spec(page_size=page_size, **FIELDS[fields])
    backend = flash(build, layer)
    call = make_call(layer, *LENGTHS[lengths])
    plan = backend.plan(call.batch)
    assert_close(run(backend, call, plan), reference(call))
    assert not OPERATOR_CALLS  # the first layer takes the public function
    for seed in (1, 2):
        after = another(call, seed)
        assert_close(run(backend, after, plan), reference(after))
    # What is gathered first is no repeat, and FlashAttention 2 decodes through its own function.
    gathers = layer.window is not None and page_size is None
    decodes = build == "2" and page_size and lengths == "decode" and not layer.batch_invariant
    if not (gathers or decodes):
        kind = "ragged" if page_size is None else "paged"
        assert OPERATOR_CALLS == [kind, kind]
    assert gathers or plan.repeat is not None


@pytest.mark.parametrize("fields", ["causal", "full", "window"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_later_layers_of_torch_varlen_call_the_operator_and_are_right(
    lengths: str, fields: str, on_cpu: None, flash_on_cpu: list[str]
) -> None:
    layer = spec(**FIELDS[fields])
    reasons = TorchVarlenBackend.unsupported_reasons(layer, None, torch.device("cpu"))
    if reasons:
        pytest.skip("; ".join(map(str, reasons)))
    backend = TorchVarlenBackend(layer, device="cpu")
    call = make_call(layer, *LENGTHS[lengths])
    plan = backend.plan(call.batch)
    for each in (call, another(call)):
        assert_close(run(backend, each, plan), reference(each))
    assert len(flash_on_cpu) == 2
    wants_operator = plan.repeat is not None
    assert flash_on_cpu[1] == ("straight" if wants_operator else "varlen_attn")
    assert wants_operator or fields == "window"


@pytest.fixture
def flash_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """PyTorch's own operator with a kernel for CPUs; who called it, each time."""
    calls: list[str] = []
    inside = [False]
    module = torch_varlen.probe_varlen().module
    if module is None or getattr(module, "_should_use_cudnn", None) is None:
        pytest.skip("this PyTorch has no varlen module")
    public = module.varlen_attn

    @wraps(public)
    def varlen_attn(**arguments: Any) -> Any:
        inside[0] = True
        try:
            return public(**arguments)
        finally:
            inside[0] = False

    def kernel(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor,
        max_q: int, max_k: int, dropout: float, causal: bool, debug: bool, *, scale: float,
        window_size_left: int | None = None, window_size_right: int | None = None, **rest: Any,
    ) -> Any:  # fmt: skip
        assert dropout == 0.0 and not debug and not any(x is not None for x in rest.values())
        calls.append("varlen_attn" if inside[0] else "straight")
        window = tuple(-1 if x is None else x for x in (window_size_left, window_size_right))
        lengths = cu_k.diff().tolist()
        o, lse = _fa2_varlen(
            q, k, v, cu_q, cu_k.tolist(), lengths, max_q, max_k, scale, causal, window, 0.0, None,
            None,
        )  # fmt: skip
        nothing = torch.empty(0)
        return o, lse, torch.empty(2, dtype=torch.uint64), nothing, nothing

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", kernel, "CPU")
    monkeypatch.setattr(module, "varlen_attn", varlen_attn)
    try:
        yield calls
    finally:
        library._destroy()
