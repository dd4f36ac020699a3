"""Lengths say exactly what transformers' dense masks say, and rows are views of any layout."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import masking_utils as hf

from attn_backends import InvalidInputError, UnsupportedCallError
from attn_backends.engines.transformers.masks import (
    LazyMask,
    Lengths,
    Rule,
    mask_function,
    read_rule,
)
from attn_backends.engines.transformers.rows import kv_rows

RULES = {
    "causal": hf.causal_mask_function,
    "sliding1": hf.sliding_window_causal_mask_function(1),
    "sliding3": hf.sliding_window_causal_mask_function(3),
    "bidirectional": hf.bidirectional_mask_function,
    "bidirectional2": hf.sliding_window_bidirectional_mask_function(2),
}


def matrix(lengths: Lengths, rule: Rule, batch: int, q_len: int, kv_len: int) -> torch.Tensor:
    """Visibility ``[B, Sq, Skv]`` by the contract's definition, one element at a time."""
    seen = torch.zeros(batch, q_len, kv_len, dtype=torch.bool)
    left, right = rule.window or (None, 0 if rule.causal else None)
    rows = iter([(b, i) for b in range(batch) for i in range(q_len)])
    for q, kv, (b, begin) in zip(lengths.q_lens, lengths.kv_lens, lengths.kv_begins):
        for i in range(q):
            row_b, row = next(rows)
            assert row_b == b
            for j in range(kv):
                behind = i + kv - q - j
                hidden = (left is not None and behind > left) or (
                    right is not None and -behind > right
                )
                seen[b, row, begin + j] = not hidden
    assert next(rows, None) is None
    return seen


def draw(rng: random.Random) -> dict:
    """One mask request: any phase, any cache offset, any padding."""
    batch, q_len, q_offset = rng.randint(1, 3), rng.choice([1, 1, 2, 4]), rng.choice([0, 0, 3, 6])
    end = q_offset + q_len
    kv_offset = rng.choice([0, 0, min(2, q_offset)])
    kv_len = end - kv_offset + rng.choice([0, 0, 3])
    padding = None
    kind = rng.choice(["none", "full", "left", "right", "both", "random", "short"])
    if kind != "none":
        padding = torch.ones(batch, end - (kind == "short" and end > 1), dtype=torch.bool)
        for row in padding:
            if kind in ("left", "both"):
                row[: rng.randint(0, len(row))] = False
            if kind in ("right", "both"):
                row[len(row) - rng.randint(0, len(row)) :] = False
            if kind == "random":
                row.copy_(torch.tensor([rng.random() < 0.7 for _ in row]))
    return dict(
        batch_size=batch,
        q_length=q_len,
        kv_length=kv_len,
        q_offset=q_offset,
        kv_offset=kv_offset,
        attention_mask=padding,
    )


@pytest.mark.parametrize("name", RULES)
def test_lengths_say_what_the_dense_mask_says(name):
    rng, lazy, formed = random.Random(0), 0, 0
    for _ in range(300):
        request = draw(rng) | {"mask_function": RULES[name]}
        batch, q_len, kv_len = (request[n] for n in ("batch_size", "q_length", "kv_length"))
        dense = hf.sdpa_mask(**request, allow_is_causal_skip=False)
        got = mask_function(**request)
        assert got.shape == (batch, 1, q_len, kv_len)
        if not isinstance(got, LazyMask):
            formed += 1
            assert torch.equal(got, dense)
            continue
        lazy += 1
        seen = matrix(got.lengths, got.rule, batch, q_len, kv_len)
        # A query whose own token is padding may see less: its output is not used.
        own = torch.ones(batch, q_len, dtype=torch.bool)
        if request["attention_mask"] is not None and name != "bidirectional":
            positions = range(request["q_offset"], request["q_offset"] + q_len)
            own = hf.prepare_padding_mask(request["attention_mask"], positions.stop, 0)[
                :, positions
            ]
        assert torch.equal(seen[own], dense[:, 0][own]), request
        assert torch.equal(got.dense(), dense)
    assert lazy > 150 and formed > 5


@pytest.mark.parametrize(
    "function, rule",
    [
        (RULES["causal"], Rule(True)),
        (RULES["sliding3"], Rule(True, 2)),
        (RULES["bidirectional2"], Rule(False, 2, 2)),
        (hf.and_masks(RULES["sliding3"], hf.sliding_window_overlay(2)), Rule(True, 1)),
        (hf.or_masks(RULES["causal"], RULES["bidirectional"]), None),
        (hf.and_masks(RULES["causal"], lambda b, h, q, k: k != 1), None),
        (hf.chunked_causal_mask_function(3, torch.zeros(1, dtype=torch.int)), None),
        (hf.and_masks(RULES["causal"], hf.packed_sequence_mask_function(torch.zeros(1, 4))), None),
    ],
)
def test_only_rules_that_lengths_can_say_are_read(function, rule):
    assert read_rule(function) == rule


