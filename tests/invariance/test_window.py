"""Estimate ranges of poses on a circle from angles with a known range."""

import math

import pytest
import torch
from torch import Tensor

from symrazor.invariance.window import Window, fit_line, fit_window, positions, predicted_angles


def _angles(degrees: float, error: float, outliers: float = 0.03, n: int = 300) -> Tensor:
    """Return uniform poses with normal errors and some misunderstood inputs."""
    generator = torch.Generator().manual_seed(0)
    u, chance, place = torch.rand(3, n, generator=generator, dtype=torch.float64)
    angle = math.radians(degrees) * (2 * u - 1)
    angle = angle + math.radians(error) * torch.randn(n, generator=generator, dtype=torch.float64)
    angle = torch.where(chance < outliers, 2 * math.pi * place, angle)
    return torch.atan2(angle.sin(), angle.cos())


def _in_degrees(window: Window) -> tuple[float, float, float]:
    low, middle, high = (math.degrees(v) for v in (window.low, window.range, window.high))
    return low, middle, high


@pytest.mark.parametrize(("degrees", "error"), [(30, 5), (60, 5), (120, 5), (60, 15), (120, 15)])
def test_errors_of_the_network_do_not_widen_the_range(degrees: int, error: int) -> None:
    low, middle, high = _in_degrees(fit_window(_angles(degrees, error)))
    assert middle == pytest.approx(degrees, abs=8)
    assert low <= degrees <= high and high - low < 50


def test_aligned_inputs_have_no_range() -> None:
    low, middle, high = _in_degrees(fit_window(_angles(0, 8)))
    assert low <= middle < 12 and high < 18


def test_angles_on_the_whole_circle() -> None:
    low, middle, high = _in_degrees(fit_window(_angles(180, 10)))
    assert middle == high == pytest.approx(180) and low > 120


def test_predicted_angles_are_mean_directions() -> None:
    bins = 36
    places = torch.tensor([0, 1, 9, 35])
    log_p = torch.full((4, bins), -5.0)
    for row, place in enumerate(places.tolist()):
        for step, value in ((-1, 1.0), (0, 2.0), (1, 1.0)):
            log_p[row, (place + step) % bins] = value
    expected = torch.tensor([0.0, 10.0, 90.0, -10.0], dtype=torch.float64)
    torch.testing.assert_close(predicted_angles(log_p.log_softmax(1)).rad2deg(), expected)


@pytest.mark.parametrize("v", [0.2, 0.5, 0.8, 1.0, 1.2, 1.6])
def test_ranges_on_a_line(v: float) -> None:
    """Predictions of a perfect observer of the sum of amount and pose, at every cell."""
    bins, draws = 9, 18
    generator = torch.Generator().manual_seed(0)
    pose = v * (2 * torch.rand(400, 1, generator=generator, dtype=torch.float64) - 1)
    within = torch.rand(400, draws, generator=generator, dtype=torch.float64)
    amount = 2 * (torch.arange(draws) % bins + within) / bins - 1
    cells = 2 * (torch.arange(bins) + 0.5) / bins - 1
    is_possible = ((pose + amount).unsqueeze(2) - cells).abs() <= max(v, 1 / bins)
    log_p = is_possible.double().log().clamp(min=-20).log_softmax(2)
    rounding = 1e-9 * torch.randn(log_p.shape, generator=generator, dtype=torch.float64)
    for predicted in (log_p, log_p + rounding):  # means of 0 have no sign, on any machine
        window = fit_line(positions(predicted))
        assert window.low - 0.05 <= v <= window.high + 0.05  # cells have a width of 0.1
        assert window.range == pytest.approx(v, abs=0.1)


def test_the_largest_range_that_is_read_on_a_line() -> None:
    """Where nothing is known, every mean is 0."""
    window = fit_line(positions(torch.zeros(50, 18, 9).log_softmax(2)))
    assert window.range > 1.7


def test_inputs_that_the_network_does_not_see_are_at_the_ends() -> None:
    """A tenth of the inputs at each end also fits a range beyond the ends."""
    poses = 0.78 * torch.linspace(-1, 1, 256, dtype=torch.float64)
    ends = torch.ones(32, dtype=torch.float64)
    window = fit_line(torch.cat([poses, ends, -ends]))
    assert window.low < 0.8 and window.high > 1
