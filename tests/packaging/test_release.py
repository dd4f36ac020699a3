"""A release keeps its form: the changelog, the version, and every name that was promised."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import attn_backends as ab

sys.path.insert(0, str(Path(__file__).parent))
from building import ROOT

PUBLIC = Path(__file__).with_name("public_names.txt")
SECTIONS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")


def headings(text: str) -> list[tuple[str, str]]:
    """Marks and words of all headings."""
    return re.findall(r"^(#+) (.*)$", text, flags=re.MULTILINE)


def check_changelog(text: str, version: str) -> None:
    """Raise AssertionError unless the text has the form of Keep a Changelog."""
    found = headings(text)
    assert found[0] == ("#", "Changelog")
    releases = [words for marks, words in found if marks == "##"]
    assert releases[0] == "Unreleased" or releases[0].startswith(f"{version} - ")
    dated = [r for r in releases if r != "Unreleased"]
    assert releases in (dated, ["Unreleased", *dated])
    numbers = []
    for release in dated:
        match = re.fullmatch(r"(\d+)\.(\d+)\.(\d+) - \d{4}-\d{2}-\d{2}", release)
        assert match, f"{release!r} is not MAJOR.MINOR.PATCH - YYYY-MM-DD"
        numbers.append(tuple(map(int, match.groups())))
    assert numbers == sorted(set(numbers), reverse=True)
    for part in re.split(r"^## .*$", text, flags=re.MULTILINE)[1:]:
        sections = [words for marks, words in headings(part) if marks == "###"]
        assert sections and len(set(sections)) == len(sections)
        assert sections == [name for name in SECTIONS if name in sections], sections
    assert {marks for marks, _ in found} <= {"#", "##", "###"}


def test_the_changelog_keeps_its_form() -> None:
    check_changelog((ROOT / "CHANGELOG.md").read_text(), ab.__version__)


@pytest.mark.parametrize(
    "text",
    [
        "# Changes\n## Unreleased\n### Added\n",
        "# Changelog\n## 0.1.0\n### Added\n",
        "# Changelog\n## Unreleased\n### Novelties\n",
        "# Changelog\n## Unreleased\n### Fixed\n### Added\n",
        "# Changelog\n## Unreleased\n",
        "# Changelog\n## Unreleased\n### Added\n## 0.1.0 - 2026-01-01\n### Added\n"
        "## 0.2.0 - 2026-02-01\n### Added\n",
    ],
)
def test_another_form_is_found(text: str) -> None:
    with pytest.raises(AssertionError):
        check_changelog(text, "0.1.0")


def test_the_version_is_one_number() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", ab.__version__)
    assert "0.1.0" not in (ROOT / "pyproject.toml").read_text(), "the version has one home"


def parameters(name: str) -> list[str]:
    """Parameters of a public callable, in order; none for plain values."""
    found = getattr(ab, name)
    if not callable(found) or (isinstance(found, type) and issubclass(found, Exception)):
        return []
    return [
        parameter.name
        for parameter in inspect.signature(found).parameters.values()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and not parameter.name.startswith("_")
    ]


def promised() -> dict[str, list[str]]:
    lines = [line for line in PUBLIC.read_text().splitlines() if not line.startswith("#")]
    return {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}


def test_every_name_that_was_promised_is_there_with_its_parameters() -> None:
    """Take a line out of ``public_names.txt`` only with an entry under Removed or Changed."""
    for name, names in promised().items():
        assert name in ab.__all__, f"{name} was public"
        now = parameters(name)
        assert [n for n in names if n not in now] == [], f"{name} lost parameters"
        kept = [n for n in now if n in names]
        assert kept == names, f"{name} takes its parameters in another order"


def test_a_release_promises_every_public_name() -> None:
    """``python tests/packaging/test_release.py`` writes the list anew, before a release."""
    (_, top), *_ = (h for h in headings((ROOT / "CHANGELOG.md").read_text()) if h[0] == "##")
    assert len(promised()) > 30
    if top != "Unreleased":
        assert sorted(promised()) == sorted(ab.__all__)


if __name__ == "__main__":
    head = "# What docs/stability.md promises: names of attn_backends, and their parameters."
    lines = [f"{name}: {' '.join(parameters(name))}".rstrip() for name in sorted(ab.__all__)]
    PUBLIC.write_text("\n".join([head, *lines]) + "\n")


def test_reasons_ask_for_the_versions_that_the_package_asks_for() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    code = """
import sys
missing = ("triton", "flash_attn", "flashinfer")
sys.modules.update(dict.fromkeys(missing))  # None: the import fails
import attn_backends as ab
for info in ab.list_backends():
    for reason in info.reasons:
        print(info.name, reason.argument, reason.want)
"""
    env = {"PYTHONPATH": str(ROOT), "PATH": "", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    wanted = [line.split(" ", 2) for line in done.stdout.splitlines()]
    for backend, argument, distribution in (
        ("triton", "triton", "triton"),
        ("flash_attention", "flash_attn", "flash-attn"),
        ("flashinfer", "flashinfer", "flashinfer-python"),
    ):
        version = re.search(rf'"{distribution}(>=[\d.]+)', project)
        assert version is not None and [backend, argument, version[1]] in wanted, wanted
