"""Chunked attention: any cut of the keys, with a bounded part at hand, gives one pass's answer."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attn_backends as ab
from attn_backends.chunked import chunk_size_for, chunked_attention, plan_chunked
from attn_backends.conformance.oracle import Extras, Sequence
from attn_backends.conformance.tolerance import Expected, expect
from attn_backends.pieces import Call
from attn_backends.torch_native.backend import TorchNativeBackend, TorchNativeOptions

PAGE = 4
#: A long prefix, no prefix, one query, no query, no key, more queries than keys.
Q_LENS, KV_LENS = [5, 6, 1, 0, 2, 3], [41, 6, 22, 9, 0, 2]


def spec_of(**changes) -> ab.AttentionSpec:
    base = dict(num_heads=4, num_kv_heads=2, head_dim=16, head_dim_v=12, dtype=torch.float32)
    return ab.AttentionSpec(**{**base, **changes})


def random_rows(rows: int, heads: int, dim: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, heads, dim, generator=g).to(dtype)


def ragged(spec, q_lens, kv_lens, seed=0):
    q = random_rows(sum(q_lens), spec.num_heads, spec.head_dim, spec.dtype, seed)
    k = random_rows(sum(kv_lens), spec.num_kv_heads, spec.head_dim, spec.kv, seed + 1)
    return q, k, random_rows(sum(kv_lens), spec.num_kv_heads, spec.dv, spec.kv, seed + 2)


def paged(x: torch.Tensor, lens: list[int], size: int = PAGE) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache with shuffled pages whose unused slots are NaN, and the page table."""
    pages = [-(-n // size) for n in lens]
    order = torch.randperm(sum(pages) + 2, generator=torch.Generator().manual_seed(5))
    cache = torch.full((sum(pages) + 2, size, *x.shape[1:]), float("nan")).to(x.dtype)
    table = torch.full((len(lens), max(pages, default=0)), -1, dtype=torch.int32)
    row = at = 0
    for b, n in enumerate(lens):
        for i in range(pages[b]):
            count = min(size, n - i * size)
            table[b, i] = order[at]
            cache[order[at], :count] = x[row : row + count]
            row, at = row + count, at + 1
    return cache, table


def exact(spec, q, k, v, q_lens, kv_lens, sinks=None) -> Expected:
    parts = zip(q.split(q_lens), k.split(kv_lens), v.split(kv_lens))
    return expect(replace(spec, page_size=None), [Sequence(*p) for p in parts], Extras(sinks=sinks))


def close(got: ab.AttentionOutput, want: Expected, merges: int) -> None:
    """Within what one kernel may err, once for itself and once for every merge."""
    error = (got.o.double() - want.o).abs()
    assert bool((error <= (1 + merges) * want.o_tol[..., None]).all()), float(error.max())
    empty = want.lse == float("-inf")
    assert torch.equal(got.lse == float("-inf"), empty) and not got.o[empty].any()
    off = torch.where(empty, 0.0, (got.lse.double() - want.lse).abs())
    assert bool((off <= (1 + merges) * want.lse_tol).all()), float(off.max())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("chunk_size", [1, 3, 4, 7, 8, 41, 1000])
def test_any_chunk_size_equals_one_pass_over_ragged_keys(chunk_size: int, causal: bool) -> None:
    spec = spec_of(causal=causal)
    q, k, v = ragged(spec, Q_LENS, KV_LENS)
    batch = ab.Batch.from_lengths(Q_LENS, KV_LENS)
    want = exact(spec, q, k, v, Q_LENS, KV_LENS)
    for gather in (None, True):
        plan = plan_chunked(
            spec, batch, chunk_size=chunk_size, backend="torch_native", gather=gather
        )
        close(plan.run(q, k, v), want, len(plan.chunks))


@pytest.mark.parametrize("gather", [None, True])
@pytest.mark.parametrize("chunk_size", [1, 3, 4, 8, 20, 1000])
def test_any_chunk_size_equals_one_pass_over_pages(chunk_size: int, gather: bool | None) -> None:
    # F03: sequences without a prefix, without keys in later chunks, or without any.
    spec = spec_of(page_size=PAGE)
    q, k, v = ragged(spec, Q_LENS, KV_LENS)
    k_cache, table = paged(k, KV_LENS)
    v_cache, _ = paged(v, KV_LENS)
    batch = ab.Batch.from_lengths(Q_LENS, KV_LENS, page_table=table)
    plan = plan_chunked(spec, batch, chunk_size=chunk_size, backend="torch_native", gather=gather)
    assert plan.gather == bool(gather or chunk_size % PAGE)
    want = exact(spec, q, k, v, Q_LENS, KV_LENS)
    close(plan.run(q, k_cache, v_cache), want, len(plan.chunks))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_every_key_is_in_one_piece_and_chunks_stay_within_their_size(data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 6))
    q_lens = data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    kv_lens = data.draw(st.lists(st.integers(0, 30), min_size=count, max_size=count))
    size = data.draw(st.integers(1, 12))
    batch = ab.Batch.from_lengths(q_lens, kv_lens)
    plan = plan_chunked(spec_of(), batch, chunk_size=size, backend="torch_native")
    seen: dict[int, list[int]] = {}
    for chunk in plan.chunks:
        assert 0 < sum(p.stop - p.start for p in chunk.pieces) <= size
        for piece in chunk.pieces:
            assert piece.start % size == 0  # cut by position alone, whoever else is there
            keys = seen.setdefault(piece.sequence, [])
            keys += range(piece.start, piece.stop)
    # Keys of a sequence without queries are left alone.
    assert seen == {b: list(range(n)) for b, n in enumerate(kv_lens) if n and q_lens[b]}


def test_the_workspace_never_holds_more_keys_than_the_setting(monkeypatch) -> None:
    spec = spec_of(page_size=PAGE)
    q, k, v = ragged(spec, Q_LENS, KV_LENS)
    k_cache, table = paged(k, KV_LENS)
    v_cache, _ = paged(v, KV_LENS)
    batch = ab.Batch.from_lengths(Q_LENS, KV_LENS, page_table=table)
    held: list[int] = []
    run = Call.run

    def watched(self, q, k, v, **extras):
        held.append(k.untyped_storage().nbytes() + v.untyped_storage().nbytes())
        return run(self, q, k, v, **extras)

    monkeypatch.setattr(Call, "run", watched)
    limit = 10 * spec.num_kv_heads * (spec.head_dim + spec.dv) * 4
    plan = plan_chunked(spec, batch, workspace_bytes=limit, backend="torch_native", gather=True)
    assert plan.chunk_size == 8  # whole pages
    plan.run(q, k_cache, v_cache)
    assert held and max(held) <= limit


def test_workspace_bytes_become_whole_pages_or_at_least_keys() -> None:
    spec = spec_of(dtype=torch.bfloat16, page_size=16)
    key = 2 * (16 + 12) * 2
    assert chunk_size_for(spec, 100 * key) == 96
    assert chunk_size_for(spec, 15 * key) == 15
    with pytest.raises(ab.InvalidInputError, match=rf"workspace_bytes={key - 1} .*>= {key}"):
        chunk_size_for(spec, key - 1)


def test_a_backend_without_pages_reads_a_paged_cache_in_chunks() -> None:
    class Ragged(TorchNativeBackend):
        name = "ragged_only"
        capabilities = replace(
            TorchNativeBackend.capabilities,
            features=TorchNativeBackend.capabilities.features - {"paged"},
        )

    spec = spec_of(page_size=PAGE)
    q, k, v = ragged(spec, Q_LENS, KV_LENS)
    k_cache, table = paged(k, KV_LENS)
    v_cache, _ = paged(v, KV_LENS)
    batch = ab.Batch.from_lengths(Q_LENS, KV_LENS, page_table=table)
    backend = Ragged(replace(spec, page_size=None))
    plan = plan_chunked(spec, batch, chunk_size=8, backend=backend)
    assert plan.gather
    got = plan.run(q, k_cache, v_cache)
    close(got, exact(spec, q, k, v, Q_LENS, KV_LENS), len(plan.chunks))
    with pytest.raises(ab.UnsupportedCallError, match="page_size=4"):
        plan_chunked(spec, batch, chunk_size=8, backend=backend, gather=False)


@pytest.mark.parametrize("backend", ["torch_native", "torch_sdpa", "triton"])
def test_backends_by_name(backend: str) -> None:
    q_lens, kv_lens = [3, 2], [11, 2]
    spec = spec_of(head_dim_v=16)
    q, k, v = ragged(spec, q_lens, kv_lens)
    batch = ab.Batch.from_lengths(q_lens, kv_lens)
    plan = plan_chunked(spec, batch, chunk_size=6, backend=backend)
    assert {call.backend.name for chunk in plan.chunks for call in chunk.calls} == {backend}
    close(plan.run(q, k, v), exact(spec, q, k, v, q_lens, kv_lens), len(plan.chunks))


def test_a_backend_object_keeps_its_class_and_options() -> None:
    options = TorchNativeOptions(tile_k=3)
    spec = spec_of()
    batch = ab.Batch.from_lengths([4], [20])
    plan = plan_chunked(
        spec, batch, chunk_size=8, backend=TorchNativeBackend(spec, options=options)
    )
    assert all(c.backend.options is options for chunk in plan.chunks for c in chunk.calls)


def test_softcap_scale_and_sinks_enter_once() -> None:
    spec = spec_of(softcap=4.0, sm_scale=0.4)
    q, k, v = ragged(spec, Q_LENS, KV_LENS)
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(8))
    batch = ab.Batch.from_lengths(Q_LENS, KV_LENS)
    want = exact(spec, q, k, v, Q_LENS, KV_LENS, sinks)
    got = chunked_attention(q, k, v, batch, softcap=4.0, sm_scale=0.4, sinks=sinks, chunk_size=7)
    close(got, want, 20)


