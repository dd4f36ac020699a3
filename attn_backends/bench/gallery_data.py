"""What the pictures of the gallery show: points of results files, grouped into panels."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .roofline import GPUS, Gpu

#: Names of this library as it runs by default; most others are libraries called directly.
OURS = ("triton", "cuda", "cascade-triton")
#: Neither of them: variants, references, and lower bounds.
ASIDE = (
    "triton-plain", "triton-invariant", "cuda-alone", "triton-alone", "torch", "torch_native",
    "copy", "pairwise",
)  # fmt: skip
_VARIANTS = ("triton:", "plain-", "cascade-")
TIMED = "graph_cold"


@dataclass(frozen=True)
class Panel:
    """One set of axes.

    Attributes:
        title: What its points have in common.
        labels: Points in order: lengths of a sweep, or one text a point.
        series: Value of each point by backend; None where there is none.
        sweep: Whether labels are numbers on an axis rather than names.
    """

    title: str
    labels: tuple[Any, ...]
    series: dict[str, tuple[float | None, ...]]
    sweep: bool


@dataclass(frozen=True)
class Source:
    """One results file.

    Attributes:
        path: Where it lies.
        meta: Command, date and versions.
        rows: Its rows.
    """

    path: Path
    meta: dict[str, Any]
    rows: list[dict[str, Any]] = field(repr=False)

    @property
    def bench(self) -> str:
        """What was measured; empty for results of another kind."""
        row = self.rows[0] if self.rows and isinstance(self.rows[0], dict) else {}
        name = str(row.get("bench", "")) if "case" in row else ""
        return "host" if name.startswith("host-") else name

    @property
    def gpu(self) -> Gpu | None:
        """Peak rates of the GPU, if they are known."""
        return GPUS.get(str(self.meta.get("gpu", "")).lower().removeprefix("nvidia "))

    @property
    def facts(self) -> str:
        """Where the figures come from, in one line."""
        names = ("gpu", "date", "driver", "torch", "triton", "commit", "note")
        facts = [f"{name} {self.meta[name]}" for name in names if self.meta.get(name)]
        facts += [f"{name} {v}" for name, v in self.meta.get("packages", {}).items() if v]
        return ", ".join(facts)


@dataclass(frozen=True)
class Rates:
    """Throughput of a whole engine under one workload.

    Attributes:
        title: The workload.
        ranges: Slowest, median and fastest turn by backend, in tokens/s.
        ratios: Median rate over the reference's within a turn, by backend, where it was taken.
    """

    title: str
    ranges: dict[str, tuple[float, float, float]]
    ratios: dict[str, float] = field(default_factory=dict)


def rates(source: Source) -> list[Rates]:
    """What engines reached, one group a workload; empty for other results."""
    found: dict[str, Rates] = {}
    for row in source.rows:
        if "tokens_per_s" in row and "fastest" in row:
            title = str(row["case"].get("workload", ""))
            group = found.setdefault(title, Rates(title, {}))
            group.ranges[row["backend"]] = (row["slowest"], row["tokens_per_s"], row["fastest"])
            if "ratio" in row and row["backend"] != row["reference"]:
                group.ratios[row["backend"]] = row["ratio"]
    return list(found.values())


def read(path: Path) -> Source:
    """Read a results file.

    Args:
        path: JSON with ``meta`` and ``rows``, as the benchmarks write it.

    Returns:
        The file; without rows if it holds something else.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    rows = content.get("rows") or []
    return Source(path, content.get("meta") or {}, rows)


def timed(rows: Iterable[dict[str, Any]], mode: str = TIMED) -> list[dict[str, Any]]:
    """Rows of a mode whose answer was right."""
    return [r for r in rows if r.get("mode") == mode and r.get("right", True)]


def left_out(rows: Iterable[dict[str, Any]]) -> int:
    """How many rows have no right answer, and therefore no speed."""
    return sum(not r.get("right", True) for r in rows)


def is_rival(name: str) -> bool:
    """Whether a name in results is of another library."""
    return name not in (*OURS, *ASIDE) and not name.startswith(_VARIANTS)


def _plain(case: dict[str, Any], *without: str) -> tuple[Any, ...]:
    return tuple((k, v) for k, v in sorted(case.items()) if k not in without)


