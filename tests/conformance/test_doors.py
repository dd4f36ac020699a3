"""The ways in: the report, expected failures, the base class and the pytest plugin."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch

from attn_backends.conformance import (
    BackendConformance,
    ConformanceError,
    ExpectedFailure,
    check_backend,
    matrix,
    read_expected_failures,
    run_conformance,
)
from attn_backends.conformance.__main__ import main
from attn_backends.conformance.report import Report
from attn_backends.conformance.target import read_options
from attn_backends.errors import InvalidInputError
from attn_backends.torch_native.backend import TorchNativeBackend, TorchNativeOptions

SIX_LINES = """
import pytest
from attn_backends.conformance import BackendConformance

class TestMine(BackendConformance):
    requirements = {requirements}

    @pytest.fixture
    def backend(self):
        return {backend}
"""

WRONG = """
from attn_backends.torch_native.backend import TorchNativeBackend

class Wrong(TorchNativeBackend):
    name = "wrong"

    def _run(self, *args):
        result = super()._run(*args)
        result.lse.mul_(1.25)
        return result
"""


class LseOff(TorchNativeBackend):
    name = "lse_off"

    def _run(self, *args):
        result = super()._run(*args)
        result.lse.mul_(1.25)
        return result


class TestTorchNative(BackendConformance):
    """The project's own use of the base class."""

    @pytest.fixture
    def backend(self):
        return "torch_native"

    @pytest.fixture
    def device(self):
        return "cpu"


def test_both_implementations_of_the_reference_conform():
    report = run_conformance(
        "torch_native",
        requirements=["values", "lse", "empty_rows", "visible_nan", "poison", "extreme_logits"],
        options=TorchNativeOptions(implementation="naive"),
    )
    assert report.ok, report.summary()


def test_a_report_counts_rows_and_lists_the_reasons_of_refusals(tmp_path):
    report = run_conformance("torch_native", requirements=["capacity", "self_merge"])
    path = report.write(tmp_path)
    assert path.name == "conformance-torch_native.json"
    data = json.loads(path.read_text())
    assert data["counts"] == {"passed": 4, "refused": 2, "failed": 0, "xfailed": 0}
    assert data["requirements"]["capacity"]["refused"] == 2
    (refusal,) = data["refusals"]
    assert refusal["count"] == 2 and refusal["reason"].startswith("capacity=given (supported: ")
    assert {"command", "date", "torch", "commit", "packages"} <= set(data["meta"])
    assert data["ok"] and not data["failures"]
    assert "| capacity | 0 | 2 | 0 | 0 |" in report.to_markdown()
    assert "| capacity | - |" in matrix([data])


def test_a_failure_says_where_and_by_how_much():
    report = run_conformance(LseOff, requirements=["lse"])
    assert not report.ok
    assert all("lse[token, head] at [" in row.detail for row in report.failures)
    with pytest.raises(ConformanceError, match="lse_off on cpu, smoke"):
        check_backend(LseOff, requirements=["lse"])


def test_expected_failures_are_counted_and_stale_ones_fail():
    known = [ExpectedFailure("self_merge/no-such-case", "was fixed")]
    report = run_conformance("torch_native", requirements=["self_merge"], expected_failures=known)
    assert report.stale == ("self_merge/no-such-case",) and not report.ok
    known = [ExpectedFailure("lse/*", "wrong base"), ExpectedFailure("core/*", "wrong base")]
    report = run_conformance(LseOff, requirements=["lse"], expected_failures=known)
    assert report.counts("lse")["xfailed"] > 0
    assert report.counts("core")["failed"] == 2, "the core cannot be excused"


def test_expected_failures_need_a_reason(tmp_path):
    path = tmp_path / "xfail.txt"
    path.write_text("# a comment\n\nmine values/alibi-*  # not computed\nother lse/x  # y\n")
    assert read_expected_failures(path, "mine") == [
        ExpectedFailure("values/alibi-*", "not computed")
    ]
    path.write_text("mine values/alibi\n")
    with pytest.raises(InvalidInputError, match=r"xfail\.txt:1"):
        read_expected_failures(path, "mine")