def test_fp8_cache_is_gathered_as_it_is_and_scaled_once() -> None:
    spec = spec_of(dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn, page_size=PAGE)
    q, k, v = ragged(spec, [3, 2], [21, 2])
    k_cache, table = paged(k.float(), [21, 2])
    v_cache, _ = paged(v.float(), [21, 2])
    caches = [x.nan_to_num(0).to(torch.float8_e4m3fn) for x in (k_cache, v_cache)]
    batch = ab.Batch.from_lengths([3, 2], [21, 2], page_table=table)
    backend = ab.select(spec, backend="torch_native").backend
    want = backend.run(q, *caches, backend.plan(batch), k_scale=0.5, v_scale=2.0)
    for gather in (None, True):
        plan = plan_chunked(spec, batch, chunk_size=8, backend="torch_native", gather=gather)
        got = plan.run(q, *caches, k_scale=0.5, v_scale=2.0)
        torch.testing.assert_close(got.o, want.o, atol=0.03, rtol=0.01)
        torch.testing.assert_close(got.lse, want.lse, atol=1e-5, rtol=0)


@pytest.mark.parametrize("invariant", [False, True])
def test_many_chunks_in_half_precision_err_by_a_few_roundings(invariant: bool) -> None:
    """The sum is held in float32: keys that each weigh less than a rounding still count."""
    spec = spec_of(dtype=torch.bfloat16, head_dim_v=16, sm_scale=1.0, batch_invariant=invariant)
    q, k = torch.zeros(1, 4, 16).bfloat16(), torch.zeros(101, 2, 16).bfloat16()
    v = torch.zeros(101, 2, 16).bfloat16()
    q[..., 0] = 1
    k[0, :, 0] = 6.90625  # about as much as a thousand of the keys after it, whose values are 0
    v[0] = 1
    batch = ab.Batch.from_lengths([1], [101])
    got = plan_chunked(spec, batch, chunk_size=1, backend="torch_native").run(q, k, v)
    want = exact(spec, q, k, v, [1], [101]).o
    assert float(want.max()) < 0.91  # merged in bfloat16, the sum would stay at 1
    # Half a step in each part and in each group, weighed by their shares, and half in the sum.
    step = torch.finfo(torch.bfloat16).eps
    assert float((got.o.double() - want).abs().max()) <= 1.5 * step


