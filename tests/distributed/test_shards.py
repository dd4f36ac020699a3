"""Shards: who holds what, without any process beside this one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attn_backends as ab
from attn_backends.distributed import Interleaved, Shards, shard_batch, zigzag_shards

LENS = st.lists(st.integers(0, 40), min_size=0, max_size=5)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(q_lens=LENS, extra=st.integers(0, 9), world=st.integers(1, 7))
def test_every_row_is_on_exactly_one_rank(q_lens: list[int], extra: int, world: int) -> None:
    kv_lens = [q + extra * (i % 3) for i, q in enumerate(q_lens)]
    shards = zigzag_shards(q_lens, world, kv_lens=kv_lens)
    for rows, total in ((shards.query_rows, sum(q_lens)), (shards.key_rows, sum(kv_lens))):
        held = torch.cat([rows(rank) for rank in range(world)])
        assert held.sort().values.tolist() == list(range(total))
    x = torch.arange(sum(q_lens))
    parts = [x[shards.query_rows(rank)] for rank in range(world)]
    assert torch.equal(shards.gather_queries(parts), x)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(length=st.integers(0, 200), world=st.integers(1, 7))
def test_zigzag_balances_causal_work_to_one_token(length: int, world: int) -> None:
    shards = zigzag_shards([length], world)
    pairs = [
        sum(p + 1 for a, z in shards.queries[rank][0] for p in range(a, z)) for rank in range(world)
    ]
    held = [shards.num_queries(rank) for rank in range(world)]
    assert max(held) - min(held) <= 2
    assert max(pairs) - min(pairs) <= 2 * (length + 1)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(keys=st.integers(0, 60), block=st.integers(1, 20), world=st.integers(1, 5))
def test_interleaved_counts_what_it_places(keys: int, block: int, world: int) -> None:
    layout = Interleaved(block)
    held = [layout.positions(keys, rank, world) for rank in range(world)]
    assert torch.cat(held).sort().values.tolist() == list(range(keys))
    for rank in range(world):
        for n in range(keys + 1):
            assert layout.count(n, rank, world) == int((held[rank] < n).sum())


def test_several_causal_queries_become_sequences_with_the_same_pages() -> None:
    table = torch.tensor([[5, 6], [7, 8]])
    batch = shard_batch([3, 1], [7, 4], Interleaved(2), 1, 2, page_table=table)
    # Keys 2, 3, 6 of the first sequence and 2, 3 of the second lie on rank 1.
    assert batch.q_lens == (1, 1, 1, 1) and batch.kv_lens == (2, 2, 3, 2)
    assert batch.page_table.tolist() == [[5, 6]] * 3 + [[7, 8]]


def test_malformed_shards_are_refused_by_name() -> None:
    with pytest.raises(ab.InvalidInputError, match=r"keys\[:\]\[0\]"):
        Shards((2,), (3,), (((), ((1, 3),))[1:],), ((((0, 2),),),))
    with pytest.raises(ab.InvalidInputError, match=r"kv_lens\[0\]=1 .*>= 2"):
        zigzag_shards([2], 2, kv_lens=[1])
    with pytest.raises(ab.InvalidInputError, match="world=0"):
        zigzag_shards([2], 0)
    with pytest.raises(ab.InvalidInputError, match="block=0"):
        Interleaved(0)
    with pytest.raises(ab.InvalidInputError, match=r"max\(q_lens\)=2"):
        shard_batch([2], [5], Interleaved(1), 0, 2)
    with pytest.raises(ab.InvalidInputError, match="rank=2"):
        shard_batch([1], [5], Interleaved(1), 2, 2)
    with pytest.raises(ab.InvalidInputError, match=r"parts\[0\].shape\[0\]=3"):
        zigzag_shards([2], 1).gather_queries([torch.zeros(3)])
