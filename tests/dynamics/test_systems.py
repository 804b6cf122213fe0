"""Mechanics, systems and trajectories, against scipy, closed forms and convergence rates."""

import math

import pytest
import torch
from dynamics_case import is_symplectic, poisson_bracket
from scipy.integrate import solve_ivp

from symrazor.dynamics import mechanics, systems
from symrazor.dynamics.mechanics import (
    apply_symplectic_form,
    degrees_of_freedom,
    solve,
    symplectic_form,
)
from symrazor.dynamics.systems import nbody
from symrazor.dynamics.trajectories import Trajectories, simulate, transitions

SYSTEMS = [
    systems.oscillators((1.0, math.sqrt(2))),
    systems.pendulum(),
    systems.kepler(3, softening=0.3),
    systems.henon_heiles(),
    nbody(3, 1, masses=(1.0, 2.0, 0.5)),
    systems.from_energy(lambda x: (x**4).sum(-1) + x[..., 0] * x[..., 1], 2),
]


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda s: s.name)
def test_solve_agrees_with_scipy_and_conserves_energy(system: systems.System) -> None:
    start = system.start(2, torch.Generator().manual_seed(3))
    times = torch.tensor([0.0, 0.3, 1.0])
    states = solve(system.field, start, times)

    def rhs(_: float, y: object) -> object:
        return system.field(torch.as_tensor(y)[None])[0].numpy()

    for x0, path in zip(start, states, strict=True):
        answer = solve_ivp(rhs, (0, 1), x0.numpy(), "DOP853", times.numpy(), rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(path, torch.from_numpy(answer.y.T), rtol=0, atol=2e-8)
    energy = system.energy(states)
    assert (energy - energy[:, :1]).abs().max() < 1e-8


def test_field_matches_finite_differences_of_the_energy() -> None:
    system = nbody(2, 2, masses=(1.0, 3.0), softening=0.5)
    x = system.start(4, torch.Generator().manual_seed(0))
    J = symplectic_form(4)
    step = 1e-6 * torch.eye(8, dtype=torch.float64)
    slope = (system.energy(x[:, None] + step) - system.energy(x[:, None] - step)) / 2e-6
    torch.testing.assert_close(system.field(x), slope @ J.mT, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(apply_symplectic_form(slope), slope @ J.mT)


def test_poisson_brackets_of_the_kepler_problem() -> None:
    system = systems.kepler(2)
    x = system.start(5, torch.Generator().manual_seed(1))

    def spin(x: torch.Tensor) -> torch.Tensor:
        return x[..., 0] * x[..., 3] - x[..., 1] * x[..., 2]

    assert poisson_bracket(spin, system.energy, x).abs().max() < 1e-12
    bracket = poisson_bracket(lambda x: x[..., 0], system.energy, x)
    torch.testing.assert_close(bracket, x[:, 2])  # the velocity


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("euler", 1),
        ("heun", 2),
        ("midpoint", 2),
        ("rk4", 4),
        ("implicit-midpoint", 2),
        ("leapfrog", 2),
        ("yoshida4", 4),
    ],
)
def test_integrators_converge_with_their_order(
    name: mechanics.IntegratorName, expected: int
) -> None:
    system = systems.pendulum()
    step = mechanics.INTEGRATORS[name]
    x = torch.tensor([[0.7, 0.4]], dtype=torch.float64)
    truth = solve(system.field, x, torch.tensor([0.0, 1.0]), 1e-13)[:, -1]
    errors = [
        (mechanics.advance(step, system.field, x, 1.0, n) - truth).norm().item() for n in (16, 32)
    ]
    order = math.log2(errors[0] / errors[1])
    assert order == pytest.approx(expected, abs=0.3)


@pytest.mark.parametrize("name", ["implicit-midpoint", "leapfrog", "yoshida4"])
def test_symplectic_integrators_are_symplectic(name: mechanics.IntegratorName) -> None:
    system = systems.henon_heiles()
    step = mechanics.INTEGRATORS[name]
    x = torch.tensor([0.1, 0.2, -0.1, 0.15], dtype=torch.float64)

    def field(x: torch.Tensor) -> torch.Tensor:
        q1, q2, p1, p2 = x.unbind(-1)
        return torch.stack([p1, p2, -q1 - 2 * q1 * q2, -q2 - q1**2 + q2**2], -1)

    torch.testing.assert_close(field(x), system.field(x))
    h = 0.02 if name == "implicit-midpoint" else 0.3  # where the fixed-point iteration converges
    jacobian = torch.func.jacrev(lambda x: step(field, x, h))(x)
    assert is_symplectic(jacobian, 1e-8)
    assert not is_symplectic(torch.func.jacrev(lambda x: mechanics.euler(field, x, 0.3))(x))


