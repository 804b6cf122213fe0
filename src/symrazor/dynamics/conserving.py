"""A simulator that conserves given quantities: integration of a vector field, then projection."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.dynamics.fields import ParametricField
from symrazor.dynamics.findings import Quantity
from symrazor.dynamics.library import Library
from symrazor.dynamics.mechanics import rk4

PROJECTIONS = 2
"""Sweeps over the quantities after a time step; errors decrease quadratically."""
GRADIENT_FLOOR = 1e-6
"""Added to squared gradients, relative to their mean, so that equilibria stay in place."""


@dataclass(frozen=True)
class _Surface:
    """A quantity whose value is kept."""

    library: Library
    coefficients: Float[Tensor, "one m"]
    floor: float

    def value(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n one"]:
        return self.library(x) @ self.coefficients.mT

    def gradient(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        return self.library.weighted_gradient(x, self.coefficients)


class ConservingSimulator(nn.Module):
    """A simulator in the user's units, `simulator(state, t)`.

    Args:
        field: the vector field.
        quantities: what every step conserves.
        max_step: longest step of the integrator.
        x: states of the data, whose spread is the metric of the projection.
    """

    def __init__(
        self,
        field: ParametricField,
        quantities: Sequence[Quantity],
        max_step: float,
        x: Float[Tensor, "n d"],
    ) -> None:
        super().__init__()
        self.field, self.max_step, self.spread = field, max_step, x.std(0)
        self.surfaces = []
        for quantity in quantities:
            size = (quantity.gradient(x) * self.spread).square().sum(1).mean()
            floor = GRADIENT_FLOOR * float(size)
            library, coefficients = quantity.nonzero
            self.surfaces.append(_Surface(library, coefficients[None], floor))

    def steps(self, t: float) -> int:
        """Return the number of integrator steps for a time t."""
        return max(1, math.ceil(abs(t) / self.max_step - 1e-9))

    def advance(self, x: Float[Tensor, "n d"], t: float, steps: int) -> Float[Tensor, "n d"]:
        """Return the states after a time t; `torch.fx` can trace this."""
        values = [surface.value(x) for surface in self.surfaces]
        for _ in range(steps):
            x = rk4(self.field, x, t / steps)
        for _ in range(PROJECTIONS):
            for surface, value in zip(self.surfaces, values, strict=True):
                gradient = surface.gradient(x) * self.spread
                size = (gradient * gradient).sum(1, keepdim=True) + surface.floor
                x = x - (surface.value(x) - value) * gradient * self.spread / size
        return x

    @torch.no_grad()
    def forward(self, state: Float[Tensor, "*b d"], t: float) -> Float[Tensor, "*b d"]:
        """Return the states after a time t, which may be negative but must be finite."""
        t, d = float(t), len(self.spread)
        if not math.isfinite(t):
            raise ValueError(f"The time must be finite, got {t}.")
        if state.ndim < 1 or state.shape[-1] != d:
            raise ValueError(f"States must have shape [..., {d}], got {list(state.shape)}.")
        x = state.reshape(-1, d).double().cpu()
        moved = self.advance(x, t, self.steps(t)).reshape(state.shape)
        return moved.to(state) if state.is_floating_point() else moved.to(state.device)
