"""What one GPU among n computes, run and timed on one GPU: the pieces of the model of cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..batch import Batch
from ..distributed.group import Group
from ..distributed.ring import RingPlan, plan_steps
from ..distributed.shards import zigzag_shards
from ..pieces import bind

if TYPE_CHECKING:
    from .distributed import Case, Run

#: Numbers of GPUs that the model speaks of.
GPUS = (1, 2, 4, 8, 16, 32, 64)
#: Calls of a decode piece in a graph; each reads other pages, so that none is found in L2.
CALLS = 8


def prefill(run: Run, case: Case, tensors: tuple[torch.Tensor, ...], rounds: int) -> None:
    """Calls and merges of one rank of the ring, among n ranks."""
    spec, tokens = run.spec(case), case.q_len
    modes = {"eager": 0, "graph": 1} if run.device.type == "cuda" else {"eager": 0}
    for gpus in GPUS:
        shards = zigzag_shards([tokens], gpus)
        rank = gpus // 2  # steps of both kinds: all queries on half the keys, and the reverse
        steps = plan_steps(spec, shards, rank, run.args.backend, run.device)
        plan = RingPlan(spec, shards, Group(None, rank, gpus), steps)
        most = max(shards.num_keys(r) for r in range(gpus))
        q = tensors[0][: shards.num_queries(rank)]
        k, v = (x[:most] for x in tensors[1:])
        for mode, graph in modes.items():
            call = lambda p=plan, q=q, k=k, v=v: p.compute_only(q, k, v)  # noqa: E731
            times = run.timer.alone(call, max(rounds // 2, 3), graph)
            tflops = round(case.flops / gpus / times.median_us / 1e6, 1)
            run.add("ring-piece", case, f"compute of 1 in {gpus}", mode, times, gpus=gpus,
                    tflops=tflops)  # fmt: skip


def decode(run: Run, case: Case, q: torch.Tensor, caches: list[torch.Tensor], rounds: int) -> None:
    """One token over the n-th part of the keys."""
    spec, pages = run.spec(case), case.kv_len // (case.page_size or 1)
    backend = bind(run.args.backend, spec, "decode", run.device)
    for gpus in GPUS:
        share = pages // gpus
        plans: list[Any] = []
        for i in range(min(gpus, CALLS)):
            table = torch.arange(i * share, (i + 1) * share)[None]
            lens = [share * (case.page_size or 1)]
            batch = Batch.from_lengths([1], lens, page_table=table, device=run.device)
            plans.append(backend.plan(batch))

        def call(plans: list[Any] = plans) -> None:
            for i in range(CALLS):
                backend.run(q, caches[0], caches[1], plans[i % len(plans)])

        graph = 1 if run.device.type == "cuda" else 0
        times = run.timer.alone(call, rounds, graph)
        each = type(times)(*(getattr(times, n) / CALLS for n in
                             ("median_us", "p20_us", "p25_us", "p75_us", "p80_us")),
                           times.samples)  # fmt: skip
        mode = "graph" if graph else "eager"
        gbps = round(case.kv_bytes / gpus / each.median_us / 1e3)
        run.add("cp-decode-piece", case, f"compute of 1 in {gpus}", mode, each, gpus=gpus,
                gbps=gbps)  # fmt: skip


__all__ = ["CALLS", "GPUS", "decode", "prefill"]
