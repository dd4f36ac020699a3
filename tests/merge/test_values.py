"""What a merge computes: equal to float64 in every path, dtype, shape and memory layout."""

from __future__ import annotations

import math

import pytest
import torch

from attn_backends.merge import apply_sinks, default_path, merge_state, merge_state_, merge_states

LAYOUTS = ("plain", "padded", "head_major", "every_other")
NAN = float("nan")


@pytest.mark.parametrize("shape", [(1, 1, 16), (7, 5, 72), (3, 2, 100), (2, 3, 128), (13, 1, 8)])
def test_equals_the_float64_merge(path, dtype, make_state, oracle, assert_merged, shape):
    if path == "cuda" and shape[-1] % (4 if dtype == torch.float32 else 8):
        pytest.skip("no whole vectors: refused, as test_choice.py checks")
    a, b = make_state(*shape, dtype), make_state(*shape, dtype, seed=1)
    merged = merge_state(*a, *b, path=path)
    assert merged.o.dtype == dtype and merged.o.is_contiguous() and merged.lse.is_contiguous()
    assert_merged(merged, oracle([a, b]), [a, b])


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_strides_change_no_bit(path, dtype, make_state, arrange, layout):
    a, b = make_state(5, 3, 64, dtype), make_state(5, 3, 64, dtype, seed=1)
    plain = merge_state(*a, *b, path=path)
    for a_layout, b_layout in ((layout, "plain"), ("plain", layout), (layout, layout)):
        strided = merge_state(*arrange(*a, a_layout), *arrange(*b, b_layout), path=path)
        assert torch.equal(strided.o, plain.o) and torch.equal(strided.lse, plain.lse)
    out = arrange(torch.full_like(a[0], NAN), torch.full_like(a[1], NAN), layout)
    merge_state(*a, *b, out=out, path=path)
    assert torch.equal(out[0], plain.o) and torch.equal(out[1], plain.lse)


def test_each_side_is_read_with_its_own_strides(path, dtype, device):  # F06
    plain = torch.ones(4, 2, 128, dtype=dtype, device=device)
    wide = torch.full((4, 2, 192), 7777.0, dtype=dtype, device=device)
    wide[..., :128] = 3
    every = torch.full((8, 2, 192), 7777.0, dtype=dtype, device=device)[::2]
    every[..., :128] = 3
    lse = torch.zeros(4, 2, device=device)
    ones = every.clone()
    ones[..., :128] = 1
    for a, b in (
        (plain, wide[..., :128]),
        (wide[..., :128], plain),
        (wide[..., :128], ones[..., :128]),
        (every[..., :128], plain),
    ):
        o, merged = merge_state(a, lse, b, lse, path=path)
        assert torch.equal(o, torch.full_like(o, 2.0))
        torch.testing.assert_close(merged, torch.full_like(merged, math.log(2)))


def test_nothing_outside_the_outputs_is_written(path, dtype, make_state, device):
    a, b = make_state(5, 3, 64, dtype), make_state(5, 3, 64, dtype, seed=1)
    room_o = torch.full((7, 5, 96), 7.0, dtype=dtype, device=device)
    room_lse = torch.full((7, 5), 7.0, device=device)
    merge_state(*a, *b, out=(room_o[1:6, 1:4, 16:80], room_lse[1:6, 1:4]), path=path)
    room_o[1:6, 1:4, 16:80] = 7
    room_lse[1:6, 1:4] = 7
    assert bool((room_o == 7).all()) and bool((room_lse == 7).all())


def test_inputs_are_left_alone(path, dtype, make_state):
    a, b = make_state(5, 3, 64, dtype), make_state(5, 3, 64, dtype, seed=1)
    before = [x.clone() for x in (*a, *b)]
    merge_state(*a, *b, path=path)
    merge_states([a, b, a], path=path)
    assert all(torch.equal(x, y) for x, y in zip((*a, *b), before))


