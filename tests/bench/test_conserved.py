"""The benchmark of conserved quantities on two systems."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from symrazor.bench import conserved
from symrazor.bench.conserved_systems import Case, cases
from symrazor.bench.measure import write_rows
from symrazor.dynamics.findings import Findings
from symrazor.dynamics.invariants import find_conserved
from symrazor.dynamics.trajectories import Trajectories


def case(name: str) -> Case:
    return next(case for case in cases() if case.name == name)


def test_rows_of_two_systems(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    systems = [case("oscillator, stiffness 3"), case("damped oscillator")]
    rows = conserved.main((3,), (0.02,), file=file, systems=systems)
    assert [(row.true, row.found, row.false, row.exact) for row in rows] == [
        (1, 1, 0, True),
        (0, 0, 0, True),
    ]
    assert json.loads(file.read_text())[0]["system"] == "oscillator, stiffness 3"
    (summary,) = conserved.summarise(rows)
    assert (summary.runs, summary.exact, summary.missed, summary.false) == (2, 100.0, 0, 0)
    # Both are linear: the baselines have the true equations, too, and errors far below the noise.
    assert all(row.rollout_ratio is not None and row.rollout_ratio < 5 for row in rows)


def test_resume_keeps_rows_and_measures_the_others(tmp_path: Path) -> None:
    file, systems = tmp_path / "rows.json", [case("oscillator, stiffness 3")]
    conserved.main((3,), (0.02,), file=file, systems=systems)
    (row,) = conserved.read_rows(file)
    write_rows([replace(row, seconds=-1.0)], file)
    rows = conserved.main((3, 4), (0.02,), file=file, systems=systems, resume=True)
    assert [(row.seed, row.seconds < 0) for row in rows] == [(3, True), (4, False)]
    assert conserved.read_rows(file) == rows


def test_quantities_of_another_system_are_false() -> None:
    oscillator, damped = case("oscillator, stiffness 3"), case("damped oscillator")
    findings = find_conserved(conserved.with_relative_noise(oscillator.simulate(0), 0.01, 0))
    assert conserved.count_false(findings, oscillator.simulate(1)) == 0
    assert conserved.count_false(findings, damped.simulate(1)) == 1
    assert conserved.count_false(Findings(), damped.simulate(1)) == 0


def test_noise_is_relative_to_the_spread() -> None:
    states = torch.randn(50, 40, 2, dtype=torch.float64) * torch.tensor([1.0, 1e6])
    data = Trajectories.of(states, torch.arange(40.0))
    added = (conserved.with_relative_noise(data, 0.1, 0).states - states).flatten(0, 1).std(0)
    torch.testing.assert_close(
        added / states.flatten(0, 1).std(0), torch.full((2,), 0.1).double(), rtol=0.05, atol=0
    )


def test_trajectories_of_henon_and_heiles_stay_bounded() -> None:
    """With seed 1,000,011 a start with normal entries escaped within 25 time units."""
    system = replace(case("Henon-Heiles"), shape=(20, 101))
    states = system.simulate(8 + conserved.CHECK_SEED).states
    assert states.shape == (20, 101, 4) and float(states.abs().max()) < 1.5


@pytest.mark.parametrize("half", ["develop", "report"])
def test_halves_are_disjoint_and_cover_all_kinds(half: conserved.Half) -> None:
    systems = cases()[0 if half == "develop" else 1 :: 2]
    assert len({system.name for system in cases()}) == len(cases()) == 40
    assert {system.group for system in systems} == {"conservative", "dissipative", "chaotic"}


def test_functions_that_the_regression_of_noisy_velocities_removes_are_fitted_again() -> None:
    data = conserved.with_relative_noise(case("Halvorsen").simulate(0), 0.1, 0)
    best = find_conserved(data).fields.adequate
    assert best is not None and best.error < 1.1
    linear = {(name, x) for name in ("x1", "x2", "x3") for x in ("x1", "x2", "x3")}
    squares = {("x1", "x2^2"), ("x2", "x3^2"), ("x3", "x1^2")}
    names = zip(("x1", "x2", "x3"), best.fit.field.terms, strict=True)
    assert {(name, term) for name, terms in names for term in terms} == linear | squares
