"""One rank of the distributed tests: runs every check of its world and writes what failed.

    python worker.py RANK WORLD STORE OUT

Checks are the functions below whose names start with ``check_``. Each takes a ``Rank`` and raises
if a promise does not hold. All ranks run them in the same order.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import attn_backends as ab
from attn_backends.conformance.oracle import Extras, Sequence
from attn_backends.conformance.tolerance import Expected, expect
from attn_backends.distributed import (
    Interleaved,
    plan_ring,
    plan_sharded_decode,
    shard_batch,
    zigzag_shards,
)
from attn_backends.distributed.exchange import heads_of
from attn_backends.pieces import Call
from attn_backends.torch_native.backend import TorchNativeBackend, TorchNativeOptions

PAGE = 4
EXCHANGES = ("all_to_all", "all_gather", "reduce_scatter")


@dataclass(frozen=True)
class Rank:
    """This process: its mesh, its number, and how many there are."""

    mesh: DeviceMesh
    rank: int
    world: int


def spec_of(**changes) -> ab.AttentionSpec:
    base = dict(num_heads=6, num_kv_heads=2, head_dim=16, head_dim_v=12, dtype=torch.float32)
    return ab.AttentionSpec(**{**base, **changes})


def inputs(
    spec: ab.AttentionSpec, q_lens: list[int], kv_lens: list[int], seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same q, k, v of the whole job on every rank, ragged."""
    g = torch.Generator().manual_seed(seed)
    make = lambda n, h, d: torch.randn(n, h, d, generator=g).to(spec.dtype)  # noqa: E731
    q = make(sum(q_lens), spec.num_heads, spec.head_dim)
    k = make(sum(kv_lens), spec.num_kv_heads, spec.head_dim)
    return q, k, make(sum(kv_lens), spec.num_kv_heads, spec.dv)


def exact(spec, q, k, v, q_lens, kv_lens, sinks=None) -> Expected:
    """The float64 answer of the whole job."""
    parts = zip(q.split(q_lens), k.split(kv_lens), v.split(kv_lens))
    return expect(spec, [Sequence(*x) for x in parts], Extras(sinks=sinks))


def close(got: ab.AttentionOutput, want: Expected, rows, heads, merges: int) -> None:
    """Within what one kernel may err, once for itself and once for every merge."""
    room = 1 + merges
    o, lse = want.o[rows][:, heads], want.lse[rows][:, heads]
    assert got.o.shape == o.shape and got.lse.shape == lse.shape, (got.o.shape, o.shape)
    error = (got.o.double() - o).abs()
    assert bool((error <= room * want.o_tol[rows][:, heads, None]).all()), float(error.max())
    empty = lse == float("-inf")
    assert torch.equal(got.lse == float("-inf"), empty)
    assert not got.o[empty].any()
    off = torch.where(empty, 0.0, (got.lse.double() - lse).abs())
    assert bool((off <= room * want.lse_tol[rows][:, heads]).all()), float(off.max())


def shards_of_keys(layout, kv_lens, r: Rank) -> torch.Tensor:
    """Rows of ragged keys that a rank holds."""
    starts = [sum(kv_lens[:b]) for b in range(len(kv_lens))]
    parts = [layout.positions(n, r.rank, r.world) + s for n, s in zip(kv_lens, starts)]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *parts])