def test_views_are_read_and_written_where_they_lie() -> None:
    spec = spec_of(head_dim_v=16)
    q, k, v = ragged(spec, [3, 4], [19, 4])
    both = torch.cat([k, v], dim=1)
    batch = ab.Batch.from_lengths([3, 4], [19, 4])
    room = torch.full((7, 4, 20), 7.0)
    lse = torch.full((4, 7), 7.0).T
    plan = plan_chunked(spec, batch, chunk_size=5, backend="torch_native")
    got = plan.run(q, both[:, :2], both[:, 2:], out=(room[..., :16], lse))
    assert got.lse is lse and torch.equal(room[..., 16:], torch.full((7, 4, 4), 7.0))
    close(got, exact(spec, q, k, v, [3, 4], [19, 4]), 6)


def test_room_between_ragged_sequences_is_never_read() -> None:
    spec = spec_of()
    q, k, v = ragged(spec, [2, 1], [9, 5])
    wide = [torch.full((30, *x.shape[1:]), float("nan")) for x in (k, v)]
    for room, x in zip(wide, (k, v)):
        room[:9], room[14:19] = x[:9], x[9:]
    batch = ab.Batch.from_lengths([2, 1], [9, 5], cu_seqlens_k=[0, 14, 30])
    for gather in (None, True):
        plan = plan_chunked(spec, batch, chunk_size=20, backend="torch_native", gather=gather)
        assert len(plan.chunks) == 1
        close(plan.run(q, *wide), exact(spec, q, k, v, [2, 1], [9, 5]), 2)


