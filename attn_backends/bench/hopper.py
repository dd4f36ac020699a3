"""Check and time the Hopper prefill on one GPU: ``python -m attn_backends.bench.hopper``.

``--check`` runs the cases of ``hopper_check``, each group in a process with a time limit, since a
wrong barrier hangs instead of failing. ``--bench`` times variants of the kernel and other libraries
in one process: CUDA graphs, inputs rotated so that L2 is cold, replays interleaved, medians.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..triton_native import hopper_launch

COLD_BYTES = 300 * 2**20
MODULE = "attn_backends.bench.hopper"
_PLAIN = "HOPPER_BENCH_PLAIN_LAUNCH"


# ----------------------------------------------------------------------------- check


def _child(arguments: list[str], limit: float) -> tuple[str, str, float]:
    """Output, end ("ok", "exit N" or "timeout") and seconds of this program in a new process."""
    start = time.monotonic()
    command = [sys.executable, "-m", MODULE, *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    )
    try:
        out, err = process.communicate(timeout=limit)
        end = "ok" if process.returncode == 0 else f"exit {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        end = "timeout"
    if end != "ok":
        err = "\n".join(err.strip().splitlines()[-3:])
        out += "\n" + json.dumps({"status": "error", "error": err[-400:]})
    return out, end, time.monotonic() - start


def run_checks(names: list[str], limit: float, jobs: int) -> list[dict[str, Any]]:
    """Run groups side by side; a case that started but never ended is reported as hung."""
    rows: list[dict[str, Any]] = []

    def one(name: str) -> tuple[str, str, str, float]:
        return name, *_child(["--group", name], limit)

    with ThreadPoolExecutor(jobs) as pool:
        for name, out, end, seconds in pool.map(one, names):
            lines = [json.loads(x) for x in out.splitlines() if x.startswith("{")]
            done = [x for x in lines if x["status"] in ("passed", "failed")]
            names_done = {x["case"] for x in done}
            hung = [x for x in lines if x["status"] == "started" and x["case"] not in names_done]
            for x in hung:
                x["status"] = "hung" if end == "timeout" else "crashed"
            errors = [x["error"] for x in lines if x["status"] == "error"]
            if errors:
                (hung[-1] if hung else lines[-1])["error"] = errors[0]
            if not done and not hung:
                done = [{"group": name, "case": "-", "status": "failed", "error": str(errors)}]
            rows += done + hung
            print(f"{name:12s} {end:8s} {seconds:5.1f} s  ", end="")
            passed = [x for x in done if x["status"] == "passed"]
            worst = max((max(x["o"], x["lse"]) for x in passed), default=float("nan"))
            print(f"{len(passed)}/{len(done) + len(hung)} passed, worst error {worst:.2f} bounds")
            for x in done + hung:
                if x["status"] != "passed":
                    print("   ", x["status"], x["case"], x.get("where", ""), x.get("error", ""))
            sys.stdout.flush()
    return rows


# ----------------------------------------------------------------------------- bench


@dataclass(frozen=True)
class Point:
    """One measured call: ``batch`` sequences of ``q_len`` over ``kv_len``, or a drawn mix."""

    name: str
    batch: int
    q_len: int
    kv_len: int
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    causal: bool = True
    page_size: int | None = None
    mix: bool = False

    def lengths(self) -> tuple[list[int], list[int]]:
        """Query and key lengths."""
        if not self.mix:
            return [self.q_len] * self.batch, [self.kv_len] * self.batch
        rng = random.Random(7)
        q = [min(8192, max(16, int(rng.lognormvariate(6.8, 1.0)))) for _ in range(self.batch)]
        return q, q


def points(which: str) -> list[Point]:
    """The points of a named set."""
    dense = [(16, 1024), (4, 4096), (2, 8192), (1, 16384)]
    sets = {
        "causal": [Point(f"causal {b}x{n}", b, n, n) for b, n in dense],
        "full": [Point(f"full {b}x{n}", b, n, n, causal=False) for b, n in dense],
        "mix": [
            Point("mix 20", 20, 0, 0, mix=True), Point("mix 20 p16", 20, 0, 0, mix=True,
                                                       page_size=16),
            Point("causal 64x256", 64, 256, 256), Point("causal 4x1000", 4, 1000, 1000),
            Point("causal 1x1024", 1, 1024, 1024),
        ],
        "d64": [Point(f"d64 causal {b}x{n}", b, n, n, head_dim=64) for b, n in dense[:3]]
        + [Point("d64 full 4x4096", 4, 4096, 4096, head_dim=64, causal=False)],
        "d256": [Point(f"d256 causal {b}x{n}", b, n, n, (16, 8), 256) for b, n in dense[:3]]
        + [Point("d256 full 4x4096", 4, 4096, 4096, (16, 8), 256, False)],
        "paged": [Point(f"p16 causal {b}x{n}", b, n, n, page_size=16) for b, n in dense]
        + [Point(f"p64 causal {b}x{n}", b, n, n, page_size=64) for b, n in dense[:3:2]],
        "extend": [
            Point(f"p16 {b}x{q} over {n}", b, q, q + n, page_size=16)
            for b, q, n in [(8, 512, 8192), (2, 2048, 32768), (32, 128, 4096), (64, 64, 4096)]
        ],
    }  # fmt: skip
    return sets[which]


SETS = ("causal", "full", "mix", "d64", "d256", "paged", "extend")


def variants(point: Point) -> dict[str, Any]:
    """Variants worth measuring at a point, by name; ``chosen`` is what the launcher takes."""
    from ..triton_native.hopper_prefill import Variant, choose_variant

    q_lens, _ = point.lengths()
    chosen = choose_variant(
        head_dim=point.head_dim, num_heads=point.heads[0], num_kv_heads=point.heads[1],
        max_seqlen_q=max(q_lens), total_q=sum(q_lens), num_seqs=point.batch, num_sms=132,
    )  # fmt: skip
    n = 64 if point.head_dim == 256 else 128
    two = 3 if point.head_dim == 64 else 2
    out = {"chosen": chosen}
    out["dyn"] = Variant(block_n=n, stages=two)
    out["dyn g8"] = Variant(block_n=n, stages=two, head_group=8)
    out["static"] = Variant(block_n=n, stages=two, dynamic=False)
    out["snake"] = Variant(block_n=n, stages=two, dynamic=False, snake=True)
    out["dyn pp"] = Variant(block_n=n, stages=two, ping_pong=True)
    if point.head_dim < 256:
        out["1c"] = Variant(block_n=64 if point.head_dim == 128 else 128, consumers=1)
    if point.head_dim == 64:
        out["dyn s2"] = Variant(block_n=n, stages=2)
        out["dyn s4 pp"] = Variant(block_n=n, stages=4, ping_pong=True)
    if point.head_dim == 128 and point.name.startswith("causal"):
        out["dyn mbar"] = Variant(named_empty=False)
        out["n64 s4"] = Variant(block_n=64, stages=4)
    if point.page_size is not None and point.kv_len > point.q_len:
        out["pack"] = Variant(block_n=n, pack=4)
    seen: dict[Any, str] = {}
    return {k: v for k, v in out.items() if k == "chosen" or seen.setdefault(v, k) == k}


class PointInputs:
    """Random inputs of a point, in as many copies as keep L2 cold, and the host facts of it."""

    def __init__(self, point: Point, copies: int | None = None) -> None:
        torch.manual_seed(0)
        self.point = point
        self.q_lens, self.kv_lens = point.lengths()
        heads, kv_heads = point.heads
        dim, dtype = point.head_dim, torch.bfloat16
        tokens, keys = sum(self.q_lens), sum(self.kv_lens)
        size = point.page_size
        self.table = None
        shape: tuple[int, ...] = (keys,)
        if size is not None:
            width = max(-(-n // size) for n in self.kv_lens)
            pages = point.batch * width
            self.table = torch.randperm(pages, device="cuda").int().view(point.batch, width)
            shape = (pages, size)
        one = 2 * dim * (tokens * heads + 2 * keys * kv_heads)
        self.copies = copies or max(1, -(-COLD_BYTES // one))

        def rand(*dims: int) -> list[torch.Tensor]:
            return [torch.randn(dims, device="cuda", dtype=dtype) for _ in range(self.copies)]

        self.q = rand(tokens, heads, dim)
        self.k = rand(*shape, kv_heads, dim)
        self.v = rand(*shape, kv_heads, dim)
        self.starts_q = _starts(self.q_lens)
        self.starts_k = _starts(self.kv_lens)
        self.lens_k = torch.tensor(self.kv_lens, dtype=torch.int32, device="cuda")
        self.o = torch.empty_like(self.q[0])
        self.lse = torch.empty(tokens, heads, device="cuda")
        self.scale = dim**-0.5

    @property
    def flops(self) -> int:
        """Operations over the visible pairs, counted exactly."""
        pairs = 0
        for q, kv in zip(self.q_lens, self.kv_lens):
            pairs += q * kv - (q * (q - 1) // 2 if self.point.causal else 0)
        return 4 * pairs * self.point.heads[0] * self.point.head_dim

    def call(self, variant: Any, listed: bool = True) -> Callable[[int], None]:
        """The Hopper kernel on copy i; with ``listed`` the work list is made beforehand."""
        from ..triton_native.hopper_prefill import hopper_prefill, hopper_work

        paged = self.table is not None
        common = {
            "cu_seqlens_q": self.starts_q, "seqlens_k": self.lens_k,
            "cu_seqlens_k": None if paged else self.starts_k, "causal": self.point.causal,
        }  # fmt: skip
        work = hopper_work(variant, total_q=len(self.o), **common) if listed else None

        def run(i: int) -> None:
            hopper_prefill(
                self.q[i], self.k[i], self.v[i], page_table=self.table,
                max_seqlen_q=max(self.q_lens), scale=self.scale, o=self.o, lse=self.lse,
                variant=variant, work=work, **common,
            )  # fmt: skip

        return run


def _starts(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)


def peers(x: PointInputs, with_flashinfer: bool = False) -> dict[str, Callable[[int], Any]]:
    """Other libraries at the point, as they are installed; absent ones are left out."""
    point = x.point
    out: dict[str, Callable[[int], Any]] = {}
    equal = not point.mix
    b, (heads, kv_heads), dim = point.batch, point.heads, point.head_dim
    try:
        import flash_attn_interface as fa

        if x.table is not None:
            if equal:
                out["fa3 paged"] = lambda i: fa.flash_attn_with_kvcache(
                    x.q[i].view(b, point.q_len, heads, dim),
                    x.k[i],
                    x.v[i],
                    cache_seqlens=x.lens_k,
                    page_table=x.table,
                    causal=point.causal,
                    softmax_scale=x.scale,
                )
            else:
                out["fa3 paged"] = lambda i: fa.flash_attn_with_kvcache(
                    x.q[i],
                    x.k[i],
                    x.v[i],
                    cache_seqlens=x.lens_k,
                    page_table=x.table,
                    cu_seqlens_q=x.starts_q,
                    max_seqlen_q=max(x.q_lens),
                    causal=point.causal,
                    softmax_scale=x.scale,
                )
        else:
            if equal:
                out["fa3"] = lambda i: fa.flash_attn_func(
                    x.q[i].view(b, point.q_len, heads, dim),
                    x.k[i].view(b, point.kv_len, kv_heads, dim),
                    x.v[i].view(b, point.kv_len, kv_heads, dim),
                    causal=point.causal,
                    softmax_scale=x.scale,
                )
            out["fa3 varlen"] = lambda i: fa.flash_attn_varlen_func(
                x.q[i],
                x.k[i],
                x.v[i],
                x.starts_q,
                x.starts_k,
                max(x.q_lens),
                max(x.kv_lens),
                causal=point.causal,
                softmax_scale=x.scale,
            )
    except ImportError as error:
        print(f"no FlashAttention 3: {error}")
    if equal and x.table is None:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def cudnn(i: int) -> Any:
            q, k, v = (
                t[i].view(b, -1, t[i].shape[1], dim).transpose(1, 2) for t in (x.q, x.k, x.v)
            )
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=point.causal, scale=x.scale, enable_gqa=True
                )

        out["cudnn"] = cudnn
    if x.table is not None and with_flashinfer:
        try:
            out["flashinfer"] = _flashinfer(x)
        except Exception as error:
            print(f"no FlashInfer: {type(error).__name__}: {str(error)[:120]}")
    return out


def _flashinfer(x: PointInputs) -> Callable[[int], Any]:
    import flashinfer

    point, size = x.point, x.point.page_size
    counts = [-(-n // size) for n in x.kv_lens]
    last = [n - (c - 1) * size for n, c in zip(x.kv_lens, counts)]
    pages = torch.cat([x.table[i, :n] for i, n in enumerate(counts)])
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda"), "NHD", backend="auto"
    )
    wrapper.plan(
        x.starts_q, _starts(counts), pages, torch.tensor(last, dtype=torch.int32, device="cuda"),
        *point.heads, point.head_dim, size, causal=point.causal, q_data_type=torch.bfloat16,
    )  # fmt: skip
    return lambda i: wrapper.run(x.q[i], (x.k[i], x.v[i]))


def _first_output(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, (tuple, list)) else result


def _agree(x: PointInputs, calls: dict[str, Callable[[int], Any]]) -> dict[str, float]:
    """Largest difference of each call from the first, on copy 0; a wrong peer is no peer."""
    errors, first = {}, None
    for name, call in calls.items():
        x.o.fill_(float("nan"))
        result = call(0)
        got = x.o if result is None else _first_output(result)
        if name == "cudnn":
            got = got.transpose(1, 2)
        got = got.reshape(x.o.shape).float().clone()
        first = got if first is None else first
        errors[name] = (got - first).abs().max().item()
    return errors


def time_calls(
    calls: dict[str, Callable[[int], Any]], copies: int, rounds: int
) -> dict[str, list[float]]:
    """Microseconds per call, sorted, from graph replays in turn, forward and backward."""
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]] = {}
    for name, call in calls.items():
        passes = -(-4 // copies)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for _ in range(passes):
                for i in range(copies):
                    call(i)
        graphs[name] = graph, passes * copies
        graph.replay()
    torch.cuda.synchronize()
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        marks = []
        for name in list(graphs)[:: 1 if turn % 2 == 0 else -1]:
            graph, count = graphs[name]
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            a.record()
            graph.replay()
            b.record()
            marks.append((name, a, b, count))
        torch.cuda.synchronize()
        for name, a, b, count in marks:
            found[name].append(a.elapsed_time(b) * 1e3 / count)
    return {name: sorted(times) for name, times in found.items()}


def bench_point(
    point: Point, rounds: int, only: set[str] | None, with_flashinfer: bool
) -> list[dict[str, Any]]:
    """Measure a point; prints one line per call."""
    x = PointInputs(point)
    calls: dict[str, Callable[[int], Any]] = {}
    for name, variant in variants(point).items():
        if only is None or name in only:
            calls[name] = x.call(variant)
            if name == "chosen":
                calls["chosen+list"] = x.call(variant, listed=False)
    calls |= peers(x, with_flashinfer)
    for name in list(calls):
        try:
            calls[name](0)
            torch.cuda.synchronize()
        except Exception as error:
            print(f"    {name}: {type(error).__name__}: {str(error)[:160]}")
            del calls[name]
    errors = _agree(x, calls)
    rows = []
    for name, times in time_calls(calls, x.copies, rounds).items():
        median = statistics.median(times)
        rows.append({
            "bench": "hopper_prefill", "case": asdict(point), "backend": name,
            "mode": "graph_cold", "median_us": median, "p20_us": times[len(times) // 5],
            "p80_us": times[4 * len(times) // 5], "tflops": x.flops / median / 1e6,
            "max_err": errors[name],
        })  # fmt: skip
    text = "  ".join(f"{r['backend']} {r['tflops']:.0f}" for r in rows)
    wrong = [f"{r['backend']} {r['max_err']:.2g}" for r in rows if not r["max_err"] < 0.05]
    print(f"{point.name:22s} {text}" + (f"  WRONG: {wrong}" if wrong else ""), flush=True)
    return rows


def bench_host(rounds: int = 300) -> dict[str, Any]:
    """Host microseconds of one eager call with its work list at hand, on a tiny batch."""
    x = PointInputs(Point("host", 1, 64, 64))
    call = x.call(variants(x.point)["chosen"])
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call(0)
        times.append((time.perf_counter() - start) * 1e6)
        torch.cuda.synchronize()
    median = statistics.median(times)
    print(f"host time of a call: {median:.1f} us", flush=True)
    return {"bench": "hopper_prefill", "case": {"name": "host"}, "backend": "triton",
            "mode": "host", "median_us": median}  # fmt: skip


def warm(names: list[str], processes: int, limit: float) -> None:
    """Compile the variants of the sets side by side, into Triton's cache."""
    start = time.monotonic()
    shares = [f"{i}/{processes}" for i in range(processes)]
    with ThreadPoolExecutor(processes) as pool:
        run = lambda share: _child(["--warm-share", share, "--sets", *names], limit)  # noqa: E731
        results = list(pool.map(run, shares))
    bad = [(s, r[1], r[0][-300:]) for s, r in zip(shares, results) if r[1] != "ok"]
    print(f"warm: {time.monotonic() - start:.0f} s {bad or ''}", flush=True)


