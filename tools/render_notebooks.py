"""Render pages as notebooks with the same text, code and outputs.

python tools/render_notebooks.py            # write docs/*/*.ipynb
python tools/render_notebooks.py --check    # exit with 1 if a notebook differs from its page
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
TUTORIALS = ("images", "series", "sets", "vectors", "trajectories")
PAGES = (*(f"tutorials/{page}" for page in TUTORIALS), "how-to/your-own-loop", "how-to/audit")
CODE = re.compile(r"^```python\n(.*?)^```\n(?:\s*^```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)
"""A block of code, and the block with its output if one follows."""


def render(page: str) -> str:
    """Return the notebook of a page as JSON."""
    cells: list[dict[str, Any]] = []

    def add(kind: str, text: str, **fields: object) -> None:
        if text.strip():
            lines = text.strip("\n").splitlines(keepends=True)
            cell = {"cell_type": kind, "id": f"cell-{len(cells)}", "metadata": {}, "source": lines}
            cells.append(cell | fields)

    text, end = (DOCS / f"{page}.md").read_text(), 0
    for block in CODE.finditer(text):
        add("markdown", text[end : block.start()])
        outputs = []
        if block[2] is not None:
            shown = block[2].splitlines(keepends=True)
            outputs.append({"name": "stdout", "output_type": "stream", "text": shown})
        add("code", block[1], execution_count=None, outputs=outputs)
        end = block.end()
    add("markdown", text[end:])
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    notebook = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Write or check all notebooks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    for page in PAGES:
        file, notebook = DOCS / f"{page}.ipynb", render(page)
        if file.exists() and file.read_text() == notebook:
            continue
        if check:
            sys.exit(f"{file} differs from {page}.md. Run: python tools/render_notebooks.py")
        file.write_text(notebook)
        print(f"wrote {file.relative_to(DOCS.parent)}")


if __name__ == "__main__":
    main()