# Bits


def test_one_chunk_has_the_bits_of_a_plain_run() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        spec = spec_of(dtype=dtype)
        q, k, v = ragged(spec, [5, 6], [21, 6])
        batch = ab.Batch.from_lengths([5, 6], [21, 6])
        backend = ab.select(spec, backend="torch_native").backend
        want = backend.run(q, k, v, backend.plan(batch))
        got = plan_chunked(spec, batch, chunk_size=27, backend="torch_native").run(q, k, v)
        assert torch.equal(got.o, want.o) and torch.equal(got.lse, want.lse)


def test_gathered_keys_give_the_bits_of_keys_read_in_place() -> None:
    spec = spec_of(page_size=PAGE)
    q, k, v = ragged(spec, Q_LENS, KV_LENS)
    k_cache, table = paged(k, KV_LENS)
    v_cache, _ = paged(v, KV_LENS)
    batch = ab.Batch.from_lengths(Q_LENS, KV_LENS, page_table=table)
    states = [
        plan_chunked(spec, batch, chunk_size=8, backend="torch_native", gather=gather).run(
            q, k_cache, v_cache
        )
        for gather in (False, True)
    ]
    assert torch.equal(states[0].o, states[1].o) and torch.equal(states[0].lse, states[1].lse)


@pytest.mark.parametrize("backend", ["torch_native", "triton"])
def test_batch_mates_move_no_bit_where_the_backend_is_invariant(backend: str) -> None:
    spec = spec_of(batch_invariant=True, head_dim_v=16)
    q_lens, kv_lens = [2, 3, 1], [5, 19, 9]
    q, k, v = ragged(spec, q_lens, kv_lens)

    def run(q, k, v, q_lens, kv_lens):
        batch = ab.Batch.from_lengths(q_lens, kv_lens)
        return plan_chunked(spec, batch, chunk_size=8, backend=backend).run(q, k, v)

    together = run(q, k, v, q_lens, kv_lens)
    alone = run(q[2:5], k[5:24], v[5:24], q_lens[1:2], kv_lens[1:2])
    assert torch.equal(together.o[2:5], alone.o) and torch.equal(together.lse[2:5], alone.lse)


@pytest.mark.parametrize("cuts", [[0, 7, 16, 17, 32, 40], [0, 15, 31, 40]])
def test_how_a_prompt_came_in_moves_no_bit_of_the_invariant_triton_backend(cuts) -> None:
    """Chunks are cut at positions of the sequence, whichever tokens a step computes."""
    spec = spec_of(batch_invariant=True, head_dim_v=16)
    q, k, v = ragged(spec, [40], [40])

    def step(start: int, stop: int) -> ab.AttentionOutput:
        batch = ab.Batch.from_lengths([stop - start], [stop])
        plan = plan_chunked(spec, batch, chunk_size=16, backend="triton")
        return plan.run(q[start:stop], k[:stop], v[:stop])

    whole, parts = step(0, 40), [step(a, z) for a, z in pairwise(cuts)]
    assert torch.equal(torch.cat([p.o for p in parts]), whole.o)
    assert torch.equal(torch.cat([p.lse for p in parts]), whole.lse)


