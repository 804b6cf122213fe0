"""Move images by amounts, without artefacts that reveal them."""

import math

import pytest
import torch

from symrazor.data.transforms import rotated, translated
from symrazor.invariance.flows import Flow, ImageReader, image_flows, prepared_images


def _named(name: str, shape: tuple[int, ...] = (1, 20, 20)) -> Flow:
    return next(flow for flow in image_flows(shape) if flow.name == name)


def _smooth(n: int = 3, side: int = 20) -> torch.Tensor:
    """Return images that are functions of the position, and vanish at the border."""
    q = torch.arange(side) - (side - 1) / 2
    places = [(3.0, 0.0), (0.0, -4.0), (2.0, 2.0)][:n]
    blobs = [(-((q - a) ** 2 + (q[:, None] - b) ** 2) / 18).exp() for a, b in places]
    return torch.stack(blobs).unsqueeze(1)


def test_amounts_fill_their_cells() -> None:
    flow = _named("rotation")
    cell, amount = flow.draw(500, torch.Generator().manual_seed(0))
    expected = ((amount + math.pi) / (2 * math.pi) * flow.bins).floor().long()
    assert torch.equal(cell, expected) and amount.abs().max() <= math.pi
    shift = _named("x-translation")
    pixels = shift.amounts(torch.arange(shift.bins), torch.full((shift.bins,), 0.5))
    assert pixels.tolist() == pytest.approx([-2, -1, 0, 1, 2], abs=1e-5)
    assert _named("left-right flip").amounts(torch.tensor([0, 1]), torch.rand(2)).tolist() == [0, 1]


def test_flips_match_exact_ones() -> None:
    x = prepared_images(_smooth())
    zero, one = torch.zeros(3), torch.ones(3)
    for name, axis in (("left-right flip", -1), ("up-down flip", -2)):
        rest = _named(name).move(x, zero)
        assert torch.allclose(_named(name).move(x, one), rest.flip(axis), atol=1e-4)
        assert (rest - rest.flip(axis)).abs().max() > 0.5


def test_shifts_are_in_pixels_and_windows_stay_inside() -> None:
    x = torch.randn(2, 1, 20, 20, generator=torch.Generator().manual_seed(0))
    wide = torch.nn.functional.pad(x, (10,) * 4, value=100.0)  # any value outside
    flow = _named("x-translation")
    moved = flow.move(prepared_images(x), torch.full((2,), 2.0))
    other = prepared_images(torch.nn.functional.pad(x, (2,) * 4)[..., 2:22, 4:24])
    at_rest = flow.move(other, torch.zeros(2))
    scale = moved.std() / at_rest.std()
    assert torch.allclose(moved, at_rest * scale, atol=0.15)
    assert wide.isfinite().all() and float(moved[..., 0, :].abs().max()) == 0


def test_values_change_by_amounts() -> None:
    x = prepared_images(_smooth())
    inside = ImageReader((20, 20), 2).window(1) == 1
    rest = _named("brightness").move(x, torch.zeros(3))[..., inside]
    lighter = _named("brightness").move(x, torch.full((3,), 0.5))[..., inside]
    assert torch.allclose(lighter - rest, torch.full_like(rest, 0.5), atol=1e-6)
    double = _named("contrast").move(x, torch.full((3,), math.log(2)))[..., inside]
    assert (double.std(-1) / rest.std(-1)).tolist()[0] == pytest.approx([2.0], abs=1e-4)


@pytest.mark.parametrize("shape", [(3, 8, 12), (1, 70, 64)])
def test_flows_of_other_shapes(shape: tuple[int, ...]) -> None:
    x = torch.rand(4, *shape)
    for flow in image_flows(shape):
        _, amount = flow.draw(4, torch.Generator().manual_seed(0))
        moved = flow.move(prepared_images(x), amount)
        assert moved.shape[:2] == x.shape[:2]
        assert flow.is_polar or max(moved.shape[2:]) <= 16
        assert moved.isfinite().all()
    assert rotated(x, 10).shape == translated(x, 1).shape


def test_enlarged_images_are_equally_sharp() -> None:
    """An edge is as steep at every enlargement."""
    x = torch.zeros(5, 1, 24, 24)
    x[..., 12:] = 1.0
    flow = _named("scale", (1, 24, 24))
    amount = torch.linspace(-flow.end, flow.end, 5)
    rows = flow.move(prepared_images(x), amount)[:, 0, 5:7].mean(1)
    steepest = rows[:, 4:8].diff(dim=1).abs().amax(1)
    assert float(steepest.max() / steepest.min()) < 1.1
