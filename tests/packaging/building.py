"""Building a wheel of the sources as they are, away from the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TREES = ("attn_backends", "registry", "adapters")
BUILD = """
import os, sys
os.umask(0o022)
from setuptools import build_meta
build_meta.build_wheel(sys.argv[1])
"""
#: A moment for all files of a wheel, so that it depends on its sources alone.
EPOCH = {"SOURCE_DATE_EPOCH": "1700000000"}


def sources() -> list[Path]:
    """Every source file, relative to the root, links aside."""
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *TREES],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    return [Path(f) for f in files if not (ROOT / f).is_symlink() and (ROOT / f).exists()]


def installed_name(source: Path) -> str:
    """Where a source file is in the wheel."""
    top = source.parts[0]
    return str(source) if top == "attn_backends" else str(Path("attn_backends") / source)


def build(work: Path, env: Mapping[str, str], origin: Path = ROOT) -> Path:
    """Build a wheel from a copy of the sources of ``origin``, in ``work / "tree"``."""
    tree, out = work / "tree", work / "out"
    out.mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE", *map(str, sources())):
        if not (origin / name).exists():
            continue
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(origin / name, tree / name)  # without times, as a fresh clone has them
    for name in ("registry", "adapters"):
        (tree / "attn_backends" / name).symlink_to(Path("..") / name)
    subprocess.run(
        [sys.executable, "-c", BUILD, str(out)],
        cwd=tree, check=True, timeout=300, env={**os.environ, **env},
    )  # fmt: skip
    (built,) = out.glob("*.whl")
    return built
