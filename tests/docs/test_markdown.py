"""The documents are true: their Python runs, their links resolve, their tables are generated."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from doc_pages import FENCE, PAGES, ROOT, anchors, blocks, name_of


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_blocks_run_in_order(page: Path, tmp_path: Path, monkeypatch) -> None:
    code = blocks(page, "python")
    if not code:
        assert "```python" not in page.read_text()
        return
    from attn_backends.registry.registry import TABLE

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(TABLE, "entries", dict(TABLE.entries))  # pages may register backends
    namespace: dict[str, object] = {"__name__": "__docs__"}
    for number, body in enumerate(code):
        exec(compile(body, f"{page.name}[{number}]", "exec", dont_inherit=True), namespace)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git to list the pages")
def test_every_page_is_among_those_that_are_tested() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    tracked = {ROOT / name for name in listed.stdout.split()}
    assert {p for p in tracked if p.exists()} <= set(PAGES) and len(tracked) > 20


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_resolve(page: Path) -> None:
    prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text()))
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", prose):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        there = (page.parent / target).resolve() if target else page
        assert there.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(there), f"{page.name} links to {target}#{anchor}"


@pytest.mark.parametrize("page", ["README.md", "docs/reference/options.md"])
def test_capability_table_is_what_backends_declare_and_what_the_last_runs_counted(page) -> None:
    code = "import sys; from pathlib import Path; "
    code += "from attn_backends.cli.capability_table import results_of, rewrite; "
    code += "page = Path(sys.argv[1]); text = page.read_text(); "
    code += "print(rewrite(text, results_of(page)) == text)"
    # The interpreter would add the CPU to what the Triton kernels run on.
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT / page)],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.strip() == "True", (
        f"run python -m attn_backends.cli.capability_table {page}\n{done.stderr}"
    )


def test_capability_table_tells_every_run_of_a_backend_and_which_have_none(tmp_path) -> None:
    from attn_backends.cli.capability_table import capability_table
    from attn_backends.conformance.checks import REQUIREMENTS

    folder = tmp_path / "h200"
    folder.mkdir()
    for version, failed in (("2", 0), ("3", 5)):
        report = {
            "backend": "flash_attention", "options": {"version": version},
            "meta": {"gpu": "NVIDIA H200"},
            "counts": {"passed": 7, "refused": 2, "failed": failed, "xfailed": 0},
            "level": "full" if version == "2" else "smoke",
            "requirements": {name: {} for name in (REQUIREMENTS if version == "2" else ["core"])},
        }  # fmt: skip
        (folder / f"conformance-fa{version}.json").write_text(json.dumps(report))
    head, _, *rows = capability_table(tmp_path).splitlines()
    assert head.endswith("| conformance on one NVIDIA H200 |")
    last = {row.split("`")[1]: row.rsplit("|", 2)[1].strip() for row in rows}
    told, *absent = last.pop("flash_attention").split("; version 2, ")
    assert told == (
        "version 2: 7 passed, 2 refused; version 3: 7 passed, 2 refused, 5 failed "
        f"(level smoke, 1 of {len(REQUIREMENTS)} requirements only)"
    )
    assert len(absent) == 2 and absent[0] == "source package: not run"
    assert all(part.endswith("not run") for runs in last.values() for part in runs.split("; "))
    assert len(last) > 4


def test_every_promise_of_bits_names_a_test_that_exists() -> None:
    page = (ROOT / "docs/determinism.md").read_text()
    rows = [r for r in re.findall(r"^\|(.*)\|$", page, re.M) if not set(r) <= set("|- ")]
    promises = [row for row in rows if row.split("|")[0].strip() not in ("promise", "statement")]
    places = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "attn_backends/conformance").rglob("*.py")]
    sources = "\n".join(path.read_text() for path in places)
    for row in promises:
        names = re.findall(r"`((?:test|check)_\w+)`", row.rsplit("|", 1)[1])
        assert names, f"no test stands behind: {row}"
        assert all(f"def {name}(" in sources for name in names), row
    assert len(promises) > 30


def test_environment_page_lists_every_variable() -> None:
    from attn_backends.environment import PREFIX, VARIABLES

    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", (ROOT / "docs/environment.md").read_text(), re.M)
    assert rows == [(PREFIX + name, text) for name, text in VARIABLES.items()]


TABLED = [page for page in PAGES if "<!-- results: " in page.read_text()]


@pytest.mark.parametrize("page", TABLED, ids=name_of)
def test_tables_are_made_from_the_results(page: Path) -> None:
    from attn_backends.bench.tables import rewrite

    assert rewrite(page) == page.read_text(), (
        f"run python -m attn_backends.bench.tables {name_of(page)}"
    )


def test_pages_with_tables_are_found() -> None:
    assert {page.name for page in TABLED} >= {"performance.md", "vllm.md", "sglang.md"}


def test_results_say_where_they_come_from() -> None:
    for file in (ROOT / "docs/results").rglob("*.json"):
        meta = json.loads(file.read_text()).get("meta", json.loads(file.read_text()))
        if "environment" not in meta:  # doctor's own form
            assert all(meta.get(k) for k in ("command", "date", "torch", "commit")), file
            assert meta.get("gpu") or file.parent.name in ("cpu", "interpreter"), file


def test_worked_numbers_stand_in_the_code_beside_them() -> None:
    """Each number in a table of the page about mathematics is in a block of the same section."""
    text = (ROOT / "docs/math.md").read_text()
    checked = 0
    for section in re.split(r"^## ", text, flags=re.MULTILINE):
        code = "\n".join(body for kind, body in FENCE.findall(section) if kind == "python")
        known = {float(n.replace("_", "")) for n in re.findall(r"\d[\d_]*\.?\d*(?:e-?\d+)?", code)}
        rows = re.findall(r"^\|(.*)\|$", section, re.MULTILINE)
        for cell in (c.strip() for row in rows for c in row.split("|")):
            number = re.match(r"-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?(?=$|[ %])", cell)
            if number and abs(value := float(number[0].replace(",", ""))) > 9:
                assert value in known, f"{value} stands in a table only: {section[:30]!r}"
                checked += 1
    assert checked > 30
