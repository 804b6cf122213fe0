r"""The maps Q with $B_k Q = Q A_k$ for some pairs of matrices: a null space, pair by pair.

Each pair cuts down the space that the ones before it left (Finzi et al. 2021, Eq. 7, who stack them
all). The first one has all $ts$ entries of Q before it, and would take a singular value
decomposition of $ts \times ts$. Where both matrices are normal it needs none: with
$B = U \beta U^*$ and $A = V \alpha V^*$,

$$ BQ = QA \iff (\beta_i - \alpha_j)\, (U^* Q V)_{ij} = 0, $$

so that the space is spanned by $u_i v_j^*$ with $\beta_i = \alpha_j$. Generators of orthogonal
representations are normal: rotations are, flows are antisymmetric. Random combinations of all
flows, and of $\rho(g) + \rho(g)^\top$ over all discrete generators, which have few equal
eigenvalues, come first and leave little for the generators themselves to do.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Complex, Float
from torch import Tensor

LARGEST = 1024
"""Entries of a map, at most, where the first pair is not normal."""

LARGEST_BASIS = 1 << 23
"""Numbers in all maps that the first pair leaves, at most."""

SMALLEST = 1e-10
"""Singular values below this, relative to the largest, are zero."""

EQUAL = 1e-8
"""Eigenvalues this near, relative to the largest, are taken as equal; later steps tell them apart,
since every generator cuts the space by its singular values."""

Pair = tuple[Float[Tensor, "t t"], Float[Tensor, "s s"]]


def null_space(
    discrete: Sequence[Pair], flows: Sequence[Pair], shape: tuple[int, int]
) -> Float[Tensor, "b t s"]:
    """An orthonormal basis of the maps that commute with all pairs (target, source).

    Args:
        discrete: images of discrete generators.
        flows: images of continuous ones.
        shape: (t, s).

    Raises:
        ValueError: too large a null space.
    """
    flows = [_scaled(pair) for pair in flows]
    generators = [*discrete, *flows]
    pairs = [*_mixed(discrete, flows), *generators]
    basis = _between_eigenvectors(*pairs[0]) if pairs else None
    if basis is None:
        t, s = shape
        if t * s > LARGEST:
            raise ValueError(
                f"expected at most {LARGEST} entries of a map whose null space is computed, got "
                f"{t} x {s}; do: permutations, if the group permutes, orthogonal matrices, or "
                "smaller representations"
            )
        basis = torch.eye(t * s, dtype=torch.float64).reshape(t * s, t, s)
    for left, right in pairs:
        if not len(basis):
            break
        residual = (left @ basis - basis @ right).flatten(1)  # linear in the coefficients
        if float(residual.abs().max()) < SMALLEST:
            continue
        _, sigma, V = torch.linalg.svd(residual.T, full_matrices=False)
        rank = int((sigma > SMALLEST * max(1.0, float(sigma.max()))).sum())
        basis = torch.einsum("bk,kts->bts", V[rank:], basis)
    return basis


def _mixed(discrete: Sequence[Pair], flows: Sequence[Pair]) -> list[Pair]:
    """Two random combinations of the flows, one of the discrete generators: all normal ones."""
    seed = torch.Generator().manual_seed(0)
    found: list[Pair] = []

    def combined(c: Tensor, matrices: Sequence[Tensor]) -> Tensor:
        return torch.einsum("k,kij->ij", c, torch.stack(list(matrices)))

    if len(flows) > 2:
        c = torch.randn(2, len(flows), generator=seed, dtype=torch.float64)
        left, right = zip(*flows, strict=True)
        found += [(combined(row, left), combined(row, right)) for row in c]
    if len(discrete) > 1 and all(_orthogonal(m) for pair in discrete for m in pair):
        row = torch.randn(len(discrete), generator=seed, dtype=torch.float64)
        sums = [(B + B.T, A + A.T) for B, A in discrete]
        left, right = zip(*sums, strict=True)
        found.append((combined(row, left), combined(row, right)))
    return found


def _scaled(pair: Pair) -> Pair:
    """A flow in other units, of which the largest entry is 1: it asks for the same maps."""
    left, right = pair
    largest = max(float(left.abs().max()), float(right.abs().max()))
    return (left / largest, right / largest) if largest > 0 else pair


def _orthogonal(matrix: Float[Tensor, "d d"]) -> bool:
    one = torch.eye(len(matrix), dtype=matrix.dtype)
    return bool(((matrix @ matrix.T - one).abs() < SMALLEST).all())


def _eigen(
    A: Float[Tensor, "d d"],
) -> tuple[Complex[Tensor, " d"], Complex[Tensor, "d d"]] | None:
    r"""Eigenvalues and orthonormal eigenvectors of a normal matrix; None for others.

    $\frac12 (A + A^\top) + \frac{c}{2i} (A - A^\top)$ is Hermitian and has the same eigenvectors,
    for a c that leaves different eigenvalues different.
    """
    scale = max(1.0, float(A.abs().max()))
    if bool(((A @ A.T - A.T @ A).abs() > SMALLEST * scale**2).any()):
        return None
    hermitian = torch.complex(A + A.T, 0.7390851 * (A.T - A)) / 2
    vectors: Tensor = torch.linalg.eigh(hermitian)[1]
    turned = vectors.mH @ A.to(vectors) @ vectors
    values = turned.diagonal()
    if float((turned - torch.diag(values)).abs().max()) > 1e-9 * scale:
        return None  # this c mixed two eigenvalues
    return values, vectors


def _between_eigenvectors(
    left: Float[Tensor, "t t"], right: Float[Tensor, "s s"]
) -> Float[Tensor, "b t s"] | None:
    """An orthonormal basis of the maps that commute with one pair of normal matrices.

    None where a matrix is not normal, or where they leave so much that this gains nothing.
    """
    ours, theirs = _eigen(left), _eigen(right)
    if ours is None or theirs is None:
        return None
    (beta, U), (alpha, V) = ours, theirs
    scale = max(1.0, float(beta.abs().max()), float(alpha.abs().max()))
    i, j = ((beta.unsqueeze(1) - alpha).abs() < EQUAL * scale).nonzero().unbind(1)
    entries = len(left) * len(right)
    if 4 * len(i) > entries or len(i) * entries > LARGEST_BASIS:
        return None
    if not len(i):
        return left.new_empty(0, len(left), len(right))
    products = (U[:, i].T.unsqueeze(2) * V[:, j].mH.unsqueeze(1)).flatten(1)
    # they come in conjugate pairs: real and imaginary parts are rows of a projection, of weight 1
    parts = torch.cat([products.real, products.imag])
    weights, mixing = torch.linalg.eigh(parts @ parts.T)
    real = weights > 0.25
    found: Tensor = (mixing[:, real] / weights[real].sqrt()).T @ parts
    return found.reshape(-1, len(left), len(right))
