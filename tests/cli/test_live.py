"""Test the display of a running command."""

import io

from rich.console import Console

from symrazor.cli.live import Display
from symrazor.discovery.question import Step

STEPS = [Step("comparing", n, 3, "a plain CNN" if n else "", 65.4 - n) for n in range(4)]


def shown(is_terminal: bool) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, width=100)
    with Display(console) as display:
        display.tell("data: 300 series")
        for step in STEPS:
            display.tell(step)
        display.tell("  final training")
    return file.getvalue()


def test_piped_output_has_one_line_per_stage() -> None:
    assert shown(False) == "data: 300 series\n  comparing\n  final training\n"


def test_a_terminal_shows_what_runs_the_best_network_and_the_time_left() -> None:
    text = shown(True)
    assert "3/3" in text
    assert "best so far: a plain CNN, 1:02 left" in text


def test_status_without_a_time_or_a_network() -> None:
    assert Step("s", 0, 1).status == ""
    assert Step("s", 0, 1, "", 3.2).status == "0:03 left"


def test_a_step_is_a_message_that_can_be_printed() -> None:
    assert str(Step("comparing", 2, 5)) == "  comparing: 2 of 5"
    assert str(Step("comparing", 2, 5, last="a CNN")) == "  comparing: 2 of 5, a CNN"
