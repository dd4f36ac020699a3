"""How benchmarks write their results files."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..provenance import provenance
from ..registry.ranking import device_name


def command_line(program: str, arguments: Sequence[str]) -> str:
    """A command as results files name it: without absolute paths of the machine."""
    shown = [_shown(a) for a in arguments]
    return " ".join([program, *(shlex.quote(a) for a in shown)])


def _shown(argument: str) -> str:
    option, equals, value = argument.partition("=")
    if equals and option.startswith("-"):
        return f"{option}={_shown(value)}"
    return os.path.basename(argument.rstrip(os.sep)) if os.path.isabs(argument) else argument


def meta(module: str) -> dict[str, Any]:
    """Where the results of a run of ``python -m module`` come from."""
    return provenance(command_line(f"python -m {module}", sys.argv[1:]))


def meta_of(command: str, device: torch.device) -> dict[str, Any]:
    """Where the results of a command come from; ``device`` is the GPU's name, or ``cpu``."""
    data = {**provenance(command, device), "device": device_name(device)}
    if os.environ.get("TRITON_INTERPRET") == "1":
        data["interpreted"] = True  # times of Triton are those of its interpreter
    return data


def write(path: str | os.PathLike[str], data: Any) -> None:
    """Write JSON so that a reader finds the old file or the new one, never a part of it."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(json.dumps(data, indent=1) + "\n")
        os.chmod(name, 0o644)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def save(path: str | None, module: str, rows: list[dict[str, Any]], **more: Any) -> None:
    """Write a results file; called after every point, so that an interrupted run keeps its rows."""
    if path:
        write(path, {"meta": meta(module), "rows": rows, **more})


__all__ = ["command_line", "meta", "meta_of", "save", "write"]
