"""The notebooks run from the first cell to the last, in a kernel of their own."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from shorter import shortened

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "tutorials").glob("*.ipynb"))


@pytest.mark.parametrize("short", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda p: p.name)
def test_notebooks_run(file: Path, short: bool, tmp_path: Path) -> None:
    notebook = nbformat.read(file, as_version=4)
    nbformat.validate(notebook)
    if short:
        for cell in notebook.cells:
            cell.source = shortened(cell.source)
    stored = [len(cell.get("outputs", [])) for cell in notebook.cells]
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=None, kernel_name="python3", resources=resources).execute()
    assert [len(cell.get("outputs", [])) for cell in notebook.cells] == stored  # and says as much
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    rich = [
        output["data"]["text/html"] for output in shown if "text/html" in output.get("data", {})
    ]
    assert any("<table" in text for text in rich)
    if not short:
        assert any("translation-equivariant" in text for text in rich)
