"""Networks that are invariant under groups of matrices."""

import math

import pytest
import torch

import symrazor as sr
from symrazor.groups import Group, LieAlgebra
from symrazor.groups.lie import so3
from symrazor.layers.matrix_invariants import MAX_ORBIT, MatrixInvariant, invariant_forms


def quarter_turns() -> Group:
    return Group.from_matrices("C4", torch.tensor([[[0.0, -1.0], [1.0, 0.0]]]).double())


def two_vectors() -> Group:
    """Rotations of two vectors in space together."""
    generators = torch.stack([torch.block_diag(a, a) for a in so3().generators])
    return Group.from_matrices("SO3", lie=LieAlgebra(("x", "y", "z"), ("radians",) * 3, generators))


def lorentz() -> Group:
    boost = torch.zeros(1, 3, 3, dtype=torch.float64)
    boost[0, 0, 1] = boost[0, 1, 0] = 1.0
    return Group.from_matrices("boost", lie=LieAlgebra(("boost",), ("rapidity",), boost))


def test_forms_of_two_vectors_are_their_inner_products() -> None:
    linear, quadratic = invariant_forms(two_vectors())
    assert linear.shape == (0, 6) and quadratic.shape == (3, 6, 6)
    v = torch.randn(5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    a, b = v[:, :3], v[:, 3:]
    products = torch.stack([(a * a).sum(1), (b * b).sum(1), (a * b).sum(1)], 1)
    forms = torch.einsum("ni,qij,nj->nq", v, quadratic, v)
    fitted = forms @ torch.linalg.lstsq(forms, products).solution
    torch.testing.assert_close(fitted, products)


def test_products_of_linear_forms_are_left_out() -> None:
    """A boost of (t, x) leaves y and t^2 - x^2 unchanged; y^2 adds nothing."""
    linear, quadratic = invariant_forms(lorentz())
    torch.testing.assert_close(linear.abs(), torch.tensor([[0.0, 0.0, 1.0]]).double())
    expected = torch.diag(torch.tensor([1.0, -1.0, 0.0]).double()) / math.sqrt(2)
    torch.testing.assert_close(quadratic[0] * quadratic[0, 0, 0].sign(), expected)
    assert len(quadratic) == 1


@pytest.mark.parametrize("make", [quarter_turns, two_vectors, lorentz])
def test_the_network_is_invariant_unless_it_is_free(make: object) -> None:
    group = make()  # type: ignore[operator]
    torch.manual_seed(0)
    x = torch.randn(40, group.size)
    for free in (False, True):
        network = MatrixInvariant(group, 2, free).requires_grad_(False)
        f = network(x)
        for g in group.sample(3):
            change = float((network(x @ g.float().T) - f).abs().max() / f.std())
            assert (change > 1e-2) == free
            assert free or change < 1e-4


def test_orbits_tell_apart_what_forms_of_degree_two_cannot() -> None:
    """x y (x^2 - y^2) is invariant under quarter turns and has degree 4."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 2, generator=generator)
    y = (x[:, 0] * x[:, 1] * (x[:, 0].square() - x[:, 1].square()) > 0).long()
    torch.manual_seed(0)
    fit = sr.fit(MatrixInvariant(quarter_turns(), 2), (x, y), epochs=40, lr=0.02, progress=False)
    assert (fit.model(x).argmax(1) == y).float().mean() > 0.9


def test_a_group_without_invariants_is_an_error() -> None:
    grow = LieAlgebra(("scale",), ("log",), torch.eye(2).double().unsqueeze(0))
    with pytest.raises(ValueError, match="has no invariant linear or quadratic form"):
        MatrixInvariant(Group.from_matrices("scaling", lie=grow), 1)


def test_a_large_finite_group_uses_forms() -> None:
    angle = 2 * math.pi / (MAX_ORBIT + 1)
    c, s = math.cos(angle), math.sin(angle)
    group = Group.from_matrices("C65", torch.tensor([[[c, -s], [s, c]]], dtype=torch.double))
    assert MatrixInvariant(group, 1).features.count == 1  # the length
