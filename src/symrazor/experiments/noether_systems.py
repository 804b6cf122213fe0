"""Learn the symmetries of simulated systems: oscillators, and bodies that attract each other.

The models are a plain Hamiltonian network, one that may select conserved quantities, and one with
the true group built in.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch

from symrazor.dynamics.algebra import euclidean, nbody_invariants, unitary
from symrazor.dynamics.config import TrainConfig
from symrazor.dynamics.systems import nbody, oscillators
from symrazor.dynamics.trajectories import simulate, transitions
from symrazor.experiments import noether

# One harmonic oscillator, from 28 transitions with noise on the targets, as in the talk: is the
# rotation of phase space learned? Up to three quantities may be selected; the oracle has SO(2).

PAPER_OSCILLATOR = (
    "Paper (prior variance 1 and another posterior: compare the order, not the values): test MSE "
    "0.005 hnn, 0.002 learned, 0.002 SO(2); -ELBO/N 3314.7, 3302.1, 3295.1.",
)


def oscillator(options: noether.TrainingOptions, seed: int) -> noether.Setting:
    """Return data and model sizes for seven trajectories of four steps."""
    config = TrainConfig(steps=400 if options.small else 1400, burn_in=0.5)
    return noether.simulated(oscillators(), unitary(1), config, seed, (7, 4), count=3)


def run_oscillator(options: noether.Options) -> str:
    """Find the rotation of an oscillator's phase space from 28 transitions (Noether's razor)."""
    threads = torch.get_num_threads()
    # The matrices are tiny: one thread is faster than several.
    torch.set_num_threads(1 if options.resolved_device == "cpu" else threads)
    try:
        return noether.run("noether-oscillator", oscillator, options, PAPER_OSCILLATOR)
    finally:
        torch.set_num_threads(threads)


# n equal oscillators: are exactly the n^2 conserved quantities of U(n) learned? Up to 30 quantities
# may be selected. The evidence should select n^2, all inside u(n).

SMALL_OSCILLATORS = TrainConfig(
    steps=2000, batch_size=100, draws=2, flows=16, conserved_lr=1e-2, late_flows=2, burn_in=0.4
)
OSCILLATORS = SMALL_OSCILLATORS.change(steps=3_000, batch_size=500, flows=32, lr=3e-3, record=200)
SINGLE_OSCILLATOR = OSCILLATORS.change(lr=1e-2)
"""One oscillator has a narrower network; learning rates scale with the inverse width."""
PAPER_OSCILLATORS = (
    "Paper (three oscillators): test MSE 2.141e-5 hnn, 9.94e-6 learned, 8.98e-6 U(n); "
    "-ELBO/N -6.77, -9.63, -9.94.",
)


@dataclass(frozen=True)
class OscillatorsOptions(noether.Options):
    """Options of the experiment.

    Args:
        small: two oscillators, up to 6 quantities and 600 transitions; minutes on two cores.
        n: numbers of oscillators; by default 3, or 2 for the small version.
    """

    n: tuple[int, ...] = ()


def n_oscillators(options: noether.Options, seed: int, n: int) -> noether.Setting:
    """Return data and model sizes for n oscillators."""
    config, width = (SINGLE_OSCILLATOR, 64) if n == 1 else (OSCILLATORS, 200)
    return noether.simulated(
        oscillators([1.0] * n),
        unitary(n),
        SMALL_OSCILLATORS if options.small else config,
        seed,
        (60, 10) if options.small else (200, 50),
        count=max(6, n * n + 2) if options.small else 30,
        draws="antithetic",
        width=32 if options.small else width,
    )


def run_n_oscillators(options: OscillatorsOptions) -> str:
    """Find the unitary group of n equal oscillators (Noether's razor)."""
    texts = []
    for n in options.n or ((2,) if options.small else (3,)):
        run_options, file = options, options.json
        if file is not None and len(options.n) > 1:
            run_options = replace(options, json=file.with_stem(f"{file.stem}-{n}"))
        setting = partial(n_oscillators, n=n)
        table = noether.run("noether-n-oscillators", setting, run_options, PAPER_OSCILLATORS)
        texts.append(f"n = {n}\n\n{table}")
    return "\n\n".join(texts)


# Three bodies in the plane: are momentum, angular momentum and their products learned? Seven
# quadratic quantities are conserved, and up to ten may be selected. The oracle averages over SE(2).
# Test trajectories start as in training with lower momenta ("test"), one unit away ("moved"), or
# three times as far apart ("wider").

SMALL_BODIES = TrainConfig(
    steps=1500, batch_size=200, draws=2, flows=16, integrator="rk4", lr=5e-3, burn_in=0.5
)
BODIES = SMALL_BODIES.change(
    steps=4_000, batch_size=500, lr=3e-3, conserved_lr=1e-2, burn_in=0.4, record=200
)
PAPER_BODIES = (
    "Paper (Euler steps of 1.0; here 0.5: compare the ratios). "
    "Test MSE 0.0016 hnn, 0.0006 learned, 0.0006 SE(2); moved 0.0035, 0.0004, 0.0006; "
    "-ELBO/N -9.52, -12.81, -11.32.",
)
TEST_STARTS = {"test": (1.0, 0.0), "moved": (1.0, 1.0), "wider": (3.0, 0.0)}
"""Name -> scale of the positions, and shift."""


@dataclass(frozen=True)
class BodiesOptions(noether.Options):
    """Options of the experiment.

    Args:
        small: a narrow network and a fifth of the data; minutes on two cores.
        noise: variance of the noise on the targets; 0.001 in the paper.
    """

    noise: float = noether.NOISE


def bodies(options: BodiesOptions, seed: int) -> noether.Setting:
    """Return data and model sizes."""
    system, dt = nbody(3, 2), 0.5
    train = simulate(system, 100 if options.small else 500, 20, dt, seed=10_000 + seed)
    tests = {}
    for number, (name, (scale, shift)) in enumerate(TEST_STARTS.items()):
        test_system = system.with_normal_start(scale, 0.2, shift)
        tests[name] = simulate(test_system, 100, 20, dt, seed=20_000 + 1_000 * number + seed)
    config = SMALL_BODIES if options.small else BODIES
    return noether.Setting(
        transitions(train, options.noise, seed=30_000 + seed),
        {name: transitions(data) for name, data in tests.items()},
        nbody_invariants(3, 2),
        euclidean(3, 2),
        tests["test"],
        config.change(noise=options.noise),
        count=10,
        draws="antithetic",
        width=64 if options.small else 128,
        energy=system.energy,
    )


def run_bodies(options: BodiesOptions) -> str:
    """Find the invariants of three bodies in the plane (Noether's razor)."""
    return noether.run("noether-nbody", bodies, options, PAPER_BODIES)
