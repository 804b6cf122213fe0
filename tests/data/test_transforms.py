"""Test transformations of images against loops over pixels."""

import math
from collections.abc import Callable

import pytest
import torch
from work import Work

from symrazor.data import (
    digits,
    flip_and_crop,
    normalised,
    on_canvas,
    quadrants,
    resized,
    rotated,
    scaled,
    transforms,
    translated,
)


def _bilinear(image: torch.Tensor, row: float, column: float) -> float:
    """One point between pixels, zero outside."""
    h, w = image.shape
    i, j = math.floor(row), math.floor(column)
    total = 0.0
    for a, b in ((i, j), (i, j + 1), (i + 1, j), (i + 1, j + 1)):
        if 0 <= a < h and 0 <= b < w:
            total += float(image[a, b]) * (1 - abs(row - a)) * (1 - abs(column - b))
    return total


def _draws(n: int, columns: int, seed: int) -> list[list[float]]:
    rand = torch.rand(n, columns, generator=torch.Generator().manual_seed(seed))
    return (2 * rand - 1).tolist()


def _slow(
    x: torch.Tensor, place: Callable[[int, float, float], tuple[float, float]]
) -> torch.Tensor:
    """Pixel by pixel; `place` maps (image, x, y) from the middle to where to read, likewise."""
    y = torch.zeros_like(x)
    n, channels, h, w = x.shape
    for k in range(n):
        for i in range(h):
            for j in range(w):
                across, down = place(k, j - (w - 1) / 2, i - (h - 1) / 2)
                for c in range(channels):
                    row, column = down + (h - 1) / 2, across + (w - 1) / 2
                    y[k, c, i, j] = _bilinear(x[k, c], row, column)
    return y


SHAPES = [(3, 2, 7, 7), (2, 1, 6, 9)]


@pytest.mark.parametrize("shape", SHAPES)
def test_rotation_by_loops(shape: tuple[int, ...]) -> None:
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    angles = [math.radians(180) * draw for (draw,) in _draws(shape[0], 1, seed=3)]

    def place(k: int, a: float, b: float) -> tuple[float, float]:
        cos, sin = math.cos(angles[k]), math.sin(angles[k])
        return cos * a - sin * b, sin * a + cos * b

    torch.testing.assert_close(rotated(x, 180.0, seed=3), _slow(x, place), atol=2e-5, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_translation_by_loops(shape: tuple[int, ...]) -> None:
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    shifts = _draws(shape[0], 2, seed=4)
    expected = _slow(x, lambda k, a, b: (a + 2.5 * shifts[k][0], b + 2.5 * shifts[k][1]))
    torch.testing.assert_close(translated(x, 2.5, seed=4), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_scaling_by_loops(shape: tuple[int, ...]) -> None:
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    zoom = [2.0**draw for (draw,) in _draws(shape[0], 1, seed=5)]
    expected = _slow(x, lambda k, a, b: (zoom[k] * a, zoom[k] * b))
    torch.testing.assert_close(scaled(x, 2.0, seed=5), expected, atol=2e-5, rtol=0)


def test_whole_pixels_and_no_change_are_exact() -> None:
    x = digits("test")[0][:50]
    for same in (rotated(x, 0.0), translated(x, 0.0), scaled(x, 1.0)):
        torch.testing.assert_close(same, x, atol=1e-5, rtol=0)
    assert pytest.approx(54 / 7) == transforms.MAX_SHIFT_PIXELS["mnist"]
    assert pytest.approx(64 / 7) == transforms.MAX_SHIFT_PIXELS["cifar-10"]


def test_transforms_follow_their_seed_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    x = digits("test")[0]
    for make in (
        lambda s: rotated(x, 90.0, s),
        lambda s: translated(x, 3.0, s),
        lambda s: scaled(x, 2.0, s),
    ):
        torch.manual_seed(0)
        a = make(1)
        state = torch.get_rng_state()
        torch.manual_seed(0)
        assert torch.equal(state, torch.get_rng_state()), "the global generator is left alone"
        assert torch.equal(a, make(1))
        assert not torch.equal(a, make(2))
        monkeypatch.setattr(transforms, "_IMAGES_PER_CHUNK", 100)  # in parts, the same
        torch.testing.assert_close(make(1), a, atol=1e-6, rtol=0)


def test_transforms_cover_their_range() -> None:
    ramp = torch.arange(41.0).expand(2000, 1, 41, 41)  # the value is the column
    moved = translated(ramp, 8.0, seed=1)[:, 0, 20, 20] - 20
    assert -8 <= moved.min() < -7.5
    assert 7.5 < moved.max() <= 8
    spread = scaled(ramp, 2.0, seed=1)[:, 0, 20, 21] - 20
    assert 0.5 <= spread.min() < 0.52
    assert 1.9 < spread.max() <= 2
    assert spread.log().mean().abs() < 0.03
    turned = rotated(ramp, 90.0, seed=1)[:, 0, 20, 21] - 20  # the cosine of the angle
    assert -1e-3 < turned.min() < 0.05
    assert abs(float(turned.mean()) - 2 / math.pi) < 0.03


def test_transforms_reject_bytes_and_factors_below_one() -> None:
    with pytest.raises(ValueError, match=r"floating point of shape .* torch.uint8 .* x.float"):
        rotated(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), 90)
    with pytest.raises(ValueError, match="factor must be at least 1, got 0.5"):
        scaled(torch.zeros(2, 1, 4, 4), 0.5)


def test_resizing_by_loops() -> None:
    """Sample at the middle of each new pixel, edges repeated."""
    x = torch.rand(2, 1, 14, 14)
    expected = torch.zeros(2, 1, 8, 8)
    for n in range(2):
        for i in range(8):
            for j in range(8):
                row, column = ((k + 0.5) * 14 / 8 - 0.5 for k in (i, j))
                clamp = (min(max(row, 0.0), 13.0), min(max(column, 0.0), 13.0))
                expected[n, 0, i, j] = _bilinear(x[n, 0], *clamp)
    torch.testing.assert_close(resized(x, 8), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("mnist", [0.1307 + 0.3081], [1.0]),
        ("cifar-10", [0.0, 123 / 255, (113.9 - 66.7) / 255], [-125.3 / 63, 0.0, -1.0]),
    ],
)
def test_normalisation(name: str, value: list[float], expected: list[float]) -> None:
    x = torch.tensor(value).reshape(1, -1, 1, 1).expand(2, -1, 3, 3)
    want = torch.tensor(expected).reshape(1, -1, 1, 1).expand_as(x)
    torch.testing.assert_close(normalised(x, name), want, atol=1e-5, rtol=0)


