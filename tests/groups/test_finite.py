"""Test enumerated groups: closures, orbits, tables and subgroups."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from symrazor import groups
from symrazor.groups import FiniteGroup
from symrazor.groups.generators import pair_orbits, permutation_matrix


@given(st.lists(st.permutations(range(4)), min_size=1, max_size=3))
@settings(max_examples=20, deadline=None)
def test_closures_of_permutations_are_groups(generators: list[list[int]]) -> None:
    group = FiniteGroup.from_permutations("any", torch.tensor(generators))
    group.check()
    assert math.factorial(4) % group.order == 0  # Lagrange
    assert group.permutations is not None
    rows = {tuple(p) for p in group.permutations.tolist()}
    assert rows >= {tuple(p) for p in generators}
    products = {tuple(a[i] for i in b) for a, b in itertools.product(rows, rows)}
    assert products == rows
    matrices = torch.stack([permutation_matrix(torch.tensor(p)) for p in generators])
    twin = FiniteGroup.from_matrices("any", matrices)
    assert twin.order == group.order
    assert twin.is_subgroup_of(group) and group.is_subgroup_of(twin)


def test_orbits_of_pairs_of_two_spaces_by_brute_force() -> None:
    """A group of order 24 acts on four positions and on their pairs."""
    rows = torch.tensor([[1, 0, 2, 3], [1, 2, 3, 0]])
    pairs = list(itertools.combinations(range(4), 2))
    moved = [[pairs.index((min(p[a], p[b]), max(p[a], p[b]))) for a, b in pairs] for p in rows]
    labels = pair_orbits(rows, torch.tensor(moved))
    assert labels.shape == (4, 6)
    for t, s in itertools.product(range(4), range(6)):
        assert bool(labels[t, s] == labels[0, 0]) == (t in pairs[s])  # an end of the pair, or not
    assert int(labels.max()) == 1


@given(st.lists(st.permutations(range(4)), min_size=1, max_size=2))
@settings(max_examples=20, deadline=None)
def test_orbits_of_pairs_by_brute_force(generators: list[list[int]]) -> None:
    rows = torch.tensor(generators)
    elements = FiniteGroup.from_permutations("any", rows).permutations
    assert elements is not None
    labels = pair_orbits(rows)
    for a, b in itertools.product(itertools.product(range(4), repeat=2), repeat=2):
        together = any((int(p[a[0]]), int(p[a[1]])) == b for p in elements)
        assert bool(labels[a] == labels[b]) == together


def test_an_invalid_table_raises_and_names_the_element() -> None:
    with pytest.raises(ValueError, match=r"table of loop is not associative: \(.*\)·.* != "):
        # a loop of order 5: identity and unique division, not associative
        table = [
            [0, 1, 2, 3, 4],
            [1, 0, 3, 4, 2],
            [2, 4, 0, 1, 3],
            [3, 2, 4, 0, 1],
            [4, 3, 1, 2, 0],
        ]
        FiniteGroup.from_table("loop", table)
    with pytest.raises(ValueError, match=r"a·b is not an element of bad: 7"):
        FiniteGroup.from_table("bad", [[0, 7], [1, 0]], ["a", "b"])
    with pytest.raises(ValueError, match="'z' of monoid has no inverse"):
        FiniteGroup.from_table("monoid", [[0, 1], [1, 1]], ["e", "z"])
    with pytest.raises(ValueError, match="table of left has no identity"):
        FiniteGroup.from_table("left", [[0, 0], [1, 1]])
    with pytest.raises(ValueError, match="square table"):
        FiniteGroup.from_table("flat", [0, 1])
    with pytest.raises(ValueError, match=r"half needs a square table of integers, got torch.float"):
        FiniteGroup.from_table("half", [[0.0, 1.0], [1.0, 0.0]])
    z3 = groups.cyclic_permutations(3).finite()
    for table in (z3.table[:2], z3.table.double()):
        with pytest.raises(ValueError, match="Z3 needs a square table"):
            FiniteGroup("Z3", table, z3.names, z3.generators).check()


def test_subgroups() -> None:
    d4, c4, s6 = groups.dihedral(4), groups.cyclic(4), groups.symmetric(6)
    assert c4.is_subgroup_of(d4) and not d4.is_subgroup_of(c4)
    assert c4.is_subgroup_of(groups.so(2)) and not d4.is_subgroup_of(groups.so(2))
    assert d4.is_subgroup_of(groups.o(2)) and groups.so(2).is_subgroup_of(groups.o(2))
    assert not groups.so(2).is_subgroup_of(d4)
    assert groups.octahedral().is_subgroup_of(groups.so(3))
    assert groups.rotations().is_subgroup_of(groups.se2())
    assert groups.alternating(6).is_subgroup_of(s6) and not s6.is_subgroup_of(groups.alternating(6))
    assert groups.cyclic_permutations(100).is_subgroup_of(groups.symmetric(100))
    assert groups.symmetric(100).is_symmetric and not groups.alternating(6).is_symmetric
    assert not groups.cyclic_permutations(5).is_subgroup_of(s6)
    finite = d4.finite()
    halves = finite.subgroup([finite.table[1, 1].item()])  # r^2
    halves.check()
    assert halves.order == 2 and halves.is_subgroup_of(c4.finite())


def test_products_of_enumerated_groups() -> None:
    product = groups.symmetric(3).finite() * groups.cyclic_permutations(4).finite()
    product.check()
    assert product.order == 24 and product.space == 7
    mixed = groups.cyclic(3).finite() * groups.symmetric(3).finite()
    mixed.check()
    assert mixed.matrices is not None and mixed.matrices.shape == (18, 5, 5)
