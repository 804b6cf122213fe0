"""Test bases of functions against their definition."""

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacfwd, jacrev

from symrazor.layers import Basis
from symrazor.layers.basis import (
    INTERPOLATION_NOISE,
    Form,
    evaluate_basis,
    grid_positions,
    spread_anchors,
)
from symrazor.testing import assert_close


@pytest.mark.parametrize("form", ["sum", "interpolate"])
def test_basis_by_its_definition(form: Form) -> None:
    basis = Basis((3, 5), 6, omega=0.7, form=form).double()
    z, t = spread_anchors(6, (3, 5)), grid_positions((3, 5))
    K = torch.tensor(
        [[torch.exp(-0.49 * sum((a - b) ** 2)) for b in t] for a in z], dtype=torch.float64
    )
    among = torch.tensor(
        [[torch.exp(-0.49 * sum((a - b) ** 2)) for b in z] for a in z], dtype=torch.float64
    )
    noisy = among + 1e-4 * torch.eye(6, dtype=torch.float64)
    expected = K if form == "sum" else torch.linalg.inv(noisy) @ K
    assert_close(basis.matrix(), expected, 1e-5)  # the anchors are rounded to float32
    exact = evaluate_basis(z, (3, 5), torch.tensor(0.7, dtype=torch.float64), form)
    assert_close(exact, expected, 1e-10)


def test_derivatives_of_an_interpolating_basis() -> None:
    """First and second derivatives, in every mode, agree with those of an explicit inverse."""
    torch.manual_seed(0)
    z = spread_anchors(9, (5, 4))

    def solved(omega: Tensor, moved: Tensor) -> Tensor:
        return evaluate_basis(z + moved, (5, 4), omega, "interpolate").square().sum()

    def inverted(omega: Tensor, moved: Tensor) -> Tensor:
        at = z + moved
        among, across = (
            torch.exp(-(omega**2) * (at[:, None] - to).square().sum(-1))
            for to in (at, grid_positions((5, 4)))
        )
        inverse: Tensor = torch.linalg.inv(
            among + INTERPOLATION_NOISE**2 * torch.eye(9, dtype=z.dtype)
        )
        return (inverse @ across).square().sum()

    at = torch.tensor(0.7, dtype=torch.float64), 0.1 * torch.randn(9, 2, dtype=torch.float64)
    modes = {
        "reverse": grad,
        "forward": jacfwd,
        "forward over reverse": lambda f, i: jacfwd(grad(f, i), 1 - i),
        "reverse over forward": lambda f, i: jacrev(jacfwd(f, i), 1 - i),
        "forward over forward": lambda f, i: jacfwd(jacfwd(f, i), i),
    }
    for mode, derivative in modes.items():
        for i in (0, 1):
            expected = derivative(inverted, i)(*at)
            assert float(expected.abs().max()) > 1e-2, mode
            assert_close(derivative(solved, i)(*at), expected, 1e-9)


def test_an_interpolating_basis_passes_through_its_values() -> None:
    phi = Basis((4, 4), 16, form="interpolate").matrix()
    assert_close(phi, torch.eye(16), 1e-3)


@pytest.mark.parametrize(("count", "shape"), [(1, (3, 3)), (4, (3, 3)), (7, (9,)), (40, (4, 5, 6))])
def test_anchors_are_spread_evenly(count: int, shape: tuple[int, ...]) -> None:
    z = spread_anchors(count, shape)
    assert z.shape == (count, len(shape))
    for d, size in enumerate(shape):
        assert float(z[:, d].abs().max()) <= (size - 1) / 2
    if count > 1:
        assert float(torch.pdist(z).min()) > 0.2