def test_step_sizes_may_differ_between_states() -> None:
    system = systems.pendulum()
    x = torch.randn(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    h = torch.tensor([[0.1], [0.2], [0.3]], dtype=torch.float64)
    together = mechanics.rk4(system.field, x, h)
    for row in range(3):
        alone = mechanics.rk4(system.field, x[row], float(h[row]))
        torch.testing.assert_close(together[row], alone)


def test_from_energy_and_nbody_validate_their_input() -> None:
    with pytest.raises(ValueError, match="even number of entries, got 3"):
        systems.from_energy(lambda x: x.sum(-1), 3)
    with pytest.raises(ValueError, match=r"\[3, 2\] -> \[3\], got shape \[3, 2\]"):
        systems.from_energy(lambda x: x, 2)
    with pytest.raises(ValueError, match="masses must be 3 positive numbers, got"):
        nbody(3, 2, masses=(1.0, -1.0, 1.0))
    assert degrees_of_freedom(6) == 3


def test_solve_raises_if_the_tolerance_is_not_reached() -> None:
    with pytest.raises(FloatingPointError, match="do not reach the tolerance .* Soften"):
        solve(lambda x: x**3, torch.full((1, 2), 1e3), torch.tensor([0.0, 2.0]))


# ------------------------------------------------------------------------------------ trajectories


def test_invalid_trajectories_raise_with_trajectory_and_row() -> None:
    x = torch.randn(2, 4, 2, dtype=torch.float64)
    t = torch.arange(4.0)
    with pytest.raises(ValueError, match="got 2 then 1 in trajectory 1, rows 2 and 3"):
        Trajectories.of(x, torch.stack([t, torch.tensor([0.0, 1.0, 2.0, 1.0])]))
    with pytest.raises(ValueError, match=r"times must have shape \[4\] or \[2, 4\], got \[5\]"):
        Trajectories.of(x, torch.arange(5.0))
    with pytest.raises(ValueError, match="states must have shape"):
        Trajectories.of(x[0], t)
    x[1, 2, 0] = torch.inf
    with pytest.raises(ValueError, match="Infinite state in trajectory 1, row 2"):
        Trajectories.of(x, t)


def test_transitions_leave_out_missing_states() -> None:
    x = torch.arange(20.0, dtype=torch.float64).view(2, 5, 2)
    x[0, 2, 1] = torch.nan
    data = transitions(Trajectories.of(x, torch.tensor([0.0, 1.0, 3.0, 4.0, 6.0])))
    assert len(data) == 6  # of eight, two touch the missing state
    torch.testing.assert_close(data.y[:, 0] - data.x, torch.full((6, 2), 2.0, dtype=torch.float64))
    assert data.gaps[:, 0].tolist() == [1.0, 2.0, 1.0, 2.0, 1.0, 2.0]
    windows = transitions(Trajectories.of(x, torch.arange(5.0)), horizon=2)
    assert windows.observed.tolist()[:2] == [[1.0, 0.0], [0.0, 1.0]]
    with pytest.raises(ValueError, match="No two consecutive states"):
        transitions(Trajectories.of(torch.full((1, 2, 2), torch.nan), torch.arange(2.0)))


def test_seeds_of_simulation_and_noise() -> None:
    system = systems.oscillators()
    a, repeated, b = (simulate(system, 3, 2, 0.2, seed) for seed in (1, 1, 2))
    assert torch.equal(a.states, repeated.states)
    assert (a.states[:, 0] - b.states[:, 0]).abs().min() > 1e-4
    first, second = (transitions(a, 1e-2, seed=5) for _ in range(2))
    assert torch.equal(first.y, second.y)
    clean = transitions(a)
    assert (first.x == clean.x).all() and (first.y != clean.y).all()
    assert a.with_noise(1e-2, 0).states.sub(a.states).std().item() == pytest.approx(0.1, rel=0.5)
