"""The group that whole quantities generate: kinds of flows, their lengths, what is left out."""

import math
from dataclasses import replace

import pytest
import torch

from symrazor.dynamics import analysis
from symrazor.dynamics.algebra import (
    Algebra,
    euclidean,
    generators,
    nbody_invariants,
    rotations,
    unitary,
)
from symrazor.dynamics.config import TrainConfig
from symrazor.dynamics.conserved import Quadratic
from symrazor.dynamics.group import GroupOrbits, classify_flow, full_group, period
from symrazor.dynamics.hamiltonian import HamiltonianNetwork, SymmetrisedNetwork
from symrazor.dynamics.measures import FlowTimes, Measure
from symrazor.dynamics.proposals import round_quadratic
from symrazor.dynamics.systems import nbody
from symrazor.dynamics.trained import mean_squared_error
from symrazor.dynamics.training import train
from symrazor.dynamics.trajectories import simulate, transitions
from symrazor.experiments import noether, noether_n_oscillators


def _rounded(algebra: Algebra, measure: Measure = "ball") -> SymmetrisedNetwork:
    """The span of an algebra by other quantities than its own, rounded."""
    m, d = len(algebra), algebra.A.shape[-1]
    mix = torch.randn(m, m, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    A, b = torch.einsum("km,mij->kij", mix, algebra.A), mix @ algebra.b
    model = SymmetrisedNetwork(
        HamiltonianNetwork(d, width=4), Quadratic.fixed(A, b), FlowTimes(m, measure, "antithetic")
    )
    found = round_quadratic(model)
    assert found is not None
    return found


def _algebra(*A: list[list[float]], b: list[list[float]] | None = None) -> Algebra:
    A_all = torch.tensor(A, dtype=torch.float64)
    b_all = torch.zeros(A_all.shape[:2]) if b is None else torch.tensor(b)
    return Algebra(tuple("C" * len(A)), A_all, b_all.double())


def test_flows_are_known_by_their_matrices() -> None:
    energy, free = [[1.0, 0.0], [0.0, 1.0]], [[0.0, 0.0], [0.0, 1.0]]
    saddle, none = [[1.0, 0.0], [0.0, -1.0]], [[0.0, 0.0], [0.0, 0.0]]
    b = [[0.0, 0.0]] * 3 + [[0.0, 1.0], [3.0, 0.0]]  # the last: a turn around another point
    made = _algebra(energy, free, saddle, none, energy, b=b).generators()
    assert [classify_flow(g) for g in made] == [
        "rotation",
        "shear",
        None,
        "translation",
        "rotation",
    ]
    fall = _algebra(free, b=[[1.0, 0.0]]).generators()[0]  # p^2 / 2 + q: a uniform force
    assert classify_flow(fall) == "shear"
    # two equal oscillators and an exchange of energy that is not diagonalisable
    growing = torch.tensor([[0.0, 1, 1, 0], [-1, 0, 0, 1], [0, 0, 0, 1], [0, 0, -1, 0]]).double()
    assert classify_flow(torch.cat([growing, torch.zeros(4, 1)], dim=1)) is None


@pytest.mark.parametrize(
    ("rates", "turns"), [((1, 1), 1.0), ((2, 1), 1.0), ((3, 2), 1.0), ((2, 2), 0.5)]
)
def test_period_brings_every_state_back(rates: tuple[int, int], turns: float) -> None:
    A = torch.diag(torch.tensor([*rates, *rates], dtype=torch.float64))
    square = torch.nn.functional.pad(generators(A[None], torch.zeros(1, 4))[0], (0, 0, 0, 1))
    T = period(square)
    assert T == pytest.approx(2 * math.pi * turns)
    back = torch.linalg.matrix_exp(T * square)
    torch.testing.assert_close(back, torch.eye(5, dtype=torch.float64), rtol=0, atol=1e-9)
    assert period(square * math.pi) == pytest.approx(T / math.pi)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_group_of_oscillators_is_the_oracles(n: int) -> None:
    known = unitary(n)
    found = full_group(_rounded(known), torch.randn(50, 2 * n))
    assert found is not None
    made, times = found
    assert made.count == made.flow_count == times.dimension == n * n
    assert times.measure == ("ball" if n > 1 else "cube")
    given = Quadratic.fixed(known.A, known.b).generators()
    for g in made.generators():  # one of the oracle's, with the same length, up to the sign
        distance = torch.minimum((given - g).flatten(1).norm(dim=1), (given + g).flatten(1).norm(1))
        assert float(distance.min()) < 1e-5
    assert not any(p.requires_grad for p in made.parameters())


@pytest.mark.parametrize("n", [1, 2, 3])
def test_who_is_told_the_group_averages_as_who_found_it(n: int) -> None:
    """The same quantities in the same order, so the same training to the last bit."""
    setting = noether_n_oscillators.setting(noether.Options(small=True), seed=0, n=n)
    told = noether.build(setting, "oracle", seed=0)
    found = full_group(_rounded(unitary(n)), setting.data.x)
    assert found is not None and told.conserved is not None and told.times is not None
    ours, theirs = found[0].state_dict(), told.conserved.state_dict()
    assert set(ours) == set(theirs)
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=0)
    assert vars(found[1]) == vars(told.times)


