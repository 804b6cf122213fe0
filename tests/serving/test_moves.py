"""Test the moves by hand against closed forms."""

import math

import pytest
import torch

from symrazor.serving.moves import controls, moved

ONE = torch.ones(1)
DRAWS = torch.Generator().manual_seed(0)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("image", (1, 8, 8)), ("volume", (1, 4, 6, 8)), ("series", (2, 30)), ("set", (5, 3)),
     ("vector", (4,))],
)  # fmt: skip
def test_controls_at_their_start_move_nothing(kind: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=DRAWS)
    start = {control.name: control.start for control in controls(kind, shape)}
    assert torch.equal(moved(x, kind, start, torch.ones(shape)), x)
    for control in controls(kind, shape):
        values = control.values(25)
        assert control.start in values and len(values) <= 27
        assert values == sorted(values) and values[0] == control.low and values[-1] == control.high


def test_pictures_are_shifted_mirrored_and_turned_exactly() -> None:
    x = torch.randn(1, 6, 6, generator=DRAWS)
    assert torch.equal(moved(x, "image", {"right": 2, "down": -1}, ONE), x.roll((-1, 2), (-2, -1)))
    assert torch.equal(moved(x, "image", {"mirror": 1}, ONE), x.flip(-1))
    assert torch.equal(moved(x, "image", {"turn": 90}, ONE), torch.rot90(x, 1, (-2, -1)))
    assert torch.equal(moved(x, "image", {"turn": -180}, ONE), x.flip(-1, -2))


def test_a_smooth_picture_is_turned_and_scaled_about_its_centre() -> None:
    size = 65
    axis = (torch.arange(size, dtype=torch.float64) - size // 2) / size
    row, column = torch.meshgrid(axis, axis, indexing="ij")

    def blob(x: float, y: float, width: float) -> torch.Tensor:
        return torch.exp(-((column - x) ** 2 + (row + y) ** 2) / (2 * width**2))[None]

    turned = moved(blob(0.2, 0.0, 0.05), "image", {"turn": 30}, ONE)
    right = blob(0.2 * math.cos(math.pi / 6), 0.2 * math.sin(math.pi / 6), 0.05)
    assert torch.allclose(turned, right, atol=0.03)
    scaled = moved(blob(0.1, 0.05, 0.06), "image", {"scale": 1.5}, ONE)
    assert torch.allclose(scaled, blob(0.15, 0.075, 0.09), atol=0.03)


def test_series_sets_and_vectors() -> None:
    x = torch.randn(2, 10, generator=DRAWS)
    expected = 2 * x.flip(-1).roll(3, -1)
    assert torch.equal(moved(x, "series", {"right": 3, "mirror": 1, "size": 2}, ONE), expected)
    points = torch.randn(5, 3, generator=DRAWS)
    turned = moved(points, "set", {"turn": 90}, ONE)
    right = torch.stack([-points[:, 1], points[:, 0], points[:, 2]], 1)
    assert torch.allclose(turned, right, atol=1e-6)
    order = moved(points, "set", {"order": 3}, ONE)
    assert not torch.equal(order, points)
    assert torch.equal(order.sort(0).values, points.sort(0).values)
    row = torch.tensor([1.0, 2.0, 4.0])
    scale = torch.tensor([1.0, 10.0, 100.0])
    assert moved(row, "vector", {"column 1": -0.5, "right": 1}, scale).tolist() == [4, 1, -3]
