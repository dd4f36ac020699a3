"""Sphinx reads these pages as they are: Markdown, with a reference made from docstrings."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from attn_backends.version import __version__  # noqa: E402

project = "attn_backends"
author = "the attn_backends contributors"
copyright = "the attn_backends contributors, Apache-2.0"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["results/**", "examples/**"]

# Reports among the pages nest under headings that are not always there.
suppress_warnings = ["myst.header"]

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = f"attn_backends {__version__}"
html_show_sourcelink = False

myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3

napoleon_numpy_docstring = False
napoleon_use_ivar = True  # an attribute of the docstring and the field itself are one thing
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 80


def leave_out_repository_links(app: Any, name: str, source: list[str]) -> None:
    """Turn links to folders and pages that are in the repository only into their text."""
    folder = (HERE / name).parent

    def kept(match: re.Match[str]) -> str:
        target = (folder / match["path"]).resolve()
        elsewhere = HERE not in target.parents or HERE / "examples" in target.parents
        only_there = target.is_dir() or (target.suffix == ".md" and elsewhere)
        return match["text"] if target.exists() and only_there else match[0]

    link = r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<path>[^)#:\s]+)[^)\s]*\)"
    source[0] = re.sub(link, kept, source[0])


def setup(app: Any) -> None:
    """Sphinx calls this when it starts."""
    app.connect("source-read", leave_out_repository_links)
