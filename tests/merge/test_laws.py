"""The laws of the monoid, on random splits and orders, extreme logits and garbage."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_backends.merge import merge_state, merge_states

LAWS = settings(max_examples=60, deadline=None, derandomize=True)
NAN, INF = float("nan"), float("inf")
seeds = st.integers(0, 2**31)
sizes = st.tuples(st.integers(1, 4), st.integers(1, 3), st.sampled_from([1, 3, 8, 16]))
spreads = st.sampled_from([0.1, 3.0, 100.0, 1e4])


def draw_states(n: int, size: tuple[int, int, int], spread: float, seed: int):
    """States with outputs of N(0, 1) and LSEs within ``spread``, every fifth one empty."""
    g = torch.Generator().manual_seed(seed)
    states = []
    for _ in range(n):
        lse = (torch.rand(size[:2], generator=g) * 2 - 1) * spread
        lse[torch.rand(size[:2], generator=g) < 0.2] = -INF
        o = torch.randn(size, generator=g)
        o[lse == -INF] = NAN
        states.append((o, lse))
    return states


def assert_same(a, b, states) -> None:
    """Equal up to the rounding of ``len(states)`` merges of float32 numbers of these sizes."""
    n = len(states)
    top = max(float(o.nan_to_num().abs().max()) for o, _ in states)
    big = max(float(lse.nan_to_num(neginf=0.0).abs().max()) for _, lse in states)
    # An LSE is rounded at its own size after each merge, and the weights inherit that error.
    lse_error = 2.0**-23 * n * (1 + big)
    torch.testing.assert_close(a[1], b[1], atol=lse_error, rtol=0)
    o_error = 2 * top * (lse_error + 2.0**-22 * n)
    torch.testing.assert_close(a[0], b[0], atol=o_error, rtol=0)


@LAWS
@given(sizes, spreads, seeds)
def test_merging_commutes_exactly(size, spread, seed):
    a, b = draw_states(2, size, spread, seed)
    ab, ba = merge_state(*a, *b), merge_state(*b, *a)
    assert torch.equal(ab.o, ba.o) and torch.equal(ab.lse, ba.lse)


@LAWS
@given(sizes, spreads, seeds)
def test_merging_is_associative(size, spread, seed):
    a, b, c = states = draw_states(3, size, spread, seed)
    left = merge_state(*merge_state(*a, *b), *c)
    right = merge_state(*a, *merge_state(*b, *c))
    assert_same(left, right, states)


@LAWS
@given(sizes, spreads, seeds, st.sampled_from([0.0, NAN, INF, -INF]), st.sampled_from([INF, -INF]))
def test_the_empty_state_is_the_identity(size, spread, seed, garbage, empty):
    ((o, lse),) = draw_states(1, size, spread, seed)
    nothing = torch.full(size, garbage), torch.full(size[:2], empty)
    want = torch.where((lse == -INF)[..., None], 0.0, o)
    for merged in (
        merge_state(o, lse, *nothing),
        merge_state(*nothing, o, lse),
        merge_states([nothing, (o, lse), nothing]),
        merge_states([(o, lse)]),
    ):
        assert torch.equal(merged.o, want) and torch.equal(merged.lse, lse)


@LAWS
@given(sizes, st.sampled_from([0.1, 100.0, 1e4]), seeds)
def test_a_state_with_itself_adds_log_two(size, spread, seed):
    ((o, lse),) = draw_states(1, size, spread, seed)
    merged = merge_state(o, lse, o, lse)
    want = torch.where((lse == -INF)[..., None], 0.0, o)
    assert torch.equal(merged.o, want)
    right = (lse.double() + math.log(2)).float()
    assert bool(
        ((merged.lse == right) | ((merged.lse - right).abs() <= 2**-23 * right.abs())).all()
    )


@LAWS
@given(st.integers(1, 7), sizes, spreads, seeds, st.data())
def test_any_order_and_any_grouping_give_the_same_state(n, size, spread, seed, data):
    states = draw_states(n, size, spread, seed)
    whole = merge_states(states)
    order = data.draw(st.permutations(range(n)))
    pool = [states[i] for i in order]
    while len(pool) > 1:
        i = data.draw(st.integers(0, len(pool) - 2))
        pool[i : i + 2] = [tuple(merge_state(*pool[i], *pool[i + 1]))]
    last = merge_states([pool[0]])  # a single empty state still holds its garbage
    assert_same(last, whole, states)


@LAWS
@given(st.integers(1, 12), st.integers(0, 11), seeds, st.sampled_from([1.0, 30.0, 1e3]))
def test_any_split_of_the_keys_gives_attention_over_all_of_them(keys, cut, seed, scale):
    g = torch.Generator().manual_seed(seed)
    scores = torch.randn(3, 2, keys, generator=g, dtype=torch.float64) * scale
    scores = scores.float().double()  # what both sides see
    v = torch.randn(keys, 2, 8, generator=g)

    def state(lo: int, hi: int):
        s = scores[..., lo:hi]
        lse = torch.logsumexp(s, -1) if hi > lo else torch.full((3, 2), -INF, dtype=torch.float64)
        o = torch.einsum("thk,khd->thd", torch.softmax(s, -1), v[lo:hi].double())
        return o.float(), lse.float()

    cut = min(cut, keys)
    merged = merge_state(*state(0, cut), *state(cut, keys))
    o, lse = state(0, keys)
    big = float(scores.abs().max())
    torch.testing.assert_close(merged.lse, lse, atol=2.0**-22 * (1 + big), rtol=0)
    error = float(v.abs().max()) * 2.0**-21 * (1 + big)
    torch.testing.assert_close(merged.o, o, atol=error, rtol=0)


def test_long_prefix_against_short_suffix():  # F09 (a): exact only with natural logarithms
    prefix = torch.zeros(1, 1, 16), torch.full((1, 1), math.log(3072))
    suffix = torch.ones(1, 1, 16), torch.full((1, 1), math.log(64))
    o, lse = merge_state(*prefix, *suffix)
    torch.testing.assert_close(o, torch.full_like(o, 64 / 3136), atol=1e-8, rtol=1e-6)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(3136)), atol=1e-6, rtol=0)