def warm_share(names: list[str], share: str) -> None:
    """Compile one share of the variants, by launching small batches of the same kinds."""
    index, count = map(int, share.split("/"))
    todo: dict[Any, tuple[Point, Any]] = {}
    for p in (p for name in names for p in points(name)):
        for variant in variants(p).values():
            same = replace(variant, head_group=0)  # not a compile-time argument
            todo.setdefault((same, p.causal, p.page_size, p.head_dim), (p, variant))
    for p, variant in list(todo.values())[index::count]:
        small = Point("warm", 1, 64, 64, p.heads, p.head_dim, p.causal, p.page_size)
        PointInputs(small, copies=1).call(variant)(0)
    torch.cuda.synchronize()


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line asks for; returns 1 if a check did not pass."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--bench", action="store_true")
    parser.add_argument("--groups", nargs="*", help="check only these groups")
    parser.add_argument("--sets", nargs="*", default=list(SETS), choices=SETS)
    parser.add_argument("--only", nargs="*", help="measure only these variants (peers always)")
    parser.add_argument("--flashinfer", action="store_true", help="may compile for minutes")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--limit", type=float, default=75.0, help="seconds a group may take")
    parser.add_argument("--plain-launch", action="store_true", help="launch through Triton only")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--group", help=argparse.SUPPRESS)
    parser.add_argument("--warm-share", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.plain_launch or os.environ.get(_PLAIN):
        os.environ[_PLAIN] = "1"  # for the processes that this one starts
        hopper_launch.ENABLED = False
    if args.group:
        from .hopper_check import run_group

        run_group(args.group)
        return 0
    if args.warm_share:
        warm_share(args.sets, args.warm_share)
        return 0
    from .hopper_check import groups
    from .report import meta

    result: dict[str, Any] = {
        "meta": meta("attn_backends.bench.hopper"), "checks": [], "rows": []
    }  # fmt: skip

    def save() -> None:
        if args.json:
            args.json.write_text(json.dumps(result, indent=1))

    if args.check:
        result["checks"] = run_checks(args.groups or list(groups()), args.limit, args.jobs)
        save()
    failed = [x for x in result["checks"] if x["status"] != "passed"]
    print(f"checks: {len(result['checks']) - len(failed)} passed, {len(failed)} not", flush=True)
    if args.bench and any(x["status"] == "hung" for x in failed):
        print("not measured: a case hangs", flush=True)
    elif args.bench:
        warm(args.sets, 2 * args.jobs, args.limit)
        result["rows"].append(bench_host())
        for name in args.sets:
            for point in points(name):
                result["rows"] += bench_point(
                    point, args.rounds, set(args.only or ()) or None, args.flashinfer
                )  # fmt: skip
                save()
                torch.cuda.empty_cache()
    save()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
