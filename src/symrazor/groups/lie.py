r"""Define Lie algebras, exponentials and logarithms of their matrices, and how these move images.

Generators of continuous transformations have names and units. An element of the group is
$\exp(\sum_i c_i A_i)$. In the plane, generators act on homogeneous
coordinates (x, y, 1): x points right, y down, the origin is in the middle of the image, and the
border is at -1 and 1.

`torch.linalg.matrix_exp` chooses its work from the norm of each matrix, which makes a GPU wait for
the host. `exponential` takes a bound of the norm instead, so that the number of squarings is known
beforehand. (torch also uses too few terms for a single float64 matrix of norm 0.02 to 0.05: its
error there is 1e-12 to 2e-10.)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from symrazor.groups.generators import ELEMENT_TOLERANCE, as_numbers

Outside = Literal["zeros", "border", "reflection"]
"""Values beyond the border: 0, the nearest pixel, or the mirror image."""

TAYLOR_DEGREE = 12
SCALED_NORM = 0.5
"""Norm after scaling: the remainder of the Taylor series is below 0.5^13 / 13! = 2e-14."""
MAX_NORM = 1e4
"""Larger norms are scaled as if they were this large: their exponentials overflow anyway."""
MAX_SQUARE_ROOTS = 40
"""Square roots taken by `matrix_logarithm` before it gives up."""
MAX_ROOT_STEPS = 60
"""Iterations of one square root."""
LOG_SERIES_RADIUS = 0.1
"""Distance from the identity at which the series of the logarithm starts."""
BRACKET_TOLERANCE = 1e-9
"""Relative residual up to which a bracket lies in the algebra."""


def exponential(matrix: Float[Tensor, "*b d d"], cap: float) -> Float[Tensor, "*b d d"]:
    r"""Return $e^M$ in float64 for norms up to `cap`: $(\sum_{k \le 12} (M/2^s)^k/k!)^{2^s}$."""
    squarings = max(0, math.ceil(math.log2(max(cap, 1e-12) / SCALED_NORM)))
    M = matrix.double() / 2**squarings
    identity = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
    M2 = M @ M
    M3 = M2 @ M
    # Paterson and Stockmeyer: a polynomial of degree 12 in four blocks of M^3, five products.
    c = [1 / math.factorial(k) for k in range(TAYLOR_DEGREE + 1)]
    total: Tensor = c[12] * M3
    for block in (9, 6, 3, 0):
        total = total + c[block] * identity + c[block + 1] * M + c[block + 2] * M2
        if block:
            total = total @ M3
    for _ in range(squarings):
        total = total @ total
    return total


def matrix_exponential(matrix: Float[Tensor, "*b d d"]) -> Float[Tensor, "*b d d"]:
    """Return $e^M$ of matrices of any norm, in their dtype; synchronises with the device."""
    if not matrix.numel():
        return matrix.clone()
    norm = float(matrix.detach().abs().sum(-2).max())
    # Twice the norm: one more squaring, and the remainder of the series is below rounding.
    cap = 2 * min(norm, MAX_NORM) if norm >= 0 else 1.0
    return exponential(matrix, cap).to(matrix.dtype)


def matrix_logarithm(matrix: Float[Tensor, "d d"]) -> Float[Tensor, "d d"] | None:
    r"""Return the real principal logarithm, $2^k \ln M^{1/2^k}$, or None if there is none.

    It exists unless an eigenvalue is zero or negative. Square roots are computed by the iteration
    of Denman and Beavers (1976), which needs no eigenvectors: a translation has too few of them.
    """
    identity = torch.eye(len(matrix), dtype=torch.float64, device=matrix.device)
    root, k = matrix.double(), 0
    while float((root - identity).abs().sum(0).max()) > LOG_SERIES_RADIUS:
        next_root = _square_root(root, identity)
        if next_root is None or k == MAX_SQUARE_ROOTS:
            return None
        root, k = next_root, k + 1
    E, power = root - identity, root - identity
    total = E.clone()
    for j in range(2, 18):  # the remainder is below 0.1^18 / 18
        power = power @ E
        total = total - (-1) ** j * power / j
    log: Tensor = total * 2**k
    return log


def _square_root(matrix: Float[Tensor, "d d"], identity: Float[Tensor, "d d"]) -> Tensor | None:
    """Iterate Y and Z, which converge to the root and to its inverse."""
    Y: Tensor = matrix
    Z: Tensor = identity
    for _ in range(MAX_ROOT_STEPS):
        inverse_Y, Y_is_singular = torch.linalg.inv_ex(Y)
        inverse_Z, Z_is_singular = torch.linalg.inv_ex(Z)
        if bool(Y_is_singular) or bool(Z_is_singular):
            return None
        Y, Z, previous = (Y + inverse_Z) / 2, (Z + inverse_Y) / 2, Y
        if float((Y - previous).abs().max()) < 1e-15 * max(1.0, float(Y.abs().max())):
            break
    residual = float((Y @ Y - matrix).abs().max())
    root: Tensor = Y
    return root if residual < 1e-10 * max(1.0, float(matrix.abs().max())) else None


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
        logarithm. If this does not decide, raise ValueError with the name of the group.
        """
        n = len(matrix)
        antisymmetric = bool((self.generators == -self.generators.mT).all())
        if antisymmetric and self.dim == n * (n - 1) // 2 and all(map(is_orthogonal, discrete)):
            has_reflections = any(float(torch.det(m)) < 0 for m in discrete)
            allowed = float(torch.det(matrix)) > 0 or has_reflections
            return is_orthogonal(matrix) and allowed
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


