"""Lengths, empty rows, causal corners, windows: answers counted by hand, on every backend here."""

from __future__ import annotations

import math

import pytest
import torch

from attn_backends.errors import InvalidInputError
from attn_backends.merge import merge_state

from .conftest import Field, check, counting, ln

INF = math.inf
KEYS = pytest.mark.parametrize("page_size", [None, 16], ids=["ragged", "paged"])


@KEYS
def test_a_chunk_without_keys_is_the_identity_and_merges_away(field: Field, page_size):  # F03
    spec = field.spec(causal=False, page_size=page_size)
    first = field.probe([2, 3], [2, 4], spec)
    second = field.probe([2, 3], [0, 4], spec, first=4)
    check(second, [0, 0, 5.5, 5.5, 5.5], ln(0, 0, 4, 4, 4))
    merged = merge_state(first.o, first.lse, second.o, second.lse)
    check(merged, [0.5, 0.5, 3.5, 3.5, 3.5], ln(2, 2, 8, 8, 8))


@KEYS
@pytest.mark.parametrize("order", [(5, 0, 7), (0, 5, 7), (5, 7, 0)], ids=str)
def test_an_empty_sequence_leaves_the_lse_of_others_alone(
    split_field: Field, page_size, order
):  # F04
    field = split_field
    spec = field.spec(heads=(2, 2), dim=64, page_size=page_size)
    backend = field.bind(spec, "decode")
    guard = torch.full((5, 2), 7777.0, device=field.device)
    lse, o = guard[1:4], torch.full((3, 2, 64), math.nan, dtype=spec.out_dtype)
    o = o.to(field.device)
    q = torch.zeros(3, 2, 64, dtype=spec.dtype, device=field.device)
    # The same call as a probe, with its LSE between guard words.
    from .conftest import paged

    keys = [torch.zeros(n, 2, 64).to(spec.kv) for n in order]
    values = [counting(n, spec) for n in order]
    if page_size is None:
        k, v = torch.cat(keys), torch.cat(values)
        batch = field.ragged([1, 1, 1], order)
    else:
        k, v, table = paged(keys, values, spec, math.nan)
        batch = field.ragged([1, 1, 1], order, page_table=table)
    k, v = k.to(field.device), v.to(field.device)
    out = backend.run(q, k, v, backend.plan(batch), out=(o, lse))
    check(out, [(n - 1) / 2 if n else 0 for n in order], ln(*order))
    assert bool((guard[0] == 7777).all() and (guard[4] == 7777).all())


@KEYS
def test_causal_is_anchored_at_the_last_key(field: Field, page_size):  # F11
    spec = field.spec(page_size=page_size)
    check(field.probe([2], [5], spec), [1.5, 2], ln(4, 5))
    check(field.probe([1], [5], spec), [2], ln(5))
    out = field.probe([5], [2], spec, first=1)
    check(out, [0, 0, 0, 1, 1.5], ln(0, 0, 0, 1, 2))


@KEYS
@pytest.mark.parametrize(
    ("tokens", "o", "counts"),
    [
        (1, [0, 1, 2, 3, 4, 5], [1] * 6),
        (3, [0, 0.5, 1, 2, 3, 4], [1, 2, 3, 3, 3, 3]),
        (6, [0, 0.5, 1, 1.5, 2, 2.5], [1, 2, 3, 4, 5, 6]),
        (7, [0, 0.5, 1, 1.5, 2, 2.5], [1, 2, 3, 4, 5, 6]),
        (None, [0, 0.5, 1, 1.5, 2, 2.5], [1, 2, 3, 4, 5, 6]),
    ],
)
def test_a_window_of_w_tokens_shows_w_keys(field: Field, page_size, tokens, o, counts):  # F12
    window = None if tokens is None else (tokens - 1, 0)
    spec = field.spec(page_size=page_size, window=window)
    check(field.probe([6], [6], spec), o, ln(*counts))
    check(field.probe([1], [6], spec), o[-1:], ln(*counts[-1:]))


def test_a_window_of_no_tokens_is_refused_instead_of_unbounded(field: Field):  # F12
    with pytest.raises(InvalidInputError, match=r"window=.*unbounded is None, not -1"):
        field.spec(window=(0 - 1, 0))


@KEYS
def test_tiles_that_are_masked_altogether_hide_nothing(split_field: Field, page_size):  # F13
    field = split_field
    spec = field.spec(dim=16, page_size=page_size, window=(3, 0))
    out = field.probe([1], [256], spec)
    check(out, [253.5], ln(4))
    spec = field.spec(page_size=page_size, causal=False, window=(2, None))
    check(field.probe([4], [12], spec), [8.5, 9, 9.5, 10], ln(6, 5, 4, 3))


@KEYS
def test_padding_sequences_of_a_captured_batch_hurt_nobody(split_field: Field, page_size):  # F23
    field = split_field
    spec = field.spec(heads=(4, 1), dim=64, page_size=page_size)
    four = field.probe([1] * 4, [5, 9, 3, 0], spec)
    check(four, [2, 4, 1, 0], ln(5, 9, 3, 0))
    three = field.probe([1] * 3, [5, 9, 3], spec)
    assert torch.equal(four.o[:3], three.o) and torch.equal(four.lse[:3], three.lse)
    check(field.probe([1] * 4, [0] * 4, spec), [0] * 4, ln(0, 0, 0, 0))


@KEYS
def test_lengths_of_zero_and_one_in_odd_places(field: Field, page_size):  # F31
    spec = field.spec(heads=(9, 3), dim=64, page_size=page_size)
    check(field.probe([1, 0, 1], [3, 0, 5], spec), [1, 2], ln(3, 5))
    check(field.probe([2, 1], [0, 0], spec), [0, 0, 0], ln(0, 0, 0))
    for q_lens, kv_lens in (([], []), ([0, 0], [3, 2])):
        out = field.probe(q_lens, kv_lens, spec)
        assert out.o.shape == (0, 9, 64) and out.o.dtype == spec.out_dtype
        assert out.lse.shape == (0, 9) and out.lse.dtype == torch.float32


def test_a_batch_without_keys_and_without_causality(field: Field):  # F31
    spec = field.spec(heads=(9, 3), dim=64, causal=False)
    check(field.probe([2, 1], [0, 0], spec), [0, 0, 0], ln(0, 0, 0))


@pytest.mark.parametrize("n", [1, 2, 64, 3072])
def test_lse_is_a_natural_logarithm(split_field: Field, n):  # F09
    field = split_field
    spec = field.spec(heads=(2, 1), dim=64)
    backend = field.bind(spec, "decode")
    q, k = torch.zeros(1, 2, 64).to(spec.dtype), torch.zeros(n, 1, 64).to(spec.kv)
    out = field.run(backend, q, [k], [torch.ones_like(k)], [1])
    check(out, [1], ln(n))


def test_a_long_prefix_and_a_short_suffix_weigh_by_their_keys(field: Field):  # F09
    spec = field.spec(heads=(2, 1), dim=64)
    backend = field.bind(spec, "decode")
    q = torch.zeros(1, 2, 64).to(spec.dtype)
    zeros = lambda n: torch.zeros(n, 1, 64).to(spec.kv)  # noqa: E731
    prefix = field.run(backend, q, [zeros(3072)], [zeros(3072)], [1])
    suffix = field.run(backend, q, [zeros(64)], [zeros(64) + 1], [1])
    check(prefix.merge(suffix), [64 / 3136], [8.050703])
