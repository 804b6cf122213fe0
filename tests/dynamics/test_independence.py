"""Functions of known quantities, and relations among coordinates."""

import pytest
import torch
from torch import Tensor

from symrazor.dynamics.findings import Quantity
from symrazor.dynamics.independence import is_independent
from symrazor.dynamics.invariants import find_conserved
from symrazor.dynamics.libraries import polynomials
from symrazor.dynamics.library import Library
from symrazor.dynamics.mechanics import solve
from symrazor.dynamics.trajectories import Trajectories

CUBIC = Library("cubic functions", ["a", "b", "c"], [], polynomials(3, 3))


def quantity(x: Tensor, error: float = 0.0, **terms: float) -> Quantity:
    """Return a combination of monomials, whose coefficients are off by `error`."""
    coefficients = torch.zeros(len(CUBIC), dtype=torch.float64)
    for name, value in terms.items():
        coefficients[CUBIC.names.index(name.replace("2", "^2").replace("3", "^3"))] = value
    generator = torch.Generator().manual_seed(1)
    errors = torch.full_like(coefficients, error)
    noise = error * torch.randn(len(CUBIC), generator=generator, dtype=torch.float64)
    spread = CUBIC(x).std(0)
    return Quantity(CUBIC, coefficients + noise, errors, 0.5, 0.0, 0.0, 0.0, spread)


def states() -> Tensor:
    return torch.randn(500, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("error", [0.0, 1e-4, 3e-3])
def test_a_power_of_a_known_quantity_is_not_new(error: float) -> None:
    """Near its zero the gradient of the cube vanishes, and errors decide its direction."""
    x = states()
    known = [quantity(x, error, a=1.0)]
    assert not is_independent(quantity(x, error, a3=1.0), known, x, exact=True)
    assert not is_independent(quantity(x, error, a2=1.0), known, x, exact=True)


@pytest.mark.parametrize("error", [0.0, 1e-4, 3e-3])
def test_a_new_quantity_is_independent_although_it_depends_on_known_ones_too(
    error: float,
) -> None:
    x = states()
    known = [quantity(x, error, a=1.0)]
    assert is_independent(quantity(x, error, a3=1.0, b=0.5), known, x, exact=True)
    assert is_independent(quantity(x, error, b2=1.0), known, x, exact=True)


def top(x: Tensor) -> Tensor:
    """Angular momentum M and vertical direction g of a symmetric top, in its own frame."""
    M, g = x.chunk(2, -1)
    spin = M / torch.tensor([1.0, 1.0, 0.7], dtype=x.dtype)
    weight = torch.tensor([0.0, 0.0, 0.8], dtype=x.dtype).expand_as(g)
    cross = torch.linalg.cross
    return torch.cat([cross(M, spin) + cross(g, weight), cross(g, spin)], -1)


def top_states(count: int) -> Tensor:
    z = torch.randn(2, count, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    start = torch.cat([z[0], z[1] / z[1].norm(dim=1, keepdim=True)], 1)
    return solve(top, start, 0.25 * torch.arange(40, dtype=torch.float64))


def test_quantities_of_a_top_by_derivation() -> None:
    """Four functions have independent gradients; |g| is one of them, and the same in all data."""
    states = top_states(4)
    x = states[:, ::13].reshape(-1, 6).requires_grad_()
    M, g = x.chunk(2, 1)
    inertia = torch.tensor([1.0, 1.0, 0.7], dtype=torch.float64)
    energy = 0.5 * (M.square() / inertia).sum(1) + 0.8 * g[:, 2]
    functions = [energy, M[:, 2], (M * g).sum(1), g.square().sum(1)]
    gradients = torch.stack(
        [torch.autograd.grad(f.sum(), x, retain_graph=True)[0] for f in functions], 1
    )
    field = top(x.detach())
    torch.testing.assert_close(
        torch.einsum("nkd,nd->nk", gradients, field), torch.zeros(len(x), 4).double()
    )
    assert int(torch.linalg.matrix_rank(gradients).median()) == 4
    assert float((states[..., 3:].square().sum(-1) - 1).abs().max()) < 1e-8


@pytest.mark.parametrize("noise", [1e-3, 0.02])
def test_a_function_with_the_same_value_everywhere_is_a_relation(noise: float) -> None:
    data = Trajectories.of(top_states(60), 0.25 * torch.arange(40.0))
    findings = find_conserved(data.with_noise(noise**2, seed=1))
    assert len(findings.quantities) == 3
    (relation,) = findings.relations
    assert relation.terms == 3 and not relation.varies
    assert {"x4^2", "x5^2", "x6^2"} <= set(relation.formula.replace("+", " ").split())


def test_a_function_of_nearly_parallel_quantities_is_not_new() -> None:
    """The direction in which the known gradients differ is small, and nevertheless known."""
    x = states()
    known = [quantity(x, a=1.0), quantity(x, a=1.0, b=0.01)]
    assert not is_independent(quantity(x, b=1.0), known, x, exact=True)
    assert is_independent(quantity(x, c=1.0), known, x, exact=True)


def test_noise_that_is_too_large_for_a_library_leaves_the_answer_open() -> None:
    """The energy holds cos(a - b), and the noise of the angles is about one radian."""

    def rotors(x: Tensor) -> Tensor:
        a, b, u, v = x.unbind(-1)
        force = 1.3 * (a - b).sin()
        return torch.stack([u, v, -force, force], -1)

    scale = torch.tensor([1.5, 1.5, 0.8, 0.8], dtype=torch.float64)
    start = scale * torch.randn(
        50, 4, generator=torch.Generator().manual_seed(7), dtype=torch.float64
    )
    states = solve(rotors, start, 0.25 * torch.arange(40, dtype=torch.float64))
    noise = torch.randn(
        states.shape, generator=torch.Generator().manual_seed(8), dtype=torch.float64
    )
    noisy = states + 0.1 * states.flatten(0, 1).std(0) * noise
    findings = find_conserved(Trajectories.of(noisy, 0.25 * torch.arange(40.0)))
    (momentum,) = findings.quantities
    assert momentum.terms == 2 and momentum.library.title == "linear functions"
    assert not findings.is_decided
