"""Groups: axioms, closures, subgroups and Lie algebras, against brute force."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from work import Work

from symrazor import groups
from symrazor.groups import FiniteGroup, Group, lie
from symrazor.groups.generators import pair_orbits, permutation_matrix
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


def test_an_action_that_does_not_compose_raises_and_names_the_pair() -> None:
    z3 = groups.cyclic_permutations(3).finite()
    assert z3.permutations is not None
    wrong = z3.permutations.clone()
    wrong[2] = torch.tensor([1, 0, 2])
    broken = FiniteGroup("Z3", z3.table, z3.names, z3.generators, permutations=wrong)
    with pytest.raises(ValueError, match=r"for the pair t, t"):
        broken.check()


def test_generators_as_lists_of_arrays_or_tensors() -> None:
    swap, cycle = torch.tensor([1, 0, 2]), torch.tensor([1, 2, 0])
    assert Group.from_permutations("S3", [swap, cycle]).finite().order == 6
    matrices = [permutation_matrix(swap), permutation_matrix(cycle)]
    assert Group.from_matrices("S3", matrices).finite().order == 6
    assert Group.from_matrices("S3", [m.numpy() for m in matrices]).finite().order == 6
    with pytest.raises(ValueError, match="Pass square matrices"):
        Group.from_matrices("none", [torch.eye(2), torch.eye(3)])


def test_products_with_other_types_raise() -> None:
    for product in (lambda: groups.cyclic(4) * 3, lambda: groups.cyclic(4) @ "C4"):
        with pytest.raises(TypeError, match="unsupported operand"):
            product()
    with pytest.raises(ValueError, match="dims must be a positive integer, got 2.0"):
        groups.reflections(2.0)  # type: ignore[arg-type]
    assert groups.reflections(5).finite().order == 32


def test_invalid_generators_raise() -> None:
    with pytest.raises(ValueError, match=r"Row 1 is not a permutation of 0 to 2: \[0, 0, 1\]"):
        Group.from_permutations("bad", [[0, 1, 2], [0, 0, 1]])
    with pytest.raises(ValueError, match="Matrix 0 is not invertible"):
        Group.from_matrices("bad", [[[1.0, 0.0], [1.0, 0.0]]])
    with pytest.raises(ValueError, match="shears has more than 2000 elements"):
        Group.from_matrices("shears", [[[1.0, 1.0], [0.0, 1.0]]]).finite()
    with pytest.raises(ValueError, match=r"SO.* is continuous"):
        groups.so(3).finite()
    with pytest.raises(ValueError, match="odd must have size 3, got {'matrices': 2}"):
        Group("odd", 3, matrices=torch.eye(2).double().unsqueeze(0))
    with pytest.raises(ValueError, match="must be a positive integer"):
        groups.cyclic(0)


@pytest.mark.parametrize("matrix", [[[2.0]], [[0.5]], [[2.0, 1.0], [1.0, 1.0]], [[2, 0], [0, 0.5]]])
def test_groups_of_infinite_order_are_supported(matrix: list[list[float]]) -> None:
    group = Group.from_matrices("powers", [matrix])
    group.check()
    with pytest.raises(ValueError, match="generators of powers must have finite order"):
        group.finite()


def test_large_groups_are_checked_with_little_work() -> None:
    """Checking all triples of the 720 elements would take 373 million comparisons."""
    s6 = groups.symmetric(6).finite()
    with Work() as work:
        s6.check()
    assert work.numbers < 720**3 / 10
    table = s6.table.clone()
    table[[40, 41]] = table[[41, 40]]
    with pytest.raises(ValueError, match=r"S6 is not associative: \("):
        FiniteGroup("S6", table, s6.names, s6.generators).check()
    part = FiniteGroup("S6", s6.table, s6.names, s6.generators[:1], s6.permutations)
    assert part._sufficient_elements() == s6.elements  # one generator does not reach all


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


def test_invalid_algebras_raise_and_name_the_generators() -> None:
    open_ones = lie.so3().masked(("x-rotation", "y-rotation"))
    with pytest.raises(ValueError, match=r"bracket \[x-rotation, y-rotation\] is outside"):
        open_ones.check()
    with pytest.raises(ValueError, match="Unknown generators"):
        lie.so3().masked(("w",))
    with pytest.raises(ValueError, match="linearly dependent"):
        lie.LieAlgebra.of(torch.ones(2, 2, 2)).check()
    with pytest.raises(ValueError, match=r"real matrices \[k, d, d\]"):
        lie.LieAlgebra.of(torch.ones(2, 2, 3))
    with pytest.raises(ValueError, match="needs a name and a unit"):
        lie.LieAlgebra(("a",), (), torch.ones(1, 2, 2))