def test_a_window_of_w_tokens_reaches_w_minus_1_back():
    # F12
    for tokens in (1, 3, 6):
        rule = read_rule(hf.sliding_window_causal_mask_function(tokens))
        assert rule is not None and rule.window == (tokens - 1, 0)
    with pytest.raises(UnsupportedCallError, match=r"sliding_window=0 \(supported: >= 1\)"):
        read_rule(hf.sliding_window_causal_mask_function(0))


def test_a_mask_that_was_touched_is_read_as_it_is():
    padding = torch.tensor([[True, True, True], [False, True, True]])
    request = dict(batch_size=2, q_length=3, kv_length=3, attention_mask=padding)
    dense = hf.sdpa_mask(**request, allow_is_causal_skip=False)
    touched = mask_function(**request)
    assert touched.lengths is not None
    touched[:, :, :, 0] = False
    assert touched.lengths is None
    want = dense.clone()
    want[:, :, :, 0] = False
    assert torch.equal(touched.dense(), want)
    for change in (
        lambda m: m[:, :, -1:],
        lambda m: m.expand(2, 4, 3, 3),
        lambda m: ~m,
        lambda m: torch.where(m, 0.0, -1.0),
        lambda m: m & m.transpose(2, 3),
        lambda m: torch.cat([m, m], dim=-1),
        lambda m: m.to(torch.float32),
        lambda m: m.clone(),
    ):
        got = change(mask_function(**request))
        assert type(got) is torch.Tensor
        assert torch.equal(got, change(dense))


def test_a_mask_that_only_moves_stays_unformed():
    mask = mask_function(batch_size=2, q_length=3, kv_length=3)
    assert mask.to("cpu") is mask and mask.to(torch.bool) is mask and mask.lengths is not None
    moved = mask.to("meta")
    assert isinstance(moved, LazyMask) and moved.device.type == "meta"
    assert moved.lengths == mask.lengths and moved.rule == mask.rule


def layouts(batch: int, heads: int, length: int, dim: int) -> dict[str, torch.Tensor]:
    """``[B, HK, S, D]`` as caches and projections leave it."""
    numbers = lambda *shape: torch.arange(  # noqa: E731
        torch.Size(shape).numel(), dtype=torch.float32
    ).reshape(shape)
    fused = numbers(batch, length, 3, heads, dim)
    return {
        "cache": numbers(batch, heads, length, dim),
        "projection": numbers(batch, length, heads, dim).transpose(1, 2),
        "fused": fused[:, :, 1].transpose(1, 2),
        "longer_cache": numbers(batch, heads, length + 3, dim)[:, :, :length],
        "cut_heads": numbers(batch, heads + 1, length, dim)[:, 1:],
        "cut_lanes": numbers(batch, heads, length, dim + 1)[..., :dim],
        "shared": numbers(1, heads, length, dim).expand(batch, -1, -1, -1),
        "token_major_heads": numbers(batch, heads, dim, length).transpose(2, 3),
    }


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (1, 2, 5, 4), (3, 2, 1, 4), (3, 2, 5, 4), (2, 1, 7, 3)]
)
@pytest.mark.parametrize("layout", layouts(1, 1, 1, 1))
def test_rows_hold_every_token_of_every_entry(layout, shape):
    key = layouts(*shape)[layout]
    k, v, step = kv_rows(key, key)
    for b in range(shape[0]):
        assert torch.equal(k[b * step : b * step + shape[2]], key[b].transpose(0, 1))
    assert torch.equal(k, v)
    copied = layout in ("token_major_heads",) or (layout == "shared" and shape[0] > 1)
    if not copied:
        assert k.data_ptr() == key.data_ptr()


def test_rows_of_keys_and_values_in_different_layouts_share_one_step():
    keys, values = layouts(3, 2, 5, 4)["cache"], layouts(3, 2, 5, 6)["projection"]
    k, v, step = kv_rows(keys, values)
    for b in range(3):
        assert torch.equal(k[b * step : b * step + 5], keys[b].transpose(0, 1))
        assert torch.equal(v[b * step : b * step + 5], values[b].transpose(0, 1))


def test_a_batch_counts_from_its_first_real_key():
    lengths = Lengths((2, 2), (3, 5), ((0, 2), (1, 0)))
    batch = lengths.batch(10, torch.device("cpu"))
    assert lengths.first_row == 2
    assert batch.cu_seqlens_k.tolist() == [0, 8, 13]
    assert batch.kv_lens == (3, 5) and batch.q_lens == (2, 2)
    with pytest.raises(InvalidInputError):  # entries closer together than their keys are long
        lengths.batch(1, torch.device("cpu"))
