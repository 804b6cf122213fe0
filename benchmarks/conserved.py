"""Count the conserved quantities that are found in systems with known ones, on many cores.

python benchmarks/conserved.py --half develop --seeds 0 1 --jobs 16 --json FILE --resume
python benchmarks/conserved.py --half report --seeds 5 6 --json FILE --resume \
    --table benchmarks/results/conserved.json

The first file has one row for each run, the second one row for each system, for the docs.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from symrazor.bench.conserved import MAX_RATIO, Row, main, summarise
from symrazor.bench.conserved_systems import cases
from symrazor.core.validation import join_names

EXACT_GOALS = {0.002: 98.0, 0.02: 95.0, 0.1: 80.0}
"""Noise, relative to the spread of each coordinate -> goal for the percentage of exact sets."""
SECONDS_GOAL = 10


def table(rows: Sequence[Row], options: argparse.Namespace) -> dict[str, Any]:
    """Return one row for each system, and percentages for each noise level."""
    levels = sorted({row.noise for row in rows})
    body = []
    for system in dict.fromkeys(row.system for row in rows):
        runs = [row for row in rows if row.system == system]
        exact = [[row.exact for row in runs if row.noise == noise] for noise in levels]
        ratios = [row.rollout_ratio for row in runs if row.rollout_ratio is not None]
        body.append(
            [
                system,
                runs[0].true,
                *(f"{sum(found)} of {len(found)}" for found in exact),
                sum(row.false for row in runs),
                sum(not row.exact and row.undecided > 0 for row in runs),
                f"{median(ratios):.2g} ({max(ratios):.2g})" if ratios else None,
                round(median(row.seconds for row in runs), 1),
            ]
        )
    summaries = summarise(rows)
    planned = len(cases()) // 2 * len(EXACT_GOALS) * len(options.seeds)
    ratios = [row.rollout_ratio for row in rows if row.rollout_ratio is not None]
    summary = {
        "systems": len(body),
        "runs": f"{len(rows)} of {planned}",
        "noise": _listed([100 * level for level in levels]),
        "exact": _listed([level.exact for level in summaries]),
        "exact goal": _listed([EXACT_GOALS[level] for level in levels]),
        "ratio goal": MAX_RATIO,
        "seconds goal": SECONDS_GOAL,
        "false": sum(level.false for level in summaries),
        "missed but not undecided": sum(not row.exact and not row.undecided for row in rows),
        "largest ratio": max(ratios),
        "within": f"{sum(ratio <= MAX_RATIO for ratio in ratios)} of {len(ratios)}",
        "median seconds": round(median(row.seconds for row in rows), 1),
        "slowest seconds": round(max(row.seconds for row in rows), 1),
    }
    seeds = " ".join(map(str, options.seeds))
    noise = [f"exact sets, noise {100 * level:g} %" for level in levels]
    return {
        "title": "Systems with known conserved quantities",
        "question": "Are exactly the conserved quantities found, without any false one?",
        "command": [
            f"python benchmarks/conserved.py --half {options.half} --seeds {seeds} --json FILE "
            "--resume --table benchmarks/results/conserved.json"
        ],
        "machine": "one core, one thread, shared with other jobs; CPU time",
        "goal": f"Exact sets in {summary['exact goal']} of the runs at a noise of "
        f"{summary['noise']}, the rest undecided; no false quantity; {SECONDS_GOAL} s each; "
        f"rollout errors at most {MAX_RATIO} times those of the best baseline.",
        "columns": [
            *("system", "quantities", *noise, "false", "incomplete and undecided"),
            *("rollout error / best baseline: median (largest)", "median s"),
        ],
        "rows": body,
        "summary": summary,
        "notes": [
            "Given: states, times, and that positions come before momenta where there are momenta. "
            "Learned: the noise, the equations, the quantities and their number.",
            "Noise is relative to the spread of each coordinate. A quantity is false if it varies "
            "along noise-free trajectories that start elsewhere (more than 2 % of its variance), "
            "or if it exceeds the known number.",
            "The spinning top has four functions with independent gradients. The length of the "
            "vertical is the same in all trajectories: a relation, not one of its quantities.",
            "Rollouts run over 100 steps from noise-free states that start elsewhere. Baselines: "
            "linear least squares from one state to the next, and a sparse regression on "
            "polynomials to degree three. The simulator is chosen on trajectories set aside, "
            "these baselines included.",
            f"Half of the systems was used for development. The table shows the {options.half} "
            f"half: {len(rows)} of {planned} runs.",
            *misses(rows),
            *options.note,
        ],
    }


def misses(rows: Sequence[Row]) -> list[str]:
    """Return a note for each system with runs that miss the goals for time or rollout errors."""
    notes = []
    for system in dict.fromkeys(row.system for row in rows):
        runs = [row for row in rows if row.system == system]
        slow = [row.seconds for row in runs if row.seconds > SECONDS_GOAL]
        if slow:
            times = f"{len(slow)} of {len(runs)} runs take more than {SECONDS_GOAL} s"
            notes.append(f"{system}: {times} ({max(slow):.1f} at most).")
        ratios = sorted(row.rollout_ratio for row in runs if row.rollout_ratio is not None)
        large = [f"{ratio:.2f}" for ratio in ratios if ratio > MAX_RATIO]
        if large:
            listed = join_names(large)
            notes.append(f"{system}: rollout errors of {listed} times those of the best baseline.")
    return notes


def _listed(percentages: Sequence[float]) -> str:
    """Return "98, 95 and 80 %"."""
    values = [f"{value:.4g}" for value in percentages]
    return " and ".join([", ".join(values[:-1]), values[-1]] if values[1:] else values) + " %"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--half", choices=("develop", "report"), default="develop")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, help="one row for each run")
    parser.add_argument("--resume", action="store_true", help="skip runs with a row in the file")
    parser.add_argument("--table", type=Path, help="one row for each system")
    parser.add_argument("--note", nargs="*", default=[], help="further notes on the table")
    options = parser.parse_args()
    rows = main(
        options.seeds,
        half=options.half,
        file=options.json,
        jobs=options.jobs,
        resume=options.resume,
    )
    for row in rows:
        if not row.exact or row.undecided:
            print(row)
    for summary in summarise(rows):
        print(summary)
    if options.table is not None:
        text = json.dumps(table(rows, options), indent=1, ensure_ascii=False)
        options.table.write_text(text + "\n", encoding="utf-8")
