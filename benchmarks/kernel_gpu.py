"""Time the kernel form on a GPU: one estimate with its gradient, and one for new precisions.

    python benchmarks/kernel_gpu.py --json FILE

The network is that of `symrazor bench evidence`: eight convolutions, random images of 32 x 32
pixels, 10 classes.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from symrazor.bench.evidence import STRUCTURES, data, estimate, network, reevaluate, sgd_epoch
from symrazor.data import TensorLoader


def seconds(run: Callable[[], Any], rounds: int) -> float:
    """Return the median time of a call, after a warm-up."""
    run()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def main() -> None:
    """Measure and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, nargs="+", default=[1000, 2000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    rows: list[list[Any]] = []
    for n in arguments.n:
        x, y = (part.cuda() for part in data(n))
        loader, model = TensorLoader(x, y, 250), network(10).cuda()
        runs: dict[str, Callable[[], Any]] = {"SGD epoch": sgd_epoch(network(10).cuda(), loader)}
        runs |= {name: estimate(model, loader, method) for name, method in STRUCTURES.items()}
        runs["kernel, new precisions"] = reevaluate(model, loader)
        for name, run in runs.items():
            torch.cuda.reset_peak_memory_stats()
            took = seconds(run, arguments.rounds)
            peak = torch.cuda.max_memory_allocated() / 1e9
            rows.append([n, name, round(took, 4), round(peak, 2)])
            print(rows[-1], flush=True)
    content = {
        "title": "Cost of the structures of the curvature on a GPU",
        "question": "How long does one exact estimate with its gradient take?",
        "command": ["python benchmarks/kernel_gpu.py --json FILE"],
        "machine": torch.cuda.get_device_name(),
        "columns": ["data", "structure", "seconds", "peak memory, GB"],
        "rows": rows,
        "notes": ['"exact" is Kronecker factors with the exact estimator.'],
    }
    arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
