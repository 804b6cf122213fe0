r"""Define families of transformations with one amount, which `measure_spread` tests.

A `Flow` moves inputs by an amount that is drawn at random from `bins` equal cells:

| kind | amounts | examples |
|---|---|---|
| circle | $[-\pi, \pi)$, a rotation | rotation of images, of point clouds about an axis |
| choice | 0, 1, ..., bins - 1, the elements of a cyclic group | reflection, reversal |
| line | $[-a, a]$ | shift, log factor of a scale, brightness |

A network that predicts the amount from the moved input must see nothing but the content of the
input. Two artefacts would reveal the amount, and are removed:

- **Interpolation.** Resampling sharp pixels leaves a pattern that depends on the angle. Images are
  therefore blurred by a Gaussian of `BLUR_PIXELS` and oversampled (`prepared_images`) before they
  are read at other places.
- **Borders.** Nothing is known outside of an image. The network sees a disc so small that no
  movement of the flow reads outside of it.

Rotated images are read in polar coordinates, where a rotation is a shift.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from symrazor.groups.lie import sample_grid
from symrazor.invariance.polar import ANGLES, polar_view

FlowKind = Literal["circle", "choice", "line"]
Move = Callable[[Tensor, Tensor], Tensor]

LINE_BINS = 9
BLUR_PIXELS, OVERSAMPLING = 1.0, 2
"""Standard deviation of the blur before resampling, and its oversampling."""
MAX_NETWORK_SIDE = 16
"""Longest side in pixels of the images that the network sees."""
SHIFT_SHARE = 0.125
"""Largest tested shift, as a share of the side, or of the length of a series."""
MAX_ZOOM, MAX_CONTRAST = 1.4, 2.0
"""Largest tested factors."""
MAX_OFFSET = 1.0
"""Largest tested change of brightness or offset, in standard deviations of the data."""


@dataclass(frozen=True)
class Flow:
    """A family of transformations with one amount.

    Args:
        name: name of the transformation, in the singular.
        kind: see the module docstring.
        bins: number of cells; elements of a choice.
        end: largest amount of a line.
        unit: unit of reported ranges: degrees, pixels, factor, ...
        move: returns what the network sees of inputs [n, ...] moved by amounts [n].
        display: number by which amounts are multiplied for reports; factors are exponentials.
        is_polar: whether `move` returns images in polar coordinates (`symrazor.invariance.polar`).
        min_range: smallest range that is reported as an invariance; natural spread and the errors
            of the measurement are smaller.
    """

    name: str
    kind: FlowKind
    bins: int
    end: float
    unit: str
    move: Move
    display: float = 1.0
    is_polar: bool = False
    min_range: float = 0.25

    @property
    def is_cyclic(self) -> bool:
        """Whether amounts form a finite or continuous circle."""
        return self.kind != "line"

    def draw(self, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return n random cells and an amount within each of them."""
        cell = torch.randint(self.bins, (n,), generator=generator)
        return cell, self.amounts(cell, torch.rand(n, generator=generator))

    def amounts(self, cell: Tensor, within: Tensor) -> Tensor:
        """Return amounts in cells; `within` in [0, 1) is the place in the cell."""
        if self.kind == "choice":
            return cell.float()
        end = math.pi if self.kind == "circle" else self.end
        return end * (2 * (cell + within) / self.bins - 1)

    def reported(self, amount: float) -> float:
        """Return an amount in the unit of reports."""
        return math.exp(amount) if self.unit == "factor" else self.display * amount


def image_flows(shape: Sequence[int]) -> tuple[Flow, ...]:
    """Return the flows of images [c, h, w], prepared by `prepared_images`."""
    h, w = shape[-2:]
    side = min(h, w)
    pixels = max(2, round(SHIFT_SHARE * side))
    step = max(1, math.ceil(max(h, w) / MAX_NETWORK_SIDE))
    reader = ImageReader((h, w), step)
    inside = 1 - 2 * pixels / side
    by = reader.maps
    zoom, contrast = math.log(MAX_ZOOM), math.log(MAX_CONTRAST)
    min_shift = max(1.5, side / 16)
    shifts = [
        Flow(f"{'xy'[axis]}-translation", "line", 2 * pixels + 1, pixels + 0.5, "pixels",
             by(partial(_shift, axis, w), inside), min_range=min_shift)
        for axis in (0, 1)
    ]  # fmt: skip
    return (
        Flow("rotation", "circle", ANGLES // 2, math.pi, "degrees", partial(polar_view, (h, w)),
             180 / math.pi, is_polar=True, min_range=18),
        Flow("left-right flip", "choice", 2, 1, "probability", by(partial(_mirror, 0), 1)),
        Flow("up-down flip", "choice", 2, 1, "probability", by(partial(_mirror, 1), 1)),
        *shifts,
        Flow("scale", "line", LINE_BINS, zoom, "factor", reader.zoom, min_range=1.2),
        Flow("brightness", "line", LINE_BINS, MAX_OFFSET, "deviations", reader.tone(add),
             min_range=0.3),
        Flow("contrast", "line", LINE_BINS, contrast, "factor", reader.tone(_contrast),
             min_range=1.3),
    )  # fmt: skip


