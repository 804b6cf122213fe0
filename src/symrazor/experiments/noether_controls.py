"""Controls: no quantity is selected where none is conserved, and the evidence is what selects.

- pendulum: no quadratic quantity is conserved; up to three may be selected.
- anisotropic: two oscillators with incommensurate frequencies; only their energies are conserved.
- bound, likelihood: the oscillator, with three quantities learned from a random start without
  selection, by the evidence bound and by maximum likelihood, which does not reward symmetry.
- pendulum-energy: the energy of a pendulum, which is not quadratic, from five functions of the
  state, by numerically integrated flows.
- kepler: angular momentum, energy and the Runge-Lenz vector from nineteen functions, likewise.

All rows but bound and likelihood select quantities by `train_and_select`. As in the paper, the
states where transitions start have no noise and the noise variance of the targets is given;
everything else is learned. The functions of the last two rows are given and contain the answer.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from symrazor.dynamics.algebra import energies, unitary
from symrazor.dynamics.config import TrainConfig
from symrazor.dynamics.hamiltonian import FlowTimes, HamiltonianNetwork, SymmetrisedNetwork
from symrazor.dynamics.observables import (
    AnyFunctions,
    Combination,
    Functions,
    Products,
    inverse_distance,
)
from symrazor.dynamics.selection import train_and_select
from symrazor.dynamics.systems import System, kepler, oscillators, pendulum
from symrazor.dynamics.trained import Trained, mean_squared_error
from symrazor.dynamics.trajectories import (
    Trajectories,
    Transitions,
    simulate,
    transitions,
    velocities,
)
from symrazor.experiments import noether, noether_systems
from symrazor.experiments.noether import cell, save
from symrazor.experiments.options import OfTable
from symrazor.experiments.results import table

NAME = "noether-controls"
ROWS = ("pendulum", "anisotropic", "bound", "likelihood", "pendulum-energy", "kepler")
RANDOM_START_BURN_IN = 0.2
"""Fraction of the steps before quantities from a random start are updated."""
KEPLER_NOISE = 1e-2
MAX_QUANTITIES = 6
"""Combinations of functions that may be selected, whatever the system conserves."""
PENDULUM_FUNCTIONS = {
    "p^2 / 2": lambda x: 0.5 * x[..., 1].square(),
    "-cos q": lambda x: -x[..., 0].cos(),
    "q^2 / 2": lambda x: 0.5 * x[..., 0].square(),
    "q p": lambda x: x[..., 0] * x[..., 1],
    "sin q": lambda x: x[..., 0].sin(),
}
PENDULUM_KNOWN = ({"p^2 / 2": 1.0, "-cos q": 1.0},)
"""What is conserved, as coefficients by name."""
KEPLER_TERMS = (
    *("q1", "q2", "p1", "p2", "q1 q1", "q1 q2", "q2 q2", "p1 p1", "p1 p2", "p2 p2"),
    *("q1 p2", "q2 p1", "p2 p2 q1", "p1 p2 q2", "p1 p1 q2", "p1 p2 q1"),
    *("1/r", "q1 1/r", "q2 1/r"),
)
KEPLER_KNOWN = (
    {"q1 p2": 1.0, "q2 p1": -1.0},
    {"p2 p2 q1": 1.0, "p1 p2 q2": -1.0, "q1 1/r": -1.0},
    {"p1 p1 q2": 1.0, "p1 p2 q1": -1.0, "q2 1/r": -1.0},
    {"p1 p1": 0.5, "p2 p2": 0.5, "1/r": -1.0},
)


@dataclass(frozen=True)
class Options(noether.TrainingOptions, OfTable):
    """Options of the experiment.

    Args:
        rows: patterns of the controls to run, see the module.
    """


def _large_swings(small: bool, seed: int) -> tuple[Trajectories, Trajectories]:
    """Return training and test trajectories of a pendulum far from the harmonic regime."""
    system = pendulum().with_normal_start(1.5, 1.0)
    count = 40 if small else 100
    train_set = simulate(system, count, 10, 0.3, seed=10_000 + seed)
    return train_set, simulate(system, 50, 20, 0.3, seed=20_000 + seed)


def _config(small: bool, steps: int) -> TrainConfig:
    steps = 800 if small else steps
    return TrainConfig(steps=steps, batch_size=200, draws=2, flows=16, burn_in=0.5)


def pendulum_setting(options: Options, seed: int) -> noether.Setting:
    """Return the setting of a pendulum with up to three quadratic quantities."""
    data, config = _large_swings(options.small, seed), _config(options.small, 3000)
    return noether.setting_of(*data, unitary(1), config, seed, count=3, draws="antithetic")


def anisotropic_setting(options: Options, seed: int) -> noether.Setting:
    """Return the setting of two incommensurate oscillators with up to six quadratic quantities."""
    return noether.simulated(
        oscillators((1.0, math.sqrt(3))),
        energies(2),
        _config(options.small, 4000),
        seed,
        (60 if options.small else 200, 10),
        (50, 20),
        count=6,
        draws="antithetic",
        energy=None,
    )


def pendulum_energy(options: Options, seed: int) -> dict[str, Any]:
    """Return results for the energy of a pendulum, as a combination of five functions."""
    data, test = _large_swings(options.small, seed)
    config = TrainConfig(
        steps=800 if options.small else 2000,
        batch_size=64,
        draws=2,
        flows=8,
        integrator="rk4",
        burn_in=0.4,
        noise=noether.NOISE,
    )
    pairs = transitions(data, noether.NOISE, seed=30_000 + seed)
    functions = AnyFunctions(list(PENDULUM_FUNCTIONS.values()))
    config = noether.with_options(config, options, seed)
    return functions_row(functions, (PENDULUM_FUNCTIONS, PENDULUM_KNOWN), (pairs, test), config)


def kepler_row(options: Options, seed: int) -> dict[str, Any]:
    """Return results for angular momentum, energy and Runge-Lenz vector, from nineteen functions.

    The targets are velocities: flows then start at the data and not at predicted states, so that
    their second derivatives are not needed.
    """
    system = kepler()
    data = simulate(system, 100, 20, 0.1, seed=10_000 + seed)
    test = simulate(system, 50, 20, 0.1, seed=20_000 + seed)
    config = TrainConfig(
        steps=1500 if options.small else 3000,
        batch_size=128 if options.small else 256,
        draws=2,
        flows=16 if options.small else 32,
        burn_in=0.4,
        target="derivative",
        noise=KEPLER_NOISE,
    )
    generator = torch.Generator().manual_seed(30_000 + seed)
    noise = torch.randn(data.states.shape, generator=generator, dtype=torch.float64)
    measured = velocities(data, system.field(data.states) + KEPLER_NOISE**0.5 * noise)
    functions = Products(4, KEPLER_TERMS, {"1/r": inverse_distance})
    config = noether.with_options(config, options, seed)
    expected = (KEPLER_TERMS, KEPLER_KNOWN)
    return functions_row(functions, expected, (measured, test), config, system)


def functions_row(
    functions: Functions,
    truth: tuple[Iterable[str], Sequence[Mapping[str, float]]],
    data: tuple[Transitions, Trajectories],
    config: TrainConfig,
    system: System | None = None,
) -> dict[str, Any]:
    """Select combinations of functions, and compare them with what is conserved.

    Args:
        functions: candidates.
        truth: names of the functions, and the conserved combinations as coefficients by name.
        data: training transitions, and noise-free test trajectories.
        config: training options; the seed is also used for the weights.
        system: true dynamics, if velocities are the target.
    """
    generator = torch.Generator().manual_seed(config.seed)
    pairs, held_out = data
    phase = held_out.phase
    width = 32 if phase == 2 else 64
    network = HamiltonianNetwork(phase, width=width, activation="elu", generator=generator)
    count = min(MAX_QUANTITIES, len(functions) - 1)
    conserved = Combination(functions, count, scale=2.0, steps=4, generator=generator)
    model = SymmetrisedNetwork(network, conserved, FlowTimes(count, "ball", "antithetic"))
    trained = train_and_select(model, pairs, config)
    tests = transitions(held_out)
    if system is not None:
        tests = velocities(held_out, system.field(held_out.states))
    row: dict[str, Any] = {
        "neg_elbo_per_datum": trained.bound["neg_elbo"],
        "seconds": trained.seconds,
        "trials": trained.trials,
        "test_mse": mean_squared_error(trained, tests),
        "parallelness": [],
        "singular_values": [],
    }
    learned = trained.model.conserved
    if isinstance(learned, Combination):
        row |= compare_spans(learned, *truth)
        row["drift"] = quantity_drift(trained, held_out)
    return row


@torch.no_grad()
def compare_spans(
    learned: Combination, names: Iterable[str], known: Sequence[Mapping[str, float]]
) -> dict[str, Any]:
    """Return the cosines of the angles between learned and true span, and the coefficients."""
    rows, names = learned.coefficients.double().cpu(), list(names)
    truth = torch.tensor(
        [[quantity.get(name, 0.0) for name in names] for quantity in known], dtype=torch.float64
    )
    learned_basis, true_basis = (torch.linalg.qr(m.mT)[0] for m in (rows, truth))
    return {
        "coefficients": [dict(zip(names, row.tolist(), strict=True)) for row in rows],
        "rounded": learned.rounded,
        "span": learned.count,
        "parallelness": torch.linalg.svdvals(true_basis.mT @ learned_basis).tolist(),
        "singular_values": torch.linalg.svdvals(rows).tolist(),
    }


@torch.no_grad()
def quantity_drift(trained: Trained, data: Trajectories) -> float | None:
    """Return the largest standard deviation of a learned quantity along true trajectories.

    It is relative to the standard deviation over all states; None without conserved quantities.
    """
    conserved = trained.model.conserved
    if conserved is None:
        return None
    device = trained.model.network.posteriors[0].mean.device
    values = conserved(data.states.to(device)).cpu()
    along = (values - values.mean(1, keepdim=True)).square().mean((0, 1))
    return float((along / values.flatten(0, 1).var(0, correction=0)).sqrt().max())


def _row(name: str, options: Options, seed: int) -> dict[str, Any]:
    if name == "pendulum-energy":
        return pendulum_energy(options, seed)
    if name == "kepler":
        return kepler_row(options, seed)
    if name in noether.CONTROLS:
        model, problem = name, noether_systems.oscillator(options, seed)
        base = problem.config.change(burn_in=RANDOM_START_BURN_IN)
    else:
        setting = pendulum_setting if name == "pendulum" else anisotropic_setting
        model, problem = "learned", setting(options, seed)
        base = problem.config
    return noether.run_model(problem, model, noether.with_options(base, options, seed))


def run(options: Options) -> str:
    """Run the controls of Noether's razor: no symmetry, maximum likelihood, not quadratic.

    Raises:
        ValueError: an unknown row.
    """
    results: list[dict[str, Any]] = []
    for name in options.choose(ROWS):
        for seed in options.seed:
            results.append({"model": name, "seed": seed} | _row(name, options, seed))
            save(options, NAME, results, top=None)
    return markdown(results)


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table of all runs."""
    head = ["control", "seed", "used", "conserved", "singular values", "parallelness", "drift", "s"]
    return table(head, map(_cells, rows))


def _cells(row: dict[str, Any]) -> list[str]:
    start = [row["model"], str(row["seed"])]
    if "error" in row:
        return [*start, row["error"], *[""] * 5]
    drifts = row.get("drift", [])
    drift = max(drifts, default=None) if isinstance(drifts, list) else drifts
    return [
        *start,
        *(cell(row.get(key)) for key in ("dimension", "conserved")),
        *(
            " ".join(f"{v:.3f}" for v in row[key]) or "none"
            for key in ("singular_values", "parallelness")
        ),
        cell(drift, ".3f"),
        f"{row['seconds']:.0f}",
    ]
