"""Sphinx reads these pages as they are: Markdown, with a reference made from docstrings."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

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
