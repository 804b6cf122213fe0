r"""Hamiltonian systems: an energy function and a distribution of initial states.

Every factory returns a `System`. Use `from_energy` for an energy function of your own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.dynamics.mechanics import Field, Scalar, degrees_of_freedom, hamiltonian_field

Start = Callable[[int, torch.Generator], Tensor]
"""(count, generator) -> initial states [count, 2n]."""


@dataclass(frozen=True)
class NormalStart:
    """Initial states of n degrees of freedom with independent normal entries.

    Positions have mean `shift` and standard deviation q, momenta have mean 0 and deviation p.
    """

    n: int
    q: float = 1.0
    p: float = 0.5
    shift: float = 0.0

    def __call__(self, count: int, generator: torch.Generator) -> Float[Tensor, "b d"]:
        """Draw `count` states in float64."""
        z = torch.randn(count, 2 * self.n, generator=generator, dtype=torch.float64)
        return torch.cat([self.shift + self.q * z[:, : self.n], self.p * z[:, self.n :]], dim=1)


@dataclass(frozen=True)
class System:
    r"""A Hamiltonian system.

    Args:
        name: for reports.
        n: degrees of freedom; states have 2n entries $(q, p)$.
        energy: differentiable $H$: [..., 2n] -> [...].
        start: draws initial states; by default normal, with standard deviation 1 for positions and
            0.5 for momenta.
    """

    name: str
    n: int
    energy: Scalar
    start: Start = None  # type: ignore[assignment]  # set in __post_init__, where n is known

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"n must be at least 1 degree of freedom, got {self.n}.")
        if self.start is None:
            object.__setattr__(self, "start", NormalStart(self.n))

    @property
    def field(self) -> Field:
        r"""The vector field $J\nabla H$, by automatic differentiation."""
        return hamiltonian_field(self.energy)

    def with_start(self, start: Start) -> "System":
        """Return the same system with another distribution of initial states."""
        return replace(self, start=start)

    def with_normal_start(self, q: float = 1.0, p: float = 0.5, shift: float = 0.0) -> "System":
        """Return the same system with a `NormalStart`."""
        return self.with_start(NormalStart(self.n, q, p, shift))


def oscillators(frequencies: Sequence[float] = (1.0,)) -> System:
    r"""Return oscillators, $H = \tfrac12 \sum_i \omega_i (q_i^2 + p_i^2)$; U(n) if isotropic."""
    omega = torch.tensor(list(frequencies), dtype=torch.float64)

    def energy(x: Tensor) -> Tensor:
        q, p = x.chunk(2, dim=-1)
        return 0.5 * (omega.to(x) * (q.square() + p.square())).sum(-1)

    n = len(omega)
    same = len(set(frequencies)) == 1
    name = "oscillator" if n == 1 else f"{n} oscillators{'' if same else ', anisotropic'}"
    return System(name, n, energy)


def pendulum(gravity: float = 1.0) -> System:
    r"""Return a pendulum, $H = \tfrac12 p^2 - g\cos q$; it conserves no quadratic quantity."""

    def energy(x: Tensor) -> Tensor:
        return 0.5 * x[..., 1].square() - gravity * x[..., 0].cos()

    return System("pendulum", 1, energy)


def henon_heiles(strength: float = 1.0) -> System:
    r"""Return Henon-Heiles, $H = \tfrac12|p|^2 + \tfrac12|q|^2 + \lambda (q_1^2 q_2 - q_2^3/3)$.

    Initial states lie well inside the bounded region $H < 1/(6\lambda^2)$.
    """

    def energy(x: Tensor) -> Tensor:
        q1, q2, p1, p2 = x.unbind(-1)
        well = 0.5 * (q1.square() + q2.square() + p1.square() + p2.square())
        return well + strength * (q1.square() * q2 - q2**3 / 3)

    return System("Henon-Heiles", 2, energy, NormalStart(2, q=0.15, p=0.15))


def kepler(dimension: int = 2, softening: float = 0.0, mass: float = 1.0) -> System:
    r"""Return the Kepler problem, $H = |p|^2/2m - 1/\sqrt{|q|^2 + \epsilon^2}$; bound orbits.

    It conserves the angular momentum, which is quadratic, and for $\epsilon = 0$ the Runge-Lenz
    vector, which is not. Orbits start at an apsis.
    """

    def energy(x: Tensor) -> Tensor:
        q, p = x.chunk(2, dim=-1)
        distance = (q.square().sum(-1) + softening**2).sqrt()
        return p.square().sum(-1) / (2 * mass) - 1 / distance

    def start(count: int, generator: torch.Generator) -> Tensor:
        z = torch.randn(2, count, dimension, generator=generator, dtype=torch.float64)
        direction = z[0] / z[0].norm(dim=1, keepdim=True)
        tangent = z[1] - (z[1] * direction).sum(1, keepdim=True) * direction
        tangent = tangent / tangent.norm(dim=1, keepdim=True)
        u = torch.rand(2, count, 1, generator=generator, dtype=torch.float64)
        radius = 0.7 + 0.6 * u[0]
        speed = (0.8 + 0.35 * u[1]) * (mass / radius).sqrt()
        return torch.cat([radius * direction, speed * tangent], dim=1)

    return System(f"Kepler, {dimension}-D", dimension, energy, start)


def nbody(
    bodies: int = 3,
    dimension: int = 2,
    masses: Sequence[float] | None = None,
    softening: float = 1.0,
    gravity: float = 1.0,
) -> System:
    r"""Return point masses with softened gravity, in any dimension.

    $$ H = \sum_i \frac{|p_i|^2}{2 m_i}
       - G \sum_{i<j} \frac{m_i m_j}{\sqrt{|q_i-q_j|^2 + \epsilon^2}} $$

    States are all positions, body by body, then all momenta. Equal masses in the plane conserve
    seven quadratic quantities: $P_x$, $P_y$, the total angular momentum, the angular momentum of
    the centre of mass, and the three products of $P_x$ and $P_y$.
    """
    mass = [1.0] * bodies if masses is None else list(masses)
    if bodies < 2 or dimension < 1:
        raise ValueError(
            f"nbody needs at least 2 bodies in at least 1 dimension, got {bodies} in {dimension}."
        )
    if len(mass) != bodies or min(mass) <= 0:
        raise ValueError(f"masses must be {bodies} positive numbers, got {mass}.")
    m = torch.tensor(mass, dtype=torch.float64)
    first, second = torch.triu_indices(bodies, bodies, offset=1).unbind()
    strengths = gravity * m[first] * m[second]

    def energy(x: Tensor) -> Tensor:
        q, p = (half.unflatten(-1, (bodies, dimension)) for half in x.chunk(2, dim=-1))
        kinetic = (p.square().sum(-1) / (2 * m.to(x))).sum(-1)
        gap = q[..., first.to(x.device), :] - q[..., second.to(x.device), :]
        distance = (gap.square().sum(-1) + softening**2).sqrt()
        total: Tensor = kinetic - (strengths.to(x) / distance).sum(-1)
        return total

    n = bodies * dimension
    return System(f"{bodies} bodies, {dimension}-D", n, energy, NormalStart(n))


def from_energy(
    energy: Scalar, phase: int, name: str = "user-defined", start: Start | None = None
) -> System:
    """Return a system with any differentiable energy [..., phase] -> [...].

    `phase` is the number of entries of a state. By default states start as in `NormalStart`. An odd
    `phase`, or an energy that does not return one number per state, raises ValueError.
    """
    n = degrees_of_freedom(phase)
    probe = energy(torch.zeros(3, phase, dtype=torch.float64).uniform_(0.5, 1.0))
    if probe.shape != (3,):
        raise ValueError(
            "The energy must return one number per state: "
            f"[3, {phase}] -> [3], got shape {list(probe.shape)}."
        )
    return System(name, n, energy, start or NormalStart(n))
