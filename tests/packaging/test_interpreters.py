"""The wheel installs on every Python it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from interpreters import MINORS, fresh, interpreter, run

#: All but the two kernel libraries, of which one is built where it is installed.
EXTRAS = "all"
#: What can be imported with nothing but Python.
BARE = ("attn_backends", "attn_backends.version", "attn_backends.errors",
        "attn_backends.environment", "attn_backends.counters")  # fmt: skip
WITHOUT_TORCH = f"""
import compileall, importlib, importlib.metadata as metadata, json, pathlib, sys
for name in {BARE}:
    importlib.import_module(name)
import attn_backends
folder = pathlib.Path(attn_backends.__file__).parent
ours = metadata.distribution("attn-backends")
print(json.dumps({{
    "python": list(sys.version_info[:2]),
    "inside": str(folder).startswith(sys.prefix),
    "compiled": compileall.compile_dir(folder, quiet=1, workers=1, optimize=0),
    "versions": [attn_backends.__version__, ours.version],
    "scripts": [e.name for e in ours.entry_points if e.group == "console_scripts"],
    "extras": sorted(ours.metadata.get_all("Provides-Extra")),
    "requires": ours.requires,
    "typed": (folder / "py.typed").exists(),
    "kernels": sorted(x.name for x in (folder / "merge").glob("*.cu*")),
    "error": str(attn_backends.InvalidInputError.of("x", 1, "2")),
}}))
"""


@pytest.mark.parametrize("minor", MINORS)
def test_wheel_installs_compiles_and_imports_its_torch_free_parts(
    wheel: Path, tmp_path: Path, minor: int
) -> None:
    """No torch here: interpreters other than the tests' own have none to try."""
    python = interpreter(minor)
    if python is None:
        pytest.skip(f"this machine has no Python 3.{minor}")
    inside = fresh(tmp_path / "venv", python, wheel)
    found = json.loads(run(inside, "-W", "error", "-c", WITHOUT_TORCH, cwd=tmp_path))
    assert found["python"] == [3, minor] and found["inside"]
    assert found["compiled"], "some module does not compile, or warns"
    assert found["versions"][0] == found["versions"][1]
    assert found["scripts"] == ["attn-backends"] and found["typed"]
    assert found["kernels"] == ["many.cu", "pair.cu", "rows.cuh"]
    assert {"all", "cli", "cuda", "flash-attn", "flashinfer", "transformers"} <= set(
        found["extras"]
    )
    plain = {r.partition(" ")[0].partition(">")[0] for r in found["requires"] if "extra" not in r}
    assert {"torch", "pydantic", "pyyaml"} <= plain
    assert found["error"] == "x=1 (allowed: 2)"


@pytest.mark.parametrize("minor", MINORS)
def test_pip_finds_a_set_of_packages_for_the_extras(
    wheel: Path, tmp_path: Path, minor: int
) -> None:
    """A dry run: pip settles on versions for this Python, and fetches no more than it must."""
    python = interpreter(minor)
    if python is None:
        pytest.skip(f"this machine has no Python 3.{minor}")
    inside, report = fresh(tmp_path / "venv", python, wheel), tmp_path / "report.json"
    pip = [sys.executable, "-m", "pip", "--python", inside, "install", "--quiet", "--dry-run"]
    asked = [f"{wheel}[{EXTRAS}]", "torch==2.13.0"]
    done = subprocess.run(
        [*pip, "--ignore-installed", "--report", report, *asked],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    chosen = {p["metadata"]["name"].lower() for p in json.loads(report.read_text())["install"]}
    assert {"attn-backends", "typer", "cuda-core", "transformers", "matplotlib"} <= chosen


def test_promised_interpreters_are_those_that_are_tried() -> None:
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    assert f'requires-python = ">=3.{MINORS[0]}"' in text
    for minor in MINORS:
        assert f'"Programming Language :: Python :: 3.{minor}"' in text
