"""Pictures of a results file: speed against length with the roofline, and a heat map of ratios."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import InvalidInputError

#: Benchmarks that move more than they compute are shown as bandwidth.
_BANDWIDTH = ("decode", "mla", "merge", "merge-sweep", "cascade")
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#999999")
_MARKERS = "osD^vPX*"
Row = Mapping[str, Any]


def plot(results: Mapping[str, Any], path: str | os.PathLike[str], *, own: str) -> Path:
    """Draw a results file; the ending of ``path`` decides the format.

    Args:
        results: ``meta`` and ``rows``, as a benchmark writes them.
        path: A picture to write: png, svg, pdf.
        own: Backend that the heat map compares the others with.

    Returns:
        The path.

    Raises:
        InvalidInputError: There is no time to draw, or the format is unknown.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    target = Path(path)
    formats = sorted(FigureCanvasAgg.get_supported_filetypes())
    if target.suffix.lstrip(".").lower() not in formats:
        raise InvalidInputError.of("plot", str(path), f"a name that ends in {', '.join(formats)}")
    rows = [r for r in results["rows"] if r.get("right") and "gbps" in r]
    if not rows:
        raise InvalidInputError.of("rows", "none that is right and timed", "at least one to plot")
    modes = list(dict.fromkeys(r["mode"] for r in rows))
    names = list(dict.fromkeys(r["backend"] for r in rows))
    styles = {
        n: {"color": _COLORS[i % len(_COLORS)], "marker": _MARKERS[i % len(_MARKERS)]}
        for i, n in enumerate(names)
    }
    panels = {mode: _panels([r for r in rows if r["mode"] == mode]) for mode in modes}
    heats = {mode: _ratios([r for r in rows if r["mode"] == mode], own) for mode in modes}
    tall = max((len(h[0]) for h in heats.values()), default=0)
    wide = max(*(len(p) for p in panels.values()), 2)
    figure = Figure(figsize=(4.6 * wide, len(modes) * (3.6 + (1.3 + 0.4 * tall if tall else 0))))
    figure.set_layout_engine("constrained")
    parts = figure.subfigures(len(modes), 1, squeeze=False)[:, 0]
    for part, mode in zip(parts, modes):
        _draw_mode(part, panels[mode], heats[mode], styles, mode, own)
    meta = results["meta"]
    figure.suptitle(f"{rows[0]['bench']} on {meta.get('gpu') or meta.get('device', '')}")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=130)
    return target


def label_of(case: Row) -> str:
    """A case in a few words, for axes and tables."""
    if "tokens" in case:
        more = f" n={case['states']}" if case.get("states", 2) != 2 else ""
        more += " lse [H,T]" if case.get("lse_layout", "token") != "token" else ""
        more += f" empty {case['empty']}" if case.get("empty") else ""
        more += f" {case['dtype']}" if case.get("dtype", "bf16") != "bf16" else ""
        return f"T={case['tokens']} H={case['num_heads']} D={case['head_dim']}{more}"
    if "prefix" in case:
        return f"{case['batch']} x ({case['prefix']} + {case['suffix']}) H{case['num_heads']}"
    q = f"{case['q_len']}/" if case["q_len"] > 1 else ""
    ragged = "r" if case.get("ragged") else ""
    kinds = dict.fromkeys(case.get(k, "bf16") for k in ("dtype", "kv_dtype"))
    more = "" if list(kinds) == ["bf16"] else f" {'/'.join(kinds)}"
    return f"{case['batch']}x{q}{case['kv_len']}{ragged} H{case['num_heads']}{more}"


def _length(case: Row) -> int:
    return case["tokens"] if "tokens" in case else case["kv_len"]


def _family(case: Row) -> str:
    """Points that one line may join: all that differs is the length."""
    if "tokens" in case:
        fixed = {k: v for k, v in case.items() if k not in ("tokens", "copies")}
        more = [f"{k} {v}" for k, v in fixed.items() if k not in ("num_heads", "head_dim") and v]
        return f"{case['num_heads']} heads, D {case['head_dim']}, {', '.join(map(str, more))}"
    q = "" if case["q_len"] in (1, case["kv_len"]) else f", {case['q_len']} queries"
    ragged = ", ragged" if case.get("ragged") else ""
    heads = f"{case['num_heads']}/{case['num_kv_heads']} heads, D {case['head_dim']}"
    return f"batch {case['batch']}{q}{ragged}, {heads}, {case.get('dtype', '')}"


def _panels(rows: Sequence[Row]) -> list[tuple[str, list[Row], bool]]:
    """Title, rows, and whether lines join them; families of one point share a last panel."""
    families: dict[str, list[Row]] = {}
    for row in rows:
        families.setdefault(_family(row["case"]), []).append(row)
    joined, single = [], []
    for family, members in families.items():
        if len({_length(r["case"]) for r in members}) > 1:
            joined.append((family, members, True))
        else:
            single += members
    return [*joined, ("single points", single, False)] if single else joined


