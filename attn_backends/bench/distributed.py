"""Benchmark context parallelism: ring prefill and sharded decode, on several GPUs against one.

    python -m attn_backends.bench.distributed --json out.json
    python -m attn_backends.bench.distributed --device cpu --prefill 256 --decode 512

The second line is a rehearsal. One process per GPU, NCCL between them, without NVLink multicast.
Answers are checked first, then the whole, compute alone and exchange alone are timed in turn; a
sample is the time of the slowest rank. Every rank of a decode reads a pool of its own that holds
its share of the keys and nothing else, as a rank of a server does. After that one GPU times its
share among 1 to 64, for the model of cost. Medians.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

from ..batch import Batch
from ..distributed.decode import plan_sharded_decode
from ..distributed.layout import Interleaved, shard_batch
from ..distributed.ring import plan_ring
from ..distributed.shards import zigzag_shards
from ..output import AttentionOutput
from ..pieces import bind
from ..spec import AttentionSpec
from ..torch_native.backend import TorchNativeBackend
from . import distributed_pieces as pieces
from .distributed_timer import Timer
from .graph_timer import Times
from .report import save

MODULE = "attn_backends.bench.distributed"
PAGE = 16
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}


@dataclass(frozen=True)
class Case:
    """One point: a layer of Llama-3-8B unless said otherwise."""

    batch: int
    q_len: int
    kv_len: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int | None = None
    dtype: str = "bf16"
    causal: bool = True

    @property
    def flops(self) -> float:
        """Of the visible pairs, causal ones counted exactly."""
        hidden = self.q_len * (self.q_len - 1) / 2
        pairs = self.batch * (self.q_len * self.kv_len - hidden)
        return 4 * pairs * self.num_heads * self.head_dim

    @property
    def kv_bytes(self) -> int:
        """Keys and values of all sequences."""
        size = 2 if self.dtype == "bf16" else 4
        return self.batch * self.kv_len * self.num_kv_heads * self.head_dim * 2 * size


class Run:
    """What one rank of the benchmark knows."""

    def __init__(self, rank: int, world: int, args: argparse.Namespace) -> None:
        self.rank, self.world, self.args = rank, world, args
        self.device = torch.device(args.device, rank if args.device == "cuda" else None)
        self.mesh = init_device_mesh(args.device, (world,), mesh_dim_names=("cp",))
        self.timer = Timer(self.device, world)
        self.dtype = DTYPES[args.device]
        self.rows: list[dict[str, Any]] = []

    def random(self, *shape: int, seed: int) -> torch.Tensor:
        """The same numbers on every rank."""
        g = torch.Generator(device=self.device).manual_seed(seed)
        return torch.randn(shape, generator=g, device=self.device, dtype=self.dtype)

    def spec(self, case: Case) -> AttentionSpec:
        """The spec of a case."""
        return AttentionSpec(
            case.num_heads, case.num_kv_heads, case.head_dim, dtype=self.dtype,
            page_size=case.page_size, causal=case.causal,
        )  # fmt: skip

    def case(self, batch: int, q_len: int, kv_len: int, page_size: int | None = None) -> Case:
        """A case of this run's dtype; a rehearsal has fewer heads."""
        small = {} if self.args.device == "cuda" else {"num_heads": 4, "num_kv_heads": 2}
        dtype = "bf16" if self.dtype == torch.bfloat16 else "fp32"
        return Case(batch, q_len, kv_len, page_size=page_size, dtype=dtype, **small)

    def add(
        self, bench: str, case: Case, part: str, mode: str, times: Times, **more: Any
    ) -> dict[str, Any]:
        """One row of the results file."""
        name = part if "exchange" in part else f"{self.args.backend} {part}"
        row = {"bench": bench, "case": asdict(case), "backend": name, "mode": mode,
               **times.row(), **more}  # fmt: skip
        self.rows.append(row)
        if self.rank == 0:
            extra = " ".join(f"{k} {v}" for k, v in more.items())
            label = f"{case.batch}x{case.q_len}/{case.kv_len}"
            print(f"{bench:14s}{label:20s}{name:28s}{mode:6s}{times.median_us:12.1f} us {extra}",
                  flush=True)  # fmt: skip
        return row

    def save(self) -> None:
        """Write what there is, so that an interrupted run keeps it."""
        if self.rank == 0:
            save(self.args.json, MODULE, self.rows)

    def agree(self, good: bool) -> bool:
        """Whether it is good on all ranks."""
        flag = torch.tensor([0 if good else 1], device=self.device)
        dist.all_reduce(flag)
        return int(flag) == 0


