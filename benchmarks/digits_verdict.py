"""Write the figures of README to a file: what `make run` has found, read from its run folder.

time make run
FILE=benchmarks/results/digits-verdict.json
python benchmarks/digits_verdict.py run --cpu-minutes 8 --json $FILE --figure docs/evidence.png
"""

import argparse
import json
import os
import shutil
import textwrap
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from symrazor.cli.answer import compact
from symrazor.discovery.answer import probability_text

COLUMNS = (
    *("task", "network", "log evidence", "spread over starts"),
    *("left-out log likelihood", "test accuracy %", "test NLL"),
)
TASKS = {"digit": "digit", "quadrant": "digit and quadrant"}
SENTENCES = ("certainty", "notes", "recommendation", "score")
"""Parts of the verdict that `symrazor discover` prints after the headline."""
LINE_WIDTH = 105


def row(task: str, candidate: Mapping[str, Any]) -> list[str | float | None]:
    """Return the figures of one network; the delivered one has only test figures."""
    test = candidate["reading"]["test"]
    scores = [round(100 * test["accuracy"], 1), round(test["nll"], 3)]
    figures: list[float | None] = [None] * 3
    if "left_out" in candidate:
        keys = (candidate["log_evidence"], candidate["spread"])
        figures = [round(value) for value in (*keys, candidate["left_out"]["log_likelihood"])]
    return [task, candidate["name"], *figures, *scores]


def printed(question: Mapping[str, Any]) -> str:
    """Return what the command prints, in lines that fit into README."""
    parts = [question["headline"], *(question["summary"][key] for key in SENTENCES)]
    table = StringIO()
    Console(file=table, width=LINE_WIDTH).print(compact(question))
    lines = [line.rstrip() for line in table.getvalue().splitlines()]
    verdict = textwrap.fill(" ".join(filter(None, parts)), LINE_WIDTH)
    return "\n".join([verdict, "", *lines]).rstrip()


def main() -> None:
    """Read the run folder and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="run folder of make run")
    parser.add_argument("--cpu-minutes", type=float, required=True, help="user time of make run")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    questions = json.loads((arguments.run / "discover.json").read_text())["questions"]
    summary: dict[str, str | float] = {"CPU minutes": arguments.cpu_minutes}
    rows = []
    for question in questions:
        task = TASKS[question["name"]]
        summary[f"{task}: answer"] = question["headline"]
        summary[f"{task}: probability"] = probability_text(question["claims"][0]["probability"])
        summary[f"{task}: network"] = question["chosen"]
        summary[f"{task}: verdict"] = textwrap.fill(question["verdict"], LINE_WIDTH)
        summary[f"{task}: printed"] = printed(question)
        rows += [row(task, candidate) for candidate in question["candidates"]]
        chosen = next(c for c in question["candidates"] if c["name"] == question["chosen"])
        delivered = question["final"] or chosen
        rows.append(row(task, {"name": "delivered", "reading": delivered["reading"]}))
    document = {
        "title": "Embedded digits: two questions about the same images",
        "question": "Is each answer right, and does the recommended network predict best?",
        "command": ["make run", "python benchmarks/digits_verdict.py run --json FILE"],
        "machine": f"{os.cpu_count()} CPU cores",
        "summary": summary,
        "columns": list(COLUMNS),
        "rows": rows,
        "notes": [
            "1,437 training digits on a canvas of 16 x 16 pixels, one seed, three starts of each "
            "network. Networks are compared on training data alone; the test columns were not "
            "used. The row of a network shows its start with the highest evidence on the test data."
        ],
    }
    arguments.json.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    if arguments.figure is not None:
        shutil.copyfile(arguments.run / "evidence.png", arguments.figure)


if __name__ == "__main__":
    main()
