"""What a run found: rows, counts, and their forms as JSON and Markdown."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..packages import installed_version
from ..provenance import provenance
from ..version import __version__

#: The suite's own version. A newer suite may fail a backend that an older one passed.
SUITE_VERSION = "2026.11"
STATUSES = ("passed", "refused", "failed", "xfailed")


@dataclass(frozen=True)
class Row:
    """One check on one case.

    Attributes:
        requirement: The rule.
        case: Name of the case.
        spec: The spec in a few letters.
        status: Of ``STATUSES``.
        detail: Reasons of a refusal, or what went wrong.
        seconds: Time it took, compiling included.
    """

    requirement: str
    case: str
    spec: str
    status: str
    detail: str = ""
    seconds: float = 0.0


def option_words(options: Mapping[str, Any]) -> list[str]:
    """Chosen options in a word each: their values, and the names of those that are on or off."""
    switches = {name: name if value else f"no_{name}" for name, value in options.items()}
    return [switches[n] if isinstance(v, bool) else str(v) for n, v in options.items()]


@dataclass(frozen=True)
class Report:
    """All rows of one backend on one device.

    Attributes:
        backend: Its name.
        level: ``smoke`` or ``full``.
        device: Where it ran.
        rows: One per check and case.
        stale: Expected failures that no longer fail, or that are about no case.
        meta: Versions, device, date and command.
        seconds: Time of the whole run.
        options: The backend's options that were chosen; others had their defaults.
    """

    backend: str
    level: str
    device: str
    rows: tuple[Row, ...]
    stale: tuple[str, ...] = ()
    meta: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The backend and the values of its chosen options, as files are named."""
        words = [self.backend, *option_words(self.options)]
        return "-".join(re.sub(r"[^A-Za-z0-9_.]+", "_", word) for word in words)

    @property
    def ok(self) -> bool:
        """Whether the backend conforms: the core ran, nothing failed, nothing is stale."""
        core = any(r.requirement == "core" and r.status == "passed" for r in self.rows)
        return core and not self.failures and not self.stale

    @property
    def failures(self) -> list[Row]:
        """Rows that failed, expected failures aside."""
        return [r for r in self.rows if r.status == "failed"]

    def counts(self, requirement: str | None = None) -> dict[str, int]:
        """Rows by status, of one requirement or of all.

        Args:
            requirement: Its name; None counts all rows.

        Returns:
            A count for each of ``STATUSES``.
        """
        found = Counter(
            r.status for r in self.rows if requirement is None or r.requirement == requirement
        )
        return {status: found[status] for status in STATUSES}

    @property
    def requirements(self) -> list[str]:
        """Requirements that were tried, in order."""
        return list(dict.fromkeys(r.requirement for r in self.rows))

    def refusals(self) -> dict[str, int]:
        """How often each reason was given, most frequent first."""
        return dict(Counter(r.detail for r in self.rows if r.status == "refused").most_common())

    def to_json(self) -> dict[str, Any]:
        """The report as plain data, as ``docs/results`` keeps it."""
        return {
            "meta": self.meta,
            "backend": self.backend,
            "options": self.options,
            "library_version": __version__,
            "suite_version": SUITE_VERSION,
            "level": self.level,
            "device": self.device,
            "ok": self.ok,
            "seconds": round(self.seconds, 1),
            "counts": self.counts(),
            "requirements": {name: self.counts(name) for name in self.requirements},
            "refusals": [
                {"reason": reason, "count": count} for reason, count in self.refusals().items()
            ],
            "failures": [_plain(r) for r in self.rows if r.status in ("failed", "xfailed")],
            "stale": list(self.stale),
        }

    def write(self, folder: str | Path) -> Path:
        """Write ``conformance-<label>.json`` into a folder.

        Args:
            folder: Where; it is made if it is not there.

        Returns:
            The path of the file.
        """
        path = Path(folder) / f"conformance-{self.label}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n")
        return path

    def summary(self) -> str:
        """The verdict and every failure, for people."""
        counts = ", ".join(f"{n} {status}" for status, n in self.counts().items() if n)
        lines = [f"{self.backend} on {self.device}, {self.level}: {counts or 'nothing ran'}"]
        for row in self.failures:
            lines.append(f"  {row.requirement}/{row.case} [{row.spec}]: {row.detail}")
        lines += [f"  stale expected failure: {pattern}" for pattern in self.stale]
        if not any(r.requirement == "core" and r.status == "passed" for r in self.rows):
            lines.append("  the core did not pass: nothing else counts")
        return "\n".join(lines)

    def to_markdown(self) -> str:
        """A page: verdict, table by requirement, failures, and the reasons of every refusal."""
        meta = ", ".join(f"{k} {v}" for k, v in self.meta.items() if isinstance(v, str) and v)
        lines = [
            f"# Conformance of `{self.backend}`",
            "",
            f"{'Conforms' if self.ok else 'Does not conform'} at level {self.level} on "
            f"{self.device}; suite {SUITE_VERSION}, attn_backends {__version__}.",
            "",
            meta,
            "",
            "| requirement | passed | refused | failed | expected failures |",
            "| --- | ---: | ---: | ---: | ---: |",
        ]
        for name in self.requirements:
            counts = self.counts(name).values()
            lines.append(f"| {name} | " + " | ".join(map(str, counts)) + " |")
        for title, status in (("Failures", "failed"), ("Expected failures", "xfailed")):
            rows = [r for r in self.rows if r.status == status]
            if rows:
                lines += ["", f"## {title}", ""]
                lines += [f"- `{r.requirement}/{r.case}` ({r.spec}): {r.detail}" for r in rows]
        refusals = self.refusals()
        if refusals:
            lines += ["", "## Refusals", "", "| reason | cases |", "| --- | ---: |"]
            lines += [f"| {_cell(reason)} | {count} |" for reason, count in refusals.items()]
        return "\n".join(lines) + "\n"


