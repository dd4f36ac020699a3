"""Results of the Hopper benchmark as Markdown: aims with their ratios, then rates at each point."""

from __future__ import annotations

from typing import Any

#: Peers, in the order of their columns; what else was measured is a variant of ours.
PEERS = ("fa3", "fa3 varlen", "fa3 paged", "flashinfer-fa2", "flashinfer-fa3", "cudnn")


def aims(gates: list[dict[str, Any]]) -> list[dict[str, str]]:
    """One row per aim: the ratio with its quartiles, and whether it reaches what was asked."""
    rows = []
    for g in gates:
        found = "not measured: " + g["why"] if "why" in g else f"{g['ratio']:.3f}"
        if "ratio" in g:
            found += f" ({g['p25']:.3f} to {g['p75']:.3f})"
        rows.append({
            "point": g["point"], "peer": g.get("measured", g["peer"]),
            "times as fast": found, "asked": f"{g['asked']:.2f}",
            "met": {True: "yes", False: "no", None: ""}[g["met"]],
        })  # fmt: skip
    return rows


def rates(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    """One row per point: TFLOP/s of the variant that ships, of the fastest one, and of peers."""
    points: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.get("mode") == "graph_cold" and "tflops" in row:
            points.setdefault(row["case"]["name"], {})[row["backend"]] = row["tflops"]
    peers = [name for name in PEERS if any(name in found for found in points.values())]
    table = []
    for point, found in points.items():
        own = {name: rate for name, rate in found.items() if name not in PEERS}
        best = max(own, key=lambda name: own[name], default="")
        table.append({
            "point": point,
            "ours": f"{found['chosen']:.0f}" if "chosen" in found else "",
            "fastest variant": f"{own[best]:.0f} ({best})" if best else "",
            **{name: f"{found[name]:.0f}" if name in found else "" for name in peers},
        })  # fmt: skip
    return table


def variants(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    """One row per variant of ours: TFLOP/s at each point; empty if only ``chosen`` was measured."""
    own: dict[str, dict[str, str]] = {}
    for row in rows:
        if row.get("mode") == "graph_cold" and "tflops" in row and row["backend"] not in PEERS:
            found = own.setdefault(row["backend"], {"variant": row["backend"]})
            found[row["case"]["name"]] = f"{row['tflops']:.0f}"
    return list(own.values()) if len(own) > 1 else []


def host(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    """One row per way of launching: host microseconds."""
    return [
        {"batch": r["case"]["name"], "call": r["backend"], "host, us": f"{r['median_us']:.1f}"}
        for r in rows
        if r.get("mode") == "host"
    ]


def counters(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    """One row per kernel and point: what the hardware counted."""
    return [
        {"point": r["case"]["name"], "kernel": r["backend"],
         **{name: f"{value:.4g}" for name, value in r["counters"].items()}}
        for r in rows
        if r.get("mode") == "counters"
    ]  # fmt: skip


def checks(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    """One row per group of checks: how many passed, and the largest error against its bound."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    table = []
    for name, found in groups.items():
        passed = [r for r in found if r["status"] == "passed"]
        worst = max((max(r["o"], r["lse"]) for r in passed), default=float("nan"))
        table.append({
            "group": name, "passed": f"{len(passed)} of {len(found)}",
            "largest error / bound": f"{worst:.2f}",
        })  # fmt: skip
    return table


def parts(results: dict[str, Any]) -> list[list[dict[str, str]]]:
    """The tables of a results file, those with rows."""
    rows = results.get("rows", [])
    found = [
        aims(results.get("gates", [])), rates(rows), variants(rows), host(rows),
        counters(rows), checks(results.get("checks", [])),
    ]  # fmt: skip
    return [table for table in found if table]


__all__ = ["aims", "checks", "counters", "host", "parts", "rates", "variants"]
