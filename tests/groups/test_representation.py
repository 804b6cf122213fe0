"""Test that the images of generators compose."""

import math

import pytest
import torch

from symrazor import groups
from symrazor.groups import Group, Representation
from symrazor.layers import EquivariantLinear
from symrazor.testing import assert_close

F64 = torch.float64


def test_words_of_a_representation_commute_to_rounding() -> None:
    """Forty words with small and large angles commute with maps from matrices to vectors."""
    vector = groups.defining(groups.so(3))
    layer = EquivariantLinear(1, 2, vector * vector + groups.invariant(groups.so(3)), vector)
    layer = layer.double()
    x = torch.randn(4, 1, 10, dtype=F64)
    before, after = layer.representations or ()
    for g, h in zip(before.moves(40), after.moves(40), strict=True):
        assert_close(layer(x @ g.mT), layer(x) @ h.mT, 1e-12)


@pytest.mark.parametrize(
    ("group", "discrete", "flows", "message"),
    [
        (groups.o(2), [[[1.0]]], [[[0.5]]], "for the pair m, rotation"),
        (groups.o(2), [[[0.0]]], [[[0.0]]], "is not invertible"),
        (groups.o(2), [[[1.0]]], torch.zeros(1, 2, 2), "Images of O.* must be finite matrices"),
        (groups.cyclic_permutations(3), [[[math.nan]]], None, "got nan or infinity"),
        (groups.so(2), None, torch.full((1, 2, 2), math.nan), "got nan or infinity"),
        (groups.cyclic(3), torch.ones(1, 2, 3), None, r"got \[1, 2, 3\]"),
    ],
)
def test_images_that_do_not_compose_raise(
    group: Group, discrete: object, flows: object, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Representation.of(group, discrete, flows)


def test_images_of_discrete_and_continuous_generators_compose() -> None:
    turn = 3 * groups.so(2).lie.generators  # type: ignore[union-attr]
    assert Representation.of(groups.o(2), [[[-1.0, 0], [0, 1]]], turn.tolist()).size == 2
    assert Representation.of(groups.o(2), [[[-1.0]]], [[[0.0]]]).size == 1
