"""Groups: axioms, closures, subgroups and Lie algebras, against brute force."""

import pytest
import torch
from work import Work

from symrazor import groups
from symrazor.groups import FiniteGroup, Group
from symrazor.groups.generators import permutation_matrix
from symrazor.testing import GroupSuite

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


# Lie algebras
