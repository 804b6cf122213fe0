"""Configure the documentation: `make docs` builds it into site/."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

from symrazor import __version__

project = "symrazor"
author = copyright = "The symrazor authors"
release = __version__

extensions = [
    "mathml",
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "markdown_docstrings",
]
exclude_patterns = ["_ext", "**/*.ipynb"]

myst_enable_extensions = ["dollarmath", "amsmath", "attrs_inline"]
myst_heading_anchors = 3

# Copy the command, not the prompt or the output.
copybutton_exclude = ".linenos, .gp, .go"

autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
napoleon_numpy_docstring = False

html_theme = "furo"
html_math_renderer = "mathml"
html_title = f"symrazor {release}"
html_static_path: list[str] = []
# Nothing is loaded from other servers: no fonts, no scripts.
html_theme_options = {"navigation_with_keys": True}
