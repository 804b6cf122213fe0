"""Render formulas as MathML while the site is built: pages need no script and no network."""

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator


def visit_inline(self: HTML5Translator, node: nodes.math) -> None:
    """Write an inline formula."""
    self.body.append(convert(node.astext(), display="inline"))
    raise nodes.SkipNode


def visit_display(self: HTML5Translator, node: nodes.math_block) -> None:
    """Write a displayed formula."""
    self.body.append(f'<div class="formula">{convert(node.astext(), display="block")}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the renderer with Sphinx."""
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_display, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
