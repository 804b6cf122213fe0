"""Groups from files and from graphs, and invalid input."""

import json
import math
from pathlib import Path

import pytest
import torch

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