@pytest.mark.parametrize("bodies", [2, 3])
def test_products_of_momenta_add_nothing_to_translations(bodies: int) -> None:
    known = nbody_invariants(bodies, 2)
    x = nbody(bodies, 2).start(500, torch.Generator().manual_seed(0))
    found = full_group(_rounded(known), 3 * x)
    assert found is not None
    made, times = found
    assert (made.count, made.flow_count, times.dimension) == (7, 4, 4)
    report = analysis.describe(made, known)
    assert report["span"] == report["dimension"] == 7
    assert min(report["recovered"]) > 1 - 1e-6
    # the shifts of all bodies: as far as their coordinates are spread, three times that of x
    kinds = [classify_flow(g) for g in generators(made.A_basis, made.b_basis)]
    assert kinds[:4] == ["rotation", "rotation", "translation", "translation"]
    far = made.flows(torch.eye(4)[None]).shift[0, 2:].norm(dim=1)
    spread = x[:, : 2 * bodies].var(dim=0, correction=0).reshape(bodies, 2).sum(0).sqrt()
    expected = (3 * spread).to(far)
    torch.testing.assert_close(far.sort().values, expected.sort().values, rtol=1e-4, atol=0)


@pytest.mark.parametrize("measure", ["ball", "cube"])
def test_no_flow_of_a_group_is_cut_short(measure: Measure) -> None:
    x = nbody(3, 2).start(500, torch.Generator().manual_seed(0))
    found = full_group(_rounded(nbody_invariants(3, 2), measure), x)
    assert found is not None
    made, times = found
    flows = made.flows(times(1, 200, torch.Generator().manual_seed(1)))
    assert flows.capped is not None and int(flows.capped) == 0
    longest = made.flows(torch.ones(1, 1, 4) if measure == "cube" else torch.eye(4)[None])
    assert longest.capped is not None and int(longest.capped) == 0


def test_no_group_where_none_is_generated() -> None:
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    turns = rotations(3)
    two = replace(turns, names=turns.names[:2], A=turns.A[:2], b=turns.b[:2])
    assert full_group(_rounded(turns), x) is not None
    assert full_group(_rounded(two), x) is None  # two rotations do not close
    saddle = _algebra([[1.0, 0.0], [0.0, -1.0]])
    assert full_group(_rounded(saddle), x[:, :2]) is None
    network = HamiltonianNetwork(6, width=4)
    assert full_group(SymmetrisedNetwork(network), x) is None
    assert full_group(SymmetrisedNetwork(network, turns.quadratic()), x) is None  # not rounded


@pytest.mark.slow
def test_learned_oscillators_predict_as_the_oracle_does() -> None:
    options = noether.Options(small=True, device="cpu")
    setting = noether_n_oscillators.setting(options, seed=0, n=2)
    config = TrainConfig(steps=500, batch_size=100, draws=2, flows=8, noise=1e-3, burn_in=0.4)
    learned, oracle = (noether.run_model(setting, model, config) for model in ("learned", "oracle"))
    assert learned["span"] == 4 and min(learned["recovered"]) > 0.9999
    assert learned["trials"][-1]["group"] == 1
    # the group was taken: the same network from the same seed as that which is told, and no better
    for key in ("test_mse", "neg_elbo_per_datum"):
        assert learned[key] == pytest.approx(oracle[key], rel=1e-6)


@pytest.mark.slow
def test_the_group_of_two_bodies_predicts_no_worse_than_the_given_one() -> None:
    """Beside SE(2) it turns the centre of mass on its own, and the data allow that."""
    system = nbody(2, 2)
    data = transitions(simulate(system, 30, 20, 0.5, seed=10_000), 1e-3, seed=30_000)
    test = transitions(simulate(system.with_normal_start(1.0, 0.2), 20, 20, 0.5, seed=20_000))
    config = TrainConfig(steps=300, batch_size=100, draws=2, flows=8, lr=1e-2, noise=1e-3)
    group = full_group(_rounded(nbody_invariants(2, 2)), data.x)
    assert group is not None
    errors = []
    for flows in (group, (euclidean(2, 2).quadratic(), FlowTimes(3, "ball"))):
        g = torch.Generator().manual_seed(0)
        network = HamiltonianNetwork(8, width=32, activation="elu", generator=g)
        trained = train(SymmetrisedNetwork(network, *flows), data, config)
        errors.append(mean_squared_error(trained, test))
    assert errors[0] < 1.1 * errors[1]


def test_the_group_is_fixed_under_a_move() -> None:
    """The average over one turn is the same at every state of its orbit."""
    found = full_group(_rounded(unitary(1)), torch.randn(50, 2))
    assert found is not None
    made, times = found
    assert isinstance(made, GroupOrbits)
    g = torch.Generator().manual_seed(0)
    network = HamiltonianNetwork(2, width=8, generator=g)
    H = SymmetrisedNetwork(network, made, times).mean(64, torch.Generator().manual_seed(1))
    angle = torch.linspace(0, 2 * math.pi, 9)
    circle = torch.stack([angle.cos(), angle.sin()], dim=1)[None]
    values = H.value(circle)
    torch.testing.assert_close(values, values[:, :1].expand_as(values), rtol=1e-5, atol=1e-5)
