"""How benchmarks write their results files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ..provenance import provenance


def meta(module: str) -> dict[str, Any]:
    """Where the results of a run of ``python -m module`` come from."""
    return provenance(" ".join([f"python -m {module}", *sys.argv[1:]]))


def save(path: str | None, module: str, rows: list[dict[str, Any]]) -> None:
    """Write a results file; called after every point, so that an interrupted run keeps its rows."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps({"meta": meta(module), "rows": rows}, indent=1) + "\n")


__all__ = ["meta", "save"]
