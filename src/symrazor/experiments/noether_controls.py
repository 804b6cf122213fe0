"""Controls: no quantity is selected where none is conserved, and the evidence is what selects.

    python -m symrazor.experiments.noether_controls [--rows pendulum likelihood] [--json FILE]

- pendulum: no quadratic quantity is conserved; up to three may be selected.
- anisotropic: two oscillators with incommensurate frequencies; only their energies are conserved.
- bound, likelihood: the oscillator, with three quantities learned from a random start without
  selection, by the evidence bound and by maximum likelihood, which does not reward symmetry.
- pendulum-energy: the energy of a pendulum, which is not quadratic, from five functions of the
  state, by numerically integrated flows.
- kepler: angular momentum, energy and the Runge-Lenz vector from nineteen functions, likewise.

All rows but bound and likelihood select quantities by `train_and_select`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from symrazor.dynamics.algebra import Algebra, energies, unitary
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
from symrazor.experiments import noether, noether_oscillator
from symrazor.experiments.noether_results import cell, document, save

NAME = "noether-controls"
ROWS = ("pendulum", "anisotropic", "bound", "likelihood", "pendulum-energy", "kepler")
NOISE = 1e-3
RANDOM_START_BURN_IN = 0.2
"""Fraction of the steps before quantities from a random start are updated."""
KEPLER_NOISE = 1e-2
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


def _large_swings(small: bool) -> tuple[Trajectories, Trajectories]:
    """Return training and test trajectories of a pendulum far from the harmonic regime."""
    system = pendulum().with_normal_start(1.5, 1.0)
    count = 40 if small else 100
    train_set = simulate(system, count, 10, 0.3, seed=10_000)
    return train_set, simulate(system, 50, 20, 0.3, seed=20_000)


def pendulum_setting(options: noether.Options, seed: int) -> noether.Setting:
    """Return the setting of a pendulum with up to three quadratic quantities."""
    steps = 800 if options.small else 3000
    return _setting(*_large_swings(options.small), unitary(1), seed, steps, count=3)


def anisotropic_setting(options: noether.Options, seed: int) -> noether.Setting:
    """Return the setting of two incommensurate oscillators with up to six quadratic quantities."""
    system = oscillators((1.0, math.sqrt(3)))
    data = simulate(system, 60 if options.small else 200, 10, 0.2, seed=10_000 + seed)
    test = simulate(system, 50, 20, 0.2, seed=20_000 + seed)
    return _setting(data, test, energies(2), seed, 800 if options.small else 4000, count=6)


def _setting(
    data: Trajectories, test: Trajectories, known: Algebra, seed: int, steps: int, count: int
) -> noether.Setting:
    return noether.Setting(
        transitions(data, NOISE, seed=30_000 + seed),
        {"test": transitions(test)},
        known,
        known,
        test,
        TrainConfig(steps=steps, batch_size=200, draws=2, flows=16, burn_in=0.5, noise=NOISE),
        count=count,
        measure="ball",
        draws="antithetic",
    )


def pendulum_energy(options: noether.Options, seed: int) -> dict[str, Any]:
    """Return results for the energy of a pendulum, as a combination of five functions."""
    data, test = _large_swings(options.small)
    config = TrainConfig(
        steps=800 if options.small else 2000,
        batch_size=64,
        draws=2,
        flows=8,
        integrator="rk4",
        burn_in=0.4,
        noise=NOISE,
    )
    pairs = transitions(data, NOISE, seed=30_000 + seed)
    functions = AnyFunctions(list(PENDULUM_FUNCTIONS.values()))
    config = noether.with_options(config, options, seed)
    return functions_row(functions, (PENDULUM_FUNCTIONS, PENDULUM_KNOWN), (pairs, test), config)


def kepler_row(options: noether.Options, seed: int) -> dict[str, Any]:
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
    known = (KEPLER_TERMS, KEPLER_KNOWN)
    return functions_row(functions, known, (measured, test), config, system)


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
    count = len(truth[1]) + 2
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


def _row(name: str, options: noether.Options, seed: int) -> dict[str, Any]:
    if name == "pendulum-energy":
        return pendulum_energy(options, seed)
    if name == "kepler":
        return kepler_row(options, seed)
    if name in noether.CONTROLS:
        problem = noether_oscillator.setting(options, seed)
        config = noether.with_options(
            problem.config.change(burn_in=RANDOM_START_BURN_IN), options, seed
        )
        return noether.run_model(problem, name, config)
    setting = pendulum_setting if name == "pendulum" else anisotropic_setting
    problem = setting(options, seed)
    config = noether.with_options(problem.config, options, seed)
    return noether.run_model(problem, "learned", config)


def run(options: noether.Options, rows: tuple[str, ...] = ROWS) -> str:
    """Run the experiment and return a markdown table.

    Args:
        options: of the experiment; `models` has no effect.
        rows: names of controls.

    Raises:
        ValueError: an unknown row.
    """
    results: list[dict[str, Any]] = []
    for name in rows:
        if name not in ROWS:
            raise ValueError(f"Unknown row {name!r}. Choose from {', '.join(ROWS)}.")
        for seed in options.seed:
            results.append({"model": name, "seed": seed} | _row(name, options, seed))
            save(options.json, document(NAME, results, options.small, options.place, top=None))
    return markdown(results)


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table of all runs."""
    lines = [
        "| control | seed | used | conserved | singular values | parallelness | drift | s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['model']} | {row['seed']} | {row['error']} | | | | | |")
            continue
        values, inside = (
            " ".join(f"{v:.3f}" for v in row[key]) or "none"
            for key in ("singular_values", "parallelness")
        )
        drifts = row.get("drift", [])
        drift = max(drifts, default=None) if isinstance(drifts, list) else drifts
        lines.append(
            f"| {row['model']} | {row['seed']} | {cell(row.get('dimension'))} | "
            f"{cell(row.get('conserved'))} | {values} | {inside} | "
            f"{cell(drift, '.3f')} | {row['seconds']:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    noether.main(
        NAME, run, {"--rows": {"nargs": "+", "default": list(ROWS), "help": "rows to run"}}
    )
