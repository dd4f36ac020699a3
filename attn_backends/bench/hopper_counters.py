"""Hardware counters of the Hopper prefill and of FlashAttention 3's kernel: what limits each.

``python -m attn_backends.bench.hopper_counters --json FILE`` starts Nsight Compute (``ncu``) on a
process of its own, which makes one launch of each kernel at each point.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

from .report import meta, write

_MODULE = "attn_backends.bench.hopper_counters"
_SAID = "launch:"
_STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
#: Counters by the name that tables give them.
COUNTERS = {
    "us": "gpu__time_duration.sum",
    "million cycles": "gpc__cycles_elapsed.max",
    "tensor cores busy, %": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "issue slots used, %": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "million instructions": "sm__inst_executed.sum",
    "L2 hits, %": "lts__t_sector_hit_rate.pct",
    "DRAM busy, %": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "stalled on a fixed latency": _STALLED.format("wait"),
    "on a barrier or the tensor cores": _STALLED.format("barrier"),
}
_MILLIONS = ("million cycles", "million instructions")


def _launch() -> None:
    """One launch of each kernel at each point, seen by the profiler."""
    import torch

    from ..triton_native.hopper_variant import choose_variant
    from .hopper_inputs import PointInputs
    from .hopper_peers import peers
    from .hopper_points import is_shape, points

    chosen = [points("causal")[i] for i in (0, 3)] + [points("full")[2], points("d64")[2]]
    for point in chosen:
        x = PointInputs(point, copies=1)
        calls = {"chosen": x.call(choose_variant(**is_shape(point))), **peers(x)[0]}
        for name in ("chosen", "fa3"):
            if name not in calls:
                continue
            for _ in range(2):
                calls[name](0)
            torch.cuda.synchronize()
            print(_SAID, point.name, name, sep="|", flush=True)
            torch.cuda.profiler.start()
            calls[name](0)
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


def read(text: str) -> list[dict[str, Any]]:
    """Rows from what ``ncu --csv --page raw`` printed, between what the launches said."""
    lines = text.splitlines()
    said = [line.split("|")[1:] for line in lines if line.startswith(_SAID)]
    table = list(csv.reader(line for line in lines if line.startswith('"')))
    names, units, kernels = table[0], table[1], table[2:]
    assert len(kernels) == len(said), f"{len(said)} launches, {len(kernels)} kernels counted"
    rows = []
    for (point, backend), kernel in zip(said, kernels):
        found = dict(zip(names, zip(kernel, units)))
        counters = {name: _number(name, *found[key]) for name, key in COUNTERS.items()}
        rows.append({
            "bench": "hopper_prefill", "case": {"name": point}, "backend": backend,
            "mode": "counters", "counters": counters,
        })  # fmt: skip
    return rows


def _number(name: str, text: str, unit: str) -> float:
    """A counter in the unit that its name says."""
    factor = {"ns": 1e-3, "nsecond": 1e-3, "ms": 1e3, "msecond": 1e3}.get(unit, 1.0)
    if name in _MILLIONS:
        factor = 1e-6
    return round(float(text.replace(",", "")) * factor, 3)


def main(arguments: list[str] | None = None) -> int:
    """Count, print and write; returns 1 if ncu did not."""
    parser = argparse.ArgumentParser(prog=f"python -m {_MODULE}", description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds that ncu may take")
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.launch:
        _launch()
        return 0
    command = [
        "ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw",
        "--print-units", "base", "--kernel-name", "regex:hopper_prefill|device_kernel",
        "--metrics", ",".join(COUNTERS.values()), sys.executable, "-m", _MODULE, "--launch",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=args.limit)
    if done.returncode:
        print(done.stdout[-2000:] + done.stderr[-2000:])
        return 1
    rows = read(done.stdout)
    for row in rows:
        print(row["case"]["name"], row["backend"], row["counters"], flush=True)
    if args.json:
        write(args.json, {"meta": meta(_MODULE), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