def test_the_number_of_rows_moves_no_bit_of_an_invariant_sum() -> None:
    """On a GPU, so many rows that another path of the merge would be the faster one."""
    from attn_backends.running import RunningState

    cuda = torch.cuda.is_available()
    device, many = torch.device("cuda" if cuda else "cpu"), 4096 if cuda else 64
    spec = ab.AttentionSpec(32, 8, 128, dtype=torch.bfloat16, batch_invariant=True)
    g = torch.Generator().manual_seed(0)
    o = torch.randn(3, many, 32, 128, generator=g).bfloat16().to(device)
    lse = torch.randn(3, many, 32, generator=g).to(device)
    sums = []
    for rows in (many, 7):
        state = RunningState(spec, rows, device)
        for part_o, part_lse in zip(o, lse):
            state.add(ab.AttentionOutput(part_o[:rows], part_lse[:rows]), slice(0, rows))
        sums.append(state.finish())
    assert torch.equal(sums[0].o[:7], sums[1].o) and torch.equal(sums[0].lse[:7], sums[1].lse)


def test_a_plan_serves_every_layer_with_the_same_bits() -> None:
    spec = spec_of()
    q, k, v = ragged(spec, Q_LENS, KV_LENS)
    batch = ab.Batch.from_lengths(Q_LENS, KV_LENS)
    plan = plan_chunked(spec, batch, chunk_size=8, backend="torch_native")
    first = plan.run(q, k, v)
    plan.run(*ragged(spec, Q_LENS, KV_LENS, seed=9))  # another layer in between
    again = plan.run(q, k, v)
    assert torch.equal(first.o, again.o) and torch.equal(first.lse, again.lse)


# Refusals


def test_what_needs_positions_is_refused_with_its_reason() -> None:
    batch = ab.Batch.from_lengths([1], [9])
    for extra, name in (
        (dict(window=(3, 0)), "window"),
        (dict(has_alibi=True), "has_alibi"),
        (dict(has_mask=True), "has_mask"),
    ):
        with pytest.raises(ab.UnsupportedCallError, match=rf"{name}=.* run without chunked"):
            plan_chunked(spec_of(**extra), batch)


def test_malformed_arguments_are_refused_by_name() -> None:
    spec, batch = spec_of(), ab.Batch.from_lengths([1], [9])
    for bad in (0, -1, True, 2.0):
        with pytest.raises(ab.InvalidInputError, match="chunk_size="):
            plan_chunked(spec, batch, chunk_size=bad)
    with pytest.raises(ab.InvalidInputError, match="chunk_size, workspace_bytes=both"):
        plan_chunked(spec, batch, chunk_size=1, workspace_bytes=1)
    with pytest.raises(ab.InvalidInputError, match="batch=ragged"):
        plan_chunked(spec_of(page_size=4), batch)
    device_only = replace(batch, q_lens=None)
    with pytest.raises(ab.InvalidInputError, match="batch=no lengths on the host"):
        plan_chunked(spec, device_only)
    with pytest.raises(ab.InvalidInputError, match="backend=int"):
        plan_chunked(spec, batch, backend=3)
    plan = plan_chunked(spec, batch, backend="torch_native")
    q, k, v = ragged(spec, [1], [9])
    with pytest.raises(ab.InvalidInputError, match=r"q.shape\[0\]=2"):
        plan.run(torch.cat([q, q]), k, v)
    with pytest.raises(ab.InvalidInputError, match="expand=given"):
        plan.run(q, k, v, expand=lambda k, v: (k, v))
    cache, table = paged(k, [9])
    paged_batch = ab.Batch.from_lengths([1], [9], page_table=table)
    paged_spec = spec_of(page_size=PAGE)
    with pytest.raises(ab.InvalidInputError, match=r"chunk_size=6 .*multiple of page_size=4"):
        plan_chunked(paged_spec, paged_batch, chunk_size=6, gather=False)
    plan = plan_chunked(paged_spec, paged_batch, chunk_size=6, backend="torch_native")
    with pytest.raises(ab.InvalidInputError, match=r"k_cache.shape=.*\[num_pages, 4"):
        plan.run(q, cache[:, :2], cache)
    with pytest.raises(ab.InvalidInputError, match="page_table="):
        plan.run(q, cache[:1], cache[:1])
