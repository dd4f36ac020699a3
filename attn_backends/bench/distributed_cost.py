"""Tables about context parallelism, made from the results of its benchmark.

    python -m attn_backends.bench.distributed_cost docs/context-parallelism.md

A page holds ``<!-- measured: PATH -->`` or ``<!-- model: PATH -->`` and ``<!-- end of PATH -->``,
the file at PATH beside the page. What stands between is made anew, and says so where nothing was
measured yet.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..distributed.cost import Cost, Link, Pieces, decode_cost, ring_cost
from .tables import _markdown

#: Between nodes, per GPU: an assumption, one network card of 400 Gbit/s.
NETWORK = Link(latency_us=10.0, gbps=50.0)
SIZES = {"bf16": 2, "fp32": 4}
_ISSUED = {"eager": "issued by Python", "graph": "from a graph"}
_TABLE = re.compile(r"(<!-- (measured|model): (\S+) -->\n).*?(<!-- end of \3 -->)", re.DOTALL)

Rows = list[dict[str, Any]]


def ring_pieces(rows: Rows, mode: str = "eager") -> Pieces | None:
    """What the model needs to know of ring prefill.

    Args:
        rows: Of the results file of ``bench.distributed``.
        mode: Whether hops are issued by Python (``eager``) or from a graph (``graph``).

    Returns:
        The pieces; None where hops were not measured so.
    """
    link = _link(rows, "ring-hop", "exchange of a shard", mode)
    if link is None:
        return None
    compute = _compute(rows, "ring-piece")
    case = next(r["case"] for r in rows if r["bench"] == "ring-piece")
    lanes = case["num_kv_heads"] * case["head_dim"] * 2
    size = case["batch"] * case["kv_len"] * lanes * SIZES[case["dtype"]]
    return Pieces(compute, size, link, NETWORK)


def decode_pieces(rows: Rows) -> Pieces:
    """What the model needs to know of sharded decode of one token.

    Args:
        rows: Of the results file of ``bench.distributed``.
    """
    name = "exchange all_gather"
    state = min(r["bytes"] for r in rows if r["bench"] == "cp-exchange" and r["backend"] == name)
    link = _link(rows, "cp-exchange", name, "graph") or _link(rows, "cp-exchange", name, "eager")
    assert link is not None
    return Pieces(_compute(rows, "cp-decode-piece"), state, link, NETWORK)


def _compute(rows: Rows, bench: str) -> dict[int, float]:
    """Compute of one GPU among n: inside a graph, where it was measured so."""
    found: dict[int, float] = {}
    for mode in ("eager", "graph"):
        found |= {
            r["gpus"]: r["median_us"] for r in rows if r["bench"] == bench and r["mode"] == mode
        }
    return found


def _link(rows: Rows, bench: str, name: str, mode: str) -> Link | None:
    """The link that explains the smallest and the largest exchange of a mode."""
    found = {
        r["bytes"]: r["median_us"] / r["hops"]
        for r in rows
        if r["bench"] == bench and r["backend"] == name and r["mode"] == mode
    }
    if len(found) < 2:
        return None
    small, large = min(found), max(found)
    return Link.fit((small, found[small]), (large, found[large]))


def model_table(rows: Rows) -> list[str]:
    """Costs on every number of GPUs that compute was measured for: what is slowest, and fastest."""
    rings = {mode: ring_pieces(rows, mode) for mode in ("eager", "graph")}
    decode = decode_pieces(rows)
    lines = []
    for gpus in sorted(decode.compute_us):
        ring = [ring_cost(pieces, gpus) for pieces in rings.values() if pieces]
        states = [decode_cost(decode, gpus, how) for how in ("ring", "at once")]
        line: dict[str, Any] = {"GPUs": gpus}
        line |= _columns("prefill", ring, 1e3, "ms") | _columns("decode", states, 1.0, "us")
        lines.append(line)
    named = {f"hop of the ring, {_ISSUED[m]}": p.node for m, p in rings.items() if p}
    named |= {"exchange of states": decode.node, "between nodes (assumed)": NETWORK}
    links = [
        f"{what}: {link.latency_us:.0f} us + bytes / {link.gbps:.0f} GB/s"
        for what, link in named.items()
    ]
    return [f"Links: {'; '.join(links)}.", "", *_markdown(lines), "", *_held(rows, lines)]


def _held(rows: Rows, lines: list[dict[str, Any]]) -> list[str]:
    """The model beside what was measured, for as many GPUs as there were."""
    found = []
    by_gpus = {line["GPUs"]: line for line in lines}
    pairs = (
        ("prefill", "ms", "ring-prefill", "eager", 1e3),
        ("decode", "us", "cp-decode", "graph", 1.0),
    )
    for what, unit, bench, mode, scale in pairs:
        whole = [
            r
            for r in rows
            if "efficiency" in r and r["right"] and (r["bench"], r["mode"]) == (bench, mode)
            and r["case"]["batch"] == 1 and r["gpus"] in by_gpus
        ]  # fmt: skip
        for r in whole:
            modelled = by_gpus[r["gpus"]][f"{what}, {unit}"]
            measured = f"{r['median_us'] / scale:.1f}"
            found.append(f"{what} on {r['gpus']} GPUs: {modelled} {unit} by the model, "
                         f"{measured} {unit} measured")  # fmt: skip
    return [f"Held against the table above: {'; '.join(found)}."] if found else []


def _columns(what: str, costs: list[Cost], unit: float, name: str) -> dict[str, str]:
    """One column a fact; where bounds differ it holds both, the slowest first."""
    return {
        f"{what}, {name}": _range(f"{cost.time_us / unit:.1f}" for cost in costs),
        f"{what}: compute, {name}": f"{costs[0].compute_us / unit:.1f}",
        f"{what}: efficiency": _range(f"{cost.efficiency:.0%}" for cost in costs),
    }


def _range(texts: Iterable[str]) -> str:
    return " to ".join(dict.fromkeys(texts))


def measured_table(rows: Rows) -> list[str]:
    """All GPUs against one, for every case that was right."""
    lines = []
    for whole in (r for r in rows if "efficiency" in r and r["right"]):
        same = {
            r["backend"]: r["median_us"]
            for r in rows
            if (r["bench"], r["case"], r["mode"]) == (whole["bench"], whole["case"], whole["mode"])
        }
        case, unit = whole["case"], 1e3
        find = lambda end, same=same: next(t for n, t in same.items() if n.endswith(end))  # noqa: E731
        lines.append({
            "bench": whole["bench"],
            "shape": f"{case['batch']} x {case['q_len']} over {case['kv_len']}",
            "mode": whole["mode"],
            "1 GPU, ms": f"{find('1 GPU') / unit:.3f}",
            f"{whole['gpus']} GPUs, ms": f"{whole['median_us'] / unit:.3f}",
            "speed-up": f"{whole['speedup']:.2f}",
            "efficiency": f"{whole['efficiency']:.1%}",
            "compute alone, ms": f"{find('compute alone') / unit:.3f}",
            "exchange alone, ms": f"{find('exchange alone') / unit:.3f}",
            "exposed exchange": f"{whole['exposed_share']:.1%}",
        })  # fmt: skip
    return _markdown(lines)


def origin(meta: dict[str, Any]) -> str:
    """Where results come from, in one line."""
    facts = [f"{n} {meta[n]}" for n in ("gpu", "driver", "torch", "triton", "date") if meta.get(n)]
    return f"`{meta['command']}`; {', '.join(facts)}."


def rewrite(page: Path) -> str:
    """The text of a page with every table made anew."""

    def made(match: re.Match[str]) -> str:
        path = page.parent / match[3]
        if not path.exists():
            return f"{match[1]}Not measured yet.\n{match[4]}"
        results = json.loads(path.read_text())
        table = {"measured": measured_table, "model": model_table}[match[2]]
        source = f"`{match[3]}`: {origin(results['meta'])}"
        return "\n".join([match[1] + source, "", *table(results["rows"]), match[4]])

    return _TABLE.sub(made, page.read_text())


def main(paths: list[str]) -> None:
    """Rewrite the tables of each page."""
    for page in map(Path, paths):
        page.write_text(rewrite(page))


if __name__ == "__main__":
    main(sys.argv[1:])
