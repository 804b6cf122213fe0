"""Where poses of data are looked for, and how well the network likes them there."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from symrazor.invariance import Augment, Augmented, Blur, TimeShift, Transformation, affine
from symrazor.invariance.copies import lattice
from symrazor.invariance.pose_energies import (
    POSES_PER_GENERATOR,
    energy_profiles,
    narrow_range_fails,
    search_ranges,
)
from symrazor.invariance.poses import _accumulates_at_end

F64 = torch.float64


class Shift(Transformation):
    """Points are added to the first entries of a datum."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor, points: Tensor) -> Tensor:
        return x + nn.functional.pad(points.to(x), (0, x.shape[1] - self.dim))

    def describe(self, shape: Sequence[int]) -> dict[str, float]:
        return {}


class Sign(nn.Module):
    """Data are pose and sign, which is seen near pose 0; elsewhere the first class is likelier."""

    def forward(self, x: Tensor) -> Tensor:
        pose, sign = x.unbind(1)
        seen = 2 * sign * (-0.5 * (pose / 0.2).square()).exp()
        return torch.stack([seen + 0.3, -seen], 1)


@pytest.mark.parametrize(("moved", "fails"), [(0.0, False), (0.8, True), (1.6, False)])
def test_labels_that_no_copy_explains_are_not_lost_by_a_narrow_window(
    moved: float, fails: bool
) -> None:
    """A fifth of the data is moved: nowhere, to where copies are, and further than they go."""
    y = torch.arange(100) % 2
    pose = moved * (torch.arange(100) % 10 < 2)
    x = torch.stack([pose, 1.0 - 2 * y], 1).to(F64)
    model = Augmented(Sign(), Augment(Shift(1), 4), average="joint").eval()
    places = torch.linspace(-2, 2, 41, dtype=F64).unsqueeze(1)
    assert narrow_range_fails(model, x, y, places, 3) is fails


class Ridge(nn.Module):
    """A density with a ridge along the diagonal, and a second class that nobody asks for."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.unbind(1)
        g = -4 * (a - b).square() - 2 * a.square()
        return torch.stack([g, torch.zeros_like(g)], 1)


def test_slices_go_along_every_generator_twice() -> None:
    x = torch.tensor([[0.3, -0.5], [-0.7, 0.1], [0.2, 0.6]], dtype=F64)
    y = torch.zeros(3, dtype=torch.long)
    network = Ridge()
    model = Augmented(network, Augment(Shift(2), 4), average="joint").eval()
    found = energy_profiles(model, x, y, torch.zeros(3, 2, dtype=F64), {0: 1.0, 1: 2.0})
    places = [2 * (i + 0.5) / POSES_PER_GENERATOR - 1 for i in range(POSES_PER_GENERATOR)]
    for n in range(3):
        pose, seen = [0.0, 0.0], [[0.0], [0.0]]
        for j, end in [(0, 1.0), (1, 2.0), (0, 1.0), (1, 2.0)]:
            tried = [[end * p if k == j else pose[k] for k in (0, 1)] for p in places]
            seen[j] = network(x[n] + torch.tensor(tried, dtype=F64))[:, 0].tolist()
            pose = tried[seen[j].index(max(seen[j]))]
        for j in (0, 1):
            torch.testing.assert_close(found[j][n], torch.tensor(seen[j], dtype=F64))


def test_circles_are_closed_and_what_has_no_pose_stays() -> None:
    moves = [affine("rotation", 0.5), affine("translation", 0.2), TimeShift(0.1), Blur(1.0)]
    assert search_ranges(Augment(moves, 4)) == [1.0, 2.0, 2.0, 2.0, 1.0]


@pytest.mark.parametrize("end", [slice(0, 6), slice(90, 96)])
def test_poses_crowd_where_twice_their_share_is_at_an_end(end: slice) -> None:
    """A sixteenth of 96 places has an eighth of the poses, a bit more or a bit less."""
    for share, expected in [(1 / 16, False), (0.12, False), (0.13, True)]:
        shares = torch.full((3, 96), (1 - share) / 90, dtype=F64)
        shares[:, end] = share / 6
        assert _accumulates_at_end(shares.log()) is expected


@pytest.mark.parametrize(("dim", "golden"), [(2, (1 + math.sqrt(5)) / 2), (3, 1.324717957244746)])
def test_points_of_the_lattice(dim: int, golden: float) -> None:
    """The root of g^2 = g + 1, and that of g^3 = g + 1."""
    expected = [[i / 7, *((i / golden**k) % 1 for k in range(1, dim))] for i in range(7)]
    torch.testing.assert_close(lattice(7, dim), torch.tensor(expected))
