"""What `dynamics.discover` finds in simulated trajectories, from noisy states and nothing else.

    python -m symrazor.experiments.noether_discover [--rows pendulum] [--minutes 2] [--json FILE]

- two-bodies: in the plane; momenta, angular momentum and what follows, seven in all.
- kepler: angular momentum is the only quadratic one.
- anisotropic: two oscillators of different frequencies; their two energies.
- pendulum: nothing quadratic is conserved.

What is true is the null space of the Poisson bracket with the energy (`quadratic_invariants`).
`--small` has a tenth of the time.
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
    """Trajectories of a system.

    Args:
        system: that is simulated.
        count: of trajectories.
        steps: of each.
        dt: time between two states.
        noise: variance on all states.
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


def figures(found: Discovered, known: Algebra) -> Row:
    """All numbers of one discovery, the true algebra beside them."""
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
    told = found.to_dict()
    return row | {"seconds": told["seconds"], "discovered": told}


def run(options: noether.Options, rows: tuple[str, ...] = ROWS, minutes: float = MINUTES) -> str:
    """The table as markdown.

    Args:
        options: of the experiment; `models` and `set` are not used, `steps` are at most.
        rows: which systems.
        minutes: for each.

    Raises:
        ValueError: no such row.
    """
    cases, done = _cases(), []
    for name in rows:
        if name not in cases:
            raise ValueError(f"expected rows among {', '.join(ROWS)}, got {name!r}")
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
            done.append({"model": name, "seed": seed} | figures(found, known))
            save(options.json, document(NAME, done, options.small, options.place, top=None))
    return markdown(done)


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """A table of all runs."""
    lines = [
        "| system | seed | found / there are | parallelness | names | cost of none / taken, nats "
        "| largest drift | s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        worst = cell(min(row["parallelness"], default=None), ".4f")
        entries = row["discovered"]["conserved"]
        names = ", ".join(entry["name"] for entry in entries) or "none"
        drift = f"{100 * max(entry['drift'] for entry in entries):.1f} %" if entries else "none"
        plain, taken = (
            row["discovered"]["n_data"] * row[key]
            for key in ("plain_neg_elbo_per_datum", "neg_elbo_per_datum")
        )
        lines.append(
            f"| {row['model']} | {row['seed']} | {row['span']} / {row['known']} | {worst} | "
            f"{names} | {plain:,.0f} / {taken:,.0f} | "
            f"{drift} | {row['seconds']:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    noether.main(
        NAME,
        run,
        {
            "--rows": {"nargs": "+", "default": list(ROWS), "help": "some of these"},
            "--minutes": {"type": float, "default": MINUTES, "help": "for each system"},
        },
    )
