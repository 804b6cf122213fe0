"""Tell new conserved quantities from functions of known ones.

A quantity is a function of others if its gradient is a combination of theirs, up to what the errors
of estimated coefficients explain. The cube of a momentum is not new, although errors of its
coefficients turn its small gradient near zero in any direction: states are compared one by one.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.dynamics.findings import Quantity

MAX_STATES = 300
MIN_NEW = 0.001
"""Smallest fraction of the squared gradient of an exact quantity that is new, in the median."""
MIN_ERRORS = 9.0
"""The same fraction, relative to that which errors of the coefficients cause."""
MAX_DEPENDENCE = 0.03
"""Functions of other quantities have less than this fraction of new squared gradient."""
MAX_UNEXPLAINED = 0.05
"""So are quantities of which a quadratic function of others leaves less than this fraction."""
MAX_REPEATED = 1e-3
"""A quantity of the same equations is not new if such a function leaves less than this fraction."""
MIN_SINGULAR_VALUE, MIN_EXACT_SINGULAR_VALUE = 0.02, 0.002
"""Smallest relative singular value of known gradients that adds a direction."""


def is_independent(
    quantity: Quantity, known: Sequence[Quantity], x: Float[Tensor, "n d"], exact: bool = False
) -> bool:
    """Return whether a quantity is not a function of known ones.

    `exact` quantities are conserved by equations. The coefficients of others come from the data
    alone, and no quadratic function of known ones may explain their values nearly.
    """
    if not known:
        return True
    few = x[:: -(-len(x) // MAX_STATES)]
    unit = x.std(0).clamp_min(1e-300)
    gradient = quantity.gradient(few) * unit
    others = torch.stack([other.gradient(few) * unit for other in known], -1)
    others = others / others.norm(dim=1, keepdim=True).clamp_min(1e-300)
    basis, values, _ = torch.linalg.svd(others, full_matrices=False)
    smallest = MIN_EXACT_SINGULAR_VALUE if exact else MIN_SINGULAR_VALUE
    basis = basis * (values > smallest * values[:, :1])[:, None]
    inside = torch.einsum("ndk,nd->nk", basis, gradient).square().sum(1)
    whole = gradient.square().sum(1)
    if exact:
        # A direction without errors would make every state count; use the middle of all states.
        new = (1 - inside / whole.clamp_min(1e-300)).median()
        errors = sum(_relative_errors(q, few, unit) for q in (quantity, *known))
        return float(new) > max(MIN_NEW, MIN_ERRORS * float(torch.as_tensor(errors).median()))
    fraction = 1 - inside.sum() / whole.sum()
    return float(fraction) > MAX_DEPENDENCE and unexplained(quantity, known, x) > MAX_UNEXPLAINED


def _relative_errors(
    quantity: Quantity, x: Float[Tensor, "n d"], unit: Float[Tensor, "d"]
) -> Float[Tensor, "n"]:
    """Return the expected squared error of the gradient, relative to its square."""
    gradients = quantity.library.gradients(x) * unit
    errors = (gradients.square().sum(-1) * quantity.errors.square()).sum(1)
    whole = (quantity.gradient(x) * unit).square().sum(1)
    result: Tensor = errors / whole.clamp_min(1e-300)
    return result


def unexplained(quantity: Quantity, known: Sequence[Quantity], x: Float[Tensor, "n d"]) -> float:
    """Return the fraction of the variance that a quadratic function of known ones leaves."""
    return float(unexplained_fractions(quantity(x)[:, None], known, x))


def unexplained_fractions(
    values: Float[Tensor, "n k"], known: Sequence[Quantity], x: Float[Tensor, "n d"]
) -> Float[Tensor, "k"]:
    """Return the fraction of each variance that a quadratic function of known ones leaves."""
    base = torch.stack([other(x) for other in known], 1)
    base = (base - base.mean(0)) / base.std(0)
    squares = (base[:, :, None] * base[:, None]).flatten(1)
    terms = torch.cat([torch.ones_like(base[:, :1]), base, squares], 1)
    # The redundant products require a solver for rank-deficient problems.
    fitted = terms @ torch.linalg.lstsq(terms, values, driver="gelsd").solution
    fractions: Tensor = (values - fitted).var(0) / values.var(0)
    return fractions