def error_of(got: AttentionOutput, want: AttentionOutput) -> tuple[float, bool]:
    """Largest error of o, and whether every row of o and lse is within a few roundings.

    Rows over many keys are small, and are held to their own size, not to that of short ones.
    """
    if not got.o.numel():
        return 0.0, got.o.shape == want.o.shape
    error = (got.o.float() - want.o.float()).abs().amax(-1)
    size = want.o.float().abs().amax(-1).clamp_min(0.02)
    empty = torch.isinf(want.lse)
    lse_error = torch.where(empty, 0.0, (got.lse - want.lse).abs())
    right = (error <= 4 * torch.finfo(got.o.dtype).eps * size + 1e-6) & (lse_error <= 1e-3)
    same = torch.equal(torch.isinf(got.lse), empty)
    return float(error.max()), same and bool(right.all())


def gate(run: Run) -> bool:
    """Small, uneven calls against the reference; nothing is timed unless they are right."""
    good = True
    lens = [1031, 1, 517]
    case = run.case(len(lens), 0, 0)
    spec, total = run.spec(case), sum(lens)
    q = run.random(total, case.num_heads, 128, seed=1)
    k, v = (run.random(total, case.num_kv_heads, 128, seed=s) for s in (2, 3))
    reference = TorchNativeBackend(spec)
    want = reference.run(q, k, v, reference.plan(Batch.from_lengths(lens, lens, device=run.device)))
    shards = zigzag_shards(lens, run.world)
    rows = shards.query_rows(run.rank).to(run.device)
    ring = plan_ring(spec, shards, run.mesh, backend=run.args.backend, device=run.device)
    got = ring.run(q[rows], k[rows], v[rows])
    good &= _told(run, "ring", got, AttentionOutput(want.o[rows], want.lse[rows]))

    ones, kv_lens = [1, 1, 1], [2100, 0, 30]
    q, most = q[:3], -(-2100 // PAGE)
    spec = run.spec(run.case(3, 1, 2100, PAGE))
    caches = [run.random(3 * most, PAGE, case.num_kv_heads, 128, seed=s) for s in (4, 5)]
    table = torch.randperm(3 * most, generator=torch.Generator().manual_seed(6)).view(3, most)
    reference = TorchNativeBackend(spec)
    whole = Batch.from_lengths(ones, kv_lens, page_table=table, device=run.device)
    want = reference.run(q, *caches, reference.plan(whole))
    local = table[:, run.rank :: run.world]
    batch = shard_batch(ones, kv_lens, Interleaved(PAGE), run.rank, run.world, page_table=local,
                        device=run.device)  # fmt: skip
    for how in ("all_to_all", "all_gather", "reduce_scatter"):
        for replicate in (True, False):
            plan = plan_sharded_decode(spec, batch, run.mesh, backend=run.args.backend,
                                       exchange=how, replicate=replicate)  # fmt: skip
            got, mine = plan.run(q, *caches), plan.heads
            there = AttentionOutput(want.o[:, mine], want.lse[:, mine])
            good &= _told(run, f"decode {how} replicate={replicate}", got, there)
    return run.agree(good)


def _told(run: Run, name: str, got: AttentionOutput, want: AttentionOutput) -> bool:
    error, right = error_of(got, want)
    if not right or run.rank == 0:
        print(
            f"gate rank {run.rank} {name}: err {error:.1e} {'' if right else 'WRONG'}", flush=True
        )
    return right


def prefill(run: Run, tokens: int, rounds: int) -> None:
    """Causal attention of one long prompt."""
    case = run.case(1, tokens, tokens)
    spec, world = run.spec(case), run.world
    q = run.random(tokens, case.num_heads, 128, seed=1)
    k, v = (run.random(tokens, case.num_kv_heads, 128, seed=s) for s in (2, 3))
    shards = zigzag_shards([tokens], world)
    rows = shards.query_rows(run.rank).to(run.device)
    mine = [x[rows] for x in (q, k, v)]
    plan = plan_ring(spec, shards, run.mesh, backend=run.args.backend, device=run.device)
    whole = bind(run.args.backend, spec, "prefill", run.device)
    whole_plan = whole.plan(Batch.from_lengths([tokens], [tokens], device=run.device))
    want = whole.run(q, k, v, whole_plan)
    error, right = error_of(plan.run(*mine), AttentionOutput(want.o[rows], want.lse[rows]))
    del want
    right = run.agree(right)
    variants: dict[str, Callable[[], Any] | None] = {
        "1 GPU": (lambda: whole.run(q, k, v, whole_plan)) if run.rank == 0 else None,
        f"{world} GPUs": lambda: plan.run(*mine),
        "compute alone": lambda: plan.compute_only(*mine),
        "exchange alone": lambda: plan.exchange_only(*mine[1:]),
    }
    times = run.timer.eager(variants, rounds)
    _add_all(run, "ring-prefill", case, "eager", times, error, right, case.kv_bytes // world)
    if run.rank == 0:
        pieces.prefill(run, case, (q, k, v), rounds)
    run.save()
    run.timer.meet()


def decode(run: Run, batch_size: int, kv_len: int, rounds: int) -> None:
    """One token of each sequence, over keys whose pages are dealt out to the ranks.

    The pages of a rank are copied into a pool of their own: left where they are among the others,
    they would be every n-th piece of 32 KB, which reads slower and which no server has.
    """
    case = run.case(batch_size, 1, kv_len, PAGE)
    spec, world, pages = run.spec(case), run.world, kv_len // PAGE
    ones, kv_lens = [1] * batch_size, [kv_len] * batch_size
    q = run.random(batch_size, case.num_heads, 128, seed=1)
    caches = [run.random(batch_size * pages, PAGE, case.num_kv_heads, 128, seed=s) for s in (2, 3)]
    table = torch.arange(batch_size * pages).view(batch_size, pages)
    whole = bind(run.args.backend, spec, "decode", run.device)
    whole_plan = whole.plan(Batch.from_lengths(ones, kv_lens, page_table=table, device=run.device))
    want = whole.run(q, *caches, whole_plan)
    mine = table[:, run.rank :: world]
    pools = [x[mine.flatten().to(run.device)] for x in caches]  # this rank's pages, dense
    local_table = torch.arange(mine.numel()).view(mine.shape)
    batch = shard_batch(ones, kv_lens, Interleaved(PAGE), run.rank, world,
                        page_table=local_table, device=run.device)  # fmt: skip
    plan = plan_sharded_decode(spec, batch, run.mesh, backend=run.args.backend)
    local = plan.local(q, *pools)
    error, right = error_of(plan.run(q, *pools), want)
    right = run.agree(right)
    variants: dict[str, Callable[[], Any] | None] = {
        "1 GPU": (lambda: whole.run(q, *caches, whole_plan)) if run.rank == 0 else None,
        f"{world} GPUs": lambda: plan.run(q, *pools),
        "compute alone": lambda: plan.local(q, *pools),
        "exchange alone": lambda: plan.combine(local),
    }
    size = local.o.numel() * local.o.element_size() + local.lse.numel() * 4
    times = run.timer.eager(variants, rounds, calls=10)
    _add_all(run, "cp-decode", case, "eager", times, error, right, size)
    if run.device.type == "cuda":
        times = run.timer.graphs(variants, rounds, calls=10)
        _add_all(run, "cp-decode", case, "graph", times, error, right, size)
    if run.rank == 0 and batch_size == 1:
        pieces.decode(run, case, q, caches, rounds)
    run.save()
    run.timer.meet()


def _add_all(
    run: Run, bench: str, case: Case, mode: str, times: dict[str, Times], error: float,
    right: bool, exchanged: int,
) -> None:  # fmt: skip
    """Rows of one case; shares and efficiency go with the row of all GPUs."""
    median = {name: t.median_us for name, t in times.items()}
    one, compute, exchange = median["1 GPU"], median["compute alone"], median["exchange alone"]
    for name, t in times.items():
        more: dict[str, Any] = {"gpus": 1 if name == "1 GPU" else run.world, "right": right}
        if name.endswith("GPUs"):
            more |= {
                "max_err": error,
                "speedup": round(one / t.median_us, 3),
                "efficiency": round(one / t.median_us / run.world, 3),
                "exchange_share": round(exchange / t.median_us, 4),
                "exposed_share": round(max(t.median_us - compute, 0.0) / t.median_us, 4),
            }
        if name.endswith(("GPU", "GPUs")):
            more["tflops"] = round(case.flops / t.median_us / 1e6, 1)
            more["gbps"] = round(case.kv_bytes / t.median_us / 1e3)
        if name.startswith("exchange"):
            more["bytes"] = exchanged
        run.add(bench, case, name, mode, t, **more)
    run.save()


def _modes(run: Run) -> dict[str, Callable[..., dict[str, Times]]]:
    """Ways to issue calls: Python calls them, and on a GPU a graph replays them too."""
    eager = {"eager": run.timer.eager}
    return eager | {"graph": run.timer.graphs} if run.device.type == "cuda" else eager


def hops(run: Run, rounds: int) -> None:
    """A hop of the ring, by the size of what travels."""
    for tokens in (64, 8192, 131072) if run.device.type == "cuda" else (64, 4096):
        case = run.case(1, tokens, tokens)
        shards = zigzag_shards([tokens], run.world)
        plan = plan_ring(run.spec(case), shards, run.mesh, backend=run.args.backend,
                         device=run.device)  # fmt: skip
        shape = (shards.num_keys(run.rank), case.num_kv_heads, case.head_dim)
        k, v = (torch.zeros(shape, dtype=run.dtype, device=run.device) for _ in range(2))
        steps = run.world - 1
        call = lambda p=plan, k=k, v=v: p.exchange_only(k, v)  # noqa: E731
        size = case.kv_bytes // run.world
        for mode, measure in _modes(run).items():
            times = measure({"x": call}, rounds, calls=4)["x"]
            run.add("ring-hop", case, "exchange of a shard", mode, times, bytes=size, hops=steps)
            run.save()


def state_exchanges(run: Run, rounds: int) -> None:
    """Every exchange of decode states, by size."""
    for tokens in (1, 64, 512):
        for how in ("all_gather", "all_to_all", "reduce_scatter"):
            case = run.case(tokens, 1, 1)
            batch = Batch.from_lengths([1] * tokens, [1] * tokens, device=run.device)
            spec = run.spec(case)
            state = AttentionOutput(
                run.random(tokens, case.num_heads, 128, seed=1),
                torch.zeros(tokens, case.num_heads, device=run.device),
            )
            sharded = plan_sharded_decode(spec, batch, run.mesh, backend=run.args.backend,
                                          exchange=how, replicate=how == "all_gather")  # fmt: skip
            call = lambda p=sharded, s=state: p.combine(s)  # noqa: E731
            size = state.o.numel() * state.o.element_size() + state.lse.numel() * 4
            for mode, measure in _modes(run).items():
                times = measure({"x": call}, rounds, calls=20)["x"]
                run.add("cp-exchange", case, f"exchange {how}", mode, times, bytes=size,
                        hops=run.world - 1)  # fmt: skip


def worker(rank: int, world: int, store: str, args: argparse.Namespace) -> None:
    """One rank."""
    options: dict[str, Any] = {}
    if args.device == "cuda":
        torch.cuda.set_device(rank)
        options["device_id"] = torch.device("cuda", rank)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo",
                            init_method=f"file://{store}", rank=rank, world_size=world,
                            **options)  # fmt: skip
    run = Run(rank, world, args)
    if not gate(run):
        if rank == 0:
            print("the gate is red: nothing is timed", flush=True)
        raise SystemExit(1)
    if args.device == "cpu":
        torch.set_num_threads(1)
    prefill(run, args.prefill, args.rounds)
    decode(run, 1, args.decode, args.rounds)
    decode(run, 8, args.decode // 8, args.rounds)
    state_exchanges(run, args.rounds)
    run.save()
    hops(run, args.rounds)
    gc.collect()  # graphs hold the communicator
    dist.barrier()
    dist.destroy_process_group()


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}")
    parser.add_argument("--json", help="results file to write")
    parser.add_argument("--gpus", type=int, help="ranks; default: all GPUs, 2 on a CPU")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--backend", help="default: triton, torch_native on a CPU")
    parser.add_argument("--prefill", type=int, default=131072, help="tokens")
    parser.add_argument("--decode", type=int, default=1048576, help="keys")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args(argv)
    # NVLink multicast needs a fabric that not every host of several GPUs lets a job use.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    on_cpu = args.device == "cpu"
    args.backend = args.backend or ("torch_native" if on_cpu else "triton")
    world = args.gpus or (2 if on_cpu else torch.cuda.device_count())
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (world, os.path.join(folder, "store"), args), nprocs=world)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
