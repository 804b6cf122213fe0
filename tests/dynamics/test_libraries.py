"""Values, gradients and names of function libraries, against automatic differentiation."""

import pytest
import torch

from symrazor.dynamics.libraries import libraries_for, polynomials
from symrazor.dynamics.library import Custom

GENERATOR = torch.Generator().manual_seed(0)


@pytest.mark.parametrize("d", [2, 3, 4, 6])
def test_gradients_of_all_functions(d: int) -> None:
    x = 0.5 + torch.rand(7, d, generator=GENERATOR, dtype=torch.float64)
    libraries = libraries_for(x, [f"x{i}" for i in range(d)], {"own": lambda x: x[:, 0].tanh()})
    assert {"quartic functions", "quadratic functions and logarithms"} <= {
        library.title for library in libraries
    }
    for library in libraries:
        states = x.clone().requires_grad_()
        values = library(states)
        assert values.shape == (7, len(library)) and len(library.names) == len(library)
        gradients = library.gradients(x)
        coefficients = torch.randn(len(library), 3, generator=GENERATOR, dtype=torch.float64)
        expected = torch.einsum("nmd,mj->njd", gradients, coefficients)
        torch.testing.assert_close(library.combined_gradients(x, coefficients), expected)
        own = library.names.index("own")
        for k in range(0, len(library), max(1, len(library) // 9)):
            if k != own:
                (slope,) = torch.autograd.grad(values[:, k].sum(), states, retain_graph=True)
                torch.testing.assert_close(gradients[:, k], slope)


@pytest.mark.parametrize("d", [2, 4, 6])
def test_functions_that_depend_on_a_coordinate(d: int) -> None:
    """No other function has a derivative; the user's functions may depend on everything."""
    x = 0.5 + torch.rand(9, d, generator=GENERATOR, dtype=torch.float64)
    for library in libraries_for(x, [f"x{i}" for i in range(d)], {"own": lambda x: x[:, 0].tanh()}):
        changes = (library.gradients(x) != 0).any(0)
        changes[library.names.index("own")] = True
        for i in range(d):
            assert library.depending_on(i) == changes[:, i].nonzero()[:, 0].tolist()


def test_custom_function_has_its_gradient() -> None:
    x = torch.rand(5, 2, generator=GENERATOR, dtype=torch.float64)
    own = Custom("f", lambda x: x[:, 0].sin() * x[:, 1])
    slope = own.slope(x)
    torch.testing.assert_close(own.value(x), x[:, 0].sin() * x[:, 1])
    torch.testing.assert_close(slope, torch.stack([x[:, 0].cos() * x[:, 1], x[:, 0].sin()], 1))


def test_custom_function_with_a_wrong_shape_is_named() -> None:
    with pytest.raises(ValueError, match=r"Function 'f' must return one number per state"):
        Custom("f", lambda x: x).value(torch.rand(5, 2))


def test_number_of_monomials() -> None:
    assert [len(polynomials(3, degree)) for degree in (1, 2, 3, 4)] == [3, 9, 19, 34]


def test_names_of_products() -> None:
    x = torch.rand(9, 2, generator=GENERATOR, dtype=torch.float64)
    names = libraries_for(x, ["q", "p"])[1].names
    assert names == ["q", "p", "q^2", "q p", "p^2"]


def test_functions_that_do_not_suit_the_data_are_left_out() -> None:
    x = torch.linspace(-100, 100, 40, dtype=torch.float64)[:, None].repeat(1, 2)
    titles = " ".join(library.title for library in libraries_for(x, ["q", "p"]))
    assert "logarithms" not in titles and "sines" not in titles and "exponentials" not in titles
