"""Test the tables and interpolation of point groups."""

import itertools

import pytest
import torch
from gconv_case import random_case

from symrazor import groups
from symrazor.layers import GConv
from symrazor.layers.point_group import point_group
from symrazor.testing import assert_close


@pytest.mark.parametrize("rotations", (1, 2, 3, 4, 6, 8))
@pytest.mark.parametrize("mirrored", (False, True))
def test_the_table_is_that_of_the_matrices(rotations: int, mirrored: bool) -> None:
    group = point_group(f"{'D' if mirrored else 'C'}{rotations}")
    R = group.matrices
    for a, b in itertools.product(range(group.order), repeat=2):
        assert torch.allclose(R[a] @ R[b], R[int(group.table[a, b])], atol=1e-12)
    if group.exact:  # an action: a (b x) = (a b) x
        x = torch.randn(1, group.order, 4, 4)
        for a, b in itertools.product(range(group.order), repeat=2):
            twice = group.act(a, group.act(b, x))
            assert torch.equal(twice, group.act(int(group.table[a, b]), x))


def test_interpolation_error_of_filters_decreases_with_resolution() -> None:
    errors = [GConv(8, 8, (33, 33), group="C8", kernel=k).interpolation_error for k in (5, 9, 17)]
    assert errors[0] > 2 * errors[1] > 4 * errors[2] > 0
    assert f"group=C8, interpolation error {errors[0]:.2g})" in str(
        GConv(8, 8, (33, 33), group="C8", kernel=5)
    )
    assert GConv(4, 4, (8, 8)).interpolation_error == 0
    assert "interpolation" not in str(GConv(4, 4, (8, 8)))
    assert not GConv(8, 8, (8, 8), group="C8").strict


def test_any_finite_group_of_the_plane() -> None:
    """A user-defined group: the reflection that swaps rows and columns."""
    swap = groups.Group.from_matrices("diagonal", [[[0.0, 1.0], [1.0, 0.0]]])
    path, x = random_case(GConv(4, 6, (5, 5), group=swap))
    assert path.group == "diagonal" and path.strict
    with torch.no_grad():
        ((before, after),) = path.transformations()
        assert torch.equal(before(x)[:, :2], x[:, 2:].transpose(2, 3))
        assert_close(path(before(x)), after(path(x)), 1e-12)
    with pytest.raises(ValueError, match="2 x 2 or 3 x 3 matrices"):
        GConv(4, 4, (4, 4), group=groups.symmetric(3))
