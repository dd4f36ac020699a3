"""The page about conformance, made from the reports in ``docs/results``.

``python -m attn_backends.conformance.page docs`` writes ``docs/conformance.md`` and one picture for
each folder of results into ``docs/conformance/``; ``--check`` only tells what is stale.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..bench.gallery import stored_hash
from ..registry.builtin import builtin_entries
from .checks import CHECKS
from .picture import data_hash, draw, label_of
from .report import SUITE_VERSION, matrix

_MOST_REASONS = 6
#: Expected failures that are told one by one.
_MOST_ALIKE = 12
#: Why kernels of others fail what they fail, as their sources show it.
_CAUSES = {
    "sglang_triton": (
        "One query head per KV head is decoded by a kernel of its own, which rounds each product "
        "of a query and a key to the input dtype before it is summed. Its LSE is off by as much.",
    ),
    "vllm_decode": (
        "A sequence without keys is 0 / 0 in the second stage, so its output is NaN. The engine "
        "has no such sequence, except as padding.",
        "One query head per KV head is decoded by a kernel of its own, which multiplies and sums "
        "queries and keys in the input dtype.",
        "Keys of an fp8 cache are multiplied by their scale and then rounded to the dtype of the "
        "queries, and products of float32 run in TF32.",
    ),
    "vllm_triton": (
        "The kernel returns no LSE. Where it splits sequences, one can be had from the parts it "
        "leaves in scratch; where it does not, for longer queries, without a causal mask, or in "
        "batch-invariant mode, there is none. So these calls have no state that could be merged.",
        "ALiBi is measured from where the queries begin, not from the query. That shifts all "
        "scores of a row alike: the output is right, the LSE is not.",
        "A row without keys but with a sink loses the sink from the LSE where sequences are split.",
        "Keys of an fp8 cache are multiplied by their scale and then rounded to the dtype of the "
        "queries, and products of float32 run in TF32.",
    ),
}


@dataclass(frozen=True)
class Machine:
    """The reports of one folder of results.

    Attributes:
        name: The folder's name.
        reports: As plain data; the library's own backends first.
        files: Their files, below the folder of results.
    """

    name: str
    reports: tuple[dict[str, Any], ...]
    files: tuple[str, ...]

    @property
    def title(self) -> str:
        """Where they ran."""
        gpus = {r["meta"].get("gpu", "") for r in self.reports}
        gpu = next(iter(gpus)) if len(gpus) == 1 else ""
        return f"one {gpu}" if gpu else "a CPU, kernels in Triton's interpreter"

    @property
    def heading(self) -> str:
        """The picture's heading."""
        return f"Conformance on {self.title}"


def machines(results: Path) -> list[Machine]:
    """Every folder of results with reports in it, GPUs first.

    Args:
        results: The folder with one folder for each machine.
    """
    order = list(builtin_entries())
    found = []
    for folder in sorted(p for p in results.iterdir() if p.is_dir()):
        pairs = [(path, json.loads(path.read_text())) for path in folder.glob("conformance-*.json")]
        pairs.sort(
            key=lambda pair: (
                order.index(pair[1]["backend"]) if pair[1]["backend"] in order else len(order),
                label_of(pair[1]),
            )
        )
        if pairs:
            files = tuple(f"{folder.name}/{path.name}" for path, _ in pairs)
            found.append(Machine(folder.name, tuple(r for _, r in pairs), files))
    return sorted(found, key=lambda m: (not m.reports[0]["meta"].get("gpu"), m.name))


def not_run(machine: Machine) -> list[tuple[str, dict[str, str]]]:
    """Backends and options that are worth a report, as ``variants`` says, and that have none here.

    Args:
        machine: Whose reports count; on machines without a GPU nothing is asked for.

    Returns:
        Names and options, in order.
    """
    if not machine.reports[0]["meta"].get("gpu"):
        return []
    done = [(r["backend"], r["options"]) for r in machine.reports]
    missing = []
    for name, entry in builtin_entries().items():
        variants: Sequence[dict[str, str]] = getattr(entry.load(), "variants", ({},))
        for options in variants:
            if not any(n == name and _covers(o, options) for n, o in done):
                missing.append((name, options))
    return missing


