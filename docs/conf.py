"""Sphinx configuration: `make docs` builds without warnings."""

from __future__ import annotations

import hetplan

project = "hetplan"
author = "the hetplan authors"
copyright = "the hetplan authors"
version = release = hetplan.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
    "numpydoc",
]
myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 3
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]

# `name` in a docstring is a link where the name is documented, and code otherwise.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_typehints_format = "short"
numpydoc_show_class_members = False
numpydoc_xref_param_type = False
# numpydoc loads autosummary; no page uses it.
autosummary_generate = False

html_theme = "alabaster"
html_theme_options = {
    "description": "Plan LLM serving on heterogeneous GPUs",
    "fixed_sidebar": True,
    "page_width": "1180px",
    "sidebar_width": "230px",
    "body_max_width": "none",
    "font_family": "system-ui, sans-serif",
    "head_font_family": "system-ui, sans-serif",
}
html_sidebars = {"**": ["about.html", "navigation.html", "searchbox.html"]}
html_show_sphinx = False