@pytest.mark.parametrize("dim", [16, 64, 80, 192, 576])
def test_in_place_equals_out_of_place_bit_for_bit(path, dtype, make_state, dim):
    a, b = make_state(4, 3, dim, dtype), make_state(4, 3, dim, dtype, seed=1)
    want = merge_state(*a, *b, path=path)
    for first, second, target in ((a, b, 0), (b, a, 0), (a, b, 1)):
        copies = [tuple(x.clone() for x in first), tuple(x.clone() for x in second)]
        if target == 0:
            got = merge_state_(*copies[0], *copies[1], path=path)
        else:
            got = merge_state(*copies[0], *copies[1], out=copies[1], path=path)
        assert got.o is copies[target][0] and got.lse is copies[target][1]
        assert torch.equal(got.o, want.o) and torch.equal(got.lse, want.lse)
    stack = torch.stack([a[0], b[0], a[0]]), torch.stack([a[1], b[1], b[1]])
    want = merge_states(stack, path=path)
    merge_states(stack, out=(stack[0][1], stack[1][1]), path=path)
    assert torch.equal(stack[0][1], want.o) and torch.equal(stack[1][1], want.lse)


def test_a_row_of_two_states_has_the_same_bits_alone_among_others_and_again(
    path, dtype, make_state
):
    a, b = make_state(37, 3, 64, dtype), make_state(37, 3, 64, dtype, seed=1)
    want = merge_state(*a, *b, path=path)
    for rows in (slice(0, 1), slice(5, 6), slice(30, 37), slice(0, 37)):
        first, second = ([x[rows].clone() for x in state] for state in (a, b))
        got = merge_state(*first, *second, path=path)
        assert torch.equal(got.o, want.o[rows]) and torch.equal(got.lse, want.lse[rows])


@pytest.mark.parametrize("n", [1, 2, 3, 8, 11])
def test_n_states_equal_the_float64_merge(path, dtype, make_state, oracle, assert_merged, n):
    states = [make_state(5, 3, 64, dtype, seed=i) for i in range(n)]
    expected = oracle(states)
    stacked = torch.stack([o for o, _ in states]), torch.stack([lse for _, lse in states])
    for form in (states, stacked):
        merged = merge_states(form, path=path)
        assert merged.o.is_contiguous() and merged.o.dtype == dtype
        assert_merged(merged, expected, states)


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_strides_of_n_states_change_no_bit(each_path, make_state, arrange, layout):
    states = [make_state(5, 3, 64, seed=i) for i in range(4)]
    plain = merge_states(states, path=each_path)
    strided = merge_states([arrange(*s, layout) for s in states], path=each_path)
    mixed = merge_states([arrange(*states[0], layout), *states[1:]], path=each_path)
    assert torch.equal(strided.o, plain.o) and torch.equal(strided.lse, plain.lse)
    torch.testing.assert_close(mixed.o, plain.o, atol=1e-6, rtol=0)
    # A stack of states along another dim is a view as good as any.
    o = torch.stack([o for o, _ in states], 1).transpose(0, 1)
    lse = torch.stack([lse for _, lse in states], 2).permute(2, 0, 1)
    viewed = merge_states((o, lse), path=each_path)
    torch.testing.assert_close(viewed.o, plain.o, atol=1e-6, rtol=0)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_counts_say_how_many_states_a_row_has(each_path, make_state, oracle, assert_merged, index):
    states = [make_state(6, 2, 32, seed=i) for i in range(10)]
    counts = torch.tensor([0, 1, 2, 5, 9, 10], dtype=index, device=states[0][0].device)
    stacked = torch.stack([o for o, _ in states]), torch.stack([lse for _, lse in states])
    masked = []
    for i, (o, lse) in enumerate(states):
        has = (i < counts)[:, None]
        masked.append((o, torch.where(has, lse, -float("inf"))))
        stacked[0][i][i >= counts] = NAN  # what a row does not have may hold anything
        stacked[1][i][i >= counts] = NAN
    merged = merge_states(stacked, counts=counts, path=each_path)
    assert_merged(merged, oracle(masked), masked)
    strided = torch.stack([counts, counts + 1], 1)[:, 0]
    again = merge_states(stacked, counts=strided, path=each_path)
    assert torch.equal(again.o, merged.o)


@pytest.mark.parametrize("n", [1000 if torch.cuda.is_available() else 150])
def test_very_many_states(each_path, make_state, oracle, n):
    g = torch.Generator().manual_seed(0)
    o, lse = make_state(2, 2, 16)
    os = torch.randn(n, 2, 2, 16, generator=g).to(o.device)
    lses = (torch.randn(n, 2, 2, generator=g) * 2).to(o.device)
    merged = merge_states((os, lses), path=each_path)
    o, lse = oracle(list(zip(os, lses)))
    bound = 2.0**-24 * n * float(os.abs().max())  # a sum of n terms, each rounded once
    assert float((merged.o - o).abs().max()) < bound
    assert float((merged.lse - lse).abs().max()) < 2.0**-24 * n


