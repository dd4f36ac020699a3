"""Empty states: exact, and whatever their outputs hold is ignored."""

from __future__ import annotations

import math

import pytest
import torch

from attn_backends.merge import apply_sinks, merge_state, merge_states

INF, NAN = float("inf"), float("nan")


def full(value: float, dtype: torch.dtype, device: torch.device, shape=(1, 1, 16)) -> torch.Tensor:
    return torch.full(shape, value, dtype=dtype, device=device)


@pytest.mark.parametrize("garbage", [0.0, NAN, INF])
def test_each_side_may_be_empty(path, dtype, device, garbage):  # F01
    rows = [
        (-INF, garbage, -INF, garbage),
        (-INF, garbage, 0, 3),
        (0, 1, -INF, garbage),
        (0, 1, 0, 3),
    ]
    rows = torch.tensor(rows, device=device)[:, None].expand(4, 2, 4)
    lse_a, o_a, lse_b, o_b = rows.unbind(-1)
    o_a = o_a[..., None].repeat(1, 1, 16).to(dtype)
    o_b = o_b[..., None].repeat(1, 1, 16).to(dtype)
    o, lse = merge_state(o_a, lse_a, o_b, lse_b, path=path)
    want = torch.tensor([0.0, 3.0, 1.0, 2.0], device=device)
    assert torch.equal(o.float(), want[:, None, None].expand(4, 2, 16))
    assert torch.equal(lse[:3], torch.tensor([-INF, 0, 0], device=device)[:, None].expand(3, 2))
    torch.testing.assert_close(lse[3], torch.full((2,), math.log(2), device=device))


@pytest.mark.parametrize("garbage", [0.0, NAN])
def test_plus_infinity_means_empty(path, dtype, device, garbage):  # F02
    empty = full(garbage, dtype, device), torch.full((1, 1), INF, device=device)
    real = full(3.0, dtype, device), torch.full((1, 1), 1.5, device=device)
    for a, b in ((empty, real), (real, empty)):
        o, lse = merge_state(*a, *b, path=path)
        assert torch.equal(o, real[0]) and torch.equal(lse, real[1])
    o, lse = merge_state(*empty, *empty, path=path)
    assert torch.equal(o, torch.zeros_like(o)) and bool((lse == -INF).all())


def test_output_of_an_empty_chunk_may_be_unwritten(path, dtype, device):  # F03
    empty = full(NAN, dtype, device), torch.full((1, 1), -INF, device=device)
    real = full(3.0, dtype, device), torch.zeros(1, 1, device=device)
    o, lse = merge_state(*empty, *real, path=path)
    assert torch.equal(o, real[0]) and torch.equal(lse, real[1])


def test_a_weight_that_underflows_selects_its_side_away(path, dtype, device):
    far = full(NAN, dtype, device), torch.full((1, 1), -1e4, device=device)
    near = full(3.0, dtype, device), torch.full((1, 1), 1e4, device=device)
    o, lse = merge_state(*far, *near, path=path)
    assert torch.equal(o, near[0]) and torch.equal(lse, near[1])


def test_nan_in_an_lse_stays_visible(path, dtype, device):
    lse = torch.tensor([[NAN, 0.0]], device=device)
    other = torch.zeros(1, 2, device=device)
    ones = full(1.0, dtype, device, (1, 2, 16))
    for a, b in ((lse, other), (other, lse), (lse, torch.full_like(lse, -INF))):
        o, merged = merge_state(ones, a, ones, b, path=path)
        assert bool(o[0, 0].isnan().all()) and bool(merged[0, 0].isnan())
        assert not bool(o[0, 1].isnan().any()) and not bool(merged[0, 1].isnan())
    o, merged = merge_states([(ones, lse), (ones, other), (ones, other)], path=path)
    assert bool(o[0, 0].isnan().all()) and bool(merged[0, 0].isnan())
    assert not bool(o[0, 1].isnan().any())


def test_nan_in_a_real_output_stays_visible(path, dtype, device):
    bad, good = full(NAN, dtype, device), full(1.0, dtype, device)
    lse = torch.zeros(1, 1, device=device)
    assert bool(merge_state(bad, lse, good, lse, path=path).o.isnan().all())


@pytest.mark.parametrize("n", [1, 2, 3, 8, 9, 40])
def test_any_number_of_empty_states(path, dtype, device, n):
    o = torch.full((n, 3, 2, 16), NAN, dtype=dtype, device=device)
    lse = torch.full((n, 3, 2), -INF, device=device)
    lse[:, 2] = INF
    merged = merge_states((o, lse), path=path)
    assert torch.equal(merged.o, torch.zeros_like(o[0]))
    assert bool((merged.lse == -INF).all())
    o[n // 2, 1], lse[n // 2, 1] = 5.0, 2.0
    for states in ((o, lse), list(zip(o, lse))):
        merged = merge_states(states, path=path)
        assert torch.equal(merged.o[1], torch.full_like(o[0, 1], 5.0))
        assert torch.equal(merged.lse[1], torch.full_like(lse[0, 1], 2.0))
        assert torch.equal(merged.o[0], torch.zeros_like(o[0, 0]))


def test_a_row_without_keys_takes_the_sink_alone(path, dtype, device):
    from attn_backends.merge import default_path

    o = full(NAN, dtype, device, (2, 3, 16))
    o[1] = 2.0
    lse = torch.tensor([[-INF] * 3, [0.0] * 3], device=device)
    sinks = torch.tensor([0.0, 3.0, -INF], device=device)
    token = default_path.set(path)
    merged = apply_sinks((o, lse), sinks)
    default_path.reset(token)
    assert torch.equal(merged.o[0], torch.zeros_like(o[0]))
    assert torch.equal(merged.lse[0], sinks)
    want = torch.tensor([1.0, 2 / (1 + math.exp(3)), 2.0], device=device)
    torch.testing.assert_close(merged.o[1].float(), want[:, None].expand(3, 16), atol=2e-3, rtol=0)
    want = torch.tensor([math.log(2), math.log(1 + math.exp(3)), 0.0], device=device)
    torch.testing.assert_close(merged.lse[1], want)


def test_no_rows_give_empty_tensors(path, dtype, device):
    for shape in ((0, 4, 16), (3, 0, 16)):
        o = torch.empty(shape, dtype=dtype, device=device)
        lse = torch.empty(shape[:2], device=device)
        merged = merge_state(o, lse, o, lse, path=path)
        assert merged.o.shape == shape and merged.lse.shape == shape[:2]
        merged = merge_states([(o, lse)] * 3, path=path)
        assert merged.o.shape == shape and merged.lse.shape == shape[:2]
