"""Turn a document (plain numbers, lists and strings) into an HTML page or a notebook table.

The page is one self-contained file that loads nothing from the network. May import: `core`.
"""

from symrazor.report.page import page_html, write_page

__all__ = [
    "page_html",
    "write_page",
]
