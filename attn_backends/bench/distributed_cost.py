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
from pathlib import Path
from typing import Any

from ..distributed.cost import Cost, Link, Pieces, decode_cost, ring_cost
from .tables import _markdown

#: Between nodes, per GPU: an assumption, one network card of 400 Gbit/s.
NETWORK = Link(latency_us=10.0, gbps=50.0)
SIZES = {"bf16": 2, "fp32": 4}
_TABLE = re.compile(r"(<!-- (measured|model): (\S+) -->\n).*?(<!-- end of \3 -->)", re.DOTALL)

Rows = list[dict[str, Any]]


def ring_pieces(rows: Rows) -> Pieces:
    """What the model needs to know of ring prefill.

    Args:
        rows: Of the results file of ``bench.distributed``.
    """
    compute = _compute(rows, "ring-piece")
    case = next(r["case"] for r in rows if r["bench"] == "ring-piece")
    lanes = case["num_kv_heads"] * case["head_dim"] * 2
    size = case["batch"] * case["kv_len"] * lanes * SIZES[case["dtype"]]
    return Pieces(compute, size, _link(rows, "ring-hop", "exchange of a shard"), NETWORK)


def decode_pieces(rows: Rows) -> Pieces:
    """What the model needs to know of sharded decode of one token.

    Args:
        rows: Of the results file of ``bench.distributed``.
    """
    name = "exchange all_gather"
    state = min(r["bytes"] for r in rows if r["bench"] == "cp-exchange" and r["backend"] == name)
    link = _link(rows, "cp-exchange", name)
    return Pieces(_compute(rows, "cp-decode-piece"), state, link, NETWORK)


def _compute(rows: Rows, bench: str) -> dict[int, float]:
    """Compute of one GPU among n: inside a graph, where it was measured so."""
    found: dict[int, float] = {}
    for mode in ("eager", "graph"):
        found |= {
            r["gpus"]: r["median_us"] for r in rows if r["bench"] == bench and r["mode"] == mode
        }
    return found


def _link(rows: Rows, bench: str, name: str) -> Link:
    """The link that explains the smallest and the largest exchange."""
    found: dict[int, float] = {}
    for mode in ("eager", "graph"):
        found |= {
            r["bytes"]: r["median_us"] / r["hops"]
            for r in rows
            if r["bench"] == bench and r["backend"] == name and r["mode"] == mode
        }
    small, large = min(found), max(found)
    return Link.fit((small, found[small]), (large, found[large]))


def model_table(rows: Rows) -> list[str]:
    """Costs on every number of GPUs that compute was measured for."""
    ring, decode = ring_pieces(rows), decode_pieces(rows)
    lines = []
    for gpus in sorted(ring.compute_us):
        line: dict[str, Any] = {"GPUs": gpus}
        line |= _columns("prefill", ring_cost(ring, gpus), 1e3, "ms")
        line |= _columns("decode", decode_cost(decode, gpus), 1.0, "us")
        lines.append(line)
    links = [
        f"{what}: {link.latency_us:.0f} us + bytes / {link.gbps:.0f} GB/s"
        for what, link in (("hop of the ring", ring.node), ("exchange of states", decode.node),
                           ("between nodes (assumed)", NETWORK))
    ]  # fmt: skip
    return [f"Links: {'; '.join(links)}.", "", *_markdown(lines)]


def _columns(what: str, cost: Cost, unit: float, name: str) -> dict[str, str]:
    return {
        f"{what}, {name}": f"{cost.time_us / unit:.1f}",
        f"{what}: exposed exchange": f"{cost.exposed_us / cost.time_us:.1%}",
        f"{what}: efficiency": f"{cost.efficiency:.0%}",
    }


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
