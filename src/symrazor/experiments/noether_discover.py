"""Conserved quantities that `dynamics.discover` finds in noisy simulated trajectories.

    python -m symrazor.experiments.noether_discover [--rows pendulum] [--minutes 2] [--json FILE]

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
from symrazor.experiments.noether_results import Row, cell, document, save

NAME = "noether-discover"
MINUTES = 2.0


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


def _cases() -> dict[str, Case]:
    return {
        "two-bodies": Case(nbody(2, 2), 80, 12, 0.4),
        "kepler": Case(kepler(), 60, 20, noise=1e-4),
        "anisotropic": Case(oscillators((1.0, math.sqrt(3))), 40, 12),
        "pendulum": Case(pendulum().with_normal_start(1.5, 1.0), 40, 10, 0.3),
    }


ROWS = tuple(_cases())


def metrics(found: Discovered, known: Algebra) -> Row:
    """Return all results of one discovery, compared with the true algebra."""
    row: Row = {
        "neg_elbo_per_datum": found.learned.bound["neg_elbo"],
        "test_mse": found.held_out["learned"],
        "plain_neg_elbo_per_datum": found.plain.bound["neg_elbo"],
        "plain_test_mse": found.held_out["plain"],
        "known": len(known),
        "span": len(found.conserved),
        "conserved": len(found.conserved),
        "singular_values": [entry["singular_value"] for entry in found.conserved],
        "parallelness": [],
        "recovered": [0.0] * len(known),
    }
    if found.conserved:
        A, b = (
            torch.tensor([entry[key] for entry in found.conserved], dtype=torch.float64)
            for key in ("matrix", "linear")
        )
        names = tuple(entry["name"] for entry in found.conserved)
        row["parallelness"] = analysis.parallelness(generators(A, b), known).tolist()
        learned = Algebra(names, A, b)
        row["recovered"] = analysis.parallelness(known.generators(), learned).tolist()
    discovered = found.to_dict()
    return row | {"seconds": discovered["seconds"], "discovered": discovered}


def run(options: noether.Options, rows: tuple[str, ...] = ROWS, minutes: float = MINUTES) -> str:
    """Run the experiment and return a markdown table.

    Args:
        options: of the experiment; `models` and `set` have no effect, `steps` is a maximum.
        rows: names of systems.
        minutes: for each system.

    Raises:
        ValueError: an unknown row.
    """
    cases, results = _cases(), []
    for name in rows:
        if name not in cases:
            raise ValueError(f"Unknown row {name!r}. Choose from {', '.join(ROWS)}.")
        case = cases[name]
        known = quadratic_invariants(case.system).algebra
        for seed in options.seed:
            data = simulate(case.system, case.count, case.steps, case.dt, seed=10_000 + seed)
            found = discover(
                data.with_noise(case.noise, seed=30_000 + seed),
                minutes=minutes / 10 if options.small else minutes,
                seed=seed,
                progress=False,
                device=options.place,
                steps=options.steps or DiscoverConfig.steps,
            )
            results.append({"model": name, "seed": seed} | metrics(found, known))
            save(options.json, document(NAME, results, options.small, options.place, top=None))
    return markdown(results)


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table of all runs."""
    lines = [
        "| system | seed | found / true | parallelness | names | cost without / with, nats "
        "| largest drift | s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        smallest = cell(min(row["parallelness"], default=None), ".4f")
        entries = row["discovered"]["conserved"]
        names = ", ".join(entry["name"] for entry in entries) or "none"
        drift = f"{100 * max(entry['drift'] for entry in entries):.1f} %" if entries else "none"
        without, with_quantities = (
            row["discovered"]["n_data"] * row[key]
            for key in ("plain_neg_elbo_per_datum", "neg_elbo_per_datum")
        )
        lines.append(
            f"| {row['model']} | {row['seed']} | {row['span']} / {row['known']} | {smallest} | "
            f"{names} | {without:,.0f} / {with_quantities:,.0f} | "
            f"{drift} | {row['seconds']:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    noether.main(
        NAME,
        run,
        {
            "--rows": {"nargs": "+", "default": list(ROWS), "help": "systems to run"},
            "--minutes": {"type": float, "default": MINUTES, "help": "minutes for each system"},
        },
    )
