"""What is handed to a library: rows that see keys, keys that some row sees, and nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import on_device_only

from attn_backends.adapters.arrange import arrange, empty_rows, with_host_lengths
from attn_backends.adapters.flashinfer_pages import HostBatch, page_lists
from attn_backends.adapters.padded import Padded
from attn_backends.adapters.tensors import aligned, dense_keys
from attn_backends.batch import Batch
from attn_backends.capacity import Capacity
from attn_backends.spec import AttentionSpec

LENGTHS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), min_size=1, max_size=5)
BOUNDS = st.sampled_from([None, 0, 1, 3])


def make_spec(causal: bool, left: int | None, right: int | None, page_size: int | None):
    return AttentionSpec(
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        dtype=torch.float32,
        causal=causal,
        window=(left, right),
        page_size=page_size,
    )


def visible(q_len: int, kv_len: int, spec: AttentionSpec) -> torch.Tensor:
    """``[q_len, kv_len]`` by the definition."""
    left, right = spec.bounds
    i = torch.arange(q_len)[:, None] + kv_len - q_len
    j = torch.arange(kv_len)[None, :]
    seen = torch.ones(q_len, kv_len, dtype=torch.bool)
    if left is not None:
        seen &= j >= i - left
    if right is not None:
        seen &= j <= i + right
    return seen


@settings(max_examples=80, deadline=None, derandomize=True)
@given(LENGTHS, st.booleans(), BOUNDS, BOUNDS)
def test_exactly_the_rows_that_see_a_key_are_handed_over(lengths, causal, left, right) -> None:
    spec = make_spec(causal, left, right, None)
    q_lens, kv_lens = [q for q, _ in lengths], [kv for _, kv in lengths]
    batch = Batch.from_lengths(q_lens, kv_lens)
    sees = [visible(q, kv, spec).any(dim=-1) for q, kv in lengths]
    want = torch.cat(sees)
    work = arrange(batch, spec)
    rows = torch.arange(sum(q_lens)) if work.rows is None else work.rows
    assert rows.tolist() == want.nonzero()[:, 0].tolist()
    assert work.batch.total_q == int(want.sum()) and 0 not in work.batch.q_lens
    assert torch.equal(empty_rows(batch, spec), ~want)
    device_only = arrange(on_device_only(batch), spec)
    assert torch.equal(device_only.empty[: sum(q_lens)], ~want)
    assert bool(device_only.empty[sum(q_lens) :].all())


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    LENGTHS,
    st.booleans(),
    BOUNDS,
    st.sampled_from([None, 1, 2, 4]),
    st.booleans(),
    st.integers(0, 2),
)
def test_exactly_the_keys_that_a_row_sees_are_gathered(
    lengths, causal, left, page_size, host, room
) -> None:
    spec = make_spec(causal, left, None, page_size)
    q_lens, kv_lens = [q for q, _ in lengths], [kv for _, kv in lengths]
    table = starts = None
    if page_size is None:
        starts = [0]
        for kv in kv_lens:
            starts.append(starts[-1] + kv + room)
        keys = torch.arange(starts[-1])[:, None, None]
        own = [keys[s : s + kv, 0, 0] for s, kv in zip(starts, kv_lens)]
    else:
        pages = [-(-kv // page_size) for kv in kv_lens]
        ids = iter(torch.randperm(sum(pages) + 1).tolist())
        junk, width = 2**31 - 1, max(pages) + 1
        table = [[next(ids) for _ in range(n)] + [junk] * (width - n) for n in pages]
        keys = torch.arange((sum(pages) + 1) * page_size).view(-1, page_size)[..., None, None]
        flat = [
            torch.tensor([p * page_size + s for p in row[:n] for s in range(page_size)])
            for row, n in zip(table, pages)
        ]
        own = [ids_[:kv] for ids_, kv in zip(flat, kv_lens)]
    batch = Batch.from_lengths(q_lens, kv_lens, page_table=table, cu_seqlens_k=starts)
    work = arrange(batch if host else on_device_only(batch), spec)
    if not work.batch.num_seqs:
        return
    dense = dense_keys(work, spec, keys.shape[0])
    got = dense.take(keys)[: int(dense.cu_seqlens[-1]), 0, 0]
    want = []
    for q, kv, mine in zip(q_lens, kv_lens, own):
        kept = kv if left is None else min(kv, q + left)
        if host and not visible(q, kv, spec).any():
            continue
        want += mine[kv - kept :].long().tolist()
    assert got.tolist() == want
    if host:
        assert dense.take(keys).shape[0] == len(want)
        padded = Padded(work.batch, range(work.batch.num_seqs), page_size, left)
        laid = padded.keys(keys + 1)  # [n, 1, max_k, 1], zero where there is no key
        assert (laid[laid > 0] - 1).tolist() == want


@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 48])
@pytest.mark.parametrize("host_table", [True, False])
def test_page_lists_hold_visible_pages_and_last_lengths_of_one_to_a_page(page_size, host_table):
    kv_lens = [0, 1, page_size - 1, page_size, page_size + 1, 3 * page_size]
    pages = [-(-kv // page_size) for kv in kv_lens]
    ids = iter(range(100, 200))
    table = [[next(ids) for _ in range(n)] + [2**31 - 1] * (4 - n) for n in pages]
    batch = Batch.from_lengths([1] * 6, kv_lens, page_table=table)
    facts = HostBatch.of(batch)
    if not host_table:
        facts = facts._replace(host_page_table=None)
    lists = page_lists(facts, page_size)
    assert lists.indptr.tolist() == [sum(pages[:i]) for i in range(7)]
    assert lists.indices.tolist() == [p for row, n in zip(table, pages) for p in row[:n]]
    for n, last, kv in zip(pages, lists.last_page_len.tolist(), kv_lens):
        assert (n == 0 and last == 0) or (
            1 <= last <= page_size and (n - 1) * page_size + last == kv
        )


def test_padded_facts_always_cover_the_capacity() -> None:
    batch = Batch.from_lengths([2, 1], [4, 0], page_table=[[0], [1]])
    capacity = Capacity(num_seqs=4, total_q=7, max_seqlen_q=4, max_seqlen_k=8, max_pages=2)
    facts = HostBatch.of(batch).padded(capacity)
    assert facts.q_lens == (2, 1, 0, 0, 4) and facts.kv_lens == (4, 0, 0, 0, 0)
    assert page_lists(facts, 4).indptr.tolist() == [0, 1, 1, 1, 1, 1]


def test_host_lengths_come_from_the_device_once_and_exactly() -> None:
    batch = Batch.from_lengths([2, 0, 3], [4, 1, 0])
    found = with_host_lengths(on_device_only(batch))
    assert found.q_lens == (2, 0, 3) and found.kv_lens == (4, 1, 0)
    assert (found.max_seqlen_q, found.max_seqlen_k, found.total_q) == (3, 4, 5)
    assert with_host_lengths(batch) is batch


def test_rows_at_odd_addresses_are_copied_and_others_are_not() -> None:
    buffer = torch.zeros(4, 2, 72, dtype=torch.bfloat16)
    assert aligned(buffer[..., :64]).data_ptr() == buffer.data_ptr()
    assert aligned(buffer[..., 1:65]).data_ptr() % 16 == 0
    odd = torch.zeros(4, 2, 65, dtype=torch.bfloat16)[..., :64]
    assert aligned(odd).stride() == (128, 64, 1)
