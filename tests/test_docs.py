"""Every Python block of the README and the docs runs, page by page, as a reader would paste it.

Trainings are cut to a few epochs; `make test-all` runs them as they are.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from shorter import shortened

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


CODE = [page for page in PAGES if BLOCK.search(page.read_text())]


def run(page: Path, change: Callable[[str], str]) -> dict[str, object]:
    namespace: dict[str, object] = {"__name__": "page"}
    for block in BLOCK.findall(page.read_text()):
        exec(compile(change(block), str(page), "exec"), namespace)
    return namespace


def test_only_lengths_of_trainings_are_changed() -> None:
    code = 'fit(epochs=40, n=50)\noptions = {"epochs": 2, "steps": 10}\nlr_steps = 100'
    short = 'fit(epochs=3, n=50)\noptions = {"epochs": 2, "steps": 3}\nlr_steps = 100'
    assert shortened(code) == short


@pytest.mark.parametrize("page", CODE, ids=lambda p: p.name)
def test_code_blocks_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(page, shortened)
    assert capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("page", CODE, ids=lambda p: p.name)
def test_code_blocks_run_at_full_length(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    namespace = run(page, str)
    assert capsys.readouterr().out
    if page.name == "quickstart.md":  # the last example learns its noise, 0.1
        assert 0.05 < namespace["fit"].razor.likelihood.noise.value.item() < 0.2  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} -> {target}"
