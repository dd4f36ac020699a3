"""The pictures themselves, in matplotlib: speed against length, points side by side, ratios."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .gallery_data import ASIDE, Panel, Rates, Ratios
from .gallery_distributed import Band, Bar

#: One color a name, the same in every picture; ours are blue and red.
COLORS = {
    "triton": "#1f5fbf",
    "cuda": "#c0392b",
    "triton-plain": "#8db4e8",
    "fa3": "#e08a1e",
    "flashinfer": "#2a9d5c",
    "flashinfer-fa2": "#2a9d5c",
    "flashinfer-fa3": "#7fc79c",
    "cudnn": "#7d4fb5",
    "torch": "#8a6d5a",
    "torch_native": "#8a6d5a",
    "copy": "#7a7a7a",
    "attn_backends": "#1f5fbf",
    "FLASH_ATTN": "#e08a1e",
    "TRITON_ATTN": "#8a6d5a",
    "cascade-triton": "#1f5fbf",
    "plain-triton": "#8db4e8",
    "flashinfer-cascade": "#2a9d5c",
    "pairwise": "#b8a02c",
}
_MORE = ("#00838f", "#ad1457", "#5d7a1f", "#455a64")
_MARKERS = "osD^vP*X"
_INK, _PALE = "#222222", "#d9d9d9"
_WIDEST = 2
_TALLEST = 16
_ROOM = 9.5


def new_figure(width: float, height: float) -> Any:
    """An empty figure without a window, sizes in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=110, layout="constrained", facecolor="white")


