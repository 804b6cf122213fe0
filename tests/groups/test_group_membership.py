"""Membership in groups, names of elements, and invalid groups."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor

from symrazor import groups
from symrazor.groups import FiniteGroup, Group, LieAlgebra
from symrazor.groups.lie import matrix_exponential, matrix_logarithm
from symrazor.layers import EquivariantLinear
from symrazor.testing import assert_close

F64 = torch.float64


def matrix(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=F64)


def test_only_permutations_belong_to_permutation_groups() -> None:
    for group in (groups.symmetric(3), groups.symmetric(30), groups.alternating(3)):
        n = group.size
        assert not group.contains([0] * n)
        assert not group.contains(torch.ones(n, n))
        assert not group.contains(2 * torch.eye(n))
        assert not group.contains(torch.full((n, n), math.nan))
        assert group.contains(list(range(n)))
        assert group.contains(torch.eye(n))
    assert not groups.alternating(3).contains([1, 0, 2])
    swap = Group.from_matrices("swap", [[[0, 1], [1, 0]]])
    assert swap.contains([1, 0]) and groups.o(2).contains([1, 0])


def test_translations_belong_to_the_motions_of_the_plane() -> None:
    """The matrices are not diagonalisable."""
    shift = matrix([[1, 0, 0.5], [0, 1, -2], [0, 0, 1]])
    assert groups.se2().contains(shift)
    assert groups.affine2().contains(shift)
    assert Group.from_matrices("shifts", [shift]).is_subgroup_of(groups.se2())
    sheared = matrix([[1, 3, 0], [0, 1, 0], [0, 0, 1]])
    assert groups.affine2().contains(sheared)
    with pytest.raises(ValueError, match="cannot be decided"):
        groups.se2().contains(sheared)


def test_elements_of_a_flow_are_recognised_to_eight_digits() -> None:
    flow = torch.zeros(1, 3, 3, dtype=F64)
    flow[0, 0, 2] = 1.0
    group = Group.from_matrices("shifts", lie=LieAlgebra.of(flow))
    shift = torch.eye(3, dtype=F64)
    shift[0, 2] = 0.3
    assert group.contains(shift)
    shift[1, 2] = 1e-10
    assert group.contains(shift)
    shift[1, 2] = 1e-7
    with pytest.raises(ValueError, match="cannot be decided"):
        group.contains(shift)


def test_rotations_with_scalings_are_not_confused_with_rotations() -> None:
    group = Group.from_matrices("similar", [[[2.0, 0.0], [0.0, 2.0]]], groups.so(2).lie)
    with pytest.raises(ValueError, match="cannot be decided"):
        group.contains(2 * torch.eye(2, dtype=F64))
    assert groups.dihedral(4).is_subgroup_of(groups.o(2))


def test_exponentials_and_logarithms_to_rounding() -> None:
    """Errors are at rounding level for every size; torch's is 2e-10 for a matrix of norm 0.05."""
    turn = groups.so(3).lie.generators[0]
    for size in torch.logspace(-6, 1, 80).tolist():
        truth = torch.tensor(scipy.linalg.expm((size * turn).numpy()))
        assert_close(matrix_exponential(size * turn), truth, 5e-13)
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        M = torch.linalg.matrix_exp(torch.randn(4, 4, generator=generator, dtype=F64))
        log = matrix_logarithm(M)
        assert log is not None
        assert_close(log, torch.tensor(scipy.linalg.logm(M.numpy()).real), 1e-9)
    for M in (-torch.eye(2, dtype=F64), torch.zeros(2, 2, dtype=F64)):
        assert matrix_logarithm(M) is None
    assert bool(matrix_exponential(torch.full((2, 2), math.nan)).isnan().all())
    assert matrix_exponential(torch.empty(0, 2, 2)).shape == (0, 2, 2)


@pytest.mark.parametrize("unit", [1e-12, 1.0, 1e9])
def test_the_unit_of_a_flow_does_not_matter(unit: float) -> None:
    turn = LieAlgebra.of(unit * groups.so(2).lie.generators)  # type: ignore[union-attr]
    assert EquivariantLinear(1, 1, Group.from_matrices("turns", lie=turn)).maps.count == 2


