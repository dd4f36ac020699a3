"""The pages, and what is in them."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```([\w{}-]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> list[str]:
    """Bodies of fenced blocks in these languages; ``""`` is none."""
    return [body for kind, body in FENCE.findall(page.read_text()) if kind in languages]


@cache
def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and the site make them."""
    if page.suffix != ".md":
        return set()
    prose = FENCE.sub("", page.read_text())
    titles = re.findall(r"^#{1,6} +(.*?) *$", prose, re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles)
    return set(plain)
