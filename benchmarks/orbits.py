"""Conserved quantities of satellites and planets, from measured orbits.

Needs sgp4, jplephem and de421, which symrazor does not depend on:

    pip install sgp4 jplephem de421
    python benchmarks/orbits.py --json benchmarks/results/orbits.json

- **Satellites**: the elements of near-Earth satellites that sgp4 is verified with (SGP4-VER.TLE),
  propagated for three days in one-day arcs. The Earth is not a sphere: orbital planes turn about
  its axis, so only the component of the angular momentum along this axis is conserved.
- **Planets**: heliocentric positions of the inner planets from the ephemeris DE421 of the Jet
  Propulsion Laboratory.

Elements and ephemerides are smooth, so that noise of the accuracy of observations is added: 1 km
and 1 m/s for satellites (the accuracy of such elements), and three parts in ten thousand of an
astronomical unit for planets, the one arc minute of Tycho Brahe. Velocities get the same fraction.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import de421
import numpy as np
import sgp4
import torch
from jplephem.ephem import Ephemeris
from sgp4.api import Satrec
from torch import Tensor

from symrazor.dynamics.eigen_search import tested_quantities
from symrazor.dynamics.field_invariants import Combinations
from symrazor.dynamics.findings import Findings, Quantity
from symrazor.dynamics.independence import is_independent
from symrazor.dynamics.invariants import find_conserved
from symrazor.dynamics.libraries import libraries_for
from symrazor.dynamics.noise import noise_estimate
from symrazor.dynamics.samples import sample_states
from symrazor.dynamics.trajectories import Trajectories, observed_states

NAMES = ("x", "y", "z", "u", "v", "w")
MAX_DRAG = 1e-3
"""Largest drag term (B*) of a satellite that is used: stronger drag changes all quantities."""
MINUTES, DAYS, ARC = 4.0, 3, 360
"""Time step, days, and states in one day, of satellites."""
SATELLITE_NOISE = (1.0, 1e-3)
"""Noise of positions in km and of velocities in km/s."""
GRAVITY = 398600.8
"""Gravity of the Earth in km^3/s^2, as in sgp4."""
PLANETS = {"mercury": 4.0, "venus": 10.0, "earthmoon": 16.0, "mars": 30.0}
"""Days between two states."""
PLANET_STATES, PLANET_ARCS, PLANET_NOISE = 60, 3, 3e-4
ASTRONOMICAL_UNIT, FIRST_DAY = 149597870.7, 2451545.0
SUN = 0.01720209895**2
"""Gravity of the Sun in astronomical units and days."""


def satellites() -> tuple[Trajectories, list[str]]:
    """Return noise-free arcs of near-Earth satellites, times in seconds, and their numbers."""
    text = (Path(sgp4.__file__).parent / "SGP4-VER.TLE").read_text()
    lines = [line[:69] for line in text.splitlines() if line[:2] in ("1 ", "2 ")]
    minutes = MINUTES * np.arange(DAYS * ARC)
    arcs, numbers = [], []
    for first, second in dict(zip(lines[::2], lines[1::2], strict=True)).items():
        satellite = Satrec.twoline2rv(first, second)
        if satellite.method != "n" or abs(satellite.bstar) > MAX_DRAG:
            continue
        day = np.full(len(minutes), satellite.jdsatepoch)
        error, r, v = satellite.sgp4_array(day, satellite.jdsatepochF + minutes / 1440)
        if not error.any():
            arcs += np.split(np.concatenate([r, v], 1), DAYS)
            numbers.append(satellite.satnum_str)
    return Trajectories.of(torch.tensor(np.stack(arcs)), torch.tensor(60 * minutes[:ARC])), numbers


def planets() -> Trajectories:
    """Return noise-free arcs of the inner planets, in astronomical units and days."""
    ephemeris, arcs, times = Ephemeris(de421), [], []
    for name, step in PLANETS.items():
        for arc in range(PLANET_ARCS):
            days = step * np.arange(PLANET_STATES)
            date = FIRST_DAY - (arc + 1) * step * PLANET_STATES + days
            planet, sun = (ephemeris.position_and_velocity(body, date) for body in (name, "sun"))
            arcs.append(np.concatenate([(a - b).T for a, b in zip(planet, sun, strict=True)], 1))
            times.append(days)
    return Trajectories.of(
        torch.tensor(np.stack(arcs)) / ASTRONOMICAL_UNIT, torch.tensor(np.stack(times))
    )


def with_noise(data: Trajectories, position: float, velocity: float) -> Trajectories:
    """Add normal noise with these standard deviations."""
    z = torch.randn(data.states.shape, generator=torch.Generator().manual_seed(0)).double()
    size = torch.tensor([position] * 3 + [velocity] * 3, dtype=torch.float64)
    return Trajectories(data.states + size * z, data.times, data.observed)


def known_quantities(data: Trajectories, gravity: float) -> dict[str, Quantity]:
    """Return components of the angular momentum and the two-body energy, with their tests."""
    libraries = libraries_for(observed_states(data), NAMES)
    library = next(lib for lib in libraries if "1/r" in lib.names)
    terms = {
        "L_x": {"y w": 1.0, "z v": -1.0},
        "L_y": {"z u": 1.0, "x w": -1.0},
        "L_z": {"x v": 1.0, "y u": -1.0},
        "energy": {"u^2": 0.5, "v^2": 0.5, "w^2": 0.5, "1/r": -gravity},
    }
    vectors = torch.zeros(len(terms), len(library), dtype=torch.float64)
    by_factors = {tuple(sorted(name.split())): k for k, name in enumerate(library.names)}
    for row, combination in zip(vectors, terms.values(), strict=True):
        for name, c in combination.items():
            row[by_factors[tuple(sorted(name.split()))]] = c
    given = Combinations(library, vectors, torch.zeros_like(vectors), torch.zeros(len(terms)))
    sample = sample_states(data, noise_estimate(data), seed=0)
    return dict(zip(terms, tested_quantities(given, sample, 0.01), strict=True))


def rows_of(
    name: str, data: Trajectories, gravity: float, findings: Findings
) -> list[dict[str, Any]]:
    """Return whether each known quantity was found, and its own test."""
    x = observed_states(data)
    return [
        {
            "data": name,
            "quantity": quantity_name,
            "found": not is_independent(quantity, findings.quantities, x, exact=True),
            "p-value of its test": f"{quantity.p_value:.2g}",
            "variance along trajectories, %": f"{100 * max(0.0, quantity.variation):.2g}",
        }
        for quantity_name, quantity in known_quantities(data, gravity).items()
    ]


def relative_change(data: Trajectories, arcs: int) -> dict[str, list[float]]:
    """Return components of the angular momentum along the first orbit, relative to its size."""
    states: Tensor = data.states[:arcs].flatten(0, 1)
    momentum = torch.linalg.cross(states[:, :3], states[:, 3:])
    change = (momentum - momentum[0]) / momentum[0].norm()
    shown = change[:: max(1, len(change) // 120)].T.tolist()
    return {
        f"L_{axis}": [round(value, 5) for value in values]
        for axis, values in zip("xyz", shown, strict=True)
    }


def main(file: Path) -> None:
    """Search both data sets and write the results."""
    clean, numbers = satellites()
    orbits = with_noise(clean, *SATELLITE_NOISE)
    rows, findings, seconds = [], {}, {}
    data = {"satellites": (orbits, GRAVITY)}
    speed = float(planets().states[..., 3:].norm(dim=-1).mean())
    data["planets"] = (with_noise(planets(), PLANET_NOISE, PLANET_NOISE * speed), SUN)
    for name, (trajectories, gravity) in data.items():
        started = time.process_time()
        findings[name] = find_conserved(trajectories, NAMES)
        seconds[name] = time.process_time() - started
        rows += rows_of(name, trajectories, gravity, findings[name])
        print(name, [quantity.estimate for quantity in findings[name].quantities])
    result = {
        "title": "Satellites and planets",
        "question": "What is conserved along measured orbits?",
        "command": ["python benchmarks/orbits.py --json benchmarks/results/orbits.json"],
        "machine": "one core, one thread, shared with other jobs",
        "goal": "Satellites: the angular momentum about the Earth's axis, and neither of the other "
        "components. Planets: angular momentum and energy.",
        "columns": list(rows[0]),
        "rows": [["yes" if v is True else v or "no" for v in row.values()] for row in rows],
        "summary": {
            **{f"{name} quantities": len(found.quantities) for name, found in findings.items()},
            **{f"{name} undecided": len(found.undecided) for name, found in findings.items()},
            **{f"{name} seconds": round(value) for name, value in seconds.items()},
            "satellites estimate": "; ".join(q.estimate for q in findings["satellites"].quantities),
            "satellites": len(numbers),
            "satellite arcs": len(orbits),
            "planet arcs": len(data["planets"][0]),
        },
        "data": {
            "hours": [round(h, 2) for h in _hours(len(relative_change(clean, DAYS)["L_x"]))],
            **relative_change(clean, DAYS),
        },
        "notes": [
            f"Satellites {', '.join(numbers)}: near-Earth elements of sgp4's verification set with "
            f"a drag term below {MAX_DRAG:g}, in {DAYS} arcs of one day with a state every "
            f"{MINUTES:g} minutes. Noise: 1 km and 1 m/s.",
            "Planets: Mercury, Venus, Earth with Moon, and Mars from DE421, in three arcs of "
            f"{PLANET_STATES} states each. Noise: three parts in ten thousand.",
            "A quantity counts as found if it is a function of those that `find_conserved` "
            "reports. The test of a quantity that is not conserved has a p-value near zero.",
        ],
    }
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _hours(count: int) -> list[float]:
    states = DAYS * ARC
    step = max(1, states // 120) * MINUTES / 60
    return [step * k for k in range(count)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    main(parser.parse_args().json)
