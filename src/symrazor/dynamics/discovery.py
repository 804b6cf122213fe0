"""Trajectories in; conserved quantities, their algebra and a simulator out."""

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from symrazor.core.progress import fraction_bar
from symrazor.dynamics.config import DiscoverConfig, TrainConfig
from symrazor.dynamics.conserved import Quadratic
from symrazor.dynamics.evaluate import mean_squared_error
from symrazor.dynamics.hamiltonian import HamiltonianNetwork, SymmetrisedNetwork
from symrazor.dynamics.journal import Journal
from symrazor.dynamics.measures import FlowTimes
from symrazor.dynamics.result import Discovered, described
from symrazor.dynamics.selection import train_and_select
from symrazor.dynamics.trained import Record, Trained
from symrazor.dynamics.training import train
from symrazor.dynamics.trajectories import Transitions, transitions
from symrazor.dynamics.units import Given, given, spaced, split, stride, units

Progress = Callable[[float, str], None]
"""Called with the share that is done, and a line about it."""
RATE = 2e-2
"""Of learning, for networks of width 32 and 64."""
LONG, STEP = 3.0, 1.0
"""Longest time from one state to the next that is learned from, where states change by about 1 in
a unit of time, and longest step of the integrator on the way."""
JUDGED = 0.85
"""Share of the time for finding the quantities; the rest for the network without."""


def discover(
    trajectories: Given,
    times: Tensor | Sequence[float] | np.ndarray | None = None,
    config: DiscoverConfig | None = None,
    progress: Progress | bool | None = None,
    **changes: Any,
) -> Discovered:
    """Learn conserved quantities and a simulator from trajectories alone.

    What a network without quantities nearly conserves is proposed, and the evidence judges
    (`train_and_select`).

    Args:
        trajectories: states (q, p) [B, T, 2n], a tensor or array; NaN rows are missing states.
            Or what `read_trajectories` returned.
        times: [T] or [B, T]; not with `Trajectories`, which have their own.
        config: all options; single ones can be given by name, as in
            `discover(states, times, minutes=2, seed=1)`.
        progress: called with a share and a line; or whether to show a bar, None for "if this is a
            terminal".
        **changes: those single options, see `DiscoverConfig`.

    Raises:
        ValueError: options that cannot be, or trajectories that cannot be used; the row is named.
        KeyboardInterrupt: SIGINT; with `resume` a checkpoint was written.
        SystemExit: SIGTERM, with `resume`, and a checkpoint was written.
    """
    chosen = (config or DiscoverConfig()).change(**changes)
    if chosen.positions:
        warnings.warn(
            "momenta are finite differences of positions: right for unit masses only, and noisier",
            stacklevel=2,
        )
    data = given(trajectories, times, chosen.positions)
    every = stride(data)
    own = units(spaced(data, every))
    kept, aside = (spaced(part, every) for part in split(own.scaled(data), chosen.seed))
    pairs, tests = _near(transitions(kept)), _near(transitions(aside))
    with _teller(progress) as tell:
        journal = None if chosen.resume is None else Journal(chosen.resume)
        model = _model(data.phase, chosen.count or _offered(data.phase), chosen.seed)
        learned, plain = _train_both(model, pairs, _config(pairs, chosen), tell, journal)
    errors = {
        "learned": mean_squared_error(learned, tests),
        "plain": mean_squared_error(plain, tests),
    }
    found = described(learned.model.conserved, own, aside)
    return Discovered(learned, plain, own, *found, errors, len(pairs))


def _near(data: Transitions) -> Transitions:
    """Those that do not take too long to be followed: it would tell little and cost much."""
    use = data.gaps[:, 0] <= max(LONG, float(data.gaps.min()))
    return data.at(use.nonzero()[:, 0])


@contextmanager
def _teller(progress: Progress | bool | None) -> Iterator[Progress]:
    """What to call with news."""
    if callable(progress):
        yield progress
        return
    with fraction_bar(progress) as bar:
        yield bar


def _train_both(
    model: SymmetrisedNetwork,
    data: Transitions,
    config: TrainConfig,
    tell: Progress,
    journal: Journal | None,
) -> tuple[Trained, Trained]:
    """With the quantities that the evidence takes, and without for as many steps."""
    minutes = config.minutes or 0.0
    judged = config.change(minutes=JUDGED * minutes)
    learned = train_and_select(model, data, judged, _part(tell, 0.0, JUDGED), journal)
    there = learned if learned.model.conserved is None else learned.plain
    if there is not None:
        tell(1.0, "done")
        return learned, there
    own = learned.config.change(minutes=(1 - JUDGED) * minutes)
    network = SymmetrisedNetwork(copy.deepcopy(model.network))
    return learned, train(network, data, own, _part(tell, JUDGED, 1.0), journal)


def _offered(phase: int) -> int:
    """How many quantities may be proposed: more than u(n) or any number of bodies has."""
    all_of_them = phase * (phase + 1) // 2 + phase
    return min(all_of_them - 1, max(3, (phase // 2) ** 2 + 2))


def _config(data: Transitions, chosen: DiscoverConfig) -> TrainConfig:
    spread = float((data.y[:, 0] - data.x).square().mean())
    longest = float(data.gaps.max())
    return TrainConfig(
        steps=chosen.steps,
        minutes=chosen.minutes,
        batch_size=200,
        draws=2,
        flows=16,
        lr=RATE,
        integrator="rk4" if longest > 0.3 else "midpoint",
        substeps=math.ceil(longest / STEP),
        noise=max(1e-6, 0.05 * spread),
        noise_kind="closed",
        burn_in=0.5,
        seed=chosen.seed,
        device=chosen.device,
    )


def _model(phase: int, count: int, seed: int) -> SymmetrisedNetwork:
    generator = torch.Generator().manual_seed(seed)
    width = 32 if phase <= 4 else 64
    network = HamiltonianNetwork(phase, None, width, activation="elu", generator=generator)
    learned = Quadratic(phase, count, generator=generator)
    return SymmetrisedNetwork(network, learned, FlowTimes(count, "ball", "antithetic"))


def _part(tell: Progress, start: float, end: float) -> Callable[[Record], None]:
    def report(record: Record) -> None:
        line = f"step {record['step']:.0f}  -ELBO/n {record['neg_elbo']:.3f}"
        tell(start + (end - start) * record["share"], line)

    return report
