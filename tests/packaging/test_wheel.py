"""The wheel holds each file once, and works from anywhere."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from building import EPOCH, ROOT, build, installed_name, sources


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


def test_a_wheel_depends_on_its_sources_alone(wheel: Path, tmp_path: Path) -> None:
    """Built at another place and time, it is the same file bit by bit."""
    again = build(tmp_path / "elsewhere", EPOCH, wheel.parent.parent / "tree")
    assert again.name == wheel.name
    first, second = (zipfile.ZipFile(path) for path in (wheel, again))
    for one, other in zip(first.infolist(), second.infolist(), strict=True):
        where = (one.filename, one.date_time, oct(one.external_attr), one.CRC)
        assert where == (other.filename, other.date_time, oct(other.external_attr), other.CRC)
    assert again.read_bytes() == wheel.read_bytes()


def test_make_builds_the_wheel_of_the_last_commit() -> None:
    text = (ROOT / "Makefile").read_text()
    assert "export SOURCE_DATE_EPOCH" in text and "git log -1 --format=%ct" in text
    assert "umask 022 && $(BIN)/python -m build --wheel" in text
