"""A harmonic oscillator from 28 transitions: is the rotation of phase space learned?

    python -m symrazor.experiments.noether_oscillator [--seed 0 1 2 3 4] [--json FILE]

The data are seven trajectories of four steps with noise of variance 0.001 on the targets, as in
the talk. The models are a plain Hamiltonian network, one that may select up to three conserved
quantities, and one with SO(2) built in.
"""

import torch

from symrazor.dynamics.algebra import unitary
from symrazor.dynamics.config import TrainConfig
from symrazor.dynamics.systems import oscillators
from symrazor.dynamics.trajectories import simulate, transitions
from symrazor.experiments import noether

NAME = "noether-oscillator"
NOISE = 1e-3
PAPER = (
    "Paper (prior variance 1 and another posterior: compare the order, not the values): test MSE "
    "0.005 hnn, 0.002 learned, 0.002 SO(2); -ELBO/N 3314.7, 3302.1, 3295.1.",
)


def setting(options: noether.Options, seed: int) -> noether.Setting:
    """Return the data and model sizes."""
    system = oscillators()
    train = simulate(system, count=7, steps=4, dt=0.2, seed=10_000 + seed)
    test = simulate(system, count=100, steps=20, dt=0.2, seed=20_000 + seed)
    known = unitary(1)
    return noether.Setting(
        transitions(train, NOISE, seed=30_000 + seed),
        {"test": transitions(test)},
        known,
        known,
        test,
        TrainConfig(steps=400 if options.small else 1400, noise=NOISE, burn_in=0.5),
        count=3,
        measure="ball",
        energy=system.energy,
    )


def run(options: noether.Options) -> str:
    """Run the experiment and return a markdown table."""
    threads = torch.get_num_threads()
    # The matrices are tiny: one thread is faster than several.
    torch.set_num_threads(1 if options.place == "cpu" else threads)
    try:
        return noether.run(NAME, setting, options, PAPER)
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    noether.main(NAME, run)
