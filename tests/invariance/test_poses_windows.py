"""Test likelihoods of windows of poses against loops over inputs, places and poses."""

import math

import pytest
import torch
from torch import Tensor

from symrazor.invariance.poses import Windows


def _log_densities(n: int = 7, s: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    log_densities = 3 * torch.randn(n, s, generator=generator, dtype=torch.float64)
    return log_densities, torch.tensor([0, 2, 2, 0, 2, 0, 2])


def _ends_are_inside(c: int, m: int, s: int, around: int, circle: bool) -> bool:
    """Check that the points next to both ends, inside and outside, are on the right side."""
    inside = [(c + i) % around < s for i in range(m)]
    wraps = c + m > around
    return inside[0] and inside[-1] and (all(inside) or circle) and (not wraps or circle)


@pytest.mark.parametrize("uncovered", [None, 0.0, 0.5])
@pytest.mark.parametrize("m", [1, 5, 12])
def test_likelihood_by_loops(uncovered: float | None, m: int) -> None:
    log_densities, y = _log_densities()
    s = log_densities.shape[1]
    around = 2 * s if uncovered is None else s + round(uncovered * s)
    kernel = torch.zeros(around, dtype=torch.float64)
    kernel[:m] = 1 / m
    places = [c for c in range(around) if _ends_are_inside(c, m, s, around, uncovered is not None)]
    if m == s:
        places = [0]
    expected = 0.0
    for label in (0, 2):
        fits = []
        for c in places:
            density = kernel.roll(c)[:s] / kernel.roll(c)[:s].sum()
            fits.append((log_densities[y == label].exp() @ density).clamp(min=1e-300).log().sum())
        expected += float(torch.stack(fits).logsumexp(0)) - math.log(len(places))
    result = Windows(log_densities, y, uncovered).likelihoods([m])
    assert result == {m: pytest.approx(expected, rel=1e-9)}


def test_the_whole_circle_has_no_penalty() -> None:
    """There is no centre to choose, so nothing to pay for the choice."""
    log_densities, y = _log_densities()
    (value,) = Windows(log_densities, y, 0.0).likelihoods([12]).values()
    assert value == pytest.approx(float((log_densities.logsumexp(1) - math.log(12)).sum()))
