"""Learn generators from labels that are known to be unchanged by a flow."""

import math

import pytest
import torch
from torch import Tensor

from symrazor.groups.lie import LieAlgebra, so3
from symrazor.invariance.learned_generators import (
    closure_error,
    known_generators,
    learn_generators,
)


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _span_error(found: Tensor, known: Tensor) -> float:
    """Return the largest distance of a known generator of norm 1 from the span of others."""
    rows = torch.linalg.qr(found.double().flatten(1).T)[0].T
    unit = known.double().flatten(1)
    unit = unit / unit.norm(dim=1, keepdim=True)
    return float((unit - unit @ rows.T @ rows).norm(dim=1).max())


def test_rotation_about_a_tilted_axis() -> None:
    """Oracle: the cross product with the axis."""
    axis = torch.tensor([1.0, 2.0, -1.0]) / math.sqrt(6)
    x = _normal(2000, 3)
    along = x @ axis
    y = (x - along[:, None] * axis).norm(dim=1) + along.sin() + 0.05 * _normal(2000, seed=1)
    learned = learn_generators(x, y, steps=700)
    turn = torch.linalg.cross(torch.eye(3), axis.expand(3, 3)).T
    assert learned.algebra.dim == 1 and learned.undecided == 0
    assert _span_error(learned.generators, turn.unsqueeze(0)) < 0.1
    assert "rotation about" in learned.verdict


@pytest.mark.slow
def test_boosts_and_rotations_leave_the_mass_of_two_particles_unchanged() -> None:
    momentum, mass = _normal(2500, 2, 2), 0.3
    energy = (momentum.square().sum(2) + mass**2).sqrt()
    x = torch.cat([energy.unsqueeze(2), momentum], 2)
    total = x.sum(1)
    y = (total[:, 0] ** 2 - total[:, 1:].square().sum(1)).sqrt()
    learned = learn_generators(x, y, steps=1000)
    names = {"boost of x1 and x2", "boost of x1 and x3", "rotation of x2 and x3"}
    assert set(learned.algebra.names) == names
    constants = learned.algebra.structure_constants()
    assert constants.abs().sum() == pytest.approx(6, abs=1e-9)  # so(2, 1)


@pytest.mark.slow
def test_a_map_that_turns_with_its_input_is_equivariant() -> None:
    """A cubic map of the plane that commutes with rotations, and with nothing else."""
    x = _normal(1500, 2)
    turned = torch.stack([-x[:, 1], x[:, 0]], 1)
    y = x - 0.2 * x.square().sum(1, keepdim=True) * turned
    learned = learn_generators(x, y, is_equivariant=True, steps=700)
    assert learned.algebra.names == ("rotation of x1 and x2",)
    assert "equivariant" in learned.verdict


def test_labels_without_a_symmetry_have_no_generator() -> None:
    x = _normal(1500, 2)
    y = (x[:, 0] + x[:, 1] ** 2 + x[:, 0] * x[:, 1] > 0.5).long()
    learned = learn_generators(x, y, steps=500)
    assert learned.algebra.dim == 0


def test_noise_has_no_verdict() -> None:
    """Labels that nothing predicts are unchanged by everything, or the networks are too weak."""
    learned = learn_generators(_normal(400, 2), _normal(400, seed=1), steps=300)
    assert learned.algebra.dim == 0 and learned.undecided > 0
    assert "Undecided" in learned.verdict


def test_inputs_without_extent_are_ignored() -> None:
    x = torch.cat([_normal(1000, 2), torch.zeros(1000, 1)], 1)
    learned = learn_generators(x, x.norm(dim=1), steps=500)
    assert learned.algebra.names == ("rotation of x1 and x2",) and learned.dimensions == 4


def test_commutators_outside_of_the_span() -> None:
    assert closure_error(so3()) == pytest.approx(0, abs=1e-9)
    assert closure_error(so3().masked(so3().names[:2])) == pytest.approx(1)
    assert closure_error(LieAlgebra.of(torch.eye(2).unsqueeze(0))) == 0


def test_known_generators_span_all_matrices() -> None:
    known = torch.stack([matrix for *_, matrix in known_generators(3)])
    assert int(torch.linalg.matrix_rank(known.flatten(1))) == 9


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (torch.zeros(300, 2), torch.zeros(299), "as many labels"),
        (torch.zeros(100, 2), torch.zeros(100), "at least 200"),
    ],
)
def test_invalid_data_raise_an_error(x: Tensor, y: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        learn_generators(x, y)


def test_targets_of_an_equivariant_map_have_the_size_of_the_inputs() -> None:
    with pytest.raises(ValueError, match="vectors of 2 numbers"):
        learn_generators(torch.zeros(300, 2), torch.zeros(300, 3), is_equivariant=True)