def _sweep_key(case: dict[str, Any]) -> tuple[Any, ...]:
    """What the points of one line share: everything but the length that varies."""
    if "tokens" in case:
        return _plain(case, "tokens", "copies")
    if not _is_attention(case):
        return _plain(case)
    if case["q_len"] == case["kv_len"]:
        return _plain(case, "q_len", "kv_len", "batch")
    return _plain(case, "kv_len", "prefix")


def _is_attention(case: dict[str, Any]) -> bool:
    return {"batch", "q_len", "kv_len", "num_heads", "head_dim"} <= case.keys()


def _length(case: dict[str, Any]) -> int:
    return int(case.get("tokens", case.get("kv_len", 0)))


def point_label(case: dict[str, Any]) -> str:
    """A point in a few words."""
    if "tokens" in case:
        count = "1 token" if case["tokens"] == 1 else f"{case['tokens']} tokens"
        text = f"{count}, {case['num_heads']} x {case['head_dim']} {case['dtype']}"
        text += ", LSE [H, T]" if case.get("lse_layout") == "head" else ""
        text += f", {case['states']} states" if case.get("states", 2) != 2 else ""
        return text + (f", {case['empty']:.0%} empty" if case.get("empty") else "")
    if not _is_attention(case):
        return ", ".join(f"{name} {value}" for name, value in case.items())
    if "prefix" in case:
        return f"{case['batch']} x ({case['prefix']} shared + {case['suffix']})"
    text = f"{case['batch']} x {case['kv_len']}"
    if case["q_len"] == case["kv_len"]:
        return text
    if case["q_len"] > 1:
        text = f"{case['batch']} x {case['q_len']} over {case['kv_len']}"
    return text + (" ragged" if case.get("ragged") else "")


def _heads(case: dict[str, Any]) -> str:
    if "tokens" in case:
        return f"{case['num_heads']} heads x {case['head_dim']}, {case['dtype']}"
    if not _is_attention(case):
        return ""
    width = f"D {case['head_dim']}"
    values = case.get("head_dim_v", case["head_dim"])
    width += f"/{values}" if values != case["head_dim"] else ""
    return f"{case['num_heads']}/{case['num_kv_heads']} heads, {width}"


def point_labels(cases: Sequence[dict[str, Any]]) -> list[str]:
    """Points in a few words each, with what else tells them apart: heads, width, cache, pages."""
    traits = [_traits(case) for case in cases]
    varied = [name for name in ("heads", "keys", "page") if len({t[name] for t in traits}) > 1]
    return [
        ", ".join([point_label(case), *filter(None, (t[name] for name in varied))])
        for case, t in zip(cases, traits)
    ]


def _traits(case: dict[str, Any]) -> dict[str, str]:
    if "tokens" in case or not _is_attention(case):
        return {"heads": "", "keys": "", "page": ""}
    kept, page = case.get("kv_dtype", case.get("dtype", "")), case.get("page_size")
    return {
        "heads": _heads(case),
        "keys": f"{kept} keys" if kept != case.get("dtype", "") else "",
        "page": f"page {page}" if page else "ragged keys",
    }


def _sweep_title(case: dict[str, Any]) -> str:
    if "tokens" in case:
        layout = ", LSE [H, T]" if case.get("lse_layout") == "head" else ""
        return f"{case.get('states', 2)} states, {_heads(case)}{layout}"
    if case["q_len"] == case["kv_len"]:
        return _heads(case)
    count = "one sequence" if case["batch"] == 1 else f"{case['batch']} sequences"
    return f"{count}, {_heads(case)}"


def panels(rows: list[dict[str, Any]], value: str, *, least: int = 3) -> list[Panel]:
    """Group rows into sweeps over a length, and one panel of the points that are in none.

    Args:
        rows: Rows of one benchmark and mode.
        value: The field to show, for example ``"gbps"``.
        least: Points that make a line.

    Returns:
        Sweeps with the most points first, then the rest.
    """
    rows = [r for r in rows if value in r]
    points: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        points.setdefault(_plain(row["case"]), row["case"])
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for case in points.values():
        groups.setdefault(_sweep_key(case), []).append(case)
    found, rest = [], []
    for cases in groups.values():
        if len({_length(c) for c in cases}) < least:
            rest += cases
            continue
        cases = sorted(cases, key=_length)
        labels = tuple(map(_length, cases))
        found.append(Panel(_sweep_title(cases[0]), labels, _series(rows, cases, value), True))
    found.sort(key=lambda panel: -len(panel.labels))
    if rest:
        several = len({_heads(c) for c in rest}) > 1
        title = "other points" if found else ("" if several else _heads(rest[0]))
        names = tuple(point_labels(rest))
        found.append(Panel(title, names, _series(rows, rest, value), False))
    return found


