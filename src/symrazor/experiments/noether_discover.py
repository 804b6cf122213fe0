"""Conserved quantities that `dynamics.discover` finds in noisy simulated trajectories.

- two-bodies: in the plane; momenta, angular momenta and products of momenta, seven in all.
- kepler: angular momentum is the only quadratic quantity.
- anisotropic: two oscillators of different frequencies conserve their two energies.
- pendulum: no quadratic quantity is conserved.

The true quantities are the null space of the Poisson bracket with the energy
(`quadratic_invariants`). `--small` takes a tenth of the time.
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
from symrazor.experiments import noether
from symrazor.experiments.noether import Row, cell, save
from symrazor.experiments.options import OfTable
from symrazor.experiments.results import table

NAME = "noether-discover"


@dataclass(frozen=True)
class Options(noether.Options, OfTable):
    """Options of the experiment.

    Args:
        models: have no effect.
        set: has no effect.
        steps: maximum number of training steps.
        rows: patterns of the systems, see the module.
        minutes: training time of each system.
    """

    minutes: float = 2.0


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
    """Return all results of one discovery, compared with the true algebra."""
    row: Row = {
        "neg_elbo_per_datum": result.learned.bound["neg_elbo"],
        "test_mse": result.held_out["learned"],
        "plain_neg_elbo_per_datum": result.plain.bound["neg_elbo"],
        "plain_test_mse": result.held_out["plain"],
        "known": len(known),
        "span": len(result.conserved),
        "conserved": len(result.conserved),
        "singular_values": [entry["singular_value"] for entry in result.conserved],
        "parallelness": [],
        "recovered": [0.0] * len(known),
    }
    if result.conserved:
        A, b = (
            torch.tensor([entry[key] for entry in result.conserved], dtype=torch.float64)
            for key in ("matrix", "linear")
        )
        names = tuple(entry["name"] for entry in result.conserved)
        row["parallelness"] = analysis.parallelness(generators(A, b), known).tolist()
        learned = Algebra(names, A, b)
        row["recovered"] = analysis.parallelness(known.generators(), learned).tolist()
    discovered = result.to_dict()
    return row | {"seconds": discovered["seconds"], "discovered": discovered}


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
    head = ["system", "seed", "found / true", "parallelness", "names"]
    head += ["cost without / with, nats", "largest drift", "s"]
    return table(head, map(_cells, rows))


def _cells(row: dict[str, Any]) -> list[str]:
    entries, n_data = row["discovered"]["conserved"], row["discovered"]["n_data"]
    costs = (n_data * row[f"{model}neg_elbo_per_datum"] for model in ("plain_", ""))
    return [
        row["model"],
        str(row["seed"]),
        f"{row['span']} / {row['known']}",
        cell(min(row["parallelness"], default=None), ".4f"),
        ", ".join(entry["name"] for entry in entries) or "none",
        " / ".join(f"{cost:,.0f}" for cost in costs),
        f"{100 * max(entry['drift'] for entry in entries):.1f} %" if entries else "none",
        f"{row['seconds']:.0f}",
    ]
