"""Render README.md, SECURITY.md and the benchmark pages of the docs from benchmarks/results/.

    python tools/render_benchmarks.py            # write the pages
    python tools/render_benchmarks.py --check    # exit with 1 if a page is out of date

Templates are benchmarks/*.md.in. They hold the prose; every figure comes from a placeholder:

    {{cell FILE | ROW | COLUMN}}              one cell; ROW lists the first cells, joined by "; "
    {{value FILE | KEY}}                      one entry of the file's "summary"
    {{count FILE | COLUMN | VALUE}}           number of rows with this value
    {{total FILE}}                            number of rows
    {{table FILE | COLUMN | ...}}             the table, or some of its columns
    {{rows FILE | COLUMN | VALUE | ...}}      the same, only rows with this value in COLUMN
    {{section FILE}}                          title, question, command, machine, goal, table, notes
    {{known_answers FILE | PART}}             "totals" or "tasks" of the benchmark of known answers;
                                              nothing while the file does not exist
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import gallery_pages
import orbit_figure
import truth_figure

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TRUTH_PAGE = "how-exact-is-the-evidence.md"
TEMPLATES = {
    ROOT / "benchmarks" / "benchmarks.md.in": ROOT / "docs" / "benchmarks.md",
    ROOT / "benchmarks" / "benchmarks-all.md.in": ROOT / "docs" / "benchmarks-all.md",
    ROOT / "benchmarks" / "readme.md.in": ROOT / "README.md",
    ROOT / "benchmarks" / "security.md.in": ROOT / "SECURITY.md",
    ROOT / "benchmarks" / f"{TRUTH_PAGE}.in": ROOT / "docs" / "concepts" / TRUTH_PAGE,
}
FIGURES = {
    "truth": ROOT / "docs" / "images" / "known-answers.svg",
    "orbits": ROOT / "docs" / "images" / "orbits.svg",
}
"""Result file -> its figure, which is drawn if the file exists."""
REQUIRED = ("title", "question", "command", "machine", "columns", "rows", "notes")
OPTIONAL = ("version", "goal", "summary", "calibration", "data")
BANNER = "<!-- Rendered by tools/render_benchmarks.py from benchmarks/. Do not edit. -->\n\n"
PLACEHOLDER = re.compile(r"\{\{(\w+) ([^{}]+)\}\}")
PROGRAMS = ("symrazor ", "python ", "make ", "torchrun ")

Result = dict[str, Any]
Row = Sequence[Any]


def load(name: str) -> Result:
    """Return one result file. Decimal numbers stay as written, so that 99.30 keeps its zero.

    Raises:
        ValueError: the file is missing, or has wrong keys or rows.
    """
    file = RESULTS / f"{name}.json"
    if not file.exists():
        raise ValueError(f"No such result file: {file.relative_to(ROOT)}")
    result: Result = json.loads(file.read_text(encoding="utf-8"), parse_float=str)
    missing = [key for key in REQUIRED if key not in result]
    unknown = [key for key in result if key not in REQUIRED + OPTIONAL]
    if missing or unknown:
        raise ValueError(f"{file.name}: missing keys {missing}, unknown keys {unknown}")
    width = len(result["columns"])
    for number, row in enumerate(result["rows"]):
        if len(row) != width:
            raise ValueError(f"{file.name}, row {number}: {len(row)} cells for {width} columns")
    return result


def show(cell: Any) -> str:
    """Format a cell: thousands separators for integers, nothing for null."""
    if cell is None:
        return ""
    return f"{cell:,}" if isinstance(cell, int) else str(cell).replace("|", "\\|")


def column(result: Result, name: str) -> int:
    """Return the index of a column."""
    if name not in result["columns"]:
        raise ValueError(f"no column {name!r} among {result['columns']}")
    index: int = result["columns"].index(name)
    return index


def markdown_table(result: Result, rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Return a markdown table of some rows and columns; all columns if none is named."""
    names = list(columns) or result["columns"]
    indices = [column(result, name) for name in names]
    lines = [names, ["---"] * len(names), *[[show(row[i]) for i in indices] for row in rows]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(name: str, key: str, column_name: str) -> str:
    """Return the cell of the one row whose first cells are given by `key`."""
    result, first = load(name), key.split("; ")
    rows = [row for row in result["rows"] if [show(c) for c in row[: len(first)]] == first]
    if len(rows) != 1:
        raise ValueError(f"expected one row {key!r}, found {len(rows)}")
    return show(rows[0][column(result, column_name)])


def value(name: str, key: str) -> str:
    """Return one entry of the summary."""
    summary = load(name).get("summary", {})
    if key not in summary:
        raise ValueError(f"no summary entry {key!r} among {list(summary)}")
    return show(summary[key])


def selected(result: Result, column_name: str, wanted: str) -> list[Row]:
    """Return the rows with a value in a column."""
    index = column(result, column_name)
    return [row for row in result["rows"] if show(row[index]) == wanted]


def count(name: str, column_name: str, wanted: str) -> str:
    """Return the number of rows with a value in a column."""
    return str(len(selected(load(name), column_name, wanted)))


def total(name: str) -> str:
    """Return the number of rows."""
    return str(len(load(name)["rows"]))


def table(name: str, *columns: str) -> str:
    """Return the table of a file."""
    result = load(name)
    return markdown_table(result, result["rows"], columns)


def some_rows(name: str, column_name: str, wanted: str, *columns: str) -> str:
    """Return the table of the rows with a value in a column."""
    result = load(name)
    return markdown_table(result, selected(result, column_name, wanted), columns)


def section(name: str) -> str:
    """Return everything that a file says, as a section of the appendix."""
    result = load(name)
    facts = [f"{result['question']} Data: `benchmarks/results/{name}.json`."]
    programs = [text for text in result["command"] if text.startswith(PROGRAMS)]
    facts += [f"Measured by: {text}." for text in result["command"] if text not in programs]
    facts.append(f"Machine: {result['machine']}.")
    if "version" in result:
        facts.append(f"Version: {result['version']}.")
    if "goal" in result:
        facts.append(f"Goal: {result['goal'].rstrip('.')}.")
    parts = [f"### {result['title']}", " ".join(facts)]
    if programs:
        parts.append("\n".join(f"    {text}" for text in programs))
    parts.append(table(name))
    parts += ["\n".join(f"- {note}" for note in result["notes"])] if result["notes"] else []
    return "\n\n".join(parts)


def known_answers(name: str, part: str) -> str:
    """Return a section on the benchmark of known answers; "" while it has not been measured."""
    if not (RESULTS / f"{name}.json").exists():
        return ""
    result = load(name)
    if part == "tasks":
        header, *lines = result["calibration"]
        calibration = markdown_table({"columns": header}, lines, [])
        return f"{section(name)}\n\nCalibration of stated claims:\n\n{calibration}"
    if part != "totals":
        raise ValueError(f"no part {part!r}; use totals or tasks")
    columns = [name for name in result["columns"] if name != "tasks"]
    file = FIGURES[name]
    parts = [
        f"## {result['title']}",
        f"{result['question']} The tasks of the report half were not used to adjust the method. "
        "See [how to run it](how-to/benchmark-known-answers.md).",
        markdown_table(result, selected(result, "tasks", "all"), columns),
        *(note for note in result["notes"] if note.startswith("Goals")),
        f"![Right, undecided and wrong claims by method]({file.parent.name}/{file.name})",
    ]
    return "\n\n".join(parts)


PLACEHOLDERS: dict[str, Callable[..., str]] = {
    "cell": cell,
    "value": value,
    "count": count,
    "total": total,
    "table": table,
    "rows": some_rows,
    "section": section,
    "known_answers": known_answers,
}


def render(template: Path) -> str:
    """Return a page: the template with every placeholder replaced.

    Raises:
        ValueError: a placeholder names a file, row, column or key that does not exist.
    """

    def replace(match: re.Match[str]) -> str:
        verb, arguments = match.group(1), match.group(2).split(" | ")
        try:
            return PLACEHOLDERS[verb](*arguments)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{template.name}: {match.group(0)}: {error}") from error

    text = PLACEHOLDER.sub(replace, template.read_text(encoding="utf-8"))
    return BANNER + re.sub(r"\n{3,}", "\n\n", text)  # an empty section leaves blank lines


def gallery() -> dict[Path, str]:
    """Return the text of each page of the gallery."""
    remarks = json.loads((ROOT / "benchmarks" / "gallery-remarks.json").read_text("utf-8"))
    template = (ROOT / "benchmarks" / "gallery.md.in").read_text(encoding="utf-8")
    made = gallery_pages.pages(load("gallery"), remarks, template)
    return {ROOT / "docs" / "gallery" / f"{name}.md": BANNER + text for name, text in made.items()}


def main() -> int:
    """Write the pages, or with --check compare them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, compare only")
    check = parser.parse_args().check
    stale = []
    texts = {page: render(template) for template, page in TEMPLATES.items()}
    draw = {
        "truth": lambda result: truth_figure.figure(result, "report", "discover"),
        "orbits": orbit_figure.figure,
    }
    for name, file in FIGURES.items():
        if (RESULTS / f"{name}.json").exists():
            texts[file] = draw[name](load(name))
    if (RESULTS / "gallery.json").exists():
        texts |= gallery()
    for page, text in texts.items():
        if page.exists() and page.read_text(encoding="utf-8") == text:
            continue
        stale.append(page.relative_to(ROOT))
        if not check:
            page.write_text(text, encoding="utf-8")
    for page in stale:
        print(f"{page} is out of date; run: make benchmarks" if check else f"wrote {page}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
