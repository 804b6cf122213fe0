"""Run the tour in a kernel of its own; compare the other notebooks with their pages."""

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from shorter import shortened

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"


def test_notebooks_of_pages_are_up_to_date() -> None:
    """The code of the pages is run by `test_docs.py`."""
    command = [sys.executable, ROOT / "tools" / "render_notebooks.py", "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    for file in (ROOT / "docs").rglob("*.ipynb"):
        nbformat.validate(nbformat.read(file, as_version=4))


def _outputs(cell: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """Return the outputs of a cell without progress bars, which are empty at the end."""
    outputs = cell.get("outputs", [])
    return [o for o in outputs if o.get("data", {}).get("text/html", "shown") != ""]


@pytest.mark.parametrize("short", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_tour_runs(short: bool, tmp_path: Path) -> None:
    notebook = nbformat.read(TUTORIALS / "tour.ipynb", as_version=4)
    if short:
        for cell in notebook.cells:
            cell.source = shortened(cell.source)
    stored = [len(cell.get("outputs", [])) for cell in notebook.cells]
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=None, kernel_name="python3", resources=resources).execute()
    assert [len(_outputs(cell)) for cell in notebook.cells] == stored  # and says as much
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    rich = [
        output["data"]["text/html"] for output in shown if "text/html" in output.get("data", {})
    ]
    assert any("<table" in text for text in rich)
    if not short:
        assert any("translation-equivariant" in text for text in rich)
