"""Where a result comes from: what every file in ``docs/results`` says of its making."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from .packages import installed_version

PACKAGES = (
    *("cuda-core", "cuda-bindings", "flash-attn", "flash-attn-4", "flash_attn_3"),
    *("flashinfer-python", "vllm", "sglang", "sgl-kernel", "transformers", "numpy"),
)


def provenance(command: str, device: torch.device | None = None) -> dict[str, Any]:
    """Command, date, device and versions of a run.

    Args:
        command: What was run, without paths of the machine.
        device: Where; None is a CUDA device if one is visible. It is named only if it is CUDA.

    Returns:
        Plain data. ``commit`` is what ``GIT_COMMIT`` says, else what git says of this package.
    """
    cuda = torch.cuda.is_available() if device is None else device.type == "cuda"
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    git = ("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD")
    versions = {name: installed_version(name) for name in PACKAGES}
    return {
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(device) if cuda else "",
        "driver": _output(*query) if cuda else "",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": installed_version("triton") or "",
        "commit": os.environ.get("GIT_COMMIT") or _output(*git),
        "packages": {name: version for name, version in versions.items() if version},
    }


def _output(*command: str) -> str:
    """First line a program prints; empty if it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip().partition("\n")[0]


__all__ = ["provenance"]
