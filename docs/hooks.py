"""Turn LaTeX into MathML while the site is built, so that pages need no script and no network."""

import html
import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    """Replace every formula that arithmatex marked."""

    def render(match: re.Match[str]) -> str:
        display = "block" if match.group(1) == "div" else "inline"
        return str(convert(html.unescape(match.group(2)), display=display))

    return FORMULA.sub(render, content)
