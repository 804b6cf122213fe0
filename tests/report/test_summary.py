"""Test the short table of a question and its HTML for notebooks."""

import copy
from typing import Any

from page_reader import Page

from symrazor.report.summary import DELIVERED, question_html, short_table

QUESTION: dict[str, Any] = {
    "question": "Does position matter?",
    "headline": "Position matters.",
    "verdict": "Position matters. Probability 97 %. A margin.",
    "summary": {"certainty": "Probability 97 %.", "recommendation": "Use the MLP.", "score": ""},
    "chosen": "mlp",
    "candidates": [
        {
            "name": name,
            "log_evidence": evidence,
            "spread": 4.2,
            "left_out": {"n": 10, "log_likelihood": -5.0},
            "reading": {"evidence": {"log_evidence": -1.0}, "test": {"accuracy": 0.95, "nll": 0.1}},
        }
        for name, evidence in (("cnn", -1200.4), ("mlp", -1300.6))
    ],
    "final": {
        "name": "mlp",
        "reading": {"evidence": {"log_evidence": -1.0}, "test": {"accuracy": 0.97}},
    },
}


def test_the_short_table_has_a_row_per_candidate_and_one_for_the_delivered_network() -> None:
    table = short_table(QUESTION)
    assert table.heads == (
        *("network", "log evidence", "left-out nats per sample", "held-out accuracy"),
    )
    assert table.rows == (
        ("cnn", "-1,200 ± 4", "-0.500", "95.0 %"),
        ("mlp", "-1,301 ± 4", "-0.500", "95.0 %"),
        (DELIVERED, "", "", "97.0 %"),
    )
    assert table.chosen == 1


def test_columns_without_numbers_are_left_out() -> None:
    question = copy.deepcopy(QUESTION) | {"final": None}
    for candidate in question["candidates"]:
        candidate["left_out"], candidate["spread"] = None, 0.0
        candidate["reading"]["test"] = {}
    table = short_table(question)
    assert table.heads == ("network", "log evidence")
    assert table.rows == (("cnn", "-1,200"), ("mlp", "-1,301"))


def test_html_begins_with_the_answer_and_folds_the_margins() -> None:
    text = question_html(QUESTION)
    assert "<strong>Position matters. Probability 97 %.</strong>" in text
    assert text.index("Use the MLP.") < text.index("<table") < text.index("<details")
    assert "A margin." in text[text.index("<details") :]


def test_text_of_the_user_is_not_markup() -> None:
    wild = {**QUESTION, "headline": "<script>alert(1)</script>", "question": "<img src=x>"}
    tags = {tag for tag, _ in Page(question_html(wild)).elements}
    assert not {"script", "img"} & tags
