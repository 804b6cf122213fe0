"""Words for conserved quantities: the known ones that they span, and their formulas."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.dynamics.algebra import (
    Algebra,
    generators,
    nbody_invariants,
    quantities,
    span,
    unitary,
)

NAMED = 0.98
"""Share of a known quantity that must lie in the span for its name to be used."""
SIGNED = 0.1
"""Eigenvalues below this share of the largest have no sign."""


@dataclass(frozen=True)
class Named:
    """A quantity of a span.

    Args:
        name: of the known quantity that it is the projection of, "energy-like", or "" if unknown.
        A: its matrix, of norm 1 together with b.
        b: its linear part.
        parallelness: share of the known quantity that lies in the span; 0 for an unknown one.
    """

    name: str
    A: Float[Tensor, "d d"]
    b: Float[Tensor, "d"]
    parallelness: float


def candidates(n: int) -> list[Algebra]:
    """Algebras that fit the number of degrees of freedom."""
    found = [unitary(n)]
    for dimension in (1, 2, 3):
        if n % dimension == 0:
            found.append(nbody_invariants(n // dimension, dimension))
    return found


def named(A: Float[Tensor, "k d d"], b: Float[Tensor, "k d"]) -> list[Named]:
    """A basis of the span of quantities: as many known ones as lie in it, then what is left.

    Args:
        A: symmetric matrices, in units in which states are about 1.
        b: linear parts.
    """
    rows = span(generators(A, b))
    shape = (A.shape[-1], A.shape[-1] + 1)
    choices = [_known(rows, known) for known in candidates(A.shape[-1] // 2)]
    picked = max(choices, key=lambda found: sum(inside for *_, inside in found))
    taken = torch.stack([row for _, row, _ in picked]) if picked else rows[:0]
    entries = [_entry(row.view(shape), name, inside) for name, row, inside in picked]
    for row in _complement(rows, taken):
        entries.append(_entry(row.view(shape), None, 0.0))
    return entries


def _known(rows: Float[Tensor, "m f"], known: Algebra) -> list[tuple[str, Tensor, float]]:
    """Independent known quantities near the span: name, projection, share inside."""
    flat = known.generators().flatten(1)
    flat = flat / flat.norm(dim=1, keepdim=True)
    inside = (flat @ rows.mT).norm(dim=1)
    found: list[tuple[str, Tensor, float]] = []
    for k in range(len(known)):
        projected = flat[k] @ rows.mT @ rows
        before = torch.stack([row for _, row, _ in found]) if found else rows[:0]
        new = _complement(projected[None], before)
        if len(found) < len(rows) and float(inside[k]) >= NAMED and len(new):
            found.append((known.names[k], projected, float(inside[k])))
    return found


def _complement(rows: Float[Tensor, "m f"], taken: Float[Tensor, "t f"]) -> Float[Tensor, "r f"]:
    """What rows span beside what is taken, orthonormal."""
    if len(taken):
        basis = torch.linalg.qr(taken.mT)[0].mT
        rows = rows - rows @ basis.mT @ basis
    _, s, vectors = torch.linalg.svd(rows, full_matrices=False)
    left: Tensor = vectors[s > 0.1]
    return left


def _entry(generator: Float[Tensor, "d e"], name: str | None, inside: float) -> Named:
    A, b = (part[0] for part in quantities(generator[None]))
    size = (A.square().sum() + b.square().sum()).sqrt()
    A, b = A / size, b / size
    if name is None:
        A, b = (-A, -b) if float(A.trace()) < 0 else (A, b)
        name = "energy-like" if _signed(torch.linalg.eigvalsh(A)) else ""
    return Named(name, A, b, inside)


def _signed(values: Float[Tensor, "d"]) -> bool:
    """Whether a form with these eigenvalues is one of positions and momenta, and never negative."""
    least = SIGNED * float(values.abs().max())
    return float(values.min()) > -least and int((values > least).sum()) > 1


def formula(
    A: Float[Tensor, "d d"],
    b: Float[Tensor, "d"],
    centre: Float[Tensor, "d"] | None = None,
    scale: Float[Tensor, "d"] | None = None,
    terms: int = 4,
) -> str:
    """The largest terms of a quadratic function, as in "0.71 q1 p2 - 0.7 q2 p1".

    Args:
        A: matrix.
        b: linear part.
        centre: write it as a function of x - centre.
        scale: how large the entries of x - centre are; 1 by default.
        terms: at most so many; if others are larger than 5 % of the first it ends with "+ ...".
    """
    d = len(b)
    n, size = d // 2, torch.ones(d) if scale is None else scale
    names = [f"q{i + 1}" for i in range(n)] + [f"p{i + 1}" for i in range(n)]
    if centre is not None:
        b = b + A @ centre
        shifts = zip(names, centre.tolist(), size.tolist(), strict=True)
        names = [_shifted(name, shift, unit) for name, shift, unit in shifts]
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


def _shifted(name: str, centre: float, scale: float) -> str:
    """Return a coordinate relative to its centre, written to 1 % of the scale or 3 digits."""
    if centre == 0:
        return name
    digits = max(3, 3 + math.floor(math.log10(abs(centre) / scale)))
    return f"({name} {'-' if centre > 0 else '+'} {abs(centre):.{digits}g})"