def _series(
    rows: list[dict[str, Any]], cases: list[dict[str, Any]], value: str
) -> dict[str, tuple[float | None, ...]]:
    names = list(dict.fromkeys(r["backend"] for r in rows))
    keys = [_plain(c) for c in cases]
    found = {(r["backend"], _plain(r["case"])): r[value] for r in rows}
    series = {name: tuple(found.get((name, key)) for key in keys) for name in names}
    return {name: values for name, values in series.items() if any(v is not None for v in values)}


def families(shown: list[Panel], most: int = 10) -> list[Panel]:
    """Panels with few lines: of many variants of one backend, the fastest and the slowest.

    Args:
        shown: Panels of speed, where variants are called ``name[what]``.
        most: Lines up to which panels stay as they are.

    Returns:
        Panels in which ``name: fastest of n`` holds the best of each point, and so on.
    """
    return [panel if len(panel.series) <= most else _family(panel) for panel in shown]


def _family(panel: Panel) -> Panel:
    members: dict[str, list[tuple[float | None, ...]]] = {}
    for name, values in panel.series.items():
        members.setdefault(name.partition("[")[0], []).append(values)
    series: dict[str, tuple[float | None, ...]] = {}
    for name, lines in members.items():
        points = [[v for v in values if v is not None] for values in zip(*lines)]
        if len(lines) == 1:
            series[name] = lines[0]
            continue
        for word, pick in (("fastest", max), ("slowest", min)):
            line = tuple(pick(values) if values else None for values in points)
            series[f"{name}: {word} of {len(lines)}"] = line
    return Panel(panel.title, panel.labels, series, panel.sweep)


@dataclass(frozen=True)
class Ratios:
    """Speed of the fastest of ours against each rival, point by point.

    Attributes:
        title: The benchmark.
        points: One label a row.
        rivals: One name a column.
        cells: Time of the rival over our time; None where the rival has none.
    """

    title: str
    points: tuple[str, ...]
    rivals: tuple[str, ...]
    cells: tuple[tuple[float | None, ...], ...]

    @property
    def best(self) -> tuple[float, ...]:
        """Against the fastest rival of each point."""
        known = [[c for c in row if c is not None] for row in self.cells]
        return tuple(min(row) for row in known if row)

    @property
    def sentence(self) -> str:
        """The figures in words; within 1 % counts as level."""
        best = self.best
        ahead, behind = sum(r > 1.01 for r in best), sum(r < 0.99 for r in best)
        middle = statistics.median(best)
        return (
            "Against the fastest other library, point by point: "
            f"{min(best):.2f} to {max(best):.2f} times its speed, median {middle:.2f}; of "
            f"{len(best)} points ahead at {ahead}, level at {len(best) - ahead - behind}, behind "
            f"at {behind}."
        )


def ratios(source: Source) -> Ratios | None:
    """Compare the fastest of ours with every rival in one results file.

    Args:
        source: A results file of attention or merges.

    Returns:
        The ratios; None if nothing of ours was measured beside a rival.
    """
    times: dict[tuple[Any, ...], dict[str, float]] = {}
    cases: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in timed(source.rows):
        key = _plain(row["case"])
        cases[key] = row["case"]
        times.setdefault(key, {})[row["backend"]] = row["median_us"]
    rivals = dict.fromkeys(name for row in times.values() for name in row if is_rival(name))
    points, cells = [], []
    for key, row in times.items():
        ours = [row[name] for name in OURS if name in row]
        if ours and any(name in row for name in rivals):
            points.append(cases[key])
            cells.append(tuple(row[n] / min(ours) if n in row else None for n in rivals))
    if not cells:
        return None
    return Ratios(source.path.stem, tuple(point_labels(points)), tuple(rivals), tuple(cells))


__all__ = [
    "ASIDE",
    "OURS",
    "Panel",
    "Rates",
    "Ratios",
    "Source",
    "families",
    "is_rival",
    "left_out",
    "panels",
    "point_label",
    "point_labels",
    "rates",
    "ratios",
    "read",
    "timed",
]
