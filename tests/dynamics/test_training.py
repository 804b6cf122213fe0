"""Training: likelihood, bound, and small learning problems."""

import math

import pytest
import torch

from symrazor.dynamics import systems
from symrazor.dynamics.algebra import unitary
from symrazor.dynamics.config import TrainConfig
from symrazor.dynamics.conserved import Quadratic
from symrazor.dynamics.hamiltonian import HamiltonianNetwork, SymmetrisedNetwork
from symrazor.dynamics.mechanics import rk4
from symrazor.dynamics.observables import Combination
from symrazor.dynamics.trained import (
    Noise,
    Simulator,
    evidence_bound,
    kl_per_datum,
    long_rollout,
    mean_squared_error,
    relative_drift,
    rollout,
)
from symrazor.dynamics.training import train
from symrazor.dynamics.trajectories import Trajectories, simulate, transitions, velocities

OSCILLATOR = systems.oscillators()
DATA = simulate(OSCILLATOR, 7, 4, 0.2, seed=1)


def _model(seed: int = 0, conserved: Quadratic | None = None) -> SymmetrisedNetwork:
    g = torch.Generator().manual_seed(seed)
    return SymmetrisedNetwork(HamiltonianNetwork(2, width=8, generator=g), conserved)


def test_initial_weights_have_inverse_fan_in_variance() -> None:
    """The first layer has variance 1; posterior deviations scale likewise."""
    network = HamiltonianNetwork(4, width=400, std=0.1, generator=torch.Generator().manual_seed(0))
    for posterior, size in zip(network.posteriors, (1.0, 1 / 20, 1 / 20), strict=True):
        assert float(posterior.mean.detach().std()) == pytest.approx(size, rel=0.1)
        deviation = posterior.variance().detach().mean().sqrt()
        assert float(deviation) == pytest.approx(0.1 * size, rel=1e-5)


def test_nll_matches_normal_distribution() -> None:
    data = transitions(DATA, 1e-2, horizon=3)
    predicted = rollout(OSCILLATOR.field, data, 1, rk4, substeps=4)
    clean = transitions(DATA, horizon=3)
    torch.testing.assert_close(predicted[0], clean.y, rtol=0, atol=1e-6)
    noise = Noise(1e-2).double()
    truth = torch.distributions.Normal(predicted[0], 0.1).log_prob(data.y).sum((1, 2))
    torch.testing.assert_close(noise.nll(predicted, data)[0], -truth, rtol=1e-5, atol=1e-5)


def test_closed_form_noise_converges_to_the_residual_variance() -> None:
    data = transitions(DATA, 4e-2)
    predicted = rollout(OSCILLATOR.field, data, 1, rk4)
    noise = Noise(1.0, "closed", rate=0.2)
    for _ in range(60):
        noise.observe(predicted, data)
    residual = float((predicted[0] - data.y).square().mean())
    assert float(noise.variance) == pytest.approx(residual, rel=1e-3)


def test_closed_form_noise_can_be_frozen() -> None:
    data = transitions(DATA, 4e-2)
    predicted = rollout(OSCILLATOR.field, data, 1, rk4)
    noise = Noise(0.3, "closed", rate=0.2)
    before = noise.log_variance.clone()
    noise.hold(True)
    noise.observe(predicted, data)
    torch.testing.assert_close(noise.log_variance, before, rtol=0, atol=0)
    noise.hold(False)
    noise.observe(predicted, data)
    residual = float((predicted[0] - data.y).square().mean())
    assert float(noise.variance) == pytest.approx(0.8 * 0.3 + 0.2 * residual)
    assert set(noise.state_dict()) == {"log_variance"}


def test_closed_form_noise_stays_fixed_during_noise_hold() -> None:
    config = TrainConfig(steps=12, draws=2, flows=4, record=2, noise=1e-3, noise_kind="closed")
    data = transitions(DATA, 1e-3)
    levels = [r["noise"] for r in train(_model(), data, config).history]
    assert levels[:3] == pytest.approx([1e-3] * 3, rel=1e-5) and min(levels[3:]) > 2e-3
    moved = train(_model(), data, config.change(noise_hold=0.0)).history
    assert moved[0]["noise"] > 2e-3


def test_nll_leaves_out_missing_states() -> None:
    states = DATA.states.clone()
    states[2, 2] = torch.nan
    data = transitions(Trajectories.of(states, DATA.times), horizon=2)
    predicted = rollout(OSCILLATOR.field, data, 1, rk4)
    nll = Noise(1e-2).double().nll(predicted, data)
    assert torch.isfinite(nll).all()
    per_state = math.log(2 * math.pi * 1e-2)
    torch.testing.assert_close(nll[0], data.observed.sum(1) * per_state, rtol=1e-3, atol=1e-3)


def test_velocities_are_second_order_on_irregular_times() -> None:
    times = torch.tensor([0.0, 0.01, 0.03, 0.04], dtype=torch.float64)
    states = torch.stack([times**2, 1 + 3 * times], -1)[None]
    data = velocities(Trajectories.of(states, times))
    expected = torch.stack([2 * times[1:-1], torch.full((2,), 3.0).double()], -1)
    torch.testing.assert_close(data.y[:, 0], expected)


