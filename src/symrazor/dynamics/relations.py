r"""Functions with the same value in all states, such as the length of a pendulum.

For combinations $C = c^\top \phi$ of quadratic functions, the variance over all states is compared
with the variance $c^\top N c$ that noise alone causes. Stationary values of their ratio are
generalised eigenvalues; a relation has a ratio of at most 1, up to errors of both estimates.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.dynamics.eigenproblem import Features, noise_covariance
from symrazor.dynamics.field_invariants import Combinations, sparse_basis
from symrazor.dynamics.findings import Quantity
from symrazor.dynamics.library import Library
from symrazor.dynamics.samples import Sample

MAX_ERRORS = 4.0
"""Standard errors by which the variance of a relation may exceed that of its noise."""
RANK_TOLERANCE = 1e-10
MIN_LEFT = 0.05
"""A combination whose largest term falls below this fraction of its former size by subtraction is a
relation itself."""


def find_relations(library: Library, sample: Sample) -> list[Quantity]:
    """Return independent combinations of the functions that vary by no more than the noise."""
    features = Features(library, sample)
    count = len(features.values)
    noise = noise_covariance(features.slopes, torch.ones(count).double()) / count
    values, vectors = torch.linalg.eigh(noise)
    kept = values > RANK_TOLERANCE * values[-1]
    whitening = vectors[:, kept] / values[kept].sqrt()
    total = features.values.mT @ features.values / count
    ratios, combinations = torch.linalg.eigh(whitening.mT @ total @ whitening)
    error = math.sqrt(2 / sample.freedom + 2 / sample.noise_freedom)
    constant = ratios <= 1 + MAX_ERRORS * error
    if not bool(constant.any()):
        return []
    basis = sparse_basis(whitening @ combinations[:, constant])
    relations = []
    for column in basis.mT:
        coefficients, spread = torch.zeros(2, len(library), dtype=column.dtype)
        pivot = int(column.abs().argmax())
        coefficients[features.kept] = column / features.scale * (features.scale / column)[pivot]
        spread[features.kept] = features.scale
        errors = torch.zeros_like(coefficients)
        ratio = float(column @ total @ column / (column @ noise @ column))
        p = math.erfc((ratio - 1) / error / math.sqrt(2)) / 2
        # The variation is zero: all variance is that of the noise.
        relations.append(Quantity(library, coefficients, errors, p, 0.0, 0.0, math.inf, spread))
    return relations


def without_relations(
    given: Combinations, relations: Sequence[Quantity], x: Float[Tensor, "n d"]
) -> Combinations:
    """Subtract multiples of relations, which have no effect on the data, from combinations.

    The largest term of each relation is eliminated. Combinations that are relations themselves are
    unchanged.
    """
    places = {name: k for k, name in enumerate(given.library.names)}
    size, vectors, errors = given.library(x).std(0), given.vectors.clone(), given.errors
    for relation in relations:
        names = relation.library.names
        if set(names) <= set(places):
            row = torch.zeros(len(places), dtype=size.dtype)
            row[[places[name] for name in names]] = relation.coefficients
            pivot = (row * size).abs().argmax()
            vectors -= vectors[:, pivot, None] / row[pivot] * row
    before, after = ((v * size).abs().amax(1) for v in (given.vectors, vectors))
    changed = (vectors != given.vectors).any(1) & (after > MIN_LEFT * before)
    places_of_largest = (vectors * size).abs().argmax(1, keepdim=True)
    unit = vectors.gather(1, places_of_largest).abs()
    return replace(
        given,
        vectors=torch.where(changed[:, None], vectors / unit, given.vectors),
        errors=torch.where(changed[:, None], errors / unit, errors),
    )
