"""The batch: what lengths and tables are taken, and how the others are named."""

from __future__ import annotations

import re
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_backends.batch import Batch
from attn_backends.errors import InvalidInputError
from attn_backends.spec import AttentionSpec
from attn_backends.validation import check_batch

RAGGED = AttentionSpec(2, 1, 8, dtype=torch.float32)
PAGED = AttentionSpec(2, 1, 8, dtype=torch.float32, page_size=4)
lengths = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30)), max_size=6)
fast = settings(max_examples=100, derandomize=True, deadline=None)


def index(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


@fast
@given(lengths)
def test_ragged_lengths_become_starts_and_exact_host_facts(pairs):
    q, kv = [a for a, _ in pairs], [b for _, b in pairs]
    batch = Batch.from_lengths(q, kv)
    assert batch.cu_seqlens_q.tolist() == [0, *accumulate(q)]
    assert batch.cu_seqlens_k.tolist() == [0, *accumulate(kv)]
    assert batch.seqlens_k.tolist() == kv and batch.cu_seqlens_q.dtype == torch.int32
    assert (batch.total_q, batch.total_k) == (sum(q), sum(kv))
    assert batch.max_seqlen_q == max(q, default=0) and batch.max_seqlen_k == max(kv, default=0)
    assert batch.num_seqs == len(q) and not batch.is_paged
    check_batch(batch, RAGGED)


@fast
@given(lengths, st.integers(1, 5), st.integers(0, 3), st.sampled_from([torch.int32, torch.int64]))
def test_page_tables_of_any_width_are_taken_and_ids_are_found(pairs, size, spare, dtype):
    q, kv = [a for a, _ in pairs], [b for _, b in pairs]
    width = max((-(-n // size) for n in kv), default=0) + spare
    ids = iter(range(5, 10_000))
    table = torch.full((len(q), width), 2**31 - 1, dtype=dtype)
    used = []
    for b, n in enumerate(kv):
        for page in range(-(-n // size)):
            table[b, page] = next(ids)
            used.append(int(table[b, page]))
    batch = Batch.from_lengths(q, kv, page_table=table)
    assert batch.page_table.dtype == torch.int32 and batch.cu_seqlens_k is None
    assert batch.page_id_range(size) == ((min(used), max(used)) if used else (0, -1))
    check_batch(batch, AttentionSpec(2, 1, 8, dtype=torch.float32, page_size=size))


@fast
@given(lengths.filter(bool), st.data())
def test_a_length_that_is_negative_or_beyond_its_room_is_named(pairs, data):
    q, kv = [a for a, _ in pairs], [b for _, b in pairs]
    b = data.draw(st.integers(0, len(q) - 1))
    which, name = data.draw(st.sampled_from([(q, "q_lens"), (kv, "kv_lens")]))
    which[b] = data.draw(st.integers(-5, -1))
    with pytest.raises(InvalidInputError, match=rf"{name}\[{b}\]={which[b]} \(allowed: 0\.\."):
        Batch.from_lengths(q, kv)


@fast
@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.data())
def test_ragged_rooms_hold_their_lengths(rooms, data):
    kv = [data.draw(st.integers(0, room)) for room in rooms]
    starts = [0, *accumulate(rooms)]
    batch = Batch.from_lengths([1] * len(kv), kv, cu_seqlens_k=starts)
    assert batch.total_k == starts[-1] and batch.cu_seqlens_k.tolist() == starts
    kv[-1] = rooms[-1] + 1
    with pytest.raises(InvalidInputError, match=rf"kv_lens\[{len(kv) - 1}\]={kv[-1]}"):
        Batch.from_lengths([1] * len(kv), kv, cu_seqlens_k=starts)


BAD = [
    (lambda: Batch.from_lengths([1, 2], [3]), "kv_lens=1 lengths"),
    (lambda: Batch.from_lengths(2, [3, 3]), "q_lens=2 (allowed: one int for each sequence"),
    (lambda: Batch.from_lengths([1], "3"), "kv_lens='3' (allowed: one int for each sequence"),
    (lambda: Batch.from_lengths([1.5], [3]), "q_lens[0]=1.5"),
    (lambda: Batch.from_lengths([True], [3]), "q_lens[0]=True"),
    (lambda: Batch.from_lengths(["1"], [3]), "q_lens[0]='1'"),
    (lambda: Batch.from_lengths(torch.ones(2), [3, 3]), "q_lens=torch.float32"),
    (lambda: Batch.from_lengths([2**31], [3]), "q_lens[0]=2147483648"),
    (lambda: Batch.from_lengths([2**30, 2**30], [3, 3]), "sum(q_lens)=2147483648"),
    (lambda: Batch.from_lengths([1], [3], cu_seqlens_k=[1, 5]), "cu_seqlens_k[0]=1"),
    (lambda: Batch.from_lengths([1, 1], [3, 0], cu_seqlens_k=[0, 3, 2]), "cu_seqlens_k[2]=2"),
    (lambda: Batch.from_lengths([1], [3], cu_seqlens_k=[0, 3, 4]), "cu_seqlens_k=3 starts"),
    (
        lambda: Batch.from_lengths([1], [3], cu_seqlens_k=[0, 3], page_table=[[0]]),
        "cu_seqlens_k=given",
    ),
    (lambda: Batch.from_lengths([1], [3], page_table=torch.zeros(1, 1)), "page_table=torch.float"),
    (lambda: Batch.from_lengths([1, 1], [3, 3], page_table=[[0]]), "page_table.shape=[1, 1]"),
    (
        lambda: Batch.from_lengths([1, 1], [3, 9], page_table=[[0], [1, 2]]),
        "page_table=[[0], [1, 2]] (allowed: [B, max_pages], rows of one width); fill shorter rows",
    ),
    (lambda: Batch.from_lengths([1], [3], page_table=torch.zeros(3).int()), "page_table.shape=[3]"),
    (lambda: Batch(index(0, 1), index(3)), "page_table, cu_seqlens_k=neither"),
    (
        lambda: Batch(index(0, 1), index(3), index(0, 3), torch.zeros(1, 1).int()),
        "page_table, cu_seqlens_k=both",
    ),
    (lambda: Batch([0, 1], index(3), index(0, 3)), "cu_seqlens_q=list"),
    (lambda: Batch(index(0, 1).float(), index(3), index(0, 3)), "cu_seqlens_q=torch.float32"),
    (lambda: Batch(torch.zeros(0).int(), index(3), index(0, 3)), "cu_seqlens_q.shape=[0]"),
    (lambda: Batch(index(0, 1), index(3, 4), index(0, 3)), "seqlens_k.shape=[2]"),
    (lambda: Batch(index(0, 1), index(3), index(0)), "cu_seqlens_k.shape=[1]"),
    (lambda: Batch(index(0, 1), index(3).to("meta"), index(0, 3)), "seqlens_k.device=meta"),
    (lambda: Batch(index(0, 1), index(3), index(0, 3), total_q=-1), "total_q=-1"),
    (lambda: Batch(index(0, 1), index(3), index(0, 3)), "total_q=None"),
    (lambda: Batch(index(0, 1), index(3), index(0, 3), total_q=1), "max_seqlen_q=None"),
    (
        lambda: Batch(index(0, 1), index(3), index(0, 3), total_q=1, max_seqlen_q=1),
        "max_seqlen_k=None (allowed: an int >= 0); an upper bound will do",
    ),
    (
        lambda: Batch(
            index(0, 1), index(3), index(0, 3), total_q=1, max_seqlen_q=1, max_seqlen_k=3.0
        ),
        "max_seqlen_k=3.0",
    ),
    (lambda: Batch.from_lengths([1], [3], device="gpu"), "device='gpu'"),
    (lambda: Batch.from_lengths([1], [3], device="cuda:99"), "device='cuda:99'"),
]


@pytest.mark.parametrize(("make", "start"), BAD, ids=[start for _, start in BAD])
def test_a_malformed_batch_is_named_with_value_and_range(make, start):
    with pytest.raises(InvalidInputError, match="^" + re.escape(start)) as error:
        make()
    assert " (allowed: " in str(error.value)


def test_int64_and_strided_index_tensors_are_converted_once():
    wide = torch.tensor([[0, 9], [2, 9], [5, 9]])
    starts = torch.tensor([0, 3, 6])
    batch = Batch(
        wide[:, 0], torch.tensor([3, 3]), starts, total_q=5, max_seqlen_q=3, max_seqlen_k=3
    )
    assert batch.cu_seqlens_q.dtype == torch.int32 and batch.cu_seqlens_q.is_contiguous()
    assert batch.cu_seqlens_q.tolist() == [0, 2, 5]
    assert wide.tolist() == [[0, 9], [2, 9], [5, 9]]


@pytest.mark.parametrize(
    ("batch", "spec", "start"),
    [
        (Batch.from_lengths([1], [3]), PAGED, "batch=ragged"),
        (Batch.from_lengths([1], [3], page_table=[[0]]), RAGGED, "batch=paged"),
        (Batch.from_lengths([1], [5], page_table=[[0]]), PAGED, "kv_lens[0]=5"),
        (Batch.from_lengths([1], [3], page_table=[[-1]]), PAGED, "page_table=-1"),
    ],
    ids=["ragged", "paged", "too-long", "negative-id"],
)
def test_a_batch_that_cannot_belong_to_a_spec_is_refused(batch, spec, start):
    with pytest.raises(InvalidInputError, match="^" + re.escape(start)):
        check_batch(batch, spec)


DEVICE_FACTS = {"total_q": 3, "total_k": 6, "max_seqlen_q": 2, "max_seqlen_k": 4}
DEEP = [
    ({"cu_seqlens_q": index(1, 2, 3)}, "cu_seqlens_q[0]=1"),
    ({"cu_seqlens_q": index(0, 3, 2)}, "cu_seqlens_q[2]=2"),
    ({"cu_seqlens_k": index(0, 5, 4)}, "cu_seqlens_k[2]=4"),
    ({"seqlens_k": index(4, 3)}, "seqlens_k[1]=3"),
    ({"seqlens_k": index(-1, 2)}, "seqlens_k[0]=-1"),
    ({"total_q": 2}, "total_q=2"),
    ({"max_seqlen_q": 1}, "max_seqlen_q=1"),
    ({"max_seqlen_k": 3}, "max_seqlen_k=3"),
]


@pytest.mark.parametrize(("change", "start"), DEEP, ids=[start for _, start in DEEP])
def test_the_debug_switch_checks_device_tensors(monkeypatch, change, start):
    tensors = {
        "cu_seqlens_q": index(0, 2, 3),
        "seqlens_k": index(4, 2),
        "cu_seqlens_k": index(0, 4, 6),
    }
    batch = Batch(**{**tensors, **DEVICE_FACTS, **change})
    check_batch(batch, RAGGED)  # without the switch, device memory is not read
    monkeypatch.setenv("ATTN_BACKENDS_VALIDATE", "1")
    check_batch(Batch(**tensors, **DEVICE_FACTS), RAGGED)
    with pytest.raises(InvalidInputError, match="^" + re.escape(start)):
        check_batch(batch, RAGGED)
