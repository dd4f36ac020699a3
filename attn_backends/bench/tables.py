"""The tables of ``docs/performance.md``, written from the files in ``docs/results``.

``python -m attn_backends.bench.tables docs/performance.md`` rewrites each table between its
markers, ``<!-- results: PATH -->`` and ``<!-- end of results -->``, from the file at PATH beside
the page.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from . import hopper_tables

_TABLE = re.compile(r"(<!-- results: (\S+) -->\n).*?(<!-- end of results -->)", re.DOTALL)
_WIDE = 12  # columns of times that a page can hold
_FACTS = ("command", "date", "gpu", "driver", "torch", "triton", "commit", "note")


def table(results: dict[str, Any]) -> str:
    """One results file as Markdown: where it comes from, then its rows."""
    if "environment" in results:
        return "\n".join(_doctor(results))
    meta = results["meta"]
    facts = [f"{name} {meta[name]}" for name in _FACTS[1:] if meta.get(name)]
    facts += [f"{name} {version}" for name, version in meta.get("packages", {}).items() if version]
    lines = [f"`{meta['command']}`", "", ", ".join(facts) + ".", ""]
    rows = results.get("rows", [])
    if meta["command"].startswith("python -m attn_backends.bench.hopper"):
        return "\n".join([*lines, *_joined(hopper_tables.parts(results))])
    if "counts" in results:
        return "\n".join([*lines, *_counts(results)])
    return "\n".join([*lines, *(_tests(rows) if rows[0]["bench"] == "tests" else _rows(rows))])


def _doctor(results: dict[str, Any]) -> list[str]:
    """What ``attn-backends doctor`` found, for the devices that a backend takes."""
    known, checks = results["environment"], []
    facts = {"gpu": ", ".join(gpu["name"] for gpu in known["gpus"]), **known, **known["packages"]}
    facts |= {name: results.get(name) for name in ("date", "commit")}
    names: tuple[str, ...] = ("date", "gpu", "driver", "torch", "triton", "commit")
    for backend in results["backends"]:
        facts |= {n: v for n, v in backend["versions"].items() if v and n not in facts}
        names = (*names, *(n for n in backend["versions"] if n in facts and n not in names))
        builds: dict[str, list[dict[str, Any]]] = {}
        for check in backend["checks"]:
            chosen = ",".join(f"{k}={v}" for k, v in check.get("options", {}).items())
            builds.setdefault(f":{chosen}" if chosen else "", []).append(check)
        for chosen, found in (builds or {"": []}).items():
            ran = [c for c in found if c["status"] in ("PASS", "FAIL")]
            failed = any(c["status"] == "FAIL" for c in ran)
            own = "FAIL" if failed else "PASS" if ran else "unavailable"
            checks.append(
                {
                    "backend": f"{backend['name']}{chosen}",
                    "result": own if chosen else backend["status"],
                    "calls": "; ".join(f"{c['device']}, {c['phase']}: {c['status']}" for c in ran),
                    "why not": "; ".join(backend["reasons"]).replace("|", "\\|"),
                }
            )
    if not any(row["why not"] for row in checks):
        checks = [{k: v for k, v in row.items() if k != "why not"} for row in checks]
    said = ", ".join(f"{name} {facts[name]}" for name in names if facts.get(name))
    return ["`attn-backends doctor --json`", "", f"{said}.", "", *_markdown(checks)]


def _joined(tables: list[list[dict[str, Any]]]) -> list[str]:
    """Several tables, with an empty line between."""
    first, *others = (_markdown(rows) for rows in tables)
    return [*first, *(line for rows in others for line in ["", *rows])]


def _counts(results: dict[str, Any]) -> list[str]:
    counts = results["counts"]
    return _markdown([{"backend": results["backend"], "level": results["level"], **counts}])


def _tests(rows: list[dict[str, Any]]) -> list[str]:
    return _markdown([{"command": f"`{r['command']}`", **_kept(r)} for r in rows])


def _kept(row: dict[str, Any]) -> dict[str, Any]:
    return {k: row[k] for k in ("passed", "failed", "skipped", "seconds") if k in row}


def _rows(rows: list[dict[str, Any]]) -> list[str]:
    if rows[0]["bench"] == "generate":
        return _markdown([{k: v for k, v in r.items() if k != "bench"} for r in rows])
    if rows[0]["bench"].endswith(("_tokens", "_throughput")):
        return _engine(rows)
    if rows[0]["bench"] == "adapter-overhead":
        return _overheads(rows)
    grouped: dict[tuple[str, str, str], dict[str, float]] = {}
    for r in rows:
        if not r.get("right", True):
            continue  # no speed without a right answer
        key = (r["bench"], _shape(r["case"]), r["mode"])
        grouped.setdefault(key, {})[r["backend"]] = r["median_us"]
    names = list(dict.fromkeys(name for times in grouped.values() for name in times))
    if len(names) > _WIDE:
        return _turned(names, grouped)
    return _markdown(
        [
            {
                "bench": bench,
                "shape": shape,
                "mode": mode,
                **{f"{n}, us": times.get(n, "") for n in names},
            }
            for (bench, shape, mode), times in grouped.items()
        ]
    )


def _overheads(rows: list[dict[str, Any]]) -> list[str]:
    """Host time of an adapter beside the call that it makes."""
    return _markdown(
        [
            {
                "backend": f"`{r['backend']}`",
                "library": r["library"],
                "phase": r["phase"],
                "library, us": r["direct_us"],
                "adapter, us": r["ours_us"],
                "added, us": f"{r['overhead_us']} ({r['p25_us']} to {r['p75_us']})",
                "copies alone, us": r.get("copies_us", ""),
                f"< {r['aim_us']:g} us": "yes" if r["met"] else "no",
            }
            for r in rows
            if r["right"]
        ]
    )


def _turned(names: list[str], grouped: dict[tuple[str, str, str], dict[str, float]]) -> list[str]:
    """A row for each backend and a column for each point: many variants over few shapes."""
    return _markdown(
        [
            {
                "variant": name,
                **{
                    f"{shape}, {mode}, us": times.get(name, "")
                    for (_, shape, mode), times in grouped.items()
                },
            }
            for name in names
        ]
    )


def _engine(rows: list[dict[str, Any]]) -> list[str]:
    """Runs of a whole engine: agreement of tokens, then throughput with its range over turns."""
    tokens = [
        {
            "model": f"{r['case']['model']}, {r['case']['dtype']}",
            "backend": r["backend"],
            "against": r["reference"],
            "equal sequences": f"{r['equal_sequences']} of {r['sequences']}",
            "tokens before a difference": f"{100 * r['equal_tokens']:.1f} %",
            **_same_text(r),
            **(_float32(r) or _logits(r)),
        }
        for r in rows
        if r["bench"].endswith("_tokens")
    ]
    rates: dict[tuple[str, str], dict[str, str]] = {}
    for r in rows:
        if r["bench"].endswith("_throughput"):
            row = rates.setdefault((r["case"]["model"], r["case"]["workload"]), {})
            row[f"{r['backend']}, tokens/s"] = (
                f"{r['tokens_per_s']:.0f} ({r['slowest']:.0f} to {r['fastest']:.0f})"
            )
            if r.get("ratio") and r["backend"] != r["reference"]:
                row[f"{r['backend']} / {r['reference']} within a turn"] = (
                    f"{r['ratio']:.3f} ({r['ratio_p25']:.3f} to {r['ratio_p75']:.3f})"
                )
    speed = [{"model": m, "workload": w, **row} for (m, w), row in rates.items()]
    # Rows with the same columns are one table: a dtype may be measured in another way than others.
    tables: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in tokens:
        tables.setdefault(tuple(row), []).append(row)
    lines = [line for each in [*tables.values(), speed] if each for line in ["", *_markdown(each)]]
    return lines[1:]


def _logits(row: dict[str, Any]) -> dict[str, str]:
    """How near tokens were, where the engines gave log-probabilities."""
    if "max_gap" not in row:
        return {}
    return {
        "largest gap of logits there": f"{row['max_gap']:.3g}",
        "largest difference of a logprob": f"{row['max_logprob_difference']:.3g}",
    }


def _float32(row: dict[str, Any]) -> dict[str, str]:
    """Choices and gaps beside float32, of the backend and of its reference."""
    if "float32" not in row:
        return {}
    own, theirs = row["float32"], row["reference_float32"]

    def both(name: str) -> str:
        return f"{own[name]:.3g} ({theirs[name]:.3g})"

    return {
        "not float32's choice (reference)": f"{own['other_choice']} of {own['steps']} "
        f"({theirs['other_choice']} of {theirs['steps']})",
        "most given up by one": both("given_up_max"),
        "error of a gap, median": both("gap_error_median"),
        "largest": both("gap_error_max"),
    }


def _same_text(row: dict[str, Any]) -> dict[str, str]:
    """Steps under the reference's text, where they were compared."""
    if "parted" not in row:
        return {}
    # Noise of 0: the reference's answers do not depend on the batch, which tells nothing.
    decided = f"{row['decided_parted']} of {row['decided_steps']}" if row.get("noise") else ""
    return {
        "other choice under the same text": f"{row['parted']} of {row['steps']} steps",
        "at exact ties": str(row["parted_at_ties"]),
        "at decided steps": decided,
        "largest move of a gap": f"{row['gap_moved_max']:.3g}",
    }


