"""Benchmark the ``triton`` backend against other libraries, or tune it.

    python -m attn_backends.bench.attention decode --json out.json
    python -m attn_backends.bench.attention prefill|extend|mla|host
    python -m attn_backends.bench.attention shapes        # decode at other heads, pages and dtypes
    python -m attn_backends.bench.attention invariance    # what batch_invariant=True costs
    python -m attn_backends.bench.attention capacity      # what a plan for any lengths costs
    python -m attn_backends.bench.attention tune decode --json tuned.json
    python -m attn_backends.bench.attention configs tuned.json

Cold L2 by rotating inputs, one graph replay, backends interleaved in one process, random data,
medians. The ratio to a peer is printed only if both answers are right.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

import torch

from ..capacity import Capacity
from ..triton_native.backend import TritonBackend, TritonOptions
from .attention_cases import Case, Inputs, cases, shape_cases
from .attention_point import measure_case, peer_ways
from .host import host_case, show_host
from .report import save
from .runner import Call, Found, Way, release

MODULE = "attn_backends.bench.attention"


def ours(
    x: Inputs, options: TritonOptions | None = None, *, batch_invariant: bool = False,
    capacity: bool = False,
) -> Call:  # fmt: skip
    """The ``triton`` backend on the inputs, planned once: for their lengths, or any up to them."""
    spec = replace(x.spec, batch_invariant=True) if batch_invariant else x.spec
    backend = TritonBackend(spec, device=x.device, options=options)
    batch, most = x.batch, None
    if capacity:
        pages = 0 if x.table is None else x.table.shape[1]
        most = Capacity(
            batch.num_seqs, batch.total_q, batch.max_seqlen_q, batch.max_seqlen_k, pages
        )
    plan = backend.plan(batch, most)
    return lambda i: backend.run(x.q[i], x.k[i], x.v[i], plan)


def run_case(
    case: Case, peers: set[str] | None, rounds: int, *, plain: bool = False, cost: str = ""
) -> Found:
    """Measure ``triton`` and its peers at one point.

    Args:
        case: The point.
        peers: Names of peers; None is all.
        rounds: Samples of each way.
        plain: Leave the Hopper kernel out of the process: it would heat the board for the others.
        cost: Beside ``triton``, measure it with ``batch_invariant=True`` (``invariance``), or
            planned for any lengths up to these, as for a graph (``capacity``).
    """
    x = Inputs(case)
    ways = {"triton": Way(lambda: ours(x))}
    if case.bench in ("prefill", "extend"):
        ways["triton-plain"] = Way(lambda: ours(x, TritonOptions(hopper=False)))
        if plain:
            del ways["triton"]
    if cost == "invariance":
        ways["triton-invariant"] = Way(lambda: ours(x, batch_invariant=True))
    if cost == "capacity":
        ways["triton-capacity"] = Way(lambda: ours(x, capacity=True))
    if peers is None or peers:
        ways |= peer_ways(x, peers)
    return measure_case(x, ways, rounds=rounds)


def show(case: Case, found: Found) -> None:
    """Print one line per backend, with the ratio of its time to ours."""
    own = next((r for r in found.rows if r["backend"].startswith("triton") and r["right"]), None)
    for r in found.rows:
        text = f"{case.bench:8s}{case.label:28s}{r['backend']:16s}"
        if not r["right"]:
            print(f"{text} WRONG, err {r['max_err']:.1e}, limit {r['limit']:.1e}", flush=True)
            continue
        ratio = "" if own in (None, r) else f"{r['median_us'] / own['median_us']:.3f}x"
        text += f"{r['median_us']:10.1f} us{r['gbps']:8.0f} GB/s{r['tflops']:8.1f} TF"
        print(f"{text} {ratio:8s} err {r['max_err']:.1e}", flush=True)
    for r in found.refused:
        print(f"  {r['backend']}: {r['reason']}", flush=True)


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
    what = [
        "decode", "prefill", "extend", "mla", "shapes", "invariance", "capacity", "host", "tune",
        "configs",
    ]  # fmt: skip
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
    parser.add_argument("--plain", action="store_true", help="without the Hopper kernel")
    parser.add_argument("--limit", type=float, default=3600, help="seconds; no point begins later")
    parser.add_argument("--points", help="only points whose label contains one of these (a,b)")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument(
        "--workers", type=int, default=12, help="processes that compile ahead; 0: none"
    )
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
    found = Found()
    begin = time.monotonic()
    selected = _selected(args.what, args)
    if args.what in ("shapes", "invariance") and args.workers:
        _warm(selected, args.what == "invariance", args.workers)
    for case in selected:
        if time.monotonic() - begin > args.limit:
            print(f"{case.label}: left out after {args.limit:.0f} s", flush=True)
            continue
        try:
            if args.what == "host":
                more = host_case(Inputs(case), ["triton"])
                show_host(case, more)
            else:
                cost = args.what if args.what in ("invariance", "capacity") else ""
                only = set(args.peer) if args.peer else None
                if args.no_peers or cost:
                    only = set()
                more = run_case(case, only, args.rounds, plain=args.plain, cost=cost)
                show(case, more)
            found.add(more)
        except Exception as error:
            print(f"{case.label}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        release(torch.device("cuda"))
        save(args.json, MODULE, found.rows, refused=found.refused)
    return 0


def _selected(what: str, args: argparse.Namespace) -> list[Case]:
    changes = _changes(args)
    if what == "shapes":
        found = shape_cases()
    elif what == "invariance":
        found = cases("decode", **changes) + cases("prefill", **changes)
    elif what == "mla":
        found = cases("mla")
    else:
        found = cases("decode" if what in ("host", "capacity") else what, **changes)
    if args.points:
        wanted = args.points.split(",")
        found = [c for c in found if any(w in c.label for w in wanted)]
    return found


def _warm(selected: list[Case], cost: bool, workers: int) -> None:
    """Compile what the points need on many cores, before the GPU is waited on."""
    from .attention_tune import precompile

    major, minor = torch.cuda.get_device_capability()
    wanted = list(selected)
    if cost:
        wanted += [replace(case, batch_invariant=True) for case in selected]
    options = {"hopper": False}
    precompile(((case, options, major * 10 + minor) for case in wanted), workers)


if __name__ == "__main__":
    raise SystemExit(main())