def test_unknown_levels_and_requirements_are_refused():
    with pytest.raises(InvalidInputError, match=r"level='quick' \(allowed: smoke, full\)"):
        run_conformance("torch_native", "quick")
    with pytest.raises(InvalidInputError, match="requirements=speed"):
        run_conformance("torch_native", requirements=["speed"])
    with pytest.raises(TypeError, match="backend=3"):
        run_conformance(3)


def _pytest(tmp_path, text, *options):
    """Outcomes of a nested pytest run in this process."""
    path = tmp_path / "test_nested.py"
    path.write_text(text)
    outcomes: dict[str, list] = {}

    class Watch:
        def pytest_runtest_logreport(self, report):
            if report.when == "call" or report.outcome == "skipped":
                kind = "xfailed" if hasattr(report, "wasxfail") else report.outcome
                outcomes.setdefault(kind, []).append(report)

    arguments = [str(path), "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", *options]
    saved = dict(sys.modules)
    try:
        code = pytest.main(arguments, plugins=[Watch()])
    finally:
        for name in set(sys.modules) - set(saved):
            if "nested" in name:
                del sys.modules[name]
    return code, outcomes


PLUGIN = ("-p", "attn_backends.conformance.plugin", "--attn-device", "cpu")


def test_six_lines_test_a_backend(tmp_path):
    text = SIX_LINES.format(requirements=("self_merge", "capacity"), backend='"torch_native"')
    code, outcomes = _pytest(tmp_path, text)
    assert code == 0
    assert len(outcomes["passed"]) == 4 and len(outcomes["skipped"]) == 2
    reason = outcomes["skipped"][0].longrepr[2]
    assert "capacity=given (supported: None)" in reason


def test_six_lines_fail_a_wrong_backend_and_show_the_rule(tmp_path):
    text = WRONG + SIX_LINES.format(requirements=("lse",), backend="Wrong")
    code, outcomes = _pytest(tmp_path, text, "-k", "lse-ragged-decode")
    assert code == 1
    assert "is the natural log of the sum" in str(outcomes["failed"][0].longrepr)


def test_a_class_without_a_backend_fails(tmp_path):
    text = SIX_LINES.format(requirements=("self_merge",), backend="None")
    text = text[: text.index("    @pytest.fixture")]
    code, _ = _pytest(tmp_path, text)
    assert code == 1


def test_the_plugin_writes_reports_and_fails_on_stale_entries(tmp_path):
    known = tmp_path / "xfail.txt"
    known.write_text("wrong lse/*  # scaled\nwrong core/gone  # fixed long ago\n")
    text = WRONG + SIX_LINES.format(requirements=("lse",), backend="Wrong")
    markdown = tmp_path / "report.md"
    options = ("--attn-xfail", str(known), "--attn-json", str(tmp_path), "--attn-markdown",
               str(markdown))  # fmt: skip
    code, outcomes = _pytest(tmp_path, text, *PLUGIN, *options)
    assert code == 1, "the core fails, and nothing excuses it"
    assert outcomes["xfailed"] and len(outcomes["failed"]) == 2
    data = json.loads((tmp_path / "conformance-wrong.json").read_text())
    assert data["stale"] == ["core/gone"]
    assert data["counts"]["xfailed"] == len(outcomes["xfailed"])
    assert "# Conformance of `wrong`" in markdown.read_text()


def test_a_stale_entry_alone_fails_the_run(tmp_path):
    known = tmp_path / "xfail.txt"
    known.write_text("torch_native self_merge/gone  # fixed long ago\n")
    text = SIX_LINES.format(requirements=("self_merge",), backend='"torch_native"')
    code, outcomes = _pytest(tmp_path, text, *PLUGIN, "--attn-xfail", str(known))
    assert code == 1 and not outcomes.get("failed")


def test_options_of_the_target_reach_the_backend():
    seen = []

    class Watching(TorchNativeBackend):
        name = "watching"

        def _run(self, q, *args):
            seen.append((self.options, q.device))
            return super()._run(q, *args)

    options = TorchNativeOptions(tile_q=3)
    run_conformance(Watching, requirements=["self_merge"], options=options, device="cpu")
    assert seen and all(o is options and d == torch.device("cpu") for o, d in seen)