def prepared_images(x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c h2 w2"]:
    """Return standardised images, blurred and oversampled, as flows of images expect them."""
    x = (x - x.mean()) / x.std().clamp(min=1e-12)
    pooled = max(x.shape[2:]) // (2 * MAX_NETWORK_SIDE)
    x = F.avg_pool2d(x, pooled) if pooled > 1 else x
    radius = math.ceil(3 * BLUR_PIXELS)
    steps = torch.arange(-radius, radius + 1, dtype=x.dtype, device=x.device)
    taps = (-0.5 * (steps / BLUR_PIXELS).square()).softmax(0)
    flat = x.flatten(0, 1).unsqueeze(1)
    flat = F.pad(flat, (radius,) * 4, mode="replicate")
    flat = F.conv2d(F.conv2d(flat, taps.view(1, 1, 1, -1)), taps.view(1, 1, -1, 1))
    up = F.interpolate(flat, scale_factor=OVERSAMPLING, mode="bicubic", align_corners=False)
    prepared: Tensor = up.squeeze(1).unflatten(0, x.shape[:2])
    return prepared


class ImageReader:
    """Reads prepared images under affine maps, on the coarser grid of the network.

    Args:
        size: height and width of the images before they were prepared.
        step: pixels per pixel of the network.
    """

    def __init__(self, size: tuple[int, int], step: int) -> None:
        self.size, self.step = size, step
        h, w = size
        self.out = (math.ceil(h / step), math.ceil(w / step))
        y, x = (
            ((torch.arange(k) + 0.5) / k * 2 - 1) * s for k, s in zip(self.out, size, strict=True)
        )
        self.radius = (y[:, None] ** 2 + x**2).sqrt() / min(size)
        self.edge = 2 * step / min(size)

    def window(self, radius: float) -> Float[Tensor, "h w"]:
        """Return a disc with a soft edge inside of a radius, in half-sides."""
        window: Tensor = ((radius - self.radius) / self.edge).clamp(0, 1)
        return window

    def read(
        self, maps: Callable[[Tensor], Tensor], radius: float, x: Tensor, amount: Tensor
    ) -> Tensor:
        """Return every image under the map of its own amount, inside of a disc."""
        moved = sample_grid(x, maps(amount).unsqueeze(1), "border", self.out)
        inside: Tensor = moved.squeeze(2) * self.window(radius)
        return inside

    def zoom(self, x: Tensor, amount: Tensor) -> Tensor:
        """Return every image enlarged by exp(-amount), all equally sharp.

        A larger image would be less sharp. The others are blurred, as sharpness is no content.
        """
        largest = math.log(MAX_ZOOM)
        variance = (BLUR_PIXELS * OVERSAMPLING) ** 2 * (2 * (amount + largest)).expm1()
        rows = torch.fft.fftfreq(x.shape[-2]).square().view(-1, 1)
        columns = torch.fft.rfftfreq(x.shape[-1]).square()
        power = -2 * math.pi**2 * (rows + columns) * variance.clamp(min=0).view(-1, 1, 1, 1)
        blurred = torch.fft.irfft2(torch.fft.rfft2(x) * power.exp(), s=x.shape[-2:])
        return self.read(_zoom, 1 / MAX_ZOOM, blurred, amount)

    def change_tone(self, change: Move, x: Tensor, amount: Tensor) -> Tensor:
        """Return every image unmoved, with its values changed by its own amount."""
        return change(self.read(_identity, math.inf, x, amount), amount) * self.window(1)

    def maps(self, maps: Callable[[Tensor], Tensor], radius: float) -> Move:
        """Return a move by affine maps of the amounts."""
        return partial(self.read, maps, radius)

    def tone(self, change: Move) -> Move:
        """Return a change of values."""
        return partial(self.change_tone, change)


def _identity(amount: Tensor) -> Tensor:
    return torch.eye(2, 3).repeat(len(amount), 1, 1)


def _shift(axis: int, width: int, amount: Tensor) -> Tensor:
    maps = _identity(amount)
    maps[:, axis, 2] = 2 * amount / width
    return maps


def _mirror(axis: int, amount: Tensor) -> Tensor:
    maps = _identity(amount)
    maps[:, axis, axis] = 1 - 2 * amount
    return maps


def _zoom(amount: Tensor) -> Tensor:
    return _identity(amount) * amount.exp().view(-1, 1, 1)


def per_input(amount: Tensor, x: Tensor) -> Tensor:
    """Return amounts in a shape that applies each of them to its own input."""
    return amount.view(-1, *(1,) * (x.dim() - 1))


def add(x: Tensor, amount: Tensor) -> Tensor:
    """Return inputs to which amounts are added."""
    return x + per_input(amount, x)


def _contrast(x: Tensor, amount: Tensor) -> Tensor:
    mean = per_input(x.flatten(1).mean(1), x)
    return mean + amount.exp().view(mean.shape) * (x - mean)
