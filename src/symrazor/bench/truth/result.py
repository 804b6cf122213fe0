"""Write the tables of a finished run as a result file for the benchmark pages."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from symrazor.bench.truth.scores import Agreement, Row, Summary, per_task, reliability, summarise
from symrazor.core.files import write_atomically
from symrazor.core.validation import join_names

COLUMNS = [
    "tasks",
    "half",
    "method",
    "claims",
    "right %",
    "wrong %",
    "undecided %",
    "Brier score",
    "interval holds %",
    "error of rotations, degrees",
    "regret, nats",
    "minutes",
]
CALIBRATION_COLUMNS = ["half", "method", "probability from", "to", "claims", "mean %", "right %"]
ALL_TASKS = "all"
"""First cell of the rows with the totals of a half."""
GOALS = (
    ("stated answers right", "right % of stated", 98.0, True, " %"),
    ("undecided", "undecided", 10.0, False, " %"),
    ("interval of a margin contains the margin of another seed", "coverage", 90.0, True, " %"),
    ("regret, nats", "regret", 0.02, False, ""),
)
"""Goals of the report half: what, its figure, the limit, whether more is better, and the unit."""
HALVES = {"develop": "development", "report": "report"}


def document(rows: Sequence[Row], commands: Sequence[str], machine: str) -> dict[str, Any]:
    """Return the result file: totals of each half and method, then every task, then calibration."""
    rows, cut = whole_seeds(rows)
    half_of = {row.task: row.half for row in rows}
    totals, tasks = [], []
    for summary in per_task(rows):
        if summary.name.startswith("half: "):
            half = summary.name.removeprefix("half: ")
            totals.append(_cells(ALL_TASKS, half, summary))
        else:
            tasks.append(_cells(summary.name, half_of[summary.name], summary))
    calibration = [
        [
            HALVES[half],
            line.method,
            f"{line.low:g}",
            f"{line.high:g}",
            line.claims,
            f"{100 * line.probability:.1f}",
            f"{100 * line.right:.1f}",
        ]
        for half in HALVES
        for line in reliability([row for row in rows if row.half == half])
    ]
    return {
        "title": "Known answers",
        "question": "Are stated answers right where the answer is known? Is the network as good as "
        "the architecture with the known answer built in?",
        "command": list(commands),
        "machine": machine,
        "columns": COLUMNS,
        "rows": totals + tasks,
        "calibration": [CALIBRATION_COLUMNS, *calibration],
        "notes": [
            f"{seeds_in_words(rows)} The development half was used to adjust the method, the "
            "report half was not.",
            *cut,
            *goal_notes(rows, half="report"),
            "`best-on-test-set` chooses an architecture by the test labels: a bound, not a method.",
        ],
    }


def seeds_in_words(rows: Sequence[Row]) -> str:
    """Return a sentence with the seeds, listed by method where methods differ."""
    methods: dict[tuple[int, ...], list[str]] = {}
    for method in dict.fromkeys(row.method for row in rows):
        seeds = sorted({row.seed for row in rows if row.method == method})
        methods.setdefault(tuple(seeds), []).append(f"`{method}`")
    parts = [f"{', '.join(map(str, seeds))} ({join_names(m)})" for seeds, m in methods.items()]
    if len(parts) == 1:
        parts = [", ".join(map(str, *methods))]
    return f"Seeds: {'; '.join(parts)}."


def whole_seeds(rows: Sequence[Row]) -> tuple[list[Row], list[str]]:
    """Return the rows of seeds with all tasks, and notes on seeds that a stop cut short.

    The tasks of a cut seed that are done are the fast ones, and say nothing about the others.
    """
    tasks = {row.task for row in rows}
    done = {seed: {row.task for row in rows if row.seed == seed} for seed in {r.seed for r in rows}}
    whole = {seed for seed in done if done[seed] == tasks} or set(done)
    notes = [
        f"Seed {seed} was stopped after {len(done[seed])} of {len(tasks)} tasks and is left out."
        for seed in sorted(set(done) - whole)
    ]
    return [row for row in rows if row.seed in whole], notes


def goal_notes(rows: Sequence[Row], half: str) -> list[str]:
    """Return a note for each method: which goals its rows of a half meet and which they miss."""
    notes = []
    for summary in summarise([row for row in rows if row.half == half], half):
        stated = summary.right + summary.wrong
        figures = {
            "right % of stated": 100 * summary.right / stated if stated else None,
            "undecided": summary.undecided,
            "coverage": summary.coverage,
            "regret": summary.regret,
        }
        parts = []
        for name, key, limit, more_is_better, unit in GOALS:
            figure = figures[key]
            if figure is not None:
                is_met = figure >= limit if more_is_better else figure <= limit
                bound = "at least" if more_is_better else "at most"
                verdict = f"{'met' if is_met else 'missed'}, goal {bound} {limit:g}{unit}"
                parts.append(f"{name} {_rounded(figure, 1 if unit else 3)}{unit} ({verdict})")
        notes.append(f"Goals, `{summary.method}`: {'; '.join(parts)}.")
    return notes


def agreement_notes(table: Sequence[Agreement], run: str) -> list[str]:
    """Return a note for each method with claims that are stated in this run and in another one."""
    return [
        f"{line.stated} claims of `{line.method}` are stated in this run and in another one "
        f"({run}): {line.same:.0f} % have the same answer."
        for line in table
        if line.same is not None
    ]


def _cells(name: str, half: str, summary: Summary) -> list[Any]:
    return [
        name,
        HALVES[half],
        summary.method,
        summary.claims,
        f"{summary.right:.1f}",
        f"{summary.wrong:.1f}",
        f"{summary.undecided:.1f}",
        _rounded(summary.brier, 3),
        _rounded(summary.coverage, 0),
        _rounded(summary.range_error, 1),
        _rounded(summary.regret, 3),
        _rounded(summary.minutes, 1),
    ]


def _rounded(value: float | None, digits: int) -> str | None:
    return None if value is None else f"{value:.{digits}f}"


def write_result(
    rows: Sequence[Row], file: Path, command: str, machine: str, notes: Sequence[str] = ()
) -> None:
    """Write the result file of finished rows; ValueError without command and machine."""
    if not (command and machine):
        raise ValueError("A result needs --command (how it was measured) and --machine (on what).")
    result = document(rows, [command], machine)
    result["notes"] += notes
    write_atomically(file, (json.dumps(result, indent=1) + "\n").encode())
