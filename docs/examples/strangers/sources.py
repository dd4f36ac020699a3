"""Where the kernels come from: an installed package, or a few files out of its wheel.

A serving engine brings hundreds of packages, of which its attention kernels need none. With
``STRANGERS_SOURCES`` set to a folder, modules are loaded from the files there, and the few names
that they import from the rest of their engine are stood in for below: which platform it is, a
logger, an enumeration. ``python sources.py FOLDER WHEEL...`` takes the files out of wheels that
``pip download --no-deps vllm sglang`` fetched.
"""

from __future__ import annotations

import enum
import importlib
import logging
import os
import sys
import zipfile
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

VARIABLE = "STRANGERS_SOURCES"
SGLANG = "sglang.kernels.ops.attention"
VLLM = "vllm.v1.attention.ops"
FILES = {
    SGLANG: ("decode_attention", "extend_attention", "score_mod"),
    VLLM: ("triton_unified_attention", "triton_attention_helpers", "triton_decode_attention"),
}


@cache
def load(name: str) -> ModuleType | str:
    """The module, or why it cannot be had."""
    try:
        if VARIABLE in os.environ:
            _stand_in(name.partition(".")[0], Path(os.environ[VARIABLE]))
        return importlib.import_module(name)
    except Exception as error:  # an engine may fail in any way while it loads
        return f"{type(error).__name__}: {error}"


def version(package: str) -> str:
    """Version of the engine the kernels are from; empty if unknown."""
    found = sys.modules.get(package)
    return str(getattr(found, "__version__", ""))


class _KVQuantMode(enum.IntEnum):
    """The modes of a quantized cache that the unified kernel compares with."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4


class _Platform:
    """An NVIDIA GPU, or none."""

    @staticmethod
    def fp8_dtype() -> torch.dtype:
        return torch.float8_e4m3fn

    @staticmethod
    def is_rocm() -> bool:
        return False

    @staticmethod
    def is_device_capability_family(family: int) -> bool:
        if not torch.cuda.is_available():
            return False
        return torch.cuda.get_device_capability()[0] == family // 10


@cache
def _stand_in(engine: str, folder: Path) -> None:
    """Put stand-ins for what the engine's kernels import from it into ``sys.modules``."""
    import triton
    import triton.language as tl

    def module(name: str, **names: Any) -> None:
        made = ModuleType(name)
        made.__path__ = [str(folder.joinpath(*name.split(".")))]  # where its own files are
        made.__dict__.update(names)
        sys.modules[name] = made

    release = folder / engine / "VERSION"
    known = release.read_text().strip() if release.exists() else ""
    module(engine, __version__=known)
    if engine == "vllm":
        for name in ("v1", "v1.attention", "v1.attention.ops"):
            module(f"vllm.{name}")
        module("vllm.envs", VLLM_BATCH_INVARIANT=False)
        module("vllm.logger", init_logger=logging.getLogger)
        module("vllm.platforms", current_platform=_Platform)
        module("vllm.triton_utils", triton=triton, tl=tl)
        module("vllm.v1.kv_cache_interface", KVQuantMode=_KVQuantMode)
    else:
        for name in ("kernels", "kernels.ops", "kernels.ops.attention", "srt"):
            module(f"sglang.{name}")
        no = dict.fromkeys(("is_hip", "is_gfx95_supported", "is_gfx1250_supported"), lambda: False)
        cuda = torch.cuda.is_available
        module("sglang.srt.environ", envs=None)
        module("sglang.srt.utils", is_cuda=cuda, get_device_core_count=None, **no)


def extract(folder: Path, wheels: list[Path]) -> list[Path]:
    """Take the kernels' files, and each engine's version, out of wheels."""
    written = []
    for wheel in wheels:
        engine, release = wheel.name.split("-")[:2]
        with zipfile.ZipFile(wheel) as archive:
            for package, names in FILES.items():
                if not package.startswith(f"{engine}."):
                    continue
                for name in names:
                    path = f"{package.replace('.', '/')}/{name}.py"
                    archive.extract(path, folder)
                    written.append(folder / path)
        (folder / engine / "VERSION").write_text(release + "\n")
        written.append(folder / engine / "VERSION")
    return written


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: python sources.py FOLDER WHEEL...")
    for path in extract(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]]):
        print(path)
