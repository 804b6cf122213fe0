"""Controls: is anything invented where there is nothing, and is it the evidence that finds it?

    python -m symrazor.experiments.noether_controls [--rows pendulum likelihood] [--json FILE]

- pendulum: no quadratic quantity is conserved; up to three are proposed.
- anisotropic: two oscillators with incommensurate frequencies; only their energies are conserved.
- bound, likelihood: the oscillator again, three quantities from a random start without a judge, by
  the bound and by maximum likelihood, where symmetry is of no use.
- pendulum-energy: the energy of a pendulum, which is not quadratic, from five functions of the
  state by flows that are solved for.
- kepler: angular momentum, energy and the Runge-Lenz vector from nineteen functions, likewise.

In all but these two what a network without quantities nearly conserves is proposed, and the
evidence judges.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from symrazor.dynamics.algebra import energies, unitary
from symrazor.dynamics.config import TrainConfig
from symrazor.dynamics.hamiltonian import HamiltonianNetwork, SymmetrisedNetwork
from symrazor.dynamics.likelihoods import velocities
from symrazor.dynamics.measures import FlowTimes
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
from symrazor.dynamics.trajectories import Trajectories, Transitions, simulate, transitions
from symrazor.experiments import noether, noether_oscillator
from symrazor.experiments.noether_results import cell, document, save

NAME = "noether-controls"
ROWS = ("pendulum", "anisotropic", "bound", "likelihood", "pendulum-energy", "kepler")
NOISE = 1e-3
EARLY = 0.2
"""Share of the steps after which quantities from a random start move."""
KEPLER_NOISE = 1e-2
SWING = {
    "p^2 / 2": lambda x: 0.5 * x[..., 1].square(),
    "-cos q": lambda x: -x[..., 0].cos(),
    "q^2 / 2": lambda x: 0.5 * x[..., 0].square(),
    "q p": lambda x: x[..., 0] * x[..., 1],
    "sin q": lambda x: x[..., 0].sin(),
}
ENERGY = ({"p^2 / 2": 1.0, "-cos q": 1.0},)


KEPLER = (
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


def _wide(small: bool) -> tuple[System, Trajectories, Trajectories]:
    """A pendulum with swings of up to a half turn, where it is far from an oscillator."""
    system = pendulum().with_normal_start(1.5, 1.0)
    count = 40 if small else 100
    train_set = simulate(system, count, 10, 0.3, seed=10_000)
    return system, train_set, simulate(system, 50, 20, 0.3, seed=20_000)


def pendulum_setting(options: noether.Options, seed: int) -> noether.Setting:
    """Three quadratic quantities offered to a pendulum."""
    _, data, test = _wide(options.small)
    config = TrainConfig(
        steps=800 if options.small else 3000, batch_size=200, draws=2, flows=16, burn_in=0.5
    )
    return noether.Setting(
        transitions(data, NOISE, seed=30_000 + seed),
        {"test": transitions(test)},
        unitary(1),
        unitary(1),
        test,
        config.change(noise=NOISE),
        count=3,
        measure="ball",
        draws="antithetic",
    )


def anisotropic_setting(options: noether.Options, seed: int) -> noether.Setting:
    """Six quadratic quantities offered to two oscillators that do not resonate."""
    system = oscillators((1.0, math.sqrt(3)))
    data = simulate(system, 60 if options.small else 200, 10, 0.2, seed=10_000 + seed)
    test = simulate(system, 50, 20, 0.2, seed=20_000 + seed)
    config = TrainConfig(
        steps=800 if options.small else 4000, batch_size=200, draws=2, flows=16, burn_in=0.5
    )
    return noether.Setting(
        transitions(data, NOISE, seed=30_000 + seed),
        {"test": transitions(test)},
        energies(2),
        energies(2),
        test,
        config.change(noise=NOISE),
        count=6,
        measure="ball",
        draws="antithetic",
    )


def pendulum_energy(options: noether.Options, seed: int) -> dict[str, Any]:
    """One combination of five functions whose flow leaves the Hamiltonian as it is."""
    _, data, test = _wide(options.small)
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
    offered = AnyFunctions(list(SWING.values()))
    own = noether.configured(config, options, seed)
    return functions_row(offered, (SWING, ENERGY), (pairs, test), own)


def kepler_row(options: noether.Options, seed: int) -> dict[str, Any]:
    """Angular momentum, energy and the Runge-Lenz vector among nineteen functions.

    From states and their velocities: where flows begin at data, and not after half a step, their
    second derivatives are not needed.
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
    offered = Products(4, KEPLER, {"1/r": inverse_distance})
    own = noether.configured(config, options, seed)
    return functions_row(offered, (KEPLER, KEPLER_KNOWN), (measured, test), own, system)


