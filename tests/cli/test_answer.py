"""Test the answer as it is printed: the verdict first, a table that fits, the rest on request."""

import pytest
import torch
from rich.console import Console

from symrazor.cli.answer import compact, full_table, print_question
from symrazor.discovery.api import discover


@pytest.fixture(scope="module")
def question() -> dict[str, object]:
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    return discover(x, x[:, :1] - x[:, 1:2], epochs=2).to_dict()["questions"][0]


def printed(table: object, width: int) -> list[str]:
    console = Console(width=width)
    with console.capture() as text:
        console.print(table)
    return text.get().splitlines()


def test_the_verdict_and_its_probability_come_first(
    question: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    print_question(question)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{question['headline']} ")
    assert question["summary"]["certainty"] in lines[0]
    assert question["summary"]["recommendation"] in lines[0]
    assert "log evidence" not in lines[0]  # margins are details


def test_the_short_table_has_four_columns_that_fit_in_80_characters(
    question: dict[str, object],
) -> None:
    table = compact(question)
    assert len(table.columns) <= 4
    lines = printed(table, 80)
    assert len(lines) == 2 + len(question["candidates"])  # no cell is wrapped
    assert all("…" not in line for line in lines)


def test_verbose_adds_all_sentences_and_all_numbers(
    question: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    print_question(question, verbose=True)
    text = capsys.readouterr().out
    assert question["verdict"] in text
    assert "complexity" in text
    columns = len(full_table(question["candidates"]).columns)
    assert columns > 4


def test_quiet_prints_only_the_verdict(
    question: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    print_question(question, quiet=True)
    assert capsys.readouterr().out == f"{question['verdict']}\n"


def test_evidence_and_complexity_of_the_table_agree_with_the_reading(
    question: dict[str, object],
) -> None:
    candidate = question["candidates"][0]
    evidence = candidate["reading"]["evidence"]
    (row,) = printed(full_table([candidate]), 200)[3:4]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    complexity = evidence["log_likelihood"] - evidence["log_evidence"]
    assert cells[1] == f"{candidate['log_evidence']:,.0f}"
    assert cells[4] == f"{complexity:,.0f}"
