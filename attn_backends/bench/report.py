"""What every results file says of how it came to be, and how it is written."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    "cuda-core", "cuda-bindings", "flashinfer-python", "flash-attn", "flash_attn_3", "vllm",
    "sglang", "sgl-kernel",
)  # fmt: skip


def meta(module: str) -> dict[str, Any]:
    """Command, date, device and versions of a run of ``python -m module``.

    ``GIT_COMMIT`` names the commit where the code runs outside its repository.
    """
    versions = {name: _version(name) for name in (*PACKAGES, "triton")}
    return {
        "command": " ".join([f"python -m {module}", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "driver": _command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "triton": versions.pop("triton"),
        "commit": os.environ.get("GIT_COMMIT") or _command("git", "rev-parse", "--short", "HEAD"),
        "packages": {name: version for name, version in versions.items() if version},
    }


def save(path: str | None, module: str, rows: list[dict[str, Any]]) -> None:
    """Write a results file; called after every point, so that an interrupted run keeps its rows."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps({"meta": meta(module), "rows": rows}, indent=1) + "\n")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _command(*words: str) -> str:
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except Exception as error:
        return f"unknown: {error}"


__all__ = ["meta", "save"]
