"""Proposals of conserved quantities, and the evidence as their judge."""

import copy
import math
from collections.abc import Callable

import pytest
import torch

from symrazor.dynamics import analysis, proposals, systems
from symrazor.dynamics import selection as judge
from symrazor.dynamics.algebra import energies, generators, nbody_invariants, unitary
from symrazor.dynamics.config import TrainConfig
from symrazor.dynamics.conserved import FixedSpan, FreeSpan, Quadratic
from symrazor.dynamics.hamiltonian import HamiltonianNetwork, SymmetrisedNetwork
from symrazor.dynamics.measures import FlowTimes
from symrazor.dynamics.observables import Combination
from symrazor.dynamics.proposals import (
    RELATIVE_FLOW_LENGTH,
    Proposals,
    coefficient_cost,
    largest_gaps,
    round_quantities,
)
from symrazor.dynamics.selection import Trial, train_and_select
from symrazor.dynamics.systems import nbody
from symrazor.dynamics.trajectories import simulate, transitions


def _offer(phase: int, count: int, width: int = 8) -> SymmetrisedNetwork:
    g = torch.Generator().manual_seed(0)
    network = HamiltonianNetwork(phase, width=width, activation="elu", generator=g)
    return SymmetrisedNetwork(
        network, Quadratic(phase, count, generator=g), FlowTimes(count, "ball", "antithetic")
    )


def test_jumps_are_ordered_by_their_ratio() -> None:
    rates = torch.tensor([1e-4, 1e-4, 2e-3, 2e-3, 1e-1, 1.0])
    assert largest_gaps(rates, max_count=5, number=3) == [4, 2, 5]
    assert largest_gaps(rates, max_count=3, number=1) == [2]
    assert largest_gaps(rates, max_count=1, number=2) == [1]