def test_equal_groups_are_recognised() -> None:
    """Changing the input tensors or returned tensors does not change the group."""
    rows, matrices = np.array([[1, 2, 0]]), torch.tensor([[[0.0, -1], [1, 0]]], dtype=F64)
    flows = torch.tensor([[[0.0, -1], [1, 0]]], dtype=F64)
    places, plane = Group.from_permutations("a", rows), Group.from_matrices("b", matrices)
    algebra = LieAlgebra.of(flows)
    rows[:], matrices[:], flows[:] = 0, 0, 0
    assert places.finite().order == 3 and plane.finite().order == 4 and algebra.generators.any()
    for group in (places, plane):
        for g in (group.element(1), *group.sample(8)):
            g.zero_()
        group.check()


# Names


@pytest.mark.parametrize(
    "group",
    [
        groups.cyclic_permutations(2) * groups.cyclic_permutations(3),
        groups.cyclic_permutations(2) @ groups.cyclic_permutations(3),
        groups.symmetric(3) * groups.symmetric(3) * groups.cyclic_permutations(2),
        groups.trivial(2) * groups.symmetric(3),
        groups.cyclic(3) * groups.dihedral(4),
        Group.from_permutations("pairs", [[*range(2 * k), 2 * k + 1, 2 * k, *range(2 * k + 2, 16)]
                                          for k in range(8)]),
    ],
    ids=str,
)  # fmt: skip
def test_every_element_has_a_unique_name(group: Group) -> None:
    finite = group.finite()
    assert len(set(finite.names)) == finite.order
    for g, name in enumerate(finite.names):
        assert torch.equal(group.element(name), group.element(g))


def test_more_generators_than_letters() -> None:
    ring = torch.arange(31)
    shifts = torch.stack([ring.roll(-k) for k in range(1, 28)])
    names = FiniteGroup.from_permutations("ring", shifts).names
    assert names[1] == "a" and names[25:28] == ("z", "a1", "b1")
    assert len(set(names)) == 31
    rows = torch.arange(54).repeat(27, 1)
    for k, row in enumerate(rows):
        row[[2 * k, 2 * k + 1]] = torch.tensor([2 * k + 1, 2 * k])
    with pytest.raises(ValueError, match="more than 27 elements"):
        FiniteGroup.from_permutations("many", rows, limit=27)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Group.from_permutations("x", [[1, 0, 2], [0, 2, 1]], "aa"),
            "must be distinct",
        ),
        (lambda: Group.from_permutations("x", [[1, 0]], "e"), "reserved for the identity"),
        (lambda: Group.from_permutations("x", [[True, False]]), "got torch.bool"),
        (lambda: Group.from_matrices("x", lie=[[[0, 1], [-1, 0]]]), "Use LieAlgebra.of"),  # type: ignore[arg-type]
        (
            lambda: FiniteGroup.from_table("x", [[0, 1], [1, 0]], ["e"]),
            "The 2 elements of x",
        ),
        (lambda: FiniteGroup.from_table("x", [[0, 1], [1, 0]], "ee"), "need distinct names"),
        (lambda: groups.invariant(groups.so(3), -1), "size must be a positive integer"),
    ],
)
def test_ambiguous_names_raise(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_numpy_integers_are_valid_sizes() -> None:
    assert groups.cyclic(np.int64(4)).name == "C4"  # type: ignore[arg-type]


# Generators of both kinds


def test_discrete_generators_must_preserve_the_algebra() -> None:
    about_z = LieAlgebra.of([[[0.0, -1, 0], [1, 0, 0], [0, 0, 0]]], ["about z"])
    quarter_about_x = [[[1.0, 0, 0], [0, 0, -1], [0, 1, 0]]]
    group = Group.from_matrices("no group", quarter_about_x, about_z, "x")
    with pytest.raises(ValueError, match="for the pair x, about z. Add it as a generator"):
        group.check()
    flip = [[[1.0, 0, 0], [0, -1, 0], [0, 0, -1]]]
    Group.from_matrices("turns and flips", flip, about_z).check()
