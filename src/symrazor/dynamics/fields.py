r"""Vector fields $\dot x = f(x)$ from libraries of functions, with few parameters.

- `FreeField`: every component is a combination of the functions of a library.
- `HamiltonianField`: $\dot x = B \nabla H(x)$ with a combination H and an antisymmetric matrix B,
  the symplectic form in canonical coordinates.

Both take a batch of parameters, so that derivatives with respect to them are differences. With
fixed parameters `torch.fx` can trace them.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from symrazor.dynamics.library import Library

STEP = 1e-5
"""Step of differences in a parameter, relative to its typical size."""


class ParametricField(ABC):
    """A vector field with parameters.

    Attributes:
        parameters: [k].
        steps: [k], steps of the differences that give derivatives.
    """

    parameters: Float[Tensor, "k"]
    steps: Float[Tensor, "k"]

    @abstractmethod
    def velocity(self, x: Float[Tensor, "p n d"], parameters: Float[Tensor, "p k"]) -> Tensor:
        """Return the velocities at states of each batch, with its parameters."""

    @abstractmethod
    def __call__(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """Return the velocities with the current parameters."""

    @abstractmethod
    def only(self, kept: Bool[Tensor, "k"]) -> "ParametricField":
        """Return the field with the kept parameters; all others are zero."""

    def at(self, parameters: Float[Tensor, "k"]) -> Self:
        """Return the field with other parameters."""
        moved = copy.copy(self)
        moved.parameters = parameters
        return moved

    @abstractmethod
    def formulas(self, names: Sequence[str]) -> list[str]:
        """Return readable formulas."""


class FreeField(ParametricField):
    """Combinations of the functions of a library and a constant, for each component.

    Args:
        library: the functions; those that no component uses are removed.
        active: [1 + m, d], the terms that are used; the first row is the constant.
        scale: [1 + m, d], typical size of each coefficient.
        parameters: coefficients of the active terms.
    """

    def __init__(
        self,
        library: Library,
        active: Bool[Tensor, "m d"],
        scale: Float[Tensor, "m d"],
        parameters: Float[Tensor, "k"],
    ) -> None:
        used = active[1:].any(1).nonzero()[:, 0].tolist() or [0]
        rows = [0, *(k + 1 for k in used)]
        self.library, self.active, self.scale = library.subset(used), active[rows], scale[rows]
        self.parameters, self.steps = parameters, STEP * self.scale[self.active]

    @property
    def coefficients(self) -> Float[Tensor, "m d"]:
        """All coefficients, zero where a term is not used."""
        full = torch.zeros_like(self.scale)
        full[self.active] = self.parameters
        return full

    def velocity(self, x: Float[Tensor, "p n d"], parameters: Float[Tensor, "p k"]) -> Tensor:
        """Return the velocities at states of each batch, with its parameters."""
        p, n, _ = x.shape
        full = parameters.new_zeros(p, *self.scale.shape)
        full[:, self.active] = parameters
        values = self.library(x.flatten(0, 1)).unflatten(0, (p, n))
        velocity: Tensor = values @ full[:, 1:] + full[:, :1]
        return velocity

    def __call__(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """Return the velocities with the current parameters."""
        coefficients = self.coefficients
        velocity: Tensor = self.library(x) @ coefficients[1:] + coefficients[0]
        return velocity

    def only(self, kept: Bool[Tensor, "k"]) -> "FreeField":
        """Return the field with the kept parameters; all others are zero."""
        active = self.active.clone()
        active[self.active] = kept
        return FreeField(self.library, active, self.scale, self.parameters[kept])

    def formulas(self, names: Sequence[str]) -> list[str]:
        """Return an equation for each component."""
        functions = ["1", *self.library.names]
        coefficients = self.coefficients
        return [
            f"d{name}/dt = {_sum(coefficients[:, i].tolist(), functions)}"
            for i, name in enumerate(names)
        ]


class HamiltonianField(ParametricField):
    """The field of an energy.

    Args:
        library: functions of the energy.
        scale: [m], typical size of each coefficient.
        form: [d, d], the antisymmetric matrix B.
        parameters: [m], coefficients.
    """

    def __init__(
        self,
        library: Library,
        scale: Float[Tensor, "m"],
        form: Float[Tensor, "d d"],
        parameters: Float[Tensor, "m"],
    ) -> None:
        self.library, self.scale, self.form = library, scale, form
        self.parameters, self.steps = parameters, STEP * scale

    def velocity(self, x: Float[Tensor, "p n d"], parameters: Float[Tensor, "p k"]) -> Tensor:
        """Return the velocities at states of each batch, with its parameters."""
        p, n, _ = x.shape
        weights = parameters[:, None].expand(p, n, -1).flatten(0, 1)
        gradient = self.library.weighted_gradient(x.flatten(0, 1), weights)
        velocity: Tensor = (gradient @ self.form.mT).unflatten(0, (p, n))
        return velocity

    def __call__(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """Return the velocities with the current parameters."""
        gradient = self.library.weighted_gradient(x, self.parameters.unsqueeze(0))
        velocity: Tensor = gradient @ self.form.mT
        return velocity

    def only(self, kept: Bool[Tensor, "k"]) -> "HamiltonianField":
        """Return the field with the kept parameters; all others are zero."""
        library = self.library.subset(kept.nonzero()[:, 0].tolist())
        return HamiltonianField(library, self.scale[kept], self.form, self.parameters[kept])

    def formulas(self, names: Sequence[str]) -> list[str]:
        """Return the energy."""
        return [f"energy = {_sum(self.parameters.tolist(), self.library.names)}"]

    def coefficients_in(
        self, library: Library, parameters: Float[Tensor, "m"]
    ) -> Float[Tensor, "k"] | None:
        """Return parameters as coefficients of another library; None if it lacks a function."""
        place = {name: k for k, name in enumerate(library.names)}
        if any(name not in place for name in self.library.names):
            return None
        coefficients = torch.zeros(len(library), dtype=parameters.dtype)
        coefficients[[place[name] for name in self.library.names]] = parameters
        return coefficients


def _sum(coefficients: Sequence[float], names: Sequence[str]) -> str:
    parts = []
    for c, name in zip(coefficients, names, strict=True):
        if c:
            number = "" if abs(abs(c) - 1) < 5e-4 and name != "1" else f"{abs(c):.3g} "
            parts.append(f"{'-' if c < 0 else '+'} {number}{'' if name == '1' else name}".rstrip())
    return " ".join(parts).removeprefix("+ ") or "0"
