"""A document in, a page out: style, script and data in one file that asks nobody for anything."""

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from symrazor.core.files import write_atomically
from symrazor.report.content import LEVELS, Content, content

LIMIT = 3_000_000
"""Bytes of a page."""

SCRIPTS = (
    "draw.js",
    "chart.js",
    "table.js",
    "layers.js",
    "symmetries.js",
    "parts.js",
    "page.js",
)


def write_page(document: Mapping[str, Any], file: str | Path) -> Path:
    """Write the page of a document, whole or not at all.

    Args:
        document: see docs/how-to/read-the-page.md; only sections with data appear.
        file: where to.

    Returns:
        The file.

    Raises:
        ValueError: a document without questions, of another schema, or too large for a page.
        OSError: the folder cannot be written to.
    """
    path = Path(file)
    write_atomically(path, page_html(document).encode())
    return path


def page_html(document: Mapping[str, Any]) -> str:
    """The page of a document as one string of HTML, with fewer and smaller pictures if it must be.

    Raises:
        ValueError: see `write_page`.
    """
    size = 0
    for detail in LEVELS:
        page = _assemble(content(document, detail))
        size = len(page.encode())
        if size <= LIMIT:
            return page
    raise ValueError(
        f"expected a document whose page fits into {LIMIT:,} bytes, got {size:,} with the fewest "
        "pictures; do: fewer candidates, or readings with fewer layers"
    )


def _assemble(data: Content) -> str:
    style, script = _asset("page.css"), "\n".join(_asset(name) for name in SCRIPTS)
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_digest(style)}'; "
        f"script-src '{_digest(script)}'; base-uri 'none'; form-action 'none'"
    )
    heading = data.get("title") or "What the data ask for"
    only = data["questions"][0]["question"] if len(data["questions"]) == 1 else heading
    title = data.get("title") or only
    parts = {
        "policy": policy,
        "title": html.escape(title),
        "heading": html.escape(heading),
        "style": style,
        "intro": _intro(data),
        "contents": _contents(data),
        "questions": "\n".join(_question(q, i) for i, q in enumerate(data["questions"])),
        "data": embedded(data),
        "script": script,
    }
    page = _asset("page.html")
    head, *rest = page.split("{{")
    for piece in rest:  # one pass: what is put in is never looked at again
        name, _, tail = piece.partition("}}")
        head += parts[name] + tail
    return head


def embedded(data: Content) -> str:
    """JSON that no HTML parser mistakes for markup."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


@cache
def _asset(name: str) -> str:
    return resources.files("symrazor.report").joinpath(name).read_text(encoding="utf-8")


def _digest(source: str) -> str:
    """A source as the page's policy names it: nothing else may run."""
    return f"sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}"


def _intro(data: Content) -> str:
    """What the data are, in one line."""
    known = data.get("data")
    facts = [data.get("kind"), data.get("task")]
    if isinstance(known, dict):
        shape = known.get("shape")
        classes = known.get("classes")
        count = len(classes) if isinstance(classes, list) else classes
        facts = [
            known.get("path"),
            f"{known['n']:,} data" if isinstance(known.get("n"), int) else None,
            " × ".join(str(size) for size in shape) if isinstance(shape, list) else shape,
            f"{count} classes" if count else None,
            *facts,
        ]
    return ", ".join(f"<bdi>{html.escape(str(fact))}</bdi>" for fact in facts if fact)


def _contents(data: Content) -> str:
    """Links to the questions and to what follows them."""
    questions = data["questions"]
    links = [(f"q{i}", q["question"]) for i, q in enumerate(questions)] * (len(questions) > 1)
    layers = any(c["reading"].get("layers") for q in questions for c in q["candidates"])
    links += [("load", "Load the network")] * bool(layers or data.get("load"))
    links += [("numbers", "All numbers"), ("made", "How it was made")]
    return "".join(f'<li><a href="#{to}">{html.escape(text)}</a></li>' for to, text in links)


def _question(question: Content, number: int) -> str:
    """The question and its verdict: these are there without any script."""
    heading = html.escape(question["question"])
    return (
        f'<section class="question" id="q{number}" aria-labelledby="q{number}-title">'
        f'<h2 id="q{number}-title">{heading}</h2>'
        f'<p class="verdict">{_set(question["verdict"])}</p>'
        f'<div class="parts"></div></section>'
    )


def _set(text: str) -> str:
    """Running text, in which a number has a minus and stays with its unit."""
    together = re.sub(r"(?<=\d) (?=%|nats\b)", "&nbsp;", html.escape(text))
    return re.sub(r"(?<=[\s(])-(?=\d)", "&minus;", together)
