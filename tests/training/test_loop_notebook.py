"""Test progress bars in the kernel of a notebook."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import symrazor as sr
from symrazor.training.loop import NotebookBar, fraction_bar, in_notebook


class Display:
    """Records what a notebook shows, in place of IPython."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def __call__(self, value: str, display_id: bool) -> "Display":
        assert display_id
        self.shown.append(value)
        return self

    def update(self, value: str) -> None:
        self.shown.append(value)


@pytest.fixture
def display(monkeypatch: pytest.MonkeyPatch) -> Display:
    recorded = Display()
    shell: Any = SimpleNamespace(kernel=None)
    module = SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", module)  # type: ignore[arg-type]
    parts = SimpleNamespace(HTML=str, display=recorded)
    monkeypatch.setitem(sys.modules, "IPython.display", parts)  # type: ignore[arg-type]
    monkeypatch.setattr("symrazor.training.loop.MIN_BAR_SECONDS", 0.0)
    return recorded


def test_a_terminal_of_ipython_is_no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    for shell in (None, SimpleNamespace()):
        module = SimpleNamespace(get_ipython=lambda shell=shell: shell)
        monkeypatch.setitem(sys.modules, "IPython", module)  # type: ignore[arg-type]
        assert not in_notebook()


def test_a_bar_moves_escapes_its_text_and_goes_away(display: Display) -> None:
    with NotebookBar() as bar:
        bar.update(None, "reading")
        bar.update(0.25, "<b>")
    assert "<progress ></progress><span>reading" in display.shown[0]
    assert 'value="0.2500"' in display.shown[1] and "&lt;b&gt;" in display.shown[1]
    assert display.shown[-1] == ""
    with NotebookBar():
        pass
    assert display.shown[-2:].count("") == 1


def test_discover_and_other_work_show_a_bar_unless_it_is_switched_off(display: Display) -> None:
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    sr.discover(x, x[:, 0], epochs=1, starts=2, progress=False)
    assert display.shown == []
    said: list[str] = []
    sr.discover(x, x[:, 0], epochs=1, starts=2, tell=said.append)
    assert display.shown == [] and said
    sr.discover(x, x[:, 0], epochs=1, starts=2)
    assert any("comparing networks" in text for text in display.shown) and display.shown[-1] == ""
    with fraction_bar() as report:
        report(0.5, "half")
    assert "half" in display.shown[-2] and display.shown[-1] == ""
