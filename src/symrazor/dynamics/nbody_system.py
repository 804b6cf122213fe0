"""Bodies that attract each other, in any dimension."""

from collections.abc import Sequence

import torch
from torch import Tensor

from symrazor.dynamics.systems import Normal, System


def nbody(
    bodies: int = 3,
    dimension: int = 2,
    masses: Sequence[float] | None = None,
    softening: float = 1.0,
    gravity: float = 1.0,
) -> System:
    r"""Softened gravity between point masses.

    $$ H = \sum_i \frac{|p_i|^2}{2 m_i}
       - G \sum_{i<j} \frac{m_i m_j}{\sqrt{|q_i-q_j|^2 + \epsilon^2}} $$

    States are all positions, body by body, then all momenta. With equal masses in two dimensions
    seven quadratic quantities are conserved: $P_x$, $P_y$, the angular momenta of the whole and of
    the centre of mass, and the three products of $P_x$ and $P_y$.

    Raises:
        ValueError: fewer than two bodies, or masses that are not positive and one for each.
    """
    mass = [1.0] * bodies if masses is None else list(masses)
    if bodies < 2 or dimension < 1:
        raise ValueError(
            f"expected two bodies or more in one dimension or more, got {bodies} in {dimension}"
        )
    if len(mass) != bodies or min(mass) <= 0:
        raise ValueError(f"expected {bodies} positive masses, got {mass}")
    m = torch.tensor(mass, dtype=torch.float64)
    first, second = torch.triu_indices(bodies, bodies, offset=1).unbind()
    pairs = gravity * m[first] * m[second]

    def energy(x: Tensor) -> Tensor:
        q, p = (half.unflatten(-1, (bodies, dimension)) for half in x.chunk(2, dim=-1))
        kinetic = (p.square().sum(-1) / (2 * m.to(x))).sum(-1)
        gap = q[..., first.to(x.device), :] - q[..., second.to(x.device), :]
        distance = (gap.square().sum(-1) + softening**2).sqrt()
        total: Tensor = kinetic - (pairs.to(x) / distance).sum(-1)
        return total

    n = bodies * dimension
    return System(f"{bodies} bodies, {dimension}-D", n, energy, Normal(n), separable=True)
