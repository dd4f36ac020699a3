"""Benchmark the ``triton`` backend against other libraries, or tune it.

    python -m attn_backends.bench.attention decode --json out.json
    python -m attn_backends.bench.attention prefill|extend|mla|host
    python -m attn_backends.bench.attention tune decode --json tuned.json
    python -m attn_backends.bench.attention configs tuned.json

Cold L2 by rotating inputs, one graph replay, backends interleaved in one process, random data,
medians. The ratio to a peer is printed only if both answers are right.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from typing import Any

import torch

from ..torch_native.backend import TorchNativeBackend
from ..triton_native.backend import TritonBackend, TritonOptions
from .attention_cases import Case, Inputs, cases
from .attention_peers import peers
from .graph_timer import Times, Variant, capture, measure
from .report import save

MODULE = "attn_backends.bench.attention"


def ours(x: Inputs, options: TritonOptions | None = None) -> Callable[[int], Any]:
    """The ``triton`` backend on the inputs, planned once."""
    backend = TritonBackend(x.spec, device="cuda", options=options)
    plan = backend.plan(x.batch)
    return lambda i: backend.run(x.q[i], x.k[i], x.v[i], plan)


def reference(x: Inputs) -> torch.Tensor:
    """The answer on copy 0, computed in float32."""
    backend = TorchNativeBackend(x.spec)
    return backend.run(x.q[0], x.k[0], x.v[0], backend.plan(x.batch)).o.float()


def error_of(call: Callable[[int], Any], want: torch.Tensor) -> float:
    """Largest error of a variant's output on copy 0."""
    out = call(0)
    out = out[0] if isinstance(out, tuple) else out
    error = (out.float().reshape(want.shape) - want).abs().max()
    return float(error)


def limit_of(want: torch.Tensor, case: Case) -> float:
    """Largest error that still counts as right: a few roundings of the output dtype."""
    eps = 2.0**-7 if case.kv_dtype != "fp8" else 2.0**-4
    return 4 * eps * float(want.abs().max())


