"""Which path a merge takes, the reason it gives, and that a forced path is taken or refused."""

from __future__ import annotations

import pytest
import torch

from attn_backends.errors import InvalidInputError, UnsupportedCallError
from attn_backends.merge import (
    choose_merge_path,
    default_path,
    dispatch,
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
def test_whole_vectors_go_to_cuda(all_present, dtype, dim, want):
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
    from attn_backends.errors import Reason

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
