"""Which path a merge takes, the reason it gives, and that a forced path is taken or refused."""

from __future__ import annotations

import json

import pytest
import torch

from attn_backends.errors import InvalidInputError, Reason, UnsupportedCallError
from attn_backends.merge import (
    choose_merge_path,
    default_path,
    dispatch,
    measured,
    merge_state,
    merge_states,
    nvrtc,
    triton_merge,
)
from attn_backends.merge.dispatch import MergeFacts, choose, vector_fault

CUDA = torch.device("cuda", 0)
HALF = torch.bfloat16


@pytest.fixture
def all_present(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of capability 9.0 with every package, as far as the choice can tell."""
    monkeypatch.setattr(nvrtc, "missing", lambda: [])
    monkeypatch.setattr(nvrtc, "device_reasons", lambda device: ())
    monkeypatch.setattr(triton_merge, "missing", lambda: [])
    monkeypatch.setattr(triton_merge, "interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


def facts(dtype=HALF, out_dtype=None, dim=128, fault=None, rows=32) -> MergeFacts:
    return MergeFacts(CUDA, dtype, out_dtype or dtype, rows, dim, fault)


@pytest.mark.parametrize(
    "dtype, dim, want",
    [
        (torch.float32, 4, "cuda"),
        (torch.float32, 100, "cuda"),
        (torch.float32, 102, "triton"),
        (torch.float16, 8, "cuda"),
        (torch.float16, 576, "cuda"),
        (torch.float16, 100, "triton"),
        (torch.bfloat16, 72, "cuda"),
        (torch.bfloat16, 4, "triton"),
        (torch.float64, 128, "torch"),
    ],
)
def test_whole_vectors_go_to_cuda(all_present, monkeypatch, dtype, dim, want):
    monkeypatch.setattr(measured, "TIMES", {})
    choice = choose(facts(dtype, dim=dim), None)
    assert choice.path == want
    assert f"head_dim={dim}" in choice.reason
    if want == "triton":
        width = 4 if dtype == torch.float32 else 8
        assert f"not cuda: head_dim={dim} (supported: multiples of {width}" in choice.reason


def test_a_stride_or_pointer_between_vectors_goes_to_triton(all_present):
    o = torch.empty(4, 2, 132, dtype=HALF)[..., :128]
    fault = vector_fault([("o_a", o)], HALF)
    assert str(fault) == "o_a.stride(1)=132 (supported: multiples of 8 for bfloat16)"
    assert choose(facts(fault=fault), None).path == "triton"
    shifted = torch.empty(4 * 2 * 128 + 1, dtype=HALF)[1:].view(4, 2, 128)
    fault = vector_fault([("o_b", shifted)], HALF)
    assert str(fault) == "o_b.data_ptr()=2 bytes past a vector (supported: multiples of 16 bytes)"
    fine = torch.empty(4, 2, 136, dtype=HALF)[..., :128]
    assert vector_fault([("o_a", fine)], HALF) is None


def test_a_missing_package_is_the_reason(all_present, monkeypatch):
    monkeypatch.setattr(
        nvrtc,
        "missing",
        lambda: [Reason("cuda.core", "ImportError: no", "installed", "install it")],
    )
    choice = choose(facts(), None)
    assert choice.path == "triton"
    assert "not cuda: cuda.core=ImportError: no (supported: installed); install it" in choice.reason
    monkeypatch.setattr(triton_merge, "missing", lambda: [Reason("triton", "broken", "installed")])
    choice = choose(facts(), None)
    assert choice.path == "torch" and "not triton: triton=broken" in choice.reason


def test_float8_needs_a_device_that_converts(all_present, monkeypatch):
    assert choose(facts(out_dtype=torch.float8_e4m3fn), None).path == "cuda"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    choice = choose(facts(out_dtype=torch.float8_e4m3fn), None)
    assert choice.path == "torch" and "compute_capability=8.0 (supported: >= 8.9" in choice.reason


def test_more_rows_than_32_bits_count_go_to_torch(all_present):
    choice = choose(facts(rows=2**31), None)
    assert choice.path == "torch" and "num_tokens * num_heads=2147483648" in choice.reason


def test_a_forced_path_is_taken_or_refused_with_every_reason(all_present):
    for path in ("cuda", "triton", "torch"):
        assert choose(facts(), path) == (path, "asked for")
    with pytest.raises(UnsupportedCallError, match="head_dim=100") as error:
        choose(facts(dim=100), "cuda")
    assert [r.argument for r in error.value.reasons] == ["head_dim"]
    with pytest.raises(UnsupportedCallError, match="dtype=float64"):
        choose(facts(torch.float64), "triton")
    with pytest.raises(InvalidInputError, match=r"path='fast' .*'cuda', 'triton', 'torch'"):
        choose(facts(), "fast")


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton was measured to win from a MiB on, by more than noise from 8 MiB on."""
    points = ((1 << 16, 2.0, 2.2), (1 << 20, 8.0, 7.9), (1 << 23, 30.0, 28.0))
    monkeypatch.setattr(measured, "TIMES", {((9, 0), "pair"): points})


@pytest.mark.parametrize("size, want", [(14, "cuda"), (20, "cuda"), (21, "cuda"), (22, "triton"),
                                        (23, "triton"), (30, "triton")])  # fmt: skip
def test_measured_times_outweigh_the_rule(all_present, times, size, want):
    rows = (1 << size) // (128 * 2)
    choice = choose(facts(rows=rows), None)
    assert choice.path == want
    if want == "triton":
        shown = "not cuda: 30 us measured (triton: 28 us) for a result of 8388608 bytes"
        assert choice.reason.endswith(shown)
    for path in ("cuda", "triton"):
        assert choose(facts(rows=rows), path) == (path, "asked for")


def test_the_rule_holds_for_what_was_not_measured(all_present, times, monkeypatch):
    big = facts(rows=1 << 20)
    assert choose(big, None).path == "triton"
    for other in (
        big._replace(contiguous=False), big._replace(states=8), big._replace(states=999),
        big._replace(head_dim=136), big._replace(out_dtype=torch.float8_e4m3fn),
        big._replace(num_rows=0),
    ):  # fmt: skip
        assert choose(other, None).path == "cuda", other
    monkeypatch.setattr(triton_merge, "missing", lambda: [Reason("triton", "broken", "installed")])
    assert choose(big, None).path == "cuda"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert choose(big, None).path == "cuda"


def test_a_steady_path_does_not_follow_the_size(all_present, times, monkeypatch):
    assert {choose(facts(rows=rows), None).path for rows in (1, 1 << 20)} == {"cuda", "triton"}
    assert dispatch.steady_path(CUDA, HALF, 128) == "triton"
    assert dispatch.steady_path(CUDA, torch.float64, 128) == "torch"
    assert dispatch.steady_path(torch.device("cpu"), HALF, 128) == "torch"
    token = default_path.set("cuda")
    assert dispatch.steady_path(CUDA, HALF, 128) == "cuda"  # asked for, so not by size either
    default_path.reset(token)
    monkeypatch.setattr(triton_merge, "missing", lambda: [Reason("triton", "broken", "installed")])
    assert dispatch.steady_path(CUDA, HALF, 128) == "torch"


def test_the_shipped_times_are_in_order_and_of_known_kinds():
    kinds = {dispatch.kind_of(n, d) for n in (2, 3, 16) for d in (128, 192)}
    assert kinds == {"pair", "few", "pair-padded", "few-padded"}
    assert dispatch.kind_of(17, 128) is None
    for (capability, kind), points in measured.TIMES.items():
        assert len(capability) == 2 and kind in kinds
        assert list(points) == sorted(points) and all(min(p) > 0 for p in points)


def test_results_become_the_table(tmp_path, monkeypatch):
    from attn_backends.bench import merge_choice

    def row(backend, us, **more):
        case = {"tokens": 64, "num_heads": 32, "head_dim": 128, "dtype": "bf16", "states": 2,
                "lse_layout": "token", "empty": 0.0}  # fmt: skip
        right = more.pop("right", True)
        return {"case": {**case, **more}, "backend": backend, "mode": "graph_cold",
                "median_us": us, "right": right}  # fmt: skip

    rows = [
        row("cuda", 2.5), row("triton", 2.25), row("flashinfer", 1.0),
        row("cuda", 1.0, tokens=1), row("triton", 1.5, tokens=1, right=False),
        row("cuda", 9.0, empty=0.5), row("triton", 1.0, empty=0.5),
        row("cuda", 9.0, states=8, head_dim=80), row("triton", 8.0, states=8, head_dim=80),
        row("cuda", 9.0, states=64), row("triton", 8.0, states=64),
    ]  # fmt: skip
    found = merge_choice.times_of(rows, (9, 0))
    assert found == {
        ((9, 0), "pair"): ((524288, 2.5, 2.25),), ((9, 0), "few-padded"): ((327680, 9.0, 8.0),)
    }  # fmt: skip
    monkeypatch.setattr(measured, "TIMES", {((8, 0), "pair"): ((1, 1.0, 2.0),)})
    target = tmp_path / "measured.py"
    target.write_text(merge_choice.TARGET.read_text())
    monkeypatch.setattr(merge_choice, "TARGET", target)
    file = tmp_path / "merge.json"
    file.write_text(json.dumps({"rows": rows}))
    assert merge_choice.main([str(file), "--capability", "9.0"]) == 0
    scope: dict = {}
    exec(target.read_text(), scope)
    assert scope["TIMES"] == {**found, ((8, 0), "pair"): ((1, 1.0, 2.0),)}


def test_a_cpu_takes_torch_even_under_the_interpreter():
    o = torch.ones(2, 2, 16)
    choice = choose_merge_path(o, o)
    assert choice.path == "torch" and "device=cpu" in choice.reason
    lse = torch.zeros(2, 2)
    with pytest.raises(UnsupportedCallError, match=r"device=cpu \(supported: cuda\)"):
        merge_state(o, lse, o, lse, path="cuda")
    with pytest.raises(UnsupportedCallError, match="device=cpu"):
        merge_states([(o, lse)] * 3, path="cuda")


def test_the_interpreter_refuses_what_it_gets_wrong(monkeypatch):
    monkeypatch.setattr(triton_merge, "interpreted", lambda: True)  # F26
    o, lse = torch.ones(2, 2, 16, dtype=HALF), torch.zeros(2, 2)
    with pytest.raises(UnsupportedCallError, match="dtype=bfloat16"):
        merge_state(o, lse, o, lse, path="triton")
    with pytest.raises(UnsupportedCallError, match="float8_e4m3fn"):
        merge_state(o.half(), lse, o.half(), lse, path="triton", output_scale=1.0)


def test_a_default_path_is_followed_and_never_hidden_by_a_cache():
    o, lse = torch.ones(2, 2, 16), torch.zeros(2, 2)
    merge_state(o, lse, o, lse)  # known layout
    token = default_path.set("cuda")
    try:
        with pytest.raises(UnsupportedCallError, match="device=cpu"):
            merge_state(o, lse, o, lse)
        assert merge_state(o, lse, o, lse, path="torch").o.shape == o.shape
    finally:
        default_path.reset(token)
    merge_state(o, lse, o, lse)


def test_the_environment_settles_a_path_between_two_calls(monkeypatch):
    o, lse = torch.ones(2, 2, 16), torch.zeros(2, 2)
    merge_state(o, lse, o, lse)
    monkeypatch.setenv("ATTN_BACKENDS_MERGE", "cuda")
    for call in (lambda: merge_state(o, lse, o, lse), lambda: merge_states([(o, lse)] * 3)):
        with pytest.raises(UnsupportedCallError, match="device=cpu"):
            call()
    with pytest.raises(UnsupportedCallError, match="device=cpu"):
        choose_merge_path(o, o)
    merge_state(o, lse, o, lse, path="torch")
    monkeypatch.setenv("ATTN_BACKENDS_MERGE", "auto")
    merge_state(o, lse, o, lse)


def test_plans_do_not_pile_up(monkeypatch):
    from attn_backends.merge import many, pair

    monkeypatch.setattr(pair, "MAX_PLANS", 4)
    for tokens in range(1, 12):
        o, lse = torch.ones(tokens, 1, 8), torch.zeros(tokens, 1)
        merge_state(o, lse, o, lse)
        merge_states([(o, lse)] * 3)
    assert len(pair._PLANS) <= 4 and len(many._PLANS) <= 4


@pytest.mark.gpu
def test_choices_on_this_gpu():
    o = torch.ones(4, 2, 128, dtype=HALF, device="cuda")
    assert choose_merge_path(o, o).path == "cuda"
    odd = torch.ones(4, 2, 100, dtype=HALF, device="cuda")
    assert choose_merge_path(odd, odd).path == "triton"
    assert choose_merge_path(o.double(), o.double()).path == "torch"
    assert dispatch.PATHS == ("cuda", "triton", "torch")