def matrix(reports: Iterable[dict[str, Any]]) -> str:
    """A Markdown matrix, backend by requirement, from reports as plain data.

    A cell reads ``passed/tried``; ``-`` means that all cases were refused.

    Args:
        reports: What ``Report.to_json`` gives, one for each column.

    Returns:
        The table, with a row for each requirement.
    """
    reports = list(reports)
    names = list(dict.fromkeys(name for r in reports for name in r["requirements"]))
    lines = [
        "| requirement | " + " | ".join(f"`{r['backend']}`" for r in reports) + " |",
        "| --- |" + " ---: |" * len(reports),
    ]
    for name in names:
        cells = [_matrix_cell(r["requirements"].get(name)) for r in reports]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _matrix_cell(counts: dict[str, int] | None) -> str:
    if counts is None:
        return ""
    tried = sum(counts.values()) - counts["refused"]
    return f"{counts['passed']}/{tried}" if tried else "-"


def _plain(row: Row) -> dict[str, Any]:
    keys = ("requirement", "case", "spec", "status", "detail")
    return {key: getattr(row, key) for key in keys}


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def environment(device: torch.device, backend: Any = None, options: Any = None) -> dict[str, Any]:
    """Versions, device, date and command: what a result is worth nothing without.

    Args:
        device: Where calls run.
        backend: The backend's class. Those of its ``packages`` that are installed are listed with
            the common ones, and what its class method ``versions``, if it has one, returns
            (package to version). What its class method ``library`` returns, a package and its
            version, is what computed.
        options: The options it was run with.
    """
    found = provenance(_run_command(), device)
    own = {name: installed_version(name) for name in getattr(backend, "packages", ())}
    found["packages"] |= {name: version for name, version in own.items() if version}
    found["packages"] |= getattr(backend, "versions", dict)()
    served = backend.library(options, device) if hasattr(backend, "library") else None
    if served is not None:
        found["library"] = {"name": served[0], "version": served[1]}
    return found


def _run_command() -> str:
    """The command that runs, without the paths of this machine."""
    program = Path(sys.argv[0]).name
    words = ["python", "-m", __package__] if program == "__main__.py" else [program]
    given = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    return shlex.join([*words, *given])


__all__ = ["STATUSES", "SUITE_VERSION", "Report", "Row", "environment", "matrix", "option_words"]
