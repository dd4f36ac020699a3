"""The wheel holds each file once, and works from anywhere."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TREES = ("attn_backends", "registry", "adapters")
BUILD = """
import sys
from setuptools import build_meta
build_meta.build_wheel(sys.argv[1])
"""


def sources() -> list[Path]:
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *TREES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    return [Path(f) for f in files if not (ROOT / f).is_symlink() and (ROOT / f).exists()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("setuptools", minversion="77")
    work = tmp_path_factory.mktemp("wheel")
    tree, out = work / "tree", work / "out"
    out.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", *map(str, sources())):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    for name in ("registry", "adapters"):
        (tree / "attn_backends" / name).symlink_to(Path("..") / name)
    subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=tree, check=True, timeout=300)
    (built,) = out.glob("*.whl")
    return built


def installed_name(source: Path) -> str:
    top = source.parts[0]
    return str(source) if top == "attn_backends" else str(Path("attn_backends") / source)


def test_wheel_holds_every_source_file_exactly_once(wheel: Path) -> None:
    names = [n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n]
    assert [n for n, count in Counter(names).items() if count > 1] == []
    assert sorted(names) == sorted(map(installed_name, sources()))


def test_wheel_imports_from_another_directory(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = (
        "import attn_backends, attn_backends.adapters, attn_backends.registry\n"
        "from attn_backends.merge import merge_state\n"
        "print(attn_backends.registry.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code]
        if sys.version_info >= (3, 11)
        else [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().startswith(str(site))


def test_every_package_folder_is_listed_for_the_wheel(wheel: Path) -> None:
    packages = {str(Path(installed_name(s)).parent) for s in sources() if s.name == "__init__.py"}
    in_wheel = {str(Path(n).parent) for n in zipfile.ZipFile(wheel).namelist()}
    assert packages <= in_wheel


@pytest.mark.parametrize("name", ["registry", "adapters"])
def test_bare_import_of_a_root_folder_names_the_right_import(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert f"attn_backends.{name}" in done.stderr
