"""Count the conserved quantities that `find_conserved` finds in systems with known ones.

Each run simulates a system of `symrazor.bench.conserved_systems`, adds noise relative to the spread
of every coordinate, and compares the findings with the known number of independent quantities. A
reported quantity is false if it varies along noise-free trajectories that start elsewhere, or if it
exceeds the known number.

Systems with even numbers are the development half: the method may be adjusted to them. Systems with
odd numbers are reported and must not influence the method.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.bench.conserved_systems import Case, cases
from symrazor.bench.measure import write_rows
from symrazor.dynamics.findings import Findings
from symrazor.dynamics.invariants import find_conserved
from symrazor.dynamics.trajectories import Trajectories

Half = Literal["develop", "report", "all"]
NOISE_LEVELS = (0.002, 0.02, 0.1)
"""Standard deviations of the noise, relative to the spread of each coordinate."""
MAX_VARIATION = 0.02
"""Largest fraction of the variance within noise-free trajectories of a quantity that is not false.
"""
CHECK_SEED = 1_000_003
"""Added to the seed of a run for the noise-free trajectories that expose false quantities."""


@dataclass(frozen=True)
class Row:
    """One run.

    Args:
        system: its name.
        seed: of initial states and noise.
        noise: standard deviation, relative to the spread of each coordinate.
        true: known number of independent quantities.
        found: number of independent quantities that were reported as conserved and are.
        false: number of quantities that were reported as conserved and are not.
        undecided: number of combinations that were reported as undecided.
        exact: whether all known quantities were found, and no false one.
        seconds: run time of `find_conserved`.
    """

    system: str
    seed: int
    noise: float
    true: int
    found: int
    false: int
    undecided: int
    exact: bool
    seconds: float


@dataclass(frozen=True)
class Summary:
    """All runs at one noise level; `exact` is a percentage, `slowest` is in seconds."""

    noise: float
    runs: int
    exact: float
    missed: int
    false: int
    slowest: float


def main(
    seeds: Sequence[int] = (0,),
    noise_levels: Sequence[float] = NOISE_LEVELS,
    half: Half = "develop",
    file: Path | None = None,
    systems: Sequence[Case] | None = None,
    jobs: int = 1,
) -> list[Row]:
    """Run one half of the systems, or the given ones, and write the rows to a file.

    With several `jobs`, as many processes work side by side, each with one thread.
    """
    halves = {"develop": slice(0, None, 2), "report": slice(1, None, 2), "all": slice(None)}
    chosen = cases()[halves[half]] if systems is None else systems
    runs = [(case.name, seed, noise) for case in chosen for noise in noise_levels for seed in seeds]
    if jobs == 1:
        by_name = {case.name: case for case in chosen}
        rows = [measure(by_name[name], seed, noise) for name, seed, noise in runs]
    else:
        with ProcessPoolExecutor(
            jobs, get_context("spawn"), torch.set_num_threads, (1,)
        ) as processes:
            rows = list(processes.map(_measure_by_name, *zip(*runs, strict=True)))
    write_rows(rows, file)
    return rows


def _measure_by_name(name: str, seed: int, noise: float) -> Row:
    return measure(next(case for case in cases() if case.name == name), seed, noise)


def measure(case: Case, seed: int, noise: float) -> Row:
    """Run one system once."""
    data = with_relative_noise(case.simulate(seed), noise, seed)
    started = time.perf_counter()
    findings = find_conserved(data, seed=seed)
    seconds = time.perf_counter() - started
    false = count_false(findings, case.simulate(seed + CHECK_SEED))
    true_quantities = len(findings.quantities) - false
    false += max(0, true_quantities - case.quantities)
    found = min(true_quantities, case.quantities)
    exact = found == case.quantities and false == 0
    undecided = len(findings.undecided)
    return Row(
        case.name, seed, noise, case.quantities, found, false, undecided, exact, round(seconds, 3)
    )


def with_relative_noise(data: Trajectories, noise: float, seed: int) -> Trajectories:
    """Add normal noise with a standard deviation relative to the spread of each coordinate."""
    generator = torch.Generator().manual_seed(seed + 7919)
    z = torch.randn(data.states.shape, generator=generator, dtype=torch.float64)
    spread = data.states.flatten(0, 1).std(0)
    return Trajectories(data.states + noise * spread * z, data.times, data.observed)


def count_false(findings: Findings, clean: Trajectories) -> int:
    """Return how many quantities vary along noise-free trajectories by more than allowed."""
    return sum(
        variation_within(quantity(clean.states.flatten(0, 1)).view(len(clean), -1)) > MAX_VARIATION
        for quantity in findings.quantities
    )


def variation_within(values: Float[Tensor, "b t"]) -> float:
    """Return the fraction of the variance within trajectories."""
    return float((values - values.mean(1, keepdim=True)).square().mean() / values.var())


def summarise(rows: Sequence[Row]) -> list[Summary]:
    """Return one summary for each noise level."""
    summaries = []
    for noise in sorted({row.noise for row in rows}):
        level = [row for row in rows if row.noise == noise]
        summaries.append(
            Summary(
                noise,
                len(level),
                round(100 * sum(row.exact for row in level) / len(level), 1),
                sum(row.true - row.found for row in level),
                sum(row.false for row in level),
                max(row.seconds for row in level),
            )
        )
    return summaries
