"""n equal oscillators: are exactly the n^2 conserved quantities of U(n) learned?

    python -m symrazor.experiments.noether_n_oscillators [--n 3] [--device cuda] [--json FILE]

Up to 30 quantities may be selected. The evidence should select n^2, all inside u(n). `--small` is
n = 2 with up to 6 quantities and 600 transitions.
"""

from dataclasses import replace
from functools import partial

from symrazor.dynamics.algebra import unitary
from symrazor.dynamics.config import TrainConfig
from symrazor.dynamics.systems import oscillators
from symrazor.dynamics.trajectories import simulate, transitions
from symrazor.experiments import noether

NAME = "noether-n-oscillators"
NOISE = 1e-3
SMALL = TrainConfig(
    steps=2000,
    batch_size=100,
    draws=2,
    flows=16,
    conserved_lr=1e-2,
    late_flows=2,
    noise=NOISE,
    burn_in=0.4,
)
FULL = TrainConfig(
    steps=3_000,
    batch_size=500,
    draws=2,
    flows=32,
    late_flows=2,
    lr=3e-3,
    conserved_lr=1e-2,
    noise=NOISE,
    burn_in=0.4,
    record=200,
)
SINGLE = FULL.change(lr=1e-2)
"""One oscillator has a narrower network; learning rates scale with the inverse width."""
HELP = "numbers of oscillators"
PAPER = (
    "Paper (three oscillators): test MSE 2.141e-5 hnn, 9.94e-6 learned, 8.98e-6 U(n); "
    "-ELBO/N -6.77, -9.63, -9.94.",
)


def setting(options: noether.Options, seed: int, n: int) -> noether.Setting:
    """Return the data and model sizes for n oscillators."""
    system = oscillators([1.0] * n)
    count, steps = (60, 10) if options.small else (200, 50)
    train = simulate(system, count, steps, dt=0.2, seed=10_000 + seed)
    test = simulate(system, 100, 20, dt=0.2, seed=20_000 + seed)
    known = unitary(n)
    config, width = (SINGLE, 64) if n == 1 else (FULL, 200)
    return noether.Setting(
        transitions(train, NOISE, seed=30_000 + seed),
        {"test": transitions(test)},
        known,
        known,
        test,
        SMALL if options.small else config,
        count=max(6, n * n + 2) if options.small else 30,
        measure="ball",
        draws="antithetic",
        width=32 if options.small else width,
        energy=system.energy,
    )


def run(options: noether.Options, n: tuple[int, ...] = ()) -> str:
    """Run the experiment and return a markdown table for each number of oscillators.

    Args:
        options: of the experiment.
        n: numbers of oscillators; by default 3, or 2 for the small version.
    """
    texts = []
    for oscillator_count in n or ((2,) if options.small else (3,)):
        run_options = options
        if options.json is not None and len(n) > 1:
            file = options.json
            run_options = replace(options, json=file.with_stem(f"{file.stem}-{oscillator_count}"))
        table = noether.run(NAME, partial(setting, n=oscillator_count), run_options, PAPER)
        texts.append(f"n = {oscillator_count}\n\n{table}")
    return "\n\n".join(texts)


if __name__ == "__main__":
    noether.main(NAME, run, {"--n": {"type": int, "nargs": "+", "default": [], "help": HELP}})
