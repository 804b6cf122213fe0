r"""Hamiltonian systems: an energy function, and where trajectories start.

Every factory returns a `System`; `System(name, n, energy)` is all it takes for one of your own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.dynamics.phase import Field, Scalar, freedom, hamiltonian_field

Start = Callable[[int, torch.Generator], Tensor]


@dataclass(frozen=True)
class Normal:
    """Initial states with independent normal positions and momenta.

    Args:
        n: degrees of freedom.
        q: standard deviation of positions.
        p: standard deviation of momenta.
        shift: added to every position.
    """

    n: int
    q: float = 1.0
    p: float = 0.5
    shift: float = 0.0

    def __call__(self, count: int, generator: torch.Generator) -> Float[Tensor, "b d"]:
        """`count` states in float64."""
        z = torch.randn(count, 2 * self.n, generator=generator, dtype=torch.float64)
        return torch.cat([self.shift + self.q * z[:, : self.n], self.p * z[:, self.n :]], dim=1)


@dataclass(frozen=True)
class System:
    r"""A Hamiltonian system.

    Args:
        name: for reports.
        n: degrees of freedom; states have 2n entries $(q, p)$.
        energy: $H$: [..., 2n] -> [...], differentiable.
        start: how trajectories start; standard normal positions and momenta of half that size
            where nothing is said.
        separable: whether $H = T(p) + V(q)$, which leapfrog needs.
    """

    name: str
    n: int
    energy: Scalar
    start: Start = None  # type: ignore[assignment]  # set below, where n is known
    separable: bool = False

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"expected at least one degree of freedom, got n={self.n}")
        if self.start is None:
            object.__setattr__(self, "start", Normal(self.n))

    @property
    def field(self) -> Field:
        r"""$J\nabla H$, by automatic differentiation."""
        return hamiltonian_field(self.energy)

    def started(self, start: Start) -> "System":
        """The same system with trajectories that start elsewhere."""
        return replace(self, start=start)

    def started_normal(self, q: float = 1.0, p: float = 0.5, shift: float = 0.0) -> "System":
        """The same system started from normal positions and momenta."""
        return self.started(Normal(self.n, q, p, shift))


def oscillators(frequencies: Sequence[float] = (1.0,)) -> System:
    r"""$H = \tfrac12 \sum_i \omega_i (q_i^2 + p_i^2)$: U(n) symmetric if all $\omega$ are equal."""
    omega = torch.tensor(list(frequencies), dtype=torch.float64)

    def energy(x: Tensor) -> Tensor:
        q, p = x.chunk(2, dim=-1)
        return 0.5 * (omega.to(x) * (q.square() + p.square())).sum(-1)

    n = len(omega)
    same = len(set(frequencies)) == 1
    name = "oscillator" if n == 1 else f"{n} oscillators{'' if same else ', anisotropic'}"
    return System(name, n, energy, separable=True)


def pendulum(gravity: float = 1.0) -> System:
    r"""$H = \tfrac12 p^2 - g\cos q$: no quadratic quantity is conserved."""

    def energy(x: Tensor) -> Tensor:
        return 0.5 * x[..., 1].square() - gravity * x[..., 0].cos()

    return System("pendulum", 1, energy, separable=True)


def double_pendulum(gravity: float = 1.0, lengths: tuple[float, float] = (1.0, 1.0)) -> System:
    """Two unit masses on rods, angles from the vertical; chaotic at high energy."""
    l1, l2 = lengths

    def energy(x: Tensor) -> Tensor:
        q1, q2, p1, p2 = x.unbind(-1)
        bend = q1 - q2
        inertia = 1 + bend.sin().square()
        kinetic = (
            l2**2 * p1.square() + 2 * l1**2 * p2.square() - 2 * l1 * l2 * p1 * p2 * bend.cos()
        ) / (2 * l1**2 * l2**2 * inertia)
        return kinetic - gravity * (2 * l1 * q1.cos() + l2 * q2.cos())

    return System("double pendulum", 2, energy)


def henon_heiles(strength: float = 1.0) -> System:
    r"""$H = \tfrac12|p|^2 + \tfrac12|q|^2 + \lambda (q_1^2 q_2 - q_2^3/3)$.

    Started well inside the bounded region $H < 1/(6\lambda^2)$.
    """

    def energy(x: Tensor) -> Tensor:
        q1, q2, p1, p2 = x.unbind(-1)
        well = 0.5 * (q1.square() + q2.square() + p1.square() + p2.square())
        return well + strength * (q1.square() * q2 - q2**3 / 3)

    return System("Henon-Heiles", 2, energy, Normal(2, q=0.15, p=0.15), separable=True)


def kepler(dimension: int = 2, softening: float = 0.0, mass: float = 1.0) -> System:
    r"""$H = |p|^2/2m - 1/\sqrt{|q|^2 + \epsilon^2}$, started on bound, not too eccentric orbits.

    Angular momentum is quadratic; the Runge-Lenz vector ($\epsilon = 0$) is not.
    """

    def energy(x: Tensor) -> Tensor:
        q, p = x.chunk(2, dim=-1)
        distance = (q.square().sum(-1) + softening**2).sqrt()
        return p.square().sum(-1) / (2 * mass) - 1 / distance

    def start(count: int, generator: torch.Generator) -> Tensor:
        z = torch.randn(2, count, dimension, generator=generator, dtype=torch.float64)
        direction = z[0] / z[0].norm(dim=1, keepdim=True)
        across = z[1] - (z[1] * direction).sum(1, keepdim=True) * direction
        across = across / across.norm(dim=1, keepdim=True)
        u = torch.rand(2, count, 1, generator=generator, dtype=torch.float64)
        radius = 0.7 + 0.6 * u[0]
        speed = (0.8 + 0.35 * u[1]) * (mass / radius).sqrt()
        return torch.cat([radius * direction, speed * across], dim=1)

    return System(f"Kepler, {dimension}-D", dimension, energy, start, separable=True)


def rigid_body(inertia: tuple[float, float, float] = (1.0, 2.0, 3.0)) -> System:
    r"""A free rigid body in canonical coordinates: Euler angles (z-x-z) and their momenta.

    $H = \tfrac12 \sum_i L_i^2 / I_i$ with body components of the angular momentum
    $L_1 = ((p_\phi - p_\psi\cos\theta)\sin\psi)/\sin\theta + p_\theta\cos\psi$ and so on. It is
    started away from the poles $\theta = 0, \pi$, where the angles are singular.
    """
    i1, i2, i3 = inertia

    def energy(x: Tensor) -> Tensor:
        _, theta, psi, p_phi, p_theta, p_psi = x.unbind(-1)
        tilt = (p_phi - p_psi * theta.cos()) / theta.sin()
        l1 = tilt * psi.sin() + p_theta * psi.cos()
        l2 = tilt * psi.cos() - p_theta * psi.sin()
        return 0.5 * (l1.square() / i1 + l2.square() / i2 + p_psi.square() / i3)

    def start(count: int, generator: torch.Generator) -> Tensor:
        u = torch.rand(count, 6, generator=generator, dtype=torch.float64)
        low = torch.tensor([-1.0, 1.2, -1.0, -0.3, -0.3, -0.3], dtype=torch.float64)
        wide = torch.tensor([2.0, 0.7, 2.0, 0.6, 0.6, 0.6], dtype=torch.float64)
        return low + wide * u

    return System("rigid body", 3, energy, start)


def own(energy: Scalar, phase: int, name: str = "user's", start: Start | None = None) -> System:
    """A system from any differentiable energy.

    Args:
        energy: [..., phase] -> [...].
        phase: entries of a state, twice the degrees of freedom.
        name: for reports.
        start: (count, generator) -> states; normal by default.

    Raises:
        ValueError: an odd `phase`, or an energy that does not return one number for each state.
    """
    n = freedom(phase)
    probe = energy(torch.zeros(3, phase, dtype=torch.float64).uniform_(0.5, 1.0))
    if probe.shape != (3,):
        raise ValueError(f"expected an energy [3, {phase}] -> [3], got shape {tuple(probe.shape)}")
    return System(name, n, energy, start or Normal(n))
