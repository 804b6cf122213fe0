"""Quantities that the evidence of a Hamiltonian network selects, in the user's units."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.dynamics import analysis
from symrazor.dynamics.algebra import (
    Algebra,
    closure,
    from_generators,
    generators,
    nbody_invariants,
    span,
    unitary,
)
from symrazor.dynamics.conserved import Quadratic, span_basis
from symrazor.dynamics.observables import coordinate_names
from symrazor.dynamics.trained import Simulator, Trained, cast_like, register_frozen
from symrazor.dynamics.trajectories import Trajectories

MAX_DRIFT = 0.15
"""Quantities that drift less on held-out trajectories are accepted."""
MAX_DRIFT_OVER_NOISE = 3.0
"""So are quantities that drift by less than this multiple of what noise explains."""
MIN_TRIAL_STEPS = 150
"""Trials with fewer steps are inconclusive."""
MIN_NAMED_OVERLAP = 0.98
"""Fraction of a known quantity that must lie in the span for its name to be used."""
SIGN_TOLERANCE = 0.1
"""Eigenvalues below this fraction of the largest count as zero."""


@dataclass(frozen=True)
class Units:
    """Units in which states and their rates of change are about 1.

    There is one unit for all positions and one for all momenta, so that scaling is canonical up to
    a change of the unit of time.

    Args:
        centre: [2n], the state that is mapped to zero.
        scale: [2n], the unit of each entry of a state.
        time: the unit of time.
    """

    centre: Float[Tensor, "d"]
    scale: Float[Tensor, "d"]
    time: float

    def to_scaled(self, data: Trajectories) -> Trajectories:
        """Return trajectories in these units."""
        states = (data.states - self.centre) / self.scale
        return Trajectories(states, data.times / self.time, data.observed)

    def to_user(
        self, A: Float[Tensor, "d d"], b: Float[Tensor, "d"]
    ) -> tuple[Float[Tensor, "d d"], Float[Tensor, "d"]]:
        """Return a quadratic quantity of scaled states as one of the user's states, of norm 1."""
        A = A / self.scale[:, None] / self.scale
        b = b / self.scale - A @ self.centre
        norm = (A.square().sum() + b.square().sum()).sqrt()
        return A / norm, b / norm

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers for JSON."""
        return {"centre": self.centre.tolist(), "scale": self.scale.tolist(), "clock": self.time}


class ScaledSimulator(nn.Module):
    """A simulator in the user's units, `simulator(state, t)`, made of one in scaled units."""

    centre: Tensor
    scale: Tensor

    def __init__(self, simulator: Simulator, units: Units) -> None:
        super().__init__()
        self.simulator, self.time_unit = simulator, units.time
        register_frozen(self, {"centre": units.centre, "scale": units.scale})

    def forward(self, state: Float[Tensor, "*b d"], t: float) -> Float[Tensor, "*b d"]:
        """Return the states after a time t."""
        scale, centre = self.scale.to(state.device), self.centre.to(state.device)
        scaled = (state.double() - centre) / scale
        moved: Tensor = self.simulator(scaled, float(t) / self.time_unit)
        return cast_like(moved * scale + centre, state)


@dataclass
class NetworkResult:
    """Conserved quantities by the evidence of a symmetrised Hamiltonian network.

    Args:
        learned: the model with the quantities that the evidence selected, in scaled units.
        plain: the model without, trained for as many steps.
        units: of states and times.
        conserved: one entry for each quantity of a basis of the selected span: name, formula,
            singular value, parallelness, drift, matrix and linear part in the user's units.
        doubtful: the same for quantities that drift along held-out trajectories.
        algebra: "closure", the distance from closing under Poisson brackets, and
            "structure_constants".
        held_out: mean squared one-step errors of both models on held-out trajectories, in scaled
            units.
        n_data: number of training transitions.
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
        """Log odds of the model with quantities against the one without, by evidence bounds."""
        gain = self.plain.bound["neg_elbo"] - self.learned.bound["neg_elbo"]
        return gain * self.n_data

    @property
    def verdict(self) -> str:
        """The result in words, the answer first."""
        sentences = [self._answer()]
        if self.doubtful:
            drifting = "; ".join(
                f"{entry['name']} (drift {100 * entry['drift']:.0f} %)" for entry in self.doubtful
            )
            sentences.append(
                f"Not confirmed: {drifting}. The evidence selects this, but it drifts on held-out "
                "trajectories: it is not conserved, or the data are too noisy or the training too "
                "short to tell."
            )
        steps = min((int(trial["steps"]) for trial in self.learned.trials), default=MIN_TRIAL_STEPS)
        if steps < MIN_TRIAL_STEPS:
            unit = "step" if steps == 1 else "steps"
            sentences.append(f"Each trial had only {steps} {unit}: allow more time.")
        return " ".join(sentences)

    def _answer(self) -> str:
        if not self.conserved:
            return (
                "No quadratic conserved quantity was found. One-step error on held-out "
                f"trajectories: {self.held_out['plain']:.2g} (scaled)."
            )
        names = ", ".join(entry["name"] for entry in self.conserved)
        drift = 100 * max(entry["drift"] for entry in self.conserved)
        evidence = f"log odds {self.margin:+,.0f}"
        if len(self.conserved) > 1:
            text = f"Conserved: {names} (drift at most {drift:.1f} % of the spread, {evidence})."
        else:
            entry = self.conserved[0]
            if entry["formula"] not in names:
                names += f" = {entry['formula']}"
            text = f"Conserved: {names} (drift {drift:.1f} % of its spread, {evidence})."
        if self.margin < 0:
            text += " The evidence is higher without conserved quantities: do not rely on this."
        return text

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers for JSON."""
        separate = self.plain is not self.learned and self.plain is not self.learned.plain
        trainings = [self.learned, self.plain] if separate else [self.learned]
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
            "seconds": sum(training.seconds for training in trainings),
            "skipped_steps": sum(training.skipped for training in trainings),
            "history": {"learned": self.learned.history, "plain": self.plain.history},
        }

    def simulator(self) -> ScaledSimulator:
        """Return a plain module that maps a state and a time to a state, in the user's units."""
        return ScaledSimulator(Simulator(self.learned), self.units)