def _look(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Color and marker by name; what is named after a colon is a shade of what is before it."""
    unknown = [n for n in names if n not in COLORS and n.partition(":")[0] not in COLORS]
    color = {**COLORS, **{n: _MORE[i % len(_MORE)] for i, n in enumerate(unknown)}}
    look: dict[str, dict[str, Any]] = {}
    for i, name in enumerate(names):
        base = color.get(name) or color[name.partition(":")[0]]
        look[name] = {"color": base, "marker": _MARKERS[i % len(_MARKERS)]}
        if ": slowest" in name:
            look[name] |= {"alpha": 0.45}
    return look


def _bare(axes: Any, *, grid: str) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color=_PALE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, colors=_INK)


def _short(number: float) -> str:
    """A length as people write it: 8k, 128k."""
    number = int(number)
    return f"{number // 1024}k" if number >= 1024 and number % 1024 == 0 else str(number)


def speed(
    title: str, shown: Sequence[Panel], unit: str, roof: float | None, roof_name: str, across: str
) -> Any:
    """Speed of every backend, one panel a sweep, and the points of no sweep side by side.

    Args:
        title: Of the whole picture.
        shown: The panels.
        unit: Of the values.
        roof: What the device can do at best, in that unit; None if unknown.
        roof_name: What that is.
        across: What the lengths of sweeps count.

    Returns:
        The figure.
    """
    names = list(dict.fromkeys(name for panel in shown for name in panel.series))
    look = _look(names)
    alone = len(shown) == 1 and len(shown[0].labels) == 1
    columns = min(len(shown), _WIDEST)
    lines = [shown[i : i + columns] for i in range(0, len(shown), columns)]
    heights = [max(map(_height, line)) for line in lines]
    width = 1.0 + 4.1 * columns
    figure = new_figure(width, sum(heights) + 0.8)
    parts = figure.subfigures(len(lines), 1, squeeze=False, height_ratios=heights)[:, 0]
    handles: dict[str, Any] = {}
    for part, line in zip(parts, lines):
        for axes, panel in zip(part.subplots(1, columns, squeeze=False)[0], line):
            draw = _sweep if panel.sweep else _bars if alone else _points
            draw(axes, panel, look, unit, roof, across)
            handles |= {h.get_label(): h for h in axes.get_legend_handles_labels()[0]}
        for axes in part.axes[len(line) :]:
            axes.set_visible(False)
    figure.suptitle(title, fontsize=12, fontweight="bold", color=_INK, x=0.01, ha="left")
    if roof is not None:
        from matplotlib.lines import Line2D

        text = f"{roof_name}: {roof:g} {unit}"
        handles[text] = Line2D([], [], color=_INK, linestyle="--", linewidth=1)
    if handles:
        figure.legend(
            handles.values(), handles.keys(), loc="outside lower center",
            ncols=_columns(list(handles), width), frameon=False, fontsize=8,
        )  # fmt: skip
    return figure


def _columns(labels: Sequence[str], width: float) -> int:
    """Most columns of a legend that fit into a width in inches."""
    for count in range(len(labels), 1, -1):
        rows = math.ceil(len(labels) / count)
        columns = [labels[i : i + rows] for i in range(0, len(labels), rows)]
        if sum(0.07 * max(map(len, column)) + 0.6 for column in columns) < width:
            return count
    return 1


def _height(panel: Panel) -> float:
    if panel.sweep:
        return 3.2
    lines = len(panel.labels) if len(panel.labels) > 1 else len(panel.series)
    return max(1.8, 0.3 * lines + 0.9)


def _sweep(
    axes: Any, panel: Panel, look: dict[str, Any], unit: str, roof: float | None, across: str
) -> None:
    for name, values in panel.series.items():
        known = [(x, y) for x, y in zip(panel.labels, values) if y is not None]
        axes.plot(*zip(*known), label=name, linewidth=1.6, markersize=4.5, **look[name])
    axes.set_xscale("log", base=2)
    ticks = panel.labels
    if len(ticks) > 6:
        ticks = [n for n in ticks if n & (n - 1) == 0][::2]
    axes.set_xticks(ticks, [_short(n) for n in ticks])
    axes.minorticks_off()
    axes.set_xlabel(across, fontsize=8)
    axes.set_ylabel(unit, fontsize=8)
    axes.set_title(panel.title, fontsize=9, color=_INK)
    top = max(v for values in panel.series.values() for v in values if v is not None)
    axes.set_ylim(0, 1.06 * max(top, roof or 0))
    if roof is not None:
        axes.axhline(roof, color=_INK, linestyle="--", linewidth=1)
    _bare(axes, grid="y")


def _points(
    axes: Any, panel: Panel, look: dict[str, Any], unit: str, roof: float | None, across: str
) -> None:
    rows = range(len(panel.labels))
    for row in rows:
        values = [v[row] for n, v in panel.series.items() if v[row] is not None and n not in ASIDE]
        # The span of libraries; of one library's own figures it would say nothing.
        if len({name.partition(",")[0] for name in panel.series}) > 1 and values:
            axes.plot([min(values), max(values)], [row, row], color=_PALE, linewidth=3, zorder=1)
    for name, values in panel.series.items():
        known = [(v, row) for row, v in zip(rows, values) if v is not None]
        axes.plot(*zip(*known), label=name, linestyle="none", markersize=5.5, **look[name])
    axes.set_yticks(list(rows), panel.labels)
    axes.set_ylim(len(panel.labels) - 0.5, -0.5)
    axes.set_xlabel(unit, fontsize=8)
    axes.set_title(panel.title, fontsize=9, color=_INK)
    top = max(v for values in panel.series.values() for v in values if v is not None)
    axes.set_xlim(0, 1.06 * max(top, roof or 0))
    if roof is not None:
        axes.axvline(roof, color=_INK, linestyle="--", linewidth=1)
    _bare(axes, grid="x")


def _bars(
    axes: Any, panel: Panel, look: dict[str, Any], unit: str, roof: float | None, across: str
) -> None:
    """A single point: one bar a backend, in order, with its figure."""
    known = [(name, values[0]) for name, values in panel.series.items() if values[0] is not None]
    known.sort(key=lambda pair: pair[1])
    top = max(value for _, value in known)
    for row, (name, value) in enumerate(known):
        axes.barh(row, value, height=0.6, color=look[name]["color"])
        axes.text(value + 0.01 * top, row, f"{value:.4g}", va="center", fontsize=8, color=_INK)
    axes.set_yticks(range(len(known)), [name for name, _ in known])
    axes.set_ylim(len(known) - 0.5, -0.5)
    axes.set_xlim(0, 1.12 * max(top, roof or 0))
    axes.set_xlabel(unit, fontsize=8)
    title = f"{panel.labels[0]}, {panel.title}" if panel.title else str(panel.labels[0])
    axes.set_title(title, fontsize=9, color=_INK)
    if roof is not None:
        axes.axvline(roof, color=_INK, linestyle="--", linewidth=1)
    _bare(axes, grid="x")


def _cut(group: Ratios) -> list[Ratios]:
    """A long block as several of about the same length."""
    count = math.ceil(len(group.points) / _TALLEST)
    size = math.ceil(len(group.points) / count)
    return [
        replace(group, points=group.points[i : i + size], cells=group.cells[i : i + size])
        for i in range(0, len(group.points), size)
    ]


def heat_map(title: str, groups: Sequence[Ratios]) -> Any:
    """Ratios as colored cells with their figures, one block a benchmark.

    Args:
        title: Of the whole picture.
        groups: The blocks, from left to right.

    Returns:
        The figure.
    """
    groups = [part for group in groups for part in _cut(group)]
    wide = [0.6 + 0.065 * max(map(len, g.points)) + max(1.1, 0.85 * len(g.rivals)) for g in groups]
    lines: list[list[int]] = []
    for i, width in enumerate(wide):
        if not lines or sum(wide[j] for j in lines[-1]) + width > _ROOM:
            lines.append([])
        lines[-1].append(i)
    heights = [0.27 * max(len(groups[i].points) for i in line) + 0.8 for line in lines]
    width = max(sum(wide[i] for i in line) for line in lines)
    figure = new_figure(max(width, 0.1 * len(title) + 0.3), sum(heights) + 0.5)
    parts = figure.subfigures(len(lines), 1, squeeze=False, height_ratios=heights)[:, 0]
    for part, line in zip(parts, lines):
        rows = max(len(groups[i].points) for i in line)
        shares = [0.85 * len(groups[i].rivals) for i in line]
        spare = width - sum(wide[i] for i in line)  # keeps cells of one size
        shares += [spare] if spare > 1 else []
        grid = part.subplots(1, len(shares), squeeze=False, width_ratios=shares)[0]
        for axes, i in zip(grid, line):
            _heat(axes, groups[i], rows)
        for axes in grid[len(line) :]:
            axes.set_visible(False)
    figure.suptitle(title, fontsize=12, fontweight="bold", color=_INK, x=0.01, ha="left")
    return figure


def _heat(axes: Any, group: Ratios, rows: int) -> None:
    from matplotlib.colors import TwoSlopeNorm

    norm = TwoSlopeNorm(0.0, vmin=-1.0, vmax=1.0)  # log2: half to twice the speed
    cells = [[math.nan if c is None else math.log2(c) for c in row] for row in group.cells]
    axes.pcolormesh(cells, cmap="RdBu", norm=norm, edgecolors="white", linewidth=1.5)
    for y, row in enumerate(group.cells):
        for x, cell in enumerate(row):
            if cell is not None:
                dark = abs(math.log2(cell)) > 0.75
                axes.text(
                    x + 0.5, y + 0.5, f"{cell:.2f}", ha="center", va="center", fontsize=8,
                    color="white" if dark else _INK,
                )  # fmt: skip
    axes.set_ylim(rows, 0)
    axes.set_xticks([x + 0.5 for x in range(len(group.rivals))], group.rivals)
    axes.set_yticks([y + 0.5 for y in range(len(group.points))], group.points)
    axes.xaxis.tick_top()
    axes.tick_params(length=0, labelsize=8, colors=_INK)
    axes.spines[:].set_visible(False)
    axes.set_title(group.title, fontsize=9, fontweight="bold", color=_INK)


def throughput(title: str, groups: Sequence[Rates]) -> Any:
    """Tokens a second of an engine by backend: the median turn, and the range of all turns.

    Args:
        title: Of the whole picture.
        groups: One for each workload.

    Returns:
        The figure.
    """
    names = list(dict.fromkeys(name for group in groups for name in group.ranges))
    look = _look(names)
    width = 0.2 + 0.07 * max(map(len, names)) + 2.9 * len(groups)
    figure = new_figure(max(width, 0.1 * len(title) + 0.3), 0.36 * len(names) + 1.5)
    grid = figure.subplots(1, len(groups), squeeze=False)[0]
    for i, (axes, group) in enumerate(zip(grid, groups)):
        for row, name in enumerate(names):
            if name in group.ranges:
                low, middle, high = group.ranges[name]
                axes.plot([low, high], [row, row], color=look[name]["color"], linewidth=2)
                axes.plot([middle], [row], markersize=6, **look[name])
            if name in group.ratios:
                text = f"{group.ratios[name]:.3f}x"
                axes.text(0.02, row, text, va="center", transform=axes.get_yaxis_transform(),
                          fontsize=8, color=_INK)  # fmt: skip
        axes.set_yticks(range(len(names)), names if i == 0 else [""] * len(names))
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xlim(0, 1.06 * max(high for _, _, high in group.ranges.values()))
        axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:g}k" if x >= 1000 else f"{x:g}")
        axes.set_xlabel("tokens/s", fontsize=8)
        axes.set_title(group.title, fontsize=9, color=_INK)
        _bare(axes, grid="x")
    figure.suptitle(title, fontsize=12, fontweight="bold", color=_INK, x=0.01, ha="left")
    return figure


def efficiency(title: str, bars: Sequence[Bar], bands: Sequence[Band]) -> Any:
    """Several GPUs: the time that was measured against one, and the efficiency that is modelled.

    Args:
        title: Of the whole picture.
        bars: Measured cases, from top to bottom.
        bands: Lines of the model, with their bounds.

    Returns:
        The figure.
    """
    figure = new_figure(9.6, max(3.0, 0.5 * len(bars) + 1.2))
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    blue, orange = COLORS["triton"], COLORS["fa3"]
    for row, bar in enumerate(bars):
        parts = ((0.0, bar.compute, blue), (bar.compute, bar.whole - bar.compute, orange))
        for start, length, color in parts:
            left.barh(row, 100 * length, left=100 * start, height=0.6, color=color)
        ideal = 100 / bar.gpus
        left.plot([ideal, ideal], [row - 0.42, row + 0.42], color=_INK, linewidth=1.5)
        text = f" {bar.efficiency:.1%}"
        left.text(100 * bar.whole, row, text, va="center", fontsize=8, color=_INK)
    left.set_yticks(range(len(bars)), [bar.label for bar in bars])
    left.set_ylim(len(bars) - 0.5, -0.5)
    left.set_xlim(0, 100 * max(bar.whole for bar in bars) * 1.2)
    left.set_xlabel("time, % of one GPU", fontsize=8)
    left.set_title("measured", fontsize=9, color=_INK)
    from matplotlib.patches import Patch

    parts = [
        Patch(color=blue, label="compute alone"),
        Patch(color=orange, label="exposed exchange"),
    ]
    left.legend(handles=parts, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2,
                frameon=False, fontsize=8)  # fmt: skip
    _bare(left, grid="x")
    for band, color in zip(bands, (blue, COLORS["cuda"])):
        low, high = ([100 * e for e in line] for line in (band.low, band.high))
        right.fill_between(band.gpus, low, high, color=color, alpha=0.2, linewidth=0)
        right.plot(band.gpus, high, color=color, linewidth=1.6, label=f"{band.label}, model")
        right.plot(band.gpus, low, color=color, linewidth=0.8)
        if band.measured:
            x, y = zip(*((n, 100 * e) for n, e in band.measured))
            right.plot(x, y, "D", color=color, markersize=6, markeredgecolor="white",
                       label=f"{band.label}, measured")  # fmt: skip
    right.set_xscale("log", base=2)
    right.set_xticks(bands[0].gpus, [str(n) for n in bands[0].gpus])
    right.minorticks_off()
    right.set_ylim(0, 108)
    right.set_xlabel("GPUs (nodes of 8)", fontsize=8)
    right.set_ylabel("efficiency, %", fontsize=8)
    right.set_title("model, between slowest and fastest exchange", fontsize=9, color=_INK)
    right.legend(frameon=False, fontsize=8, loc="lower left")
    _bare(right, grid="y")
    figure.suptitle(title, fontsize=12, fontweight="bold", color=_INK, x=0.01, ha="left")
    return figure


__all__ = ["COLORS", "efficiency", "heat_map", "new_figure", "speed", "throughput"]
