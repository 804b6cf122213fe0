r"""Conserved quantities of one library, by the eigenproblem and the noise test.

Trajectories are divided into folds. Directions are estimated without a fold and tested on it, in
the order of their variation, up to the first that is not conserved:

- conserved, if the p-value is at least `MIN_P` and the upper confidence limit of the variation is
  below `MAX_VARIATION`: in a rich library, noise may make something look nearly conserved;
- refuted, if even the direction that varies least in all data has a p-value below a threshold;
- undecided otherwise: the data are too few or too noisy, and a conserved direction near the
  estimated one could not be seen, or the noise is too large for the functions.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.dynamics.eigenproblem import (
    Directions,
    Features,
    directions,
    fixed_direction,
    fold_moments,
    noise_test,
)
from symrazor.dynamics.field_invariants import Combinations, leading_count
from symrazor.dynamics.findings import Quantity, Simple
from symrazor.dynamics.independence import MAX_UNEXPLAINED
from symrazor.dynamics.library import Library
from symrazor.dynamics.proposals import echelon
from symrazor.dynamics.samples import FOLDS, Sample

MAX_VARIATION = 0.01
"""Largest fraction of the variance of a conserved quantity within trajectories."""
MIN_P = 0.05
"""Smallest p-value of a conserved quantity."""
MAX_TESTED, MAX_TESTED_VARIATION = 40, 0.15
"""Directions that are tested in one library, at most, and their estimated variation."""
TESTED_AT_ONCE, MAX_UNDECIDED = 5, 3
"""Directions that are tested side by side, and that are reported as undecided, at most."""
SIMPLE_ERRORS, MIN_SIMPLE_P = 3.0, 0.05
"""Coefficients are simplified within this many standard errors, and smallest p-value of a simple
formula that is shown."""


def search(
    library: Library, sample: Sample, level: float, known: Combinations | None = None
) -> tuple[list[Quantity], list[Quantity]]:
    """Return conserved and undecided quantities of one library, tested by cross-fitting.

    Returns no quantities if all directions that may be conserved are combinations of `known` ones.
    """
    features = Features(library, sample)
    if not len(features.kept):
        return [], []
    all_moments, without_folds = fold_moments(features)
    full = directions(all_moments)
    if known is not None and _are_all_known(known, features, full, level):
        return [], []
    fits = [directions(moments) for moments in without_folds]
    plausible = min(int((fit.variation < MAX_TESTED_VARIATION).sum()) for fit in (full, *fits))
    count = min(MAX_TESTED, plausible)
    if not count:
        return [], []
    z = normal_quantile(1 - level)
    p, variation, error, best_p = _test_in_order(features, full, fits, count, level)
    limit = variation.clamp_min(0) + z * error
    accepted = leading_count((p >= MIN_P) & (limit <= MAX_VARIATION))
    best_p = best_p[accepted : accepted + MAX_UNDECIDED]
    if bool((best_p < level).any()) and not features.is_noise_linear():
        best_p = torch.ones_like(best_p)  # the test may refute what is conserved
    plausible = accepted + leading_count(best_p >= level)
    basis = readable_basis(full.vectors[:, :accepted])
    # Combinations of conserved quantities are tested again, as they are reported.
    combined = [fit.project(basis, accepted) for fit in fits]
    conserved = _quantities(features, basis, combined, z)
    if not all(q.p_value >= MIN_P and q.limit <= MAX_VARIATION for q in conserved):
        basis = full.vectors[:, :accepted]
        combined = [fit.project(basis, accepted) for fit in fits]
        conserved = _quantities(features, basis, combined, z)
    rest = full.vectors[:, accepted:plausible]
    others = [replace(fit, vectors=fit.vectors[:, accepted:plausible]) for fit in fits]
    return simplify(conserved, sample), _quantities(features, rest, others, z)


def _are_all_known(known: Combinations, features: Features, full: Directions, level: float) -> bool:
    """Return whether all directions that the data do not refute are combinations of known ones."""
    tested = min(len(known.vectors) + 1, full.vectors.shape[1])
    fixed = [fixed_direction(full.vectors[:, :tested])] * FOLDS
    p = noise_test(features, fixed, tested, curvature=False)[0]
    count = leading_count(p >= level)
    if count > len(known.vectors) or not features.is_noise_linear():
        return False
    if not count:
        return True
    values = features.values @ full.vectors[:, :count]
    scaled = known.vectors[:, features.kept] * features.scale
    base = features.values @ scaled.mT
    fitted = base @ torch.linalg.lstsq(base, values, driver="gelsd").solution
    return bool(((values - fitted).var(0) <= MAX_UNEXPLAINED * values.var(0)).all())


def _test_in_order(
    features: Features, full: Directions, fits: Sequence[Directions], count: int, level: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Test directions up to the first refuted or later.

    Returns p-value, variation and its error on trajectories that were not used, and the p-value on
    all trajectories. The latter is biased upwards: if it is small, no direction is conserved, while
    a direction with large errors may vary although another one near it is conserved.
    """
    tests = []
    for start in range(0, count, TESTED_AT_ONCE):
        chosen = slice(start, min(start + TESTED_AT_ONCE, count))
        part = [replace(fit, vectors=fit.vectors[:, chosen]) for fit in fits]
        fixed = [fixed_direction(full.vectors[:, chosen])] * FOLDS
        size = chosen.stop - start
        p, variation, error, _ = noise_test(features, part, size)
        best_p = noise_test(features, fixed, size, curvature=False)[0]
        tests.append(torch.stack([p, variation, error, best_p]))
        if bool((p < level).any()):
            break
    p, variation, error, best_p = torch.cat(tests, 1)
    return p, variation, error, best_p