def paged(x: torch.Tensor, lens: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache with shuffled pages, its unused slots NaN, and the page table."""
    pages = [-(-n // PAGE) for n in lens]
    order = torch.randperm(sum(pages) + 1, generator=torch.Generator().manual_seed(seed))
    cache = torch.full((sum(pages) + 1, PAGE, *x.shape[1:]), float("nan"), dtype=x.dtype)
    table = torch.full((len(lens), max([1, *pages])), -1, dtype=torch.int32)
    row = at = 0
    for b, n in enumerate(lens):
        for i in range(pages[b]):
            count = min(PAGE, n - i * PAGE)
            table[b, i] = order[at]
            cache[order[at], :count] = x[row : row + count]
            row, at = row + count, at + 1
    return cache, table


def everywhere_equal(state: ab.AttentionOutput, r: Rank) -> None:
    for x in state:
        parts = [torch.empty_like(x.contiguous()) for _ in range(r.world)]
        dist.all_gather(parts, x.contiguous(), group=r.mesh.get_group())
        assert all(torch.equal(part, parts[0]) for part in parts)


def ring(r: Rank, spec, q_lens, kv_lens=None, backend="torch_native", seed=0, **extras):
    """One ring run against the float64 answer; this rank's state."""
    kv_lens = q_lens if kv_lens is None else kv_lens
    q, k, v = inputs(spec, q_lens, kv_lens, seed)
    shards = zigzag_shards(q_lens, r.world, kv_lens=kv_lens)
    rows, keys = shards.query_rows(r.rank), shards.key_rows(r.rank)
    plan = plan_ring(spec, shards, r.mesh, backend=backend, device="cpu")
    got = plan.run(q[rows], k[keys], v[keys], **extras)
    want = exact(spec, q, k, v, q_lens, kv_lens, extras.get("sinks"))
    close(got, want, rows, slice(None), r.world)
    return plan, got, (q[rows], k[keys], v[keys])


# Ring attention


def check_ring_is_causal_attention_of_the_whole(r: Rank) -> None:
    ring(r, spec_of(), [37])


def check_ring_takes_ragged_batches_of_any_lengths(r: Rank) -> None:
    ring(r, spec_of(), [5, 0, 1, 23, 2 * r.world, 3])


def check_ring_takes_cached_keys_before_the_queries(r: Rank) -> None:
    ring(r, spec_of(), [9, 1, 0, 14], [20, 30, 7, 14])


def check_ring_without_causality(r: Rank) -> None:
    ring(r, spec_of(causal=False), [11, 3], [11, 8])


def check_ring_with_ranks_that_hold_no_keys(r: Rank) -> None:
    plan, got, _ = ring(r, spec_of(), [1])
    assert not all(plan.shards.num_keys(rank) for rank in range(r.world))
    assert got.o.shape[0] == plan.shards.num_queries(r.rank)


def check_ring_without_any_key(r: Rank) -> None:
    _, got, _ = ring(r, spec_of(), [0, 0])
    assert got.o.shape == (0, 6, 12)


def check_ring_with_softcap_scale_and_sinks(r: Rank) -> None:
    sinks = torch.randn(6, generator=torch.Generator().manual_seed(9))
    ring(r, spec_of(softcap=3.0, sm_scale=0.5), [13, 6], sinks=sinks)


def check_ring_of_a_backend_object_keeps_its_options(r: Rank) -> None:
    options = TorchNativeOptions(tile_k=3, tile_q=2)
    plan, _, _ = ring(r, spec_of(), [17], backend=TorchNativeBackend(spec_of(), options=options))
    assert all(c.backend.options is options for calls in plan.steps for c in calls)


def check_ring_of_the_triton_backend(r: Rank) -> None:
    if r.world > 2:  # the interpreter is slow, and more ranks would test no other kernel
        return
    ring(r, spec_of(num_heads=2, num_kv_heads=1, head_dim_v=16), [9], backend="triton")


def check_ring_in_half_precision_is_rounded_once(r: Rank) -> None:
    ring(r, spec_of(dtype=torch.bfloat16), [19, 4])


def check_ring_in_double_precision_is_as_good_as_its_float32_lse(r: Rank) -> None:
    spec = spec_of(dtype=torch.float64)
    q, k, v = inputs(spec, [21], [21])
    shards = zigzag_shards([21], r.world)
    rows = shards.query_rows(r.rank)
    plan = plan_ring(spec, shards, r.mesh, backend="torch_native", device="cpu")
    got = plan.run(q[rows], k[rows], v[rows])
    want = exact(spec, q, k, v, [21], [21])
    assert got.o.dtype == torch.float64
    step = torch.finfo(torch.float32).eps * (1 + want.lse[rows].abs()) * float(v.abs().max())
    assert bool(((got.o - want.o[rows]).abs() <= r.world * step[..., None]).all())


def check_ring_sends_keys_alone_where_values_lie_in_them(r: Rank) -> None:
    spec = spec_of(num_kv_heads=1, head_dim=24, head_dim_v=16)
    q, k, _ = inputs(spec, [15], [15])
    shards = zigzag_shards([15], r.world)
    rows = shards.query_rows(r.rank)
    plan = plan_ring(spec, shards, r.mesh, backend="torch_native", device="cpu")
    got = plan.run(q[rows], k[rows], None)
    close(got, exact(spec, q, k, k[..., :16], [15], [15]), rows, slice(None), r.world)


def check_ring_of_fp8_keys_with_scales(r: Rank) -> None:
    spec = spec_of(dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn, head_dim_v=16)
    q, k, v = inputs(spec, [15], [15])
    k, v = (x.float().to(torch.float8_e4m3fn) for x in (k, v))
    shards = zigzag_shards([15], r.world)
    rows = shards.query_rows(r.rank)
    plan = plan_ring(spec, shards, r.mesh, backend="torch_native", device="cpu")
    mine = [x.view(torch.uint8)[rows].view(x.dtype) for x in (k, v)]
    got = plan.run(q[rows], *mine, k_scale=0.5, v_scale=2.0)
    scales = (torch.full((2,), 0.5), torch.full((2,), 2.0))
    want = expect(spec, [Sequence(q, k, v)], Extras(k_scale=scales[0], v_scale=scales[1]))
    close(got, want, rows, slice(None), r.world)


def check_ring_reads_strided_views_and_writes_into_out(r: Rank) -> None:
    spec = spec_of(head_dim_v=16)
    q, k, v = inputs(spec, [14], [14])
    both = torch.cat([k, v], dim=1)
    shards = zigzag_shards([14], r.world)
    rows = shards.query_rows(r.rank)
    plan = plan_ring(spec, shards, r.mesh, backend="torch_native", device="cpu")
    mine = both[rows]
    room = torch.full((len(rows), 6, 20), 7.0)
    lse = torch.full((6, len(rows)), 7.0).T
    before = mine.clone()
    got = plan.run(q[rows], mine[:, :2], mine[:, 2:], out=(room[..., :16], lse))
    assert got.lse is lse and torch.equal(mine, before)
    assert torch.equal(room[..., 16:], torch.full((len(rows), 6, 4), 7.0))
    close(got, exact(spec, q, k, v, [14], [14]), rows, slice(None), r.world)


def check_keys_travel_while_a_rank_computes(r: Rank) -> None:
    """Every exchange is begun before the calls of its step, and waited for after them."""
    told: list[str] = []
    plan, _, tensors = ring(r, spec_of(), [8 * r.world])
    begin, run = dist.batch_isend_irecv, Call.run

    class Watched:
        def __init__(self, work) -> None:
            self.work = work

        def wait(self) -> None:
            told.append("wait")
            self.work.wait()

    def send(ops):
        told.append("send")
        return [Watched(work) for work in begin(ops)]

    def compute(self, *args, **kwargs):
        told.append("compute")
        return run(self, *args, **kwargs)

    dist.batch_isend_irecv, Call.run = send, compute
    try:
        plan.run(*tensors)
    finally:
        dist.batch_isend_irecv, Call.run = begin, run
    order = [word for i, word in enumerate(told) if i == 0 or word != told[i - 1]]
    assert order == ["send", "compute", "wait"] * (r.world - 1) + ["compute"], told


def check_ring_twice_gives_the_same_bits(r: Rank) -> None:
    plan, first, tensors = ring(r, spec_of(), [31, 6])
    again = plan.run(*tensors)
    assert torch.equal(first.o, again.o) and torch.equal(first.lse, again.lse)


def check_batch_mates_of_a_ring_move_no_bit(r: Rank) -> None:
    spec, q_lens = spec_of(batch_invariant=True), [31, 6]
    q, k, v = inputs(spec, q_lens, q_lens)
    states = []
    for lens in ([31, 6], [31]):
        shards = zigzag_shards(lens, r.world)
        rows = shards.query_rows(r.rank)
        plan = plan_ring(spec, shards, r.mesh, backend="torch_native", device="cpu")
        states.append(plan.run(q[rows], k[rows], v[rows]))
    both, alone = states
    rows = alone.o.shape[0]
    assert torch.equal(both.o[:rows], alone.o) and torch.equal(both.lse[:rows], alone.lse)


def check_ring_bits_are_those_of_merging_rank_by_rank(r: Rank) -> None:
    """One merge without any transport: own keys first, then each previous rank's."""
    spec, q_lens = spec_of(), [31, 6]
    plan, got, (q, _, _) = ring(r, spec, q_lens)
    _, k, v = inputs(spec, q_lens, q_lens)
    rows = q.shape[0]
    states = []
    for t, calls in enumerate(plan.steps):
        keys = plan.shards.key_rows((r.rank - t) % r.world)
        o, lse = torch.zeros(rows, 6, 12), torch.full((rows, 6), float("-inf"))
        for call in calls:
            o[call.rows], lse[call.rows] = call.run(q, k[keys], v[keys])
        states.append((o, lse))
    want = ab.merge_states(states)
    assert torch.equal(got.o, want.o) and torch.equal(got.lse, want.lse)


def check_zigzag_steps_are_one_call_of_equal_work(r: Rank) -> None:
    size = 4
    shards = zigzag_shards([2 * r.world * size], r.world)
    plan = plan_ring(spec_of(), shards, r.mesh, backend="torch_native", device="cpu")
    for t, calls in enumerate(plan.steps):
        (call,) = calls
        (rows,), (keys,) = call.plan.batch.q_lens, call.plan.batch.kv_lens
        assert call.backend.spec.causal == (t == 0)
        assert rows * keys == (4 if t == 0 else 2) * size * size


def check_ring_gathered_is_in_order(r: Rank) -> None:
    _, got, _ = ring(r, spec_of(), [5, 12])
    shards = zigzag_shards([5, 12], r.world)
    parts = [torch.empty(shards.num_queries(i), 6, 12) for i in range(r.world)]
    whole = [None] * r.world
    dist.all_gather_object(whole, got.o, group=r.mesh.get_group())
    parts = [x for x in whole if x is not None]
    q, k, v = inputs(spec_of(), [5, 12], [5, 12])
    want = exact(spec_of(), q, k, v, [5, 12], [5, 12])
    assert torch.allclose(shards.gather_queries(parts).double(), want.o, atol=1e-5)


# Sharded decode


def decode(r: Rank, spec, kv_lens, layout, exchange, replicate, backend="torch_native", **extras):
    """One decode step against the float64 answer, ragged keys; plan and state."""
    ones = [1] * len(kv_lens)
    q, k, v = inputs(spec, ones, kv_lens, seed=3)
    batch = shard_batch(ones, kv_lens, layout, r.rank, r.world)
    mine = shards_of_keys(layout, kv_lens, r)
    plan = plan_sharded_decode(
        spec, batch, r.mesh, backend=backend, exchange=exchange, replicate=replicate
    )
    got = plan.run(q, k[mine], v[mine], **extras)
    want = exact(spec, q, k, v, ones, kv_lens, extras.get("sinks"))
    close(got, want, slice(None), plan.heads, r.world)
    return plan, got, (q, k, v)


def check_decode_by_every_exchange(r: Rank) -> None:
    for exchange in (*EXCHANGES, None):
        for replicate in (True, False):
            decode(r, spec_of(), [40, 1, 0, 17], Interleaved(1), exchange, replicate)


def check_decode_with_heads_that_do_not_divide(r: Rank) -> None:
    for heads in (1, 5, 7):
        spec = spec_of(num_heads=heads, num_kv_heads=1)
        for exchange in EXCHANGES:
            for replicate in (True, False):
                plan, got, _ = decode(r, spec, [9, 22], Interleaved(2), exchange, replicate)
                assert got.o.shape[1] == plan.heads.stop - plan.heads.start


def check_heads_of_all_ranks_cover_each_head_once(r: Rank) -> None:
    for heads in range(1, 12):
        slices = [heads_of(i, r.world, heads) for i in range(r.world)]
        assert [h for s in slices for h in range(s.start, s.stop)] == list(range(heads))


def check_decode_with_ranks_without_keys(r: Rank) -> None:
    for exchange in EXCHANGES:
        _, got, _ = decode(r, spec_of(), [3, 1, 0], Interleaved(64), exchange, True)
        assert not got.o[2].any() and bool((got.lse[2] == float("-inf")).all())


def check_ranks_without_keys_change_no_bit(r: Rank) -> None:
    kv_lens, ones, spec = [13, 5], [1, 1], spec_of()
    q, k, v = inputs(spec, ones, kv_lens)
    backend = ab.select(replace(spec, causal=False), phase="decode", backend="torch_native").backend
    alone = backend.run(q, k, v, backend.plan(ab.Batch.from_lengths(ones, kv_lens)))
    for exchange in EXCHANGES:
        _, got, _ = decode_same(r, spec, kv_lens, Interleaved(64), exchange, (q, k, v))
        assert torch.equal(got.o, alone.o), exchange
        # LSEs go through ln(exp(0)), which is exact.
        assert torch.equal(got.lse, alone.lse), exchange


def decode_same(r: Rank, spec, kv_lens, layout, exchange, tensors, replicate=True):
    q, k, v = tensors
    ones = [1] * len(kv_lens)
    batch = shard_batch(ones, kv_lens, layout, r.rank, r.world)
    mine = shards_of_keys(layout, kv_lens, r)
    plan = plan_sharded_decode(
        spec, batch, r.mesh, backend="torch_native", exchange=exchange, replicate=replicate
    )
    return plan, plan.run(q, k[mine], v[mine]), tensors


def check_replicated_decode_is_identical_on_all_ranks(r: Rank) -> None:
    for exchange in EXCHANGES:
        _, got, _ = decode(r, spec_of(num_heads=5, num_kv_heads=1), [33, 8], Interleaved(3),
                           exchange, True)  # fmt: skip
        everywhere_equal(got, r)


def check_gathering_and_all_to_all_give_the_bits_of_merge_states(r: Rank) -> None:
    """In rank order, as one process would merge the same states."""
    spec, kv_lens, layout = spec_of(), [33, 8, 0], Interleaved(3)
    q, k, v = inputs(spec, [1] * 3, kv_lens, seed=3)
    states = []
    for rank in range(r.world):
        batch = shard_batch([1] * 3, kv_lens, layout, rank, r.world)
        mine = shards_of_keys(layout, kv_lens, replace(r, rank=rank))
        backend = ab.select(replace(spec, causal=False), backend="torch_native").backend
        states.append(backend.run(q, k[mine], v[mine], backend.plan(batch)))
    o, lse = (torch.stack([s[i] for s in states]) for i in (0, 1))
    want = ab.merge_states((o, lse))
    for exchange in ("all_to_all", "all_gather"):
        for replicate in (True, False):
            plan, got, _ = decode(r, spec, kv_lens, layout, exchange, replicate)
            assert torch.equal(got.o, want.o[:, plan.heads])
            assert torch.equal(got.lse, want.lse[:, plan.heads])


def check_invariant_decode_merges_on_one_path_at_every_size(r: Rank) -> None:
    from attn_backends.distributed import exchange as module

    merge, paths = module.merge_states, []
    module.merge_states = lambda states, path: (paths.append(path), merge(states, path=path))[1]
    try:
        for invariant in (True, False):
            spec = spec_of(batch_invariant=invariant)
            for exchange in ("all_to_all", "all_gather"):
                decode(r, spec, [33, 8, 0], Interleaved(3), exchange, True)
    finally:
        module.merge_states = merge
    assert paths == ["torch", "torch", None, None]


def check_decode_twice_gives_the_same_bits(r: Rank) -> None:
    for exchange in EXCHANGES:
        _, first, _ = decode(r, spec_of(), [40, 17], Interleaved(4), exchange, False)
        _, again, _ = decode(r, spec_of(), [40, 17], Interleaved(4), exchange, False)
        assert torch.equal(first.o, again.o) and torch.equal(first.lse, again.lse)


def check_decode_from_paged_caches_of_each_rank(r: Rank) -> None:
    spec, kv_lens, layout = spec_of(page_size=PAGE), [21, 0, 6, 34], Interleaved(PAGE)
    ones = [1] * 4
    q, k, v = inputs(spec, ones, kv_lens)
    mine = shards_of_keys(layout, kv_lens, r)
    local = [layout.count(n, r.rank, r.world) for n in kv_lens]
    k_cache, table = paged(k[mine], local)
    v_cache, _ = paged(v[mine], local)
    batch = shard_batch(ones, kv_lens, layout, r.rank, r.world, page_table=table)
    plan = plan_sharded_decode(spec, batch, r.mesh, backend="torch_native")
    want = exact(replace(spec, page_size=None), q, k, v, ones, kv_lens)
    close(plan.run(q, k_cache, v_cache), want, slice(None), slice(None), r.world)


def check_decode_of_several_queries_is_causal(r: Rank) -> None:
    """Speculative decoding: every query sees its own keys, whichever rank they are on."""
    spec, q_lens, kv_lens = spec_of(page_size=PAGE), [4, 1, 0, 3], [21, 9, 5, 3]
    q, k, v = inputs(spec, q_lens, kv_lens)
    for layout in (Interleaved(1), Interleaved(3), Interleaved(16)):
        mine = shards_of_keys(layout, kv_lens, r)
        local = [layout.count(n, r.rank, r.world) for n in kv_lens]
        k_cache, table = paged(k[mine], local)
        v_cache, _ = paged(v[mine], local)
        batch = shard_batch(q_lens, kv_lens, layout, r.rank, r.world, page_table=table)
        plan = plan_sharded_decode(spec, batch, r.mesh, backend="torch_native")
        want = exact(replace(spec, page_size=None), q, k, v, q_lens, kv_lens)
        close(plan.run(q, k_cache, v_cache), want, slice(None), slice(None), r.world)


def check_decode_with_sinks_softcap_and_half_precision(r: Rank) -> None:
    sinks = torch.randn(6, generator=torch.Generator().manual_seed(9))
    for replicate in (True, False):
        for exchange in EXCHANGES:
            spec = spec_of(softcap=5.0)
            decode(r, spec, [30, 0, 2], Interleaved(1), exchange, replicate, sinks=sinks)
            half = spec_of(dtype=torch.bfloat16)
            decode(r, half, [30, 0, 2], Interleaved(1), exchange, replicate)


def check_decode_of_an_mla_cache(r: Rank) -> None:
    """HK = 1, V inside K: heads cannot be split, so keys are."""
    spec = spec_of(num_heads=8, num_kv_heads=1, head_dim=72, head_dim_v=64, sm_scale=0.1)
    kv_lens, layout = [25, 7], Interleaved(1)
    q, k, _ = inputs(spec, [1, 1], kv_lens)
    mine = shards_of_keys(layout, kv_lens, r)
    batch = shard_batch([1, 1], kv_lens, layout, r.rank, r.world)
    plan = plan_sharded_decode(spec, batch, r.mesh, backend="torch_native")
    want = exact(spec, q, k, k[..., :64], [1, 1], kv_lens)
    close(plan.run(q, k[mine], None), want, slice(None), slice(None), r.world)


def check_decode_by_name_by_object_and_by_choice(r: Rank) -> None:
    spec = spec_of(head_dim_v=16)
    objects = TorchNativeBackend(spec, options=TorchNativeOptions(tile_k=2))
    names = ("torch_native", "triton") if r.world == 2 else ("torch_native",)
    for backend in (*names, objects, None):
        decode(r, spec, [19, 4], Interleaved(1), None, True, backend=backend)


def check_decode_without_queries(r: Rank) -> None:
    for exchange in EXCHANGES:
        for replicate in (True, False):
            plan, got, _ = decode_same(
                r, spec_of(), [], Interleaved(1), exchange, inputs(spec_of(), [], []), replicate
            )
            assert got.o.shape == (0, plan.heads.stop - plan.heads.start, 12)


# The mesh


def check_a_dimension_of_a_larger_mesh_will_do(r: Rank) -> None:
    """Several groups at once: each rank of a 2 x n mesh works along one dimension."""
    if r.world % 2:
        return
    mesh = init_device_mesh("cpu", (2, r.world // 2), mesh_dim_names=("tp", "cp"))
    try:
        plan_sharded_decode(spec_of(), ab.Batch.from_lengths([1], [1]), mesh)
        raise AssertionError("a mesh of two dimensions was accepted")
    except ab.InvalidInputError as error:
        assert "mesh.ndim=2" in str(error)
    for name in ("tp", "cp"):
        part = mesh[name]
        small = Rank(part, part.get_local_rank(), part.size())
        ring(small, spec_of(), [11, 2])
        decode(small, spec_of(), [9, 30], Interleaved(2), "all_to_all", True)


def check_a_process_group_will_do(r: Rank) -> None:
    group = r.mesh.get_group()
    shards = zigzag_shards([11], r.world)
    plan = plan_ring(spec_of(), shards, group, backend="torch_native", device="cpu")
    q, k, v = inputs(spec_of(), [11], [11])
    rows = shards.query_rows(r.rank)
    got = plan.run(q[rows], k[rows], v[rows])
    close(got, exact(spec_of(), q, k, v, [11], [11]), rows, slice(None), r.world)


def check_refusals_name_what_is_wrong(r: Rank) -> None:
    batch = ab.Batch.from_lengths([2], [5])
    shards = zigzag_shards([4], r.world)
    refused: dict[str, Callable[[], object]] = {
        "window": lambda: plan_ring(spec_of(window=(3, 0)), shards, r.mesh),
        "has_alibi": lambda: plan_sharded_decode(spec_of(has_alibi=True), batch, r.mesh),
        "has_mask": lambda: plan_ring(spec_of(has_mask=True), shards, r.mesh),
        "spec.page_size": lambda: plan_ring(spec_of(page_size=4), shards, r.mesh),
        "shards.world": lambda: plan_ring(spec_of(), zigzag_shards([4], r.world + 1), r.mesh),
        "max_seqlen_q=2": lambda: plan_sharded_decode(spec_of(), batch, r.mesh),
        "exchange='ring'": lambda: plan_sharded_decode(
            spec_of(), ab.Batch.from_lengths([1], [5]), r.mesh, exchange="ring"
        ),
        "mesh=NoneType": lambda: plan_ring(spec_of(), shards, None),
    }
    for text, call in refused.items():
        try:
            call()
        except (ab.InvalidInputError, ab.UnsupportedCallError) as error:
            assert text in str(error), (text, str(error))
        else:
            raise AssertionError(f"not refused: {text}")
    plan = plan_ring(spec_of(), shards, r.mesh, backend="torch_native", device="cpu")
    q, k, v = inputs(spec_of(), [9], [9])
    try:
        plan.run(q, k, v)
    except ab.InvalidInputError as error:
        assert "q.shape[0]=9" in str(error)
    else:
        raise AssertionError("rows of another rank were accepted")


CHECKS = {name: f for name, f in globals().items() if name.startswith("check_")}


def poison_empty() -> None:
    """Fill what ``torch.empty`` and its kin give with NaN, so that bytes nobody wrote are seen."""

    def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            x = make(*args, **kwargs)
            if x.is_contiguous() and x.dtype in (torch.uint8, torch.float32, torch.bfloat16):
                x.view(torch.uint8).fill_(255)  # of any float a NaN
            return x

        return made

    torch.empty, torch.empty_like = poisoned(torch.empty), poisoned(torch.empty_like)
    torch.Tensor.new_empty = poisoned(torch.Tensor.new_empty)


def main(rank: int, world: int, store: str, out: str) -> None:
    torch.set_num_threads(1)
    poison_empty()
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    failed: dict[str, str] = {}
    seconds: dict[str, float] = {}
    for name, check in CHECKS.items():
        start = time.perf_counter()
        try:
            check(Rank(mesh, rank, world))
        except Exception:
            failed[name] = traceback.format_exc()
            # The others may be waiting inside a collective: what follows would not line up.
            break
        seconds[name] = round(time.perf_counter() - start, 2)
    with open(out, "w") as file:
        json.dump({"failed": failed, "seconds": seconds}, file)
    if failed:
        os._exit(1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