def functions_row(
    functions: Functions,
    truth: tuple[Iterable[str], Sequence[Mapping[str, float]]],
    data: tuple[Transitions, Trajectories],
    config: TrainConfig,
    system: System | None = None,
) -> dict[str, Any]:
    """Propose combinations of functions, judge them by solved flows, compare with the truth.

    Args:
        functions: on offer.
        truth: their names, and what is conserved as coefficients by name.
        data: for training, and true trajectories for the test.
        config: of the training; its seed is that of the weights too.
        system: true dynamics, where velocities are the target.
    """
    generator = torch.Generator().manual_seed(config.seed)
    pairs, held_out = data
    phase = held_out.phase
    width = 32 if phase == 2 else 64
    network = HamiltonianNetwork(phase, width=width, activation="elu", generator=generator)
    count = len(truth[1]) + 2
    offered = Combination(functions, count, scale=2.0, steps=4, generator=generator)
    model = SymmetrisedNetwork(network, offered, FlowTimes(offered.count, "ball", "antithetic"))
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
        row |= against(learned, *truth)
        row["drift"] = quantity_drift(trained, held_out)
    return row


@torch.no_grad()
def against(
    learned: Combination, names: Iterable[str], known: Sequence[Mapping[str, float]]
) -> dict[str, Any]:
    """Cosines between the spans of coefficients, learned and true, and the coefficients."""
    rows, names = learned.coefficients.double().cpu(), list(names)
    truth = torch.tensor(
        [[one.get(name, 0.0) for name in names] for one in known], dtype=torch.float64
    )
    ours, true = (torch.linalg.qr(m.mT)[0] for m in (rows, truth))
    return {
        "coefficients": [dict(zip(names, row.tolist(), strict=True)) for row in rows],
        "rounded": learned.rounded,
        "span": learned.count,
        "parallelness": torch.linalg.svdvals(true.mT @ ours).tolist(),
        "singular_values": torch.linalg.svdvals(rows).tolist(),
    }


@torch.no_grad()
def quantity_drift(trained: Trained, data: Trajectories) -> float | None:
    """Return the largest variation of a learned quantity along true trajectories.

    Relative to its variation between states; None for a model without conserved quantities.
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
        config = noether.configured(problem.config.change(burn_in=EARLY), options, seed)
        return noether.run_one(problem, name, config)
    make = pendulum_setting if name == "pendulum" else anisotropic_setting
    problem = make(options, seed)
    return noether.run_one(problem, "learned", noether.configured(problem.config, options, seed))


def run(options: noether.Options, rows: tuple[str, ...] = ROWS) -> str:
    """The table as markdown.

    Args:
        options: of the experiment; `models` is not used.
        rows: which controls.

    Raises:
        ValueError: no such row.
    """
    found: list[dict[str, Any]] = []
    for name in rows:
        if name not in ROWS:
            raise ValueError(f"expected rows among {', '.join(ROWS)}, got {name!r}")
        for seed in options.seed:
            found.append({"model": name, "seed": seed} | _row(name, options, seed))
            save(options.json, document(NAME, found, options.small, options.place, top=None))
    return markdown(found)


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """A table of all runs."""
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
        NAME, run, {"--rows": {"nargs": "+", "default": list(ROWS), "help": "some of these"}}
    )
