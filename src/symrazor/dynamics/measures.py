r"""Measures over flow times $\tau \in R^K$, antithetic and quasi-Monte-Carlo.

All are symmetric under $\tau \to -\tau$, so that draws in pairs of opposite sign are fair.
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
    r"""Draws $\tau \sim \mu$ on $R^K$.

    - cube: uniform on $[-1, 1]^K$
    - ball: uniform in the unit ball
    - 1-ball: uniform in $\sum_k |\tau_k| \le 1$
    - one-hot: one coordinate uniform on $[-1, 1]$, the others 0
    - gaussian: standard normal, divided by $\sqrt 3$ so that it is as wide as the cube

    Args:
        dimension: K.
        measure: which.
        draws: "quasi" for randomly shifted low-discrepancy points (stratified if K = 1; for more,
            a scrambled Sobol sequence), "antithetic" for pairs $\pm\tau$, or "independent".
    """

    def __init__(
        self, dimension: int, measure: Measure = "cube", draws: Draws = "antithetic"
    ) -> None:
        """Check the names."""
        if measure not in MEASURES:
            raise ValueError(f"expected a measure among {', '.join(MEASURES)}, got {measure!r}")
        if draws not in ("independent", "antithetic", "quasi"):
            raise ValueError(f"expected independent, antithetic or quasi draws, got {draws!r}")
        if dimension < 1:
            raise ValueError(f"expected at least one flow, got {dimension}")
        self.dimension, self.measure, self.draws = dimension, measure, draws

    @property
    def variance(self) -> float:
        """Of each coordinate."""
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
        """`count` times in each of `sets` independent sets, on the generator's device.

        Pairs are adjacent: with antithetic draws entry 2i + 1 is minus entry 2i. Quasi-Monte-Carlo
        points of several dimensions are used in pairs too.
        """
        if self.draws == "quasi" and self.dimension == 1 and self.measure != "gaussian":
            return self._stratified(sets, count, generator)
        if self.draws == "independent":
            return self._draw(sets, count, generator)
        half = self._draw(sets, -(-count // 2), generator)
        return torch.stack([half, -half], dim=2).flatten(1, 2)[:, :count]

    def _stratified(self, sets: int, count: int, generator: torch.Generator | None) -> Tensor:
        """An equidistant grid on [-1, 1), shifted at random: exact for periodic integrands."""
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
            rest = -torch.log(u[..., K:])
            return side.sign() * size / (size.sum(-1, keepdim=True) + rest)
        normal = math.sqrt(2) * torch.erfinv(2 * u[..., :K] - 1)
        if self.measure == "gaussian":
            return normal / math.sqrt(3)
        radius = u[..., K:] ** (1 / K)
        direction: Tensor = normal / normal.norm(dim=-1, keepdim=True)
        return radius * direction

    def _uniforms(
        self, sets: int, count: int, dimension: int, generator: torch.Generator | None
    ) -> Tensor:
        """Numbers strictly between 0 and 1."""
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
    """The first points of Sobol's sequence; a random shift makes each of them uniform."""
    return torch.quasirandom.SobolEngine(dimension).draw(count)