@torch.no_grad()
def describe_quantities(
    conserved: nn.Module | None, units: Units, held_out: Trajectories
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """Return entries for confirmed and doubtful quantities, and their algebra.

    The quantities and the trajectories, along which the drift is measured, have scaled units.
    """
    if not isinstance(conserved, Quadratic):
        return [], [], {"closure": 0.0, "structure_constants": []}
    algebra, overlaps = name_quantities(*span_basis(conserved))
    values = [*analysis.spectrum(conserved).values.tolist(), *[0.0] * len(algebra)]
    drifts = analysis.drift(algebra, held_out)
    noise = 0 * drifts
    if held_out.states.shape[1] > 2:  # noise and motion cannot be told apart from two states
        noise = analysis.drift_by_noise(algebra, held_out)
    confirmed = drifts <= (MAX_DRIFT_OVER_NOISE * noise).clamp_min(MAX_DRIFT)
    accepted: list[dict[str, Any]] = []
    doubtful: list[dict[str, Any]] = []
    for k, name in enumerate(algebra.names):
        matrix, linear = units.to_user(algebra.A[k], algebra.b[k])
        terms = formula(matrix, linear, units.centre, units.scale)
        entry = {
            "name": name if overlaps[k] else ": ".join(filter(None, (name, terms))),
            "formula": terms,
            "singular_value": values[k],
            "parallelness": overlaps[k],
            "drift": float(drifts[k]),
            "matrix": matrix.tolist(),
            "linear": linear.tolist(),
        }
        (accepted if bool(confirmed[k]) else doubtful).append(entry)
    closed = closure(algebra.generators())
    constants = closed.constants.tolist()
    return accepted, doubtful, {"closure": closed.outside, "structure_constants": constants}


# --------------------------------------------------------------------------- names and formulas


def name_quantities(
    A: Float[Tensor, "k d d"], b: Float[Tensor, "k d"]
) -> tuple[Algebra, list[float]]:
    """Return a basis of the span: known quantities as far as they lie in it, then the remainder.

    Quantities of the remainder are called "energy-like" or "". All have norm 1.

    Args:
        A: symmetric matrices, in units in which states are about 1.
        b: linear parts.

    Returns:
        The basis, and the fraction of each known quantity inside the span; 0 for the remainder.
    """
    rows = span(generators(A, b))
    choices = [_inside(rows, known) for known in candidate_algebras(A.shape[-1] // 2)]
    matched = max(choices, key=lambda choice: sum(overlap for *_, overlap in choice))
    projections = torch.stack([row for _, row, _ in matched]) if matched else rows[:0]
    remainder = _complement(rows, projections)
    generator = torch.cat([projections, remainder]).unflatten(1, (A.shape[-1], -1))
    A, b = from_generators(generator)
    norm = (A.square().sum((1, 2)) + b.square().sum(1)).sqrt()
    A, b = A / norm[:, None, None], b / norm[:, None]
    names = [name for name, *_ in matched]
    for k in range(len(matched), len(A)):
        if float(A[k].trace()) < 0:
            A[k], b[k] = -A[k], -b[k]
        names.append("energy-like" if _is_energy_like(torch.linalg.eigvalsh(A[k])) else "")
    overlaps = [overlap for *_, overlap in matched] + [0.0] * len(remainder)
    return Algebra(tuple(names), A, b), overlaps


def candidate_algebras(n: int) -> list[Algebra]:
    """Return the known algebras with n degrees of freedom."""
    algebras = [unitary(n)]
    for dimension in (1, 2, 3):
        if n % dimension == 0:
            algebras.append(nbody_invariants(n // dimension, dimension))
    return algebras


def _inside(rows: Float[Tensor, "m f"], known: Algebra) -> list[tuple[str, Tensor, float]]:
    """Return independent known quantities near the span: name, projection, fraction inside."""
    unit = known.generators().flatten(1)
    unit = unit / unit.norm(dim=1, keepdim=True)
    overlaps = (unit @ rows.mT).norm(dim=1)
    matched: list[tuple[str, Tensor, float]] = []
    for k in range(len(known)):
        projection = unit[k] @ rows.mT @ rows
        previous = torch.stack([row for _, row, _ in matched]) if matched else rows[:0]
        new = _complement(projection[None], previous)
        if len(matched) < len(rows) and float(overlaps[k]) >= MIN_NAMED_OVERLAP and len(new):
            matched.append((known.names[k], projection, float(overlaps[k])))
    return matched


def _complement(rows: Float[Tensor, "m f"], others: Float[Tensor, "t f"]) -> Float[Tensor, "r f"]:
    """Return orthonormal rows that span the part of `rows` orthogonal to `others`."""
    if len(others):
        basis = torch.linalg.qr(others.mT)[0].mT
        rows = rows - rows @ basis.mT @ basis
    _, s, vectors = torch.linalg.svd(rows, full_matrices=False)
    remainder: Tensor = vectors[s > 0.1]
    return remainder


def _is_energy_like(eigenvalues: Float[Tensor, "d"]) -> bool:
    """Return whether a form is positive semidefinite of rank 2 or more."""
    tolerance = SIGN_TOLERANCE * float(eigenvalues.abs().max())
    return float(eigenvalues.min()) > -tolerance and int((eigenvalues > tolerance).sum()) > 1


def formula(
    A: Float[Tensor, "d d"],
    b: Float[Tensor, "d"],
    centre: Float[Tensor, "d"] | None = None,
    scale: Float[Tensor, "d"] | None = None,
    terms: int = 4,
) -> str:
    """Return the largest terms of a quadratic function, such as "0.71 q1 p2 - 0.7 q2 p1".

    Args:
        A: matrix.
        b: linear part.
        centre: write the function in terms of x - centre.
        scale: size of the entries of x - centre, which weights the terms; 1 by default.
        terms: maximum number of terms; "+ ..." marks further ones above 5 % of the largest.
    """
    d = len(b)
    size = torch.ones(d) if scale is None else scale
    names = coordinate_names(d)
    if centre is not None:
        b = b + A @ centre
        offsets = zip(names, centre.tolist(), size.tolist(), strict=True)
        names = [_relative_to(name, offset, unit) for name, offset, unit in offsets]
    parts = [(float(b[i]), float(b[i] * size[i]), names[i]) for i in range(d)]
    for i in range(d):
        for j in range(i, d):
            c = float(A[i, j]) * (0.5 if i == j else 1.0)
            name = f"{names[i]}^2" if i == j else f"{names[i]} {names[j]}"
            parts.append((c, c * float(size[i] * size[j]), name))
    parts = sorted(parts, key=lambda part: -abs(part[1]))
    large = [part for part in parts if abs(part[1]) > 0.05 * abs(parts[0][1])]
    shown = [f"{'-' if c < 0 else '+'} {abs(c):.2g} {name}" for c, _, name in large[:terms]]
    text = " ".join([*shown, "+ ..."] if len(large) > terms else shown)
    return text.removeprefix("+ ")


def _relative_to(name: str, centre: float, scale: float) -> str:
    """Return a coordinate relative to its centre, written to 1 % of the scale or 3 digits."""
    if centre == 0:
        return name
    digits = max(3, 3 + math.floor(math.log10(abs(centre) / scale)))
    return f"({name} {'-' if centre > 0 else '+'} {abs(centre):.{digits}g})"
