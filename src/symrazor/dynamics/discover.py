"""Trajectories in; conserved quantities, their algebra and a simulator out."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.dynamics import analysis
from symrazor.dynamics.algebra import quantities
from symrazor.dynamics.config import TrainConfig
from symrazor.dynamics.conserved import Quadratic
from symrazor.dynamics.evaluate import Simulator, mean_squared_error
from symrazor.dynamics.given import Given, given, pace, split, units
from symrazor.dynamics.hamiltonian import HamiltonianNetwork
from symrazor.dynamics.measures import FlowTimes
from symrazor.dynamics.naming import formula, name_of
from symrazor.dynamics.prune import train_and_prune
from symrazor.dynamics.start import informed_start
from symrazor.dynamics.symmetrised import SymmetrisedNetwork
from symrazor.dynamics.train import Trained, train
from symrazor.dynamics.trajectories import Trajectories, Transitions, transitions
from symrazor.training.progress import share_bar

Progress = Callable[[float, str], None]
"""Called with the share that is done, and a line about it."""


class ScaledSimulator(nn.Module):
    """A simulator in the user's own units: `simulator(state, t)`.

    Args:
        simulator: in scaled units.
        scale: [2n], the user's unit of every entry.
        clock: the user's unit of time.
    """

    scale: Tensor

    def __init__(self, simulator: Simulator, scale: Tensor, clock: float = 1.0) -> None:
        """Hold all."""
        super().__init__()
        self.simulator, self.clock = simulator, clock
        self.register_buffer("scale", scale)

    def forward(self, state: Float[Tensor, "*b d"], t: float) -> Float[Tensor, "*b d"]:
        """States after a time t."""
        scale = self.scale.to(state)
        inner = (state / scale).to(self.simulator.hamiltonian.energy.weights[0])
        moved: Tensor = self.simulator(inner, t / self.clock)
        return moved.to(state) * scale


@dataclass
class Discovered:
    """What was found in trajectories.

    Args:
        learned: the model with the quantities that were learned, in scaled units.
        plain: the model without.
        scale: [2n], the unit of each entry of a state.
        clock: the unit of time.
        conserved: one entry for each learned direction that holds on the trajectories set aside:
            name, formula, singular value, parallelness, drift, matrix and linear part in the
            user's units.
        closure: how far the learned directions are from an algebra.
        held_out: mean squared one-step errors of both models on trajectories set aside, scaled.
        n_data: transitions used.
    """

    learned: Trained
    plain: Trained
    scale: Tensor
    clock: float
    conserved: list[dict[str, Any]]
    closure: float
    held_out: dict[str, float]
    n_data: int

    @property
    def margin(self) -> float:
        """Nats by which the evidence bound with the quantities exceeds that without."""
        gain = self.plain.bound["neg_elbo"] - self.learned.bound["neg_elbo"]
        return gain * self.n_data

    @property
    def verdict(self) -> str:
        """In words."""
        if not self.conserved:
            return (
                "No quadratic conserved quantity was found. "
                f"One-step error on held-out trajectories: {self.held_out['plain']:.2g} (scaled)."
            )
        names = ", ".join(entry["name"] for entry in self.conserved)
        many = "quantities are" if len(self.conserved) > 1 else "quantity is"
        worst = max(entry["drift"] for entry in self.conserved)
        text = f"{len(self.conserved)} {many} conserved: {names}. "
        text += f"Evidence bound: {self.margin:+,.0f} nats against none. "
        text += f"Largest drift on held-out trajectories: {100 * worst:.1f} %."
        if self.margin < 0:
            text += " But the evidence without them is higher: do not trust them."
        elif worst > 0.1:
            text += " That is a lot: treat the last of them with care."
        return text

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        return {
            "verdict": self.verdict,
            "conserved": self.conserved,
            "closure": self.closure,
            "evidence": {"learned": self.learned.bound, "plain": self.plain.bound}
            | {"margin": self.margin},
            "held_out_mse": self.held_out,
            "scale": self.scale.tolist(),
            "clock": self.clock,
            "noise": float(self.learned.noise.variance.detach()),
            "n_data": self.n_data,
            "seconds": self.learned.seconds + self.plain.seconds,
            "skipped_steps": self.learned.skipped + self.plain.skipped,
            "history": {"learned": self.learned.history, "plain": self.plain.history},
        }

    def simulator(self) -> nn.Module:
        """A plain module: state and time in, state out, in the user's units."""
        return ScaledSimulator(Simulator(self.learned), self.scale, self.clock)


