"""Test the search ranges and energies of poses."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from symrazor.invariance import Augment, Augmented, Blur, TimeShift, Transformation, affine
from symrazor.invariance.averaged_network import lattice
from symrazor.invariance.poses import (
    POSES_PER_GENERATOR,
    _accumulates_at_end,
    energy_profiles,
    generators_of,
    narrow_range_fails,
)

F64 = torch.float64


class Shift(Transformation):
    """Add the point to the first entries of an input."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor, points: Tensor) -> Tensor:
        return x + nn.functional.pad(points.to(x), (0, x.shape[1] - self.dim))

    def describe(self, shape: Sequence[int]) -> dict[str, float]:
        return {}


class Sign(nn.Module):
    """Inputs are pose and sign; the sign is visible near pose 0, elsewhere class 0 is likelier."""

    def forward(self, x: Tensor) -> Tensor:
        pose, sign = x.unbind(1)
        seen = 2 * sign * (-0.5 * (pose / 0.2).square()).exp()
        return torch.stack([seen + 0.3, -seen], 1)


@pytest.mark.parametrize(("moved", "fails"), [(0.0, False), (0.8, True), (1.6, False)])
def test_labels_that_no_copy_explains_do_not_count_as_lost(moved: float, fails: bool) -> None:
    """A fifth of the inputs is moved: not at all, within the copies, and beyond them."""
    y = torch.arange(100) % 2
    pose = moved * (torch.arange(100) % 10 < 2)
    x = torch.stack([pose, 1.0 - 2 * y], 1).to(F64)
    model = Augmented(Sign(), Augment(Shift(1), 4), average="joint").eval()
    places = torch.linspace(-2, 2, 41, dtype=F64).unsqueeze(1)
    assert narrow_range_fails(model, x, y, places, 3) is fails


class Ridge(nn.Module):
    """A density with a ridge along the diagonal, and a second class that is not used."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.unbind(1)
        g = -4 * (a - b).square() - 2 * a.square()
        return torch.stack([g, torch.zeros_like(g)], 1)


def test_profiles_sweep_every_generator_twice() -> None:
    x = torch.tensor([[0.3, -0.5], [-0.7, 0.1], [0.2, 0.6]], dtype=F64)
    y = torch.zeros(3, dtype=torch.long)
    network = Ridge()
    model = Augmented(network, Augment(Shift(2), 4), average="joint").eval()
    result = energy_profiles(model, x, y, torch.zeros(3, 2, dtype=F64), {0: 1.0, 1: 2.0})
    places = [2 * (i + 0.5) / POSES_PER_GENERATOR - 1 for i in range(POSES_PER_GENERATOR)]
    for n in range(3):
        pose, seen = [0.0, 0.0], [[0.0], [0.0]]
        for j, end in [(0, 1.0), (1, 2.0), (0, 1.0), (1, 2.0)]:
            tried = [[end * p if k == j else pose[k] for k in (0, 1)] for p in places]
            seen[j] = network(x[n] + torch.tensor(tried, dtype=F64))[:, 0].tolist()
            pose = tried[seen[j].index(max(seen[j]))]
        for j in (0, 1):
            torch.testing.assert_close(result[j][n], torch.tensor(seen[j], dtype=F64))


def test_search_ranges_of_rotations_and_of_transformations_without_poses() -> None:
    moves = [affine("rotation", 0.5), affine("translation", 0.2), TimeShift(0.1), Blur(1.0)]
    generators = generators_of(Augment(moves, 4))
    assert [g.search_range for g in generators] == [1.0, 2.0, 2.0, 2.0, 1.0]


@pytest.mark.parametrize("end", [slice(0, 6), slice(90, 96)])
def test_poses_accumulate_at_an_end_with_twice_their_share(end: slice) -> None:
    """One sixteenth of 96 places holds slightly more or less than an eighth of the poses."""
    for share, expected in [(1 / 16, False), (0.12, False), (0.13, True)]:
        shares = torch.full((3, 96), (1 - share) / 90, dtype=F64)
        shares[:, end] = share / 6
        assert _accumulates_at_end(shares.log()) is expected


@pytest.mark.parametrize(("dim", "golden"), [(2, (1 + math.sqrt(5)) / 2), (3, 1.324717957244746)])
def test_points_of_the_lattice(dim: int, golden: float) -> None:
    """The root of g^2 = g + 1, and that of g^3 = g + 1."""
    expected = [[i / 7, *((i / golden**k) % 1 for k in range(1, dim))] for i in range(7)]
    torch.testing.assert_close(lattice(7, dim), torch.tensor(expected))
