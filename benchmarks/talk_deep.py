"""Learn the frequency of the talk's deep network from several seeds.

python benchmarks/talk_deep.py --seeds 20 21 22 --json benchmarks/results/talk-deep.json
"""

import argparse
import json
from pathlib import Path

import torch

from symrazor.experiments.talk_basis import DEEP_STARTS, deep_demo
from symrazor.experiments.talk_figure import Results

COLUMNS = ["seed"] + [
    f"{method}: {figure}"
    for method in ("maximum likelihood", "Laplace evidence", "lower bound")
    for figure in ("omega^2", "test error")
]


def main() -> None:
    """Run all seeds and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows, better = [], dict.fromkeys(("Laplace evidence", "lower bound"), 0)
    for seed in arguments.seeds:
        results = Results()
        deep_demo(results, seed)
        by_method = {row["method"]: row for row in results.deep}
        for method in better:
            better[method] += by_method[method]["test"] < by_method["maximum likelihood"]["test"]
        figures = [[f"{row['omega2']:.1f}", f"{row['test']:.3f}"] for row in results.deep]
        rows.append([seed, *(figure for pair in figures for figure in pair)])
        print(rows[-1], flush=True)
        n, seeds = len(rows), " ".join(map(str, arguments.seeds))
        counts = [f"{method}: {count} of {n} seeds" for method, count in better.items()]
        document = {
            "title": "The talk's deep network",
            "question": "Does the evidence find a frequency that generalises, from any seed?",
            "command": [f"python benchmarks/talk_deep.py --seeds {seeds} --json FILE"],
            "machine": "one CPU thread",
            "columns": COLUMNS,
            "rows": rows,
            "notes": [
                f"Test error below that of maximum likelihood: {'; '.join(counts)}.",
                f"Starts omega^2 = {', '.join(map(str, DEEP_STARTS))}; the one with "
                "the best objective is reported. All objectives have several optima in the "
                "frequency: from a single start, the end depends on the start and the seed.",
            ],
        }
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
