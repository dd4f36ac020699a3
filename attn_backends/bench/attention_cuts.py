"""Measure decode over tiles and cuts, jointly: what the model of waves was fitted to.

    python -m attn_backends.bench.attention_cuts --json cuts.json [--set d128 --set mla16]

The best tile depends on the cut and the best cut on the tile, so every pair is timed, all pairs of
a point in turn. ``triton_native/cuts.py`` holds the constants of the model, and
``tests/triton_native/test_cuts.py`` holds the model to the rows that are published.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..triton_native.plan import PROGRAM_BYTES
from .attention_cases import Case, Inputs, cases
from .attention_tune import PREFILL_TILES, measure_trials, precompile
from .report import save

MODULE = "attn_backends.bench.attention_cuts"
ARCH = 90

CUTS = {
    "1x1024": (4, 8, 16), "1x4096": (16, 32, 64), "1x8192": (16, 32, 33, 64),
    "1x131072": (16, 33, 49, 66, 128), "8x8192": (2, 3, 4, 6, 8), "16x1024": (1, 2, 3, 4),
    "32x4096": (1, 2, 3, 4), "64x4096": (1, 2, 3, 4), "256x2048": (1, 2, 3),
}  # fmt: skip
#: Keys per piece, for ragged lengths.
PIECES = (512, 1024, 1536, 2048, 4096, 8192)
FEW_CUTS = {"1x8192": (16, 32, 64), "32x4096": (1, 2, 3), "64x4096": (1, 2, 3)}


@dataclass(frozen=True)
class Sweep:
    """Tiles (block_n, warps, stages; the shipped one first) and cuts of one head geometry."""

    name: str
    changes: dict[str, Any]
    tiles: tuple[tuple[int, int, int], ...]
    cuts: dict[str, tuple[int, ...]]
    occupancy: int = 3
    block_m: int = 16
    bench: str = "decode"

    def cases(self) -> list[Case]:
        """The points of this geometry that have cuts to try."""
        found = [replace(c, **self.changes) for c in cases(self.bench) if self._mine(c)]
        return [c for c in found if c.ragged or self.point(c) in self.cuts]

    def _mine(self, case: Case) -> bool:
        if self.bench == "mla":
            return case.num_heads == self.changes["num_heads"]
        return self.cuts is CUTS or not case.ragged

    @staticmethod
    def point(case: Case) -> str:
        """The point's name in the results."""
        return f"{case.batch}x{case.kv_len}" + ("r" if case.ragged else "")

    def trials(self, case: Case) -> dict[str, dict[str, Any]]:
        """Options by name: every tile with every cut."""
        found = {}
        for tile in self.tiles:
            config = {"split_config": (self.block_m, *tile, self.occupancy, 64)}
            if case.ragged:
                for keys in PIECES:
                    found[f"{tile} pieces {keys}"] = {**config, "split_keys": keys}
            else:
                for parts in self.cuts[self.point(case)]:
                    found[f"{tile} parts {parts}"] = {**config, "num_splits": parts}
        return found

    def row(self, case: Case, options: dict[str, Any], us: float) -> dict[str, Any]:
        """A row of the results file, with what the model needs to know."""
        tile = tuple(options["split_config"][1:4])
        width = case.head_dim + (0 if case.head_dim == 576 else case.head_dim_v)
        cut = {"splits": options["num_splits"]} if "num_splits" in options else {}
        cut = cut or {"split_keys": options["split_keys"]}
        return {
            "set": self.name, "point": self.point(case), "num_heads": case.num_heads,
            "num_kv_heads": case.num_kv_heads, "head_dim": case.head_dim,
            "group": case.num_heads // case.num_kv_heads, "batch": case.batch,
            "kv_len": case.kv_len, "tile": str(tile), "block_n": tile[0],
            "default": tile == self.tiles[0], "rate": PROGRAM_BYTES / (2 * width),
            "occupancy": self.occupancy, **cut, "median_us": round(us, 2),
        }  # fmt: skip


WIDE = ((64, 4, 3), (64, 4, 2), (32, 2, 4), (32, 1, 3), (32, 4, 4), (64, 2, 3), (32, 1, 4),
        (128, 4, 2))  # fmt: skip