@pytest.mark.usefixtures("work_clock")
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"target": "derivative"},
        {"noise_kind": "learned"},
        {"noise_kind": "closed", "batch_size": 8},
        {"objective": "likelihood"},
        {"integrator": "implicit-midpoint", "substeps": 2},
        {"minutes": 0.02, "steps": 100_000},
    ],
    ids=str,
)
def test_training_improves_the_bound(change: dict[str, object]) -> None:
    config = TrainConfig(steps=40, draws=2, flows=4, record=10).change(**change)
    data = velocities(DATA) if config.target == "derivative" else transitions(DATA, 1e-3)
    trained = train(_model(conserved=Quadratic(2, 1)), data, config)
    assert trained.history[-1]["neg_elbo"] < trained.history[0]["neg_elbo"]
    assert trained.skipped == 0
    assert math.isfinite(trained.bound["neg_elbo"])
    if config.minutes is not None:
        assert trained.seconds < 2 * 60 * config.minutes


def test_equal_seeds_give_equal_results() -> None:
    config = TrainConfig(steps=5, draws=2, flows=4, batch_size=8)
    data = transitions(DATA, 1e-3)
    first, second = (train(_model(conserved=_start()), data, config).bound for _ in range(2))
    assert first == second


def _start() -> Quadratic:
    return Quadratic(2, 1, generator=torch.Generator().manual_seed(3))


def test_bound_is_nll_plus_kl() -> None:
    data = transitions(DATA, 1e-3)
    trained = train(_model(), data, TrainConfig(steps=3, draws=2))
    value = evidence_bound(trained, data, draws=64)
    assert value["kl"] == pytest.approx(
        float(kl_per_datum(trained.model, trained.config, len(data)).detach())
    )
    assert value["neg_elbo"] == pytest.approx(value["nll"] + value["kl"])


def test_steps_that_overflow_are_skipped_and_counted() -> None:
    data = transitions(DATA, 1e-3)
    broken = data.at(torch.arange(len(data)))
    broken.y[0, 0, 0] = 1e30
    trained = train(_model(), broken, TrainConfig(steps=60, draws=2, batch_size=4, record=60))
    assert 0 < trained.skipped < 40
    assert all(torch.isfinite(p).all() for p in trained.model.parameters())
    broken.y[:] = 1e30
    with pytest.raises(FloatingPointError, match="had no finite gradients"):
        train(_model(), broken, TrainConfig(steps=60, draws=2, record=60))


def test_invalid_options_raise() -> None:
    for change, message in (
        ({"steps": 0}, "steps must be at least 1"),
        ({"lr": 0.0}, "lr must be positive"),
        ({"burn_in": 1.0}, "burn_in must be in"),
        ({"integrator": "rk5"}, "integrator must be 'euler', .* or 'yoshida4', got 'rk5'"),
        ({"objective": "map"}, "objective must be .elbo"),
    ):
        with pytest.raises(ValueError, match=message):
            TrainConfig(**change)  # type: ignore[arg-type]


def test_simulator_is_reversible_and_conserves_energy() -> None:
    """With SO(2) built in, radius and learned energy are constant along a long rollout."""
    data = transitions(DATA, 1e-3)
    config = TrainConfig(steps=150, draws=2, flows=8, integrator="rk4")
    trained = train(_model(conserved=unitary(1).quadratic()), data, config)
    simulator = Simulator(trained)
    x = DATA.states[:3, 0].float()
    moved = simulator(x, 2.0)
    torch.testing.assert_close(simulator(moved, -2.0), x, rtol=0, atol=1e-3)
    torch.testing.assert_close(moved.norm(dim=1), x.norm(dim=1), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(simulator.energy(moved), simulator.energy(x), rtol=1e-2, atol=1e-3)
    assert long_rollout(trained, x, 0.2, 5).shape == (3, 6, 2)
    path = long_rollout(trained, x, 0.2, 5, mean_weights=True)
    assert relative_drift(lambda x: x.norm(dim=-1), path)[0] < 0.05
    assert mean_squared_error(trained, transitions(DATA)) < 0.01


@pytest.mark.parametrize("kind", ["none", "affine", "solved"])
def test_simulator_state_dict_and_dtype(kind: str) -> None:
    """The state dict holds weights and flows, and states may have any dtype."""
    solved = Combination([lambda x: x.square().sum(-1)], 1, std=0.5, steps=2)
    conserved = {"none": None, "affine": unitary(1).quadratic(), "solved": solved}[kind]
    first, other = (
        Simulator(train(_model(seed, conserved), transitions(DATA), TrainConfig(steps=1)), 4)
        for seed in (0, 1)
    )
    x = DATA.states[:3, 0]
    moved = first(x, 0.3)
    assert moved.dtype == first.energy(x).dtype == torch.float64
    assert not torch.allclose(other(x, 0.3), moved, rtol=1e-3)
    other.load_state_dict(first.state_dict())
    assert torch.equal(other(x, 0.3), moved)
    torch.testing.assert_close(other.double()(x, 0.3), moved, rtol=1e-4, atol=1e-5)
    assert not any(p.requires_grad for p in first.parameters())


@pytest.mark.slow
def test_bound_learns_the_rotation_but_likelihood_does_not() -> None:
    from symrazor.experiments import noether, noether_systems

    problem = noether_systems.oscillator(noether.Options(small=True), 0)
    config = problem.config.change(steps=500, burn_in=0.2)
    row = noether.metrics(
        train(noether.build(problem, "learned", 0), problem.data, config), problem
    )
    assert row["parallelness"][0] > 0.98 and row["singular_values"][0] > 1
    config = config.change(objective="likelihood")
    row = noether.metrics(
        train(noether.build(problem, "likelihood", 0), problem.data, config), problem
    )
    assert row["dimension"] == 0
