"""Somebody else's backend, in somebody else's distribution, beside an installed wheel."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from interpreters import fresh, run

ROOT = Path(__file__).resolve().parents[2]
BACKEND = """
import attn_backends
from attn_backends.torch_native.backend import TorchNativeBackend


class Backend(TorchNativeBackend):
    name = "theirs"


class Wrong(TorchNativeBackend):
    name = "wrong"

    def _run(self, *arguments):
        state = super()._run(*arguments)
        state.lse.mul_(1.44269504)  # base 2
        return state
"""
SIX_LINES = """
import pytest
from attn_backends.conformance import BackendConformance

class TestTheirs(BackendConformance):
    requirements = ("self_merge", "lengths")
    @pytest.fixture
    def backend(self):
        return "{backend}"
"""
ENTRY = "[attn_backends.backends]\ntheirs = their_package:Backend\n"


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the wheel, and with their distribution as pip leaves it."""
    folder = tmp_path_factory.mktemp("third")
    inside = fresh(folder / "venv", Path(sys.executable), wheel, with_ours=True)
    (site,) = (folder / "venv").glob("lib/python3.*/site-packages")
    (site / "their_package.py").write_text(BACKEND)
    record = site / "their_package-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    (record / "entry_points.txt").write_text(ENTRY)
    return inside


COMPUTE = """
import sys, torch, attn_backends as ab

def test_the_wheel_computes():
    assert ab.__file__.startswith(sys.prefix), ab.__file__
    q, kv = torch.randn(5, 4, 16), torch.randn(9, 2, 16)
    halves = [ab.attention(q, part, part, backend="theirs") for part in (kv[:4], kv[4:])]
    whole = ab.attention(q, kv, kv, backend="torch_native")
    assert torch.allclose(halves[0].merge(halves[1]).o, whole.o, atol=1e-5)
"""


def test_six_lines_judge_backends_of_another_distribution(
    environment: Path, tmp_path: Path
) -> None:
    """One by the name of its entry point, and a wrong one by its place."""
    (tmp_path / "test_right.py").write_text(SIX_LINES.format(backend="theirs"))
    (tmp_path / "test_wrong.py").write_text(SIX_LINES.format(backend="their_package:Wrong"))
    (tmp_path / "test_compute.py").write_text(COMPUTE)
    options = ("-q", "-rA", "-p", "no:cacheprovider")
    text = run(environment, "-m", "pytest", *options, cwd=tmp_path, status=1)
    lines = [line.split()[:2] for line in text.splitlines()]
    passed = [name for word, name in filter(lambda x: len(x) == 2, lines) if word == "PASSED"]
    failed = [name for word, name in filter(lambda x: len(x) == 2, lines) if word == "FAILED"]
    assert "test_compute.py::test_the_wheel_computes" in passed
    assert sum(name.startswith("test_right.py::") for name in passed) > 8
    assert failed and all(name.startswith("test_wrong.py::") for name in failed)
    assert "lse[token, head] at" in text


def test_the_command_line_of_the_wheel_judges_it(environment: Path, tmp_path: Path) -> None:
    command = str(environment.parent / "attn-backends")
    arguments = ["conform", "theirs", "--requirement", "self_merge", "--json"]
    (report,) = json.loads(run(environment, command, *arguments, cwd=tmp_path))["reports"]
    assert report["backend"] == "theirs" and report["ok"] and report["counts"]["passed"] > 2


def test_the_six_lines_are_those_of_the_page() -> None:
    page = (ROOT / "docs/writing-a-backend.md").read_text()
    for line in ("import pytest", "from attn_backends.conformance import BackendConformance"):
        assert line in page and line in SIX_LINES
    assert "(BackendConformance):\n    @pytest.fixture\n    def backend(self):\n" in page
