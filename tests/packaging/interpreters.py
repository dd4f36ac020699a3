"""The Python interpreters of this machine, and fresh environments of them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path

MINORS = (10, 11, 12, 13)


@cache
def interpreter(minor: int) -> Path | None:
    """A CPython 3.``minor``, from the PATH or from pyenv; None if this machine has none."""
    name = f"python3.{minor}"
    found = [sys.executable, shutil.which(name)]
    found += map(str, sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/{name}")))
    for path in filter(None, found):
        code = "import ensurepip, sys; print(*sys.version_info[:2])"
        done = subprocess.run([path, "-c", code], capture_output=True, text=True)
        if done.returncode == 0 and done.stdout.split() == ["3", str(minor)]:
            return Path(path)
    return None


def fresh(folder: Path, python: Path, wheel: Path, *, with_ours: bool = False) -> Path:
    """A new virtual environment with the wheel in it, installed by pip without dependencies.

    Args:
        folder: Where.
        python: Its interpreter.
        wheel: What to install.
        with_ours: Let it see the packages that these tests run with, behind its own.

    Returns:
        The environment's interpreter.
    """
    subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
    inside = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", inside, "install", "--quiet"]
    options = ["--no-deps", "--no-index", "--no-cache-dir", "--no-compile"]
    subprocess.run([*pip, *options, wheel], check=True, timeout=120)
    if with_ours:
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        site = Path(subprocess.check_output([inside, "-c", code], text=True).strip())
        ours = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        (site / "ours.pth").write_text("\n".join(sorted(ours)) + "\n")
    return inside


def run(python: Path, *arguments: str, cwd: Path, status: int = 0) -> str:
    """What a program prints, run without this checkout in sight."""
    done = subprocess.run(
        [python, *arguments],
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin", "HOME": str(cwd), "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == status, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout
