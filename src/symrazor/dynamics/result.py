"""What was found in trajectories: conserved quantities in words and numbers, and a simulator."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from symrazor.dynamics import analysis
from symrazor.dynamics.algebra import Algebra
from symrazor.dynamics.conserved import Quadratic, span_basis
from symrazor.dynamics.naming import formula, named
from symrazor.dynamics.simulator import ScaledSimulator, Simulator
from symrazor.dynamics.trained import Trained
from symrazor.dynamics.trajectories import Trajectories
from symrazor.dynamics.units import Units

DOUBT, NOISY = 0.15, 3.0
"""A quantity that drifts more than this along trajectories set aside, and more than so many times
what noise explains, does not hold."""
FEW = 150
"""Steps of a trial below which it says little."""


@dataclass
class Discovered:
    """What was found in trajectories.

    Args:
        learned: the model with the quantities that the evidence took, in scaled units.
        plain: the model without, trained for as many steps.
        units: of states and times.
        conserved: one entry for each quantity of a basis of what was taken: name, formula,
            singular value, parallelness, drift, matrix and linear part in the user's units.
        doubtful: the same of those that drift along trajectories set aside.
        algebra: "closure", how far the quantities are from an algebra, and "structure_constants".
        held_out: mean squared one-step errors of both models on trajectories set aside, scaled.
        n_data: transitions used.
    """

    learned: Trained
    plain: Trained
    units: Units
    conserved: list[dict[str, Any]]
    doubtful: list[dict[str, Any]]
    algebra: dict[str, Any]
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
        parts = [self._found()]
        for entry in self.doubtful:
            drift = f"{100 * entry['drift']:.0f} % along held-out trajectories"
            parts.append(
                f"The evidence would also take {entry['name']}, which drifts by {drift}: it is not "
                "conserved, or the data are too noisy or the training too short to tell."
            )
        steps = min((int(trial["steps"]) for trial in self.learned.trials), default=FEW)
        if steps < FEW:
            parts.append(
                f"Each trial had only {steps} step{'s' if steps > 1 else ''}: allow more time."
            )
        return " ".join(parts)

    def _found(self) -> str:
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
        return text

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        apart = self.plain is not self.learned and self.plain is not self.learned.plain
        trained = [self.learned, self.plain] if apart else [self.learned]
        return {
            "verdict": self.verdict,
            "conserved": self.conserved,
            "doubtful": self.doubtful,
            **self.algebra,
            "evidence": {"learned": self.learned.bound, "plain": self.plain.bound}
            | {"margin": self.margin},
            "trials": self.learned.trials,
            "held_out_mse": self.held_out,
            **self.units.to_dict(),
            "noise": float(self.learned.noise.variance.detach()),
            "n_data": self.n_data,
            "seconds": sum(one.seconds for one in trained),
            "skipped_steps": sum(one.skipped for one in trained),
            "history": {"learned": self.learned.history, "plain": self.plain.history},
        }

    def simulator(self) -> ScaledSimulator:
        """A plain module: state and time in, state out, in the user's units."""
        return ScaledSimulator(Simulator(self.learned), self.units)


@torch.no_grad()
def described(
    conserved: nn.Module | None, units: Units, aside: Trajectories
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """Entries for the quantities that were taken: those that hold, and not; and their algebra.

    Args:
        conserved: of a model, in scaled units.
        units: the user's.
        aside: trajectories for the drift, scaled.
    """
    if not isinstance(conserved, Quadratic):
        return [], [], {"closure": 0.0, "structure_constants": []}
    basis = named(*span_basis(conserved))
    taken = Algebra(
        tuple(one.name for one in basis),
        torch.stack([one.A for one in basis]),
        torch.stack([one.b for one in basis]),
    )
    values = [*analysis.spectrum(conserved).values.tolist(), *[0.0] * len(basis)]
    drifts = analysis.drift(taken, aside)
    noise = analysis.drift_by_noise(taken, aside) if aside.states.shape[1] > 2 else 0 * drifts
    fine = drifts <= (NOISY * noise).clamp_min(DOUBT)  # two states do not tell noise from motion
    holds: list[dict[str, Any]] = []
    doubtful: list[dict[str, Any]] = []
    for k, one in enumerate(basis):
        matrix, linear = units.quantity(one.A, one.b)
        terms = formula(matrix, linear, units.centre, units.scale)
        entry = {
            "name": one.name if one.parallelness else ": ".join(filter(None, (one.name, terms))),
            "formula": terms,
            "singular_value": values[k],
            "parallelness": one.parallelness,
            "drift": float(drifts[k]),
            "matrix": matrix.tolist(),
            "linear": linear.tolist(),
        }
        (holds if bool(fine[k]) else doubtful).append(entry)
    closed = analysis.closure(taken.generators())
    constants = closed.constants.tolist()
    return holds, doubtful, {"closure": closed.outside, "structure_constants": constants}
