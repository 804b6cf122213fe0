"""Write a document as one self-contained HTML page: style, script and data in a single file."""

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
from symrazor.report.content import LEVELS, Content, page_content

MAX_PAGE_BYTES = 3_000_000
"""Maximal size of a page."""

SCRIPTS = "draw.js chart.js table.js layers.js symmetries.js parts.js answer.js page.js".split()


def write_page(document: Mapping[str, Any], file: str | Path) -> Path:
    """Write the page of a document atomically.

    Args:
        document: see docs/how-to/read-the-page.md; only sections with data appear.
        file: the HTML file.

    Returns:
        The path of the file.

    Raises:
        ValueError: if the document has no questions, has another schema, or is too large.
        OSError: if the folder cannot be written to.
    """
    path = Path(file)
    write_atomically(path, page_html(document).encode())
    return path


def page_html(document: Mapping[str, Any]) -> str:
    """Return the page of a document as HTML, with fewer and smaller images if it is too large.

    Raises:
        ValueError: see `write_page`.
    """
    size = 0
    for detail in LEVELS:
        page = _assemble(page_content(document, detail))
        size = len(page.encode())
        if size <= MAX_PAGE_BYTES:
            return page
    raise ValueError(
        f"The page has {size:,} bytes even with the fewest images, more than the limit of "
        f"{MAX_PAGE_BYTES:,}. Use fewer candidates or readings with fewer layers."
    )


def _assemble(data: Content) -> str:
    style, script = read_asset("page.css"), "\n".join(read_asset(name) for name in SCRIPTS)
    policy = (
        f"default-src 'none'; img-src data:; style-src '{content_digest(style)}'; "
        f"script-src '{content_digest(script)}'; base-uri 'none'; form-action 'none'"
    )
    heading = data.get("title") or "Symmetry report"
    single_question = data["questions"][0]["question"] if len(data["questions"]) == 1 else heading
    title = data.get("title") or single_question
    parts = {
        "policy": policy,
        "title": html.escape(title),
        "heading": html.escape(heading),
        "style": style,
        "intro": _intro(data),
        "contents": _contents(data),
        "questions": "\n".join(_question(q, i) for i, q in enumerate(data["questions"])),
        "data": embedded_json(data),
        "script": script,
    }
    return fill_template("page.html", parts)


def fill_template(name: str, parts: Mapping[str, str]) -> str:
    """Return a template of this package with its {{parts}} filled in."""
    head, *blocks = read_asset(name).split("{{")
    for piece in blocks:  # a single pass: inserted text is never expanded again
        part, _, tail = piece.partition("}}")
        head += parts[part] + tail
    return head


def embedded_json(data: Content) -> str:
    """Return JSON without characters that an HTML parser could take for markup."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


@cache
def read_asset(name: str) -> str:
    """Return a text file of this package."""
    return resources.files("symrazor.report").joinpath(name).read_text(encoding="utf-8")


def content_digest(source: str) -> str:
    """Return the hash of a source for the content security policy; nothing else may run."""
    return f"sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}"


def _intro(data: Content) -> str:
    """Describe the data in one line."""
    description = data.get("data")
    facts = [data.get("kind"), data.get("task")]
    if isinstance(description, dict):
        shape = description.get("shape")
        classes = description.get("classes")
        count = len(classes) if isinstance(classes, list) else classes
        facts = [
            description.get("path"),
            f"{description['n']:,} data" if isinstance(description.get("n"), int) else None,
            " × ".join(str(size) for size in shape) if isinstance(shape, list) else shape,
            f"{count} classes" if count else None,
            *facts,
        ]
    return ", ".join(f"<bdi>{html.escape(str(fact))}</bdi>" for fact in facts if fact)


def _contents(data: Content) -> str:
    """Return links to the questions and to the sections that follow them."""
    questions = data["questions"]
    links = [(f"q{i}", q["question"]) for i, q in enumerate(questions)] * (len(questions) > 1)
    layers = any(c["reading"].get("layers") for q in questions for c in q["candidates"])
    links += [("load", "Load the network")] * bool(layers or data.get("load"))
    links += [("numbers", "All numbers"), ("made", "How this report was made")]
    return "".join(f'<li><a href="#{to}">{html.escape(text)}</a></li>' for to, text in links)


def _question(question: Content, number: int) -> str:
    """Return a question and its verdict, which are readable without JavaScript."""
    heading = html.escape(question["question"])
    return (
        f'<section class="question" id="q{number}" aria-labelledby="q{number}-title">'
        f'<h2 id="q{number}-title">{heading}</h2>'
        f"{_verdict(question)}"
        f'<div class="parts"></div></section>'
    )


def _verdict(question: Content) -> str:
    """Return the answer, with the details folded away if its sentences are known one by one."""
    summary, verdict = question.get("summary"), verdict_html(question["verdict"])
    if not isinstance(summary, dict) or not question.get("headline"):
        return f'<p class="verdict">{verdict}</p>'
    first = " ".join(str(summary.get(key, "")) for key in ("certainty", "notes"))
    then = " ".join(str(summary.get(key, "")) for key in ("recommendation", "score", "invariances"))
    return (
        f'<p class="verdict answer"><strong>{_typeset(question["headline"])}</strong></p>'
        f'<p class="verdict">{_typeset(first.strip())}</p>'
        f'<p class="advice">{_typeset(then.strip())}</p>'
        f'<details class="why"><summary>Why: all margins</summary><p>{verdict}</p></details>'
    )


def verdict_html(text: str) -> str:
    """Return a verdict with its first sentence, or its leading **bold** text, in bold."""
    match = re.match(r"\*\*(.+?)\*\*\s*", text) or re.match(r"(.+?[.!?])(?:\s+(?=\S)|\s*$)", text)
    answer, details = (match[1], text[match.end() :]) if match else (text, "")
    return f"<strong>{_typeset(answer)}</strong> {_typeset(details)}".rstrip()


def _typeset(text: str) -> str:
    """Escape running text; use minus signs and keep numbers with their units."""
    together = re.sub(r"(?<=\d) (?=%|nats\b)", "&nbsp;", html.escape(text))
    minus = re.sub(r"(?<=[\s(])-(?=\d)", "&minus;", together)
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", minus)
