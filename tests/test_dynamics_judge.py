"""Proposals of conserved quantities, and the evidence as their judge."""

import copy

import pytest
import torch

from symrazor.dynamics import analysis, judge, systems
from symrazor.dynamics.algebra import all_nbody, generators, unitary
from symrazor.dynamics.config import TrainConfig
from symrazor.dynamics.conserved import Quadratic
from symrazor.dynamics.hamiltonian import HamiltonianNetwork
from symrazor.dynamics.judge import jumps, proposal, train_and_judge
from symrazor.dynamics.measures import FlowTimes
from symrazor.dynamics.nbody import nbody
from symrazor.dynamics.prune import refitted
from symrazor.dynamics.simple import WithinSpan
from symrazor.dynamics.start import nearly_conserved
from symrazor.dynamics.symmetrised import SymmetrisedNetwork
from symrazor.dynamics.train import train
from symrazor.dynamics.trajectories import simulate, transitions


def _offer(phase: int, count: int, width: int = 8) -> SymmetrisedNetwork:
    g = torch.Generator().manual_seed(0)
    network = HamiltonianNetwork(phase, width=width, activation="elu", generator=g)
    return SymmetrisedNetwork(
        network, Quadratic(phase, count, generator=g), FlowTimes(count, "ball", "antithetic")
    )


def test_jumps_are_ordered_by_their_ratio() -> None:
    rates = torch.tensor([1e-4, 1e-4, 2e-3, 2e-3, 1e-1, 1.0])
    assert jumps(rates, most=5, count=3) == [4, 2, 5]
    assert jumps(rates, most=3, count=1) == [2]
    assert jumps(rates, most=1) == [1]


def test_a_proposal_from_noisy_dynamics_is_the_exact_algebra() -> None:
    """Rates of the true field with 3 % of noise: seven come first, and are rounded exactly."""
    system = nbody(3, 2)
    g = torch.Generator().manual_seed(0)
    x = system.start(2000, g)
    field = system.field(x)
    field = field + 0.03 * field.std() * torch.randn(field.shape, generator=g, dtype=field.dtype)
    found = nearly_conserved(field, x)
    assert jumps(found[0], 10)[0] == 7
    model = _offer(12, 10)
    made = proposal(model, found, 7, x)
    assert isinstance(made.conserved, WithinSpan) and made.times is not None
    assert not any(p.requires_grad for p in made.conserved.parameters())
    known = all_nbody(3, 2)
    spectrum = analysis.spectrum(made.conserved)
    assert spectrum.dimension == 7
    inside = analysis.parallelness(generators(made.conserved.A, made.conserved.b), known)
    torch.testing.assert_close(inside, torch.ones_like(inside), rtol=0, atol=1e-6)
    slopes = torch.einsum("kij,mj->mki", made.conserved.A.double(), x) + made.conserved.b.double()
    speed = slopes.square().sum((1, 2)).mean().sqrt() * made.times.variance**0.5
    reach = torch.pi * float(speed / x.square().sum(-1).mean().sqrt())
    assert reach == pytest.approx(judge.LENGTH, rel=0.05)
    with pytest.raises(ValueError, match="expected a model with quadratic quantities"):
        proposal(SymmetrisedNetwork(model.network), found, 7, x)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_evidence_takes_a_symmetry_and_refuses_what_is_none() -> None:
    config = TrainConfig(steps=300, draws=2, flows=8, batch_size=100, burn_in=0.5, noise=1e-3)
    for system, count in (
        (systems.oscillators(), 1),
        (systems.pendulum().started_normal(1.5, 1.0), 0),
    ):
        data = transitions(simulate(system, 30, 10, 0.3, seed=1), 1e-3, seed=2)
        offered = _offer(2, 3, width=16)
        before = copy.deepcopy(offered.state_dict())
        trained = train_and_judge(offered, data, config)
        for name, value in offered.state_dict().items():  # the given model is left alone
            torch.testing.assert_close(value, before[name])
        assert [t["quantities"] for t in trained.trials][0] == 0
        assert len(trained.trials) == 1 + judge.PROPOSALS
        conserved = trained.model.conserved
        assert (0 if conserved is None else conserved.count) == count
        if isinstance(conserved, Quadratic):
            inside = analysis.parallelness(generators(conserved.A, conserved.b), unitary(1))
            assert float(inside.min()) > 0.999


def test_judge_reports_every_stage_and_a_proposal_that_overflows_loses() -> None:
    data = transitions(simulate(systems.oscillators(), 7, 4, 0.2, seed=1), 1e-3)
    config = TrainConfig(steps=10, draws=2, flows=4, record=5, burn_in=0.4)
    shares: list[float] = []
    trained = train_and_judge(_offer(2, 2), data, config, lambda r: shares.append(r["share"]))
    assert shares == sorted(shares) and shares[-1] == pytest.approx(1.0)
    assert trained.history[-1]["step"] == 4 + 3 * 3 + 10
    assert trained.trials[0] == {
        "quantities": 0,
        "rounded": 0.0,
        "cost": pytest.approx(trained.trials[0]["cost"]),
    }


def test_refit_keeps_the_quantities_and_returns_the_better_bound() -> None:
    data = transitions(simulate(systems.oscillators(), 7, 4, 0.2, seed=1), 1e-3)
    config = TrainConfig(steps=4, draws=2, flows=4, record=2)
    g = torch.Generator().manual_seed(0)
    oracle = unitary(1).quadratic()
    model = SymmetrisedNetwork(HamiltonianNetwork(2, width=8, generator=g), oracle)
    short = train(model, data, config)
    bound = short.bound["neg_elbo"]
    fresh = HamiltonianNetwork(2, width=8, generator=torch.Generator().manual_seed(0))
    again = refitted(short, fresh, data, config.change(steps=40))
    assert again.bound["neg_elbo"] < bound and again.history[-1]["step"] == 44
    assert isinstance(again.model.conserved, Quadratic)
    torch.testing.assert_close(again.model.conserved.A, oracle.A)
    worse = refitted(again, copy.deepcopy(fresh), data, config.change(steps=1, lr=1e-6, seed=9))
    assert worse is again or worse.bound["neg_elbo"] <= again.bound["neg_elbo"]
