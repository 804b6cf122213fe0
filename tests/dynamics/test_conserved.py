"""Networks, flows and averages, against automatic differentiation and exact flows."""

import math
from typing import get_args

import pytest
import torch
from dynamics_case import is_symplectic, poisson_bracket
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from symrazor.dynamics.algebra import Algebra, rotations, unitary
from symrazor.dynamics.analysis import parallelness
from symrazor.dynamics.conserved import ConservedQuantities, Quadratic, cap_norm
from symrazor.dynamics.hamiltonian import (
    ACTIVATIONS,
    Activation,
    Draws,
    Energy,
    FlowTimes,
    Hamiltonian,
    HamiltonianNetwork,
    Measure,
    SymmetrisedNetwork,
)
from symrazor.dynamics.mechanics import gradient
from symrazor.dynamics.observables import Combination, Network, Observable, Polynomial
from symrazor.groups.lie import exponential


def _energy(activation: Activation = "softplus", draws: int = 2, phase: int = 4) -> Energy:
    g = torch.Generator().manual_seed(0)
    network = HamiltonianNetwork(phase, width=7, activation=activation, generator=g).double()
    return network.draw(draws, g)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_energy_gradient_matches_autograd(activation: Activation) -> None:
    energy = _energy(activation)
    x = torch.randn(2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(energy.gradient(x), gradient(energy, x))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 7), st.floats(0.01, 16.0), st.integers(0, 10_000))
