"""A page as a reader of its HTML sees it."""

import json
from html.parser import HTMLParser
from typing import Any


class Page(HTMLParser):
    """Every element of a page with its attributes, and the text of each script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.lasttag == "script" and self.scripts:
            self.scripts[-1] += data
        else:
            self.words += data

    @property
    def data(self) -> Any:
        return json.loads(self.scripts[0])
