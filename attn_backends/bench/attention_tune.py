"""Sweep the configurations of the ``triton`` backend, and write the best into its table."""

from __future__ import annotations

import gc
import itertools
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from ..triton_native import measured
from ..triton_native.backend import TritonOptions
from ..triton_native.plan import SHORT_KEYS
from .attention_cases import DTYPES, Case, Inputs
from .gate import check, limit_of, reference
from .graph_timer import Variant, capture, measure

#: (block_n, warps, stages) of the split kernel by widest head; the first is the rule's choice.
SPLIT_TILES = {
    128: [
        (64, 4, 3), (64, 4, 4), (64, 4, 2), (32, 2, 4), (32, 2, 3), (32, 1, 3), (32, 4, 4),
        (128, 4, 2), (128, 4, 3), (128, 8, 2), (64, 2, 3), (64, 8, 3),
    ],
    256: [(32, 4, 4), (32, 4, 3), (64, 4, 2), (64, 8, 2), (64, 8, 3), (16, 2, 4), (32, 2, 3)],
    576: [
        (32, 4, 3), (32, 4, 2), (64, 8, 2), (16, 4, 4), (32, 8, 3), (32, 8, 2), (16, 2, 4),
        (64, 4, 2),
    ],
}  # fmt: skip
#: (block_m, block_n, warps, stages, phases, heads_inner)
PREFILL_TILES = {
    128: [
        (128, 64, 8, 3, True, True), (128, 64, 8, 3, False, True), (128, 64, 8, 3, True, False),
        (128, 32, 8, 3, True, True), (128, 32, 8, 4, False, True), (128, 64, 8, 2, True, True),
        (128, 64, 8, 4, True, True), (128, 128, 8, 2, True, True), (64, 64, 4, 3, True, True),
        (64, 64, 4, 2, False, True), (64, 128, 4, 2, True, True), (128, 64, 4, 3, True, True),
        (64, 32, 4, 3, True, True),
    ],
    256: [
        (128, 32, 8, 2, False, True), (128, 32, 8, 2, True, True), (128, 64, 8, 2, True, True),
        (64, 32, 8, 3, True, True), (64, 64, 8, 2, True, True), (128, 32, 8, 3, True, True),
        (64, 32, 4, 2, True, True),
    ],
}  # fmt: skip
OCCUPANCIES = (1, 2, 3, 4)
SPLITS = (1, 2, 3, 4, 6, 8, 16, 32, 33, 64, 128)


def _tiles(table: dict[int, list[Any]], case: Case) -> list[Any]:
    widest = max(case.head_dim, case.head_dim_v)
    return table[min(k for k in table if k >= min(widest, max(table)))]


def _block_m(case: Case) -> int:
    rows = case.q_len * case.num_heads // case.num_kv_heads
    return 16 if rows <= 16 else 32 if rows <= 32 else 64


def _precompile(job: tuple[Case, dict[str, Any], int]) -> str:
    case, options, arch = job
    from ..triton_native.offline import record

    q_lens, kv_lens = case.lengths()
    share = case.head_dim == 576
    for launch in record(
        case.spec, q_lens, kv_lens, arch=arch, share_kv=share, options=TritonOptions(**options)
    ):
        launch.compile(arch)
    return ""


def precompile(jobs: Iterable[tuple[Case, dict[str, Any], int]], workers: int) -> None:
    """Fill the Triton cache on many cores, so that the GPU does not wait for compilers."""
    jobs = list(jobs)
    start = time.time()
    failed = 0
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for future in [pool.submit(_precompile, job) for job in jobs]:
            try:
                future.result(timeout=180)
            except Exception as error:
                failed += 1
                print(f"  precompile: {type(error).__name__}: {str(error)[:120]}", flush=True)
    took = time.time() - start
    print(f"compiled {len(jobs) - failed} of {len(jobs)} in {took:.0f} s", flush=True)


