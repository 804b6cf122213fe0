"""Functions of the state: products in closed form against reverse mode, and Kepler's flows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from symrazor.dynamics.hamiltonian import Hamiltonian, HamiltonianNetwork, SymmetrisedNetwork
from symrazor.dynamics.measures import FlowTimes
from symrazor.dynamics.observables import (
    AnyFunctions,
    Combination,
    Functions,
    Products,
    inverse_distance,
)
from symrazor.dynamics.proposals import (
    Proposals,
    canonical_rows,
    integer_rows,
    most_conserved,
    round_quantities,
)
from symrazor.dynamics.systems import kepler
from symrazor.dynamics.trajectories import simulate
from symrazor.experiments.noether_controls import KEPLER_KNOWN, KEPLER_TERMS, compare_spans

VARIABLES = ("q1", "q2", "p1", "p2", "1/r")


def _one_by_one(terms: list[str]) -> AnyFunctions:
    """The same products, each as a function of its own."""

    def product(term: str):  # type: ignore[no-untyped-def]
        places = [VARIABLES.index(name) for name in term.split()]

        def function(x: torch.Tensor) -> torch.Tensor:
            further = x[..., :2].norm(dim=-1, keepdim=True).reciprocal()
            return torch.cat([x, further], -1)[..., places].prod(-1)

        return function

    return AnyFunctions([product(term) for term in terms])


@given(st.lists(st.lists(st.sampled_from(VARIABLES), min_size=1, max_size=4), min_size=1))
@settings(max_examples=25, deadline=None)
def test_products_have_the_values_and_slopes_of_their_factors(parts: list[list[str]]) -> None:
    terms = [" ".join(part) for part in parts]
    ours, theirs = Products(4, terms, {"1/r": inverse_distance}), _one_by_one(terms)
    g = torch.Generator().manual_seed(len(terms))
    x = 0.5 + torch.rand(2, 3, 4, generator=g, dtype=torch.float64)
    weights = torch.randn(2, 3, len(terms), generator=g, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours.gradient(x, weights), theirs.gradient(x, weights))
    torch.testing.assert_close(ours.gradients(x[0]), theirs.gradients(x[0]))


def test_products_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must be a product of q1, p1; unknown: \['r'\]"):
        Products(2, ["q1 r"])
    with pytest.raises(ValueError, match="list of terms is empty"):
        Products(2, [])
    with pytest.raises(ValueError, match="list of functions is empty"):
        AnyFunctions([])


def test_training_sees_the_same_flows_either_way() -> None:
    """Gradients of a rolled-out field in the weights: three derivatives of the functions deep."""
    g = torch.Generator().manual_seed(0)
    x = simulate(kepler(), 4, 1, 0.1, seed=0).states[:, 0]
    network = HamiltonianNetwork(4, width=5, activation="softplus", generator=g).double()
    rows = torch.tensor([[one.get(name, 0.0) for name in KEPLER_TERMS] for one in KEPLER_KNOWN])
    tau = torch.rand(1, 3, 4, generator=g, dtype=torch.float64)
    found = []
    kinds: list[Functions] = [
        Products(4, KEPLER_TERMS, {"1/r": inverse_distance}),
        _one_by_one(list(KEPLER_TERMS)),
    ]
    for functions in kinds:
        C = Combination(functions, 4, scale=0.5, steps=2).with_coefficients(0.3 * rows).double()
        energy = Hamiltonian(network.mean(), C.flows(tau))
        middle = x[None] + 0.1 * energy.field(x[None])
        network.zero_grad()
        energy.field(middle).square().sum().backward()
        found.append([p.grad.clone() for p in network.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1]) > 3
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_runge_lenz_vector_is_proposed_with_exact_coefficients() -> None:
    """From the true dynamics and from noisy ones; energy has halves."""
    system = kepler()
    data = simulate(system, 60, 10, 0.2, seed=3).states.flatten(0, 1)
    functions = Products(4, KEPLER_TERMS, {"1/r": inverse_distance})
    noise = torch.randn(data.shape, generator=torch.Generator().manual_seed(0)).double()
    for size in (0.0, 0.02):
        rates, rows = most_conserved(functions.gradients(data), system.field(data) + size * noise)
        assert float(rates[4] / rates[3].clamp_min(1e-12)) > 3
        free = Combination(functions, 4).with_coefficients(rows[:4])
        model = SymmetrisedNetwork(HamiltonianNetwork(4, width=4), free, FlowTimes(4, "ball"))
        whole = round_quantities(model)
        assert whole is not None and isinstance(whole.conserved, Combination)
        inside = compare_spans(whole.conserved, KEPLER_TERMS, KEPLER_KNOWN)["parallelness"]
        assert min(inside) == pytest.approx(1.0, abs=1e-6)


def test_flows_of_what_kepler_conserves_conserve_its_energy() -> None:
    system = kepler()
    x = simulate(system, 20, 5, 0.2, seed=3).states.flatten(0, 1)
    functions = Products(4, KEPLER_TERMS, {"1/r": inverse_distance})
    network = HamiltonianNetwork(4, width=4).double()
    offered = Combination(functions, 6, scale=2.0, steps=4).double()
    model = SymmetrisedNetwork(network, offered, FlowTimes(6, "ball", "antithetic"))
    proposals = Proposals(model, SymmetrisedNetwork(network), x)
    proposals.rows = most_conserved(functions.gradients(x), system.field(x))[1]
    made = proposals.model_with(4)
    assert made.conserved is not None and made.times is not None
    tau = made.times(1, 16, torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        moved, _ = made.conserved.flows(tau).transport(x[None])
    assert float((moved - x).norm(dim=-1).square().mean().sqrt()) > 0.3
    change = (system.energy(moved) - system.energy(x)).abs()
    assert float(change.flatten().quantile(0.99)) < 2e-3


def test_halves_are_found_only_where_they_are_allowed() -> None:
    rows = torch.tensor([[0.48, 1.0, 0.0], [0.02, 0.0, 1.0]], dtype=torch.float64)
    assert integer_rows(rows) is None
    found = integer_rows(rows, (1, 2))
    assert found is not None
    torch.testing.assert_close(found[0], torch.tensor([0.5, 1.0, 0.0], dtype=torch.float64))


@given(st.integers(0, 10_000), st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_the_canonical_rows_depend_on_the_span_alone(seed: int, m: int) -> None:
    g = torch.Generator().manual_seed(seed)
    rows = torch.randint(-1, 2, (m, 6), generator=g).double()
    mix = torch.randn(m, m, generator=g, dtype=torch.float64) + 3 * torch.eye(m)
    ours, theirs = canonical_rows(rows), canonical_rows(mix.double() @ rows)
    assert len(ours) == int(torch.linalg.matrix_rank(rows))
    torch.testing.assert_close(ours, theirs)
