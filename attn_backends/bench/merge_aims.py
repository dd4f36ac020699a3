"""What the merge is to reach, beside what the rows of a run say.

    attn-backends bench merge --json merge.json
    python -m attn_backends.bench.merge_aims merge.json

Ratios are of medians from one process, above 1 where ours is faster. ``clear`` tells whether the
middle halves of both samples are apart, so that the ratio is more than noise.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]
OURS = ("cuda", "triton")
TRITON_PEERS = ("vllm-triton", "sglang-triton")


def aims(rows: Iterable[Row]) -> list[Row]:
    """The aims that these rows bear on, in order.

    Args:
        rows: Rows of ``bench merge``.

    Returns:
        ``{"aim", "case", "got", "want", "met"}`` each, ``clear`` too where two samples compare.
    """
    points: dict[str, dict[tuple[str, str], Row]] = {}
    for row in rows:
        if row.get("right") and "median_us" in row:
            points.setdefault(_label(row["case"]), {})[row["backend"], row["mode"]] = row
    found: list[Row] = []
    for label, ways in points.items():
        case = next(iter(ways.values()))["case"]
        for item in _of_point(case, ways):
            found.append({"aim": item.pop("aim"), "case": label, **item})
    return found


def _of_point(case: Row, ways: dict[tuple[str, str], Row]) -> Iterator[Row]:
    graph = {name: row for (name, mode), row in ways.items() if mode == "graph_cold"}
    ours = [graph[name] for name in OURS if name in graph]
    best = min(ours, key=_median, default=None)
    plain = case["lse_layout"] == "token" and not case["empty"]
    usual = plain and (case["num_heads"], case["head_dim"], case["dtype"]) == (32, 128, "bf16")
    if best is not None and case["states"] == 2 and usual:
        if "flashinfer" in graph:
            yield _ratio("our better path against FlashInfer", graph["flashinfer"], best, 1.0)
            if 256 <= case["tokens"] <= 1024:
                yield _ratio("the same, beyond", graph["flashinfer"], best, 1.05)
        if "copy" in graph and case["tokens"] == 65536:
            yield _ratio("share of the copy's bandwidth", graph["copy"], best, 0.97)
        if len(ours) == 2:
            yield _ratio("Triton against CUDA", graph["cuda"], graph["triton"], 0.9)
    if best is not None and case["states"] == 8 and "pairwise" in graph:
        yield _ratio("eight states against seven merges", graph["pairwise"], best, 2.0)
    if case["tokens"] == 64 and case["states"] == 2:
        for name, most in (("cuda", 10.0), ("triton", 12.0)):
            if (name, "host") in ways:
                got = ways[name, "host"]["median_us"]
                yield {"aim": f"host time of {name}, us", "got": got, "want": most,
                       "met": got < most}  # fmt: skip
        eager = {name: row for (name, mode), row in ways.items() if mode == "eager"}
        for peer in TRITON_PEERS:
            if peer in eager and "cuda" in eager and "triton" in eager:
                quick = min((eager[name] for name in OURS), key=_median)
                yield _ratio(f"eager against {peer}", eager[peer], quick, 1.5)


def _ratio(aim: str, than: Row, ours: Row, want: float) -> Row:
    ratio = than["median_us"] / ours["median_us"]
    apart = ours["p75_us"] < than["p25_us"] or than["p75_us"] < ours["p25_us"]
    return {"aim": aim, "got": round(ratio, 3), "want": want, "met": ratio >= want, "clear": apart}


def _median(row: Row) -> float:
    return row["median_us"]


def _label(case: Row) -> str:
    text = f"T={case['tokens']} H={case['num_heads']} D={case['head_dim']} {case['dtype']}"
    text += f" n={case['states']}" if case["states"] != 2 else ""
    text += " lse[H,T]" if case["lse_layout"] == "head" else ""
    return text + (f" empty={case['empty']}" if case["empty"] else "")


def show_aims(found: Iterable[Row]) -> None:
    """Print them, one a line."""
    for item in found:
        clear = "" if item.get("clear", True) else ", within the noise"
        print(
            f"{'met   ' if item['met'] else 'MISSED'} {item['aim']:38s}{item['case']:36s}"
            f"{item['got']:8.3f} (asked {item['want']:g}{clear})",
            flush=True,
        )


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m attn_backends.bench.merge_aims")
    parser.add_argument("results", help="results file of the merge benchmark")
    args = parser.parse_args(argv)
    rows = json.loads(Path(args.results).read_text())["rows"]
    show_aims(aims(rows))
    errors = [row["associativity_err"] for row in rows if "associativity_err" in row]
    if errors:
        print(f"largest difference between (a b) c and a (b c): {max(errors):.2e}")
    return 0


__all__ = ["aims", "show_aims"]

if __name__ == "__main__":
    raise SystemExit(main())
