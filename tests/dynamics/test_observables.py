"""Functions of the state and their flows, against autograd and the Kepler problem."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from symrazor.dynamics.hamiltonian import (
    FlowTimes,
    Hamiltonian,
    HamiltonianNetwork,
    SymmetrisedNetwork,
)
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


def _separate_functions(terms: list[str]) -> AnyFunctions:
    """Return the same products as separate functions."""

    def product(term: str):  # type: ignore[no-untyped-def]
        places = [VARIABLES.index(name) for name in term.split()]

        def function(x: torch.Tensor) -> torch.Tensor:
            further = x[..., :2].norm(dim=-1, keepdim=True).reciprocal()
            return torch.cat([x, further], -1)[..., places].prod(-1)

        return function

    return AnyFunctions([product(term) for term in terms])


@given(st.lists(st.lists(st.sampled_from(VARIABLES), min_size=1, max_size=4), min_size=1))
@settings(max_examples=25, deadline=None)
def test_products_match_autograd(parts: list[list[str]]) -> None:
    terms = [" ".join(part) for part in parts]
    products, any_functions = (
        Products(4, terms, {"1/r": inverse_distance}),
        _separate_functions(terms),
    )
    g = torch.Generator().manual_seed(len(terms))
    x = 0.5 + torch.rand(2, 3, 4, generator=g, dtype=torch.float64)
    weights = torch.randn(2, 3, len(terms), generator=g, dtype=torch.float64)
    torch.testing.assert_close(products(x), any_functions(x))
    torch.testing.assert_close(products.gradient(x, weights), any_functions.gradient(x, weights))
    torch.testing.assert_close(products.gradients(x[0]), any_functions.gradients(x[0]))


def test_invalid_products_raise() -> None:
    with pytest.raises(ValueError, match=r"must be a product of q1, p1; unknown: \['r'\]"):
        Products(2, ["q1 r"])
    with pytest.raises(ValueError, match="list of terms is empty"):
        Products(2, [])
    with pytest.raises(ValueError, match="list of functions is empty"):
        AnyFunctions([])


def test_training_gradients_agree_between_products_and_any_functions() -> None:
    """Gradients of a predicted field in the weights need third derivatives of the functions."""
    g = torch.Generator().manual_seed(0)
    x = simulate(kepler(), 4, 1, 0.1, seed=0).states[:, 0]
    network = HamiltonianNetwork(4, width=5, activation="softplus", generator=g).double()
    rows = torch.tensor([[terms.get(name, 0.0) for name in KEPLER_TERMS] for terms in KEPLER_KNOWN])
    tau = torch.rand(1, 3, 4, generator=g, dtype=torch.float64)
    gradients = []
    kinds: list[Functions] = [
        Products(4, KEPLER_TERMS, {"1/r": inverse_distance}),
        _separate_functions(list(KEPLER_TERMS)),
    ]
    for functions in kinds:
        C = Combination(functions, 4, scale=0.5, steps=2).with_coefficients(0.3 * rows).double()
        energy = Hamiltonian(network.mean(), C.flows(tau))
        middle = x[None] + 0.1 * energy.field(x[None])
        network.zero_grad()
        energy.field(middle).square().sum().backward()
        gradients.append([p.grad.clone() for p in network.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 3
    for products, any_functions in zip(*gradients, strict=True):
        torch.testing.assert_close(products, any_functions)


def test_runge_lenz_vector_is_proposed_with_exact_coefficients() -> None:
    """Use exact and noisy dynamics; the energy has half-integer coefficients."""
    system = kepler()
    data = simulate(system, 60, 10, 0.2, seed=3).states.flatten(0, 1)
    functions = Products(4, KEPLER_TERMS, {"1/r": inverse_distance})
    noise = torch.randn(data.shape, generator=torch.Generator().manual_seed(0)).double()
    for size in (0.0, 0.02):
        rates, rows = most_conserved(functions.gradients(data), system.field(data) + size * noise)
        assert float(rates[4] / rates[3].clamp_min(1e-12)) > 3
        free = Combination(functions, 4).with_coefficients(rows[:4])
        model = SymmetrisedNetwork(HamiltonianNetwork(4, width=4), free, FlowTimes(4, "ball"))
        rounded = round_quantities(model)
        assert rounded is not None and isinstance(rounded.conserved, Combination)
        inside = compare_spans(rounded.conserved, KEPLER_TERMS, KEPLER_KNOWN)["parallelness"]
        assert min(inside) == pytest.approx(1.0, abs=1e-6)


def test_flows_of_kepler_invariants_conserve_the_energy() -> None:
    system = kepler()
    x = simulate(system, 20, 5, 0.2, seed=3).states.flatten(0, 1)
    functions = Products(4, KEPLER_TERMS, {"1/r": inverse_distance})
    network = HamiltonianNetwork(4, width=4).double()
    template = Combination(functions, 6, scale=2.0, steps=4).double()
    model = SymmetrisedNetwork(network, template, FlowTimes(6, "ball", "antithetic"))
    proposals = Proposals(model, SymmetrisedNetwork(network), x)
    proposals.rows = most_conserved(functions.gradients(x), system.field(x))[1]
    proposed = proposals.model_with(4)
    assert proposed.conserved is not None and proposed.times is not None
    tau = proposed.times(1, 16, torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        moved, _ = proposed.conserved.flows(tau).transport(x[None])
    assert float((moved - x).norm(dim=-1).square().mean().sqrt()) > 0.3
    change = (system.energy(moved) - system.energy(x)).abs()
    assert float(change.flatten().quantile(0.99)) < 2e-3


def test_half_integers_only_with_denominator_two() -> None:
    rows = torch.tensor([[0.48, 1.0, 0.0], [0.02, 0.0, 1.0]], dtype=torch.float64)
    assert integer_rows(rows) is None
    halves = integer_rows(rows, (1, 2))
    assert halves is not None
    torch.testing.assert_close(halves[0], torch.tensor([0.5, 1.0, 0.0], dtype=torch.float64))


@given(st.integers(0, 10_000), st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_canonical_rows_depend_on_the_span_only(seed: int, m: int) -> None:
    g = torch.Generator().manual_seed(seed)
    rows = torch.randint(-1, 2, (m, 6), generator=g).double()
    mix = torch.randn(m, m, generator=g, dtype=torch.float64) + 3 * torch.eye(m)
    canonical, canonical_mixed = canonical_rows(rows), canonical_rows(mix.double() @ rows)
    assert len(canonical) == int(torch.linalg.matrix_rank(rows))
    torch.testing.assert_close(canonical, canonical_mixed)