def measure_trials(
    x: Inputs, trials: dict[str, dict[str, Any]], rounds: int = 10
) -> dict[str, float]:
    """Microseconds of every trial that runs and is right; all interleaved."""
    from .attention import ours

    want = reference(x)
    limit = limit_of(want.o, x.spec.dtype, x.spec.kv)
    variants = []
    for name, options in trials.items():
        try:
            call = ours(x, TritonOptions(**options))
            checked = check(call, want, limit)
            if not checked.right:
                print(f"  {name}: WRONG, error {checked.error:.1e}", flush=True)
                continue
            variant = Variant(name, call)
            capture(variant, x.copies)
            variants.append(variant)
        except Exception as error:
            print(f"  {name}: {type(error).__name__}: {str(error)[:120]}", flush=True)
    return {name: t.median_us for name, t in measure(variants, rounds).items()}


def _sweep(
    points: list[Case], trials: dict[str, dict[str, Any]], rows: list[dict[str, Any]],
    kind: str, save: Callable[[], None],
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Measure every trial at every point: trial -> label -> microseconds."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for case in points:
        try:
            x = Inputs(case)
            times = measure_trials(x, trials)
            del x
        except Exception as error:
            print(f"{case.label}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            continue
        finally:
            gc.collect()
            torch.cuda.empty_cache()
        for name, us in times.items():
            found[name][case.label] = us
            rows.append(
                {"bench": f"tune-{case.bench}", "kind": kind, "case": case.row(),
                 "backend": "triton", "mode": "graph_cold", "options": trials[name],
                 "median_us": round(us, 2)}
            )  # fmt: skip
        best = sorted(times, key=lambda n: times[n])[:4]
        print(f"{case.label:28s}" + "  ".join(f"{n} {times[n]:.1f}" for n in best), flush=True)
        save()
    return found


def _rank(found: dict[str, dict[str, float]]) -> list[str]:
    """Trials by the geometric mean of their time over each point's best; complete ones first."""
    labels = {label for times in found.values() for label in times}
    best = {label: min(t[label] for t in found.values() if label in t) for label in labels}

    def mean(name: str) -> tuple[int, float]:
        times = found[name]
        logs = [math.log(times[label] / best[label]) for label in times]
        return len(labels) - len(times), sum(logs) / max(len(logs), 1)

    return sorted(found, key=mean)


def tune(
    points: list[Case], rows: list[dict[str, Any]], workers: int, save: Callable[[], None]
) -> None:
    """Sweep tiles, then occupancies of the best ones, then forced splits, over all points."""
    if not points:
        return
    # Results are per head geometry; points that differ in it are tuned apart.
    groups: dict[Any, list[Case]] = defaultdict(list)
    for case in points:
        groups[case.num_heads, case.num_kv_heads, case.head_dim, case.kv_dtype].append(case)
    major, minor = torch.cuda.get_device_capability()
    arch = major * 10 + minor
    for key, group in groups.items():
        first = group[0]
        print(f"== tune {first.bench} {key}", flush=True)
        if first.bench in ("prefill", "extend"):
            trials = {
                str(c): {"prefill_config": c, "short_rows": 0}
                for c in _tiles(PREFILL_TILES, first)
            }  # fmt: skip
            precompile(((first, o, arch) for o in trials.values()), workers)
            found = _sweep(group, trials, rows, "prefill", save)
            print("best:", _rank(found)[:3], flush=True)
            continue
        block_m = _block_m(first)
        tiles = _tiles(SPLIT_TILES, first)
        trials = {str(c): {"split_config": (block_m, *c, 2, 64)} for c in tiles}
        precompile(((first, o, arch) for o in trials.values()), workers)
        ranked = _rank(_sweep(group, trials, rows, "split-tiles", save))[:3]
        print("best tiles:", ranked, flush=True)
        trials = {
            f"{name} occ{occ}": {"split_config": (*trials[name]["split_config"][:4], occ, 64)}
            for name, occ in itertools.product(ranked, OCCUPANCIES)
        }
        ranked = _rank(_sweep(group, trials, rows, "split", save))
        print("best:", ranked[:3], flush=True)
        if ranked:
            trials = {
                f"splits{n}": {**trials[ranked[0]], "num_splits": n} for n in SPLITS
            } | {"model": trials[ranked[0]]}  # fmt: skip
            _sweep([c for c in group if c.kv_len >= 512], trials, rows, "splits", save)


def _spills(case: Case, options: dict[str, Any], arch: int) -> bool:
    """Whether a kernel of such calls would keep registers in memory: no such tile is shipped."""
    from ..triton_native.offline import record, report

    given = TritonOptions(**{**options, "hopper": False})
    share = case.head_dim == 576
    for like in (case, replace(case, batch=1), replace(case, page_size=16)):
        launches = record(like.spec, *like.lengths(), arch=arch, share_kv=share, options=given)
        if any(report(launch.compile(arch)).spills for launch in launches):
            return True
    return False


def write_configs(files: list[str]) -> None:
    """Replace the rows of ``triton_native/measured.py`` that files of ``tune`` or ``forms`` cover.

    Of each kind of call the tile with the least geometric mean over the points, without spills.
    """
    split, prefill = dict(measured.SPLIT), dict(measured.PREFILL)
    by_key: dict[Any, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    options: dict[str, dict[str, Any]] = {}
    points: dict[Any, Case] = {}
    gpus = set()
    for file in files:
        data = json.loads(Path(file).read_text())
        gpus.add(data["meta"]["gpu"])
        for row in data["rows"]:
            kind = row.get("kind", row.get("set"))  # attention_forms calls it a set
            if kind not in ("split", "prefill") or row.get("trial") == "shipped":
                continue
            bench = row["bench"].removeprefix("tune-") if "bench" in row else kind
            case = Case(bench, **row["case"])
            sizes = [DTYPES[t].itemsize for t in (case.dtype, case.kv_dtype)]
            sizes[0] = max(sizes[0], 2)
            small = kind == "prefill" and case.kv_len <= SHORT_KEYS
            where = (kind, small, case.head_dim, case.head_dim_v, *sizes)
            where += (_block_m(case), case.head_dim == 576)
            points.setdefault(where, case)
            name = json.dumps(row["options"], sort_keys=True)
            options[name] = row["options"]
            by_key[where][name][case.label] = row["median_us"]
    arch = 90 if any("H100" in g or "H200" in g for g in gpus) else None
    if arch is None:
        raise SystemExit(f"gpu={gpus}: say which compute capability this is in attention_tune.py")
    for where, found in by_key.items():
        kind, small, d, dv, q_bytes, kv_bytes, block_m, share = where
        ranked = (options[name] for name in _rank(found))
        best = next(o for o in ranked if not _spills(points[where], o, arch))
        if kind == "split":
            split[arch, block_m, d, dv, q_bytes, kv_bytes, share] = tuple(best["split_config"][1:])
        else:
            prefill[arch, small, d, dv, q_bytes, kv_bytes] = tuple(best["prefill_config"])
    lines = [
        '"""Measured tiles, written by ``python -m attn_backends.bench.attention configs``."""',
        "", "from __future__ import annotations", "",
        "#: (arch, block_m, D, DV, product bytes, KV bytes, shared KV)",
        "#: -> the fields of ``SplitConfig`` after block_m",
        "SPLIT: dict[tuple[int, int, int, int, int, int, bool], tuple[int | bool, ...]] = {"
        + ("" if split else "}"),
        *(f"    {k}: {v}," for k, v in sorted(split.items())),
        *(["}"] if split else []), "",
        "#: (arch, small, D, DV, product bytes, KV bytes) -> the fields of ``PrefillConfig``",
        "PREFILL: dict[tuple[int, bool, int, int, int, int], tuple[int | bool, ...]] = {",
        *(f"    {k}: {v}," for k, v in sorted(prefill.items())),
        "}", "",
    ]  # fmt: skip
    Path(measured.__file__).write_text("\n".join(lines))
    print(f"wrote {len(split)} split and {len(prefill)} prefill rows to {measured.__file__}")


__all__ = ["measure_trials", "precompile", "tune", "write_configs"]
