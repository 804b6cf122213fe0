r"""Vector fields $\dot x = f(x)$ from libraries of functions, with few parameters.

- `FreeField`: every component is a combination of the functions of a library.
- `HamiltonianField`: $\dot x = J \nabla H(x)$ with a combination H, in canonical coordinates.
- `NewtonianField`: positions and velocities of masses in a potential; the masses are parameters.

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
from symrazor.dynamics.mechanics import symplectic_form

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

    @property
    @abstractmethod
    def terms(self) -> tuple[object, ...]:
        """The functions that are used, without coefficients: equal for equal models."""

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

    @property
    def terms(self) -> tuple[object, ...]:
        """The names of the functions of each component."""
        names = ["1", *self.library.names]
        return tuple(
            tuple(name for name, used in zip(names, column.tolist(), strict=True) if used)
            for column in self.active.mT
        )

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


class EnergyField(ParametricField):
    """A field that conserves an energy.

    Attributes:
        to_canonical: [d, d], maps states to canonical coordinates.
    """

    to_canonical: Float[Tensor, "d d"]

    @abstractmethod
    def energy_in(
        self, library: Library, errors: Float[Tensor, "k"]
    ) -> tuple[Float[Tensor, "m"], Float[Tensor, "m"]] | None:
        """Return the energy as coefficients of a library, with standard errors.

        None if the library lacks a function. `errors` are those of the parameters.
        """


class HamiltonianField(EnergyField):
    """The field of an energy in canonical coordinates.

    Args:
        library: functions of the energy.
        scale: [m], typical size of each coefficient.
        parameters: [m], coefficients.
    """

    def __init__(
        self, library: Library, scale: Float[Tensor, "m"], parameters: Float[Tensor, "m"]
    ) -> None:
        d = len(library.coordinates)
        self.library, self.scale, self.form = library, scale, symplectic_form(d // 2)
        self.parameters, self.steps = parameters, STEP * scale
        self.to_canonical = torch.eye(d, dtype=torch.float64)

    @property
    def terms(self) -> tuple[object, ...]:
        """The names of the functions of the energy."""
        return ("energy", *self.library.names)

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
        return HamiltonianField(library, self.scale[kept], self.parameters[kept])

    def formulas(self, names: Sequence[str]) -> list[str]:
        """Return the energy."""
        return [f"energy = {_sum(self.parameters.tolist(), self.library.names)}"]

    def energy_in(
        self, library: Library, errors: Float[Tensor, "k"]
    ) -> tuple[Float[Tensor, "m"], Float[Tensor, "m"]] | None:
        """Return the energy as coefficients of a library, with standard errors."""
        places = _places(self.library.names, library)
        if places is None:
            return None
        return _at(places, self.parameters, library), _at(places, errors, library)


class NewtonianField(EnergyField):
    r"""Masses in a potential: $\dot q = v$, $\dot v_i = -\mu_i \partial_i V(q)$.

    Args:
        library: functions of the potential.
        scale: typical size of each parameter.
        parameters: coefficients of the potential, then the inverse masses $\mu_2, ..., \mu_n$; the
            first mass is 1.
    """

    def __init__(
        self, library: Library, scale: Float[Tensor, "k"], parameters: Float[Tensor, "k"]
    ) -> None:
        self.library, self.scale = library, scale
        self.parameters, self.steps = parameters, STEP * scale
        self.n = len(library.coordinates) // 2

    @property
    def inverse_masses(self) -> Float[Tensor, "n"]:
        """Inverse masses relative to the first."""
        rest = self.parameters[len(self.library) :]
        return torch.cat([torch.ones_like(rest[:1]), rest])

    @property
    def to_canonical(self) -> Float[Tensor, "d d"]:  # type: ignore[override]
        """The diagonal matrix of ones and masses."""
        masses = 1 / self.inverse_masses
        return torch.diag(torch.cat([torch.ones_like(masses), masses]))

    @property
    def terms(self) -> tuple[object, ...]:
        """The names of the functions of the potential."""
        return ("masses", *self.library.names)

    def velocity(self, x: Float[Tensor, "p n d"], parameters: Float[Tensor, "p k"]) -> Tensor:
        """Return the velocities at states of each batch, with its parameters."""
        (p, n, _), m = x.shape, len(self.library)
        weights = parameters[:, None, :m].expand(p, n, -1).flatten(0, 1)
        gradient = self.library.weighted_gradient(x.flatten(0, 1), weights).unflatten(0, (p, n))
        inverse = torch.cat([torch.ones_like(parameters[:, :1]), parameters[:, m:]], 1)
        return torch.cat([x[..., self.n :], -inverse[:, None] * gradient[..., : self.n]], -1)

    def __call__(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """Return the velocities with the current parameters."""
        coefficients = self.parameters[: len(self.library)].unsqueeze(0)
        gradient = self.library.weighted_gradient(x, coefficients)
        return torch.cat([x[:, self.n :], -self.inverse_masses * gradient[:, : self.n]], -1)

    def only(self, kept: Bool[Tensor, "k"]) -> "NewtonianField":
        """Return the field with the kept functions, at least one; masses are always kept."""
        kept, m = kept.clone(), len(self.library)
        kept[m:] = True
        kept[0] |= not bool(kept[:m].any())
        library = self.library.subset(kept[:m].nonzero()[:, 0].tolist())
        return NewtonianField(library, self.scale[kept], self.parameters[kept])

    def formulas(self, names: Sequence[str]) -> list[str]:
        """Return masses and potential."""
        masses = ", ".join(f"{1 / m:.3g}" for m in self.inverse_masses.tolist())
        potential = _sum(self.parameters[: len(self.library)].tolist(), self.library.names)
        return [f"masses of {', '.join(names[: self.n])} = {masses}", f"potential = {potential}"]

    def energy_in(
        self, library: Library, errors: Float[Tensor, "k"]
    ) -> tuple[Float[Tensor, "m"], Float[Tensor, "m"]] | None:
        """Return the energy as coefficients of a library, with standard errors."""
        squares = [f"{name}^2" for name in library.coordinates[self.n :]]
        places = _places([*self.library.names, *squares], library)
        if places is None:
            return None
        m, inverse = len(self.library), self.inverse_masses
        inverse_errors = torch.cat([torch.zeros_like(errors[:1]), errors[m:]])
        return (
            _at(places, torch.cat([self.parameters[:m], 0.5 / inverse]), library),
            _at(places, torch.cat([errors[:m], 0.5 * inverse_errors / inverse**2]), library),
        )


def _places(names: Sequence[str], library: Library) -> list[int] | None:
    """Return the places of functions in a library; None if it lacks one."""
    place = {name: k for k, name in enumerate(library.names)}
    return [place[name] for name in names] if all(name in place for name in names) else None


def _at(places: Sequence[int], values: Tensor, library: Library) -> Float[Tensor, "m"]:
    full = torch.zeros(len(library), dtype=values.dtype)
    full[places] = values
    return full


def _sum(coefficients: Sequence[float], names: Sequence[str]) -> str:
    parts = []
    for c, name in zip(coefficients, names, strict=True):
        if c:
            digits = f"{abs(c):.3g}"
            number = "" if digits == "1" and name != "1" else f"{digits} "
            parts.append(f"{'-' if c < 0 else '+'} {number}{'' if name == '1' else name}".rstrip())
    return " ".join(parts).removeprefix("+ ") or "0"
