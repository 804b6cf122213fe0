"""Check names, formulas and verdicts of learned quantities."""

import numpy as np
import pytest
import torch

from symrazor.dynamics import systems
from symrazor.dynamics.algebra import Algebra, nbody_invariants, unitary
from symrazor.dynamics.config import TrainConfig
from symrazor.dynamics.discovery import (
    as_trajectories,
    choose_units,
)
from symrazor.dynamics.hamiltonian import HamiltonianNetwork, SymmetrisedNetwork
from symrazor.dynamics.network_result import (
    NetworkResult,
    Units,
    describe_quantities,
    formula,
    name_quantities,
)
from symrazor.dynamics.trained import Noise, Trained
from symrazor.dynamics.trajectories import (
    simulate,
)


def test_formula_is_relative_to_centre_and_weighted_by_scale() -> None:
    """Both terms of (q - 10)^2 / 200 + 50 p^2 are equally large with scales 11 and 0.1."""
    A = torch.diag(torch.tensor([0.01, 100.0]).double())
    b = torch.tensor([-0.1, 0.0]).double()
    centre, scale = torch.tensor([10.0, 0.0]).double(), torch.tensor([11.0, 0.1]).double()
    assert formula(A, b, centre, scale) == "0.005 (q1 - 10)^2 + 50 p1^2"


def test_quantities_of_centred_states_in_user_coordinates() -> None:
    """The energy of an oscillator around q = 10 is constant up to scale in user coordinates."""
    data = simulate(systems.oscillators(), 8, 6, 0.2, seed=0)
    shifted = data.states + torch.tensor([10.0, 0.0])
    units = choose_units(as_trajectories(shifted, data.times[0], False))
    assert float(units.centre[0]) == pytest.approx(10, abs=0.5) and float(units.centre[1]) == 0
    x = units.to_scaled(as_trajectories(shifted, data.times[0], False)).states
    centre, scale = units.centre[0], units.scale
    q, p = (x * scale + units.centre).unbind(-1)
    A = torch.diag(scale.square())  # of ((q - 10)^2 + p^2) / 2, scaled
    b = torch.stack([(centre - 10) * scale[0], 0 * centre])
    inner = 0.5 * torch.einsum("...i,ij,...j->...", x, A, x) + x @ b
    matrix, linear = units.to_user(A, b)
    states = torch.stack([q, p], -1)
    outer = 0.5 * torch.einsum("...i,ij,...j->...", states, matrix, states) + states @ linear
    ratio = outer.diff(dim=0) / inner.diff(dim=0)
    torch.testing.assert_close(ratio, ratio[:1, :1].expand_as(ratio))


def test_formula_shows_the_largest_terms() -> None:
    A = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    assert formula(A, torch.tensor([0.0, -0.7])) == "1 q1^2 - 0.7 p1 + 0.5 p1^2"
    total = "0.5 q1^2 + 0.5 q2^2 + 0.5 q3^2 + 0.5 p1^2 + ..."  # incomplete
    assert formula(torch.eye(6), torch.zeros(6)) == total


@pytest.mark.parametrize(
    "known", [unitary(2), unitary(3), nbody_invariants(3, 2), nbody_invariants(2, 3)]
)
def test_name_quantities_recovers_the_names_of_a_mixed_algebra(known: Algebra) -> None:
    """Names and quantities are recovered from a random mixture."""
    g = torch.Generator().manual_seed(0)
    mix = torch.randn(len(known), len(known), generator=g, dtype=torch.float64)
    A, b = torch.einsum("km,mij->kij", mix, known.A), mix @ known.b
    named, overlaps = name_quantities(A, b)
    assert named.names == known.names
    assert overlaps == pytest.approx([1.0] * len(known))
    for matrix, expected in zip(named.A, known.A, strict=True):
        torch.testing.assert_close(matrix * expected.norm(), expected * matrix.norm())


