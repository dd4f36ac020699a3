"""Measure the backends against each other, and write the file that ``auto`` follows.

A row of the file is for a device, a phase and a bucket of specs; the points behind it are batches
of several sizes and lengths, since a backend is chosen before lengths are known. The file is
written after every point, so an interrupted run is continued, not repeated.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import AttnBackendsError, InvalidInputError
from ..provenance import provenance
from ..registry import TuningFile, TuningPoint, TuningRow, load_tuning, shape_bucket, write_tuning
from ..registry.ranking import device_name
from .attention_cases import Case, Inputs
from .attention_point import measure_case
from .backend_ways import backend_ways, every_backend
from .presets import Preset
from .runner import EAGER, GRAPH, Found, release

#: (batch, query length, key length) by device, phase and layout.
_GPU = {
    "decode-paged": [(1, 1, 1024), (64, 1, 4096), (16, 1, 2048), (1, 1, 32768), (8, 1, 8192)],
    "prefill-ragged": [(1, 1024, 1024), (4, 4096, 4096), (8, 512, 512)],
    "prefill-paged": [(4, 512, 4096), (32, 64, 2048), (1, 2048, 8192)],
    "decode-ragged": [(1, 1, 2048), (16, 1, 2048)],
}
_CPU = {
    "decode-paged": [(1, 1, 256), (4, 1, 512)],
    "prefill-ragged": [(1, 128, 128), (2, 64, 64)],
    "prefill-paged": [(1, 32, 256)],
    "decode-ragged": [(1, 1, 256)],
}
#: Fields of provenance that make times comparable; a run is only continued if they are the same.
SAME = ("gpu", "driver", "python", "torch", "triton", "packages", "commit")


@dataclass(frozen=True)
class Job:
    """One batch of one bucket."""

    phase: str
    bucket: str
    case: Case

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The point's place among those of its bucket."""
        case = self.case
        return case.batch, case.q_len, case.kv_len, case.num_heads


def jobs_for(
    presets: Sequence[Preset],
    device: torch.device,
    *,
    phases: Sequence[str] = ("prefill", "decode"),
    batches: Sequence[int] = (),
    lengths: Sequence[int] = (),
) -> list[Job]:
    """What to measure, so ordered that a run cut short has something of every bucket.

    Args:
        presets: Models; their decode, extend and prefill shapes.
        device: A CPU gets few and short batches.
        phases: ``prefill``, ``decode`` or both.
        batches: Numbers of sequences in place of the standard ones.
        lengths: Lengths in place of the standard ones.

    Raises:
        InvalidInputError: A phase is unknown, or a number is not positive.
    """
    for phase in phases:
        if phase not in ("prefill", "decode"):
            raise InvalidInputError.of("phase", repr(phase), "prefill, decode")
    for name, numbers in (("batch", batches), ("length", lengths)):
        if any(n < 1 for n in numbers):
            raise InvalidInputError.of(name, min(numbers), "an int >= 1")
    found: dict[Any, Job] = {}
    order: dict[tuple[str, str], int] = {}
    ranks: list[tuple[int, Job]] = []
    for preset in presets:
        for kind, shape in _shapes(preset):
            phase = kind.partition("-")[0]
            if phase not in phases:
                continue
            for point in _points(kind, device, batches, lengths):
                case = Case("tune", *point, **shape)
                job = Job(phase, shape_bucket(case.spec), case)
                key = (job.phase, job.bucket, job.shape)
                if key in found:
                    continue
                found[key] = job
                rank = order[job.phase, job.bucket] = order.get((job.phase, job.bucket), -1) + 1
                ranks.append((rank, job))
    return [job for _, job in sorted(ranks, key=lambda item: item[0])]


def _shapes(preset: Preset) -> Iterable[tuple[str, dict[str, Any]]]:
    """Kinds of batches of a model, and the fields they fix. MLA decodes from its cache only."""
    for kind in _GPU:
        ragged = kind.endswith("ragged")
        model = preset.prefill if kind == "prefill-ragged" else preset.model
        if preset.is_mla and kind in ("prefill-paged", "decode-ragged"):
            continue
        yield kind, {
            "num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads,
            "head_dim": model.head_dim, "head_dim_v": model.dv,
            "page_size": None if ragged else preset.page_size,
        }  # fmt: skip