def is_orthogonal(matrix: Float[Tensor, "n n"], tolerance: float = 10 * ELEMENT_TOLERANCE) -> bool:
    """Return whether the inverse of a matrix is its transpose, up to a tolerance."""
    unit = torch.eye(len(matrix), dtype=torch.float64)
    return bool(((matrix.T @ matrix - unit).abs() < tolerance).all())


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
    scaling = affine2().generators[3:5].sum(0, keepdim=True)
    return LieAlgebra(("scale",), (LOG_FACTOR,), scaling)


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


def sample_grid(
    x: Float[Tensor, "n c *s"],
    maps: Float[Tensor, "m k d e"],
    outside: Outside = "zeros",
    size: Sequence[int] | None = None,
) -> Float[Tensor, "n c k *t"]:
    r"""Return $x(T q)$ at every pixel q for every map T, by linear interpolation.

    The origin is the middle of the grid. The unit is half the last axis, in every direction, so
    that rotations do not distort images that are not square.

    Args:
        x: grids of d = 1 to 3 dimensions.
        maps: k matrices [d, d + 1] for each grid, or for all together (m = 1): coordinates are in
            the order (x, y, z), where x is the last axis, and the last column is a shift. Positions
            are computed in the precision of the maps.
        outside: values beyond the border.
        size: number of pixels q in each direction, spread over the whole grid; by default those of
            the grid.
    """
    shape = tuple(x.shape[2:])
    size = tuple(size or shape)
    (n, c), (m, k, dims, _) = x.shape[:2], maps.shape
    affine = maps.reshape(m * k, dims, dims + 1)
    if len(set(shape)) > 1:  # torch's unit is half of each axis
        units = [size / shape[-1] for size in reversed(shape)]
        scale = [[column / row for column in (*units, 1)] for row in units]
        affine = affine * affine.new_tensor(scale)
    if dims == 1:  # torch interpolates in 2 and 3 dimensions: use an image of one row
        affine = F.pad(affine[:, :, [0, 0, 1]] * affine.new_tensor([1, 0, 1]), (0, 0, 0, 1))
        shape, size = (1, *shape), (1, *size)
    places = _positions(affine.unflatten(0, (m, k)), size).to(x).flatten(1, 2)
    places = places.expand(n, *places.shape[1:])
    rows = x.reshape(n, c, *shape)
    read = F.grid_sample(rows, places, padding_mode=outside, align_corners=False)
    return read.reshape(n, c, k, *size[-dims:])


def _positions(
    affine: Float[Tensor, "m k d e"], shape: tuple[int, ...]
) -> Float[Tensor, "m k *s d"]:
    """Return the position of every pixel under every map.

    One matrix product for all maps: `F.affine_grid` makes one small product for each map, which
    takes longer than the interpolation.
    """
    axes = [(2 * torch.arange(size).to(affine) + 1) / size - 1 for size in shape]
    grid = [axis.flatten() for axis in torch.meshgrid(*axes, indexing="ij")]
    pixels = torch.stack([*reversed(grid), torch.ones_like(grid[0])])
    positions = affine.flatten(0, 2) @ pixels
    return positions.reshape(*affine.shape[:3], *shape).movedim(2, -1)


def recurrence_steps(dims: int) -> Float[Tensor, " dims"]:
    r"""Return the steps $\phi^{-1}, \dots, \phi^{-d}$ of an additive recurrence in the unit cube.

    $\phi$ solves $\phi^{d+1} = \phi + 1$. The fractional parts of the multiples of the steps are
    deterministic points that, unlike random points, leave no clusters and holes.
    """
    phi = 2.0
    for _ in range(40):  # fixed-point iteration
        phi = (1 + phi) ** (1 / (dims + 1))
    return torch.tensor([phi ** -(i + 1) for i in range(dims)], dtype=torch.float64)
