"""One evidence estimate by symrazor and by laplace-torch, side by side in one process.

Needs laplace-torch 0.3 with its ASDL and curvlinops backends, which symrazor itself must not depend
on, so it runs in an environment of its own: `make bench-peers ARGS="--alphas 4 --rounds 3"`.

**Cost**, here. The eight-convolution net of `symrazor.bench.evidence`, N = 1000 in batches of 250,
ten classes. An estimate is everything: a pass over the data, eigenvalues, the log evidence and its
gradient in one log prior precision per tensor. All variants are timed in turn, round after round,
each on a fresh copy of the model, and the medians are divided by those of one plain SGD epoch.

**Agreement** of the values, term by term, in `peers_agreement.py`. The exit code is 1 if what
should agree does not.
"""

import argparse
import ctypes
import gc
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from peers_agreement import compare_values
from peers_laplace import BATCH, PEERS, Loader, fit_peer, peer_evidence
from symrazor.bench.evidence import data, estimate, network, sgd_epoch
from symrazor.bench.measure import interleave, peak_memory, write_rows
from symrazor.curvature.estimate import Method


@dataclass(frozen=True)
class Row:
    """One line of the result; ratios are to the plain SGD epoch of the same network."""

    net: str
    alpha: int
    padding: str
    backend: str
    estimator: str
    ratio_cpu: float
    ratio_wall: float
    peak_mb: float
    log_evidence: float | None


Run = Callable[[], float | None]


def own_run(alpha: int, loader: Loader, method: Method) -> Run:
    run = estimate(network(alpha), loader, method)
    return lambda: float(run().log_evidence)


def peer_run(alpha: int, loader: Loader, backend: type, stochastic: bool) -> Run:
    model = network(alpha)

    def run() -> float:
        return peer_evidence(fit_peer(model, loader, backend, stochastic))[0]

    return run


def variants(alpha: int, loader: Loader) -> dict[tuple[str, str], Run]:
    """(backend, estimator) -> one complete run, on a model of its own."""
    runs: dict[tuple[str, str], Run] = {
        ("torch", "SGD epoch"): sgd_epoch(network(alpha), loader),
        ("symrazor", "exact"): own_run(alpha, loader, Method()),
        ("symrazor", "one probe"): own_run(alpha, loader, Method(estimator="mc")),
    }
    for name, backend in PEERS.items():
        runs[name, "exact"] = peer_run(alpha, loader, backend, False)
        runs[name, "one sampled label"] = peer_run(alpha, loader, backend, True)
    return runs


def compare_cost(alpha: int, n: int, rounds: int) -> list[Row]:
    """Time, memory and value of every variant on one network."""
    runs = variants(alpha, Loader(*data(n), BATCH))
    times = interleave({"/".join(key): run for key, run in runs.items()}, rounds)
    base = times["torch/SGD epoch"]
    rows = []
    for key, run in runs.items():
        time = times["/".join(key)]
        found: list[float | None] = []
        release_memory()
        peak = peak_memory(lambda run=run, found=found: found.append(run()))  # type: ignore[misc]
        ratios = time.cpu / base.cpu, time.wall / base.wall
        rows.append(Row("8-conv", alpha, "zeros", *key, *ratios, peak, found[0]))
    return rows


def release_memory() -> None:
    """Give freed memory back to the system, so that one peak does not hide behind the last."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


# ---- printing ------------------------------------------------------------------------------------


def show(title: str, header: list[str], cells: list[list[str]]) -> None:
    """A rich table where rich is installed, else plain columns."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
        print(f"\n{title}")
        for row in (header, *cells):
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
        return
    table = Table(*header, title=title, title_justify="left", min_width=len(title))
    for row in cells:
        table.add_row(*row)
    Console().print(table)


def show_cost(alpha: int, rows: list[Row]) -> None:
    header = ["backend", "estimator", "CPU / SGD", "wall / SGD", "peak MB", "log evidence"]
    cells = [
        [
            row.backend,
            row.estimator,
            f"{row.ratio_cpu:.2f}",
            f"{row.ratio_wall:.2f}",
            f"{row.peak_mb:.0f}",
            "" if row.log_evidence is None else f"{row.log_evidence:.2f}",
        ]
        for row in rows
    ]
    show(f"8-conv, alpha={alpha}, zero padding: one evidence estimate", header, cells)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--alphas", type=int, nargs="+", default=[10, 4], help="widths of the net")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved repeats; 0: no timing")
    parser.add_argument("--n", type=int, default=1000, help="number of data")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument("--no-agreement", action="store_true", help="only time and memory")
    parser.add_argument("--json", type=Path, help="file for the rows of time and memory")
    return parser.parse_args()


def main() -> int:
    """Measure, compare, print; 1 if something that should agree does not."""
    options = arguments()
    warnings.filterwarnings("ignore", module=r"(laplace|asdl|curvlinops|torch)\b")
    torch.set_num_threads(options.threads)
    rows: list[Row] = []
    agree = True
    for alpha in options.alphas:
        if options.rounds:
            rows += compare_cost(alpha, options.n, options.rounds)
            show_cost(alpha, [row for row in rows if row.alpha == alpha])
        if not options.no_agreement:
            for found in compare_values(alpha, options.n):
                show(found.title, found.header, found.cells)
                agree = agree and found.agrees
    write_rows(rows, options.json)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
