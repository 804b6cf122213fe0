"""Poses of pictures found without a network."""

import math

import pytest
import torch
from torch import Tensor

from symrazor.experiments.congealed import congealed, report, spread


def _hands(degrees: Tensor, size: int = 29) -> Tensor:
    """A hand of a clock for each angle, drawn at that angle: no picture is resampled."""
    place = torch.arange(size) - size // 2
    down, right = torch.meshgrid(place.float(), place.float(), indexing="ij")
    angle = torch.deg2rad(degrees).view(-1, 1, 1)
    along, across = (
        right * angle.cos() - down * angle.sin(),
        right * angle.sin() + down * angle.cos(),
    )
    long = torch.sigmoid(along) * torch.sigmoid(11 - along)
    return (long * torch.exp(-across.square() / 4)).unsqueeze(1)


def test_angles_are_found_up_to_one_for_each_class() -> None:
    y = torch.arange(60) % 2
    lean = 20 * (2 * torch.rand(60, generator=torch.Generator().manual_seed(0)) - 1)
    pictures = _hands(lean + 70.0 * y)
    aligned, found = congealed(pictures, y)
    for label in (0, 1):
        own = y == label
        total = lean[own] - lean[own].mean() + (found[own] - found[own].mean())
        apart = lean[own] - lean[own].mean() - (found[own] - found[own].mean())
        assert min(total.abs().max(), apart.abs().max()) < 2.5
        assert aligned[own].std(0).mean() < 0.4 * pictures[own].std(0).mean()
    assert spread(found, y) == pytest.approx(spread(lean, y), rel=0.1)


def test_report_of_clock_hands() -> None:
    """Turns of up to 12 degrees on top of a lean of up to 6."""
    lean = 6 * (2 * torch.rand(120, generator=torch.Generator().manual_seed(5)) - 1)
    text = report(_hands(lean), torch.zeros(120, dtype=torch.long), turn=12.0)
    own, aligned, _ = (float(line.split(" | ")[1].strip(" |")) for line in text.splitlines()[2:5])
    assert own == pytest.approx(6 / math.sqrt(3), abs=1) and aligned < 1
    left = float(text.rsplit(": ", 1)[1].removesuffix(" degrees."))
    assert left == pytest.approx(12, abs=2)


def test_spread_of_even_angles() -> None:
    """v over the root of 3, whatever the classes' own angles."""
    even = torch.linspace(-30, 30, 3001)
    y = torch.cat([torch.zeros(3001), torch.ones(3001)]).long()
    assert spread(torch.cat([even, even + 50]), y) == pytest.approx(30 / math.sqrt(3), rel=1e-3)