def test_normalisation_rejects_wrong_shapes_and_unknown_data_sets() -> None:
    with pytest.raises(ValueError, match=r"x must have shape \[n, 3, h, w\], got \[2, 1, 4, 4\]"):
        normalised(torch.zeros(2, 1, 4, 4), "cifar-10")
    with pytest.raises(ValueError, match="Unknown data set 'svhn'. Choose one of: .*'mnist'"):
        normalised(torch.zeros(2, 1, 4, 4), "svhn")


def test_quadrants_are_a_canvas_of_56_made_32_and_normalised() -> None:
    x, y = torch.rand(40, 1, 28, 28), torch.arange(40) % 10
    images, labels = quadrants(x, y, "quadrant", seed=7)
    canvas, where = on_canvas(x, y, 56, 7, "quadrant")
    assert torch.equal(labels, where)
    torch.testing.assert_close(images, (resized(canvas, 32) - 0.1307) / 0.3081)
    background = -0.1307 / 0.3081
    for image, label in zip(images, labels.tolist(), strict=True):
        row, column = divmod(label // 10, 2)  # the quadrant holds the digit, the others nothing
        for i in (0, 1):
            for j in (0, 1):
                part = image[0, 16 * i : 16 * i + 16, 16 * j : 16 * j + 16]
                empty = bool((part - background).abs().max() < 1e-5)
                assert empty == ((i, j) != (row, column))
    assert torch.equal(quadrants(x, y, "digit", seed=7)[0], images)
    assert torch.equal(quadrants(x, y, "digit", seed=7)[1], y)


def test_work_on_images_is_proportional_to_their_number() -> None:
    """About 31 numbers are written for each pixel of the canvas, by operations on many images."""
    numbers = []
    for n in (2_000, 4_000):
        x, y = torch.rand(n, 1, 28, 28), torch.zeros(n, dtype=torch.int64)
        with Work() as work:
            rotated(x, 180.0)
            quadrants(x, y, "digit")
        numbers.append(work.numbers)
        assert work.operations < 100
        assert work.numbers < 40 * n * 32**2
    assert numbers[1] < 2.1 * numbers[0]


@pytest.mark.parametrize("shape", [(30, 3, 6, 6), (30, 1, 5, 9)])
def test_flips_and_crops_by_loops(shape: tuple[int, ...]) -> None:
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    n, channels, h, w = shape
    result = flip_and_crop(x, torch.Generator().manual_seed(1))
    again = torch.Generator().manual_seed(1)
    top, left = torch.randint(0, 9, (2, n, 1), generator=again)[..., 0].tolist()
    flip = torch.randint(0, 2, (n, 1), generator=again)[:, 0].tolist()
    assert set(flip) == {0, 1}
    for k in range(n):
        for c in range(channels):
            for i in range(h):
                for j in range(w):
                    # Cropping a frame that was flipped is cropping and reading the other way.
                    row, column = i + top[k] - 4, (w - 1 - j if flip[k] else j) + left[k] - 4
                    inside = 0 <= row < h and 0 <= column < w
                    assert result[k, c, i, j] == (x[k, c, row, column] if inside else 0)


def test_flips_and_crops_are_uniform_and_per_image() -> None:
    x = torch.zeros(9000, 1, 12, 12)
    x[:, 0, 6, 6] = 1.0
    places = flip_and_crop(x, torch.Generator().manual_seed(0)).flatten(1).argmax(1)
    rows, columns = places // 12, places % 12
    counts = torch.bincount(rows, minlength=12)[2:11]
    assert counts.sum() == 9000
    assert ((counts - 1000.0) ** 2 / 1000).sum() < 26.1  # chi-squared, 8 dof, p = 0.001
    # Mirrored ones end in columns 1 to 9, the others in 2 to 10.
    assert set(columns.tolist()) == set(range(1, 11))


def test_augmentation_follows_its_generator_alone() -> None:
    x = digits("test")[0]
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    a, b = flip_and_crop(x, generator), flip_and_crop(x, generator)
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.equal(a, b)
    assert torch.equal(a, flip_and_crop(x, torch.Generator().manual_seed(0)))
    assert a.shape == x.shape and a.dtype == x.dtype
