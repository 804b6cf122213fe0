"""Relations between coordinates are told from conserved quantities, which they do not multiply."""

import pytest
import torch

from symrazor.dynamics import systems
from symrazor.dynamics.field_invariants import Combinations
from symrazor.dynamics.findings import Quantity
from symrazor.dynamics.invariants import find_conserved
from symrazor.dynamics.libraries import polynomials
from symrazor.dynamics.library import Library
from symrazor.dynamics.noise import noise_estimate
from symrazor.dynamics.relations import find_relations, without_relations
from symrazor.dynamics.samples import sample_states
from symrazor.dynamics.trajectories import Trajectories, simulate

NAMES = ["x", "y", "u", "v"]


def pendulum_on_a_circle(noise: float, seed: int) -> Trajectories:
    """Return position and velocity of a pendulum of length 1 in the plane."""
    data = simulate(systems.pendulum().with_normal_start(1.2, 0.8), 60, 39, 0.25, seed=seed)
    q, p = data.states.unbind(-1)
    states = torch.stack([q.sin(), -q.cos(), p * q.cos(), p * q.sin()], -1)
    return Trajectories(states, data.times, data.observed).with_noise(noise**2, seed=seed)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_pendulum_on_a_circle_conserves_its_energy_only(seed: int) -> None:
    findings = find_conserved(pendulum_on_a_circle(0.002, seed), NAMES, seed=seed)
    assert len(findings.relations) == 2
    (energy,) = findings.quantities
    states = pendulum_on_a_circle(0.0, seed).states.flatten(0, 1)
    exact = states[:, 1] + 0.5 * states[:, 2:].square().sum(1)
    values = energy(states)
    assert float(torch.corrcoef(torch.stack([exact, values]))[0, 1].abs()) > 0.9999


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_relations_of_a_circle(noise: float) -> None:
    data = pendulum_on_a_circle(noise, 3)
    library = Library("quadratic functions", NAMES, [], polynomials(4, 2))
    relations = find_relations(library, sample_states(data, noise_estimate(data), 0))
    clean = pendulum_on_a_circle(0.0, 3).states.flatten(0, 1)
    for relation in relations:
        assert not relation.varies and float(relation(clean).std()) < 0.01
    assert len(relations) == 2


def test_an_oscillator_has_no_relation() -> None:
    data = simulate(systems.oscillators((1.0, 1.0)), 60, 39, 0.25, seed=1).with_noise(1e-4, seed=2)
    library = Library("quadratic functions", NAMES, [], polynomials(4, 2))
    assert not find_relations(library, sample_states(data, noise_estimate(data), 0))


def test_multiples_of_a_relation_are_subtracted() -> None:
    library = Library("squares", ["x", "y", "z"], [], [(0, 0), (1, 1), (2, 2)])
    circle = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    zero, one = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    relation = Quantity(library, circle, zero, 1.0, 0.0, 0.0, float("inf"), one)
    rows = torch.tensor([[1.0, 1.0, 0.5], [1.0, 1.0, 0.0], [0.0, 0.5, 1.0]], dtype=torch.float64)
    given = Combinations(library, rows, 0.1 * rows, torch.zeros(3))
    x = torch.randn(500, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    left = without_relations(given, [relation], x)
    # z^2 / 2 with unit coefficient, the relation itself, and a combination without its x^2 or y^2.
    both = library(x).std(0)[:2].argmax()
    assert left.vectors[0].tolist() == [0.0, 0.0, 1.0]
    assert left.errors[0].tolist() == pytest.approx([0.2, 0.2, 0.1])
    assert left.vectors[1].tolist() == [1.0, 1.0, 0.0]
    assert float(left.vectors[2, both]) == 0.0
