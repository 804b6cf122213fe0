r"""Transform values rather than positions: light, blur and noise; and transform time series.

Every transformation is the identity at $\epsilon = 0$ and smooth in its width.

| class | data | $t(x; e)$ with $e = \eta \epsilon$ | unit of $\eta$ |
|---|---|---|---|
| `Brightness` | any | $x + e\, \sigma$ | standard deviations of x |
| `Contrast` | any | $\bar x + e^{e} (x - \bar x)$ | log factor, shown as a factor |
| `Saturation` | [n, 3, h, w] | $g + e^{e} (x - g)$, g the mean over colours | the same |
| `Blur` | [n, c, h, w] | Gaussian filter of deviation $|e|$ | pixels |
| `Noise` | any | $x + e\, z$, z normal | unit of x |
| `TimeShift`, `TimeScale` | [n, c, t] | $x(t + e)$, $x(e^{e} t)$ | steps; factor |
| `Jitter` | [n, s, d] | $x + e\, z$, z normal, each point | unit of x |
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.core.parameters import Hyper
from symrazor.invariance.transformation import Poses, Transformation

NOISE_DRAWS = 16
"""Number of different noise draws in evaluation."""


class _OneWidth(Transformation):
    """Base class of transformations with a single positive width."""

    dim = 1
    poses: Poses = "anywhere"
    label: str
    unit: str

    def __init__(self, width: float = 0.1) -> None:
        super().__init__()
        name, is_number = type(self).__name__, isinstance(width, int | float | Tensor)
        if not is_number or not 0 < width < math.inf:
            raise ValueError(
                f"{name} needs a positive, finite width, got {width!r}. Example: {name}(0.1)."
            )
        self.width = Hyper(width)

    def forward(
        self, x: Float[Tensor, "n ..."], points: Float[Tensor, "n 1"]
    ) -> Float[Tensor, "n ..."]:
        """Transform each input by the width times its point."""
        self._check(x)
        return self._move(x, self._amount(x, points))

    def _amount(self, x: Tensor, points: Tensor) -> Tensor:
        """Return the amount by which each input is transformed, [n, 1, ...]."""
        if not x.is_floating_point():
            name = type(self).__name__
            raise ValueError(f"{name} needs floating-point inputs, got {x.dtype}. Use x.float().")
        amount = points.to(x) * self.width.value.to(x)
        return amount.reshape(-1, *(1,) * (x.dim() - 1))

    def _check(self, x: Tensor) -> None:
        """Raise ValueError for inputs of another kind."""

    def _move(self, x: Tensor, amount: Tensor) -> Tensor:
        raise NotImplementedError

    def describe(self, shape: Sequence[int]) -> dict[str, float]:
        """Return the width by name and unit."""
        width = self.width.value.detach()
        shown = float(width.exp() if self.unit == "factor" else width)
        return {f"{self.label} ({self.unit})": shown}


def _expect(x: Tensor, is_valid: bool, expected: str) -> None:
    if not is_valid:
        raise ValueError(f"Inputs must be {expected}, got {list(x.shape)}.")


class Brightness(_OneWidth):
    """Change of brightness."""

    label, unit = "brightness", "deviations"

    def _check(self, x: Tensor) -> None:
        _expect(x, x[:1].numel() > 1 or not len(x), "inputs of two numbers or more")

    def _move(self, x: Tensor, amount: Tensor) -> Tensor:
        spread = x.flatten(1).std(1).reshape(amount.shape)
        return x + amount * spread


class Contrast(_OneWidth):
    """Scaling of the deviations from the mean of each input."""

    label, unit = "contrast", "factor"

    def _move(self, x: Tensor, amount: Tensor) -> Tensor:
        mean = x.flatten(1).mean(1).reshape(amount.shape)
        return mean + amount.exp() * (x - mean)


class Saturation(_OneWidth):
    """Scaling of the deviations from grey."""

    label, unit = "saturation", "factor"

    def _check(self, x: Tensor) -> None:
        _expect(x, x.dim() == 4 and x.shape[1] == 3, "images [n, 3, h, w]")

    def _move(self, x: Tensor, amount: Tensor) -> Tensor:
        grey = x.mean(1, keepdim=True)
        return grey + amount.exp() * (x - grey)


class Blur(_OneWidth):
    """Gaussian filter, wider for points further from 0; computed by Fourier series."""

    label, unit, poses = "blur", "pixels", "none"

    def _check(self, x: Tensor) -> None:
        _expect(x, x.dim() == 4, "images [n, c, h, w]")

    def _move(self, x: Tensor, amount: Tensor) -> Tensor:
        h, w = x.shape[-2:]
        rows = torch.fft.fftfreq(h, device=x.device, dtype=x.dtype).reshape(-1, 1)
        columns = torch.fft.rfftfreq(w, device=x.device, dtype=x.dtype)
        squared = (2 * torch.pi) ** 2 * (rows.square() + columns.square())
        gain = (-0.5 * amount.square() * squared).exp()
        blurred: Tensor = torch.fft.irfft2(torch.fft.rfft2(x) * gain, s=(h, w))
        return blurred


class Noise(_OneWidth):
    """Independent normal noise on every number, drawn from torch's global generator.

    In evaluation the noise is the same for every input, so that the network stays a deterministic
    function. The point selects one of `NOISE_DRAWS` fixed draws, so that copies differ in more than
    the strength of the noise.
    """

    label, unit, poses = "noise", "in the unit of the data", "none"

    def forward(
        self, x: Float[Tensor, "n ..."], points: Float[Tensor, "n 1"]
    ) -> Float[Tensor, "n ..."]:
        """Add noise."""
        self._check(x)
        amount = self._amount(x, points)
        if self.training:
            return x + amount * torch.randn_like(x)
        generator = torch.Generator().manual_seed(0)
        fixed = torch.randn(NOISE_DRAWS, *x.shape[1:], generator=generator).to(x)
        index = (0.5 * (points[:, 0].detach() + 1) * NOISE_DRAWS).long().clamp(0, NOISE_DRAWS - 1)
        return x + amount * fixed[index.to(x.device)]


class Jitter(Noise):
    """Noise on sets of points [n, s, d]."""

    label = "jitter"

    def _check(self, x: Tensor) -> None:
        _expect(x, x.dim() == 3, "sets of points [n, s, d]")


class _Time(_OneWidth):
    """Base class of transformations of the time axis."""

    def _check(self, x: Tensor) -> None:
        is_valid = x.dim() == 3 and x.shape[-1] > 1
        _expect(x, is_valid, "series [n, channels, time] of two steps or more")

    def _times(self, steps: Tensor, amount: Tensor) -> Tensor:
        """Return where each step is read; 0 is the middle of the series."""
        raise NotImplementedError

    def _move(self, x: Tensor, amount: Tensor) -> Tensor:
        t = x.shape[-1]
        middle = (t - 1) / 2
        steps = torch.arange(t, device=x.device, dtype=x.dtype) - middle
        times = (self._times(steps, amount.flatten(1)) + middle).clamp(0, t - 1)
        low = times.detach().floor().clamp(max=t - 2).long()
        fraction = (times - low).unsqueeze(1)
        index = low.unsqueeze(1).expand(-1, x.shape[1], -1)
        return (1 - fraction) * x.gather(2, index) + fraction * x.gather(2, index + 1)


class TimeShift(_Time):
    """Shift in time."""

    label, unit = "time shift", "steps"

    def _times(self, steps: Tensor, amount: Tensor) -> Tensor:
        return steps + amount


class TimeScale(_Time):
    """Change of speed."""

    label, unit = "time scale", "factor"

    def _times(self, steps: Tensor, amount: Tensor) -> Tensor:
        return steps * amount.exp()