def readable_basis(vectors: Float[Tensor, "k j"]) -> Float[Tensor, "k j"]:
    """Return a basis of the span in which each combination has few functions."""
    return echelon(vectors.mT).mT if vectors.shape[1] else vectors


def _quantities(
    features: Features, vectors: Float[Tensor, "k j"], fits: Sequence[Directions], z: float
) -> list[Quantity]:
    """Return the combinations of all data with the tests of the combinations of each fold."""
    if not vectors.shape[1]:
        return []
    tests = noise_test(features, fits, vectors.shape[1])
    library, kept, scale = features.library, features.kept, features.scale
    spread = vectors.new_zeros(len(library))
    spread[kept] = scale
    quantities = []
    for j, (p, variation, error, noise) in enumerate(torch.stack(tests, 1).tolist()):
        pivot = int(vectors[:, j].abs().argmax())
        raw = vectors[:, j] / scale
        folds = torch.stack([fit.vectors[:, j] for fit in fits]) / scale
        folds = folds / folds[:, pivot, None] - (raw / raw[pivot])
        coefficients, errors = (torch.zeros_like(spread) for _ in range(2))
        coefficients[kept] = raw / raw[pivot]
        errors[kept] = ((FOLDS - 1) / FOLDS * folds.square().sum(0)).sqrt()
        limit = max(variation, 0.0) + z * error
        quantities.append(
            Quantity(library, coefficients, errors, p, variation, limit, noise, spread, None)
        )
    return quantities


def simplify(quantities: Sequence[Quantity], sample: Sample) -> list[Quantity]:
    """Add simple formulas where the data cannot tell them from the estimates.

    Coefficients within `SIMPLE_ERRORS` of a multiple of 1/2 are replaced by it. All quantities must
    use the same library.
    """
    if not quantities:
        return []
    c = torch.stack([quantity.coefficients for quantity in quantities])
    errors = torch.stack([quantity.errors for quantity in quantities])
    nearest = (2 * c).round() / 2
    rows = torch.where((c - nearest).abs() <= SIMPLE_ERRORS * errors, nearest, c)
    changed = (rows != c).any(1)
    exact = torch.zeros_like(rows[changed])
    given = Combinations(quantities[0].library, rows[changed], exact, exact[:, 0])
    simplified = [*quantities]
    tests = tested_quantities(given, sample, MIN_SIMPLE_P)
    for place, tested in zip(changed.nonzero()[:, 0].tolist(), tests, strict=True):
        if tested.p_value >= MIN_SIMPLE_P:
            simple = Simple(tested.coefficients, tested.formula, tested.p_value)
            simplified[place] = replace(quantities[place], simple=simple)
    return simplified


def tested_quantities(combinations: Combinations, sample: Sample, level: float) -> list[Quantity]:
    """Return given combinations with the results of their tests."""
    library, z = combinations.library, normal_quantile(1 - level)
    used = combinations.vectors.any(0).nonzero()[:, 0]
    if not len(used):
        return []
    features = Features(library.subset(used.tolist()), sample)
    kept = used[features.kept]
    spread = torch.zeros(len(library), dtype=sample.x.dtype)
    spread[kept] = features.scale
    scaled = (combinations.vectors[:, kept] * features.scale).mT
    tests = noise_test(features, [fixed_direction(scaled)] * FOLDS, scaled.shape[1])
    quantities = []
    for j, (p, variation, error, noise) in enumerate(torch.stack(tests, 1).tolist()):
        quantity = Quantity(
            library,
            combinations.vectors[j],
            combinations.errors[j],
            p,
            variation,
            max(variation, 0.0) + z * error,
            noise,
            spread,
        )
        quantities.append(quantity)
    return quantities


def normal_quantile(p: float) -> float:
    """Return the quantile of the standard normal distribution."""
    return float(torch.special.ndtri(torch.tensor(p, dtype=torch.float64)))