def test_exponential_matches_torch(size: int, norm: float, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    M = torch.randn(3, size, size, dtype=torch.float64, generator=g)
    M = M * norm / M.square().sum((1, 2), keepdim=True).sqrt()
    truth = torch.linalg.matrix_exp(M)
    error = (exponential(M, 16.0) - truth).abs().amax((1, 2)) / truth.abs().amax((1, 2))
    assert error.max() < 1e-10


def test_long_flows_are_capped_and_counted() -> None:
    M = torch.stack([torch.eye(2), 100 * torch.eye(2)]).double()
    capped, over = cap_norm(M, 8.0)
    assert over.tolist() == [False, True]
    torch.testing.assert_close(capped[1].norm().item(), 8.0)
    wild = Quadratic(2, 1)
    with torch.no_grad():
        wild.A_raw.copy_(torch.diag(torch.tensor([1e6, -1e6]))[None])
    flows = wild.flows(torch.ones(1, 3, 1))
    assert int(flows.capped) == 3  # type: ignore[arg-type]
    assert torch.isfinite(flows.transport(torch.ones(1, 1, 2))[0]).all()


def test_quadratic_flow_is_symplectic_and_conserves_its_quantity() -> None:
    g = torch.Generator().manual_seed(2)
    C = Quadratic(4, 3, std=0.4, generator=g).double()
    tau = torch.rand(2, 5, 3, generator=g)
    flows = C.flows(tau)
    assert is_symplectic(flows.linear, 1e-10)
    x = torch.randn(2, 6, 4, dtype=torch.float64, generator=g)
    moved, _ = flows.transport(x)
    before = (C(x)[:, None] * tau[:, :, None]).sum(-1)
    after = (C(moved) * tau[:, :, None]).sum(-1)
    torch.testing.assert_close(after, before.expand_as(after), rtol=1e-9, atol=1e-9)


def test_commutators_add_the_missing_rotation() -> None:
    """Check that angular momenta about x and y generate the one about z."""
    known = rotations(3)
    quantities = Quadratic(6, 2, commutators=True)
    with torch.no_grad():
        quantities.A_raw.copy_(known.A[:2])
        quantities.b.zero_()
    assert quantities.flow_count == 3
    third = quantities.flow_generators().detach()[2, :6, :7].double()[None]
    assert float(parallelness(third, known)) == pytest.approx(1.0)
    assert float(parallelness(third, Algebra(known.names[:2], known.A[:2], known.b[:2]))) < 1e-6
    flows = quantities.double().flows(torch.tensor([[[0.1, 0.2, 0.3]]]))
    assert is_symplectic(flows.linear, 1e-10)


def _observables() -> list[Observable]:
    g = torch.Generator().manual_seed(4)
    return [
        Polynomial(4, 2, degree=3, std=0.02, steps=16, generator=g).double(),
        Network(4, 2, width=5, steps=16, generator=g).double(),
        Combination(
            [lambda x: x[..., 0].cos() * x[..., 3], lambda x: x.square().sum(-1)],
            2,
            steps=16,
            generator=g,
        ).double(),
    ]


@pytest.mark.parametrize("C", _observables(), ids=lambda c: type(c).__name__)
def test_observable_gradient_matches_autograd_and_flow_conserves_it(C: Observable) -> None:
    g = torch.Generator().manual_seed(5)
    x = torch.randn(3, 4, dtype=torch.float64, generator=g)
    tau = torch.rand(3, 2, generator=g, dtype=torch.float64)
    expected = gradient(lambda x: (C(x) * tau).sum(-1), x)
    torch.testing.assert_close(C.gradient(x, tau).detach(), expected)
    times = torch.rand(1, 2, 2, generator=g, dtype=torch.float64)
    moved, _ = C.flows(times).transport(x[None])
    before = (C(x)[None, None] * times[:, :, None]).sum(-1)
    after = (C(moved) * times[:, :, None]).sum(-1)
    torch.testing.assert_close(after, before.expand_as(after), rtol=1e-4, atol=1e-5)


def test_integrated_flow_of_a_quadratic_matches_matrix_exponential() -> None:
    A = torch.tensor([[1.0, 0.3], [0.3, -0.5]], dtype=torch.float64)
    exact = Quadratic.fixed(A[None]).double()
    solved = Combination([lambda x: 0.5 * ((x @ A) * x).sum(-1)], steps=64).double()
    with torch.no_grad():
        solved.coefficients.fill_(1.0)
    tau = torch.tensor([[[0.7], [-0.4]]])
    x = torch.randn(1, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    energy = _energy(draws=1, phase=2)
    for a, b in (
        (exact.flows(tau).transport(x)[0], solved.flows(tau).transport(x)[0]),
        (
            Hamiltonian(energy, exact.flows(tau)).gradient(x),
            Hamiltonian(energy, solved.flows(tau)).gradient(x),
        ),
    ):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("C", [Quadratic(4, 2, std=0.3).double(), *_observables()[:2]])
def test_symmetrised_gradient_matches_autograd_of_the_average(C: ConservedQuantities) -> None:
    g = torch.Generator().manual_seed(6)
    H = Hamiltonian(_energy(), C.flows(torch.rand(2, 3, 2, generator=g)))
    x = torch.randn(2, 5, 4, dtype=torch.float64, generator=g)
    torch.testing.assert_close(H.gradient(x).detach(), gradient(H.value, x), rtol=1e-8, atol=1e-9)


def test_average_over_rotations_conserves_their_generator() -> None:
    """Check Noether's theorem for an average over a full turn, up to rounding errors."""
    C = unitary(1).quadratic().double()
    tau = FlowTimes(1, "cube", "quasi")(1, 64, torch.Generator().manual_seed(0))
    H = Hamiltonian(_energy(draws=1, phase=2), C.flows(tau.double()))
    x = torch.randn(6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def value(x: Tensor) -> Tensor:
        return H.value(x[None])[0]

    def quantity(x: Tensor) -> Tensor:
        return C(x)[..., 0]

    assert poisson_bracket(quantity, value, x).abs().max() < 1e-6
    plain = _energy(draws=1, phase=2)
    assert poisson_bracket(quantity, lambda x: plain(x[None])[0], x).abs().max() > 1e-2


@pytest.mark.parametrize("measure", get_args(Measure))
@pytest.mark.parametrize("draws", ["independent", "antithetic", "quasi"])
@pytest.mark.parametrize("K", [1, 3])
def test_measures_have_expected_moments(measure: Measure, draws: Draws, K: int) -> None:
    tau = FlowTimes(K, measure, draws)(20, 1024, torch.Generator().manual_seed(0)).double()
    variance = {
        "cube": 1 / 3,
        "ball": 1 / (K + 2),
        "1-ball": 2 / ((K + 1) * (K + 2)),
        "one-hot": 1 / (3 * K),
        "gaussian": 1 / 3,
    }[measure]
    assert tau.mean((0, 1)).abs().max() < 0.02
    torch.testing.assert_close(
        tau.square().mean((0, 1)), torch.full((K,), variance).double(), rtol=0.04, atol=0
    )
    if measure in ("ball", "1-ball"):
        assert (tau.norm(p=2 if measure == "ball" else 1, dim=-1) <= 1 + 1e-6).all()
    if measure == "one-hot":
        assert ((tau != 0).sum(-1) <= 1).all()
    if draws == "antithetic":
        torch.testing.assert_close(tau[:, ::2], -tau[:, 1::2])


def test_quasi_monte_carlo_reduces_integration_error() -> None:
    def spread(draws: Draws) -> float:
        tau = FlowTimes(1, "cube", draws)(200, 16, torch.Generator().manual_seed(0))
        return float((math.pi * tau).cos().square().mean((1, 2)).std())

    assert spread("quasi") < 1e-5 < spread("antithetic")


def test_invalid_arguments_raise() -> None:
    with pytest.raises(ValueError, match="measure must be 'cube', .*, got 'sphere'"):
        FlowTimes(1, "sphere")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs count >= 1 and std > 0"):
        Quadratic(2, 1, std=0.0)
    with pytest.raises(ValueError, match="have 1 flows, but the flow times have dimension 2"):
        SymmetrisedNetwork(HamiltonianNetwork(2), Quadratic(2, 1), FlowTimes(2))
