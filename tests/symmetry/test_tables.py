"""Test the table of collapsed paths."""

import json

import symrazor as sr


def test_the_table_and_the_report(pair_fit: sr.Fit) -> None:
    plain = pair_fit.collapse()
    text = sr.collapse_table(plain)
    for word in ("FFC", "Conv", "dropped", "parameters", "FLOPs per input", "ms for 32 inputs"):
        assert word in text
    assert "chosen by evidence" in text
    assert json.loads(json.dumps(plain.collapse_report)) == plain.collapse_report
