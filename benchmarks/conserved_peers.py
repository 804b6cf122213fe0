"""Errors of rollouts over 100 steps, against PySINDy and a plain Hamiltonian network.

Needs PySINDy, which symrazor does not depend on (`pip install pysindy` in .venv-peers):

    python benchmarks/conserved_peers.py --json benchmarks/results/conserved-peers.json
"""

import argparse
import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pysindy
import torch
from torch import Tensor

from symrazor.bench.conserved import CHECK_SEED, ROLLOUT_STEPS, ROLLOUTS, with_relative_noise
from symrazor.bench.conserved_systems import Case, cases
from symrazor.dynamics.config import TrainConfig
from symrazor.dynamics.conserving import ConservingSimulator
from symrazor.dynamics.discovery import choose_units
from symrazor.dynamics.hamiltonian import HamiltonianNetwork, SymmetrisedNetwork
from symrazor.dynamics.invariants import find_conserved
from symrazor.dynamics.mechanics import rk4
from symrazor.dynamics.network_result import ScaledSimulator
from symrazor.dynamics.noise import noise_estimate
from symrazor.dynamics.rollouts import Simulate, baselines, compare_rollouts
from symrazor.dynamics.trained import Simulator
from symrazor.dynamics.training import train
from symrazor.dynamics.trajectories import Trajectories, observed_states, split, transitions

SYSTEMS = ("pendulum", "Duffing", "isotropic oscillator", "Lotka-Volterra", "rigid body", "Lorenz")
"""Of the development half."""
HAMILTONIAN = ("pendulum", "Duffing", "isotropic oscillator")
"""Systems in canonical coordinates, which a Hamiltonian network can represent."""
NOISE, SEED = 0.02, 0
SUBSTEPS = 4
THRESHOLD = 0.05
"""Coefficients below this value are removed by PySINDy; its default of 0.1 removes true terms."""


def sindy(data: Trajectories, library: object) -> Simulate:
    """Return a simulator of PySINDy's equations, with its smoothed finite differences."""
    model = pysindy.SINDy(
        optimizer=pysindy.STLSQ(threshold=THRESHOLD),
        feature_library=library,
        differentiation_method=pysindy.SmoothedFiniteDifference(),
    )
    model.fit(list(data.states.numpy()), t=float(data.times[0, 1] - data.times[0, 0]))

    def field(x: Tensor) -> Tensor:
        bounded = x.nan_to_num(0.0).clamp(-1e6, 1e6)
        return torch.as_tensor(model.predict(bounded.numpy()))

    def simulate(x: Tensor, t: float) -> Tensor:
        for _ in range(SUBSTEPS):
            x = rk4(field, x, t / SUBSTEPS)
        return x

    return simulate


def hamiltonian_network(data: Trajectories, steps: int) -> Simulate:
    """Return a trained Hamiltonian network without conserved quantities."""
    units = choose_units(data)
    generator = torch.Generator().manual_seed(SEED)
    network = HamiltonianNetwork(data.phase, None, 32, activation="elu", generator=generator)
    config = TrainConfig(
        steps=steps, batch_size=200, draws=2, lr=2e-2, integrator="rk4", noise_kind="closed"
    )
    trained = train(SymmetrisedNetwork(network), transitions(units.to_scaled(data)), config)
    return ScaledSimulator(Simulator(trained), units)


def errors(case: Case, steps: int) -> dict[str, float]:
    """Return the error of each simulator, relative to the spread of the coordinates."""
    data = with_relative_noise(case.simulate(SEED), NOISE, SEED)
    findings = find_conserved(data, seed=SEED)
    best, x = findings.fields.best, observed_states(data)
    assert best is not None
    deviation = noise_estimate(data).deviation(x)
    training = split(data, SEED)[0]
    own = ConservingSimulator(best.fit.field, findings.quantities, case.dt / best.substeps, x)
    simulators: dict[str, Simulate] = {"symrazor": own, **baselines(training, deviation)}
    libraries: dict[str, Callable[[], object]] = {
        "PySINDy, cubic": lambda: pysindy.PolynomialLibrary(degree=3),
        "PySINDy, quadratic and Fourier": lambda: (
            pysindy.PolynomialLibrary(degree=2) + pysindy.FourierLibrary(n_frequencies=1)
        ),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, library in libraries.items():
            simulators[name] = sindy(training, library())
    if case.name in HAMILTONIAN:
        simulators["Hamiltonian network"] = hamiltonian_network(training, steps)
    clean = replace(case, shape=(ROLLOUTS, ROLLOUT_STEPS + 1)).simulate(SEED + CHECK_SEED)
    rollouts = compare_rollouts(simulators, clean, deviation)
    return {name: rollouts.mean(name) for name in simulators}


def main(file: Path, steps: int) -> None:
    """Compare the systems one by one; write the table after each."""
    names = ["symrazor", "linear least squares", "sparse regression", "PySINDy, cubic"]
    names += ["PySINDy, quadratic and Fourier", "Hamiltonian network"]
    rows: list[list[object]] = []
    for system in SYSTEMS:
        found = errors(next(case for case in cases() if case.name == system), steps)
        others = [value for name, value in found.items() if name != "symrazor"]
        cells = [f"{found[name]:.3f}" if name in found else None for name in names]
        rows.append([system, *cells, round(found["symrazor"] / min(others), 2)])
        print(rows[-1], flush=True)
        result = {
            "title": "Rollouts against PySINDy and a Hamiltonian network",
            "question": "Is the simulator as accurate as those of others?",
            "command": [
                "python benchmarks/conserved_peers.py "
                "--json benchmarks/results/conserved-peers.json"
            ],
            "machine": "one core, one thread, shared with other jobs",
            "goal": "At most 1.1 times the error of the best other simulator.",
            "version": {"pysindy": pysindy.__version__},
            "columns": ["system", *names, "symrazor / best other"],
            "rows": rows,
            "notes": [
                "Systems of the development half, one seed, noise of 2 % of the spread. Root mean "
                "square error over 100 steps from noise-free states that start elsewhere, "
                "relative to the spread of the coordinates.",
                "PySINDy: sequentially thresholded least squares with a threshold of "
                f"{THRESHOLD:g} and smoothed finite differences. The Hamiltonian network has no "
                f"conserved quantities and was trained for {steps} steps; it needs canonical "
                "coordinates.",
            ],
        }
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=600, help="of the Hamiltonian network")
    arguments = parser.parse_args()
    main(arguments.json, arguments.steps)