def test_the_module_runs_from_the_command_line(tmp_path, capsys):
    arguments = ["torch_native", "--requirement", "self_merge", "--json", str(tmp_path)]
    assert main([*arguments, "--slowest", "1"]) == 0
    text = capsys.readouterr().out
    assert "torch_native on cpu, smoke: 4 passed" in text and " s  " in text
    assert (tmp_path / "conformance-torch_native.json").exists()
    assert main([f"{__name__}:LseOff", "--requirement", "lse"]) == 1
    assert "lse/ragged-decode" in capsys.readouterr().out


def test_two_processes_find_what_one_finds():
    chosen = TorchNativeOptions.model_validate({})
    settings = {"requirements": ["lse"], "options": chosen}
    name = "attn_backends.torch_native.backend:TorchNativeBackend"
    alone = run_conformance(name, **settings)
    seen: list[int] = []
    shared = run_conformance(name, **settings, jobs=2, progress=lambda n, of, row: seen.append(n))

    def facts(report):
        return [(r.requirement, r.case, r.spec, r.status, r.detail) for r in report.rows]

    assert facts(alone) == facts(shared)
    assert seen == list(range(1, len(alone.rows) + 1))
    with pytest.raises(InvalidInputError, match="jobs=0"):
        run_conformance(name, jobs=0)


def test_options_given_as_text_are_read_by_their_types_and_name_the_report(tmp_path):
    from attn_backends.adapters.flash_attention import FlashAttentionBackend

    options = read_options(FlashAttentionBackend, ["version=2", "source=vllm"])
    assert options.model_dump(exclude_unset=True) == {"version": "2", "source": "vllm"}
    assert read_options(TorchNativeBackend, []) is None
    with pytest.raises(InvalidInputError, match="NAME=VALUE"):
        read_options(FlashAttentionBackend, ["version"])
    with pytest.raises(InvalidInputError, match=r"option\.version=7 "):
        read_options(FlashAttentionBackend, ["version=7"])
    assert read_options(TorchNativeBackend, ["tile_k=64"]).tile_k == 64
    with pytest.raises(InvalidInputError, match=r"option\.tile_k=0 "):
        read_options(TorchNativeBackend, ["tile_k=0"])
    report = Report(
        "flash_attention", "smoke", "cpu", (), options={"version": "2", "source": "a/b"}
    )
    assert report.write(tmp_path).name == "conformance-flash_attention-2-a_b.json"
    report = Report("triton", "smoke", "cpu", (), options={"hopper": True, "other": False})
    assert report.write(tmp_path).name == "conformance-triton-hopper-no_other.json"


class RoundsRowSums(TorchNativeBackend):
    """Sums probabilities as bf16 tensor cores do: declared, so it conforms."""

    name = "rounds_row_sums"
    capabilities = replace(TorchNativeBackend.capabilities, rounds_row_sum=True)

    def _run(self, *args):
        result = super()._run(*args)
        if self.spec.dtype.itemsize <= 2:
            result.lse.add_(0.9 * torch.finfo(self.spec.dtype).eps / 2)
        return result


class HidesIt(RoundsRowSums):
    name = "hides_it"
    capabilities = TorchNativeBackend.capabilities


def test_a_declared_rounding_of_row_sums_is_granted_everywhere_and_an_undeclared_one_nowhere():
    rules = {"requirements": ["lse", "plan_reuse", "extreme_logits", "options"]}
    assert run_conformance(RoundsRowSums, **rules).ok
    failing = run_conformance(HidesIt, **rules).failures
    assert {"lse", "plan_reuse"} <= {row.requirement for row in failing}


def test_a_report_names_the_versions_of_the_packages_behind_the_backend() -> None:
    class Behind(TorchNativeBackend):
        name = "behind"
        packages = ("pytest", "a-package-that-nobody-has")

    report = run_conformance(Behind, level="smoke", requirements=["core"])
    assert report.meta["packages"]["pytest"] == pytest.__version__
    assert "a-package-that-nobody-has" not in report.meta["packages"]