def _covers(options: dict[str, Any], variant: dict[str, str]) -> bool:
    return variant.items() <= options.items() if variant else not options


def variant_label(options: dict[str, str]) -> str:
    """Options as the tables write them."""
    return ", ".join(f"{option} {value}" for option, value in options.items())


def page(found: Sequence[Machine]) -> str:
    """The page as Markdown."""
    lines = [
        "# Conformance",
        "",
        "Every rule of the contract is a requirement with a name, and a few dozen to a few hundred",
        "calls that try it. This page is made from the reports in `docs/results/` by",
        "`python -m attn_backends.conformance.page docs`; how to hold a backend of your own to the",
        "suite is told in [Writing a backend](writing-a-backend.md#the-judge).",
        "",
        f"The suite has a version of its own, year and month: this is {SUITE_VERSION}. A newer",
        "suite may ask for more, and fail a backend that an older one passed; a requirement keeps",
        "its name for good. A result counts for the versions it names, and for no others.",
        "",
        "A case that a backend refuses is called all the same, and must be refused with the",
        "reasons that it gives; so a refusal is a kept promise, not a gap in the test. The",
        "requirement `core` cannot be refused.",
    ]
    for machine in found:
        lines += ["", *_machine(machine)]
    lines += ["", *_requirements()]
    return "\n".join(lines) + "\n"


def _machine(machine: Machine) -> list[str]:
    lines = [
        f"## On {machine.title}",
        "",
        f"![{machine.heading}](conformance/{machine.name}.png)",
        "",
        "Passed of tried, by requirement; `-` where every case was refused, nothing where a rule",
        "was not tried on this device or at this level.",
        "",
        matrix({**r, "backend": label_of(r)} for r in machine.reports).strip(),
    ]
    if missing := not_run(machine):
        named = [f"`{name}` {variant_label(options)}".strip() for name, options in missing]
        lines += ["", f"Not run here: {'; '.join(named)}."]
    own = set(builtin_entries())
    strangers = [r for r in machine.reports if r["backend"] not in own]
    for report, file in zip(machine.reports, machine.files):
        if strangers and report is strangers[0]:
            lines += [
                "",
                "### Backends nobody here wrote",
                "",
                "Kernels of serving engines behind thin adapters, `docs/examples/strangers`, which",
                "translate arguments and mend nothing; the suite tries the adapters themselves",
                "around kernels that compute rightly. What fails is what a caller of those kernels",
                "has to know, or to work around.",
            ]
        lines += ["", *_report(report, file)]
    return lines


def _report(report: dict[str, Any], file: str) -> list[str]:
    meta = report["meta"]
    counts = ", ".join(f"{n} {status}" for status, n in report["counts"].items() if n)
    facts = {k: meta.get(k) for k in ("date", "driver", "python", "torch", "triton", "commit")}
    facts |= meta.get("packages", {})
    library = meta.get("library")
    computed = f"computed by {library['name']} {library['version']}, " if library else ""
    lines = [
        f"#### `{label_of(report)}`",
        "",
        f"**{'Conforms' if report['ok'] else 'Does not conform'}** at level {report['level']}:",
        f"{counts}; {computed}suite {report['suite_version']}, attn_backends "
        f"{report['library_version']}.",
        "",
        f"[{file.rpartition('/')[2]}](results/{file}), by `{meta.get('command', '')}`;",
        f"{', '.join(f'{k} {v}' for k, v in facts.items() if v)}.",
    ]
    for title, status in (("Fails", "failed"), ("Fails as expected", "xfailed")):
        rows = [r for r in report["failures"] if r["status"] == status]
        if rows:
            lines += ["", f"{title}:", "", *_failures(rows)]
    causes = _CAUSES.get(report["backend"], ()) if report["failures"] else ()
    if causes:
        lines += ["", "Why, from the kernels' sources:", "", *(f"- {cause}" for cause in causes)]
    if report["refusals"]:
        lines += ["", *_refusals(report["refusals"])]
    return lines


