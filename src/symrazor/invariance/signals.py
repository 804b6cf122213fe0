r"""Transformations that change values rather than places: light, blur, noise; and time series.

All are the identity at $\epsilon = 0$, and smooth in their widths.

| class | data | $t(x; e)$ with $e = \eta \epsilon$ | unit of $\eta$ |
|---|---|---|---|
| `Brightness` | any | $x + e\, \sigma$ | standard deviations of x |
| `Contrast` | any | $\bar x + e^{e} (x - \bar x)$ | log factor, shown as a factor |
| `Saturation` | [n, 3, h, w] | $g + e^{e} (x - g)$, g the mean over colours | the same |
| `Blur` | [n, c, h, w] | Gaussian filter of deviation $|e|$ | pixels |
| `Noise` | any | $x + e\, z$, z normal | that of x |
| `TimeShift`, `TimeScale` | [n, c, t] | $x(t + e)$, $x(e^{e} t)$ | steps; factor |
| `Jitter` | [n, s, d] | $x + e\, z$, z normal, each point | that of x |
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.core.parameters import Hyper
from symrazor.invariance.transformation import Poses, Transformation

DIRECTIONS = 16
"""Different draws of the noise in evaluation."""


class _OneWidth(Transformation):
    """What they have in common: a single positive width."""

    dim = 1
    poses: Poses = "anywhere"
    label: str
    unit: str

    def __init__(self, width: float = 0.1) -> None:
        """Start at some width."""
        super().__init__()
        name, number = type(self).__name__, isinstance(width, int | float | Tensor)
        if not number or not 0 < width < math.inf:
            raise ValueError(
                f"expected a positive width for {name}, got {width!r}; do: {name}(0.1)"
            )
        self.width = Hyper(width)

    def forward(
        self, x: Float[Tensor, "n ..."], points: Float[Tensor, "n 1"]
    ) -> Float[Tensor, "n ..."]:
        """Move each datum by the width times its point."""
        self.check(x)
        return self.move(x, self.amount(x, points))

    def amount(self, x: Tensor, points: Tensor) -> Tensor:
        """How far each datum is moved, [n, 1, ...]."""
        if not x.is_floating_point():
            name = type(self).__name__
            raise ValueError(f"expected real numbers for {name}, got {x.dtype}; do: x.float()")
        found = points.to(x) * self.width.value.to(x)
        return found.reshape(-1, *(1,) * (x.dim() - 1))

    def check(self, x: Tensor) -> None:
        """Refuse data of another kind."""

    def move(self, x: Tensor, amount: Tensor) -> Tensor:
        """By an amount [n, 1, ...]."""
        raise NotImplementedError

    def describe(self, shape: Sequence[int]) -> dict[str, float]:
        """The width."""
        width = self.width.value.detach()
        return {
            f"{self.label} ({self.unit})": float(width.exp() if "factor" in self.unit else width)
        }


def _expect(x: Tensor, good: bool, what: str) -> None:
    if not good:
        raise ValueError(f"expected {what}, got {list(x.shape)}")


class Brightness(_OneWidth):
    """Lighter and darker."""

    label, unit = "brightness", "deviations"

    def check(self, x: Tensor) -> None:
        """One number alone has no deviation."""
        _expect(x, x[:1].numel() > 1 or not len(x), "data of two numbers or more")

    def move(self, x: Tensor, amount: Tensor) -> Tensor:
        """Add a multiple of the standard deviation of each datum."""
        spread = x.flatten(1).std(1).reshape(amount.shape)
        return x + amount * spread


class Contrast(_OneWidth):
    """Stronger and weaker deviations from the mean of each datum."""

    label, unit = "contrast", "factor"

    def move(self, x: Tensor, amount: Tensor) -> Tensor:
        """Scale deviations."""
        mean = x.flatten(1).mean(1).reshape(amount.shape)
        return mean + amount.exp() * (x - mean)


class Saturation(_OneWidth):
    """More and less colour."""

    label, unit = "saturation", "factor"

    def check(self, x: Tensor) -> None:
        """Pictures of three colours."""
        _expect(x, x.dim() == 4 and x.shape[1] == 3, "pictures [n, 3, h, w]")

    def move(self, x: Tensor, amount: Tensor) -> Tensor:
        """Scale deviations from grey."""
        grey = x.mean(1, keepdim=True)
        return grey + amount.exp() * (x - grey)


class Blur(_OneWidth):
    """A Gaussian filter, the wider the further the point is from 0; computed by Fourier series."""

    label, unit, poses = "blur", "pixels", "none"

    def check(self, x: Tensor) -> None:
        """Pictures."""
        _expect(x, x.dim() == 4, "pictures [n, c, h, w]")

    def move(self, x: Tensor, amount: Tensor) -> Tensor:
        """Multiply frequencies by a Gaussian; opposite borders touch."""
        h, w = x.shape[-2:]
        rows = torch.fft.fftfreq(h, device=x.device, dtype=x.dtype).reshape(-1, 1)
        columns = torch.fft.rfftfreq(w, device=x.device, dtype=x.dtype)
        squared = (2 * torch.pi) ** 2 * (rows.square() + columns.square())
        gain = (-0.5 * amount.square() * squared).exp()
        blurred: Tensor = torch.fft.irfft2(torch.fft.rfft2(x) * gain, s=(h, w))
        return blurred


class Noise(_OneWidth):
    """Independent normal noise on every number, drawn from torch's own generator.

    In evaluation the noise is the same for every datum, so that the network stays a function; it
    is one of `DIRECTIONS`, which the point says, so that copies differ in more than its strength.
    """

    label, unit, poses = "noise", "in the unit of the data", "none"

    def forward(
        self, x: Float[Tensor, "n ..."], points: Float[Tensor, "n 1"]
    ) -> Float[Tensor, "n ..."]:
        """Add noise."""
        self.check(x)
        amount = self.amount(x, points)
        if self.training:
            return x + amount * torch.randn_like(x)
        generator = torch.Generator().manual_seed(0)
        fixed = torch.randn(DIRECTIONS, *x.shape[1:], generator=generator).to(x)
        which = (0.5 * (points[:, 0].detach() + 1) * DIRECTIONS).long().clamp(0, DIRECTIONS - 1)
        return x + amount * fixed[which.to(x.device)]


class Jitter(Noise):
    """The same for sets of points [n, s, d]."""

    label = "jitter"

    def check(self, x: Tensor) -> None:
        """Sets of points."""
        _expect(x, x.dim() == 3, "sets of points [n, s, d]")


class _Time(_OneWidth):
    def check(self, x: Tensor) -> None:
        """Series."""
        good = x.dim() == 3 and x.shape[-1] > 1
        _expect(x, good, "series [n, channels, time] of two steps or more")

    def places(self, x: Tensor, amount: Tensor) -> Tensor:
        """Where to read, in steps from the middle, [n, t]."""
        raise NotImplementedError

    def move(self, x: Tensor, amount: Tensor) -> Tensor:
        """Read linearly between steps; the ends go on as they are."""
        t = x.shape[-1]
        middle = (t - 1) / 2
        places = (self.places(x, amount.flatten(1)) + middle).clamp(0, t - 1)
        low = places.detach().floor().clamp(max=t - 2).long()
        part = (places - low).unsqueeze(1)
        index = low.unsqueeze(1).expand(-1, x.shape[1], -1)
        return (1 - part) * x.gather(2, index) + part * x.gather(2, index + 1)


class TimeShift(_Time):
    """Earlier and later."""

    label, unit = "time shift", "steps"

    def places(self, x: Tensor, amount: Tensor) -> Tensor:
        """Moved steps."""
        return _steps(x) + amount


class TimeScale(_Time):
    """Faster and slower."""

    label, unit = "time scale", "factor"

    def places(self, x: Tensor, amount: Tensor) -> Tensor:
        """Stretched steps."""
        return _steps(x) * amount.exp()


def _steps(x: Tensor) -> Tensor:
    t = x.shape[-1]
    return torch.arange(t, device=x.device, dtype=x.dtype) - (t - 1) / 2
