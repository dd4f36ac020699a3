"""Decode context parallelism: two ranks, each with half of the cache, give what one would."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attn_backends.engines.vllm import context_parallel
from attn_backends.errors import AttnBackendsError
from attn_backends.merge import merge_state
from attn_backends.spec import AttentionSpec

HEADS, DIM, PAGE, RANKS = 2, 16, 4, 2
SPEC = AttentionSpec(HEADS, 1, DIM, dtype=torch.float32, page_size=PAGE)


class Group:
    """Both ranks in one process: what one rank hands in is kept for the other."""

    def __init__(self, queries):
        self.queries, self.states, self.rank = queries, {}, 0

    def all_gather(self, x, dim):
        assert dim == 1 and torch.equal(x, self.queries[self.rank])
        return torch.cat(self.queries, 1)

    def combine(self, o, lse, group, return_lse):
        """vLLM's combination, over what every rank has handed in so far."""
        assert group is self and return_lse
        self.states[self.rank] = (o.clone(), lse.clone())
        states = list(self.states.values())
        o, lse = states[0]
        for other in states[1:]:
            o, lse = merge_state(o, lse, *other)
        mine = slice(self.rank * HEADS, (self.rank + 1) * HEADS)
        return o[:, mine], lse[:, mine]


class Shards:
    """Requests whose tokens are dealt out over two caches."""

    def __init__(self, lens, new, interleave, seed=0):
        gen = torch.Generator().manual_seed(seed)
        self.lens, self.new, self.interleave = lens, new, interleave
        self.k = [torch.randn(n, 1, DIM, generator=gen) for n in lens]
        self.v = [torch.randn(n, 1, DIM, generator=gen) for n in lens]
        rows = sum(new)
        self.q = [torch.randn(rows, HEADS, DIM, generator=gen) for _ in range(RANKS)]
        # As wide as the tables of vLLM, which hold a rank's share of the longest sequence.
        share = -(-max(lens) // (RANKS * interleave)) * interleave
        self.width = -(-share // PAGE)
        table = torch.arange(len(lens) * self.width, dtype=torch.int32)
        self.table = table.view(len(lens), self.width)
        self.caches = [self._cache(rank) for rank in range(RANKS)]

    def _cache(self, rank):
        k = torch.full((self.table.numel(), PAGE, 1, DIM), float("nan"))
        v = k.clone()
        for i, length in enumerate(self.lens):
            mine = [p for p in range(length) if p // self.interleave % RANKS == rank]
            for local, p in enumerate(mine):
                page = int(self.table[i, local // PAGE])
                k[page, local % PAGE], v[page, local % PAGE] = self.k[i][p], self.v[i][p]
        return k, v

    def requests(self):
        from attn_backends.engines.vllm.steps import Requests

        starts = torch.tensor([0, *torch.tensor(self.new).cumsum(0)], dtype=torch.int32)
        common = SimpleNamespace(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(self.lens, dtype=torch.int32),
            num_reqs=len(self.lens),
            num_actual_tokens=sum(self.new),
            max_query_len=max(self.new),
            max_seq_len=max(self.lens),
            block_table_tensor=self.table,
            causal=True,
        )
        return Requests.of(common, exact=False)

    def own(self, tensors):
        return torch.cat([x[length - n :] for x, length, n in zip(tensors, self.lens, self.new)])

    def expected(self, rank, sinks):
        outs, row = [], 0
        for k, v, length, n in zip(self.k, self.v, self.lens, self.new):
            q = self.q[rank][row : row + n].double()
            row += n
            scores = torch.einsum("qhd,kd->hqk", q, k[:, 0].double()) * SPEC.scale
            hidden = torch.arange(length)[None] > torch.arange(length - n, length)[:, None]
            scores = scores.masked_fill(hidden, float("-inf"))
            if sinks is not None:
                column = sinks.double()[:, None, None].expand(-1, n, 1)
                weights = torch.cat((scores, column), 2).softmax(2)[..., :-1]
            else:
                weights = scores.softmax(2)
            outs.append(torch.einsum("hqk,kd->qhd", weights, v[:, 0].double()))
        return torch.cat(outs)

    def run(self, monkeypatch, parallels, capacity=None, sinks=None):
        """Outputs of both ranks; a first round fills the group with every rank's state."""
        group = Group(self.q)
        monkeypatch.setattr(
            context_parallel, "_collective", lambda all_to_all: (group, group.combine)
        )
        outs = [torch.full_like(q, float("nan")) for q in self.q]
        for _ in range(2):
            for rank, parallel in enumerate(parallels):
                group.rank = rank
                step = parallel.plan(self.requests(), capacity)
                step.run(
                    (self.q[rank], self.own(self.k), self.own(self.v)),
                    self.caches[rank],
                    outs[rank],
                    sinks=sinks,
                    alibi_slopes=None,
                    k_scale=None,
                    v_scale=None,
                )
        return outs

    def check(self, outs, sinks=None):
        for rank, out in enumerate(outs):
            torch.testing.assert_close(
                out.double(), self.expected(rank, sinks), rtol=1e-5, atol=1e-5
            )


def ranks(interleave):
    device = torch.device("cpu")
    return [
        context_parallel.ContextParallel.of(SPEC, RANKS, rank, interleave, device)
        for rank in range(RANKS)
    ]


@pytest.mark.parametrize("interleave", [1, 4])
@pytest.mark.parametrize(
    "lens, new",
    [
        ([17, 9, 30], [1, 1, 1]),
        ([17, 6, 5, 1], [4, 6, 1, 1]),
        ([3, 2], [3, 1]),
    ],
    ids=["decode", "mixed", "hardly any context"],
)
def test_ranks_together_see_every_key_once(monkeypatch, lens, new, interleave):
    monkeypatch.setenv("ATTN_BACKENDS_BACKEND", "torch_native")
    shards = Shards(lens, new, interleave)
    assert str(ranks(interleave)[0]).startswith("prefill=torch_native, decode=torch_native over 2")
    shards.check(shards.run(monkeypatch, ranks(interleave)))


def test_a_sink_counts_once(monkeypatch):
    monkeypatch.setenv("ATTN_BACKENDS_BACKEND", "torch_native")
    shards, sinks = Shards([17, 9], [1, 2], 1), torch.tensor([1.0, -0.5])
    shards.check(shards.run(monkeypatch, ranks(1), sinks=sinks), sinks)


def test_captured_plans_are_refilled(monkeypatch):
    from attn_backends.capacity import Capacity

    monkeypatch.setenv("ATTN_BACKENDS_BACKEND", "triton")
    both = ranks(1)
    first = Shards([17, 9], [1, 1], 1)
    room = Capacity(2, 2, 1, first.width * PAGE, first.width, in_place=True)
    first.check(first.run(monkeypatch, both, room))
    plans = [plan for each in both for pair in each._captured.values() for plan in pair]
    assert len(plans) == 4
    later = Shards([18, 4], [1, 1], 1, seed=5)
    later.check(later.run(monkeypatch, both))
    assert plans == [plan for each in both for pair in each._captured.values() for plan in pair]


@pytest.mark.engine
def test_two_processes_combine_states_through_vllms_own_group():
    from vllm.v1.attention import ops

    if (Path(ops.__path__[0]) / "dcp.py").exists():
        pytest.skip("the kernel of this vLLM does not run in Triton's interpreter")
    here = Path(__file__).parent
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = {**os.environ, "ATTN_BACKENDS_BACKEND": "triton", "TRITON_INTERPRET": "1"}
    env["CUDA_VISIBLE_DEVICES"] = ""
    workers = [
        subprocess.Popen(
            [sys.executable, str(here / "two_ranks.py"), str(rank), port, str(here)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
        )
        for rank in range(RANKS)
    ]
    try:
        said = [worker.communicate(timeout=240)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for text in said:
        errors = [float(x.split()[1]) for x in text.splitlines() if x.startswith("error")]
        assert len(errors) == 6, text[-2000:]
        assert max(errors) < 1e-5


@pytest.mark.parametrize("backend", ["torch_native", "triton"])
def test_steps_of_a_rank_are_planned_captured_and_replayed(engine, monkeypatch, backend):
    """Through builder and layer; the other rank has no context yet, as runs of 64 are dealt out."""
    from attn_backends.engines.vllm import builder, impl

    assert builder.Impl is impl.Impl  # imported before it is replaced

    class Rank(impl.Impl):
        def __new__(cls, *args, **kwargs):
            self = super().__new__(cls, *args, **kwargs)
            self.dcp_world_size, self.dcp_rank = RANKS, 0
            return self

    group = SimpleNamespace(all_gather=lambda x, dim: torch.cat([x, x], dim))

    def combine(o, lse, group, return_lse):
        return o[:, :HEADS], lse[:, :HEADS]

    monkeypatch.setattr(context_parallel, "_collective", lambda *_: (group, combine))
    monkeypatch.setattr(impl, "Impl", Rank)
    made = engine(backend, heads=HEADS, kv_heads=1)
    made.config.parallel_config.decode_context_parallel_size = RANKS
    made.config.parallel_config.cp_kv_cache_interleave_size = 64

    def check(out, want):
        torch.testing.assert_close(out[: len(want)].double(), want, rtol=1e-5, atol=1e-5)

    a, b = made.request(30), made.request(21)
    check(*made.step([(a, 9)]))
    check(*made.step([(a, 1), (b, 12)], padding=2))
    if backend == "torch_native":  # has no graphs
        assert not made.impl.has_graphs
        check(*made.step([(a, 1), (b, 1)]))
        return
    common = made.metadata([(a, 1), (b, 1)], num_reqs=3, rows=3)
    capture = made.builder.build_for_cudagraph_capture
    check(*made.step([(a, 1), (b, 1)], metadata=common, build=capture))
    (parallel,) = made.builder.context.values()
    ((key, plans),) = parallel._captured.items()
    assert key == (3, 3, 1)
    for news in ([(b, 1), (a, 1)], [(a, 1)]):
        check(*made.step(news, metadata=made.metadata(news, num_reqs=3, rows=3)))
        assert parallel._captured == {key: plans}


@pytest.mark.parametrize(
    "change, text",
    [
        ({"window": (3, 0)}, "sliding_window=(3, 0) (supported: None with context parallelism)"),
        ({"has_alibi": True}, "alibi_slopes=given (supported: None with context parallelism)"),
    ],
    ids=["window", "alibi"],
)
def test_what_depends_on_positions_is_refused(change, text):
    from dataclasses import replace

    with pytest.raises(AttnBackendsError) as error:
        context_parallel.specs(replace(SPEC, **change), RANKS)
    assert text in str(error.value)
