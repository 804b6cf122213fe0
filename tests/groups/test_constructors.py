"""Groups from files and from graphs, and invalid input."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from symrazor import groups
from symrazor.groups import Group

# Files and graphs


def write(folder: Path, document: object) -> Path:
    file = folder / "group.json"
    file.write_text(document if isinstance(document, str) else json.dumps(document))
    return file


def test_a_group_from_a_file(tmp_path: Path) -> None:
    group = groups.from_file(write(tmp_path, {"name": "square", "permutations": [[1, 2, 3, 0]]}))
    assert (group.name, group.finite().order) == ("square", 4)
    group = groups.from_file(write(tmp_path, {"matrices": [[[-1, 0], [0, 1.0]]]}))
    assert (group.name, group.finite().order) == ("group", 2)


def test_file_numbers_are_exact(tmp_path: Path) -> None:
    """A rotation by 60 degrees has order 6 in float64, but does not close in float32."""
    cos, sin = math.cos(math.pi / 3), math.sin(math.pi / 3)
    turn = [[cos, -sin], [sin, cos]]
    assert groups.from_file(write(tmp_path, {"matrices": [turn]})).finite().order == 6
    assert Group.from_matrices("C6", [turn]).finite().order == 6
    assert float(groups.LieAlgebra.of([[[0.0, -sin], [sin, 0.0]]]).generators[0, 1, 0]) == sin


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ([1], 'with "permutations", or'),
        ({"permutations": [[0]], "matrices": [[[1]]]}, "or with"),
        ({"permutations": [[0]], "run": "x"}, r"Unknown keys \['run'\]"),
        ({"permutations": []}, "permutations must be a list with at least one entry"),
        ({"permutations": [[0, 1], [0]]}, "Row 1 of permutations must have 2 numbers"),
        (
            {"permutations": [[0, 1], [0, 0.5]]},
            "Row 1 of permutations must contain integers, got 0.5",
        ),
        ({"permutations": [[0, 1], [1, 1]]}, "Row 1 is not a permutation of 0 to 1"),
        ({"permutations": [[True, 0]]}, "Row 0 of permutations .* integers, got True"),
        ({"matrices": [[[1, 0], [0, 1]], [[1, 2]]]}, "Row 1 of matrices must have 2 x 2 numbers"),
        ({"matrices": [[[1, 0], [0, "x"]]]}, "Row 0 of matrices must contain numbers, got 'x'"),
        ('{"matrices": [[[NaN]]]}', "Row 0 of matrices must contain numbers, got nan"),
        ({"matrices": [[[1e7]]]}, "Row 0 of matrices must contain numbers, got 10000000.0"),
        ({"matrices": [[[0]]]}, "Matrix 0 is not invertible"),
        ({"name": 3, "permutations": [[0]]}, "name must have 1 to 200"),
        ({"name": "a\x1b[31m\nb", "permutations": [[0]]}, "200 printable characters"),
        ({"permutations": [1, 0]}, "must be a list of lists, got 1 in row 0"),
        ({"permutations": [[1.0, 0.0]]}, "Row 0 of permutations .* integers, got 1.0"),
        ({"matrices": [[[10**60]]]}, "of matrices .*, got 10{39}.$"),
        ({"permutations": [[0] * 5000]}, "1 to 4096 entries"),
        (" " * (1 << 20) + "{}", "at most 1,048,576 bytes"),
    ],
)
def test_an_invalid_file_raises_and_names_the_row(
    tmp_path: Path, document: object, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        groups.from_file(write(tmp_path, document))


def test_a_lie_algebra_from_a_file(tmp_path: Path) -> None:
    flow, mirror = [[0, -1], [1, 0]], [[-1, 0], [0, 1]]
    group = groups.from_file(write(tmp_path, {"name": "turns", "lie": [flow]}))
    assert repr(group) == "<Group turns on 2 dimensions, generators: 1 continuous>"
    assert group.is_subgroup_of(groups.so(2)) and groups.so(2).is_subgroup_of(group)
    both = groups.from_file(write(tmp_path, {"lie": [flow], "matrices": [mirror]}))
    assert both.is_subgroup_of(groups.o(2)) and groups.o(2).is_subgroup_of(both)
    open_algebra = {"lie": [[[0, 1], [0, 0]], [[0, 0], [1, 0]]]}
    with pytest.raises(ValueError, match=r"bracket \[A0, A1\] is outside of the algebra"):
        groups.from_file(write(tmp_path, open_algebra))


@given(st.integers(0, 2**30 - 1), st.booleans())
@settings(max_examples=25, deadline=None)
def test_automorphisms_by_brute_force(bits: int, symmetric: bool) -> None:
    n = 5
    A = torch.tensor([bits >> k & 1 for k in range(n * n)]).reshape(n, n)
    A = A | A.T if symmetric else A
    permutations = itertools.permutations(range(n))
    count = sum(torch.equal(A[list(p)][:, list(p)], A) for p in permutations)
    group = groups.automorphisms(A)
    assert group.finite().order == count
    assert group.permutations is not None
    for p in group.permutations:
        assert torch.equal(A[p][:, p], A)


def test_automorphisms_of_known_graphs() -> None:
    cube = torch.tensor([[(a ^ b).bit_count() == 1 for a in range(8)] for b in range(8)])
    assert groups.automorphisms(cube).finite().order == 48
    pairs = list(itertools.combinations(range(5), 2))
    petersen = torch.tensor([[not set(a) & set(b) for a in pairs] for b in pairs])
    assert groups.automorphisms(petersen).finite().order == 120
    complete = groups.automorphisms(torch.ones(30, 30) - torch.eye(30))
    assert complete.is_symmetric and complete.permutations is not None
    assert len(complete.permutations) == 29
    assert groups.automorphisms(torch.zeros(100, 100)).is_symmetric
    with pytest.raises(ValueError, match="adjacency must be a matrix|adjacency matrix"):
        groups.automorphisms(torch.ones(2, 3))


def ring(n: int) -> torch.Tensor:
    step = torch.eye(n).roll(1, 0)
    return step + step.T


def test_automorphisms_of_graphs_with_hidden_parts() -> None:
    """Triangles and a hexagon, whose nodes have equal colours; a ring and a tree, relabelled."""
    parts = torch.block_diag(ring(3), ring(3), ring(6))
    tree = torch.zeros(15, 15)
    for child in range(1, 15):
        tree[child, (child - 1) // 2] = tree[(child - 1) // 2, child] = 2
    one_way = torch.block_diag(torch.eye(7).roll(1, 0), torch.eye(2))
    cases = [(parts, 6 * 6 * 2 * 12), (ring(200), 400), (tree, 2**7), (one_way, 7 * 2)]
    for A, order in cases:
        shuffle = torch.randperm(len(A), generator=torch.Generator().manual_seed(0))
        hidden = A[shuffle][:, shuffle]
        group = groups.automorphisms(hidden)
        assert group.finite().order == order
        assert group.permutations is not None
        assert all(torch.equal(hidden[p][:, p], hidden) for p in group.permutations)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Group.from_permutations("x", [[0, 1], [0, 1, 2]]), "permutations .m, n.*list"),
        (lambda: Group.from_matrices([[[0, 1], [1, 0]]]), "name of the group, got list"),  # type: ignore[arg-type]
        (lambda: Group.from_permutations(None, [[1, 0]]), "name of the group, got None"),  # type: ignore[arg-type]
        (lambda: Group.from_permutations("x", "abc"), "permutations .m, n.*str"),
        (lambda: Group.from_permutations("x", None), "NoneType"),
        (lambda: Group.from_matrices("x", [[[1, 1], [1]]]), "square matrices.*list"),
        (lambda: Group.from_matrices("x", "abc"), "square matrices.*str"),
        (lambda: Group.from_matrices("x", [[[1j]]]), r"complex numbers. Write a \+ bi as"),
        (lambda: Group.from_permutations("x", [1, 0]), r"one row each, got .* shape \[2\]"),
        (lambda: groups.FiniteGroup.from_table("x", [[0, 1], [1]]), "square table.*list"),
        (
            lambda: Group.from_permutations("x", [[1, 0, 2], [0, 2, 1]], "a"),
            "each of its 2",
        ),
        (lambda: groups.translations(4), "shape of a grid"),  # type: ignore[arg-type]
        (lambda: groups.automorphisms(torch.full((3, 3), math.nan)), "nan"),
        (lambda: groups.OnPositions(groups.so(3)), "OnVectors"),
        (lambda: groups.OnRegular(groups.cyclic(4), (6, 6)), "an action"),  # type: ignore[arg-type]
    ],
)
def test_invalid_groups_raise(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()
