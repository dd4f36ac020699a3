"""Cascade: shared keys once, own keys apart, one merge; equal to one pass over all keys."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attn_backends as ab
from attn_backends import prefixes
from attn_backends.cascade import cascade_attention, plan_cascade
from attn_backends.prefixes import (
    CascadeEstimate,
    cut_where_it_pays,
    estimate_cascade,
    find_prefix_groups,
    split_prefixes,
)

PAGE = 4


def spec_of(**kwargs) -> ab.AttentionSpec:
    defaults = dict(num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32, page_size=PAGE)
    return ab.AttentionSpec(**{**defaults, **kwargs})


def whole(spec, q, k, v, batch, **kwargs) -> ab.AttentionOutput:
    backend = ab.select(spec, phase="prefill", backend="torch_native").backend
    return backend.run(q, k, v, backend.plan(batch), **kwargs)


def tree_batch(q_lens, kv_lens, shared_pages, branch_pages=(), device="cpu") -> ab.Batch:
    """Sequences that share ``shared_pages`` pages; pairs of them share ``branch_pages`` more."""
    own = 100
    rows = []
    for b, kv in enumerate(kv_lens):
        row = list(range(shared_pages))
        row += [50 + 10 * (b // 2) + i for i in range(branch_pages[b // 2] if branch_pages else 0)]
        while len(row) * PAGE < kv:
            row.append(own)
            own += 1
        rows.append(row)
    width = max(map(len, rows))
    table = [row + [-1] * (width - len(row)) for row in rows]
    return ab.Batch.from_lengths(q_lens, kv_lens, page_table=table, device=device)


def cache(dim: int, heads: int = 2) -> torch.Tensor:
    return torch.randn(160, PAGE, heads, dim, generator=torch.Generator().manual_seed(dim))


@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize("q_lens", [[1, 1, 1, 1], [3, 1, 0, 2]])
def test_cascade_equals_one_pass_over_all_keys(levels: int, q_lens: list[int]) -> None:
    kv_lens = [24, 21, 30, 25]
    batch = tree_batch(q_lens, kv_lens, shared_pages=3, branch_pages=(1, 2))
    spec = spec_of(softcap=20.0)
    torch.manual_seed(0)
    q, k, v = torch.randn(sum(q_lens), 4, 16), cache(16), cache(16) + 1
    parts = split_prefixes(batch, PAGE, levels)
    assert len(parts) == levels
    want = whole(spec, q, k, v, batch)
    got = cascade_attention(q, k, v, parts, softcap=20.0, backend="torch_native")
    torch.testing.assert_close(got.o, want.o, atol=2e-6, rtol=0)
    torch.testing.assert_close(got.lse, want.lse, atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    "names",
    [("torch_sdpa", "torch_native"), ("torch_native", "torch_flex"), ("triton", "torch_sdpa")],
    ids="-".join,
)
def test_each_level_may_have_a_backend_of_its_own(names: tuple[str, str]) -> None:
    # Where there is a GPU, Triton's interpreter is off.
    device = "cuda" if "triton" in names and torch.cuda.is_available() else "cpu"
    batch = tree_batch([1, 3], [24, 21], shared_pages=4, device=device)
    spec = spec_of()
    q, k, v = (x.to(device) for x in (torch.randn(4, 4, 16), cache(16), cache(16) + 1))
    plan = plan_cascade(spec, split_prefixes(batch, PAGE, 2), backend=names)
    assert tuple(backend.name for backend, _ in plan.levels) == names
    want, got = whole(spec, q, k, v, batch), plan.run(q, k, v)
    assert got.o.device.type == device
    torch.testing.assert_close(got.o, want.o, atol=2e-6, rtol=0)
    torch.testing.assert_close(got.lse, want.lse, atol=2e-6, rtol=0)


def test_all_levels_meet_in_one_merge(monkeypatch) -> None:
    from attn_backends import cascade

    merged: list[int] = []

    def counted(states, **options):
        merged.append(len(states))
        return ab.merge_states(states, **options)

    monkeypatch.setattr(cascade, "merge_states", counted)
    batch = tree_batch([1, 1, 1, 1], [24, 21, 30, 25], shared_pages=3, branch_pages=(1, 2))
    parts = split_prefixes(batch, PAGE, 3)
    q, k, v = torch.randn(4, 4, 16), cache(16), cache(16) + 1
    cascade_attention(q, k, v, parts, backend="torch_native")
    assert merged == [3]


def test_sinks_enter_once_whatever_the_number_of_levels() -> None:
    batch = tree_batch([1, 1], [17, 19], shared_pages=3)
    torch.manual_seed(1)
    q, k, v, sinks = torch.randn(2, 4, 16), cache(16), cache(16), torch.randn(4)
    want = whole(spec_of(), q, k, v, batch, sinks=sinks)
    got = cascade_attention(q, k, v, split_prefixes(batch, PAGE), sinks=sinks)
    torch.testing.assert_close(got.o, want.o, atol=2e-6, rtol=0)
    torch.testing.assert_close(got.lse, want.lse, atol=2e-6, rtol=0)


def test_shared_pages_end_before_the_first_query_of_the_group() -> None:
    # 8 keys, 6 of them new: only one whole page lies before every query.
    batch = ab.Batch.from_lengths([6, 1], [10, 9], page_table=[[0, 1, 2], [0, 1, 3]])
    ((group,),) = find_prefix_groups(batch, PAGE)
    assert (group.first, group.stop, group.pages) == (0, 2, 1)


def test_sequences_that_share_nothing_stay_one_level() -> None:
    batch = ab.Batch.from_lengths([1, 1], [9, 9], page_table=[[0, 1, 2], [3, 4, 5]])
    assert split_prefixes(batch, PAGE) == [batch]


def test_a_group_without_a_prefix_beside_one_that_has_it_is_exact() -> None:
    table = [[0, 1, 2], [0, 1, 3], [7, 8, 9]]
    batch = ab.Batch.from_lengths([1, 1, 1], [9, 12, 0], page_table=table)
    v = torch.arange(160.0 * PAGE).view(160, PAGE, 1, 1).expand(160, PAGE, 2, 16).contiguous()
    parts = split_prefixes(batch, PAGE)
    got = cascade_attention(torch.zeros(3, 4, 16), cache(16), v, parts)
    assert torch.allclose(got.lse[:, 0], torch.tensor([math.log(9), math.log(12), -math.inf]))
    assert torch.allclose(got.o[0], torch.tensor(sum(range(9)) / 9))
    assert not got.o[2].any()


def test_window_and_alibi_are_refused_with_their_reason() -> None:
    batch = tree_batch([1, 1], [17, 19], shared_pages=3)
    parts = split_prefixes(batch, PAGE)
    for extra, name in ((dict(window=(3, 0)), "window"), (dict(has_alibi=True), "has_alibi")):
        with pytest.raises(ab.UnsupportedCallError, match=name):
            plan_cascade(spec_of(**extra), parts)


def test_levels_over_different_queries_are_refused() -> None:
    one = ab.Batch.from_lengths([2], [4], page_table=[[0]])
    two = ab.Batch.from_lengths([1], [4], page_table=[[0]])
    with pytest.raises(ab.InvalidInputError, match=r"batches\[1\].total_q=1"):
        plan_cascade(spec_of(), [one, two])


def test_output_is_written_into_the_given_views() -> None:
    batch = tree_batch([1, 1], [17, 19], shared_pages=3)
    torch.manual_seed(2)
    q, k = torch.randn(2, 4, 16), cache(16)
    room = torch.full((2, 4, 20), 7.0)
    lse = torch.full((4, 2), 7.0).T
    parts = split_prefixes(batch, PAGE)
    got = cascade_attention(q, k, k, parts, out=(room[..., :16], lse))
    want = cascade_attention(q, k, k, parts)
    assert torch.equal(room[..., :16], want.o) and torch.equal(lse, want.lse)
    assert torch.equal(room[..., 16:], torch.full((2, 4, 4), 7.0)) and got.lse is lse


def test_estimate_counts_the_keys_not_read_again() -> None:
    batch = tree_batch([1] * 4, [20] * 4, shared_pages=3)
    spec = spec_of(dtype=torch.float16)
    groups = find_prefix_groups(batch, PAGE)
    estimate = estimate_cascade(spec, batch, groups)
    assert estimate.bytes_saved == 3 * 3 * PAGE * 2 * (16 + 16) * 2
    assert not estimate.pays  # tiny keys never repay two launches
    assert CascadeEstimate(2, 1).pays


@pytest.mark.parametrize("launch_bytes, levels", [(1, 3), (3500, 2), (16 << 20, 1)])
def test_one_batch_is_cut_into_the_levels_that_pay(launch_bytes, levels, monkeypatch) -> None:
    monkeypatch.setattr(prefixes, "LAUNCH_BYTES", launch_bytes)
    batch = tree_batch([1] * 4, [30, 33, 37, 35], shared_pages=3, branch_pages=(3, 1))
    spec = spec_of(num_heads=2, num_kv_heads=2)
    torch.manual_seed(3)
    q, k, v = torch.randn(4, 2, 16), cache(16), cache(16) + 1
    plan = plan_cascade(spec, batch, backend="torch_native", levels=3)
    assert len(plan.levels) == levels and "MiB" in plan.reason, plan.reason
    assert plan.reason.startswith("one level" if levels == 1 else f"{levels} levels")
    got, want = plan.run(q, k, v), whole(spec, q, k, v, batch)
    torch.testing.assert_close(got.o, want.o, atol=2e-6, rtol=0)
    torch.testing.assert_close(got.lse, want.lse, atol=2e-6, rtol=0)


SHARED = tree_batch([1, 1], [17, 19], shared_pages=3)


@pytest.mark.parametrize("batches", [3, [3], {"a": 1}])
def test_levels_that_are_no_batches_are_named(batches) -> None:
    with pytest.raises(ab.InvalidInputError, match=r"batches=.* \(allowed: a Batch, or a list"):
        ab.plan_cascade(ab.AttentionSpec(4, 2, 8, page_size=4), batches)


ON_DEVICE = ab.Batch(
    SHARED.cu_seqlens_q, SHARED.seqlens_k, page_table=SHARED.page_table,
    total_q=2, max_seqlen_q=1, max_seqlen_k=19,
)  # fmt: skip
APART = ab.Batch.from_lengths([1, 1], [9, 9], page_table=[[0, 1, 2], [3, 4, 5]])


@pytest.mark.parametrize(
    "extra, batch, why",
    [
        (dict(window=(3, 0)), SHARED, "windows and ALiBi"),
        (dict(has_alibi=True), SHARED, "windows and ALiBi"),
        (dict(has_mask=True), SHARED, "a mask"),
        (dict(batch_invariant=True), SHARED, "batch_invariant"),
        ({}, ON_DEVICE, "not on the host"),
        ({}, APART, "no leading pages are shared"),
        (dict(page_size=None), ab.Batch.from_lengths([1, 1], [17, 19]), "ragged keys"),
    ],
)
def test_one_batch_stays_whole_with_the_reason_told(extra, batch, why, monkeypatch) -> None:
    monkeypatch.setattr(prefixes, "LAUNCH_BYTES", 1)
    spec = spec_of(**extra)
    plan = plan_cascade(spec, batch, backend="torch_native")
    assert len(plan.levels) == 1
    assert plan.reason.startswith("one level: ") and why in plan.reason
    torch.manual_seed(4)
    q, k, v = torch.randn(2, 4, 16), cache(16), cache(16) + 1
    if spec.page_size is None:
        k, v = k.flatten(0, 1)[:36], v.flatten(0, 1)[:36]
    given = {"sinks": torch.randn(4)}
    if spec.has_alibi:
        given["alibi_slopes"] = torch.rand(4)
    if spec.has_mask:
        given["mask"] = torch.rand(36) < 0.7
    got, want = plan.run(q, k, v, **given), whole(spec, q, k, v, batch, **given)
    assert torch.equal(got.o, want.o) and torch.equal(got.lse, want.lse)


def test_one_batch_stays_whole_where_a_backend_refuses_the_shared_level(monkeypatch) -> None:
    monkeypatch.setattr(prefixes, "LAUNCH_BYTES", 1)
    from attn_backends import cascade

    def select(spec, **kwargs):
        if not spec.causal:
            raise ab.UnsupportedCallError("causal=False (supported: True)")
        return ab.select(spec, **kwargs)

    monkeypatch.setattr(cascade, "select", select)
    plan = plan_cascade(spec_of(), SHARED, backend="torch_native")
    assert len(plan.levels) == 1 and plan.reason == "one level: causal=False (supported: True)"


def test_what_needs_given_levels_is_refused_for_one_batch() -> None:
    capacity = ab.Capacity(2, 2, 1, 32, 8)
    with pytest.raises(ab.InvalidInputError, match="split_prefixes"):
        plan_cascade(spec_of(), SHARED, capacities=[capacity])
    with pytest.raises(ab.InvalidInputError, match="backend=2 names"):
        plan_cascade(spec_of(), SHARED, backend=["torch_native", "triton"])
    with pytest.raises(ab.InvalidInputError, match="levels=0"):
        cut_where_it_pays(spec_of(), SHARED, 0)
    plan = plan_cascade(spec_of(), split_prefixes(SHARED, PAGE), backend="torch_native")
    with pytest.raises(ab.InvalidInputError, match="alibi_slopes"):
        plan.run(torch.randn(2, 4, 16), cache(16), cache(16), alibi_slopes=torch.rand(4))


def steps(dtype: torch.dtype, device: str) -> tuple[ab.AttentionSpec, list[ab.Batch], list]:
    """Two steps of four requests over shared pages, and capacities that hold both."""
    spec = spec_of(dtype=dtype)
    found = []
    for kv_lens, pages in (([17, 19, 30, 21], 3), ([27, 33, 25, 38], 5)):
        host = tree_batch([1] * 4, kv_lens, shared_pages=pages)
        table = host.host_page_table
        found.append(ab.Batch.from_lengths([1] * 4, kv_lens, page_table=table, device=device))
    shared = ab.Capacity(num_seqs=2, total_q=4, max_seqlen_q=4, max_seqlen_k=40, max_pages=10)
    own = ab.Capacity(num_seqs=4, total_q=4, max_seqlen_q=1, max_seqlen_k=40, max_pages=10)
    return spec, found, [shared, own]


@pytest.mark.skipif(torch.cuda.is_available(), reason="captured below, where there is a GPU")
def test_a_cascade_with_capacities_follows_its_updates() -> None:
    spec, (first, second), capacities = steps(torch.float32, "cpu")
    torch.manual_seed(6)
    q, k, v = torch.randn(4, 4, 16), cache(16), cache(16) + 1
    levels = split_prefixes(first, PAGE)
    plan = plan_cascade(spec, levels, backend="triton", capacities=capacities)
    for batch in (first, second, first):
        plan.update(split_prefixes(batch, PAGE))
        got, want = plan.run(q, k, v), whole(spec, q, k, v, batch)
        torch.testing.assert_close(got.o, want.o, atol=5e-6, rtol=0)
        torch.testing.assert_close(got.lse, want.lse, atol=5e-6, rtol=0)
    with pytest.raises(ab.InvalidInputError, match="batches=1 levels"):
        plan.update([first])


@pytest.mark.gpu
def test_a_captured_cascade_replays_steps_with_other_prefixes() -> None:
    spec, batches, capacities = steps(torch.float16, "cuda")
    torch.manual_seed(6)
    q = torch.randn(4, 4, 16).half().cuda()
    k, v = cache(16).half().cuda(), (cache(16) + 1).half().cuda()
    levels = [split_prefixes(batch, PAGE) for batch in batches]
    plan = plan_cascade(spec, levels[0], backend="triton", capacities=capacities)
    out = torch.empty(4, 4, 16, dtype=torch.float16, device="cuda"), torch.empty(4, 4).cuda()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        plan.run(q, k, v, out=out)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(q, k, v, out=out)
    for batch, cut in zip(batches, levels):
        plan.update(cut)
        for x in out:
            x.fill_(float("nan"))
        graph.replay()
        want = whole(spec, q, k, v, batch)
        torch.testing.assert_close(out[0], want.o, atol=1e-2, rtol=0)
        torch.testing.assert_close(out[1], want.lse, atol=4e-3, rtol=0)


def test_the_one_call_form_takes_a_step_as_it_is() -> None:
    torch.manual_seed(5)
    q, k, v = torch.randn(2, 4, 16), cache(16), cache(16)
    got, want = cascade_attention(q, k, v, SHARED), whole(spec_of(), q, k, v, SHARED)
    torch.testing.assert_close(got.o, want.o, atol=2e-6, rtol=0)


def test_a_long_prefix_of_many_requests_pays_and_a_short_one_of_two_does_not() -> None:
    spec = ab.AttentionSpec(32, 8, 128, dtype=torch.bfloat16, page_size=16)

    def step(requests: int, shared: int) -> ab.Batch:
        table = [[*range(shared), 5000 + b] for b in range(requests)]
        return ab.Batch.from_lengths([1] * requests, [shared * 16 + 9] * requests, page_table=table)

    assert len(cut_where_it_pays(spec, step(64, 2048)).batches) == 2
    assert len(cut_where_it_pays(spec, step(2, 8)).batches) == 1


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_levels_cover_each_key_exactly_once(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 6))
    q_lens = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    extra = data.draw(st.lists(st.integers(0, 20), min_size=count, max_size=count))
    kv_lens = [q + e for q, e in zip(q_lens, extra)]
    ids = st.lists(st.integers(0, 3), min_size=6, max_size=6)
    table = data.draw(st.lists(ids, min_size=count, max_size=count))
    batch = ab.Batch.from_lengths(q_lens, kv_lens, page_table=table)
    parts = split_prefixes(batch, PAGE, data.draw(st.integers(1, 4)))
    k, q = cache(16), torch.zeros(sum(q_lens), 4, 16)
    v = torch.arange(160.0 * PAGE).view(160, PAGE, 1, 1).expand(160, PAGE, 2, 16).contiguous()
    got = cascade_attention(q, k, v, parts, backend="torch_native")
    want = whole(spec_of(), q, k, v, batch)
    torch.testing.assert_close(got.lse, want.lse, atol=1e-6, rtol=0)
    torch.testing.assert_close(got.o, want.o, atol=1e-5, rtol=1e-6)
