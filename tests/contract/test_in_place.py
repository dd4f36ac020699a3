"""A capacity in place: the engine's own tensors are the buffers that a graph reads."""

from __future__ import annotations

import pytest
import torch

from attn_backends.backend import AttentionBackend
from attn_backends.batch import Batch
from attn_backends.capabilities import FEATURES, Capabilities
from attn_backends.capacity import Capacity
from attn_backends.errors import InvalidInputError
from attn_backends.spec import AttentionSpec

PAGED = AttentionSpec(4, 2, 8, dtype=torch.float32, page_size=4)


class Planner(AttentionBackend):
    """Plans, and never runs."""

    name = "planner"
    capabilities = Capabilities(
        devices=("cpu",), dtypes=(torch.float32,), features=frozenset(FEATURES)
    )

    def _run(self, q, k, v, plan, extras, out):
        raise AssertionError("nothing here runs")


def engine_batch(num_seqs=2, width=3, max_k=12):
    """A batch over tensors that an engine keeps from step to step."""
    return Batch(
        cu_seqlens_q=torch.arange(num_seqs + 1, dtype=torch.int32),
        seqlens_k=torch.full((num_seqs,), 5, dtype=torch.int32),
        page_table=torch.arange(num_seqs * width, dtype=torch.int32).view(num_seqs, width),
        total_q=num_seqs,
        max_seqlen_q=1,
        max_seqlen_k=max_k,
    )


def test_the_buffers_are_the_tensors_of_the_batch():
    batch = engine_batch()
    plan = Planner(PAGED).plan(batch, Capacity(2, 2, 1, 12, 3, in_place=True))
    for name in ("cu_seqlens_q", "seqlens_k", "page_table"):
        assert getattr(plan.batch, name).data_ptr() == getattr(batch, name).data_ptr()
    batch.seqlens_k.fill_(7)
    assert not plan.update_in_place()  # unless a backend says so, it needs the batch
    plan.update(batch)
    assert plan.batch.seqlens_k.tolist() == [7, 7]
    assert batch.page_table.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_an_update_with_other_tensors_copies_them():
    plan = Planner(PAGED).plan(engine_batch(), Capacity(2, 2, 1, 12, 3, in_place=True))
    other = engine_batch()
    other.seqlens_k.copy_(torch.tensor([1, 2]))
    other.page_table.add_(10)
    plan.update(other)
    assert plan.batch.seqlens_k.tolist() == [1, 2]
    assert plan.batch.page_table[0].tolist() == [10, 11, 12]
    assert plan.batch.page_table.data_ptr() != other.page_table.data_ptr()


def test_an_update_with_fewer_sequences_leaves_the_rest_empty():
    plan = Planner(PAGED).plan(engine_batch(), Capacity(2, 2, 1, 12, 3, in_place=True))
    plan.update(engine_batch(num_seqs=1))
    assert plan.batch.seqlens_k.tolist() == [5, 0]
    assert plan.batch.cu_seqlens_q.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    "capacity, field",
    [
        (Capacity(3, 3, 1, 12, 3, in_place=True), "batch.num_seqs=2"),
        (Capacity(2, 2, 1, 12, 4, in_place=True), "page_table.shape[1]=3"),
    ],
    ids=["sequences", "columns"],
)
def test_buffers_of_another_size_are_refused(capacity, field):
    with pytest.raises(InvalidInputError) as error:
        Planner(PAGED).plan(engine_batch(), capacity)
    assert field in str(error.value)


def test_in_place_is_a_bool():
    with pytest.raises(InvalidInputError, match=r"capacity\.in_place='yes'"):
        Capacity(2, 2, 1, 12, 3, in_place="yes")