def _shape(case: dict[str, Any]) -> str:
    if "tokens" in case:
        text = f"{case['tokens']} tokens, {case['num_heads']} heads, D {case['head_dim']}"
        extra = [f"{k} {v}" for k, v in case.items() if k in ("states", "empty") and v]
        extra += ["lse [H, T]"] if case.get("lse_layout") == "head" else []
        return ", ".join([text, case["dtype"], *extra])
    text = f"{case['batch']} x {case['q_len']} over {case['kv_len']}"
    text += " ragged" if case.get("ragged") else ""
    text += f", {case['prefix']} of them shared" if "prefix" in case else ""
    heads = f"{case['num_heads']}/{case['num_kv_heads']} heads, D {case['head_dim']}"
    page = case.get("page_size")
    text = f"{text}, {heads}, {f'page {page}' if page else 'ragged keys'}"
    kv = case.get("kv_dtype", case.get("dtype"))
    return text if kv == case.get("dtype") else f"{text}, {kv} cache"


def _markdown(rows: list[dict[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    return [*lines, *("| " + " | ".join(str(r.get(n, "")) for n in names) + " |" for r in rows)]


def rewrite(page: Path) -> str:
    """The text of a page with every table made anew."""

    def made(match: re.Match[str]) -> str:
        results = json.loads((page.parent / match[2]).read_text())
        return f"{match[1]}\n{table(results)}\n\n{match[3]}"

    return _TABLE.sub(made, page.read_text())


def main(paths: list[str]) -> None:
    """Rewrite the tables of each page."""
    for page in map(Path, paths):
        page.write_text(rewrite(page))


if __name__ == "__main__":
    main(sys.argv[1:])