def _failures(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each; for many that were expected for one reason, a line for the reason."""
    lines = []
    reasons: dict[str, list[str]] = {}
    for row in rows:
        case = f"`{row['requirement']}/{row['case']}`"
        if row["status"] == "xfailed":
            reasons.setdefault(row["detail"].partition(" [")[0], []).append(case)
        lines.append(f"- {case} ({row['spec']}): {_text(row['detail'])}")
    if len(rows) <= _MOST_ALIKE or not reasons:
        return lines
    return [
        f"- {len(cases)} cases, among them {', '.join(cases[:3])}: {_text(reason)}"
        for reason, cases in reasons.items()
    ]


def _refusals(refusals: list[dict[str, Any]]) -> list[str]:
    """The reasons given most often."""
    most = refusals[:_MOST_REASONS]
    more = (
        f", the {len(most)} most frequent of {len(refusals)}" if len(refusals) > len(most) else ""
    )
    lines = [f"Refuses{more}:", ""]
    return lines + [f"- {_times(r['count'])} `{_text(r['reason'])}`" for r in most]


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _text(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _requirements() -> list[str]:
    lines = ["## The requirements", "", "| requirement | rule | cases, smoke | cases, full |",
             "| --- | --- | ---: | ---: |"]  # fmt: skip
    for check in CHECKS:
        counts = [len(check.cases(level)) for level in ("smoke", "full")]
        only = f" (tried on {', '.join(check.devices)})" if check.devices else ""
        rule = f"{_text(check.rule)}{only}"
        lines.append(f"| `{check.requirement}` | {rule} | {counts[0]} | {counts[1]} |")
    return lines


def stale(docs: Path) -> list[str]:
    """What does not fit the results: the page, or a picture."""
    found = machines(docs / "results")
    problems = []
    for machine in found:
        picture = docs / "conformance" / f"{machine.name}.png"
        if not picture.exists():
            problems.append(f"{picture.name} is missing")
        elif stored_hash(picture) != data_hash(machine.reports, machine.heading):
            problems.append(f"{picture.name} shows other data")
    names = {f"{m.name}.png" for m in found}
    left = sorted(p.name for p in (docs / "conformance").glob("*.png") if p.name not in names)
    problems += [f"{name} is of no results" for name in left]
    index = docs / "conformance.md"
    if not index.exists() or index.read_text(encoding="utf-8") != page(found):
        problems.append("conformance.md is not what the results give")
    return problems


def write(docs: Path) -> None:
    """Write the page, and the pictures whose data changed."""
    found = machines(docs / "results")
    for machine in found:
        picture = docs / "conformance" / f"{machine.name}.png"
        wanted = data_hash(machine.reports, machine.heading)
        if not picture.exists() or stored_hash(picture) != wanted:
            draw(machine.reports, picture, machine.heading)
    for picture in (docs / "conformance").glob("*.png"):
        if picture.stem not in {m.name for m in found}:
            picture.unlink()
    (docs / "conformance.md").write_text(page(found), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(prog="python -m attn_backends.conformance.page")
    parser.add_argument("docs", type=Path, help="the folder of documents, with results in it")
    parser.add_argument("--check", action="store_true", help="only tell what is stale")
    given = parser.parse_args(arguments)
    if not given.check:
        write(given.docs)
    problems = stale(given.docs)
    print("\n".join(problems) or "fresh")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

__all__ = ["Machine", "machines", "main", "not_run", "page", "stale", "variant_label", "write"]
