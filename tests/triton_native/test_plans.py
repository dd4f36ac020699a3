"""Plans: updates within a capacity, batch invariance, unknown lengths, graphs, host cost."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch

from attn_backends.batch import Batch
from attn_backends.capacity import Capacity
from attn_backends.errors import InvalidInputError, UnsupportedCallError
from attn_backends.spec import AttentionSpec

HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16


def device_only(batch: Batch) -> Batch:
    """The same batch as an engine would build it: no exact host lengths, generous bounds."""
    return dataclasses.replace(
        batch, q_lens=None, kv_lens=None, host_page_table=None, total_q=batch.total_q + 3,
        max_seqlen_q=batch.max_seqlen_q + 1, max_seqlen_k=batch.max_seqlen_k * 2 + 7,
    )  # fmt: skip


@pytest.mark.parametrize("page_size", [None, 4])
def test_one_plan_serves_every_batch_within_its_capacity(
    lab: SimpleNamespace, page_size: int | None
) -> None:  # F23
    spec = AttentionSpec(4, 1, 16, dtype=torch.float32, page_size=page_size)
    backend = lab.Backend(spec, device=lab.device)
    capacity = Capacity(num_seqs=4, total_q=8, max_seqlen_q=4, max_seqlen_k=300, max_pages=80)
    first = lab.Problem(spec, [1, 1], [5, 9])
    plan = backend.plan(first.batch, capacity)
    batches = [
        ([1, 1, 1, 1], [5, 9, 3, 0]), ([0, 0], [0, 0]), ([1], [300]), ([4, 4], [4, 200]),
        ([2, 0, 1, 4], [299, 7, 1, 11]),
    ]  # fmt: skip
    for seed, (q_lens, kv_lens) in enumerate(batches):
        p = lab.Problem(spec, q_lens, kv_lens, seed=seed)
        plan.update(p.batch)
        live = p.q.shape[0]
        q = torch.full((8, 4, 16), float("nan"), device=lab.device)
        q[:live] = p.q
        out = backend.run(q, p.k, p.v, plan)
        p.check(type(out)(out.o[:live], out.lse[:live]))
        assert bool((out.o[live:] == 0).all() and (out.lse[live:] == float("-inf")).all())
    with pytest.raises(InvalidInputError, match="max_seqlen_k"):
        plan.update(lab.Problem(spec, [1], [301]).batch)


def test_a_plan_over_the_tensors_of_an_engine_is_updated_without_a_batch(
    lab: SimpleNamespace,
) -> None:
    """With other lengths in the same tensors; a plan that owns its buffers wants the batch."""
    spec = AttentionSpec(4, 1, 16, dtype=torch.float32, page_size=4)
    backend = lab.Backend(spec, device=lab.device)
    first, later = lab.Problem(spec, [1, 1], [300, 9]), lab.Problem(spec, [1, 1], [7, 211], seed=1)
    width = max(p.batch.page_table.shape[1] for p in (first, later))
    table = torch.zeros(2, width, dtype=torch.int32, device=lab.device)
    table[:, : first.batch.page_table.shape[1]] = first.batch.page_table
    batch = dataclasses.replace(device_only(first.batch), page_table=table, total_q=2)
    batch = dataclasses.replace(batch, max_seqlen_q=1, max_seqlen_k=300)
    room = Capacity(2, 2, 1, 300, width, in_place=True)
    plan = backend.plan(batch, room)
    for p in (first, later, first):
        plan.batch.seqlens_k.copy_(torch.tensor(p.kv_lens))
        table[:, : p.batch.page_table.shape[1]] = p.batch.page_table
        assert plan.update_in_place()
        p.check(backend.run(p.q, p.k, p.v, plan))
    assert not backend.plan(batch, dataclasses.replace(room, in_place=False)).update_in_place()
    assert not backend.plan(first.batch).update_in_place()


@pytest.mark.parametrize("window", [None, (6, 0)])
@pytest.mark.parametrize("short_rows", [0, 8, None])
def test_lengths_on_the_device_alone_decide(
    lab: SimpleNamespace, short_rows: int | None, window: tuple[int, int] | None
) -> None:
    spec = AttentionSpec(4, 2, 16, dtype=torch.float32, window=window)
    p = lab.Problem(spec, [1, 3, 0, 20, 1], [200, 3, 9, 150, 0])
    backend = lab.Backend(spec, device=p.device, options=lab.Options(short_rows=short_rows))
    p.check(backend.run(p.q, p.k, p.v, backend.plan(device_only(p.batch))))


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 200), (3, 130), (1, 0), (20, 150), (1, 1)])
@pytest.mark.parametrize("options", [{}, {"num_splits": 5}, {"split_keys": 32}], ids=str)
def test_alike_sequences_need_no_work_list(
    lab: SimpleNamespace, monkeypatch, q_len: int, kv_len: int, options: dict[str, int]
) -> None:
    spec = AttentionSpec(6, 2, 16, dtype=HALF, page_size=8)
    p = lab.Problem(spec, [q_len] * 3, [kv_len] * 3)
    backend = lab.Backend(spec, device=p.device, options=lab.Options(short_rows=64, **options))
    plan = backend.plan(p.batch)
    assert plan.equal
    got = backend.run(p.q, p.k, p.v, plan)
    p.check(got)
    monkeypatch.setattr(type(plan), "_equal_items", lambda self, bounds: None)
    plan = backend.plan(p.batch)
    assert not plan.equal
    listed = backend.run(p.q, p.k, p.v, plan)
    assert torch.equal(got.o, listed.o) and torch.equal(got.lse, listed.lse)


@pytest.mark.parametrize("lens", [[900, 3, 0, 64, 65], [700] * 3, [100] * 18, []])
@pytest.mark.parametrize(
    ("options", "invariant"),
    [({}, False), ({"num_splits": 5}, False), ({"split_keys": 48}, False), ({}, True)],
)
def test_the_work_list_covers_every_key_once(
    lab: SimpleNamespace, lens: list[int], options: dict[str, int], invariant: bool
) -> None:
    spec = AttentionSpec(2, 1, 16, dtype=torch.float32, batch_invariant=invariant)
    backend = lab.Backend(spec, device=lab.device, options=lab.Options(**options))
    batch = Batch.from_lengths([1] * len(lens), lens, device=lab.device)
    for given in (batch, device_only(batch)):
        plan = backend.plan(given)
        if not plan.splits:
            continue
        items = plan.items.view(-1, 16).cpu()
        slots = []
        for b, n in enumerate(lens):
            mine = items[items[:, 0] == b]
            parts = sorted((lo, hi) for lo, hi in mine[:, 4:6].tolist())
            assert parts[0][0] == 0 and parts[-1][1] == n
            assert all(a[1] == z[0] for a, z in itertools.pairwise(parts))
            slots += [s for s in mine[:, 7].tolist() if s >= 0]
            assert (len(parts) == 1) == (mine[0, 7] == -1)
        assert sorted(slots) == list(range(len(slots))) and len(slots) <= plan.bounds.slots
        live = items[(items[:, 0] >= 0) & (items[:, 0] < len(lens))]
        # Longest first; parts of a sequence may end short of their size.
        sizes = [] if invariant else (live[:, 5] - live[:, 4]).tolist()
        assert sizes[:1] == [max(sizes)] if sizes else True


def test_bits_do_not_depend_on_batch_mates_or_chunking(lab: SimpleNamespace) -> None:  # F24
    spec = AttentionSpec(4, 2, 16, dtype=HALF, page_size=16, batch_invariant=True)
    backend = lab.Backend(spec, device=lab.device)
    p = lab.Problem(spec, [600], [600])
    whole = backend.run(p.q, p.k, p.v, backend.plan(p.batch))
    table = p.page_table

    def rows(q_lens: list[int], kv_lens: list[int], tokens: list[int], bound: int = 0) -> None:
        batch = Batch.from_lengths(
            q_lens, kv_lens, page_table=table.expand(len(q_lens), -1), device=p.device
        )
        batch = dataclasses.replace(batch, max_seqlen_k=max(bound, batch.max_seqlen_k))
        got = backend.run(p.q[tokens], p.k, p.v, backend.plan(batch))
        assert torch.equal(got.o, whole.o[tokens]) and torch.equal(got.lse, whole.lse[tokens])

    rows([1], [600], [599])
    rows([1], [600], [599], bound=50000)
    rows([1, 1, 1], [600, 17, 513], [599, 16, 512])
    rows([40, 1], [600, 200], [*range(560, 600), 199])


def test_options_and_limits_are_refused_by_name(lab: SimpleNamespace) -> None:
    for bad in ({"num_splits": 0}, {"num_splits": 1025}, {"num_splits": -1}, {"nope": 1}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            lab.Options(**bad)
    with pytest.raises(UnsupportedCallError, match="head_dim=577"):
        lab.Backend(AttentionSpec(1, 1, 577))
    with pytest.raises(UnsupportedCallError, match="float64"):
        lab.Backend(AttentionSpec(1, 1, 64, dtype=torch.float64))


@pytest.mark.gpu
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("max_q", [1, 300])
def test_a_captured_graph_serves_other_lengths(
    lab: SimpleNamespace, max_q: int, invariant: bool
) -> None:
    spec = AttentionSpec(8, 2, 128, dtype=HALF, page_size=16, batch_invariant=invariant)
    backend = lab.Backend(spec, device="cuda")
    capacity = Capacity(5, 5 * max_q, max_q, 9000, 600)
    problems = [
        lab.Problem(spec, q, kv, seed=i)
        for i, (q, kv) in enumerate(
            [
                ([1] * 5, [5, 900, 3, 0, 64]), ([1], [9000]), ([0], [0]), ([1] * 3, [4096] * 3),
                ([min(max_q, 300), 1], [min(max_q, 300) + 2000, 77]),
            ]
        )
    ]  # fmt: skip
    most = max(p.k.shape[0] for p in problems)
    q = torch.zeros(5 * max_q, 8, 128, dtype=HALF, device="cuda")
    k = torch.zeros(most, 16, 2, 128, dtype=HALF, device="cuda")
    v = torch.zeros_like(k)
    plan = backend.plan(problems[0].batch, capacity)
    backend.run(q, k, v, plan)
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = backend.run(q, k, v, plan)
    for p in problems:
        live = p.q.shape[0]
        q.fill_(float("nan"))
        q[:live] = p.q
        k[: p.k.shape[0]], v[: p.v.shape[0]] = p.k, p.v
        out.o.fill_(float("nan"))
        out.lse.fill_(float("nan"))
        plan.update(p.batch)
        graph.replay()
        torch.cuda.synchronize()
        p.check(type(out)(out.o[:live], out.lse[:live]))
        assert bool((out.o[live:] == 0).all() and (out.lse[live:] == float("-inf")).all())


@pytest.mark.gpu
def test_the_remembered_launch_equals_the_first(lab: SimpleNamespace) -> None:
    spec = AttentionSpec(8, 2, 128, dtype=HALF, page_size=16)
    backend = lab.Backend(spec, device="cuda")
    for q_lens, kv_lens in (([1] * 4, [4000, 17, 1, 900]), ([130, 1], [130, 2000])):
        p = lab.Problem(spec, q_lens, kv_lens)
        plan = backend.plan(p.batch)
        outs = [backend.run(p.q, p.k, p.v, plan) for _ in range(3)]
        for out in outs:
            assert torch.equal(out.o, outs[0].o) and torch.equal(out.lse, outs[0].lse)
        odd = torch.empty(p.q.numel() + 1, dtype=HALF, device="cuda")[1:].view_as(p.q).copy_(p.q)
        p.check(backend.run(odd, p.k, p.v, plan))  # an address that is no multiple of 16


@pytest.mark.gpu
def test_planning_and_running_never_wait_for_the_device(lab: SimpleNamespace) -> None:
    spec = AttentionSpec(8, 2, 128, dtype=HALF, page_size=16)
    backend = lab.Backend(spec, device="cuda")
    p = lab.Problem(spec, [1, 100, 1], [4000, 117, 1])
    for batch in (p.batch, device_only(p.batch)):
        backend.run(p.q, p.k, p.v, backend.plan(batch))
        torch.cuda.set_sync_debug_mode("error")
        try:
            backend.run(p.q, p.k, p.v, backend.plan(batch))
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("page", [14_599, 14_563, 14_564])
def test_offsets_beyond_32_bits(lab: SimpleNamespace, page: int) -> None:  # F20
    spec = AttentionSpec(16, 1, 576, head_dim_v=512, dtype=torch.bfloat16, page_size=256)
    cache = torch.full((14_600, 256, 1, 576), float("nan"), dtype=torch.bfloat16, device="cuda")
    data = torch.randn(256, 1, 576, device="cuda").bfloat16()
    q = torch.randn(1, 16, 576, device="cuda").bfloat16()
    backend = lab.Backend(spec, device="cuda")
    outs = []
    for where in (0, page):
        cache[where] = data
        batch = Batch.from_lengths([1], [250], page_table=[[where]], device="cuda")
        outs.append(backend.run(q, cache, None, backend.plan(batch)))
    assert torch.equal(outs[0].o, outs[1].o) and torch.equal(outs[0].lse, outs[1].lse)