def run_case(case: Case, with_peers: bool, only: set[str] | None, rounds: int) -> list[dict]:
    """Measure one point; rows of the results file."""
    x = Inputs(case)
    want = reference(x)
    makers: dict[str, Callable[[], Callable[[int], Any]]] = {"triton": lambda: ours(x)}
    if case.bench in ("prefill", "extend"):
        makers["triton-plain"] = lambda: ours(x, TritonOptions(hopper=False))
    if with_peers:
        makers |= {k: v for k, v in peers(x).items() if only is None or k in only}
    variants, errors = [], {}
    for name, make in makers.items():
        try:
            call = make()
            errors[name] = error_of(call, want)
            variant = Variant(name, call)
            capture(variant, x.copies)
            variants.append(variant)
        except Exception as error:
            print(f"  {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
    times = measure(variants, rounds)
    limit = limit_of(want, case)
    return [_row(x, name, t, errors[name], errors[name] <= limit) for name, t in times.items()]


def _row(x: Inputs, name: str, t: Times, error: float, right: bool, **more: Any) -> dict[str, Any]:
    seconds = t.median_us * 1e-6
    return {
        "bench": x.case.bench, "case": x.case.row(), "backend": name, "mode": "graph_cold",
        "median_us": round(t.median_us, 2), "p20_us": round(t.p20_us, 2),
        "p80_us": round(t.p80_us, 2), "tflops": round(x.flops / seconds / 1e12, 1),
        "gbps": round(x.bytes / seconds / 1e9), "max_err": error, "right": right, **more,
    }  # fmt: skip


def show(case: Case, rows: list[dict[str, Any]]) -> None:
    """Print one line per backend, with the ratio of its time to ours."""
    own = next((r for r in rows if r["backend"] == "triton"), None)
    for r in rows:
        ratio = ""
        if own is not None and r is not own and own["right"] and r["right"]:
            ratio = f"{r['median_us'] / own['median_us']:.3f}x"
        state = "" if r["right"] else "WRONG"
        print(
            f"{case.bench:8s}{case.label:28s}{r['backend']:16s}{r['median_us']:10.1f} us"
            f"{r['gbps']:7d} GB/s{r['tflops']:8.1f} TF {ratio:8s} err {r['max_err']:.1e} {state}",
            flush=True,
        )


def host_times(case: Case) -> list[dict[str, Any]]:
    """Host microseconds of plan and run, eager, without waiting for the device."""
    x = Inputs(case)
    backend = TritonBackend(x.spec, device="cuda")
    plan = backend.plan(x.batch)
    work: dict[str, Callable[[], Any]] = {
        "plan": lambda: backend.plan(x.batch),
        "run": lambda: backend.run(x.q[0], x.k[0], x.v[0], plan),
    }
    rows = []
    for name, call in work.items():
        samples = []
        for _ in range(20):
            call()
        for _ in range(40):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(20):
                call()
            samples.append((time.perf_counter() - start) / 20 * 1e6)
        torch.cuda.synchronize()
        samples.sort()
        row = {"bench": f"host-{name}", "case": case.row(), "backend": "triton", "mode": "host",
               "median_us": round(samples[20], 2), "p20_us": round(samples[8], 2),
               "p80_us": round(samples[32], 2)}  # fmt: skip
        print(f"host {name:5s}{case.label:28s}{row['median_us']:8.1f} us", flush=True)
        rows.append(row)
    return rows


def _changes(args: argparse.Namespace) -> dict[str, Any]:
    given = {
        "num_heads": args.heads, "num_kv_heads": args.kv_heads, "head_dim": args.head_dim,
        "head_dim_v": args.head_dim, "dtype": args.dtype, "kv_dtype": args.kv_dtype,
        "batch_invariant": args.batch_invariant or None,
    }  # fmt: skip
    changes = {k: v for k, v in given.items() if v is not None}
    if args.page_size is not None:
        changes["page_size"] = args.page_size or None
    return changes


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m attn_backends.bench.attention")
    what = ["decode", "prefill", "extend", "mla", "host", "tune", "configs"]
    parser.add_argument("what", choices=what)
    parser.add_argument("bench", nargs="*", help="tune: which benchmarks; configs: tuning files")
    parser.add_argument("--json", help="results file to write")
    parser.add_argument("--heads", type=int)
    parser.add_argument("--kv-heads", type=int)
    parser.add_argument("--head-dim", type=int)
    parser.add_argument("--page-size", type=int, help="0: ragged")
    parser.add_argument("--dtype", choices=["bf16", "fp16", "fp32", "fp8"])
    parser.add_argument("--kv-dtype", choices=["bf16", "fp16", "fp32", "fp8"])
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--peer", action="append", help="only these peers")
    parser.add_argument("--points", help="only points whose label contains one of these (a,b)")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--workers", type=int, default=12, help="processes that compile ahead")
    args = parser.parse_args(argv)
    if args.what == "configs":
        from .attention_tune import write_configs

        write_configs(args.bench)
        return 0
    if args.what == "tune":
        from .attention_tune import tune

        rows: list[dict[str, Any]] = []
        for bench in args.bench or ["decode", "prefill", "mla"]:
            tune(_selected(bench, args), rows, args.workers, lambda: save(args.json, MODULE, rows))
        return 0
    rows = []
    bench = "decode" if args.what == "host" else args.what
    for case in _selected(bench, args):
        try:
            if args.what == "host":
                rows += host_times(case)
            else:
                only = set(args.peer) if args.peer else None
                found = run_case(case, not args.no_peers, only, args.rounds)
                show(case, found)
                rows += found
        except Exception as error:
            print(f"{case.label}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        save(args.json, MODULE, rows)
    return 0


def _selected(bench: str, args: argparse.Namespace) -> list[Case]:
    found = cases(bench, **({} if bench == "mla" else _changes(args)))
    if args.points:
        wanted = args.points.split(",")
        found = [c for c in found if any(w in c.label for w in wanted)]
    return found


if __name__ == "__main__":
    raise SystemExit(main())
