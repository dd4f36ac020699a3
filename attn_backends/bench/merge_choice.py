"""Write the table from which ``auto`` takes a merge's path, from results of the merge benchmark.

    python -m attn_backends.bench.merge pairs many --json merge.json
    python -m attn_backends.bench.merge_choice merge.json --capability 9.0

The results of ``merge sweep`` do as well: of its launch shapes those that are shipped count.

Only points that both kernel paths computed rightly and whose layout the choice knows to be like
others (contiguous outputs and LSEs) are taken. Entries of other devices stay.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..merge import dispatch, measured
from .merge import DTYPES
from .merge_sweep import shipped_pair

TARGET = Path(measured.__file__)
Times = dict[tuple[tuple[int, int], str], tuple[tuple[int, float, float], ...]]


def times_of(rows: Iterable[dict[str, Any]], capability: tuple[int, int]) -> Times:
    """The table's entries of one device.

    Args:
        rows: Of a results file.
        capability: Compute capability of the device.
    """
    points: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows:
        case = row["case"]
        plain = case["lse_layout"] == "token" and not case["empty"]
        if row["mode"] != "graph_cold" or not plain or not row["right"]:
            continue
        dtype = DTYPES[case["dtype"]]
        size = case["tokens"] * case["num_heads"] * case["head_dim"] * dtype.itemsize
        paths = {"cuda": "cuda", "triton": "triton"}
        if case["states"] == 2:
            paths |= shipped_pair(size)
        if row["backend"] not in paths:
            continue
        kind = dispatch.kind_of(case["states"], case["head_dim"])
        if kind is not None:
            points.setdefault((kind, size), {})[paths[row["backend"]]] = row["median_us"]
    found: dict[Any, list[tuple[int, float, float]]] = {}
    for (kind, size), us in sorted(points.items()):
        if len(us) == 2:
            found.setdefault((capability, kind), []).append((size, us["cuda"], us["triton"]))
    return {key: tuple(entry) for key, entry in found.items()}


def render(times: Times) -> str:
    """The module that holds the table."""
    text = TARGET.read_text()
    head = text[: text.index("TIMES:")]
    text = (
        f"{head}TIMES: dict[tuple[tuple[int, int], str], tuple[tuple[int, float, float], ...]] = {{"
    )
    for key, entry in sorted(times.items()):
        text += f"\n    {key!r}: (".replace("'", '"')
        text += "".join(f"\n        {point!r}," for point in entry) + "\n    ),"
    return text + ("\n}\n" if times else "}\n")


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m attn_backends.bench.merge_choice")
    parser.add_argument("results", help="results file of the merge benchmark")
    parser.add_argument("--capability", required=True, help="of its device, as 9.0")
    args = parser.parse_args(argv)
    major, _, minor = args.capability.partition(".")
    capability = (int(major), int(minor or 0))
    found = times_of(json.loads(Path(args.results).read_text())["rows"], capability)
    others = {key: entry for key, entry in measured.TIMES.items() if key[0] != capability}
    TARGET.write_text(render({**others, **found}))
    for (_, kind), entry in found.items():
        for size, cuda, triton in entry:
            path = "triton" if dispatch.is_faster(triton, cuda) else "cuda"
            print(
                f"{kind:12s}{size:12d} bytes  cuda {cuda:8.2f} us  triton {triton:8.2f} us  {path}"
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
