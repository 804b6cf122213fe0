"""First estimates of vector fields from velocities."""

import torch

from symrazor.dynamics.fields import NewtonianField
from symrazor.dynamics.libraries import libraries_for
from symrazor.dynamics.library import Library
from symrazor.dynamics.regression import regress, velocity_estimates
from symrazor.dynamics.trajectories import Trajectories


def test_terms_without_effect_are_removed_unless_all_are_wanted() -> None:
    x = torch.randn(300, 2, generator=torch.Generator().manual_seed(0)).double()
    library = next(
        lib for lib in libraries_for(x, ["q", "p"]) if lib.title == "quadratic functions"
    )
    velocity = torch.stack([x[:, 1], -x[:, 0] - 0.3 * x[:, 1]], 1)
    assert regress(library, x, velocity).terms == (("p",), ("q", "p"))
    every = regress(library, x, velocity, sparse=False)
    assert len(every.parameters) == 2 * (1 + len(library))
    torch.testing.assert_close(every(x), velocity)


def test_velocities_are_the_same_to_the_last_bit() -> None:
    """The default solver of torch reads memory that it has not written: 200 of 300 calls differ."""
    times = 0.25 * torch.arange(24, dtype=torch.float64)
    phase = torch.linspace(0, 6, 30, dtype=torch.float64)[:, None] + times
    motion = torch.stack([phase.sin(), phase.cos()], -1)
    data = Trajectories.of(motion, times).with_noise(1e-4, seed=1)
    noise = torch.full((2,), 1e-4).double()
    first = velocity_estimates(data, noise)
    for number in range(50):
        freed = [torch.full((size,), number % 3, dtype=torch.int32) for size in range(1, 17)] * 4
        del freed  # the solver may get this memory
        again = velocity_estimates(data, noise)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True)), number


def test_masses_remain_if_no_function_of_the_potential_is_significant() -> None:
    library = Library("linear functions", ["a", "b", "u", "v"], [], [(0,), (1,)])
    one = torch.ones(3, dtype=torch.float64)
    field = NewtonianField(library, one, 2 * one).only(torch.zeros(3, dtype=torch.bool))
    assert len(field.library) == 1 and field.inverse_masses.tolist() == [1.0, 2.0]
    x = torch.tensor([[0.1, 0.2, 0.3, 0.4]], dtype=torch.float64)
    assert field(x).tolist() == [[0.3, 0.4, -2.0, 0.0]]
