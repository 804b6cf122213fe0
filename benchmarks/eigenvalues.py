"""Time eigenvalues of many symmetric float64 matrices by torch and cuSOLVER on a GPU, and by a CPU.

    PYTHONPATH=src python benchmarks/eigenvalues.py --json eigenvalues.json

`symrazor.accelerate.cusolver` is worth keeping while its column is well below that of torch at the
sizes that it solves.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from symrazor.accelerate import cusolver

SIZES = ((20, 400), (40, 184), (80, 364), (160, 83), (256, 80), (640, 3), (1024, 23))
"""Rows and number of matrices, as in a network with eight convolutions and free paths."""
COLUMNS = ("rows", "matrices", "torch, GPU", "cuSOLVER, one call", "one CPU thread", "difference")


def milliseconds(solve: Callable[[Tensor], Tensor], matrices: Tensor, rounds: int) -> float:
    """Return the median wall time of a call, after one untimed call."""
    times = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        solve(matrices)
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def measure(rows: int, count: int, rounds: int) -> list[float | None]:
    """Return the row of the table for one size; the difference is relative to the largest value."""
    generator = torch.Generator().manual_seed(rows)
    factor = torch.randn(count, rows, rows, generator=generator, dtype=torch.float64)
    host = factor @ factor.mT / rows
    matrices = host.cuda()
    solver = cusolver.solver(matrices.device)
    torch.set_num_threads(1)
    reference = torch.linalg.eigvalsh(matrices)
    error = None
    if solver is not None:
        values = solver.eigenvalues(matrices)
        error = float((values - reference).abs().max() / reference.abs().max())
    return [
        rows,
        count,
        milliseconds(torch.linalg.eigvalsh, matrices, rounds),
        None if solver is None else milliseconds(solver.eigenvalues, matrices, rounds),
        milliseconds(torch.linalg.eigvalsh, host, 1),
        error,
    ]


def four_digits(value: float | None) -> float | None:
    """Round to four significant digits; integers stay."""
    return value if value is None or isinstance(value, int) else float(f"{value:.4g}")


def main() -> None:
    """Print the table, and write it to a file if one is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no GPU was found.")
    rows = [measure(rows, count, options.rounds) for rows, count in SIZES]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    print(" | ".join(COLUMNS))
    for row in rows:
        print(" | ".join("none" if value is None else f"{value:.4g}" for value in row))
    if options.json:
        table = {
            "title": "Eigenvalues in float64, milliseconds",
            "question": "Which sizes should cuSOLVER's batched solver take in place of torch's?",
            "command": ["PYTHONPATH=src python benchmarks/eigenvalues.py --json FILE"],
            "machine": f"{torch.cuda.get_device_name()} and one thread of its machine",
            "version": f"torch {torch.__version__}, CUDA {torch.version.cuda}",
            "columns": COLUMNS,
            "rows": [[four_digits(value) for value in row] for row in rows],
            "notes": [
                f"Medians of {options.rounds} calls; the CPU is timed once. The last column is the "
                "largest difference of the two GPU columns, relative to the largest eigenvalue."
            ],
        }
        options.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
