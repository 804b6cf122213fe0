r"""Lie algebras: generators of continuous transformations, named and with units.

An element of the group is $\exp(\sum_i c_i A_i)$. In the plane, generators act on homogeneous
coordinates (x, y, 1): x to the right, y down, the origin in the middle of the image and the border
at -1 and 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.groups.closure import as_numbers
from symrazor.linalg.matrix_functions import matrix_exponential

TOLERANCE = 1e-9
"""Relative residual up to which a bracket lies in the algebra."""


@dataclass(frozen=True, eq=False)
class LieAlgebra:
    """A vector space of matrices.

    Args:
        names: one per generator.
        units: of the coefficients, one per generator.
        generators: in float64.
    """

    names: tuple[str, ...]
    units: tuple[str, ...]
    generators: Float[Tensor, "k d d"]

    def __post_init__(self) -> None:
        """Check the shapes."""
        shape = list(self.generators.shape)
        if len(shape) != 3 or shape[1] != shape[2] or not self.generators.is_floating_point():
            raise ValueError(f"expected generators [k, d, d] of real numbers, got {shape}")
        if not len(self.names) == len(self.units) == shape[0]:
            raise ValueError(
                f"expected a name and a unit for each of {shape[0]} generators, got "
                f"{len(self.names)} and {len(self.units)}"
            )
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"expected different names, got {self.names}")
        if not bool(self.generators.isfinite().all()):
            raise ValueError("expected finite generators, got others")
        object.__setattr__(self, "generators", self.generators.detach().double().clone())

    @classmethod
    def of(
        cls, generators: object, names: Sequence[str] = (), units: Sequence[str] = ()
    ) -> "LieAlgebra":
        """An algebra of one's own; names and units may be left out."""
        found = as_numbers(generators, "generators [k, d, d] of real numbers").double()
        named = tuple(names) or tuple(f"A{i}" for i in range(len(found)))
        return cls(named, tuple(units) or ("",) * len(found), found)

    @property
    def dim(self) -> int:
        """Number of generators."""
        return len(self.generators)

    @property
    def size(self) -> int:
        """Number of rows of a generator."""
        return self.generators.shape[1]

    def combine(self, coefficients: Float[Tensor, "... k"]) -> Float[Tensor, "... d d"]:
        r"""$\sum_i c_i A_i$, in the type and on the device of the coefficients."""
        return torch.einsum("...k,kij->...ij", coefficients, self.generators.to(coefficients))

    def exp(self, coefficients: Float[Tensor, "... k"]) -> Float[Tensor, "... d d"]:
        r"""$\exp(\sum_i c_i A_i)$, differentiable in the coefficients."""
        return matrix_exponential(self.combine(coefficients))

    def bracket(
        self, a: Float[Tensor, "... d d"], b: Float[Tensor, "... d d"]
    ) -> Float[Tensor, "... d d"]:
        """The commutator ab - ba."""
        return a @ b - b @ a

    def coordinates(
        self, matrices: Float[Tensor, "... d d"]
    ) -> tuple[Float[Tensor, "... k"], Float[Tensor, " ..."]]:
        """Coefficients of the nearest elements of the algebra, and their distances."""
        flat = matrices.to(self.generators).flatten(-2)
        rows = self.generators.flatten(1)
        found = flat @ torch.linalg.pinv(rows)
        return found, (flat - found @ rows).norm(dim=-1)

    def structure_constants(self) -> Float[Tensor, "k k k"]:
        r"""$f_{ijl}$ with $[A_i, A_j] = \sum_l f_{ijl} A_l$; see `check`."""
        every = self.generators
        return self.coordinates(self.bracket(every[:, None], every[None]))[0]

    def check(self) -> None:
        """Verify that generators are independent and the algebra is closed under brackets.

        Raises:
            ValueError: names the pair whose bracket is outside.
        """
        rank = int(torch.linalg.matrix_rank(self.generators.flatten(1))) if self.dim else 0
        if rank < self.dim:
            raise ValueError(f"expected independent generators {self.names}, got rank {rank}")
        every = self.generators
        sizes = every.flatten(1).norm(dim=1)
        residual = self.coordinates(self.bracket(every[:, None], every[None]))[1]
        wrong = (residual > TOLERANCE * sizes[:, None] * sizes[None]).nonzero().tolist()
        if wrong:
            i, j = wrong[0]
            raise ValueError(
                f"expected brackets inside the algebra, got [{self.names[i]}, {self.names[j]}] "
                f"outside, at a distance of {float(residual[i, j]):.2g}; add it as a generator"
            )

    def masked(self, names: Sequence[str]) -> "LieAlgebra":
        """The span of some generators; it need not be closed.

        Raises:
            ValueError: a name that is not there.
        """
        unknown = [name for name in names if name not in self.names]
        if unknown:
            raise ValueError(f"expected names among {self.names}, got {unknown}")
        kept = [self.names.index(name) for name in names]
        units = tuple(self.units[i] for i in kept)
        return LieAlgebra(tuple(names), units, self.generators[kept])


HALF_WIDTHS, RADIANS, LOG_FACTOR = "half-widths", "radians", "log factor"


def affine2() -> LieAlgebra:
    """x-translation, y-translation, rotation, x-scale, y-scale, shear; 3 x 3."""
    A = torch.zeros(6, 3, 3, dtype=torch.float64)
    A[0, 0, 2] = A[1, 1, 2] = 1
    A[2, 0, 1], A[2, 1, 0] = -1, 1
    A[3, 0, 0] = A[4, 1, 1] = 1
    A[5, 0, 1] = A[5, 1, 0] = 1
    names = ("x-translation", "y-translation", "rotation", "x-scale", "y-scale", "shear")
    return LieAlgebra(
        names, (HALF_WIDTHS, HALF_WIDTHS, RADIANS, LOG_FACTOR, LOG_FACTOR, LOG_FACTOR), A
    )


def translation2() -> LieAlgebra:
    """Translations of the plane; 3 x 3."""
    return affine2().masked(("x-translation", "y-translation"))


def rotation2() -> LieAlgebra:
    """Rotations of the plane about the origin; 3 x 3."""
    return affine2().masked(("rotation",))


def scale2() -> LieAlgebra:
    """Scalings of the plane, the same in both directions; 3 x 3."""
    both = affine2().generators[3:5].sum(0, keepdim=True)
    return LieAlgebra(("scale",), (LOG_FACTOR,), both)


def se2() -> LieAlgebra:
    """Translations and rotations of the plane; 3 x 3."""
    return affine2().masked(("x-translation", "y-translation", "rotation"))


def so2() -> LieAlgebra:
    """Rotations of vectors in the plane; 2 x 2."""
    return LieAlgebra(("rotation",), (RADIANS,), rotation2().generators[:, :2, :2])


def so3() -> LieAlgebra:
    """Rotations about the axes x, y, z; 3 x 3."""
    A = torch.zeros(3, 3, 3, dtype=torch.float64)
    for axis in range(3):
        i, j = (axis + 1) % 3, (axis + 2) % 3
        A[axis, i, j], A[axis, j, i] = -1, 1
    return LieAlgebra(("x-rotation", "y-rotation", "z-rotation"), (RADIANS,) * 3, A)


def sl2() -> LieAlgebra:
    """Linear maps of the plane that keep areas: rotation, stretch, shear; 2 x 2."""
    A = torch.tensor([[[0, -1], [1, 0]], [[1, 0], [0, -1]], [[0, 1], [1, 0]]], dtype=torch.float64)
    return LieAlgebra(("rotation", "stretch", "shear"), (RADIANS, LOG_FACTOR, LOG_FACTOR), A)
