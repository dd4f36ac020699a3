"""The page and the picture about conformance show the reports as they are."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from attn_backends.cli import capability_table
from attn_backends.conformance import REQUIREMENTS, SUITE_VERSION, page, picture
from attn_backends.conformance.__main__ import main as command
from attn_backends.errors import InvalidInputError

ROOT = Path(__file__).resolve().parents[2]


def counts(passed: int = 0, refused: int = 0, failed: int = 0, xfailed: int = 0) -> dict[str, int]:
    return {"passed": passed, "refused": refused, "failed": failed, "xfailed": xfailed}


def report(backend: str, gpu: str = "NVIDIA H200", **requirements: Any) -> dict[str, Any]:
    total = {s: sum(c[s] for c in requirements.values()) for s in counts()}
    failure = {"requirement": "lse", "case": "one", "spec": "fp16", "status": "failed"}
    return {
        "meta": {"command": "conform", "date": "2026-01-01", "gpu": gpu, "packages": {"x": "1.2"}},
        "backend": backend, "options": {}, "library_version": "0.1.0",
        "suite_version": "2026.11", "level": "smoke", "device": "cuda:0",
        "ok": not total["failed"], "counts": total, "requirements": requirements,
        "refusals": [{"reason": f"a={n} (supported: 0)", "count": 9 - n} for n in range(1, 9)],
        "failures": [{**failure, "detail": "off | by\none"}] * total["failed"], "stale": [],
    }  # fmt: skip


REPORTS = [
    report("triton", core=counts(2), lse=counts(3, 1), capacity=counts(2)),
    report("theirs", core=counts(2), lse=counts(2, 0, 1), capacity=counts(0, 2)),
]


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    for number, folder in enumerate(("h200", "zcpu")):
        (tmp_path / "results" / folder).mkdir(parents=True)
        for one in copy.deepcopy(REPORTS):
            if number:
                one["meta"]["gpu"] = ""
            path = tmp_path / "results" / folder / f"conformance-{one['backend']}.json"
            path.write_text(json.dumps(one))
    return tmp_path


def test_the_page_is_what_the_results_give() -> None:
    problems = page.stale(ROOT / "docs")
    assert not problems, f"run python -m attn_backends.conformance.page docs: {problems}"


def test_every_requirement_and_its_rule_is_on_the_page() -> None:
    text = page.page([])
    assert all(f"| `{name}` | " in text for name in REQUIREMENTS) and SUITE_VERSION in text


def test_requirements_and_suites_are_named_for_good() -> None:
    """Results of other versions are compared by these names."""
    assert len(REQUIREMENTS) == len(set(REQUIREMENTS)) and REQUIREMENTS[0] == "core"
    assert all(name.replace("_", "").isalnum() and name.islower() for name in REQUIREMENTS)
    year, month = SUITE_VERSION.split(".")[:2]
    assert len(year) == 4 and 1 <= int(month) <= 12
    for path in (ROOT / "docs/results").glob("*/conformance-*.json"):
        assert set(json.loads(path.read_text())["requirements"]) <= set(REQUIREMENTS), path


def test_failures_causes_and_strangers_are_told(docs: Path) -> None:
    text = page.page(page.machines(docs / "results"))
    assert text.index("## On one NVIDIA H200") < text.index("## On a CPU")
    assert text.count("### Backends nobody here wrote") == 2
    assert "- `lse/one` (fp16): off \\| by one" in text
    assert "**Conforms** at level smoke" in text and "**Does not conform**" in text
    assert "Refuses, the 6 most frequent of 8:" in text and "- 8 times `a=1 (supported: 0)`" in text
    assert "| lse | 3/3 | 2/3 |" in text and "| capacity | 2/2 | - |" in text
    assert "x 1.2" in text and "[conformance-theirs.json](results/h200/" in text


def test_what_has_no_report_is_listed_as_not_run_and_libraries_are_named(docs: Path) -> None:
    folder = docs / "results/h200"
    one = report("flash_attention", core=counts(2))
    one["options"] = {"version": "2", "source": "package", "num_splits": 3}
    one["meta"]["library"] = {"name": "flash-attn", "version": "2.8.3"}
    (folder / "conformance-flash_attention-2-package-3.json").write_text(json.dumps(one))
    gpu, cpu = page.machines(docs / "results")
    missing = page.not_run(gpu)
    assert ("flash_attention", {"version": "4"}) in missing and ("flashinfer", {}) in missing
    assert ("flash_attention", {"version": "2", "source": "package"}) not in missing
    assert not {"triton"} & {name for name, _ in missing} and page.not_run(cpu) == []
    text = page.page([gpu])
    assert "#### `flash_attention 2 package 3 2.8.3`" in text
    assert "computed by flash-attn 2.8.3, suite" in text
    assert "`flash_attention` version 4; `flashinfer`; `flashinfer` kernel fa2;" in text
    table = capability_table.capability_table(docs / "results")
    assert "flash-attn 2.8.3, version 2, source package, num_splits 3: 2 passed" in table
    assert "version 4: not run" in table


def test_many_failures_that_were_expected_for_one_reason_are_one_line(docs: Path) -> None:
    one = report("flash_attention", core=counts(2), lse=counts(0, 0, 0, 20))
    failure = {"requirement": "lse", "spec": "bf16", "status": "xfailed"}
    one["failures"] = [
        {**failure, "case": f"dim-{n}", "detail": "not built [raised RuntimeError: no kernel]"}
        for n in range(20)
    ]
    (docs / "results/h200/conformance-flash_attention.json").write_text(json.dumps(one))
    text = page.page(page.machines(docs / "results"))
    line = "- 20 cases, among them `lse/dim-0`, `lse/dim-1`, `lse/dim-2`: not built"
    assert f"Fails as expected:\n\n{line}\n" in text and "dim-3" not in text


def test_changed_results_make_page_and_picture_stale(docs: Path) -> None:
    pytest.importorskip("matplotlib")
    assert page.main([str(docs), "--check"]) == 1
    assert page.main([str(docs)]) == 0 == page.main([str(docs), "--check"])
    path = docs / "results/h200/conformance-triton.json"
    changed = json.loads(path.read_text())
    changed["requirements"]["lse"]["failed"] = 1
    path.write_text(json.dumps(changed))
    found = page.stale(docs)
    assert found == ["h200.png shows other data", "conformance.md is not what the results give"]
    path.unlink()
    (docs / "results/h200/conformance-theirs.json").unlink()
    assert page.stale(docs)[0] == "h200.png is of no results"
    page.write(docs)
    assert not (docs / "conformance/h200.png").exists() and page.stale(docs) == []


@pytest.mark.parametrize(
    ("given", "state", "text"),
    [
        (None, "absent", ""),
        (counts(), "absent", ""),
        (counts(3), "passed", "3/3"),
        (counts(3, 2), "partly", "3/3 (2)"),
        (counts(0, 2), "refused", "-"),
        (counts(3, 2, 1), "failed", "✗ 3/4 (2)"),
        (counts(3, 0, 0, 1), "expected", "○ 3/4"),
        (counts(0, 0, 1, 1), "failed", "✗ 0/2"),
    ],
)
def test_a_cell_can_be_told_without_colors(given: Any, state: str, text: str) -> None:
    assert picture.state_of(given) == state and picture.text_of(given) == text


def test_states_differ_in_lightness_too() -> None:
    """As a grayscale print or any kind of color blindness shows them."""

    def lightness(color: str) -> float:
        red, green, blue = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    values = sorted(lightness(color) for color, *_ in picture.STATES.values())
    assert min(b - a for a, b in itertools.pairwise(values)) > 0.01
    bad = lightness(picture.STATES["failed"][0])
    assert lightness(picture.STATES["passed"][0]) - bad > 0.3


def test_the_picture_holds_every_backend_requirement_and_count() -> None:
    pytest.importorskip("matplotlib")
    figure = picture.figure_of(REPORTS, "Both")
    (axes,) = figure.axes
    assert [t.get_text() for t in axes.get_yticklabels()] == ["core", "lse", "capacity"]
    heads = [t.get_text() for t in axes.get_xticklabels()]
    assert heads == ["triton\nsmoke: conforms", "theirs\nsmoke: does not conform"]
    cells = {t.get_position(): t.get_text() for t in axes.texts}
    assert cells[0, 1] == "3/3 (1)" and cells[1, 1] == "✗ 2/3" and cells[1, 2] == "-"
    assert len(axes.patches) == 6 and figure.get_suptitle() == "Both"
    legend = {t.get_text() for t in figure.legends[0].texts}
    assert {"✗ cases failed", "all cases passed", "passed, (n) refused"} <= legend


def test_an_unknown_format_and_an_empty_picture_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(InvalidInputError, match=r"plot=.*svg"):
        picture.draw(REPORTS, tmp_path / "x.nothing")
    with pytest.raises(InvalidInputError, match="reports="):
        picture.draw([], tmp_path / "x.png")


@pytest.mark.parametrize("door", ["module", "program"])
def test_both_commands_draw(tmp_path: Path, door: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "folder" / "matrix.svg"
    arguments = ["torch_native", "--requirement", "self_merge", "--plot", str(path)]
    if door == "module":
        assert command(arguments) == 0
    else:
        pytest.importorskip("typer")
        from typer.testing import CliRunner

        from attn_backends.cli.app import build_app

        assert CliRunner().invoke(build_app(), ["conform", *arguments]).exit_code == 0
    assert "<svg" in path.read_text()
