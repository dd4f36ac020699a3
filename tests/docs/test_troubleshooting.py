"""Every message on the page about troubleshooting is one that the library says today."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from doc_mistakes import MISTAKES, message

PAGE = Path(__file__).resolve().parents[2] / "docs/troubleshooting.md"
SHOWN = re.findall(r"^```text\n(.*?)\n```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def pattern(shown: str) -> re.Pattern[str]:
    return re.compile(re.escape(shown).replace(re.escape("..."), ".*"), re.DOTALL)


@pytest.fixture(autouse=True)
def own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_backends import environment
    from attn_backends.registry.registry import TABLE

    monkeypatch.setattr(TABLE, "entries", dict(TABLE.entries))
    monkeypatch.setattr(environment, "_warned", set())


@pytest.mark.parametrize("number", range(len(MISTAKES)), ids=[m.__name__ for m in MISTAKES])
def test_message_stands_on_the_page(number: int, tmp_path: Path) -> None:
    said = message(MISTAKES[number], tmp_path)
    found = [shown for shown in SHOWN if pattern(shown).fullmatch(said)]
    assert len(found) == 1, f"found {len(found)} times on the page: {said}"


def test_every_message_on_the_page_is_said(tmp_path: Path) -> None:
    said = [message(m, tmp_path) for m in MISTAKES]
    never = [shown for shown in SHOWN if not any(pattern(shown).fullmatch(s) for s in said)]
    assert not never
    assert len(SHOWN) == len(MISTAKES) > 30


def test_a_message_that_nobody_says_is_found() -> None:
    matches: Callable[[str], object] = pattern("window=... (allowed: None)").fullmatch
    assert matches("window=3 (allowed: None)") and not matches("window=3 (allowed: None); fix")