def _points(
    kind: str, device: torch.device, batches: Sequence[int], lengths: Sequence[int]
) -> list[tuple[int, int, int]]:
    standard = (_GPU if device.type == "cuda" else _CPU)[kind]
    if not batches and not lengths:
        return standard
    every_b = batches or sorted({b for b, _, _ in standard})
    every_n = lengths or sorted({n for _, _, n in standard})

    def queries(n: int) -> int:
        if kind.startswith("decode"):
            return 1
        return n if kind == "prefill-ragged" else max(1, n // 2)

    return [(b, queries(n), n) for n in every_n for b in every_b]


@dataclass(frozen=True)
class Outcome:
    """How far a run of ``tune`` came.

    Attributes:
        tuning: The file's content.
        measured: Points measured by this run.
        known: Points that the file had already.
        left: Points that the budget left out.
        dropped: Rows of this device that other versions had measured.
        seconds: Time spent measuring.
    """

    tuning: TuningFile
    measured: int
    known: int
    left: int
    dropped: int
    seconds: float


def tune(
    path: str | os.PathLike[str],
    jobs: Sequence[Job],
    device: torch.device,
    *,
    backends: Sequence[str] = (),
    budget_s: float = 540.0,
    rounds: int = 16,
    again: bool = False,
    command: str = "attn-backends tune",
    progress: Callable[[Job, bool], None] | None = None,
) -> Outcome:
    """Measure what a tuning file lacks, and write it after every point.

    Decode is timed by CUDA graph replay, as engines run it, and prefill by eager calls. A backend
    that cannot be captured is timed eagerly in decode too: that is what it would cost.

    Args:
        path: The file; one that exists is continued if it was measured with the same versions.
        jobs: From ``jobs_for``.
        device: Where.
        backends: Names without options; empty is every registered backend.
        budget_s: No point is begun after so many seconds.
        rounds: Most samples of each backend at a point.
        again: Measure points that the file has already.
        command: What the file says it was made by.
        progress: Called after each point with the job and whether it was measured.

    Raises:
        InvalidInputError: The file cannot be read or written, or the budget is not positive.
        UnknownBackendError: A name that no backend has.
    """
    if not budget_s > 0:
        raise InvalidInputError.of("budget", budget_s, "seconds > 0")
    names = list(backends) or every_backend()
    for name in backends:
        if ":" in name:
            raise InvalidInputError.of("backend", repr(name), "a name without options for tune")
    where = device_name(device)
    tuning, points, dropped = _known(path, where, provenance(command, device), again)
    start, measured, known, left = time.monotonic(), 0, 0, 0
    for job in jobs:
        key = (job.phase, job.bucket)
        own = points.setdefault(key, {})
        done = own.get(job.shape)
        if done is not None and set(names) <= set(done.median_us) | set(done.refused):
            known += 1
            if progress is not None:
                progress(job, False)
            continue
        if time.monotonic() - start > budget_s:
            left += 1
            continue
        own[job.shape] = measure_job(job, names, device, rounds)
        measured += 1
        row = TuningRow.of(where, job.phase, job.bucket, list(own.values()))  # type: ignore[arg-type]
        if row is not None:
            tuning = tuning.with_row(row)
        write_tuning(path, tuning)
        if progress is not None:
            progress(job, True)
    return Outcome(tuning, measured, known, left, dropped, time.monotonic() - start)


Points = dict[tuple[str, str], dict[tuple[int, int, int, int], TuningPoint]]


def _known(
    path: str | os.PathLike[str], where: str, origin: dict[str, Any], again: bool
) -> tuple[TuningFile, Points, int]:
    """The file so far, those of its points that may stand beside new ones, and rows left out."""
    tuning = TuningFile(rows=[])
    if Path(os.path.expanduser(os.fspath(path))).exists():
        tuning = load_tuning(path)
    origins = dict(tuning.meta.get("devices", {}))
    before = origins.get(where, {})
    rows = list(tuning.rows)
    if any(before.get(field) != origin.get(field) for field in SAME):
        # Times of other versions are not comparable with those of this run.
        rows = [row for row in rows if row.device != where]
    points: Points = {}
    for row in rows:
        if row.device == where and not again:
            points[row.phase, row.bucket] = {p.shape: p for p in row.points}
    meta = {**origin, "devices": {**origins, where: origin}}
    return TuningFile(meta=meta, rows=rows), points, len(tuning.rows) - len(rows)


def measure_job(job: Job, names: Sequence[str], device: torch.device, rounds: int) -> TuningPoint:
    """Measure the named backends at one point; what fails for all of them is kept as well."""
    case = job.case
    cuda = device.type == "cuda"
    modes = (GRAPH, EAGER) if cuda and job.phase == "decode" else (EAGER,)
    found, against = Found(), {}
    try:
        x = Inputs(case, device=device)
        ways, against = backend_ways(x, names)
        if ways:
            found = measure_case(x, ways, modes=modes, rounds=rounds, limit_s=2.0)
        del x, ways
    except AttnBackendsError:  # a malformed question
        raise
    except Exception as error:  # out of memory, for example
        why = f"{type(error).__name__}: {str(error)[:300]}"
        against = {name: why for name in names} | against
    finally:
        release(device)
    refused = dict(against)
    for item in found.refused:
        refused[item["backend"]] = item["reason"]
    times, how = {}, {}
    for mode in reversed(modes):  # graphs last: they go before eager times
        for row in found.rows:
            if row["mode"] == mode and row["right"]:
                times[row["backend"]], how[row["backend"]] = float(row["median_us"]), mode
    for row in found.rows:
        if not row["right"]:
            refused[row["backend"]] = f"wrong: error {row['max_err']:.1e} of {row['limit']:.1e}"
    return TuningPoint(
        batch=case.batch, q_len=case.q_len, kv_len=case.kv_len, num_heads=case.num_heads,
        median_us=times, mode=how, refused={n: r for n, r in refused.items() if n not in times},
    )  # fmt: skip


def order_of(tuning: TuningFile, device: str, phase: str) -> list[str]:
    """Backends by how near they come to each row's fastest, in the geometric mean.

    Shipped rankings are made with it. A backend that cannot do what some rows hold is judged by the
    others.

    Args:
        tuning: A file.
        device: Whose rows.
        phase: ``prefill`` or ``decode``.
    """
    logs: dict[str, list[float]] = {}
    for row in tuning.rows:
        if (row.device, row.phase) == (device, phase):
            best = min(row.median_us.values())
            for name, time_us in row.median_us.items():
                logs.setdefault(name, []).append(math.log(time_us / best))
    return sorted(logs, key=lambda name: sum(logs[name]) / len(logs[name]))


__all__ = ["Job", "Outcome", "jobs_for", "measure_job", "order_of", "tune"]
