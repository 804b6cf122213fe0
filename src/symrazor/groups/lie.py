r"""Define Lie algebras: generators of continuous transformations, with names and units.

An element of the group is $\exp(\sum_i c_i A_i)$. In the plane, generators act on homogeneous
coordinates (x, y, 1): x points right, y down, the origin is in the middle of the image, and the
border is at -1 and 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.groups.generators import ELEMENT_TOLERANCE, as_numbers
from symrazor.linalg.matrix_functions import matrix_exponential, matrix_logarithm

BRACKET_TOLERANCE = 1e-9
"""Relative residual up to which a bracket lies in the algebra."""


@dataclass(frozen=True, eq=False, repr=False)
class LieAlgebra:
    """A vector space of matrices.

    Args:
        names: names of the generators.
        units: units of their coefficients.
        generators: matrices in float64.
    """

    names: tuple[str, ...]
    units: tuple[str, ...]
    generators: Float[Tensor, "k d d"]

    def __post_init__(self) -> None:
        shape = list(self.generators.shape)
        if len(shape) != 3 or shape[1] != shape[2] or not self.generators.is_floating_point():
            raise ValueError(f"Generators must be real matrices [k, d, d], got the shape {shape}.")
        if not len(self.names) == len(self.units) == shape[0]:
            raise ValueError(
                f"Each of {shape[0]} generators needs a name and a unit, got {len(self.names)} "
                f"names and {len(self.units)} units."
            )
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"Names of generators must be distinct, got {self.names}.")
        if not bool(self.generators.isfinite().all()):
            raise ValueError("Generators must be finite, got nan or infinity.")
        object.__setattr__(self, "generators", self.generators.detach().double().clone())

    def __repr__(self) -> str:
        return f"<LieAlgebra {', '.join(self.names)} on {self.size} dimensions>"

    @classmethod
    def of(
        cls, generators: object, names: Sequence[str] = (), units: Sequence[str] = ()
    ) -> "LieAlgebra":
        """Return the algebra of given generators, by default with generated names."""
        matrices = as_numbers(generators, "generators [k, d, d] of real numbers").double()
        named = tuple(names) or tuple(f"A{i}" for i in range(len(matrices)))
        return cls(named, tuple(units) or ("",) * len(matrices), matrices)

    @property
    def dim(self) -> int:
        """Number of generators."""
        return len(self.generators)

    @property
    def size(self) -> int:
        """Number of rows of a generator."""
        return self.generators.shape[1]

    def combine(self, coefficients: Float[Tensor, "... k"]) -> Float[Tensor, "... d d"]:
        r"""Return $\sum_i c_i A_i$ in the dtype and on the device of the coefficients."""
        return torch.einsum("...k,kij->...ij", coefficients, self.generators.to(coefficients))

    def exp(self, coefficients: Float[Tensor, "... k"]) -> Float[Tensor, "... d d"]:
        r"""Return $\exp(\sum_i c_i A_i)$, differentiable in the coefficients."""
        return matrix_exponential(self.combine(coefficients))

    def bracket(
        self, a: Float[Tensor, "... d d"], b: Float[Tensor, "... d d"]
    ) -> Float[Tensor, "... d d"]:
        """Return the commutator ab - ba."""
        return a @ b - b @ a

    def coordinates(
        self, matrices: Float[Tensor, "... d d"]
    ) -> tuple[Float[Tensor, "... k"], Float[Tensor, " ..."]]:
        """Return the coefficients of the nearest elements of the algebra, and their distances."""
        flat = matrices.to(self.generators).flatten(-2)
        rows = self.generators.flatten(1)
        coefficients = flat @ torch.linalg.pinv(rows)
        return coefficients, (flat - coefficients @ rows).norm(dim=-1)

    def structure_constants(self) -> Float[Tensor, "k k k"]:
        r"""Return $f_{ijl}$ with $[A_i, A_j] = \sum_l f_{ijl} A_l$; see `check`."""
        A = self.generators
        return self.coordinates(self.bracket(A[:, None], A[None]))[0]

    def check(self) -> None:
        """Raise ValueError if generators are dependent, or a bracket is outside of the algebra."""
        rank = int(torch.linalg.matrix_rank(self.generators.flatten(1))) if self.dim else 0
        if rank < self.dim:
            raise ValueError(f"The generators {self.names} are linearly dependent: rank {rank}.")
        A = self.generators
        sizes = A.flatten(1).norm(dim=1)
        residual = self.coordinates(self.bracket(A[:, None], A[None]))[1]
        wrong = (residual > BRACKET_TOLERANCE * sizes[:, None] * sizes[None]).nonzero().tolist()
        if wrong:
            i, j = wrong[0]
            raise ValueError(
                f"The bracket [{self.names[i]}, {self.names[j]}] is outside of the algebra, at a "
                f"distance of {float(residual[i, j]):.2g}. Add it as a generator."
            )

    def check_normalised_by(
        self, discrete: Float[Tensor, "m n n"], letters: Sequence[str], group: str
    ) -> None:
        """Raise ValueError if g A g^-1 is not in the algebra for a discrete generator g."""
        named = letters or tuple(f"generator {k}" for k in range(len(discrete)))
        for letter, g in zip(named, discrete, strict=True):
            inverse = torch.linalg.inv(g)
            distance = self.coordinates(g @ self.generators @ inverse)[1]
            scale = float(g.norm() * inverse.norm()) * self.generators.flatten(1).norm(dim=1)
            wrong = (distance > ELEMENT_TOLERANCE * scale).nonzero().flatten().tolist()
            if wrong:
                raise ValueError(
                    f"g·A·g^-1 is outside of the Lie algebra of {group} for the pair {letter}, "
                    f"{self.names[wrong[0]]}. Add it as a generator."
                )

    def contains(
        self, matrix: Float[Tensor, "n n"], discrete: Float[Tensor, "m n n"], group: str
    ) -> bool:
        """Return whether a matrix is in the group of this algebra and discrete generators.

        SO(n) and O(n) are recognised; otherwise the matrix must be the exponential of its principal
        logarithm.

        Args:
            matrix: finite numbers in float64.
            discrete: discrete generators of the group.
            group: name of the group.

        Raises:
            ValueError: membership cannot be decided.
        """
        n = len(matrix)
        antisymmetric = bool((self.generators == -self.generators.mT).all())
        if antisymmetric and self.dim == n * (n - 1) // 2 and all(map(_is_orthogonal, discrete)):
            has_reflections = any(float(torch.det(m)) < 0 for m in discrete)
            allowed = float(torch.det(matrix)) > 0 or has_reflections
            return _is_orthogonal(matrix) and allowed
        log = matrix_logarithm(matrix)
        if log is not None:
            coefficients, distance = self.coordinates(log)
            in_algebra = float(distance) < 10 * ELEMENT_TOLERANCE * max(1.0, float(log.norm()))
            error = (self.exp(coefficients) - matrix).abs()
            if in_algebra and bool((error < 1e3 * ELEMENT_TOLERANCE).all()):
                return True
        raise ValueError(
            f"Membership in the continuous group {group} cannot be decided. It is known for finite "
            "groups, permutations, SO(n) and O(n)."
        )

    def masked(self, names: Sequence[str]) -> "LieAlgebra":
        """Return the span of some generators, which need not be closed under brackets."""
        unknown = [name for name in names if name not in self.names]
        if unknown:
            raise ValueError(f"Unknown generators {unknown}. Available: {self.names}.")
        kept = [self.names.index(name) for name in names]
        units = tuple(self.units[i] for i in kept)
        return LieAlgebra(tuple(names), units, self.generators[kept])


def _is_orthogonal(matrix: Float[Tensor, "n n"]) -> bool:
    unit = torch.eye(len(matrix), dtype=torch.float64)
    return bool(((matrix.T @ matrix - unit).abs() < 10 * ELEMENT_TOLERANCE).all())


HALF_WIDTHS, RADIANS, LOG_FACTOR = "half-widths", "radians", "log factor"
"""Units of coefficients."""


def affine2() -> LieAlgebra:
    """Return x-translation, y-translation, rotation, x-scale, y-scale and shear; 3 x 3."""
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
    """Return translations of the plane; 3 x 3."""
    return affine2().masked(("x-translation", "y-translation"))


def rotation2() -> LieAlgebra:
    """Return rotations of the plane about the origin; 3 x 3."""
    return affine2().masked(("rotation",))


def scale2() -> LieAlgebra:
    """Return scalings of the plane by the same factor in both directions; 3 x 3."""
    both = affine2().generators[3:5].sum(0, keepdim=True)
    return LieAlgebra(("scale",), (LOG_FACTOR,), both)


def se2() -> LieAlgebra:
    """Return translations and rotations of the plane; 3 x 3."""
    return affine2().masked(("x-translation", "y-translation", "rotation"))


def so2() -> LieAlgebra:
    """Return rotations of vectors in the plane; 2 x 2."""
    return LieAlgebra(("rotation",), (RADIANS,), rotation2().generators[:, :2, :2])


def so3() -> LieAlgebra:
    """Return rotations about the axes x, y and z; 3 x 3."""
    A = torch.zeros(3, 3, 3, dtype=torch.float64)
    for axis in range(3):
        i, j = (axis + 1) % 3, (axis + 2) % 3
        A[axis, i, j], A[axis, j, i] = -1, 1
    return LieAlgebra(("x-rotation", "y-rotation", "z-rotation"), (RADIANS,) * 3, A)


def sl2() -> LieAlgebra:
    """Return area-preserving linear maps of the plane: rotation, stretch, shear; 2 x 2."""
    A = torch.tensor([[[0, -1], [1, 0]], [[1, 0], [0, -1]], [[0, 1], [1, 0]]], dtype=torch.float64)
    return LieAlgebra(("rotation", "stretch", "shear"), (RADIANS, LOG_FACTOR, LOG_FACTOR), A)
