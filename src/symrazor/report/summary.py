"""Summarise the answer to a question of a document: the short table, and HTML for notebooks."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from symrazor.report.content import visible_text
from symrazor.report.page import verdict_html

SCORES = ("accuracy", "mse", "nll")
"""Score on held-out data in the short table: the first of these that a candidate has."""
DELIVERED = "delivered network"
_CELL = "padding:.2em .8em;text-align:"


@dataclass(frozen=True)
class ShortTable:
    """The candidates in at most four columns.

    Args:
        heads: titles of the columns; the first column is text, the others are numbers.
        rows: one row per candidate, and one for the delivered network if it was trained further.
        chosen: number of the row of the recommended candidate, or None.
    """

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    chosen: int | None


def short_table(question: Mapping[str, Any]) -> ShortTable:
    """Return evidence, left-out and held-out score of every candidate of a question."""
    candidates, final = question["candidates"], question.get("final")
    tests = [c["reading"].get("test") or {} for c in [*candidates, *([final] if final else [])]]
    score = next((key for key in SCORES if any(key in test for test in tests)), None)
    has_left_out = any(candidate.get("left_out") for candidate in candidates)
    heads = ["network", "log evidence"]
    heads += ["left-out nats per sample"] * has_left_out
    heads += [f"held-out {score}"] * (score is not None)
    rows = []
    for candidate, test in zip([*candidates, final], tests, strict=False):
        is_final = candidate is final
        row = [DELIVERED, ""] if is_final else [str(candidate["name"]), _evidence(candidate)]
        left_out = None if is_final else candidate.get("left_out")
        if has_left_out:
            row.append(f"{left_out['log_likelihood'] / left_out['n']:z.3f}" if left_out else "")
        if score is not None:
            row.append(format_score(score, test.get(score)))
        rows.append(tuple(row))
    names = [candidate["name"] for candidate in candidates]
    chosen = question.get("chosen")
    number = names.index(chosen) if chosen in names else None
    return ShortTable(tuple(heads), tuple(rows), number)


def _evidence(candidate: Mapping[str, Any]) -> str:
    of_reading = candidate["reading"]["evidence"]["log_evidence"]
    spread = candidate.get("spread")
    text = f"{float(candidate.get('log_evidence', of_reading)):z,.0f}"
    return f"{text} ± {spread:,.0f}" if spread else text


def format_score(key: str, value: Any) -> str:
    """Format a score on held-out data; "" if there is none."""
    if value is None:
        return ""
    return f"{100 * value:.1f} %" if key == "accuracy" else f"{value:.3f}"


def question_html(question: Mapping[str, Any]) -> str:
    """Return answer, probability, recommendation and candidates; the other sentences are folded."""
    summary = question["summary"]
    headline = f"{question['headline']} {summary['certainty']}".strip()
    keys = ("notes", "recommendation", "score", "invariances", "not_tested")
    sentences = " ".join(summary[key] for key in keys if summary.get(key))
    table = short_table(question)
    head = "".join(
        f'<th scope="col" style="{_CELL}{"right" if k else "left"}">{html.escape(name)}</th>'
        for k, name in enumerate(table.heads)
    )
    rows = "".join(_row(row, k == table.chosen) for k, row in enumerate(table.rows))
    return (
        '<div style="font-family:system-ui,sans-serif;max-width:46em;line-height:1.5">'
        f'<p style="margin:.3em 0;opacity:.7">{_text(question["question"])}</p>'
        f'<p style="margin:.3em 0;font-size:1.1em"><strong>{_text(headline)}</strong></p>'
        f'<p style="margin:.3em 0">{_text(sentences)}</p>'
        '<table style="border-collapse:collapse;font-variant-numeric:tabular-nums">'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        f"<details><summary>Why</summary><p>{verdict_html(question['verdict'])}</p></details></div>"
    )


def _row(row: Sequence[str], is_chosen: bool) -> str:
    weight = ";font-weight:bold" if is_chosen else ""
    first = f'<th scope="row" style="{_CELL}left;font-weight:normal{weight}">{_text(row[0])}</th>'
    cells = (f'<td style="{_CELL}right{weight}">{_text(cell)}</td>' for cell in row[1:])
    return f"<tr>{first}{''.join(cells)}</tr>"


def _text(text: str) -> str:
    return html.escape(visible_text(text))