def test_unknown_quantities_get_a_formula() -> None:
    zero = torch.zeros(1, 2, dtype=torch.float64)
    named, overlaps = name_quantities(torch.diag(torch.tensor([1.0, -1.0]).double())[None], zero)
    assert named.names == ("",) and overlaps == [0.0]
    assert formula(named.A[0], named.b[0]) == "0.35 q1^2 - 0.35 p1^2"
    named, _ = name_quantities(torch.diag(torch.tensor([-1.0, -4.0]).double())[None], zero)
    assert named.names == ("energy-like",)
    assert formula(named.A[0], named.b[0]) == "0.49 p1^2 + 0.12 q1^2"


def test_described_quantities_are_in_user_units() -> None:
    data = simulate(systems.oscillators(), 6, 6, 0.2, seed=0)
    trajectories = as_trajectories(data.states * torch.tensor([10.0, 0.1]), data.times[0], False)
    scale = choose_units(trajectories)
    accepted, doubtful, algebra = describe_quantities(
        unitary(1).quadratic(), scale, scale.to_scaled(trajectories)
    )
    (entry,) = (*accepted, *doubtful)
    assert entry["name"] == "energy (rotation of phase space)"
    A = np.array(entry["matrix"])
    ratio = float(scale.scale[0] / scale.scale[1]) ** 2
    assert A[1, 1] / A[0, 0] == pytest.approx(ratio, rel=1e-4)
    assert algebra == {"closure": 0.0, "structure_constants": [[[0.0]]]}
    assert describe_quantities(None, scale, data)[0] == []
    two = simulate(systems.oscillators([1.0, 1.0]), 6, 6, 0.2, seed=0)
    entries, _, algebra = describe_quantities(unitary(2).quadratic(), choose_units(two), two)
    assert algebra["closure"] == pytest.approx(0.0, abs=1e-9)
    constants = np.array(algebra["structure_constants"])
    np.testing.assert_allclose(constants, -constants.transpose(1, 0, 2), atol=1e-9)
    assert all(entry["drift"] < 1e-6 for entry in entries)


def _verdict(names: list[str], drifts: list[float], doubtful: list[str], margin: float) -> str:
    """Return the verdict for entries with these names, and the log odds `margin`."""
    bounds = {"learned": 0.0, "plain": margin / 10}
    learned, plain = (
        Trained(SymmetrisedNetwork(HamiltonianNetwork(2, width=2)), Noise(), TrainConfig())
        for _ in bounds
    )
    learned.bound, plain.bound = ({"neg_elbo": value} for value in bounds.values())
    entries = [
        {"name": name, "formula": "0.5 q1^2 + 0.5 p1^2", "drift": drift}
        for name, drift in zip(names, drifts, strict=True)
    ]
    unconfirmed = [{"name": name, "formula": name, "drift": 0.6} for name in doubtful]
    units = Units(torch.zeros(2), torch.ones(2), 1.0)
    errors = {"learned": 0.01, "plain": 0.02}
    return NetworkResult(learned, plain, units, entries, unconfirmed, {}, errors, 10).verdict


def test_verdict_gives_the_answer_first() -> None:
    assert _verdict(["energy"], [0.003], [], 41.0) == (
        "Conserved: energy = 0.5 q1^2 + 0.5 p1^2 (drift 0.3 % of its spread, log odds +41)."
    )
    assert _verdict(["momentum x", "momentum y"], [0.003, 0.02], [], 1234.0) == (
        "Conserved: momentum x, momentum y (drift at most 2.0 % of the spread, log odds +1,234)."
    )
    assert _verdict([], [], [], 0.0).startswith("No quadratic conserved quantity was found.")
    uncertain = _verdict(["energy"], [0.0], ["q1 p1"], -2.0)
    assert "Not confirmed: q1 p1 (drift 60 %)." in uncertain
    assert "The evidence is higher without conserved quantities" in uncertain
