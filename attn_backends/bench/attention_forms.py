"""Measure the forms of the plain kernels against each other, beside the shipped choice.

    python -m attn_backends.bench.attention_forms --json forms.json [--set decode --set prefill]

A form says how a tile is computed (``triton_native/configs.py``): fused exponents (f), sums per
lane (l), a loop without masks (p), keys through tensor maps (m), at most so many registers (r).
Which one wins depends on the tile and on how many keys a program visits, so both are tried
together, all trials of a point in turn. What is chosen where stands in ``configs.py`` and
``cuts.py``.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from .attention_cases import Case, Inputs, cases
from .attention_tune import measure_trials, precompile
from .report import save

MODULE = "attn_backends.bench.attention_forms"
ARCH = 90
SETS = ("decode", "prefill", "mla16", "mla128")

#: Parts of a sequence to try, by (batch, keys): what ``cuts.few_chunk`` gives, and others.
DECODE = {(1, 1024): (8, 16), (1, 4096): (16, 32), (1, 8192): (33,), (16, 1024): (2,)}
#: (block_n, warps, stages), and forms of each.
DECODE_TILES = {
    (64, 4, 3): ("-", "p"), (128, 8, 2): ("-", "l", "lf", "p", "lfp"), (32, 4, 4): ("-",),
}  # fmt: skip
#: (block_m, block_n, warps, stages), and forms of each.
PREFILL_TILES = {
    (128, 64, 8, 3): ("-", "f", "fm"), (128, 64, 8, 2): ("f r128", "m r128", "fm r128"),
    (128, 128, 8, 2): ("fm",), (64, 64, 4, 3): ("f", "fm"), (64, 32, 4, 3): ("f r160",),
}  # fmt: skip
MLA = {
    "mla16": ((1, 4096), (1, 32768), (8, 16384), (128, 4096)),
    "mla128": ((32, 8192), (128, 4096)),
}  # fmt: skip
#: (block_m, block_n, warps, stages, occupancy), and forms of each.
MLA_TILES = {
    "mla16": {(16, 32, 4, 3, 2): ("-", "l", "lf", "lp"), (16, 64, 8, 2, 2): ("-", "lf")},
    "mla128": {(64, 64, 8, 2, 1): ("-", "f")},
}


def _flags(form: str) -> tuple[bool, bool, bool]:
    return "f" in form, "l" in form, "p" in form


def points(name: str) -> list[Case]:
    """The points of a set."""
    if name == "decode":
        return [Case("decode", b, 1, n) for b, n in DECODE]
    if name == "prefill":
        return cases("prefill")
    wanted = MLA[name]
    found = [c for c in cases("mla") if c.num_heads == int(name[3:])]
    return [c for c in found if (c.batch, c.kv_len) in wanted]


def trials(name: str, case: Case) -> dict[str, dict[str, Any]]:
    """Options by trial; the shipped choice first."""
    found: dict[str, dict[str, Any]] = {"shipped": {"hopper": False}}
    if name == "decode":
        for tile, names in DECODE_TILES.items():
            for form in names:
                config = (16, *tile, 3, 64, *_flags(form))
                for parts in DECODE[case.batch, case.kv_len]:
                    found[f"{tile} {form} parts {parts}"] = {
                        "split_config": config, "num_splits": parts
                    }  # fmt: skip
    elif name == "prefill":
        for shape, names in PREFILL_TILES.items():
            for form in names:
                letters, _, registers = form.partition(" r")
                config = (
                    *shape, True, True, *_flags(letters)[:2], int(registers or 0), "m" in letters
                )  # fmt: skip
                found[f"{shape} {form}"] = {"prefill_config": config, "short_rows": 0}
    else:
        for whole, names in MLA_TILES[name].items():
            for form in names:
                found[f"{whole} {form}"] = {"split_config": (*whole, 64, *_flags(form))}
    return found


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--json", required=True, metavar="FILE")
    parser.add_argument("--set", action="append", choices=SETS, help="default: all")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--workers", type=int, default=12, help="that compile ahead; 0: none")
    args = parser.parse_args(argv)
    todo = [(name, case) for name in args.set or SETS for case in points(name)]
    jobs = [(case, o, ARCH) for name, case in todo for o in trials(name, case).values()]
    if args.workers:
        precompile(jobs, args.workers)
    rows: list[dict[str, Any]] = []
    for name, case in todo:
        x = Inputs(case)
        wanted = trials(name, case)
        times = measure_trials(x, wanted, args.rounds)
        rows += [
            {"set": name, "case": case.row(), "trial": trial, "options": wanted[trial],
             "median_us": round(us, 2), "tflops": round(x.flops / us / 1e6, 1)}
            for trial, us in times.items()
        ]  # fmt: skip
        del x
        torch.cuda.empty_cache()
        best = sorted(times, key=lambda n: times[n])[:5]
        text = "  ".join(f"{n} {times[n]:.2f}" for n in best)
        print(f"{name:8s}{case.label:24s}{text}", flush=True)
        save(args.json, MODULE, rows)
    return 0


__all__ = ["SETS", "main", "points", "trials"]


if __name__ == "__main__":
    raise SystemExit(main())