SOME = ((64, 4, 3), (32, 2, 4), (32, 1, 3), (64, 2, 3))
SWEEPS = (
    Sweep("d128", {}, WIDE, CUTS),
    Sweep("g8", {"num_heads": 64}, SOME, FEW_CUTS),
    Sweep("p1", {"page_size": 1}, SOME, FEW_CUTS),
    Sweep("d64", {"head_dim": 64, "head_dim_v": 64},
          ((128, 4, 3), (64, 4, 4), (64, 2, 4), (32, 1, 4), (64, 1, 3), (128, 2, 3)), FEW_CUTS),
    Sweep("d256", {"head_dim": 256, "head_dim_v": 256, "num_heads": 16, "num_kv_heads": 4},
          ((32, 4, 3), (32, 4, 4), (32, 2, 3), (64, 8, 2), (16, 1, 4), (16, 2, 4)), FEW_CUTS),
    Sweep("fp8", {"kv_dtype": "fp8"},
          ((128, 4, 3), (64, 4, 4), (64, 2, 4), (128, 4, 2), (64, 1, 3), (128, 8, 3)), FEW_CUTS),
    Sweep("mla16", {"num_heads": 16},
          ((32, 4, 3), (32, 4, 2), (16, 4, 4), (64, 8, 2), (32, 8, 2), (32, 8, 3)),
          {"1x4096": (32, 64, 128), "1x32768": (66, 132, 264), "32x8192": (4, 8, 12),
           "128x4096": (1, 2, 3, 4)}, occupancy=2, bench="mla"),
    Sweep("mla128", {"num_heads": 128}, ((64, 8, 2), (32, 8, 3), (32, 8, 2), (64, 4, 2)),
          {"1x4096": (32, 64), "1x32768": (66, 132), "32x8192": (2, 4, 8),
           "128x4096": (1, 2, 3)}, occupancy=1, block_m=64, bench="mla"),
)  # fmt: skip


def prefill_rows(rounds: int) -> list[dict[str, Any]]:
    """The plain prefill kernel over its tiles."""
    rows = []
    for case in cases("prefill"):
        x = Inputs(case)
        trials = {str(t): {"prefill_config": t, "short_rows": 0} for t in PREFILL_TILES[128]}
        for tile, us in measure_trials(x, trials, rounds).items():
            rows.append(
                {"set": "prefill", "point": f"{case.batch}x{case.kv_len}", "tile": tile,
                 "median_us": round(us, 2), "tflops": round(x.flops / us / 1e6)}
            )  # fmt: skip
    return rows


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    names = [s.name for s in SWEEPS] + ["prefill"]
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--json", required=True, metavar="FILE")
    parser.add_argument("--set", action="append", choices=names, help="default: all")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--workers", type=int, default=10, help="processes that compile ahead")
    args = parser.parse_args(argv)
    wanted = args.set or names
    sweeps = [s for s in SWEEPS if s.name in wanted]
    jobs = [
        (s.cases()[-1], {"split_config": (s.block_m, *tile, s.occupancy, 64), "num_splits": 4})
        for s in sweeps
        for tile in s.tiles
    ]
    precompile(((case, options, ARCH) for case, options in jobs), args.workers)
    rows: list[dict[str, Any]] = []
    for sweep in sweeps:
        for case in sweep.cases():
            trials = sweep.trials(case)
            x = Inputs(case)
            times = measure_trials(x, trials, args.rounds)
            del x
            torch.cuda.empty_cache()
            rows += [sweep.row(case, trials[name], us) for name, us in times.items()]
            best = sorted(times, key=lambda n: times[n])[:4]
            text = "  ".join(f"{n} {times[n]:.1f}" for n in best)
            print(f"{sweep.name:8s}{sweep.point(case):10s}{text}", flush=True)
            save(args.json, MODULE, rows)
    if "prefill" in wanted:
        rows += prefill_rows(args.rounds)
        save(args.json, MODULE, rows)
    return 0


__all__ = ["SWEEPS", "Sweep", "main"]


if __name__ == "__main__":
    raise SystemExit(main())
