"""Words for a learned quantity: the known one it matches, and its formula."""

from jaxtyping import Float
from torch import Tensor

from symrazor.dynamics import analysis
from symrazor.dynamics.algebra import Algebra, all_nbody, unitary

NAMED = 0.9
"""Parallelness from which a direction gets the name of a known quantity."""


def candidates(n: int) -> list[Algebra]:
    """Algebras that fit the number of degrees of freedom."""
    found = [unitary(n)]
    for dimension in (1, 2, 3):
        if n % dimension == 0 and n // dimension >= 1:
            found.append(all_nbody(n // dimension, dimension))
    return found


def name_of(A: Tensor, b: Tensor) -> tuple[str, float]:
    """The name of the nearest known quantity, and how much lies in its algebra."""
    direction = Algebra(("",), A[None], b[None]).generators()
    best = ("unknown quantity", 0.0)
    for known in candidates(len(b) // 2):
        inside = float(analysis.parallelness(direction, known)[0])
        if inside > max(best[1] + 1e-3, NAMED):
            best = (analysis.best_names(direction, known, NAMED)[0], inside)
    return (formula(A, b), 0.0) if best[1] == 0.0 else best


def formula(A: Float[Tensor, "d d"], b: Float[Tensor, "d"], terms: int = 4) -> str:
    """The largest terms of a quadratic function, as in "0.71 q1 p2 - 0.70 q2 p1"."""
    n = len(b) // 2
    names = [f"q{i + 1}" for i in range(n)] + [f"p{i + 1}" for i in range(n)]
    parts = [(float(b[i]), names[i]) for i in range(2 * n)]
    for i in range(2 * n):
        parts.append((0.5 * float(A[i, i]), f"{names[i]}^2"))
        parts += [(float(A[i, j]), f"{names[i]} {names[j]}") for j in range(i + 1, 2 * n)]
    parts = sorted(parts, key=lambda part: -abs(part[0]))
    large = [part for part in parts[:terms] if abs(part[0]) > 0.05 * abs(parts[0][0])]
    text = " ".join(f"{'-' if c < 0 else '+'} {abs(c):.2f} {name}" for c, name in large)
    return text.removeprefix("+ ")
