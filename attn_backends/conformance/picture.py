"""The matrix of backends and requirements as a picture that does not depend on telling colors."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import InvalidInputError
from .report import option_words

#: Goes up when pictures should be drawn anew though their data did not change.
DRAWING = 3
#: By state: color, mark before the numbers, and what the legend says. Colors are Okabe and Ito's,
#: of different lightness, and a cell can be told by its text alone.
STATES = {
    "passed": ("#8fcfb8", "", "all cases passed"),
    "partly": ("#e3f1b8", "", "passed, (n) refused"),
    "refused": ("#dcdcdc", "-", "all cases refused, with reasons"),
    "expected": ("#e69f00", "○", "failed as expected"),
    "failed": ("#d55e00", "✗", "cases failed"),
    "absent": ("#ffffff", "", "not tried here"),
}
Counts = Mapping[str, int]


def label_of(report: Mapping[str, Any]) -> str:
    """A backend, its chosen options, and the version of the library that computed."""
    library = report.get("meta", {}).get("library")
    version = [] if library is None else [library["version"]]
    words = option_words(report.get("options", {}))
    return " ".join([report["backend"], *words, *version])


def state_of(counts: Counts | None) -> str:
    """Which of ``STATES`` a requirement is in."""
    if not counts or not sum(counts.values()):
        return "absent"
    if counts["failed"]:
        return "failed"
    if counts["xfailed"]:
        return "expected"
    if not counts["passed"]:
        return "refused"
    return "partly" if counts["refused"] else "passed"


def text_of(counts: Counts | None) -> str:
    """What a cell says: the mark of its state, passed of tried, and in brackets the refused."""
    state = state_of(counts)
    mark = STATES[state][1]
    if counts is None or state in ("absent", "refused"):
        return mark
    tried = sum(counts.values()) - counts["refused"]
    refused = f" ({counts['refused']})" if counts["refused"] else ""
    return f"{mark} {counts['passed']}/{tried}{refused}".strip()


def requirements_of(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every requirement that any report tried, in order."""
    return list(dict.fromkeys(name for r in reports for name in r["requirements"]))


def data_hash(reports: Sequence[Mapping[str, Any]], title: str) -> str:
    """SHA-256 of what a picture shows; it goes into the picture."""
    shown = [[label_of(r), r["level"], r["ok"], r["requirements"]] for r in reports]
    text = json.dumps([DRAWING, title, shown], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def figure_of(reports: Sequence[Mapping[str, Any]], title: str) -> Any:
    """The picture as a matplotlib figure.

    Raises:
        InvalidInputError: There is nothing to show.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    names = requirements_of(reports)
    if not names:
        raise InvalidInputError.of("reports", "none that tried anything", "at least one")
    wide, high = len(reports), len(names)
    figure = Figure(figsize=(2.9 + 1.15 * wide, 1.9 + 0.29 * high), layout="constrained", dpi=130)
    axes = figure.add_subplot()
    used = set()
    for x, report in enumerate(reports):
        for y, name in enumerate(names):
            counts = report["requirements"].get(name)
            state = state_of(counts)
            used.add(state)
            box = {"facecolor": STATES[state][0], "edgecolor": "white", "linewidth": 2}
            axes.add_patch(_square(x, y, box))
            bold: dict[str, Any] = {"color": "white", "fontweight": "bold"}
            strong = bold if state == "failed" else {}
            axes.text(x, y, text_of(counts), ha="center", va="center", fontsize=8, **strong)
    axes.set(xlim=(-0.5, wide - 0.5), ylim=(high - 0.5, -0.5), yticks=range(high))
    axes.set_yticklabels(names, fontsize=8.5)
    axes.xaxis.tick_top()
    axes.set_xticks(range(wide))
    verdicts = ("does not conform", "conforms")
    heads = [f"{label_of(r)}\n{r['level']}: {verdicts[r['ok']]}" for r in reports]
    axes.set_xticklabels(heads, fontsize=8.5, rotation=32, ha="left", rotation_mode="anchor")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    patches = [
        Patch(facecolor=color, edgecolor="#888888", label=f"{mark} {words}".strip())
        for state, (color, mark, words) in STATES.items()
        if state in used
    ]
    figure.suptitle(title, fontsize=11)
    figure.legend(
        handles=patches, loc="outside lower center", ncols=min(3, len(patches)), fontsize=8
    )
    return figure


def _square(x: int, y: int, style: dict[str, Any]) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.5, y - 0.5), 1, 1, **style)


def draw(
    reports: Sequence[Mapping[str, Any]], path: str | os.PathLike[str], title: str = "Conformance"
) -> Path:
    """Write the picture; the ending of ``path`` decides the format.

    Args:
        reports: Reports as plain data, see ``Report.to_json``.
        path: A picture to write: png, svg, pdf.
        title: Its heading.

    Returns:
        The path.

    Raises:
        InvalidInputError: There is nothing to show, or the format is unknown.
    """
    target = Path(path)
    figure = figure_of(reports, title)
    formats = sorted(figure.canvas.get_supported_filetypes())
    kind = target.suffix.lstrip(".").lower()
    if kind not in formats:
        raise InvalidInputError.of("plot", str(path), f"a name that ends in {', '.join(formats)}")
    target.parent.mkdir(parents=True, exist_ok=True)
    known = {"Data-SHA256": data_hash(reports, title), "Software": None} if kind == "png" else {}
    figure.savefig(target, metadata=known or None)
    return target


__all__ = ["STATES", "data_hash", "draw", "figure_of", "label_of", "requirements_of", "state_of",
           "text_of"]  # fmt: skip
