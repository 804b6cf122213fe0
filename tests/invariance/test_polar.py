"""Read images in polar coordinates, and predict angles equivariantly."""

import math

import pytest
import torch
from torch import Tensor

from symrazor.invariance import polar
from symrazor.invariance.flows import prepared_images
from symrazor.invariance.polar import ANGLES, TurnNetwork, polar_view


@pytest.fixture
def _still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read without random enlargement and shift."""
    monkeypatch.setattr(polar, "MAX_ENLARGEMENT", 0.0)
    monkeypatch.setattr(polar, "MAX_SHIFT", 0.0)


def _blob(x: float, y: float, h: int = 20, w: int = 20) -> Tensor:
    column, row = torch.arange(w) - (w - 1) / 2, torch.arange(h) - (h - 1) / 2
    return (-((column - x) ** 2 + (row[:, None] - y) ** 2) / 8).exp()[None, None]


@pytest.mark.usefixtures("_still")
@pytest.mark.parametrize("size", [(20, 20), (20, 32)])
def test_places_of_a_blob_are_known(size: tuple[int, int]) -> None:
    image = prepared_images(_blob(0.0, 4.0, *size))
    for amount in (0.0, 1.0, -2.5):
        view = polar_view(size, image, torch.tensor([amount]))[0, 0]
        expected = math.pi / 2 + amount  # y points down, and angles from x to y
        ring, angle = divmod(int(view.argmax()), ANGLES)
        error = 2 * math.pi * angle / ANGLES - expected
        assert abs(math.remainder(error, 2 * math.pi)) <= math.pi / ANGLES + 1e-6
        assert 10 * 0.85 * (ring + 0.5) / 8 == pytest.approx(4.0, abs=0.6)


@pytest.mark.usefixtures("_still")
def test_rotations_shift_predictions() -> None:
    torch.manual_seed(0)
    network = TurnNetwork(1, 3).eval()
    image, y = prepared_images(torch.randn(4, 1, 20, 20)), torch.tensor([0, 1, 2, 0])
    cell = 2 * math.pi / (ANGLES // 2)
    rest = network(polar_view((20, 20), image, torch.zeros(4)), y)
    turned = network(polar_view((20, 20), image, torch.full((4,), 5 * cell)), y)
    for before, after in zip(rest, turned, strict=True):
        assert torch.allclose(after, before.roll(5, 1), atol=1e-4)
        assert torch.allclose(after.exp().sum(1), torch.ones(4), atol=1e-5)
    assert not torch.allclose(*rest)


def test_readings_stay_inside_and_angles_leave_no_trace_in_noise() -> None:
    torch.manual_seed(0)
    noise = prepared_images(torch.randn(400, 1, 20, 20))
    framed = noise.clone()
    framed[:, :, [0, -1]] = framed[..., [0, -1]] = 100.0
    amount = torch.zeros(400)
    assert float(polar_view((20, 20), framed, amount).max()) < 50
    power = polar_view((20, 20), noise, amount)[:, :, :6].square().mean((0, 1, 2))
    quadrants = power.view(4, -1).mean(0)
    assert float(quadrants.max() / quadrants.min()) < 1.1
