"""The benchmark pages are rendered from the JSON files, and no figure is typed by hand."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from symrazor.bench.truth.result import write_result
from symrazor.bench.truth.scores import Row

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
NAMES_WITH_DIGITS = ("CIFAR-10", "p4m", "p4", "SE(2)", "ella-table1", "float32")


@pytest.fixture(scope="module")
def renderer() -> ModuleType:
    file = ROOT / "tools" / "render_benchmarks.py"
    spec = importlib.util.spec_from_file_location("render_benchmarks", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_are_up_to_date(renderer: ModuleType) -> None:
    for template, page in renderer.TEMPLATES.items():
        assert page.read_text() == renderer.render(template), f"{page.name}: run make benchmarks"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_result_files_have_the_required_keys(renderer: ModuleType, file: Path) -> None:
    result = renderer.load(file.stem)
    for key in ("title", "question", "machine"):
        assert isinstance(result[key], str) and result[key], key
    for key in ("command", "columns", "rows", "notes"):
        assert isinstance(result[key], list), key
    assert result["command"] and result["rows"]
    assert len(set(result["columns"])) == len(result["columns"])
    cells = [cell for row in result["rows"] for cell in row]
    assert all(cell is None or isinstance(cell, int | str) for cell in cells)


def test_every_result_file_is_in_the_appendix_once() -> None:
    template = (ROOT / "benchmarks" / "benchmarks-all.md.in").read_text()
    named = re.findall(r"\{\{section ([^}]+)\}\}", template)
    optional = re.findall(r"\{\{known_answers (\S+) \| tasks\}\}", template)
    measured = {file.stem for file in FILES}
    assert sorted(named + [name for name in optional if name in measured]) == sorted(measured)


def test_goals_name_result_files(renderer: ModuleType) -> None:
    goals = renderer.load("goals")
    named = {name for row in goals["rows"] for name in row[-1].split(", ")}
    assert named <= {file.stem for file in FILES}


@pytest.mark.parametrize("name", ["benchmarks.md.in", "benchmarks-all.md.in"])
def test_templates_have_no_figures_of_their_own(renderer: ModuleType, name: str) -> None:
    text = renderer.PLACEHOLDER.sub("", (ROOT / "benchmarks" / name).read_text())
    text = re.sub(r"\]\([^)]*\)", "]", text)  # links to sections
    text = re.sub(r"\bTables? \d( and \d)?", "", text)
    for known in NAMES_WITH_DIGITS:
        text = text.replace(known, "")
    assert not re.findall(r"[^\n]*\d[^\n]*", text)


def test_wrong_placeholders_are_errors(renderer: ModuleType, tmp_path: Path) -> None:
    for text in (
        "{{cell no-such-file | a | b}}",
        "{{cell predictions | map | no such column}}",
        "{{cell predictions | no such row | NLL}}",
        "{{value predictions | no such key}}",
        "{{nothing predictions}}",
        "{{cell predictions}}",
    ):
        template = tmp_path / "page.md.in"
        template.write_text(text)
        with pytest.raises(ValueError, match=re.escape(text)):
            renderer.render(template)


def test_decimals_keep_trailing_zeros(renderer: ModuleType) -> None:
    assert renderer.cell("predictions", "map", "ECE") == "0.090"


def test_check_fails_when_a_page_is_stale(
    renderer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template, page = tmp_path / "page.md.in", tmp_path / "page.md"
    template.write_text("{{total predictions}}\n")
    monkeypatch.setattr(renderer, "ROOT", tmp_path)
    monkeypatch.setattr(renderer, "TEMPLATES", {template: page})
    monkeypatch.setattr(sys, "argv", ["render_benchmarks.py", "--check"])
    assert renderer.main() == 1
    assert not page.exists()
    monkeypatch.setattr(sys, "argv", ["render_benchmarks.py"])
    assert renderer.main() == 0
    assert page.read_text().endswith("3\n")


def test_known_answers_are_rendered_once_they_are_measured(
    renderer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renderer, "RESULTS", tmp_path)
    assert renderer.known_answers("truth", "totals") == ""
    rows = [
        Row("discover", "row", "image", "report", seed, 90.0, "translation", False, holds, status,
            probability, regret=0.01)
        for seed, holds, status, probability in (
            (0, False, "right", 0.98), (1, True, "wrong", 0.96), (2, None, "undecided", 0.7),
        )
    ]  # fmt: skip
    write_result(rows, tmp_path / "truth.json", "python -m symrazor.bench.truth", "two cores")
    totals = renderer.known_answers("truth", "totals")
    assert "| report | discover | 3 | 33.3 | 33.3 | 33.3 |" in totals
    assert "known-answers.svg" in totals
    tasks = renderer.known_answers("truth", "tasks")
    assert "| row | report | discover | 3 |" in tasks
    assert "| report | discover | 0.95 | 0.99 | 2 | 97.0 | 50.0 |" in tasks
    figure = renderer.truth_figure.figure(renderer.load("truth"), "report", "discover")
    drawing = ElementTree.fromstring(figure)
    circle = drawing.find("{http://www.w3.org/2000/svg}circle")
    assert circle is not None
    assert float(circle.attrib["cx"]) == pytest.approx(590 + 200 * 47 / 50, abs=0.1)
    assert float(circle.attrib["cy"]) == pytest.approx(46 + 100, abs=0.1)
    with pytest.raises(ValueError, match="--machine"):
        write_result(rows, tmp_path / "other.json", "", "")


def test_the_orbit_figure_has_a_flat_curve_for_the_conserved_component(
    renderer: ModuleType,
) -> None:
    drawing = ElementTree.fromstring(renderer.orbit_figure.figure(renderer.load("orbits")))
    curves = drawing.findall("{http://www.w3.org/2000/svg}polyline")
    heights = [
        [float(point.partition(",")[2]) for point in curve.attrib["points"].split()]
        for curve in curves
    ]
    spans = [max(height) - min(height) for height in heights]
    assert len(spans) == 3 and spans[2] < 1 and min(spans[:2]) > 40


def test_the_gallery_counts_ranks_and_names_the_winner(renderer: ModuleType) -> None:
    columns = ["data", "n", "seed", "method", "accuracy %", "NLL", "ECE", "CPU minutes", "choices"]
    columns += ["network", "verdict", "claims"]

    def row(data: str, n: int, seed: int, method: str, nll: str) -> list[object]:
        claims = "translation: yes (0.994); other: no (0.970)" if method == "discover" else ""
        scores = ["90.0", nll, "0.010", "0.50", 1]
        return [data, n, seed, method, *scores, "a CNN", "Invariant.", claims]

    rows = [
        row("a", n, seed, method, nll)
        for n, seed, values in ((1200, 0, "135"), (1200, 1, "357"), (100, 0, "978"))
        for method, nll in zip(("discover", "tuned", "selected"), values, strict=True)
    ]
    rows += [
        row("b", 50, 0, method, nll)
        for method, nll in zip(("discover", "tuned", "selected", "nearest"), "3241", strict=True)
    ]
    rows.append(row("c", 50, 0, "tuned", "1"))  # not yet measured
    about = {"question": "Why?", "source": "Made.", "n_test": 7, "shape": [1, 8], "classes": 2}
    result = {"columns": columns, "rows": rows, "machine": "m", "version": "v", "command": ["c d"],
              "data": {name: {"title": name, **about} for name in "abcd"}}  # fmt: skip
    template = (ROOT / "benchmarks" / "gallery.md.in").read_text()
    pages = renderer.gallery_pages.pages(result, {"b": "Because."}, template)
    assert set(pages) == {"index", "a", "b"}
    assert "likelihood on 1 of 2 data sets, and the highest on 0." in pages["index"]
    assert "lowest in 1 of 3 comparisons, highest in 1." in pages["index"]
    line = "| [a](a.md) | 1,200 | Invariant | above 99 % | **2.000** | 4.000 | tuned CNN or MLP |"
    assert line in pages["index"]
    assert "- 1,200 training samples: Invariant. Probability above 99 %." in pages["a"]
    assert "| **symrazor discover** | 90.0 | **2.000** | 0.010 | 0.5 | 1 | a CNN |" in pages["a"]
    assert "delivers has the lowest NLL." in pages["a"] and "has the highest NLL" in pages["a"]
    assert "**Another method wins:** 1-NN." in pages["b"] and "is number 3 of 4" in pages["b"]
    assert "Because." in pages["b"]
