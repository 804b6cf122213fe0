"""Answer two questions about the embedded digits, and write the figures of README to a file.

FILE=benchmarks/results/digits-verdict.json
python benchmarks/digits_verdict.py --json $FILE --figure docs/evidence.png
"""

import argparse
import json
import os
import time
from pathlib import Path

from symrazor.discovery.answer import Answer, Candidate, probability_text
from symrazor.discovery.digits import discover_digits
from symrazor.discovery.question import Options
from symrazor.discovery.result import save_evidence_figure

COLUMNS = (
    *("task", "network", "log evidence", "spread over starts"),
    *("left-out log likelihood", "test accuracy %", "test NLL"),
)
TASKS = {"digit": "digit", "quadrant": "digit and quadrant"}


def row(task: str, name: str, candidate: Candidate) -> list[str | float]:
    """Return the figures of one network."""
    test = candidate.fit.reading.test
    return [
        task,
        name,
        round(candidate.log_evidence),
        round(candidate.spread),
        round(float(candidate.left_out.sum())),
        round(100 * test["accuracy"], 1),
        round(test["nll"], 3),
    ]


def rows_of(answer: Answer) -> list[list[str | float]]:
    """Return a row for each network, and one for the network that is delivered."""
    task = TASKS[answer.name]
    rows = [row(task, candidate.name, candidate) for candidate in answer.candidates]
    delivered = answer.final or answer.recommended
    return [*rows, row(task, "delivered", delivered)]


def main() -> None:
    """Run the command and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--epochs", type=int, default=None)
    arguments = parser.parse_args()
    started = time.perf_counter()
    found = discover_digits(Options(epochs=arguments.epochs, progress=False), tell=print)
    seconds = time.perf_counter() - started
    summary: dict[str, str | float] = {"seconds": round(seconds)}
    for result in found.results:
        claim = result.answer.claims[0]
        task = TASKS[result.answer.name]
        summary[f"{task}: answer"] = result.answer.headline
        summary[f"{task}: probability"] = probability_text(claim.probability)
        summary[f"{task}: network"] = result.answer.recommended.name
    epochs = "" if arguments.epochs is None else f" --epochs {arguments.epochs}"
    document = {
        "title": "Embedded digits: two questions about the same images",
        "question": "Is each answer right, and does the recommended network predict best?",
        "command": [f"python benchmarks/digits_verdict.py{epochs} --json FILE"],
        "machine": f"{os.cpu_count()} CPU cores",
        "summary": summary,
        "columns": list(COLUMNS),
        "rows": [line for result in found.results for line in rows_of(result.answer)],
        "notes": [
            "1,437 training digits on a canvas of 16 x 16 pixels, one seed, three starts of each "
            "network. Networks are compared on training data alone; the test columns were not "
            "used. The row of a network shows its start with the highest evidence on the test data."
        ],
    }
    arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    if arguments.figure is not None:
        save_evidence_figure([result.answer for result in found.results], arguments.figure)


if __name__ == "__main__":
    main()
