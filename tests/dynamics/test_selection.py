"""Selection of conserved quantities by the evidence: trials, ties and step planning."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
from dynamics_case import proposal_template

from symrazor.dynamics import analysis, proposals, selection, systems
from symrazor.dynamics.algebra import energies, full_group, generators, unitary
from symrazor.dynamics.config import TrainConfig
from symrazor.dynamics.conserved import FreeSpan, Quadratic
from symrazor.dynamics.hamiltonian import FlowTimes, HamiltonianNetwork, SymmetrisedNetwork
from symrazor.dynamics.observables import Combination
from symrazor.dynamics.selection import (
    Trial,
    train_and_select,
)
from symrazor.dynamics.trajectories import simulate, transitions


def test_best_trial_proposes_one_more_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two anisotropic oscillators: one energy is selected, and both are proposed next."""
    system = systems.oscillators((1.0, math.sqrt(3)))
    data = transitions(simulate(system, 10, 6, 0.2, seed=1), 1e-3)
    template = proposal_template(4, 5)
    plain = SymmetrisedNetwork(template.network)
    single = SymmetrisedNetwork(template.network, Quadratic.fixed(energies(2).A[:1]))
    reference_models = []

    def field(model: SymmetrisedNetwork, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        reference_models.append(model)
        return x, system.field(x)

    monkeypatch.setattr(proposals, "mean_weight_field", field)
    config = TrainConfig(steps=2, draws=2, flows=4, burn_in=0.0)
    for costs, model in (((9.0, 5.0), single), ((5.0, 9.0), plain)):
        runner = selection._TrialRunner(data, config, selection._ProgressReport(None, 1.0))
        runner.done = [Trial(costs[0], plain, None), Trial(costs[1], single, None)]
        selection._propose_from_winner(runner, template)
        assert reference_models[-1] is model
        new_trials = runner.done[2:]
        assert new_trials and {trial.count for trial in new_trials} == {2}
        conserved = new_trials[0].model.conserved
        assert isinstance(conserved, Quadratic)
        inside = analysis.parallelness(generators(conserved.A, conserved.b), energies(2))
        torch.testing.assert_close(inside, torch.ones_like(inside), rtol=0, atol=1e-6)
    functions = SymmetrisedNetwork(template.network, Combination([lambda x: x[..., 0]], 1))
    selection._propose_from_winner(runner, functions)  # expensive flows: no new trial
    assert runner.done[2:] == new_trials


@pytest.mark.slow
def test_evidence_selects_a_true_symmetry_only() -> None:
    config = TrainConfig(steps=240, draws=2, flows=8, batch_size=64, burn_in=0.5, noise=1e-3)
    for system, count in (
        (systems.oscillators(), 1),
        (systems.pendulum().with_normal_start(1.5, 1.0), 0),
    ):
        data = transitions(simulate(system, 20, 10, 0.3, seed=1), 1e-3, seed=2)
        template = proposal_template(2, 3, width=16)
        before = copy.deepcopy(template.state_dict())
        trained = train_and_select(template, data, config)
        for name, value in template.state_dict().items():  # the argument is unchanged
            torch.testing.assert_close(value, before[name])
        assert trained.trials[0]["quantities"] == 0
        finals = [t for t in trained.trials if t["steps"] == 240]
        assert [t["group"] for t in finals] == ([0.0, 1.0] if count else [0.0])
        conserved = trained.model.conserved
        assert (0 if conserved is None else conserved.count) == count
        if isinstance(conserved, Quadratic):
            inside = analysis.parallelness(generators(conserved.A, conserved.b), unitary(1))
            assert float(inside.min()) > 0.999


def test_train_and_select_reports_progress_and_trials() -> None:
    data = transitions(simulate(systems.oscillators(), 7, 4, 0.2, seed=1), 1e-3)
    config = TrainConfig(steps=10, draws=2, flows=4, record=5, burn_in=0.4)
    shares: list[float] = []
    trained = train_and_select(
        proposal_template(2, 2), data, config, lambda r: shares.append(r["share"])
    )
    assert shares == sorted(shares) and shares[-1] == pytest.approx(1.0)
    short = [t for t in trained.trials if t["steps"] == 3]
    finals = trained.trials[len(short) :]
    assert 3 <= len(short) <= 1 + selection.PROPOSALS * selection.TRIALS_PER_PROPOSAL
    assert {t["quantities"] for t in short} == {0, 1, 2}
    assert {t["steps"] for t in finals} == {10}
    assert trained.history[-1]["step"] == 4 + sum(t["steps"] for t in trained.trials)
    assert trained.trials[0]["quantities"] == 0 and trained.trials[0]["rounded"] == 0


def test_train_and_select_respects_minutes(work_clock: Callable[[], float]) -> None:
    """With more steps than fit in the time, all trials still have equally many."""
    data = transitions(simulate(systems.oscillators(), 7, 4, 0.2, seed=1), 1e-3)
    config = TrainConfig(steps=100_000, minutes=0.04, draws=2, flows=4, burn_in=0.5)
    started = work_clock()
    trained = train_and_select(proposal_template(2, 2), data, config)
    assert work_clock() - started < 2 * 60 * 0.04
    *short, last = (t["steps"] for t in trained.trials)
    assert len(set(short[:3])) == 1 and short[0] <= last < 100_000


@pytest.mark.parametrize(("plain", "flows"), [(0.01, 0.03), (0.002, 0.002)])
def test_plan_steps_divides_the_time(
    plain: float, flows: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 75 % of the time, a fifth is for the first network and two fifths for ten trials."""

    def seconds_per_step(model: SymmetrisedNetwork, *_: object) -> float:
        return plain if model.conserved is None else flows

    monkeypatch.setattr(selection, "seconds_per_step", seconds_per_step)
    data = transitions(simulate(systems.oscillators(), 7, 4, 0.2, seed=1), 1e-3)
    config = TrainConfig(steps=100_000, minutes=10, burn_in=0.5)
    plan, seconds = selection.plan_steps(proposal_template(2, 2), data, config), 0.75 * 600
    assert plan.first * plain == pytest.approx(seconds / 5, abs=plain)
    trials = plan.trial * (plain + 3 * 3 * flows)
    assert trials == pytest.approx(2 * seconds / 5, abs=plain + 9 * flows)
    assert 2 * plan.last * flows == pytest.approx(2 * seconds / 5, abs=2 * flows)
    plan = selection.plan_steps(proposal_template(2, 2), data, config.change(steps=100))
    assert plan == selection.Plan(first=50, trial=25, last=100)  # limited by the steps


def test_free_span_is_learned_in_a_trial_and_frozen_afterwards() -> None:
    """The energy (q^2 + 1.5 p^2) / 2 has no integer coefficients, so the span must be learned."""
    system = systems.from_energy(lambda x: 0.5 * (x[..., 0] ** 2 + 1.5 * x[..., 1] ** 2), 2)
    data = transitions(simulate(system, 10, 5, 0.2, seed=1), 1e-4)
    x = data.x
    rows = torch.tensor([[0.5, 0.0, 0.3, 0.1, 0.0]])  # q^2 + 0.6 p^2 + 0.1 q
    start = proposal_template(2, 1)
    assert isinstance(start.conserved, Quadratic)
    free = FreeSpan(rows, x, 0.5, start.conserved)
    network = HamiltonianNetwork(2, width=8, generator=torch.Generator().manual_seed(0))
    model = SymmetrisedNetwork(network, free, FlowTimes(1, "cube", "quasi"))
    before = free.A.detach().clone()
    config = TrainConfig(steps=3, draws=2, flows=4, burn_in=0.0)
    trials = selection._TrialRunner(data, config, selection._ProgressReport(None, 1.0))
    trials.run(model)
    assert not torch.allclose(free.A, before)
    frozen = selection._with_frozen_quantities(trials.done[0], model)
    assert frozen.conserved is free and not free.coefficients.requires_grad
    assert frozen.network is network


def test_estimated_coefficients_have_a_group_of_their_own() -> None:
    """The flow of (1.5 q^2 + p^2) / 2 turns along ellipses, which are not rounded to circles."""
    conserved = Quadratic.fixed(torch.diag(torch.tensor([1.5, 1.0]))[None])
    network = HamiltonianNetwork(2, width=4, generator=torch.Generator().manual_seed(0))
    model = SymmetrisedNetwork(network, conserved, FlowTimes(1, "cube", "quasi"))
    found = full_group(model, torch.randn(20, 2, generator=torch.Generator().manual_seed(1)))
    assert found is not None and not found[0].rounded
    moved, _ = (
        found[0]
        .flows(torch.linspace(-1, 1, 9).view(1, 9, 1))
        .transport(torch.tensor([[[1.0, 0.0]]]))
    )
    energy = 1.5 * moved[..., 0].square() + moved[..., 1].square()
    torch.testing.assert_close(energy, torch.full_like(energy, 1.5), rtol=0, atol=1e-5)
    torch.testing.assert_close(moved[0, 0], moved[0, -1], rtol=0, atol=1e-5)  # a full turn
    assert float(moved[..., 0].min()) < -0.99
    assert selection.coefficient_cost(found[0], 100) > 0


@pytest.mark.slow
@pytest.mark.parametrize("stiffness", [1.5, 3.0])
def test_a_stiffness_is_not_rounded_in_a_model(stiffness: float) -> None:
    system = systems.from_energy(lambda x: 0.5 * (stiffness * x[..., 0] ** 2 + x[..., 1] ** 2), 2)
    data = transitions(simulate(system, 20, 10, 0.3, seed=1), 1e-3, seed=2)
    config = TrainConfig(steps=240, draws=2, flows=8, batch_size=64, burn_in=0.5, noise=1e-3)
    conserved = train_and_select(proposal_template(2, 3, width=16), data, config).model.conserved
    assert isinstance(conserved, Quadratic) and conserved.count == 1
    A = conserved.A[0]
    assert float(A[0, 0] / A[1, 1]) == pytest.approx(stiffness, rel=0.1)
