"""The documents are true: their Python runs, their links resolve, their tables are generated."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [body for kind, body in FENCE.findall(page.read_text()) if kind == language]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
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
        exec(compile(body, f"{page.name}[{number}]", "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_resolve(page: Path) -> None:
    prose = FENCE.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[\w-]*)?\)", prose):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_capability_table_is_what_the_backends_declare() -> None:
    code = "import sys; from attn_backends.cli.capability_table import rewrite as r; "
    code += "text = open(sys.argv[1]).read(); print(r(text) == text)"
    # The interpreter would add the CPU to what the Triton kernels run on.
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT / "README.md")],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.strip() == "True", (
        f"run python -m attn_backends.cli.capability_table README.md\n{done.stderr}"
    )


def test_environment_page_lists_every_variable() -> None:
    from attn_backends.environment import PREFIX, VARIABLES

    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", (ROOT / "docs/environment.md").read_text(), re.M)
    assert rows == [(PREFIX + name, text) for name, text in VARIABLES.items()]


README_COMMANDS = [
    line.strip()
    for body in blocks(ROOT / "README.md", "")
    for line in body.splitlines()
    if line.strip().startswith("attn-backends ")
]


@pytest.mark.parametrize("line", [line for line in README_COMMANDS if " generate " not in line])
def test_readme_commands_run(line: str) -> None:
    """``generate`` fetches a model; ``make demo`` runs it."""
    from typer.testing import CliRunner

    from attn_backends.cli.app import build_app

    result = CliRunner().invoke(build_app(), shlex.split(line)[1:])
    assert result.exit_code == 0, result.output


def test_readme_commands_are_found() -> None:
    assert len(README_COMMANDS) >= 5
    makefile = (ROOT / "Makefile").read_text()
    for target in ("demo", "test"):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_performance_tables_are_made_from_the_results() -> None:
    from attn_backends.bench.tables import rewrite

    page = ROOT / "docs/performance.md"
    assert rewrite(page) == page.read_text(), (
        "run python -m attn_backends.bench.tables docs/performance.md"
    )


def test_results_say_where_they_come_from() -> None:
    import json

    for file in (ROOT / "docs/results").rglob("*.json"):
        meta = json.loads(file.read_text()).get("meta", json.loads(file.read_text()))
        if "environment" not in meta:  # doctor's own form
            assert all(meta.get(k) for k in ("command", "date", "gpu", "torch", "commit")), file
