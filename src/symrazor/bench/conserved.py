"""Count the conserved quantities that `find_conserved` finds in systems with known ones.

Each run simulates a system of `symrazor.bench.conserved_systems`, adds noise relative to the spread
of every coordinate, and compares the findings with the known number of independent quantities. A
reported quantity is false if it varies along noise-free trajectories that start elsewhere, or if it
exceeds the known number.

Systems with even numbers are the development half: the method may be adjusted to them. Systems with
odd numbers are reported and must not influence the method.
"""

import json
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.bench.conserved_systems import Case, cases
from symrazor.bench.measure import write_rows
from symrazor.dynamics.delivery import candidates, most_accurate
from symrazor.dynamics.findings import Findings
from symrazor.dynamics.invariants import find_conserved
from symrazor.dynamics.noise import noise_estimate
from symrazor.dynamics.rollouts import baselines, compare_rollouts
from symrazor.dynamics.trajectories import Trajectories, observed_states, split

Half = Literal["develop", "report", "all"]
NOISE_LEVELS = (0.002, 0.02, 0.1)
"""Standard deviations of the noise, relative to the spread of each coordinate."""
MAX_TRUE_VARIATION = 0.02
"""Largest fraction of the variance within noise-free trajectories of a quantity that is not false.

The benchmark has a limit of its own, which does not follow that of the method."""
ROLLOUTS, ROLLOUT_STEPS, MAX_RATIO = 20, 100, 1.1
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
        undecided: number of combinations that were reported as undecided; at least 1 if the
            answer is not definite.
        exact: whether all known quantities were found, and no false one.
        rollout_ratio: error of rollouts over 100 steps from noise-free states that start elsewhere,
            relative to the better one of linear least squares and a sparse regression; None if no
            vector field was fitted.
        seconds: CPU time of `find_conserved`: its run time on one core.
    """

    system: str
    seed: int
    noise: float
    true: int
    found: int
    false: int
    undecided: int
    exact: bool
    rollout_ratio: float | None
    seconds: float


@dataclass(frozen=True)
class Summary:
    """All runs at one noise level.

    `exact` is a percentage, `accurate` the percentage of rollouts with at most 1.1 times the error
    of the best baseline, `slowest` is in seconds.
    """

    noise: float
    runs: int
    exact: float
    missed: int
    false: int
    accurate: float
    slowest: float


def main(
    seeds: Sequence[int] = (0,),
    noise_levels: Sequence[float] = NOISE_LEVELS,
    half: Half = "develop",
    file: Path | None = None,
    systems: Sequence[Case] | None = None,
    jobs: int = 1,
    resume: bool = False,
) -> list[Row]:
    """Run one half of the systems, or the given ones; write the rows to a file after each run.

    With several `jobs`, as many processes work side by side, each with one thread. With `resume`,
    runs with a row in the file are not repeated.
    """
    halves = {"develop": slice(0, None, 2), "report": slice(1, None, 2), "all": slice(None)}
    chosen = cases()[halves[half]] if systems is None else systems
    rows = read_rows(file) if resume and file is not None else []
    measured = {(row.system, row.seed, row.noise) for row in rows}
    runs = [
        (case, seed, noise)
        for seed in seeds
        for noise in noise_levels
        for case in chosen
        if (case.name, seed, noise) not in measured
    ]

    def keep(row: Row) -> None:
        rows.append(row)
        write_rows(rows, file)

    if jobs == 1:
        for case, seed, noise in runs:
            keep(measure(case, seed, noise))
        return rows
    with ProcessPoolExecutor(jobs, get_context("spawn"), torch.set_num_threads, (1,)) as processes:
        names = [(case.name, seed, noise) for case, seed, noise in runs]
        for row in processes.map(_measure_by_name, *zip(*names, strict=True)):
            keep(row)
    return rows


def read_rows(file: Path) -> list[Row]:
    """Return the rows of a file of `main`; none if there is no such file."""
    if not file.exists():
        return []
    return [Row(**row) for row in json.loads(file.read_text(encoding="utf-8"))]


def _measure_by_name(name: str, seed: int, noise: float) -> Row:
    return measure(next(case for case in cases() if case.name == name), seed, noise)


@cache
def _simulate(case: Case, seed: int) -> Trajectories:
    """Return noise-free trajectories, which runs at different noise levels share."""
    return case.simulate(seed)


def measure(case: Case, seed: int, noise: float) -> Row:
    """Run one system once."""
    data = with_relative_noise(_simulate(case, seed), noise, seed)
    started = time.process_time()
    findings = find_conserved(data, seed=seed)
    seconds = time.process_time() - started
    false = count_false(findings, _simulate(case, seed + CHECK_SEED))
    true_quantities = len(findings.quantities) - false
    false += max(0, true_quantities - case.quantities)
    found = min(true_quantities, case.quantities)
    exact = found == case.quantities and false == 0
    undecided = max(len(findings.undecided), int(not findings.is_decided))
    ratio = rollout_ratio(case, data, findings, seed)
    return Row(
        *(case.name, seed, noise, case.quantities, found, false, undecided, exact),
        None if ratio is None else round(ratio, 4),
        round(seconds, 3),
    )


def rollout_ratio(case: Case, data: Trajectories, findings: Findings, seed: int) -> float | None:
    """Return the error of rollouts relative to the best baseline, see `Row`."""
    if findings.fields.best is None:
        return None
    x = observed_states(data)
    deviation = noise_estimate(data).deviation(x)
    training, held_out = split(data, seed)
    models = candidates(findings, training, deviation, x)
    rollouts = compare_rollouts({**models}, held_out, deviation)
    chosen = most_accurate(models, rollouts, held_out, deviation)
    simulators = baselines(training, deviation)
    longer = replace(case, shape=(ROLLOUTS, ROLLOUT_STEPS + 1))
    clean = _simulate(longer, seed + CHECK_SEED)
    rollouts = compare_rollouts({"own": models[chosen], **simulators}, clean, deviation)
    errors = [rollouts.mean(name) for name in simulators]
    return rollouts.mean("own") / max(min(errors), 1e-300) if errors else None


def with_relative_noise(data: Trajectories, noise: float, seed: int) -> Trajectories:
    """Add normal noise with a standard deviation relative to the spread of each coordinate."""
    generator = torch.Generator().manual_seed(seed + 7919)
    z = torch.randn(data.states.shape, generator=generator, dtype=torch.float64)
    spread = data.states.flatten(0, 1).std(0)
    return Trajectories(data.states + noise * spread * z, data.times, data.observed)


def count_false(findings: Findings, clean: Trajectories) -> int:
    """Return how many quantities vary along noise-free trajectories by more than allowed."""
    return sum(
        variation_within(quantity(clean.states.flatten(0, 1)).view(len(clean), -1))
        > MAX_TRUE_VARIATION
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
                _percentage_accurate([row.rollout_ratio for row in level]),
                max(row.seconds for row in level),
            )
        )
    return summaries


def _percentage_accurate(ratios: Sequence[float | None]) -> float:
    measured = [ratio for ratio in ratios if ratio is not None]
    within = sum(ratio <= MAX_RATIO for ratio in measured)
    return round(100 * within / len(measured), 1) if measured else 0.0
