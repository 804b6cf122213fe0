"""Trajectories in; conserved quantities, their algebra and a simulator out."""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from symrazor.dynamics.config import TrainConfig
from symrazor.dynamics.conserved import Quadratic
from symrazor.dynamics.discovered import Discovered, described
from symrazor.dynamics.evaluate import mean_squared_error
from symrazor.dynamics.given import Given, given, split, units
from symrazor.dynamics.hamiltonian import HamiltonianNetwork
from symrazor.dynamics.journal import Journal
from symrazor.dynamics.judge import train_and_judge
from symrazor.dynamics.measures import FlowTimes
from symrazor.dynamics.symmetrised import SymmetrisedNetwork
from symrazor.dynamics.train import train
from symrazor.dynamics.trained import Record, Trained
from symrazor.dynamics.trajectories import Transitions, transitions
from symrazor.training.progress import share_bar

Progress = Callable[[float, str], None]
"""Called with the share that is done, and a line about it."""
STEPS = 20_000
"""Of each training at most, if there is time."""
RATE = 2e-2
"""Of learning, for networks of width 32 and 64."""
JUDGED = 0.85
"""Share of the time for finding the quantities; the rest for the network without."""


def discover(
    trajectories: Given,
    times: Tensor | Sequence[float] | np.ndarray | None = None,
    *,
    minutes: float = 5.0,
    seed: int = 0,
    progress: Progress | bool | None = None,
    positions: bool = False,
    device: str = "cpu",
    steps: int = STEPS,
    count: int | None = None,
    resume: str | Path | None = None,
) -> Discovered:
    """Learn conserved quantities and a simulator from trajectories alone.

    What a network without quantities nearly conserves is proposed, and the evidence judges
    (`train_and_judge`).

    Args:
        trajectories: states (q, p) [B, T, 2n], a tensor or array; NaN rows are missing states.
            Or what `read_trajectories` returned.
        times: [T] or [B, T]; not with `Trajectories`, which have their own.
        minutes: time to spend, about.
        seed: of weights, draws and the split.
        progress: called with a share and a line; or whether to show a bar, None for "if this is a
            terminal".
        positions: the states are positions; velocities by finite differences stand for momenta.
        device: where to train.
        steps: most steps of each training, if there is time left.
        count: most quantities to be proposed.
        resume: directory for checkpoints; a run that was stopped goes on from there.

    Raises:
        ValueError: trajectories that cannot be used; the row is named.
        KeyboardInterrupt: SIGINT; with `resume` a checkpoint was written.
        SystemExit: SIGTERM, with `resume`, and a checkpoint was written.
    """
    if not minutes > 0:
        raise ValueError(f"expected minutes > 0, got {minutes}")
    if count is not None and count < 1:
        raise ValueError(f"expected at least one quantity on offer, got count={count}")
    _check_device(device)
    if positions:
        warnings.warn(
            "momenta are finite differences of positions: right for unit masses only, and noisier",
            stacklevel=2,
        )
    data = given(trajectories, times, positions)
    own = units(data)
    kept, aside = split(own.scaled(data), seed)
    pairs, tests = transitions(kept), transitions(aside)
    config = _config(pairs, minutes, seed, device, steps)
    with _teller(progress) as tell:
        journal = None if resume is None else Journal(resume)
        model = _model(data.phase, count or _offered(data.phase), config.seed)
        learned, plain = _train_both(model, pairs, config, tell, journal)
    errors = {
        "learned": mean_squared_error(learned, tests),
        "plain": mean_squared_error(plain, tests),
    }
    noise = float(learned.noise.variance.detach())
    found = described(learned.model.conserved, own, aside, noise)
    return Discovered(learned, plain, own, *found, errors, len(pairs))


def _check_device(device: str) -> None:
    try:
        there = torch.device(device).type != "cuda" or torch.cuda.is_available()
    except RuntimeError:
        there = False
    if not there:
        raise ValueError(f"expected a device that is there, got {device!r}; do leave out device=")


@contextmanager
def _teller(progress: Progress | bool | None) -> Iterator[Progress]:
    """What to call with news."""
    if callable(progress):
        yield progress
        return
    with share_bar(progress) as bar:
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
    learned = train_and_judge(model, data, judged, _part(tell, 0.0, JUDGED), journal)
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


def _config(data: Transitions, minutes: float, seed: int, device: str, steps: int) -> TrainConfig:
    spread = float((data.y[:, 0] - data.x).square().mean())
    return TrainConfig(
        steps=steps,
        minutes=minutes,
        batch_size=200,
        draws=2,
        flows=16,
        lr=RATE,
        integrator="rk4" if float(data.gaps.max()) > 0.3 else "midpoint",
        noise=max(1e-6, 0.05 * spread),
        noise_kind="closed",
        burn_in=0.5,
        seed=seed,
        device=device,
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
