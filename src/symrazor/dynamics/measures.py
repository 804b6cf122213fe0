r"""Probability measures over flow times $\tau \in R^K$, with variance-reduced sampling.

All measures are symmetric under $\tau \to -\tau$, so antithetic pairs are unbiased.
"""

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

Measure = Literal["cube", "ball", "1-ball", "one-hot", "gaussian"]
MEASURES: tuple[Measure, ...] = ("cube", "ball", "1-ball", "one-hot", "gaussian")
Draws = Literal["independent", "antithetic", "quasi"]


class FlowTimes:
    r"""Sampler of flow times $\tau \sim \mu$ on $R^K$.

    - cube: uniform on $[-1, 1]^K$
    - ball: uniform in the unit ball
    - 1-ball: uniform in $\sum_k |\tau_k| \le 1$
    - one-hot: one coordinate uniform on $[-1, 1]$, the others 0
    - gaussian: normal with variance 1/3, the variance of the cube

    Args:
        dimension: K.
        measure: by name, as above.
        draws: "quasi" for randomly shifted low-discrepancy points (an equidistant grid for K = 1, a
            Sobol sequence in antithetic pairs otherwise), "antithetic" for pairs $\pm\tau$, or
            "independent".
    """

    def __init__(
        self, dimension: int, measure: Measure = "cube", draws: Draws = "antithetic"
    ) -> None:
        if measure not in MEASURES:
            raise ValueError(f"Unknown measure {measure!r}. Choose one of {', '.join(MEASURES)}.")
        if draws not in ("independent", "antithetic", "quasi"):
            raise ValueError(f"draws must be independent, antithetic or quasi, got {draws!r}.")
        if dimension < 1:
            raise ValueError(f"dimension must be at least 1 flow, got {dimension}.")
        self.dimension, self.measure, self.draws = dimension, measure, draws

    @property
    def variance(self) -> float:
        """Variance of each coordinate."""
        K = self.dimension
        return {
            "cube": 1 / 3,
            "ball": 1 / (K + 2),
            "1-ball": 2 / ((K + 1) * (K + 2)),
            "one-hot": 1 / (3 * K),
            "gaussian": 1 / 3,
        }[self.measure]

    def __call__(
        self, sets: int, count: int, generator: torch.Generator | None = None
    ) -> Float[Tensor, "sets count k"]:
        """Draw `sets` independent sets of `count` flow times, on the generator's device.

        Antithetic pairs are adjacent: entry 2i + 1 is minus entry 2i.
        """
        if self.draws == "quasi" and self.dimension == 1 and self.measure != "gaussian":
            return self._stratified(sets, count, generator)
        if self.draws == "independent":
            return self._draw(sets, count, generator)
        half = self._draw(sets, -(-count // 2), generator)
        return torch.stack([half, -half], dim=2).flatten(1, 2)[:, :count]

    def _stratified(self, sets: int, count: int, generator: torch.Generator | None) -> Tensor:
        """Return a randomly shifted grid on [-1, 1), accurate for periodic integrands."""
        device = "cpu" if generator is None else generator.device
        shift = torch.rand(sets, 1, 1, generator=generator, device=device)
        grid = torch.arange(count, device=device).view(1, -1, 1)
        return 2 * (grid + shift) / count - 1

    def _draw(self, sets: int, count: int, generator: torch.Generator | None) -> Tensor:
        K = self.dimension
        extra = {"ball": 1, "1-ball": 1, "one-hot": 1}.get(self.measure, 0)
        u = self._uniforms(sets, count, K + extra, generator)
        if self.measure == "cube":
            return 2 * u - 1
        if self.measure == "one-hot":
            chosen = (u[..., -1] * K).long().clamp(max=K - 1)
            return torch.nn.functional.one_hot(chosen, K) * (2 * u[..., :1] - 1)
        if self.measure == "1-ball":
            side = 2 * u[..., :K] - 1
            size = -torch.log1p(-side.abs())
            slack = -torch.log(u[..., K:])
            return side.sign() * size / (size.sum(-1, keepdim=True) + slack)
        normal = math.sqrt(2) * torch.erfinv(2 * u[..., :K] - 1)
        if self.measure == "gaussian":
            return normal / math.sqrt(3)
        radius = u[..., K:] ** (1 / K)
        direction: Tensor = normal / normal.norm(dim=-1, keepdim=True)
        return radius * direction

    def _uniforms(
        self, sets: int, count: int, dimension: int, generator: torch.Generator | None
    ) -> Tensor:
        """Return uniform numbers strictly between 0 and 1."""
        device = "cpu" if generator is None else generator.device
        if self.draws == "quasi":
            points = _sobol(count, dimension).to(device)
            shift = torch.rand(sets, 1, dimension, generator=generator, device=device)
            u = (points + shift) % 1.0
        else:
            u = torch.rand(sets, count, dimension, generator=generator, device=device)
        tiny = torch.finfo(u.dtype).eps
        return u.clamp(tiny, 1 - tiny)


def _sobol(count: int, dimension: int) -> Float[Tensor, "count dimension"]:
    """Return the first points of the Sobol sequence; a random shift makes each uniform."""
    return torch.quasirandom.SobolEngine(dimension).draw(count)
