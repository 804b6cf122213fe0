r"""Choose a simulator of trajectories among vector fields that are linear in few parameters.

Candidates are combinations of the functions of a library (a sparse regression), the fields of
energies that are such combinations, and masses in such potentials. Each is fitted by multiple
shooting (`symrazor.dynamics.shooting`) and judged by its error on trajectories set aside, relative
to the noise: 1 is the best possible. The first candidate that reaches the noise is taken, else the
best.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.dynamics.fields import FreeField, HamiltonianField, NewtonianField, ParametricField
from symrazor.dynamics.libraries import LINKED_BODIES
from symrazor.dynamics.library import Library
from symrazor.dynamics.mechanics import rk4
from symrazor.dynamics.noise import NoiseEstimate
from symrazor.dynamics.regression import (
    regress,
    regress_energy,
    regress_masses,
    velocity_estimates,
)
from symrazor.dynamics.shooting import (
    POOR,
    Fit,
    Windows,
    fit_field,
    refit,
    residual_ratio,
    windows_of,
)
from symrazor.dynamics.trajectories import Trajectories, interleave, observed_states

WINDOW, LONG_WINDOW = 8, 24
"""States in a window for fitting, and for comparing fields."""
MAX_WINDOW, MIN_COVERED = 100, 0.9
"""Most states in a window of the last fit, and fraction of the states that the windows cover."""
MIN_CHANGE = 0.08
"""Smallest change from one state to the next, without noise and relative to the spread."""
MAX_WINDOWS, MAX_LONG_WINDOWS = 120, 40
MAX_PARAMETERS = 220
"""Parameters of a field before unneeded ones are removed, at most."""
ADEQUATE, UNCERTAINTIES, MAX_ADEQUATE = 1.25, 2.0, 1.6
"""Squared errors relative to the noise up to which the conserved quantities of a field are those of
the system; standard errors of that ratio that are added; and the largest limit: where data are few,
a field with too few terms may reach the noise."""
TIE = 1.03
"""Errors within this factor are a tie, which the field with fewer parameters wins."""
STEP_ERROR, STEP_QUANTILE = 0.05, 0.95
"""Largest error of the integrator over one time step, in standard deviations of the noise, and the
fraction of states where it holds."""
MAX_REGRESSION_STATES = 800
"""States for the first estimates, at most."""
COMPLEX = 10
"""Number of parameters that makes a candidate half as promising."""
ENERGY_PREFERENCE = 0.6
"""Factor on the first error of fields of energies."""
MAX_CANDIDATES = 10
"""Vector fields that are fitted, at most."""
MAX_AFTER_ADEQUATE = 3
"""Vector fields that are fitted after one is adequate, at most."""
MAX_COMPLETED, MAX_COMPLETED_PARAMETERS = 2, 60
"""Vector fields with all functions of a library that are fitted, at most, and their parameters."""
MIN_REFINED_SUBSTEPS, MAX_SUBSTEPS = 3, 16


@dataclass
class Candidate:
    """A fitted vector field.

    Args:
        name: in words.
        fit: parameters and their errors.
        error: squared error relative to the noise, on trajectories set aside or on those that were
            fitted, whichever is larger.
        substeps: steps of the integrator per time step of the data.
    """

    name: str
    fit: Fit
    error: float
    substeps: int

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return len(self.fit.field.parameters)


@dataclass
class Choice:
    """All candidates in the order in which they were fitted, and the chosen one.

    Args:
        candidates: fitted vector fields.
        uncertainty: standard error of the ratio of squared errors to the noise, for a true field.
    """

    candidates: list[Candidate] = field(default_factory=list)
    uncertainty: float = 0.0

    @property
    def adequate(self) -> Candidate | None:
        """The best candidate if it predicts as well as the noise allows."""
        best = self.best
        return best if best is not None and best.error <= self.limit else None

    @property
    def limit(self) -> float:
        """Largest error of a field that predicts as well as the noise allows."""
        return min(ADEQUATE + UNCERTAINTIES * self.uncertainty, MAX_ADEQUATE)

    @property
    def best(self) -> Candidate | None:
        """The candidate with the smallest error; the smaller one among ties."""
        finite = [c for c in self.candidates if math.isfinite(c.error)]
        if not finite:
            return None
        smallest = min(c.error for c in finite)
        tied = [c for c in finite if c.error <= TIE * smallest]
        return min(tied, key=lambda c: (c.parameters, c.error))


def choose_field(
    training: Trajectories,
    held_out: Trajectories,
    libraries: Sequence[Library],
    noise: NoiseEstimate,
) -> Choice:
    """Fit at most `MAX_CANDIDATES` candidates, the most promising first.

    Args:
        training: trajectories to fit.
        held_out: trajectories to compare on.
        libraries: functions of velocities and energies, from simple to rich.
        noise: of the states.
    """
    deviation = noise.deviation(observed_states(training))
    stride = _stride(training, deviation)
    training, held_out = interleave(training, stride), interleave(held_out, stride)
    short = windows_of(training, WINDOW, MAX_WINDOWS, deviation)
    long = windows_of(held_out, LONG_WINDOW, MAX_LONG_WINDOWS, deviation)
    uncertainty = math.sqrt(2 / max(1, long.freedom) + 2 / noise.freedom)
    choice = Choice(uncertainty=uncertainty)
    estimates = velocity_estimates(training, deviation)
    candidates = _candidates(*estimates, libraries)
    if not _fit_in_turn(choice, candidates[:MAX_CANDIDATES], short, long):
        _fit_in_turn(choice, _completed(choice, *estimates, libraries), short, long)
    for length in dict.fromkeys((longest_windows(training), LONG_WINDOW)):
        refined = _refined(choice, windows_of(training, length, MAX_WINDOWS, deviation), long)
        if refined is not choice:
            return refined
    return choice


def _fit_in_turn(
    choice: Choice, starts: Sequence[tuple[str, ParametricField]], short: Windows, long: Windows
) -> bool:
    """Add fits of vector fields up to the first that reaches the noise; return whether one does."""
    tried = 0
    for name, start in starts:
        substeps = _substeps(start, short)
        fit = fit_field(start, short, substeps)
        if fit is None:
            continue
        error = fit.chi_squared
        known = min((c.error for c in choice.candidates), default=math.inf)
        if error <= min(POOR, TIE * known):  # otherwise it cannot be the best
            substeps = max(substeps, _substeps(fit.field, long))
            error = max(residual_ratio(fit.field, long, substeps), error)
        choice.candidates.append(Candidate(name, fit, error, substeps))
        if error <= min(1 + choice.uncertainty, MAX_ADEQUATE):
            return True
        tried += choice.adequate is not None
        if tried > MAX_AFTER_ADEQUATE:
            return True
    return False


def _completed(
    choice: Choice,
    x: Float[Tensor, "n d"],
    velocity: Float[Tensor, "n d"],
    libraries: Sequence[Library],
) -> list[tuple[str, ParametricField]]:
    """Return fields with all functions of the libraries whose fields have the smallest errors.

    The regression of noisy velocities may remove functions that are needed. Shooting, which noise
    does not bias, removes the others.
    """
    fields: list[tuple[str, ParametricField]] = []
    regressions: dict[str, tuple[Library, Callable[..., ParametricField]]] = {
        library.title: (library, regress) for library in libraries
    }
    if x.shape[1] % 2 == 0:
        for library in libraries:
            regressions[f"energy: {library.title}"] = library, regress_energy
    for candidate in sorted(choice.candidates, key=lambda c: c.error):
        if candidate.name not in regressions or len(fields) == MAX_COMPLETED:
            continue
        library, regression = regressions[candidate.name]
        field = regression(library, x, velocity, sparse=False)
        if len(field.parameters) <= MAX_COMPLETED_PARAMETERS:
            fields.append((candidate.name, field))
    return fields


def _refined(choice: Choice, windows: Windows, held_out: Windows) -> Choice:
    """Fit the best candidate again, to long windows, which determine its parameters better."""
    best = choice.adequate
    if best is None:
        return choice
    substeps = max(best.substeps, MIN_REFINED_SUBSTEPS)  # small errors add up in long rollouts
    fit = refit(best.fit.field, windows, substeps)
    if fit is None:
        return choice
    before, after = (residual_ratio(f, held_out, substeps) for f in (best.fit.field, fit.field))
    if after > TIE * before or max(after, fit.chi_squared) > choice.limit:
        return choice
    others = [candidate for candidate in choice.candidates if candidate is not best]
    again = Candidate(best.name, fit, best.error, substeps)  # keep errors of equal lengths
    return Choice([*others, again], choice.uncertainty)


def longest_windows(data: Trajectories) -> int:
    """Return the longest length of windows that cover as many states as shorter ones do."""
    observed = data.observed.sum(1)
    most = min(int(observed.max()), MAX_WINDOW)
    lengths = [most // k for k in range(1, most // LONG_WINDOW + 1)]
    covered = {length: int((observed // length * length).sum()) for length in lengths}
    needed = MIN_COVERED * max(covered.values(), default=0)
    return next((length for length in lengths if covered[length] >= needed), LONG_WINDOW)


def _stride(data: Trajectories, deviation: Float[Tensor, "d"]) -> int:
    """Return the stride, a power of two, at which states that were recorded densely change."""
    states = torch.where(data.observed[..., None], data.states, torch.nan).double().cpu()
    spread = observed_states(data).std(0)
    noise = float((deviation / spread).square().mean())
    stride = 1
    while 2 * stride * WINDOW <= states.shape[1]:
        change = ((states[:, stride:] - states[:, :-stride]) / spread).square().nanmean()
        if float(change) - 2 * noise >= MIN_CHANGE**2 or not float(change) < MIN_CHANGE**2 + 1:
            break
        stride *= 2
    return stride


def _candidates(
    x: Float[Tensor, "n d"], velocity: Float[Tensor, "n d"], libraries: Sequence[Library]
) -> list[tuple[str, ParametricField]]:
    """Return fields with first estimates of their parameters by regression, the best fit first."""
    d = x.shape[1]
    few = slice(None, None, max(1, len(x) // MAX_REGRESSION_STATES))
    x, velocity = x[few], velocity[few]
    fields: list[tuple[str, ParametricField]] = []
    for library in libraries:
        fields.append((library.title, regress(library, x, velocity)))
        if d % 2 == 0 and library.title != LINKED_BODIES:  # their momenta are not in the library
            fields.append((f"energy: {library.title}", regress_energy(library, x, velocity)))
    fields += regress_masses(libraries, x, velocity)
    distinct = {
        field.terms: (_unexplained(field, x, velocity), name, field)
        for name, field in reversed(fields)  # of equal fields, that of the simplest library is kept
        if len(field.parameters) <= MAX_PARAMETERS
    }
    ranked = sorted(distinct.values(), key=lambda entry: entry[0])
    kinds = [
        [entry for entry in ranked if isinstance(entry[2], kind)]
        for kind in (HamiltonianField, NewtonianField, FreeField)
    ]
    # Of two equally good fields, that of an energy says more.
    kinds = sorted(
        filter(None, kinds),
        key=lambda kind: (
            kind[0][0] * (1 if isinstance(kind[0][2], FreeField) else ENERGY_PREFERENCE)
        ),
    )
    # Noise of the velocities hides which kind fits: alternate between the kinds.
    in_turn = chain.from_iterable(zip_longest(*kinds))
    return [entry[1:] for entry in in_turn if entry is not None]


def _unexplained(field: ParametricField, x: Tensor, velocity: Tensor) -> float:
    """Return the fraction of the squared velocity that a field leaves, more for complex fields."""
    unit = velocity.square().mean(0).sqrt().clamp_min(1e-300)
    left = float(((velocity - field(x)) / unit).square().mean())
    return left * (1 + len(field.parameters) / COMPLEX)


def _substeps(field: ParametricField, windows: Windows) -> int:
    """Return how many steps of the integrator a time step of the data needs."""
    x, h = windows.states[:, 0], windows.gaps.amax(1, keepdim=True)
    steps, before = 1, _advance(field, x, h, 1)
    while steps < MAX_SUBSTEPS:
        after = _advance(field, x, h, 2 * steps)
        error = ((after - before) / windows.deviation).abs().amax(1)
        if float(error.quantile(STEP_QUANTILE)) < STEP_ERROR:
            return steps
        steps, before = 2 * steps, after
    return steps


def _advance(field: ParametricField, x: Tensor, h: Tensor, steps: int) -> Tensor:
    for _ in range(steps):
        x = rk4(field, x, h / steps)
    return x
