"""Actions of groups on grids, positions, channels and vectors."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from symrazor import equivariance_error, groups
from symrazor.groups import Group, lie
from symrazor.testing import assert_close

# Actions


def test_a_group_in_three_dimensions_does_not_act_on_the_plane() -> None:
    """3 x 3 matrices act on images only as homogeneous coordinates."""
    for group in (groups.octahedral(), groups.so(3), groups.reflections(3)):
        with pytest.raises(ValueError, match="a grid of 2 dimensions, .* homogeneous coordinates"):
            groups.OnGrid(group, (4, 4))
    with pytest.raises(ValueError, match="homogeneous coordinates"):
        equivariance_error(torch.nn.Conv2d(1, 1, 3, padding=1), torch.randn(2, 1, 4, 4), "O")
    for group in (groups.se2(), groups.affine2(), groups.scalings(), groups.rotations()):
        groups.OnGrid(group, (4, 4))


def test_grid_actions_are_rot90_and_flips() -> None:
    x = torch.randn(2, 3, 5, 5)
    action = groups.OnGrid(groups.dihedral(4), (5, 5))
    turn, mirror = groups.dihedral(4).discrete
    assert torch.equal(action.act(x, turn), torch.rot90(x, -1, (-2, -1)))
    assert torch.equal(action.act(x, mirror), x.flip(-1))
    assert torch.equal(action.act(x, turn @ mirror), torch.rot90(x.flip(-1), -1, (-2, -1)))
    flat = groups.OnGrid(groups.reflections(2), (3, 5))
    y = torch.randn(2, 1, 3, 5)
    assert torch.equal(flat.act(y, groups.reflections(2).discrete[1]), y.flip(-2))
    assert not groups.OnGrid(groups.cyclic(4), (3, 5)).is_exact(turn)


@pytest.mark.parametrize(
    ("group", "shape"),
    [
        (groups.dihedral(4), (4, 4)),
        (groups.dihedral(2), (3, 4)),
        (groups.octahedral(True), (3, 3, 3)),
        (groups.reflections(3), (2, 3, 4)),
    ],
    ids=["D4", "D2", "Oh", "mirrors"],
)
def test_exact_grid_actions_compose(group: Group, shape: tuple[int, ...]) -> None:
    finite, action = group.finite(), groups.OnGrid(group, shape)
    x = torch.randn(1, 1, *shape)
    images = [action.act(x, g) for g in finite.elements]
    assert all(action.is_exact(g) for g in finite.elements)
    for a, b in itertools.product(finite.elements, repeat=2):
        assert torch.equal(action.act(images[b], a), images[int(finite.table[a, b])])
    assert action.interpolation_error(x) == 0


def smooth(size: int) -> Tensor:
    axis = torch.linspace(-1, 1, size + 1, dtype=torch.float64)
    axis = (axis[1:] + axis[:-1]) / 2
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    return torch.exp(-4 * ((x - 0.2) ** 2 + 2 * y**2)).reshape(1, 1, size, size)


@pytest.mark.parametrize("group", [groups.cyclic(8), groups.dihedral(3), groups.rotations()])
def test_interpolation_error_decreases_with_resolution(group: Group) -> None:
    errors = [
        groups.OnGrid(group, (size, size)).interpolation_error(smooth(size), count=4)
        for size in (16, 32, 64)
    ]
    assert 0 < errors[0] < 0.1
    assert errors[1] < errors[0] / 3 and errors[2] < errors[1] / 3


def test_interpolated_rotations_are_those_of_the_function() -> None:
    size = 64
    axis = torch.linspace(-1, 1, size + 1, dtype=torch.float64)
    axis = (axis[1:] + axis[:-1]) / 2
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    c, s = math.cos(0.5), math.sin(0.5)
    back_x, back_y = c * x + s * y, -s * x + c * y  # g^-1 p
    expected = torch.exp(-4 * ((back_x - 0.2) ** 2 + 2 * back_y**2))
    turn = lie.rotation2().exp(torch.tensor([0.5], dtype=torch.float64))
    got = groups.OnGrid(groups.rotations(), (size, size)).act(smooth(size), turn)
    assert float((got[0, 0] - expected).abs()[10:-10, 10:-10].max()) < 5e-3


def test_translations_in_half_widths_move_pixels() -> None:
    x = torch.randn(1, 1, 8, 8, dtype=torch.float64)
    shift = lie.translation2().exp(torch.tensor([0.25, 0.0], dtype=torch.float64))  # a pixel of 8
    got = groups.OnGrid(groups.se2(), (8, 8)).act(x, shift)
    assert_close(got[..., 1:], x[..., :-1], 1e-12)
    assert float(got[..., 0].abs().max()) < 1e-12


def test_permutations_of_positions_are_rolls() -> None:
    x = torch.randn(2, 3, 4, 5)
    group = groups.translations((4, 5))
    assert group.permutations is not None
    action = groups.OnPositions(group, (4, 5))
    assert torch.equal(action.act(x, group.permutations[0]), torch.roll(x, 1, 2))
    assert torch.equal(action.act(x, group.permutations[1]), torch.roll(x, 1, 3))


def test_actions_on_wide_images_compose() -> None:
    """A half-width is the same length in both directions, so that rotations and shifts compose."""
    group, shape = groups.se2(), (48, 72)
    rows, columns = (torch.arange(m, dtype=torch.float64) - (m - 1) / 2 for m in shape)
    x = torch.exp(-((rows[:, None] + 2) ** 2 + (columns - 3) ** 2) / 40).reshape(1, 1, *shape)
    action = groups.OnGrid(group, shape)
    a, b = (group.lie.exp(torch.tensor(c).double()) for c in ([0.2, 0.1, 0.7], [-0.1, 0.15, 0.5]))
    twice, once = action.act(action.act(x, b), a), action.act(x, a @ b)
    assert float((twice - once).abs().max()) < 0.03
    down = torch.tensor([[1.0, 0, 0], [0, 1, 0.5], [0, 0, 1]], dtype=torch.float64)
    assert_close(action.act(x, down), torch.nn.functional.pad(x, (0, 0, 18, -18)), 1e-12)


@pytest.mark.parametrize("make", [groups.se2, groups.scalings, groups.affine2])
def test_pixels_that_leave_the_image_are_ignored(
    make: Callable[[], Group],
) -> None:
    coarse, fine = (groups.OnGrid(make(), (n, n)).interpolation_error(smooth(n)) for n in (16, 64))
    assert 0 < fine < coarse / 6


def test_interpolation_error_needs_enough_pixels() -> None:
    for n in (2, 3):
        with pytest.raises(ValueError, match="at least 4 pixels along each axis"):
            groups.OnGrid(groups.cyclic(8), (n, n)).interpolation_error(torch.randn(2, 1, n, n))
    assert groups.OnGrid(groups.cyclic(4), (2, 2)).interpolation_error(torch.randn(1, 1, 2, 2)) == 0


def test_integer_data_is_not_multiplied_by_fractions() -> None:
    """Casting the fractions to integers would make them all zero."""
    x = torch.ones(2, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"Use x.float\(\)"):
        groups.OnVectors(groups.cyclic(8)).act(x, 1)
    assert groups.OnVectors(groups.cyclic(4)).act(x, 1).tolist() == [[-1, 1], [-1, 1]]


def test_channels_of_a_subgroup_act_on_grids_of_a_larger_group() -> None:
    """Elements are passed on as matrices, because indices of the two groups differ."""
    x = torch.randn(2, 3, 4, 5, 5)
    turns, square = groups.cyclic(4), groups.dihedral(4)
    same = groups.OnRegular(turns, groups.OnGrid(turns, (5, 5)))
    larger = groups.OnRegular(turns, groups.OnGrid(square, (5, 5)))
    assert all(torch.equal(same.act(x, g), larger.act(x, g)) for g in range(4))


@pytest.mark.parametrize("g", [-1, 4, True, 1.5, torch.tensor(1.0)])
def test_indices_must_be_integers_in_range(g: object) -> None:
    for action in (groups.OnRegular(groups.cyclic(4)), groups.OnVectors(groups.cyclic(4))):
        x = torch.randn(2, 1, 4) if isinstance(action, groups.OnRegular) else torch.randn(2, 2)
        with pytest.raises(ValueError, match="indices 0 to 3|is an integer|an element of C4"):
            action.act(x, g)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: groups.OnGrid(groups.cyclic(4), (0, 4)), "The shape of a grid"),
        (lambda: groups.OnGrid(groups.cyclic(4), 4), "The shape of a grid"),  # type: ignore[arg-type]
        (
            lambda: groups.OnGrid(groups.cyclic(4), (4, 4), "zero"),
            "outside must be 'zeros', 'border'",
        ),  # type: ignore[arg-type]
        (lambda: groups.OnGrid(groups.symmetric(2), (4, 4)), "Use OnPositions"),
    ],
)
def test_invalid_grids_raise(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_invalid_matrices_raise() -> None:
    action, x = groups.OnGrid(groups.cyclic(4), (4, 4)), torch.randn(1, 1, 4, 4)
    with pytest.raises(ValueError, match="has finite entries"):
        action.act(x, torch.full((2, 2), math.nan))
    with pytest.raises(ValueError, match="g must be invertible"):
        action.act(x, torch.ones(2, 2))
    with pytest.raises(ValueError, match="x must be a tensor .*, got ndarray"):
        action.act(x.numpy(), 1)  # type: ignore[arg-type]


def test_regular_channels_compose_with_their_grids() -> None:
    group = groups.dihedral(4)
    finite = group.finite()
    action = groups.OnRegular(group, groups.OnGrid(group, (3, 3)))
    x = torch.randn(1, 2, 8, 3, 3)
    for a, b in itertools.product(finite.elements, repeat=2):
        twice = action.act(action.act(x, b), a)
        assert torch.equal(twice, action.act(x, int(finite.table[a, b])))
    assert torch.equal(action.act(x, finite.identity), x)


def test_vectors() -> None:
    group = groups.so(3)
    x = torch.randn(4, 3, dtype=torch.float64)
    for g in group.sample(3):
        moved = groups.OnVectors(group).act(x, g)
        assert_close(moved, torch.einsum("ij,nj->ni", g, x), 1e-12)
        assert_close(moved.norm(dim=1), x.norm(dim=1), 1e-12)


def test_invalid_data_raises() -> None:
    x = torch.zeros(1, 1, 4, 4)
    with pytest.raises(ValueError, match=r"x must be \[n, c, 5, 5\], got \[1, 1, 4, 4\]"):
        groups.OnGrid(groups.cyclic(4), (5, 5)).act(x, 1)
    with pytest.raises(ValueError, match="group of permutations, got <Group C4"):
        groups.OnPositions(groups.cyclic(4))
    with pytest.raises(ValueError, match="16 positions"):
        groups.OnPositions(groups.symmetric(16), (4, 5))
    with pytest.raises(ValueError, match="indices 0 to 3, got 4"):
        groups.OnGrid(groups.cyclic(4), (4, 4)).act(x, 4)
    with pytest.raises(ValueError, match="S3 of size 3 does not act on"):
        groups.action_on(groups.symmetric(3), x.shape)
    with pytest.raises(
        ValueError, match=r"SO\(4\) of size 4 does not act on data of shape \[1, 1, 4, 4\]"
    ):
        groups.action_on(groups.so(4), x.shape)
    with pytest.raises(ValueError, match=r"\[n, c, 4, \.\.\.\]"):
        groups.OnRegular(groups.cyclic(4)).act(x[:, :, :3], 1)


# Measured errors


def test_errors_of_any_group() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 2, 6, 6, dtype=torch.float64)
    assert equivariance_error(lambda x: x.flatten(2).amax(2), x, groups.dihedral(4)) == 0
    assert equivariance_error(lambda x: x.square(), x, groups.dihedral(4)) == 0
    assert equivariance_error(lambda x: x[:, :, :1].flatten(1), x, groups.cyclic(4)) > 0.5
    sets = torch.randn(8, 2, 5, dtype=torch.float64)
    assert (
        equivariance_error(lambda x: x - x.mean(2, keepdim=True), sets, groups.symmetric(5)) < 1e-14
    )
    assert equivariance_error(lambda x: x.cumsum(2), sets, groups.symmetric(5)) > 0.5
    vectors = torch.randn(8, 3, dtype=torch.float64)
    assert (
        equivariance_error(lambda x: x * x.norm(dim=1, keepdim=True), vectors, groups.so(3)) < 1e-14
    )
    assert equivariance_error(lambda x: x.norm(dim=1, keepdim=True), vectors, groups.so(3)) < 1e-14
    assert equivariance_error(lambda x: x.abs(), vectors, groups.so(3)) > 0.1
    group = groups.cyclic(4)
    pair = groups.OnGrid(group, (6, 6)), groups.TrivialAction(group)
    assert equivariance_error(lambda x: x.sum((2, 3)), x, pair) < 1e-14


def test_elements_of_another_size_raise() -> None:
    on_sets, x = groups.OnPositions(groups.symmetric(4)), torch.randn(2, 3, 4)
    for wrong in (torch.randperm(3), torch.zeros(4, dtype=torch.long), torch.tensor([1, 2, 3, 4])):
        with pytest.raises(ValueError, match="element of S4 is a permutation of 0 to 3"):
            on_sets.act(x, wrong)
    with pytest.raises(ValueError, match="3 x 3 matrix"):
        groups.OnVectors(groups.so(3)).act(torch.randn(2, 3), torch.eye(4))
    with pytest.raises(ValueError, match=r"floating-point.*x.float"):
        groups.OnGrid(groups.cyclic(8), (4, 4)).act(torch.ones(1, 1, 4, 4).long(), 1)


def test_elements_by_name_and_from_lists() -> None:
    on_grid, x = groups.OnGrid(groups.dihedral(4), (4, 4)), torch.randn(2, 3, 4, 4)
    finite = on_grid.group.finite()
    assert torch.equal(on_grid.act(x, "r"), torch.rot90(x, -1, (-2, -1)))
    for g in finite.elements:
        assert torch.equal(on_grid.act(x, finite.names[g]), on_grid.act(x, g))
    regular = groups.OnRegular(groups.cyclic(4))
    assert torch.equal(regular.act(x, "r"), x.roll(1, 2))
    sets = groups.OnPositions(groups.symmetric(3))
    places = torch.arange(3.0).reshape(1, 1, 3)
    assert sets.act(places, [1, 2, 0]).flatten().tolist() == [2, 0, 1]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="D4 has no element 'q'. Elements: e, "):
        on_grid.act(x, "q")
    with pytest.raises(ValueError, match="an element of S3, got a dict"):
        sets.act(places, {})  # type: ignore[arg-type]


def test_sequences_are_grids_of_one_dimension() -> None:
    x = torch.randn(2, 3, 7, dtype=torch.float64)
    mirror = groups.OnGrid(groups.reflections(1), (7,))
    assert mirror.is_exact(1) and torch.equal(mirror.act(x, 1), x.flip(-1))
    ramp = torch.arange(8.0).double().reshape(1, 1, 8) - 3.5
    stretch = groups.OnGrid(Group.from_matrices("stretch", [[[2.0]]]), (8,))
    doubled = stretch.act(ramp, torch.tensor([[2.0]]))
    assert_close(doubled, ramp / 2, 1e-12)  # linear between pixels: exact for a ramp


def test_invalid_symmetries_raise() -> None:
    conv, x = torch.nn.Conv2d(2, 2, 3, padding=1), torch.randn(3, 2, 5, 5)
    for wrong in (3, [3], [groups.cyclic(4)]):
        with pytest.raises(ValueError, match="actions must be a group or its name"):
            equivariance_error(conv, x, wrong)  # type: ignore[arg-type]


def test_groups_of_the_grid_by_name() -> None:
    torch.manual_seed(0)
    conv, x = torch.nn.Conv2d(2, 2, 3, padding=1), torch.randn(3, 2, 5, 5)
    for name, group in (("p4", groups.cyclic(4)), ("p4m", groups.dihedral(4))):
        assert equivariance_error(conv, x, name) == equivariance_error(conv, x, group)
    assert equivariance_error(conv, x, "translation") == equivariance_error(conv, x)
    with pytest.raises(ValueError, match="p5"):
        equivariance_error(conv, x, "p5")


def test_invalid_equivariance_errors_raise() -> None:
    x = torch.randn(3, 2, 5, 5)
    with pytest.raises(ValueError, match="got ndarray"):
        equivariance_error(lambda x: x, x.numpy())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"floating-point numbers, got torch.int64"):
        equivariance_error(lambda x: x, x.long(), "p4")


@pytest.mark.parametrize("count", [0, -1, 2.5, True, "all"])
def test_counts_must_be_positive_integers(count: int) -> None:
    x = torch.randn(3, 2, 5, 5)
    for actions in (None, "p4"):
        with pytest.raises(ValueError, match="count must be a positive integer"):
            equivariance_error(lambda x: x, x, actions, count=count)
