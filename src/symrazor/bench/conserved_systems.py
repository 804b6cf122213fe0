# Over 400 lines: a catalogue of systems, one after the other.
"""Systems with known numbers of conserved quantities, for `symrazor bench conserved`.

Every system is an ordinary differential equation with a distribution of initial states.
`Case.quantities` counts the functionally independent quantities that the libraries of
`symrazor.dynamics.libraries` can express.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from symrazor.dynamics import systems
from symrazor.dynamics.mechanics import Field, solve
from symrazor.dynamics.systems import System
from symrazor.dynamics.trajectories import Trajectories

Start = Callable[[int, torch.Generator], Tensor]
DT = 0.25
TRANSIENT = 8.0
"""Time that chaotic and driven systems run before they are recorded."""
MANY = (100, 40)
"""Trajectories and states for systems with six coordinates that are not linear."""
MASSES = (1.0, 1.7, 0.6)
MAX_HENON_HEILES_ENERGY = 0.15


@dataclass(frozen=True)
class Case:
    """A system of the benchmark.

    Args:
        name: of the system.
        quantities: number of functionally independent quantities.
        field: its vector field.
        start: draws initial states.
        dt: time between two states.
        transient: time to run before recording.
        group: "conservative", "dissipative" or "chaotic".
        shape: numbers of trajectories and of states in each. Systems with many coordinates have
            larger libraries, which need more trajectories.
    """

    name: str
    quantities: int
    field: Field
    start: Start
    dt: float = DT
    transient: float = 0.0
    group: str = "conservative"
    shape: tuple[int, int] = (60, 40)

    def simulate(self, seed: int) -> Trajectories:
        """Return noise-free trajectories."""
        generator = torch.Generator().manual_seed(seed)
        count, states = self.shape
        start = self.start(count, generator)
        times = self.dt * torch.arange(states, dtype=torch.float64)
        if self.transient:
            ramp = torch.tensor([0.0, self.transient], dtype=torch.float64)
            start = solve(self.field, start, ramp, max_step=0.1)[:, -1]
        return Trajectories.of(solve(self.field, start, times, max_step=0.25), times)


def _normal(*scales: float, shift: tuple[float, ...] | None = None) -> Start:
    """Return independent normal entries with these standard deviations and means."""
    size = torch.tensor(scales, dtype=torch.float64)
    centre = torch.zeros_like(size) if shift is None else torch.tensor(shift, dtype=torch.float64)

    def start(count: int, generator: torch.Generator) -> Tensor:
        z = torch.randn(count, len(size), generator=generator, dtype=torch.float64)
        return centre + size * z

    return start


def _uniform(low: tuple[float, ...], high: tuple[float, ...]) -> Start:
    lower, upper = (torch.tensor(side, dtype=torch.float64) for side in (low, high))

    def start(count: int, generator: torch.Generator) -> Tensor:
        u = torch.rand(count, len(lower), generator=generator, dtype=torch.float64)
        return lower + (upper - lower) * u

    return start


def _of(name: str, quantities: int, system: System, **changes: Any) -> Case:
    return Case(name, quantities, system.field, system.start, **changes)


def _linear(name: str, quantities: int, matrix: Tensor, scales: tuple[float, ...]) -> Case:
    def field(x: Tensor) -> Tensor:
        return x @ matrix.mT

    return Case(name, quantities, field, _normal(*scales))


def _newton(stiffness: Tensor) -> Tensor:
    """Return the matrix of q' = p, p' = -K q."""
    n = len(stiffness)
    zero, identity = torch.zeros(n, n).double(), torch.eye(n).double()
    return torch.cat([torch.cat([zero, identity], 1), torch.cat([-stiffness, zero], 1)])


def _stiffness(n: int, springs: dict[tuple[int, int], float]) -> Tensor:
    """Return the matrix of springs between masses i and j; j = n is a wall."""
    K = torch.zeros(n, n, dtype=torch.float64)
    for (i, j), k in springs.items():
        K[i, i] += k
        if j < n:
            K[j, j] += k
            K[i, j] -= k
            K[j, i] -= k
    return K


def _random_symplectic(n: int, seed: int = 5) -> Tensor:
    """Return exp(J S) for a random symmetric S."""
    generator = torch.Generator().manual_seed(seed)
    S = 0.4 * torch.randn(2 * n, 2 * n, generator=generator, dtype=torch.float64)
    S = S + S.mT
    J = _newton(torch.eye(n).double())
    matrix: Tensor = torch.linalg.matrix_exp(J @ S)
    return matrix


def _hamiltonian(
    name: str, quantities: int, n: int, energy: Any, start: Start, **more: Any
) -> Case:
    return _of(name, quantities, System(name, n, energy, start), **more)


def _double_pendulum(x: Tensor) -> Tensor:
    """Angles and angular velocities; unit masses, lengths and gravity."""
    a, b, u, v = x.unbind(-1)
    bend = a - b
    c, s = bend.cos(), bend.sin()
    # M (u', v') = force, with M = [[2, c], [c, 1]].
    f = -s * v.square() - 2 * a.sin()
    g = s * u.square() - b.sin()
    determinant = 2 - c.square()
    return torch.stack([u, v, (f - c * g) / determinant, (2 * g - c * f) / determinant], -1)


def _bodies(gravity: float) -> Case:
    """Three bodies with unequal masses in the plane: positions, then momenta."""
    m = torch.tensor(MASSES, dtype=torch.float64)

    def energy(x: Tensor) -> Tensor:
        q, p = (half.unflatten(-1, (3, 2)) for half in x.chunk(2, -1))
        total = (p.square().sum(-1) / (2 * m)).sum(-1) + gravity * (m * q[..., 1]).sum(-1)
        for i, j in ((0, 1), (0, 2), (1, 2)):
            total = total - m[i] * m[j] / (q[..., i, :] - q[..., j, :]).norm(dim=-1)
        result: Tensor = total
        return result

    def start(count: int, generator: torch.Generator) -> Tensor:
        angle = torch.tensor([0.0, 2.1, 4.2], dtype=torch.float64)
        u = torch.rand(3, count, 3, generator=generator, dtype=torch.float64)
        angle = angle + 0.8 * u[0] + 6.28 * u[0, :, :1]
        radius = 1.8 + 0.6 * u[1]
        q = torch.stack([radius * angle.cos(), radius * angle.sin()], -1)
        q = q + torch.randn(count, 1, 2, generator=generator, dtype=torch.float64)
        p = 0.15 * m[:, None] * torch.randn(count, 3, 2, generator=generator, dtype=torch.float64)
        swirl = torch.stack([-angle.sin(), angle.cos()], -1)
        p = (
            p
            + 0.9 * m[:, None] * swirl
            + 0.4 * m[:, None] * torch.randn(count, 1, 2, generator=generator, dtype=torch.float64)
        )
        return torch.cat([q.flatten(1), p.flatten(1)], 1)

    name = "three bodies in a uniform field" if gravity else "three bodies, unequal masses"
    return _hamiltonian(name, 5, 6, energy, start, dt=0.2, shape=(200, 20))


def _magnetic(x: Tensor) -> Tensor:
    """Positions and velocities in a magnetic field along z."""
    u, v, w = x[..., 3:].unbind(-1)
    return torch.stack([u, v, w, 1.3 * v, -1.3 * u, 0 * w], -1)


def _electric_and_magnetic(x: Tensor) -> Tensor:
    u, v = x[..., 2:].unbind(-1)
    return torch.stack([u, v, 0.7 + 1.3 * v, -1.3 * u], -1)


def _toda(x: Tensor) -> Tensor:
    q, p = x.chunk(2, -1)
    return 0.5 * p.square().sum(-1) + (q - q.roll(1, -1)).exp().sum(-1)


def _fput(x: Tensor) -> Tensor:
    q, p = x.chunk(2, -1)
    stretch = torch.nn.functional.pad(q, (1, 1)).diff(dim=-1)
    return 0.5 * p.square().sum(-1) + (0.5 * stretch.square() + 0.25 * stretch**4).sum(-1)


def _calogero(x: Tensor) -> Tensor:
    q, p = x.chunk(2, -1)
    total = 0.5 * p.square().sum(-1)
    for i, j in ((0, 1), (0, 2), (1, 2)):
        total = total + 1 / (q[..., i] - q[..., j]).square()
    return total


def _henon_heiles() -> Case:
    """Start below the energy 1/6, above which trajectories escape to infinity."""
    system = systems.henon_heiles()
    draw = _normal(0.22, 0.22, 0.22, 0.22)

    def start(count: int, generator: torch.Generator) -> Tensor:
        x = draw(4 * count, generator)
        return x[system.energy(x) < MAX_HENON_HEILES_ENERGY][:count]

    return Case("Henon-Heiles", 1, system.field, start)


def _duffing(x: Tensor) -> Tensor:
    q, p = x.unbind(-1)
    return 0.5 * p.square() - 0.5 * q.square() + 0.25 * q**4


def _euler(x: Tensor) -> Tensor:
    """Angular velocities of a free rigid body with moments of inertia 1, 2, 3."""
    a, b, c = x.unbind(-1)
    return torch.stack([-b * c, a * c, -a * b / 3], -1)


def _top(x: Tensor) -> Tensor:
    """Angular momentum M and vertical direction g in the frame of a symmetric heavy top."""
    M, g = x.chunk(2, -1)
    spin = M / torch.tensor([1.0, 1.0, 0.5], dtype=x.dtype)
    weight = torch.tensor([0.0, 0.0, 1.0], dtype=x.dtype).expand_as(g)
    return torch.cat(
        [torch.linalg.cross(M, spin) + torch.linalg.cross(g, weight), torch.linalg.cross(g, spin)],
        -1,
    )


def _top_start(count: int, generator: torch.Generator) -> Tensor:
    z = torch.randn(2, count, 3, generator=generator, dtype=torch.float64)
    return torch.cat([z[0], z[1] / z[1].norm(dim=1, keepdim=True)], 1)


def _lotka_volterra(x: Tensor) -> Tensor:
    a, b = x.unbind(-1)
    return torch.stack([a * (1 - b), b * (a - 1)], -1)


def _vortices(x: Tensor) -> Tensor:
    """Three point vortices of unequal strength: x1, x2, x3, y1, y2, y3."""
    strength = torch.tensor(MASSES, dtype=x.dtype)
    a, b = x.chunk(2, -1)
    dx, dy = a[..., :, None] - a[..., None, :], b[..., :, None] - b[..., None, :]
    square = dx.square() + dy.square() + torch.eye(3, dtype=x.dtype)
    return torch.cat([(-dy / square) @ strength, (dx / square) @ strength], -1)


def _vortices_start(count: int, generator: torch.Generator) -> Tensor:
    u = torch.rand(2, count, 3, generator=generator, dtype=torch.float64)
    angle = torch.tensor([0.0, 2.1, 4.2], dtype=torch.float64) + 1.2 * u[0]
    angle = angle + 6.28 * torch.rand(count, 1, generator=generator, dtype=torch.float64)
    radius = 0.8 + 0.8 * u[1]
    centre = torch.randn(2, count, 1, generator=generator, dtype=torch.float64)
    return torch.cat([centre[0] + radius * angle.cos(), centre[1] + radius * angle.sin()], 1)


def _field(velocity: Any) -> Any:
    """Return the vector field of a function that takes and returns single coordinates."""
    return lambda x: torch.stack(velocity(*x.unbind(-1)), -1)


def _chaos(name: str, velocity: Any, low: Any, high: Any, dt: float) -> Case:
    return Case(name, 0, _field(velocity), _uniform(low, high), dt, TRANSIENT, "chaotic")


def _plane(name: str, velocity: Any, scales: tuple[float, float] = (1.0, 1.0)) -> Case:
    return Case(name, 0, _field(velocity), _normal(*scales), group="dissipative")


def _driven(x: Tensor) -> Tensor:
    """A driven oscillator, with the phase of the drive as a hidden coordinate."""
    q, p, phase = x.unbind(-1)
    return torch.stack([p, -q + 0.8 * phase.cos(), torch.full_like(q, 1.6)], -1)


class DrivenCase(Case):
    """A system whose last coordinate, the phase of its drive, is not observed."""

    def simulate(self, seed: int) -> Trajectories:
        """Return noise-free trajectories without the phase."""
        data = super().simulate(seed)
        return Trajectories.of(data.states[..., :-1], data.times)


def cases() -> list[Case]:
    """Return all systems of the benchmark."""
    d = torch.float64
    isotropic = _newton(torch.eye(2, dtype=d))
    angle = torch.tensor(0.6, dtype=d)
    turn = torch.stack(
        [torch.stack([angle.cos(), -angle.sin()]), torch.stack([angle.sin(), angle.cos()])]
    )
    rotated = turn @ torch.diag(torch.tensor([1.0, 3.0], dtype=d)) @ turn.mT
    S = _random_symplectic(2)
    chain = _stiffness(3, {(0, 3): 1.0, (0, 1): 1.6, (1, 2): 0.7, (2, 3): 1.2})
    ring = _stiffness(4, {(0, 1): 1.0, (1, 2): 1.6, (2, 3): 0.7, (0, 3): 1.2})
    return [
        _linear("isotropic oscillator", 3, isotropic, (1, 1, 0.7, 0.7)),
        _linear("oscillator, stiffness 1.5", 1, _newton(1.5 * torch.eye(1, dtype=d)), (1, 1)),
        _linear("oscillator, stiffness 3", 1, _newton(3 * torch.eye(1, dtype=d)), (1, 1)),
        _linear(
            "anisotropic oscillator",
            2,
            _newton(torch.diag(torch.tensor([1.0, 3.0], dtype=d))),
            (1,) * 4,
        ),
        _linear("rotated anisotropic oscillator", 2, _newton(rotated), (1,) * 4),
        _linear(
            "isotropic oscillator, symplectic coordinates",
            3,
            S @ isotropic @ torch.linalg.inv(S),
            (1,) * 4,
        ),
        _of("pendulum", 1, systems.pendulum().with_normal_start(1.2, 0.8)),
        Case("double pendulum", 1, _double_pendulum, _normal(1.0, 1.0, 0.8, 0.8), 0.15),
        _of("Kepler, 2-D", 3, systems.kepler(2)),
        _of("Kepler, 3-D", 5, systems.kepler(3), shape=MANY),
        _bodies(0.0),
        _bodies(0.5),
        Case("charged particle, magnetic field", 4, _magnetic, _normal(*[1.0] * 6)),
        Case(
            "charged particle, electric and magnetic field",
            2,
            _electric_and_magnetic,
            _normal(*[1.0] * 4),
        ),
        _linear("chain of springs", 3, _newton(chain), (1,) * 6),
        _linear("ring of springs", 4, _newton(ring), (1,) * 8),
        _hamiltonian("Toda lattice", 3, 3, _toda, _normal(*[0.8] * 6), shape=MANY),
        _hamiltonian("FPUT chain", 1, 3, _fput, _normal(*[1.0] * 6), shape=MANY),
        _hamiltonian(
            "Calogero-Moser",
            4,
            3,
            _calogero,
            _normal(0.2, 0.2, 0.2, 0.7, 0.7, 0.7, shift=(-1.4, 0, 1.4, 0, 0, 0)),
            dt=0.15,
            shape=MANY,
        ),
        _henon_heiles(),
        Case("rigid body", 2, _euler, _normal(1, 1, 1)),
        Case("spinning top", 3, _top, _top_start, shape=MANY),
        Case("Lotka-Volterra", 1, _lotka_volterra, _uniform((0.3, 0.3), (2.5, 2.5))),
        Case("point vortices", 4, _vortices, _vortices_start, shape=MANY),
        _hamiltonian("Duffing", 1, 1, _duffing, _normal(1.0, 0.7)),
        _plane("damped oscillator", lambda q, p: (p, -q - 0.3 * p)),
        DrivenCase(
            "driven oscillator",
            0,
            _driven,
            _uniform((-1, -1, 0), (1, 1, 6.28)),
            group="dissipative",
        ),
        _plane("damped pendulum", lambda q, p: (p, -q.sin() - 0.25 * p), (1.2, 0.8)),
        _plane("van der Pol", lambda q, p: (p, (1 - q * q) * p - q)),
        _plane("damped Duffing", lambda q, p: (p, q - q**3 - 0.2 * p)),
        _chaos(
            "Lorenz",
            lambda x, y, z: (10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z),
            (-8, -8, 15),
            (8, 8, 35),
            0.04,
        ),
        _chaos(
            "Rossler",
            lambda x, y, z: (-y - z, x + 0.2 * y, 0.2 + z * (x - 5.7)),
            (-4, -4, 0),
            (4, 4, 1),
            0.2,
        ),
        _chaos(
            "Thomas",
            lambda x, y, z: (y.sin() - 0.21 * x, z.sin() - 0.21 * y, x.sin() - 0.21 * z),
            (-2,) * 3,
            (2,) * 3,
            0.3,
        ),
        _chaos(
            "Chen",
            lambda x, y, z: (35 * (y - x), -7 * x - x * z + 28 * y, x * y - 3 * z),
            (-5, -5, 15),
            (5, 5, 25),
            0.02,
        ),
        _chaos(
            "Halvorsen",
            lambda x, y, z: (
                -1.4 * x - 4 * y - 4 * z - y * y,
                -1.4 * y - 4 * z - 4 * x - z * z,
                -1.4 * z - 4 * x - 4 * y - x * x,
            ),
            (-2,) * 3,
            (0,) * 3,
            0.04,
        ),
        _chaos("Sprott B", lambda x, y, z: (y * z, x - y, 1 - x * y), (-1,) * 3, (1,) * 3, 0.2),
        _chaos(
            "Lorenz 84",
            lambda x, y, z: (
                -y * y - z * z - 0.25 * x + 2,
                x * y - 4 * x * z - y + 1,
                4 * x * y + x * z - z,
            ),
            (0, -1, -1),
            (1, 1, 1),
            0.08,
        ),
        _chaos(
            "Rucklidge",
            lambda x, y, z: (-2 * x + 6.7 * y - y * z, x, -z + y * y),
            (-1, -1, 3),
            (1, 1, 6),
            0.1,
        ),
        _chaos(
            "Dadras",
            lambda x, y, z: (y - 3 * x + 2.7 * y * z, 1.7 * y - x * z + z, 2 * x * y - 9 * z),
            (-1,) * 3,
            (1,) * 3,
            0.05,
        ),
        _chaos(
            "Arneodo",
            lambda x, y, z: (y, z, 5.5 * x - 3.5 * y - z - x**3),
            (-1,) * 3,
            (1,) * 3,
            0.12,
        ),
    ]