def test_half_results_from_float32_partials(path, make_state, oracle, case):
    if case[1] == torch.float32:
        pytest.skip("the result is float32 already")
    a, b = make_state(5, 3, 64), make_state(5, 3, 64, seed=1)
    out = torch.full((5, 3, 64), NAN, dtype=case[1], device=a[0].device), torch.empty_like(a[1])
    for form in ("pair", "many"):
        if form == "pair":
            merge_state(*a, *b, out=out, path=path)
            want = oracle([a, b])[0]
        else:
            merge_states([a, b, b], out=out, path=path)
            want = oracle([a, b, b])[0]
        step = want.abs() * (2.0**-11 if case[1] == torch.float16 else 2.0**-8)
        assert bool(((out[0].double() - want).abs() <= step + 1e-6).all())


def test_rows_beyond_the_prefix_take_the_suffix(path, dtype, make_state):
    a, b = make_state(7, 3, 64, dtype), make_state(7, 3, 64, dtype, seed=1)
    whole = merge_state(*a, *b, path=path)
    for n in (0, 1, 4, 7):
        hidden = a[0].clone(), a[1].clone()
        hidden[0][n:] = NAN
        hidden[1][n:] = NAN
        merged = merge_state(*hidden, *b, num_tokens_with_prefix=n, path=path)
        assert torch.equal(merged.o[:n], whole.o[:n]) and torch.equal(merged.lse[:n], whole.lse[:n])
        assert torch.equal(merged.o[n:], b[0][n:]) and torch.equal(merged.lse[n:], b[1][n:])
        merge_state_(*hidden, *b, num_tokens_with_prefix=n, path=path)
        assert torch.equal(hidden[0], merged.o)


def test_sinks_enter_once(path, dtype, make_state):
    a = make_state(7, 5, 64, dtype)
    sinks = torch.linspace(-3, 3, 10, device=a[0].device)[::2]
    token = default_path.set(path)
    merged = apply_sinks(a, sinks)
    copies = tuple(x.clone() for x in a)
    assert apply_sinks(copies, sinks, out=copies).o is copies[0]
    default_path.reset(token)
    lse = torch.logaddexp(a[1].double(), sinks.double())
    torch.testing.assert_close(merged.lse.double(), lse, atol=1e-6, rtol=0)
    o = a[0].double() * torch.exp(a[1].double() - lse)[..., None]
    unit = {torch.float32: 1e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
    torch.testing.assert_close(merged.o.double(), o, atol=1e-6, rtol=unit)
    assert torch.equal(copies[0], merged.o) and torch.equal(copies[1], merged.lse)


@pytest.mark.parametrize("where", ["number", "tensor"])
def test_float8_results_are_scaled_and_saturated(path, dtype, make_state, where, device):
    if path == "triton" and device.type == "cpu":
        pytest.skip("Triton's interpreter has no float8: refused, as test_choice.py checks")
    a, b = make_state(5, 3, 64, dtype), make_state(5, 3, 64, dtype, seed=1)
    a[0][0], b[0][0] = 3e4, 3e4  # saturates
    a[0][1], b[0][1] = NAN, NAN
    scale = 0.05 if where == "number" else torch.tensor([0.05], device=device)
    merged = merge_state(*a, *b, output_scale=scale, path=path)
    assert merged.o.dtype == torch.float8_e4m3fn
    wide = merge_state(a[0].float(), a[1], b[0].float(), b[1], path="torch").o / 0.05
    want = wide.clamp(-448, 448).to(torch.float8_e4m3fn)
    got, want = merged.o.float(), want.float()
    assert torch.equal(got[0], torch.full_like(got[0], 448.0)) and bool(got[1].isnan().all())
    # Paths may round a value next to a tie either way: one step of 3 mantissa bits.
    assert bool(((got[2:] - want[2:]).abs() <= want[2:].abs() / 8 + 2.0**-9).all())
    assert float((got[2:] != want[2:]).float().mean()) < 0.01


def test_lists_and_tuples_of_states_are_the_same(each_path, make_state):
    a, b = make_state(3, 2, 16), make_state(3, 2, 16, seed=1)
    want = merge_state(*a, *b, path=each_path)
    for states in ([list(a), list(b)], (tuple(a), tuple(b)), [want._replace(o=a[0], lse=a[1]), b]):
        assert torch.equal(merge_states(states, path=each_path).o, want.o)