def test_a_proposal_from_noisy_dynamics_is_the_exact_algebra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rates of the true field with 3 % of noise: seven come first, and are rounded exactly."""
    system = nbody(3, 2)
    g = torch.Generator().manual_seed(0)
    x = system.start(2000, g)
    field = system.field(x)
    field = field + 0.03 * field.std() * torch.randn(field.shape, generator=g, dtype=field.dtype)
    model = _offer(12, 10)
    monkeypatch.setattr(proposals, "mean_weight_field", lambda judge, x: (x, field))
    found = Proposals(model, SymmetrisedNetwork(model.network), x)
    assert found.best_counts(1) == [7]
    assert found.next_count(0, {0}) == found.next_count(6, {0, 6, 8}) == 7
    assert (
        found.next_count(0, {0, 7}) is None and found.next_count(7, {0, 7}) is None
    )  # no such rise
    free = found.model_with(7)
    assert isinstance(free.conserved, FreeSpan) and free.conserved.coefficients.requires_grad
    assert coefficient_cost(free.conserved, 100) == pytest.approx(
        0.5 * 7 * (90 - 7) * math.log(100)
    )
    made = round_quantities(free)
    assert made is not None and isinstance(made.conserved, FixedSpan) and made.times is not None
    assert not any(p.requires_grad for p in made.conserved.parameters())
    assert coefficient_cost(made.conserved, 100) == 0
    known = nbody_invariants(3, 2)
    spectrum = analysis.spectrum(made.conserved)
    assert spectrum.dimension == 7
    inside = analysis.parallelness(generators(made.conserved.A, made.conserved.b), known)
    torch.testing.assert_close(inside, torch.ones_like(inside), rtol=0, atol=1e-6)
    slopes = torch.einsum("kij,mj->mki", made.conserved.A.double(), x) + made.conserved.b.double()
    speed = slopes.square().sum((1, 2)).mean().sqrt() * made.times.variance**0.5
    reach = torch.pi * float(speed / x.square().sum(-1).mean().sqrt())
    assert reach == pytest.approx(RELATIVE_FLOW_LENGTH, rel=0.05)
    with pytest.raises(ValueError, match="must have Quadratic or Combination quantities"):
        Proposals(SymmetrisedNetwork(model.network), model, x)


def test_the_energy_of_a_pendulum_is_proposed_from_functions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    system = systems.pendulum().with_normal_start(1.5, 1.0)
    x = system.start(500, torch.Generator().manual_seed(0))
    functions = [
        lambda x: 0.5 * x[..., 1] ** 2,
        lambda x: -x[..., 0].cos(),
        lambda x: x[..., 0] * x[..., 1],
        lambda x: x[..., 0].sin(),
    ]
    network = HamiltonianNetwork(2, width=4)
    offered = SymmetrisedNetwork(network, Combination(functions, 2), FlowTimes(2, "ball"))
    monkeypatch.setattr(proposals, "mean_weight_field", lambda judge, x: (x, system.field(x)))
    found = Proposals(offered, SymmetrisedNetwork(network), x)
    assert found.best_counts(1) == [1]
    assert found.next_count(0, {0}) is None  # two on offer: both are tried anyway
    whole = round_quantities(found.model_with(1))
    made = None if whole is None else whole.conserved
    assert isinstance(made, Combination) and made.rounded
    assert not made.coefficients.requires_grad
    c = made.coefficients.detach().double()[0]
    torch.testing.assert_close(c / c[0], torch.tensor([1.0, 1.0, 0.0, 0.0]).double())
    free = Combination(functions, 2)
    assert coefficient_cost(free, 100) == pytest.approx(0.5 * 2 * 2 * math.log(100))


def test_the_winner_is_looked_at_for_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two oscillators of different frequencies: one energy won, the other one is proposed too."""
    system = systems.oscillators((1.0, math.sqrt(3)))
    data = transitions(simulate(system, 10, 6, 0.2, seed=1), 1e-3)
    offered = _offer(4, 5)
    plain = SymmetrisedNetwork(offered.network)
    one = SymmetrisedNetwork(offered.network, Quadratic.fixed(energies(2).A[:1]))
    looked_at = []

    def field(model: SymmetrisedNetwork, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        looked_at.append(model)
        return x, system.field(x)

    monkeypatch.setattr(proposals, "mean_weight_field", field)
    config = TrainConfig(steps=2, draws=2, flows=4, burn_in=0.0)
    for costs, model in (((9.0, 5.0), one), ((5.0, 9.0), plain)):
        tried = judge._TrialRunner(data, config, judge._ProgressReport(None, 1.0))
        tried.done = [Trial(costs[0], plain, None), Trial(costs[1], one, None)]
        judge._propose_from_winner(tried, offered)
        assert looked_at[-1] is model
        found = tried.done[2:]
        assert found and {trial.count for trial in found} == {2}
        made = found[0].model.conserved
        assert isinstance(made, Quadratic)
        inside = analysis.parallelness(generators(made.A, made.b), energies(2))
        torch.testing.assert_close(inside, torch.ones_like(inside), rtol=0, atol=1e-6)
    functions = SymmetrisedNetwork(offered.network, Combination([lambda x: x[..., 0]], 1))
    judge._propose_from_winner(tried, functions)  # dear: not tried
    assert tried.done[2:] == found


@pytest.mark.slow
def test_the_evidence_takes_a_symmetry_and_refuses_what_is_none() -> None:
    config = TrainConfig(steps=240, draws=2, flows=8, batch_size=64, burn_in=0.5, noise=1e-3)
    for system, count in (
        (systems.oscillators(), 1),
        (systems.pendulum().with_normal_start(1.5, 1.0), 0),
    ):
        data = transitions(simulate(system, 20, 10, 0.3, seed=1), 1e-3, seed=2)
        offered = _offer(2, 3, width=16)
        before = copy.deepcopy(offered.state_dict())
        trained = train_and_select(offered, data, config)
        for name, value in offered.state_dict().items():  # the given model is left alone
            torch.testing.assert_close(value, before[name])
        assert trained.trials[0]["quantities"] == 0
        finals = [t for t in trained.trials if t["steps"] == 240]
        assert [t["group"] for t in finals] == ([0.0, 1.0] if count else [0.0])
        conserved = trained.model.conserved
        assert (0 if conserved is None else conserved.count) == count
        if isinstance(conserved, Quadratic):
            inside = analysis.parallelness(generators(conserved.A, conserved.b), unitary(1))
            assert float(inside.min()) > 0.999


def test_judge_reports_every_stage() -> None:
    data = transitions(simulate(systems.oscillators(), 7, 4, 0.2, seed=1), 1e-3)
    config = TrainConfig(steps=10, draws=2, flows=4, record=5, burn_in=0.4)
    shares: list[float] = []
    trained = train_and_select(_offer(2, 2), data, config, lambda r: shares.append(r["share"]))
    assert shares == sorted(shares) and shares[-1] == pytest.approx(1.0)
    short = [t for t in trained.trials if t["steps"] == 3]
    finals = trained.trials[len(short) :]
    assert 3 <= len(short) <= 1 + judge.PROPOSALS * judge.TRIALS_PER_PROPOSAL
    assert {t["quantities"] for t in short} == {0, 1, 2}
    assert {t["steps"] for t in finals} == {10}
    assert trained.history[-1]["step"] == 4 + sum(t["steps"] for t in trained.trials)
    assert trained.trials[0]["quantities"] == 0 and trained.trials[0]["rounded"] == 0


def test_judge_keeps_to_its_time(work_clock: Callable[[], float]) -> None:
    """More steps than fit are asked for; all trials still get equally many."""
    data = transitions(simulate(systems.oscillators(), 7, 4, 0.2, seed=1), 1e-3)
    config = TrainConfig(steps=100_000, minutes=0.04, draws=2, flows=4, burn_in=0.5)
    started = work_clock()
    trained = train_and_select(_offer(2, 2), data, config)
    assert work_clock() - started < 2 * 60 * 0.04
    *short, last = (t["steps"] for t in trained.trials)
    assert len(set(short[:3])) == 1 and short[0] <= last < 100_000


@pytest.mark.parametrize(("plain", "flows"), [(0.01, 0.03), (0.002, 0.002)])
def test_the_time_is_shared_out(
    plain: float, flows: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three quarters of the time: a fifth without quantities, two fifths for ten trials."""

    def each(model: SymmetrisedNetwork, *_: object) -> float:
        return plain if model.conserved is None else flows

    monkeypatch.setattr(judge, "seconds_per_step", each)
    data = transitions(simulate(systems.oscillators(), 7, 4, 0.2, seed=1), 1e-3)
    config = TrainConfig(steps=100_000, minutes=10, burn_in=0.5)
    plan, seconds = judge.plan_steps(_offer(2, 2), data, config), 0.75 * 600
    assert plan.first * plain == pytest.approx(seconds / 5, abs=plain)
    trials = plan.trial * (plain + 3 * 3 * flows)
    assert trials == pytest.approx(2 * seconds / 5, abs=plain + 9 * flows)
    assert 2 * plan.last * flows == pytest.approx(2 * seconds / 5, abs=2 * flows)
    few = judge.plan_steps(_offer(2, 2), data, config.change(steps=100))
    assert few == judge.Plan(first=50, trial=25, last=100)  # no more than was asked for


def test_a_free_span_is_learned_and_held_afterwards() -> None:
    """Units in which the energy is q^2 + 3 p^2 / 2: not whole, so the span has to be learned."""
    system = systems.from_energy(lambda x: 0.5 * (x[..., 0] ** 2 + 1.5 * x[..., 1] ** 2), 2)
    data = transitions(simulate(system, 10, 5, 0.2, seed=1), 1e-4)
    x = data.x
    rows = torch.tensor([[0.5, 0.0, 0.3, 0.1, 0.0]])  # q^2 + 0.6 p^2 + 0.1 q
    start = _offer(2, 1)
    assert isinstance(start.conserved, Quadratic)
    free = FreeSpan(rows, x, 0.5, start.conserved)
    network = HamiltonianNetwork(2, width=8, generator=torch.Generator().manual_seed(0))
    model = SymmetrisedNetwork(network, free, FlowTimes(1, "cube", "quasi"))
    before = free.A.detach().clone()
    config = TrainConfig(steps=3, draws=2, flows=4, burn_in=0.0)
    trials = judge._TrialRunner(data, config, judge._ProgressReport(None, 1.0))
    trials.run(model)
    assert not torch.allclose(free.A, before)
    held = judge._with_frozen_quantities(trials.done[0], model)
    assert held.conserved is free and not free.coefficients.requires_grad
    assert held.network is network
