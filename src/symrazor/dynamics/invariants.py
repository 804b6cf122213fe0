r"""Conserved quantities from trajectories alone.

**From the equations of motion.** A vector field is fitted by multiple shooting
(`symrazor.dynamics.simulators`). If it predicts trajectories set aside as well as the noise allows,
its conserved quantities are those of the system (`symrazor.dynamics.field_invariants`), and the
noise test has to confirm each of them.

**From the data.** If no field is good enough, for instance because a coordinate is hidden,
quantities are sought without one. Let $\phi_1, \dots, \phi_m$ be functions of the state
(`symrazor.dynamics.libraries`). The covariance $W$ of $\phi$ within trajectories, around each
trajectory's mean, and the covariance $V$ over all states both contain measurement noise of
covariance

$$ N = E\, D \Sigma D^\top, \qquad D = \partial\phi/\partial x, $$

where $\Sigma$ is the noise of the states (`noise_estimate`). Without noise, a combination
$C = c^\top\phi$ varies within trajectories by the fraction

$$ \lambda = \frac{c^\top (W - N)\, c}{c^\top (V - N)\, c} $$

of its variance. Stationary points of this ratio are generalised eigenvectors, and conserved
quantities have $\lambda = 0$.

**The test** compares the variation of $C$ along trajectories that were not used to estimate it with
the noise in it. There are two statistics: the whole variation, and its slow part (the first
polynomials in time), where a drift stands out from the noise. For a conserved direction both are 1
up to sampling error, and follow a chi-squared distribution. Estimated coefficients raise them by a
known amount. The thresholds hold for all tests of a call together: the probability that a conserved
quantity is refuted by chance is at most `FAMILY_ERROR`.

**Libraries** are tried from simple to rich. A quantity whose gradient is a combination of the
gradients of others is a function of them: $P^2$ is not new once $P$ is known.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from symrazor.dynamics.eigen_search import search, simplify, tested_quantities
from symrazor.dynamics.eigenproblem import LARGE_NOISE
from symrazor.dynamics.field_invariants import Combinations, field_invariants
from symrazor.dynamics.fields import EnergyField
from symrazor.dynamics.findings import MAX_TERMS, Findings, Quantity
from symrazor.dynamics.independence import (
    MAX_REPEATED,
    MAX_UNEXPLAINED,
    is_independent,
    unexplained,
    unexplained_fractions,
)
from symrazor.dynamics.libraries import QUADRATIC, libraries_for
from symrazor.dynamics.library import Library
from symrazor.dynamics.mechanics import symplectic_form
from symrazor.dynamics.noise import noise_estimate
from symrazor.dynamics.relations import find_relations, without_relations
from symrazor.dynamics.samples import MIN_TRAJECTORIES, Sample, sample_states
from symrazor.dynamics.simulators import ADEQUATE, Choice, choose_field
from symrazor.dynamics.symplectic import find_structure
from symrazor.dynamics.trajectories import Trajectories, observed_states, split

FAMILY_ERROR = 0.01
"""Probability of any wrong decision in one call."""
STATES_PER_FUNCTION = 4
"""Degrees of freedom per function that a library needs, at least."""
MAX_FIELD_VARIATION = 0.4
"""Upper confidence limit of the variation of a quantity that equations of motion conserve."""

MAX_TESTED_AGAIN = 3
"""Undecided combinations that are reported, at most, if the data alone are asked once more."""
MAX_GRADIENTS = 300
"""States at which gradients are compared, at most."""
MAX_COMPARED = 1000
"""States at which values are compared, at most."""
MAX_ENERGY_DIFFERENCE = 1e-3
"""Largest squared difference between the gradients of the energy and of a quantity, relative."""


def find_conserved(
    data: Trajectories,
    names: Sequence[str] | None = None,
    functions: dict[str, Callable[[Tensor], Tensor]] | None = None,
    seed: int = 0,
) -> Findings:
    """Find conserved quantities of trajectories in libraries of functions.

    Args:
        data: trajectories; missing states, irregular times and different lengths are allowed.
        names: of the coordinates; x1, x2, ... by default.
        functions: further functions of the state [n, d] -> [n], by name.
        seed: of the split, the folds, and the choice of states if there are many.

    Raises:
        ValueError: too few states for any test.
    """
    check_coordinates(data)
    noise = noise_estimate(data)
    x = observed_states(data)
    names = list(names or [f"x{i + 1}" for i in range(x.shape[1])])
    findings = Findings(noise=noise, names=names)
    libraries = libraries_for(x, names, functions)
    training, held_out = split(data, seed)
    sample = sample_states(held_out, noise, seed)
    _add_relations(findings, _relations(libraries, sample_states(data, noise, seed)), x)
    findings.fields = choose_field(training, held_out, libraries, noise)
    if findings.fields.adequate is not None:
        samples = sample, sample_states(data, noise, seed)
        by_library = _search_field(findings, libraries, samples, x)
        _add_structure(findings, libraries, samples, x)
    if findings.fields.adequate is None:
        _search_data(findings, libraries, sample_states(data, noise, seed, MIN_TRAJECTORIES))
        findings.skipped += _unconfirmed(findings.fields)
    elif _may_have_missed(findings, x):
        try:
            everything = sample_states(data, noise, seed, MIN_TRAJECTORIES)
        except ValueError as error:
            findings.skipped.append(str(error))
        else:
            _search_missed(findings, by_library, everything)
    return findings


def _relations(libraries: Sequence[Library], sample: Sample) -> list[Quantity]:
    """Return the quadratic functions with the same value in all states."""
    quadratic = [library for library in libraries if library.title == QUADRATIC]
    return [relation for library in quadratic for relation in find_relations(library, sample)]


def _unconfirmed(fields: Choice) -> list[str]:
    """Return a message if equations fit the training trajectories, but not the held-out ones."""
    names = [c.name for c in fields.candidates if c.fit.chi_squared <= ADEQUATE]
    return [
        f"{name}: fits the training trajectories, but not the held-out ones" for name in names[:1]
    ]


def _may_have_missed(findings: Findings, x: Float[Tensor, "n d"]) -> bool:
    """Return whether noise may hide that the field is only near to one that conserves more."""
    assert findings.noise is not None
    noise = float((findings.noise.deviation(x) / x.std(0)).max())
    is_open = not findings.undecided and not _is_complete(findings, x)
    return is_open and (noise > LARGE_NOISE or not findings.quantities)


def _search_missed(findings: Findings, by_library: Sequence[Combinations], sample: Sample) -> None:
    """Add what a search without equations finds in the data to the undecided combinations.

    The search stops after the first library with a new or undecided quantity.
    """
    found = Findings()
    found.quantities, found.relations = [*findings.quantities], findings.relations
    level = FAMILY_ERROR / (2 * len(by_library))
    for known in by_library:
        _search_library(found, known.library, sample, level, known)
        more = [*found.quantities[len(findings.quantities) :], *found.undecided]
        if more:
            findings.undecided = more[:MAX_TESTED_AGAIN]
            break


def check_coordinates(data: Trajectories) -> None:
    """Raise ValueError for coordinates that are constant, or equal to another one."""
    x = observed_states(data)
    if not len(x):
        raise ValueError("No state is observed: all are missing (NaN).")
    x = x / x.abs().amax(0).clamp_min(1e-300)
    spread = x.std(0)
    constant = (spread <= 1e-13).nonzero()[:, 0].tolist()
    if constant:
        numbers = ", ".join(str(i + 1) for i in constant)
        raise ValueError(f"Coordinate {numbers} is constant. Remove it from the states.")
    z = (x - x.mean(0)) / spread
    correlation = (z.mT @ z / (len(z) - 1)).fill_diagonal_(0)
    if float(correlation.abs().max()) > 1 - 1e-12:
        i, j = divmod(int(correlation.abs().argmax()), x.shape[1])
        raise ValueError(
            f"Coordinates {i + 1} and {j + 1} are the same up to unit and offset. Remove one."
        )


def _search_field(
    findings: Findings,
    libraries: Sequence[Library],
    samples: tuple[Sample, Sample],
    x: Float[Tensor, "n d"],
) -> list[Combinations]:
    """Add the conserved quantities of the fitted field that the noise test confirms.

    Returns, for each library, all combinations that the field conserves.
    """
    best = findings.fields.adequate
    assert best is not None
    field, by_library = best.fit.field, []
    level = FAMILY_ERROR / (2 * len(libraries))
    for library in libraries:
        if _is_complete(findings, x):
            break
        findings.libraries.append(library.title)
        conserved, unclear = (
            without_relations(given, findings.relations, x)
            for given in field_invariants(best.fit, library, x)
        )
        energy = None
        if isinstance(field, EnergyField):
            energy = field.energy_in(library, best.fit.errors)
            if energy is not None:
                conserved = conserved.after(*energy)
        by_library.append(conserved)
        is_new = _is_new(conserved, findings.quantities, x)
        tested = _tested(conserved.only(is_new), samples, level)
        if energy is not None and bool(is_new[0]):
            tested[0] = replace(tested[0], name="energy")
        consistent = [q for q in tested if q.p_value >= level]
        _add_relations(findings, [q for q in consistent if not q.varies], x)
        varying = [q for q in consistent if q.varies]
        _add(findings, [q for q in varying if q.limit <= MAX_FIELD_VARIATION], x, exact=True)
        unclear_ = [q for q in _tested(unclear, samples, level) if q.p_value >= level]
        for quantity in [*(q for q in varying if q.limit > MAX_FIELD_VARIATION), *unclear_]:
            known = [*findings.quantities, *findings.relations, *findings.undecided]
            if quantity.varies and is_independent(quantity, known, x, exact=True):
                findings.undecided.append(quantity)
    return by_library


def _is_new(
    combinations: Combinations, known: Sequence[Quantity], x: Float[Tensor, "n d"]
) -> Bool[Tensor, "k"]:
    """Return which combinations are not quadratic functions of known quantities."""
    vectors = combinations.vectors
    if not known or not len(vectors):
        return torch.ones(len(vectors), dtype=torch.bool)
    few = x[:: -(-len(x) // MAX_COMPARED)]
    values = combinations.library(few) @ vectors.mT
    return ~(unexplained_fractions(values, known, few) < MAX_REPEATED)


def _tested(
    combinations: Combinations, samples: tuple[Sample, Sample], level: float
) -> list[Quantity]:
    """Return combinations with p-values on trajectories set aside and variations in all data."""
    held_out, everything = (tested_quantities(combinations, s, level) for s in samples)
    return [
        replace(q, variation=all_.variation, limit=all_.limit, noise=all_.noise)
        for q, all_ in zip(simplify(held_out, samples[0]), everything, strict=True)
    ]


def _add_structure(
    findings: Findings,
    libraries: Sequence[Library],
    samples: tuple[Sample, Sample],
    x: Float[Tensor, "n d"],
) -> None:
    """Add the symplectic form of coordinates that are not canonical, and name the energy."""
    best = findings.fields.adequate
    assert best is not None
    if isinstance(best.fit.field, EnergyField):
        _name_energy(findings, best.fit.field, x)
        return
    if x.shape[1] % 2 or not findings.quantities:
        return
    findings.structure = find_structure(best.fit, libraries, x)
    if findings.structure is None:
        return
    level = FAMILY_ERROR / (2 * len(libraries))
    (energy,) = _tested(findings.structure.energy, samples, level)
    # The energy replaces one quantity: it is a function of all of them.
    quantities = [replace(energy, name="energy")]
    for quantity in findings.quantities:
        if is_independent(quantity, quantities, x, exact=True):
            quantities.append(quantity)
    if energy.p_value >= level and len(quantities) == len(findings.quantities):
        findings.quantities = quantities


def _name_energy(findings: Findings, field: EnergyField, x: Float[Tensor, "n d"]) -> None:
    """Name and rescale the quantity whose gradient is that of the energy, up to a factor."""
    if any(quantity.name for quantity in findings.quantities):
        return
    few = x[:: -(-len(x) // MAX_GRADIENTS)]
    canonical, unit = field.to_canonical, x.std(0)
    slope = field(few) @ canonical.mT @ symplectic_form(x.shape[1] // 2) @ canonical * unit
    for i, quantity in enumerate(findings.quantities):
        gradient = quantity.gradient(few) * unit
        factor = float((slope * gradient).sum() / gradient.square().sum())
        left = (slope - factor * gradient).square().sum() / slope.square().sum()
        if float(left) < MAX_ENERGY_DIFFERENCE:
            scaled, errors = factor * quantity.coefficients, abs(factor) * quantity.errors
            findings.quantities[i] = replace(
                quantity, coefficients=scaled, errors=errors, simple=None, name="energy"
            )
            return


def _search_data(findings: Findings, libraries: Sequence[Library], sample: Sample) -> None:
    """Add the conserved quantities that the eigenproblem finds."""
    level = FAMILY_ERROR / (2 * len(libraries))
    for library in libraries:
        if _is_complete(findings, sample.x):
            break
        _search_library(findings, library, sample, level)


def _search_library(
    findings: Findings,
    library: Library,
    sample: Sample,
    level: float,
    known: Combinations | None = None,
) -> None:
    """Add the conserved quantities that the eigenproblem finds in one library, see `search`."""
    needed = STATES_PER_FUNCTION * len(library)
    if needed > sample.freedom:
        findings.skipped.append(
            f"{library.title}: {len(library)} functions need {needed} states in addition to "
            f"one per trajectory, but there are {sample.freedom}"
        )
        return
    if library.title not in findings.libraries:
        findings.libraries.append(library.title)
    conserved, undecided = search(library, sample, level, known)
    _add(findings, conserved, sample.x)
    if not findings.undecided:  # richer libraries have ever more
        findings.undecided += [
            quantity
            for quantity in undecided
            if is_independent(quantity, findings.quantities, sample.x)
        ]


def _is_complete(findings: Findings, x: Float[Tensor, "n d"]) -> bool:
    """Return whether no further quantity exists: d - 1 of them determine the orbits."""
    return len(findings.quantities) + len(findings.relations) >= x.shape[1] - 1


def _add_relations(
    findings: Findings, constant: Sequence[Quantity], x: Float[Tensor, "n d"]
) -> None:
    """Add functions with the same value in all states, if their formulas are short."""
    for quantity in constant:
        is_short = quantity.terms <= MAX_TERMS
        if is_short and is_independent(quantity, findings.relations, x, exact=True):
            findings.relations.append(quantity)


def _add(
    findings: Findings,
    conserved: Sequence[Quantity],
    x: Float[Tensor, "n d"],
    exact: bool = False,
) -> None:
    """Add quantities to the independent ones or to the functions of these."""
    dependent: list[Quantity] = []
    # The energy comes first, and a momentum before its square.
    for quantity in sorted(conserved, key=lambda q: (not q.name, q.terms)):
        known = [*findings.quantities, *findings.relations]
        new = not _is_complete(findings, x) and is_independent(quantity, known, x, exact)
        (findings.quantities if new else dependent).append(quantity)
    if len(dependent) < len(conserved):
        findings.functions += [
            quantity
            for quantity in dependent
            if unexplained(quantity, findings.quantities, x) > MAX_UNEXPLAINED
        ]