def _ratios(rows: Sequence[Row], own: str) -> tuple[list[str], list[str], list[list[float]]]:
    """Backends, points, and time of each over ours; NaN where either is missing."""
    times: dict[tuple[str, str], float] = {}
    for r in rows:
        times[r["backend"], _point(r)] = r["median_us"]
    names = [n for n in dict.fromkeys(r["backend"] for r in rows) if n != own]
    points = list(dict.fromkeys(_point(r) for r in rows if r["backend"] == own))
    if not points:
        return [], [], []
    table = [
        [times.get((n, p), math.nan) / times[own, p] for p in points] for n in names
    ]  # fmt: skip
    return names, points, table


def _point(row: Row) -> str:
    return label_of(row["case"])


def _draw_mode(
    part: Any,
    panels: list[tuple[str, list[Row], bool]],
    heat: tuple[list[str], list[str], list[list[float]]],
    styles: Mapping[str, Mapping[str, str]],
    mode: str,
    own: str,
) -> None:
    names, points, table = heat
    halves = (
        part.subfigures(2 if names else 1, 1, height_ratios=[3, 1 + 0.35 * len(names)])
        if names
        else part
    )
    top = halves[0] if names else part
    axes = top.subplots(1, len(panels), squeeze=False)[0]
    for i, (axis, (title, rows, joined)) in enumerate(zip(axes, panels)):
        _draw_speed(axis, title, rows, joined, styles)
        if i == 0:
            axis.legend(fontsize=7)
    top.suptitle(mode, fontsize=9)
    if names:
        _draw_heat(halves[1].subplots(), names, points, table, own)


def _draw_speed(
    axis: Any,
    title: str,
    rows: Sequence[Row],
    joined: bool,
    styles: Mapping[str, Mapping[str, str]],
) -> None:
    bandwidth = rows[0]["bench"] in _BANDWIDTH
    unit = "gbps" if bandwidth else "tflops"
    ticks = list(dict.fromkeys(_point(r) for r in rows))

    def at(row: Row) -> float:
        return _length(row["case"]) if joined else ticks.index(_point(row))

    def ordered(members: Sequence[Row]) -> list[Row]:
        return sorted(members, key=at)

    for name in dict.fromkeys(r["backend"] for r in rows):
        own = ordered([r for r in rows if r["backend"] == name])
        xs, ys = [at(r) for r in own], [r[unit] for r in own]
        # Speed is work over time, so the quartiles of time give the bars of speed.
        low = [y * max(0.0, 1 - _share(r, "p75_us")) for y, r in zip(ys, own)]
        high = [y * max(0.0, _share(r, "p25_us") - 1) for y, r in zip(ys, own)]
        axis.errorbar(
            xs, ys, yerr=[low, high], label=name, linestyle="-" if joined else "", markersize=4,
            linewidth=1.2, capsize=2, **styles[name],
        )  # fmt: skip
    seen: dict[float, float] = {}
    for r in rows:
        if "floor_us" in r:
            seen[at(r)] = r[unit] * r["median_us"] / r["floor_us"]
    if seen:
        xs = sorted(seen)
        style = {"color": "#555555", "linestyle": "--", "linewidth": 1, "label": "roofline"}
        if joined:
            axis.plot(xs, [seen[x] for x in xs], **style)
        else:
            axis.hlines(
                [seen[x] for x in xs], [x - 0.35 for x in xs], [x + 0.35 for x in xs], **style
            )
    if joined:
        axis.set_xscale("log", base=2)
        lengths = sorted({_length(r["case"]) for r in rows})
        shown = [n for i, n in enumerate(lengths) if i == 0 or n >= 1.9 * lengths[i - 1]]
        axis.set_xticks(shown, [str(n) for n in shown], rotation=30, ha="right", fontsize=7)
        axis.set_xticks([], minor=True)
        axis.set_xlabel("tokens" if "tokens" in rows[0]["case"] else "keys per sequence")
    else:
        axis.set_xticks(range(len(ticks)), ticks, rotation=30, ha="right", fontsize=7)
    axis.set_ylim(bottom=0)
    axis.set_ylabel("GB/s" if bandwidth else "TFLOP/s")
    axis.set_title(title, fontsize=8)
    axis.grid(alpha=0.3)


def _share(row: Row, quartile: str) -> float:
    """The median over a quartile; 1 in files without quartiles."""
    return row["median_us"] / row.get(quartile, row["median_us"])


def _draw_heat(
    axis: Any,
    names: Sequence[str],
    points: Sequence[str],
    table: Sequence[Sequence[float]],
    own: str,
) -> None:
    """Blue where ours is faster, red where it is slower; white is level."""
    logs = [[math.log2(value) if value == value else math.nan for value in row] for row in table]
    image = axis.imshow(logs, cmap="RdBu", vmin=-1, vmax=1, aspect="auto")
    for y, row in enumerate(table):
        for x, value in enumerate(row):
            dark = value == value and abs(math.log2(value)) > 0.7
            text = f"{value:.2f}" if value == value else "-"
            color = "white" if dark else "black"
            axis.text(x, y, text, ha="center", va="center", fontsize=7, color=color)
    axis.set_xticks(range(len(points)), points, rotation=30, ha="right", fontsize=7)
    axis.set_yticks(range(len(names)), names, fontsize=7)
    axis.set_title(f"time over that of {own}: above 1 {own} is faster", fontsize=8)
    bar = axis.figure.colorbar(image, ax=axis, ticks=[-1, 0, 1])
    bar.ax.set_yticklabels(["0.5", "1", "2"], fontsize=7)


__all__ = ["label_of", "plot"]
