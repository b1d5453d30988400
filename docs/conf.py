"""Sphinx configuration: `make docs` builds without warnings, and the pages need no network."""

from __future__ import annotations

import base64
import io
import re
from typing import Any

import hetplan

project = "hetplan"
author = "the hetplan authors"
copyright = "the hetplan authors"
version = release = hetplan.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "numpydoc"]
myst_enable_extensions = ["dollarmath"]
# A price such as "3 $/h" is no formula.
myst_dmath_allow_space = False
myst_dmath_allow_digits = False
myst_heading_anchors = 3
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]

# `name` in a docstring is a link where the name is documented, and code otherwise.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "none"
# numpydoc loads autosummary; no page uses it.
autosummary_generate = False
numpydoc_show_class_members = False
toc_object_entries = False

html_theme = "alabaster"
html_theme_options = {
    "description": "Plan LLM serving on heterogeneous GPUs",
    "fixed_sidebar": True,
    "page_width": "1240px",
    "sidebar_width": "230px",
    "body_max_width": "none",
    "font_family": "system-ui, sans-serif",
    "head_font_family": "system-ui, sans-serif",
    "code_font_size": "0.8em",
}
html_sidebars = {"**": ["about.html", "navigation.html", "searchbox.html"]}
html_show_sphinx = False
html_math_renderer = "mathtext"


def _formula(latex: str, size: float) -> tuple[str, float]:
    """A formula as an image that the page carries, and how far it reaches below the line, in points."""
    from matplotlib import rc_context
    from matplotlib.font_manager import FontProperties
    from matplotlib.mathtext import math_to_image

    image = io.BytesIO()
    with rc_context({"mathtext.fontset": "cm", "svg.hashsalt": "hetplan"}):
        depth = math_to_image(f"${latex}$", image, prop=FontProperties(size=size), dpi=72, format="svg")
    svg = re.sub(rb"<metadata>.*?</metadata>", b"", image.getvalue(), flags=re.DOTALL)
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode(), float(depth)


def _visit_inline(writer: Any, node: Any) -> None:
    from docutils.nodes import SkipNode

    source, depth = _formula(node.astext(), 12)
    alt = writer.attval(node.astext())
    writer.body.append(f'<img class="math" src="{source}" alt="{alt}" style="vertical-align: -{depth:.1f}pt">')
    raise SkipNode


def _visit_block(writer: Any, node: Any) -> None:
    from docutils.nodes import SkipNode

    # One picture a line: matplotlib sets no aligned formulas.
    writer.body.append('<div class="math">')
    for part in re.split(r"\\qquad", " ".join(node.astext().split())):
        latex = part.strip()
        source, _ = _formula(latex, 14)
        writer.body.append(f'<p><img src="{source}" alt="{writer.attval(latex)}"></p>')
    writer.body.append("</div>")
    raise SkipNode


def setup(app: Any) -> None:
    """Formulas are drawn by matplotlib, so that pages read the same without a network."""
    app.add_html_math_renderer("mathtext", inline_renderers=(_visit_inline, None), block_renderers=(_visit_block, None))
