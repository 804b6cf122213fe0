"""Discover the conserved quantities of trajectories, and a simulator of them."""

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from symrazor.dynamics.config import DiscoverConfig, TrainConfig
from symrazor.dynamics.conserved import Quadratic
from symrazor.dynamics.hamiltonian import FlowTimes, HamiltonianNetwork, SymmetrisedNetwork
from symrazor.dynamics.journal import Journal
from symrazor.dynamics.result import Discovered, describe_quantities
from symrazor.dynamics.selection import train_and_select
from symrazor.dynamics.trained import Record, Trained, mean_squared_error
from symrazor.dynamics.training import train
from symrazor.dynamics.trajectories import Transitions, transitions
from symrazor.dynamics.units import (
    TrajectoryInput,
    as_trajectories,
    choose_stride,
    choose_units,
    interleave,
    split,
)
from symrazor.training.loop import fraction_bar

Progress = Callable[[float, str], None]
"""Called with the fraction done and a status line."""
LEARNING_RATE = 2e-2
"""For networks of width 32 and 64."""
MAX_GAP = 3.0
"""Longest time between two states to learn from, in units in which states change by about 1."""
MAX_INTEGRATOR_STEP = 1.0
"""Longest step of the integrator, in the same units."""
SELECTION_TIME_FRACTION = 0.85
"""Fraction of the time for selecting quantities; the rest is for the network without."""


def discover(
    trajectories: TrajectoryInput,
    times: Tensor | Sequence[float] | np.ndarray | None = None,
    config: DiscoverConfig | None = None,
    progress: Progress | bool | None = None,
    **changes: Any,
) -> Discovered:
    """Learn conserved quantities and a simulator from trajectories alone.

    Quantities that a network without symmetries nearly conserves are proposed, and the evidence
    selects among them (`train_and_select`).

    Args:
        trajectories: states (q, p) [B, T, 2n] as a tensor or array, with NaN for missing states, or
            the `Trajectories` of `read_trajectories`.
        times: [T] or [B, T]; leave out for `Trajectories`, which have their own.
        config: all options. Single options can be given by name, as in
            `discover(states, times, minutes=2, seed=1)`.
        progress: called with a fraction and a status line; or whether to show a progress bar, by
            default if the output is a terminal.
        **changes: single options of `DiscoverConfig`.

    Raises:
        ValueError: invalid options or trajectories; the message names the row.
        KeyboardInterrupt: SIGINT; with `resume`, after writing a checkpoint.
        SystemExit: SIGTERM with `resume`, after writing a checkpoint.
    """
    config = (config or DiscoverConfig()).change(**changes)
    if config.positions:
        warnings.warn(
            "momenta are finite differences of positions: exact for unit masses only, and noisier "
            "than measured momenta",
            stacklevel=2,
        )
    data = as_trajectories(trajectories, times, config.positions)
    stride = choose_stride(data)
    units = choose_units(interleave(data, stride))
    training, held_out = (
        interleave(part, stride) for part in split(units.to_scaled(data), config.seed)
    )
    train_set = _without_long_gaps(transitions(training))
    test_set = _without_long_gaps(transitions(held_out))
    with _progress_callback(progress) as report:
        journal = None if config.resume is None else Journal(config.resume)
        model = _model(data.phase, config.count or _default_count(data.phase), config.seed)
        options = _train_config(train_set, config)
        learned, plain = _train_both(model, train_set, options, report, journal)
    errors = {
        "learned": mean_squared_error(learned, test_set),
        "plain": mean_squared_error(plain, test_set),
    }
    described = describe_quantities(learned.model.conserved, units, held_out)
    return Discovered(learned, plain, units, *described, errors, len(train_set))


def _without_long_gaps(data: Transitions) -> Transitions:
    """Remove transitions over long times: costly to integrate, with little information."""
    use = data.gaps[:, 0] <= max(MAX_GAP, float(data.gaps.min()))
    return data.at(use.nonzero()[:, 0])


@contextmanager
def _progress_callback(progress: Progress | bool | None) -> Iterator[Progress]:
    if callable(progress):
        yield progress
        return
    with fraction_bar(progress) as bar:
        yield bar


def _train_both(
    model: SymmetrisedNetwork,
    data: Transitions,
    config: TrainConfig,
    report: Progress,
    journal: Journal | None,
) -> tuple[Trained, Trained]:
    """Train with the selected quantities, and without any for as many steps."""
    minutes = config.minutes or 0.0
    selection = config.change(minutes=SELECTION_TIME_FRACTION * minutes)
    stage = _stage(report, 0.0, SELECTION_TIME_FRACTION)
    learned = train_and_select(model, data, selection, stage, journal)
    plain = learned if learned.model.conserved is None else learned.plain
    if plain is not None:
        report(1.0, "done")
        return learned, plain
    comparison = learned.config.change(minutes=(1 - SELECTION_TIME_FRACTION) * minutes)
    network = SymmetrisedNetwork(copy.deepcopy(model.network))
    stage = _stage(report, SELECTION_TIME_FRACTION, 1.0)
    return learned, train(network, data, comparison, stage, journal)


def _default_count(phase: int) -> int:
    """Return a count of quantities above that of u(n) and of any number of bodies."""
    n_monomials = phase * (phase + 1) // 2 + phase
    return min(n_monomials - 1, max(3, (phase // 2) ** 2 + 2))


def _train_config(data: Transitions, config: DiscoverConfig) -> TrainConfig:
    step_variance = float((data.y[:, 0] - data.x).square().mean())
    longest = float(data.gaps.max())
    return TrainConfig(
        steps=config.steps,
        minutes=config.minutes,
        batch_size=200,
        draws=2,
        flows=16,
        lr=LEARNING_RATE,
        integrator="rk4" if longest > 0.3 else "midpoint",
        substeps=math.ceil(longest / MAX_INTEGRATOR_STEP),
        noise=max(1e-6, 0.05 * step_variance),
        noise_kind="closed",
        burn_in=0.5,
        seed=config.seed,
        device=config.device,
    )


def _model(phase: int, count: int, seed: int) -> SymmetrisedNetwork:
    generator = torch.Generator().manual_seed(seed)
    width = 32 if phase <= 4 else 64
    network = HamiltonianNetwork(phase, None, width, activation="elu", generator=generator)
    conserved = Quadratic(phase, count, generator=generator)
    return SymmetrisedNetwork(network, conserved, FlowTimes(count, "ball", "antithetic"))


def _stage(report: Progress, start: float, end: float) -> Callable[[Record], None]:
    """Return a callback that maps the progress of one training to [start, end]."""

    def report_record(record: Record) -> None:
        line = f"step {record['step']:.0f}  -ELBO/n {record['neg_elbo']:.3f}"
        report(start + (end - start) * record["share"], line)

    return report_record