def discover(
    trajectories: Given,
    times: Tensor | Sequence[float] | np.ndarray | None = None,
    *,
    minutes: float = 5.0,
    seed: int = 0,
    progress: Progress | bool | None = None,
    positions: bool = False,
    device: str = "cpu",
    steps: int = 20_000,
    count: int | None = None,
) -> Discovered:
    """Learn conserved quantities and a simulator from trajectories alone.

    Args:
        trajectories: states (q, p) [B, T, 2n], a tensor or array; NaN rows are missing states.
            Or what `read_trajectories` returned.
        times: [T] or [B, T]; not with `Trajectories`, which have their own.
        minutes: time to spend; two thirds with quantities to learn, one third without.
        seed: of weights, draws and the split.
        progress: called with a share and a line; or whether to show a bar, None for "if this is a
            terminal".
        positions: the states are positions; velocities by finite differences stand for momenta.
        device: where to train.
        steps: most steps of each training, if there is time left.
        count: quantities on offer.

    Raises:
        ValueError: trajectories that cannot be used; the row is named.
    """
    if not minutes > 0:
        raise ValueError(f"expected minutes > 0, got {minutes}")
    if count is not None and count < 1:
        raise ValueError(f"expected at least one quantity on offer, got count={count}")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"expected a device that is there, got {device!r}; do leave out device=")
    if positions:
        warnings.warn(
            "momenta are finite differences of positions: right for unit masses only, and noisier",
            stacklevel=2,
        )
    data = given(trajectories, times, positions)
    scale = units(data)
    clock = pace(data, scale)
    scaled = Trajectories(data.states / scale, data.times / clock, data.observed)
    kept, aside = split(scaled, seed)
    pairs, tests = transitions(kept), transitions(aside)
    config = _config(pairs, minutes, seed, device, steps)
    with _teller(progress) as tell:
        plain, learned = _train_both(data.phase, count, pairs, config, tell)
    errors = {
        "learned": mean_squared_error(learned, tests),
        "plain": mean_squared_error(plain, tests),
    }
    entries, outside = _describe(learned, scale, aside)
    return Discovered(learned, plain, scale, clock, entries, outside, errors, len(pairs))


@contextmanager
def _teller(progress: Progress | bool | None) -> Iterator[Progress]:
    """What to call with news."""
    if callable(progress):
        yield progress
        return
    with share_bar(progress) as bar:
        yield bar


def _train_both(
    phase: int, count: int | None, data: Transitions, config: TrainConfig, tell: Progress
) -> tuple[Trained, Trained]:
    """Without quantities in a third of the time, with quantities in the rest."""
    minutes = config.minutes or math.inf
    third = config.change(minutes=minutes / 3)
    plain = train(_model(phase, 0, config.seed), data, third, _part(tell, 0.0, 1 / 3))
    model = _model(phase, count or _offered(phase), config.seed)
    model.network.load_state_dict(plain.model.network.state_dict())
    informed_start(model.to(config.device), data.x)
    rest = config.change(minutes=2 * minutes / 3, burn_in=0.0)
    return plain, train_and_prune(model, data, rest, _part(tell, 1 / 3, 1.0))


def _offered(phase: int) -> int:
    """How many quantities to offer: more than u(n) or any number of bodies needs, up to 16."""
    all_of_them = phase * (phase + 1) // 2 + phase
    return min(all_of_them, max(3, (phase // 2) ** 2 + 2), 16)


def _config(data: Transitions, minutes: float, seed: int, device: str, steps: int) -> TrainConfig:
    spread = float((data.y[:, 0] - data.x).square().mean())
    return TrainConfig(
        steps=steps,
        minutes=minutes,
        batch_size=200,
        draws=2,
        flows=16,
        integrator="rk4" if float(data.gaps.max()) > 0.3 else "midpoint",
        noise=max(1e-6, 0.05 * spread),
        noise_kind="closed",
        burn_in=0.2,
        seed=seed,
        device=device,
    )


def _model(phase: int, count: int, seed: int) -> SymmetrisedNetwork:
    generator = torch.Generator().manual_seed(seed)
    width = 32 if phase <= 4 else 64
    network = HamiltonianNetwork(phase, None, width, activation="elu", generator=generator)
    if count == 0:
        return SymmetrisedNetwork(network)
    learned = Quadratic(phase, count, generator=generator)
    return SymmetrisedNetwork(network, learned, FlowTimes(count, "ball", "antithetic"))


def _part(tell: Progress, start: float, end: float) -> Callable[[dict[str, float]], None]:
    def report(record: dict[str, float]) -> None:
        line = f"step {record['step']:.0f}  -ELBO/n {record['neg_elbo']:.3f}"
        tell(start + (end - start) * record["share"], line)

    return report


def _describe(
    trained: Trained, scale: Tensor, aside: Trajectories
) -> tuple[list[dict[str, Any]], float]:
    conserved = trained.model.conserved
    if not isinstance(conserved, Quadratic):
        return [], 0.0
    found = analysis.spectrum(conserved)
    drifts = analysis.drift(found.learned(), aside) if found.dimension else torch.zeros(0)
    entries = []
    for k in (k for k in range(found.dimension) if float(drifts[k]) <= analysis.DRIFT):
        A, b = quantities(found.directions[k : k + 1])
        A, b = A[0] / scale[:, None] / scale, b[0] / scale
        size = (A.square().sum() + b.square().sum()).sqrt()
        name, inside = name_of(A / size, b / size)
        entries.append(
            {
                "name": name,
                "formula": formula(A / size, b / size),
                "singular_value": float(found.values[k]),
                "parallelness": inside,
                "drift": float(drifts[k]),
                "matrix": (A / size).tolist(),
                "linear": (b / size).tolist(),
            }
        )
    return entries, analysis.closure(found.directions[: found.dimension]).outside
