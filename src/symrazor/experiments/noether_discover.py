"""Conserved quantities that `dynamics.discover` finds in noisy simulated trajectories.

- two-bodies: in the plane, with softened gravity, which is in no library of functions.
- kepler: energy, angular momentum and the Runge-Lenz vector; three are independent.
- anisotropic: two oscillators of different frequencies conserve their two energies.
- pendulum: its energy.

Nothing about the system is given: neither the noise, nor the number of quantities. The true
quadratic quantities, to compare with, are the null space of the Poisson bracket with the energy
(`quadratic_invariants`). Every seed has its own trajectories. `--small` takes a tenth of the time
for networks, which are trained only where the noise test cannot decide.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from symrazor.dynamics import analysis
from symrazor.dynamics.algebra import Algebra, generators
from symrazor.dynamics.analysis import quadratic_invariants
from symrazor.dynamics.config import DiscoverConfig
from symrazor.dynamics.discovery import discover
from symrazor.dynamics.result import Discovered
from symrazor.dynamics.systems import System, kepler, nbody, oscillators, pendulum
from symrazor.dynamics.trajectories import simulate
from symrazor.experiments.noether import Row, cell, save
from symrazor.experiments.options import OfTable
from symrazor.experiments.results import table

NAME = "noether-discover"


@dataclass(frozen=True)
class Options(OfTable):
    """Options of the experiment.

    Args:
        rows: patterns of the systems, see the module.
        minutes: training time of the network of each system, if there is one.
        steps: maximum number of its training steps.
    """

    minutes: float = 2.0
    steps: int | None = None


@dataclass(frozen=True)
class Case:
    """A simulated data set.

    Args:
        system: the system.
        count: number of trajectories.
        steps: steps per trajectory.
        dt: time between two states.
        noise: variance of the noise on all states.
    """

    system: System
    count: int
    steps: int
    dt: float = 0.2
    noise: float = 4e-4


CASES = {
    "two-bodies": Case(nbody(2, 2), 80, 12, 0.4),
    "kepler": Case(kepler(), 60, 20, noise=1e-4),
    "anisotropic": Case(oscillators((1.0, math.sqrt(3))), 40, 12),
    "pendulum": Case(pendulum().with_normal_start(1.5, 1.0), 40, 10, 0.3),
}


def metrics(result: Discovered, known: Algebra) -> Row:
    """Return all results of one discovery, compared with the true quadratic quantities."""
    rollouts = {name: result.rollouts.mean(name) for name in result.rollouts.errors}
    row: Row = {
        "known": len(known),
        "conserved": len(result.conserved),
        "by": "noise test" if result.is_decided else "evidence",
        "parallelness": [],
        "recovered": [0.0] * len(known),
        "rollouts": rollouts,
        "simulator": result.model_name,
        "seconds": result.seconds,
        "discovered": result.to_dict(),
    }
    quadratic = [entry for entry in result.all_quantities if "matrix" in entry]
    if quadratic:
        A, b = (
            torch.tensor([entry[key] for entry in quadratic], dtype=torch.float64)
            for key in ("matrix", "linear")
        )
        row["parallelness"] = analysis.parallelness(generators(A, b), known).tolist()
        learned = Algebra(("",) * len(A), A, b)
        row["recovered"] = analysis.parallelness(known.generators(), learned).tolist()
    return row


def run(options: Options) -> str:
    """Run discover on noisy trajectories of four systems (Noether's razor).

    Raises:
        ValueError: an unknown row.
    """
    rows: list[Row] = []
    for name in options.choose(CASES):
        case = CASES[name]
        known = quadratic_invariants(case.system).algebra
        for seed in options.seed:
            data = simulate(case.system, case.count, case.steps, case.dt, seed=10_000 + seed)
            result = discover(
                data.with_noise(case.noise, seed=30_000 + seed),
                minutes=options.minutes / 10 if options.small else options.minutes,
                seed=seed,
                progress=False,
                device=options.resolved_device,
                steps=options.steps or DiscoverConfig.steps,
            )
            rows.append({"model": name, "seed": seed} | metrics(result, known))
            save(options, NAME, rows, top=None)
    return markdown(rows)


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table of all runs."""
    head = ["system", "seed", "found", "by", "quantities", "known quadratic ones recovered"]
    head += ["rollout error", "best baseline", "s"]
    return table(head, map(_cells, rows))


def _cells(row: dict[str, Any]) -> list[str]:
    entries, rollouts = row["discovered"]["conserved"], row["rollouts"]
    other_errors = [error for name, error in rollouts.items() if name != row["simulator"]]
    return [
        row["model"],
        str(row["seed"]),
        str(row["conserved"]),
        row["by"],
        "; ".join(entry["name"] or entry["formula"] for entry in entries) or "none",
        cell(min(row["recovered"], default=None), ".4f"),
        f"{rollouts[row['simulator']]:.3g}",
        cell(min(other_errors, default=None), ".3g"),
        f"{row['seconds']:.0f}",
    ]
