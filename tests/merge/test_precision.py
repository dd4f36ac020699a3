"""How exact a merge is: float32 to 1e-6, half types to one unit in the last place."""

from __future__ import annotations

import pytest
import torch

from attn_backends.merge import merge_state, merge_states


@pytest.mark.parametrize("offset", [0.0, 50.0, -1e3, 1e4, -1e4])
def test_extreme_lses_of_either_sign(path, dtype, make_state, oracle, assert_merged, offset):
    a, b = make_state(16, 4, 64, dtype), make_state(16, 4, 64, dtype, seed=1)
    a, b = (a[0], a[1] + offset), (b[0], b[1] + offset)
    assert_merged(merge_state(*a, *b, path=path), oracle([a, b]), [a, b])


@pytest.mark.parametrize("spread", [1e-3, 10.0, 1e4])
def test_close_and_distant_lses(path, dtype, make_state, oracle, assert_merged, spread):
    states = [make_state(16, 4, 64, dtype, spread=spread, seed=i) for i in range(3)]
    assert_merged(merge_state(*states[0], *states[1], path=path), oracle(states[:2]), states[:2])
    assert_merged(merge_states(states, path=path), oracle(states), states)


def test_float64_states_merge_in_float64(make_state, oracle, device):
    a, b = make_state(16, 4, 100, torch.float64), make_state(16, 4, 100, torch.float64, seed=1)
    merged = merge_state(*a, *b)
    o, _ = oracle([a, b])
    assert merged.o.dtype == torch.float64 and merged.lse.dtype == torch.float32
    assert float((merged.o - o).abs().max()) < 1e-15 * 8


def test_output_stays_within_its_inputs(path, dtype, device):
    top = torch.finfo(dtype).max
    o = torch.full((2, 2, 16), top, dtype=dtype, device=device)
    lse = torch.tensor([[0.0, 1.0], [1e4, -1e4]], device=device)
    merged = merge_state(o, lse, o, lse - 0.25, path=path)
    assert bool(merged.o.isfinite().all()), "weights sum to 1, so nothing overflows"


def test_paths_agree_to_the_last_place(make_state, device):
    paths = ["torch", "triton", "cuda"] if device.type == "cuda" else ["torch", "triton"]
    dtype = torch.float16
    a, b = make_state(32, 4, 64, dtype), make_state(32, 4, 64, dtype, seed=1)
    results = [merge_state(*a, *b, path=path) for path in paths]
    for other in results[1:]:
        bits = [r.o.view(torch.int16).int() for r in (results[0], other)]
        assert int((bits[0] - bits[1]).abs().max()) <= 1
        assert float((other.lse - results[0].lse).abs().max()) <= 1e-6


def associativity_error(make_state, path: str, dtype: torch.dtype) -> float:
    """Largest difference between the two groupings of three states."""
    a, b, c = (tuple(make_state(64, 8, 64, dtype, seed=i)) for i in range(3))
    left = merge_state(*merge_state(*a, *b, path=path), *c, path=path)
    right = merge_state(*a, *merge_state(*b, *c, path=path), path=path)
    return float((left.o.double() - right.o.double()).abs().max())


def test_associativity_error_is_a_few_roundings(path, dtype, make_state, record_property):
    error = associativity_error(make_state, path, dtype)
    record_property("associativity_error", error)
    print(f"associativity error, {path} {dtype}: {error:.3e}")
    # Either grouping rounds two outputs of magnitude up to 5 to the dtype.
    assert error <= 5 * 3 * torch.finfo(dtype).eps
