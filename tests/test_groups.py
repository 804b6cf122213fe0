"""Groups: axioms, actions, Lie algebras, files and graphs, against brute force."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from symrazor import equivariance_error, groups
from symrazor.groups import FiniteGroup, Group, lie
from symrazor.groups.closure import permutation_matrix
from symrazor.groups.orbits import pair_orbits
from symrazor.testing import GroupSuite, assert_close

ORDERS = {
    "trivial": (groups.trivial(3), 1),
    "S4": (groups.symmetric(4), 24),
    "A5": (groups.alternating(5), 60),
    "translations": (groups.translations((3, 4, 2)), 24),
    "Z6": (groups.cyclic_permutations(6), 6),
    "Dih6": (groups.dihedral_permutations(6), 12),
    "C4": (groups.cyclic(4), 4),
    "C7": (groups.cyclic(7), 7),
    "D1": (groups.dihedral(1), 2),
    "D4": (groups.dihedral(4), 8),
    "D5": (groups.dihedral(5), 10),
    "reflections": (groups.reflections(3), 8),
    "O": (groups.octahedral(), 24),
    "Oh": (groups.octahedral(reflected=True), 48),
    "sum": (groups.cyclic(3) * groups.symmetric(3), 18),
    "sum of permutations": (groups.cyclic_permutations(3) * groups.symmetric(3), 18),
    "pairs": (groups.cyclic_permutations(2) @ groups.symmetric(3), 12),
}


@pytest.mark.parametrize("name", ORDERS)
class TestBuiltIn(GroupSuite):
    name = ""

    @pytest.fixture(autouse=True)
    def _choose(self, name: str) -> None:
        self.name = name

    def make(self) -> Group:
        return ORDERS[self.name][0]

    def test_order(self) -> None:
        assert self.make().finite().order == ORDERS[self.name][1]


@pytest.mark.parametrize("maker", [groups.se2, groups.affine2, groups.rotations, groups.scalings])
class TestContinuous(GroupSuite):
    @pytest.fixture(autouse=True)
    def _choose(self, maker: object) -> None:
        self.maker = maker

    def make(self) -> Group:
        made = self.maker()  # type: ignore[operator]
        assert isinstance(made, Group)
        return made


@given(st.lists(st.permutations(range(4)), min_size=1, max_size=3))
@settings(max_examples=20, deadline=None)
def test_closures_of_permutations_are_groups(generators: list[list[int]]) -> None:
    every = FiniteGroup.from_permutations("any", torch.tensor(generators))
    every.check()
    assert math.factorial(4) % every.order == 0  # Lagrange
    assert every.permutations is not None
    rows = {tuple(p) for p in every.permutations.tolist()}
    assert rows >= {tuple(p) for p in generators}
    products = {tuple(a[i] for i in b) for a, b in itertools.product(rows, rows)}
    assert products == rows
    matrices = torch.stack([permutation_matrix(torch.tensor(p)) for p in generators])
    twin = FiniteGroup.from_matrices("any", matrices)
    assert twin.order == every.order
    assert twin.is_subgroup_of(every) and every.is_subgroup_of(twin)


@given(st.lists(st.permutations(range(4)), min_size=1, max_size=2))
@settings(max_examples=20, deadline=None)
def test_orbits_of_pairs_by_brute_force(generators: list[list[int]]) -> None:
    rows = torch.tensor(generators)
    every = FiniteGroup.from_permutations("any", rows).permutations
    assert every is not None
    labels = pair_orbits(rows)
    for a, b in itertools.product(itertools.product(range(4), repeat=2), repeat=2):
        together = any((int(p[a[0]]), int(p[a[1]])) == b for p in every)
        assert bool(labels[a] == labels[b]) == together


def test_a_table_that_is_no_group_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"associative table in loop, got \(.*\)·.* != "):
        # a loop of order 5: identity and unique division, not associative
        table = [
            [0, 1, 2, 3, 4],
            [1, 0, 3, 4, 2],
            [2, 4, 0, 1, 3],
            [3, 2, 4, 0, 1],
            [4, 3, 1, 2, 0],
        ]
        FiniteGroup.from_table("loop", table)
    with pytest.raises(ValueError, match=r"expected a·b in bad, got 7"):
        FiniteGroup.from_table("bad", [[0, 7], [1, 0]], ["a", "b"])
    with pytest.raises(ValueError, match="inverse for every element of monoid, got none for 'z'"):
        FiniteGroup.from_table("monoid", [[0, 1], [1, 1]], ["e", "z"])
    with pytest.raises(ValueError, match="identity in left"):
        FiniteGroup.from_table("left", [[0, 0], [1, 1]])
    with pytest.raises(ValueError, match="square table"):
        FiniteGroup.from_table("flat", [0, 1])


def test_an_action_that_does_not_compose_is_refused_by_pair() -> None:
    z3 = groups.cyclic_permutations(3).finite()
    assert z3.permutations is not None
    wrong = z3.permutations.clone()
    wrong[2] = torch.tensor([1, 0, 2])
    broken = FiniteGroup("Z3", z3.table, z3.names, z3.generators, permutations=wrong)
    with pytest.raises(ValueError, match=r"for the pair t, t"):
        broken.check()


def test_generators_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match=r"permutation of 0 to 2 in row 1, got \[0, 0, 1\]"):
        Group.from_permutations("bad", [[0, 1, 2], [0, 0, 1]])
    with pytest.raises(ValueError, match="invertible matrix in row 0"):
        Group.from_matrices("bad", [[[1.0, 0.0], [1.0, 0.0]]])
    with pytest.raises(ValueError, match="at most 2000 elements in shears"):
        Group.from_matrices("shears", [[[1.0, 1.0], [0.0, 1.0]]]).finite()
    with pytest.raises(ValueError, match="continuous SO"):
        groups.so(3).finite()
    with pytest.raises(ValueError, match="of size 3 in odd, got {'matrices': 2}"):
        Group("odd", 3, matrices=torch.eye(2).double().unsqueeze(0))
    with pytest.raises(ValueError, match="whole number of at least 1"):
        groups.cyclic(0)


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
    every = d4.finite()
    halves = every.subgroup([every.table[1, 1].item()])  # r^2
    halves.check()
    assert halves.order == 2 and halves.is_subgroup_of(c4.finite())


def test_products_of_enumerated_groups() -> None:
    product = groups.symmetric(3).finite() * groups.cyclic_permutations(4).finite()
    product.check()
    assert product.order == 24 and product.space == 7
    mixed = groups.cyclic(3).finite() * groups.symmetric(3).finite()
    mixed.check()
    assert mixed.matrices is not None and mixed.matrices.shape == (18, 5, 5)


# Lie algebras


ALGEBRAS = {
    "affine2": lie.affine2(),
    "translation2": lie.translation2(),
    "rotation2": lie.rotation2(),
    "scale2": lie.scale2(),
    "se2": lie.se2(),
    "so2": lie.so2(),
    "so3": lie.so3(),
    "sl2": lie.sl2(),
}


@pytest.mark.parametrize("name", ALGEBRAS)
def test_algebras_are_closed(name: str) -> None:
    algebra = ALGEBRAS[name]
    algebra.check()
    f = algebra.structure_constants()
    A = algebra.generators
    for i, j in itertools.product(range(algebra.dim), repeat=2):
        combined = torch.einsum("l,lab->ab", f[i, j], A)
        assert float((A[i] @ A[j] - A[j] @ A[i] - combined).abs().max()) < 1e-12
    jacobi = torch.einsum("ijm,mkl->ijkl", f, f)
    cyclic = jacobi + jacobi.permute(2, 0, 1, 3) + jacobi.permute(1, 2, 0, 3)
    assert float(cyclic.abs().max()) < 1e-12


def test_exponentials_have_closed_forms() -> None:
    angle = torch.tensor([0.7], dtype=torch.float64)
    c, s = math.cos(0.7), math.sin(0.7)
    assert_close(lie.so2().exp(angle), torch.tensor([[c, -s], [s, c]]).double(), 1e-7)
    moved = lie.translation2().exp(torch.tensor([0.2, -0.3], dtype=torch.float64))
    assert_close(moved[:2, 2], torch.tensor([0.2, -0.3], dtype=torch.float64), 1e-12)
    scaled = lie.scale2().exp(torch.tensor([math.log(2.0)], dtype=torch.float64))
    assert_close(scaled.diagonal(), torch.tensor([2.0, 2.0, 1.0]).double(), 1e-12)
    area = lie.sl2().exp(torch.randn(5, 3, dtype=torch.float64))
    assert_close(torch.linalg.det(area), torch.ones(5).double(), 1e-10)


def test_exponentials_are_differentiable_and_batched() -> None:
    algebra = lie.affine2()
    c = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    assert algebra.exp(c).shape == (2, 3, 3, 3)
    assert torch.autograd.gradcheck(algebra.exp, c[0, :1].detach().requires_grad_())
    assert algebra.exp(c.float()).dtype == torch.float32


def test_what_is_not_an_algebra_is_refused_by_name() -> None:
    open_ones = lie.so3().masked(("x-rotation", "y-rotation"))
    with pytest.raises(ValueError, match=r"got \[x-rotation, y-rotation\] outside"):
        open_ones.check()
    with pytest.raises(ValueError, match="names among"):
        lie.so3().masked(("w",))
    with pytest.raises(ValueError, match="independent generators"):
        lie.LieAlgebra.of(torch.ones(2, 2, 2)).check()
    with pytest.raises(ValueError, match=r"expected generators \[k, d, d\]"):
        lie.LieAlgebra.of(torch.ones(2, 2, 3))
    with pytest.raises(ValueError, match="a name and a unit"):
        lie.LieAlgebra(("a",), (), torch.ones(1, 2, 2))


# Actions


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
    every, action = group.finite(), groups.OnGrid(group, shape)
    x = torch.randn(1, 1, *shape)
    images = [action.act(x, g) for g in every.elements]
    assert all(action.is_exact(g) for g in every.elements)
    for a, b in itertools.product(every.elements, repeat=2):
        assert torch.equal(action.act(images[b], a), images[int(every.table[a, b])])
    assert action.interpolation_error(x) == 0


def smooth(size: int) -> Tensor:
    axis = torch.linspace(-1, 1, size + 1, dtype=torch.float64)
    axis = (axis[1:] + axis[:-1]) / 2
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    return torch.exp(-4 * ((x - 0.2) ** 2 + 2 * y**2)).reshape(1, 1, size, size)


@pytest.mark.parametrize("group", [groups.cyclic(8), groups.dihedral(3), groups.rotations()])
def test_interpolation_error_falls_with_resolution(group: Group) -> None:
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
    one = lie.translation2().exp(torch.tensor([0.25, 0.0], dtype=torch.float64))  # a pixel of 8
    got = groups.OnGrid(groups.se2(), (8, 8)).act(x, one)
    assert_close(got[..., 1:], x[..., :-1], 1e-12)
    assert float(got[..., 0].abs().max()) < 1e-12


def test_permutations_of_positions_are_rolls() -> None:
    x = torch.randn(2, 3, 4, 5)
    group = groups.translations((4, 5))
    assert group.permutations is not None
    action = groups.OnPositions(group, (4, 5))
    assert torch.equal(action.act(x, group.permutations[0]), torch.roll(x, 1, 2))
    assert torch.equal(action.act(x, group.permutations[1]), torch.roll(x, 1, 3))


def test_regular_channels_compose_with_their_grids() -> None:
    group = groups.dihedral(4)
    every = group.finite()
    action = groups.OnRegular(group, groups.OnGrid(group, (3, 3)))
    x = torch.randn(1, 2, 8, 3, 3)
    for a, b in itertools.product(every.elements, repeat=2):
        twice = action.act(action.act(x, b), a)
        assert torch.equal(twice, action.act(x, int(every.table[a, b])))
    assert torch.equal(action.act(x, every.identity), x)


def test_vectors() -> None:
    group = groups.so(3)
    x = torch.randn(4, 3, dtype=torch.float64)
    for g in group.sample(3):
        moved = groups.OnVectors(group).act(x, g)
        assert_close(moved, torch.einsum("ij,nj->ni", g, x), 1e-12)
        assert_close(moved.norm(dim=1), x.norm(dim=1), 1e-12)


def test_wrong_data_is_refused() -> None:
    x = torch.zeros(1, 1, 4, 4)
    with pytest.raises(ValueError, match=r"expected data \[n, c, 5, 5\], got \[1, 1, 4, 4\]"):
        groups.OnGrid(groups.cyclic(4), (5, 5)).act(x, 1)
    with pytest.raises(ValueError, match="group of permutations, got C4"):
        groups.OnPositions(groups.cyclic(4))
    with pytest.raises(ValueError, match="16 positions"):
        groups.OnPositions(groups.symmetric(16), (4, 5))
    with pytest.raises(ValueError, match="element 0 to 3, got 4"):
        groups.OnGrid(groups.cyclic(4), (4, 4)).act(x, 4)
    with pytest.raises(ValueError, match="that S3 of size 3 acts on"):
        groups.action_on(groups.symmetric(3), x.shape)
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
    pair = groups.OnGrid(group, (6, 6)), groups.Unmoved(group)
    assert equivariance_error(lambda x: x.sum((2, 3)), x, pair) < 1e-14


# Files and graphs


def write(folder: Path, document: object) -> Path:
    file = folder / "group.json"
    file.write_text(document if isinstance(document, str) else json.dumps(document))
    return file


def test_a_group_from_a_file(tmp_path: Path) -> None:
    found = groups.from_file(write(tmp_path, {"name": "square", "permutations": [[1, 2, 3, 0]]}))
    assert (found.name, found.finite().order) == ("square", 4)
    found = groups.from_file(write(tmp_path, {"matrices": [[[-1, 0], [0, 1.0]]]}))
    assert (found.name, found.finite().order) == ("group", 2)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("{", "expected JSON"),
        ("[" * 100_000, "expected JSON"),
        ([1], 'either "permutations" or "matrices"'),
        ({"permutations": [[0]], "matrices": [[[1]]]}, "either"),
        ({"permutations": [[0]], "run": "x"}, r"got \['run'\] too"),
        ({"permutations": []}, "list of permutations"),
        ({"permutations": [[0, 1], [0]]}, "2 numbers in row 1 of permutations"),
        ({"permutations": [[0, 1], [0, 0.5]]}, "numbers in row 1 of permutations, got 0.5"),
        ({"permutations": [[0, 1], [1, 1]]}, "permutation of 0 to 1 in row 1"),
        ({"permutations": [[True, 0]]}, "numbers in row 0 of permutations, got True"),
        ({"matrices": [[[1, 0], [0, 1]], [[1, 2]]]}, "2 x 2 numbers in row 1 of matrices"),
        ({"matrices": [[[1, 0], [0, "x"]]]}, "numbers in row 0 of matrices, got 'x'"),
        ('{"matrices": [[[NaN]]]}', "numbers in row 0 of matrices, got nan"),
        ({"matrices": [[[0]]]}, "invertible matrix in row 0"),
        ({"name": 3, "permutations": [[0]]}, "a name of 1 to 200"),
        ({"permutations": [[0] * 5000]}, "1 to 4096 entries"),
        (" " * (1 << 20) + "{}", "at most 1,048,576 bytes"),
    ],
)
def test_a_bad_file_is_refused_by_row(tmp_path: Path, document: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        groups.from_file(write(tmp_path, document))


@given(st.integers(0, 2**30 - 1), st.booleans())
@settings(max_examples=25, deadline=None)
def test_automorphisms_by_brute_force(bits: int, symmetric: bool) -> None:
    n = 5
    A = torch.tensor([bits >> k & 1 for k in range(n * n)]).reshape(n, n)
    A = A | A.T if symmetric else A
    every = itertools.permutations(range(n))
    count = sum(torch.equal(A[list(p)][:, list(p)], A) for p in every)
    found = groups.automorphisms(A)
    assert found.finite().order == count
    assert found.permutations is not None
    for p in found.permutations:
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
    with pytest.raises(ValueError, match="adjacency matrix"):
        groups.automorphisms(torch.ones(2, 3))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Group.from_permutations("x", [[0, 1], [0, 1, 2]]), "permutations .m, n.*list"),
        (lambda: Group.from_permutations("x", "abc"), "permutations .m, n.*str"),
        (lambda: Group.from_permutations("x", None), "NoneType"),
        (lambda: Group.from_matrices("x", [[[1, 1], [1]]]), "square matrices.*list"),
        (lambda: Group.from_matrices("x", "abc"), "square matrices.*str"),
        (lambda: Group.from_permutations("x", [[1, 0, 2], [0, 2, 1]], "a"), "letter for each of 2"),
        (lambda: groups.translations(4), "shape of a grid"),  # type: ignore[arg-type]
        (lambda: groups.automorphisms(torch.full((3, 3), math.nan)), "nan"),
        (lambda: groups.OnPositions(groups.so(3)), "OnVectors"),
        (lambda: groups.OnRegular(groups.cyclic(4), (6, 6)), "an action"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_group_is_said_kindly(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()


def test_elements_that_do_not_fit_are_refused() -> None:
    on_sets, x = groups.OnPositions(groups.symmetric(4)), torch.randn(2, 3, 4)
    for wrong in (torch.randperm(3), torch.zeros(4, dtype=torch.long), torch.tensor([1, 2, 3, 4])):
        with pytest.raises(ValueError, match="permutation of 0 to 3 for S4"):
            on_sets.act(x, wrong)
    with pytest.raises(ValueError, match="3 x 3 matrix"):
        groups.OnVectors(groups.so(3)).act(torch.randn(2, 3), torch.eye(4))
    with pytest.raises(ValueError, match=r"floating-point.*x.float"):
        groups.OnGrid(groups.cyclic(8), (4, 4)).act(torch.ones(1, 1, 4, 4).long(), 1)


def test_groups_of_the_grid_by_name() -> None:
    torch.manual_seed(0)
    conv, x = torch.nn.Conv2d(2, 2, 3, padding=1), torch.randn(3, 2, 5, 5)
    for name, group in (("p4", groups.cyclic(4)), ("p4m", groups.dihedral(4))):
        assert equivariance_error(conv, x, name) == equivariance_error(conv, x, group)
    assert equivariance_error(conv, x, "translation") == equivariance_error(conv, x)
    with pytest.raises(ValueError, match="p5"):
        equivariance_error(conv, x, "p5")
