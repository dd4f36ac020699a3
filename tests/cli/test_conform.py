"""``conform`` gives the suite's verdict, as a table, a page or JSON, and in its exit code."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

FEW = ("--requirement", "empty_rows")


def test_a_backend_that_conforms_exits_0_and_is_written_down(cli, tmp_path: Path) -> None:
    answer = cli("conform", "torch_native", *FEW, "--write", str(tmp_path), "--json")
    assert answer.code == 0
    (report,) = answer.json["reports"]
    assert report["ok"] and report["counts"]["failed"] == 0
    assert set(report["requirements"]) == {"core", "empty_rows"}
    written = json.loads((tmp_path / "conformance-torch_native.json").read_text())
    assert written["counts"] == report["counts"]


def test_people_get_a_table_and_a_verdict(cli) -> None:
    answer = cli("conform", "torch_native", *FEW)
    assert answer.code == 0
    assert "empty_rows" in answer.stdout and "PASS: torch_native on cpu, smoke" in answer.stdout


def test_the_page_names_suite_and_refusals(cli) -> None:
    page = cli("conform", "torch_native", *FEW, "--markdown").stdout
    assert page.startswith("# Conformance of `torch_native`") and "| empty_rows |" in page


def test_a_backend_that_does_not_conform_exits_1(cli) -> None:
    answer = cli("conform", "tests_toy_wrong:Wrong", *FEW)
    assert answer.code == 1
    assert "FAIL: wrong on cpu" in answer.stdout


@pytest.fixture(autouse=True)
def wrong_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of a stranger whose backend reports half the LSE."""
    (tmp_path / "tests_toy_wrong.py").write_text(
        "from attn_backends.torch_native.backend import TorchNativeBackend\n"
        "class Wrong(TorchNativeBackend):\n"
        "    name = 'wrong'\n"
        "    def _run(self, *args):\n"
        "        out = super()._run(*args)\n"
        "        out.lse.mul_(0.5)\n"
        "        return out\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("nope",), "nope"),
        (("torch_native", "--level", "quick"), "smoke, full"),
        (("torch_native", "--requirement", "speed"), "empty_rows"),
        (("torch_native", "--markdown", "--json"), "one of them"),
    ],
)
def test_a_malformed_question_exits_2_and_says_what_is_allowed(cli, arguments, text) -> None:
    answer = cli("conform", *arguments)
    assert answer.code == 2
    assert text in answer.stdout + answer.stderr


def test_a_module_beside_the_user_is_found_and_one_that_does_not_load_is_told(
    cli, tmp_path: Path, monkeypatch
) -> None:
    folder = tmp_path / "beside"
    folder.mkdir()
    (folder / "mine_here.py").write_text(
        "from attn_backends.torch_native.backend import TorchNativeBackend as Mine\nnot_one = 3\n"
    )
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))  # the command adds the folder
    assert cli("conform", "mine_here:Mine", *FEW).code == 0
    for name, words in (
        ("mine_there:Mine", "does not load: ModuleNotFoundError: No module named 'mine_there'"),
        ("mine_here:Yours", "does not load: AttributeError"),
        ("mine_here:not_one", "(allowed: an AttentionBackend class); it is 3"),
    ):
        answer = cli("conform", name)
        assert answer.code == 2 and f"backend='{name}'" in answer.stderr and words in answer.stderr
