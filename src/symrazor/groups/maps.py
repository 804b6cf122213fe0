r"""Find all linear maps that commute with a group: $\rho'(g)\, W = W \rho(g)$ for every element g.

The maps are a vector space, whose basis is computed from the generators alone:

- If both representations permute coordinates, W is constant on the orbits of pairs (t, s), and the
  basis consists of the indicators of the orbits (`symrazor.groups.generators`).
- Otherwise the basis is a null space (`null_space`).

Basis maps are orthogonal, with a squared Frobenius norm of the number t of outputs, so that each
preserves unit variance. A Gaussian prior on the coefficients is then the same isotropic Gaussian on
the space of maps for any basis.

The null space is that of $B_k Q = Q A_k$ for pairs of matrices. Each pair reduces the space that
the previous pairs left (Finzi et al. 2021, Eq. 7, stack all constraints). The first pair acts on
all $ts$ entries of Q and would need a singular value decomposition of $ts \times ts$. If both
matrices are normal, with $B = U \beta U^*$ and $A = V \alpha V^*$, none is needed:

$$ BQ = QA \iff (\beta_i - \alpha_j)\, (U^* Q V)_{ij} = 0, $$

so that the space is spanned by $u_i v_j^*$ with $\beta_i = \alpha_j$. Generators of orthogonal
representations are normal: discrete ones are orthogonal, flows are antisymmetric. Random
combinations of all flows, and of $\rho(g) + \rho(g)^\top$ over all discrete generators, which have
few equal eigenvalues, come first and leave little for the generators themselves.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from symrazor.groups.generators import pair_orbits
from symrazor.groups.lie import is_orthogonal
from symrazor.groups.representation import Representation

MAX_MAP_ENTRIES = 1024
"""Largest number of entries of a map if the first pair is not normal."""

MAX_BASIS_NUMBERS = 1 << 23
"""Largest number of entries of all maps that the first pair leaves."""

SINGULAR_TOLERANCE = 1e-10
"""Singular values below this, relative to the largest, are zero."""

EIGENVALUE_TOLERANCE = 1e-8
"""Eigenvalues this close, relative to the largest, are treated as equal. Later steps distinguish
them, since every generator reduces the space by its singular values."""

Pair = tuple[Float[Tensor, "t t"], Float[Tensor, "s s"]]


def null_space(
    discrete: Sequence[Pair], flows: Sequence[Pair], shape: tuple[int, int]
) -> Float[Tensor, "b t s"]:
    """Return an orthonormal basis of the maps of shape (t, s) that commute with all pairs.

    A pair holds the images of a discrete generator, or of a flow, on the target and the source.
    """
    flows = [_scaled(pair) for pair in flows]
    generators = [*discrete, *flows]
    pairs = [*_normal_combinations(discrete, flows), *generators]
    basis = _between_eigenvectors(*pairs[0]) if pairs else None
    if basis is None:
        t, s = shape
        if t * s > MAX_MAP_ENTRIES:
            raise ValueError(
                f"Maps of {t} x {s} entries are too large: the limit is {MAX_MAP_ENTRIES}. Use "
                "permutations if the group permutes coordinates, orthogonal matrices, or smaller "
                "representations."
            )
        basis = torch.eye(t * s, dtype=torch.float64).reshape(t * s, t, s)
    for left, right in pairs:
        if not len(basis):
            break
        residual = (left @ basis - basis @ right).flatten(1)  # linear in the coefficients
        if float(residual.abs().max()) < SINGULAR_TOLERANCE:
            continue
        _, sigma, V = torch.linalg.svd(residual.T, full_matrices=False)
        rank = int((sigma > SINGULAR_TOLERANCE * max(1.0, float(sigma.max()))).sum())
        basis = torch.einsum("bk,kts->bts", V[rank:], basis)
    return basis


def _normal_combinations(discrete: Sequence[Pair], flows: Sequence[Pair]) -> list[Pair]:
    """Return two random combinations of the flows and one of the discrete generators, if normal."""
    seed = torch.Generator().manual_seed(0)
    combinations: list[Pair] = []

    def combine(count: int, pairs: Sequence[Pair]) -> None:
        coefficients = torch.randn(count, len(pairs), generator=seed, dtype=torch.float64)
        sides = [torch.stack(side) for side in zip(*pairs, strict=True)]
        for c in coefficients:
            left, right = (torch.einsum("k,kij->ij", c, side) for side in sides)
            combinations.append((left, right))

    if len(flows) > 2:
        combine(2, flows)
    if len(discrete) > 1 and all(
        is_orthogonal(m, SINGULAR_TOLERANCE) for pair in discrete for m in pair
    ):
        combine(1, [(B + B.T, A + A.T) for B, A in discrete])
    return combinations


def _scaled(pair: Pair) -> Pair:
    """Scale a flow to a largest entry of 1; it commutes with the same maps."""
    left, right = pair
    largest = max(float(left.abs().max()), float(right.abs().max()))
    return (left / largest, right / largest) if largest > 0 else pair


def _eigen(A: Float[Tensor, "d d"]) -> tuple[Complex[Tensor, " d"], Complex[Tensor, "d d"]] | None:
    r"""Return eigenvalues and orthonormal eigenvectors of a normal matrix, or None.

    $\frac12 (A + A^\top) + \frac{c}{2i} (A - A^\top)$ is Hermitian and has the same eigenvectors,
    for a c that keeps different eigenvalues different.
    """
    scale = max(1.0, float(A.abs().max()))
    if bool(((A @ A.T - A.T @ A).abs() > SINGULAR_TOLERANCE * scale**2).any()):
        return None
    hermitian = torch.complex(A + A.T, 0.7390851 * (A.T - A)) / 2
    vectors: Tensor = torch.linalg.eigh(hermitian)[1]
    diagonal = vectors.mH @ A.to(vectors) @ vectors
    values = diagonal.diagonal()
    if float((diagonal - torch.diag(values)).abs().max()) > 1e-9 * scale:
        return None  # this c made two different eigenvalues equal
    return values, vectors


def _between_eigenvectors(
    left: Float[Tensor, "t t"], right: Float[Tensor, "s s"]
) -> Float[Tensor, "b t s"] | None:
    """Return an orthonormal basis of the maps that commute with one pair of normal matrices.

    Return None if a matrix is not normal, or if the basis is too large to gain anything.
    """
    left_eigen, right_eigen = _eigen(left), _eigen(right)
    if left_eigen is None or right_eigen is None:
        return None
    (beta, U), (alpha, V) = left_eigen, right_eigen
    scale = max(1.0, float(beta.abs().max()), float(alpha.abs().max()))
    i, j = ((beta.unsqueeze(1) - alpha).abs() < EIGENVALUE_TOLERANCE * scale).nonzero().unbind(1)
    entries = len(left) * len(right)
    if 4 * len(i) > entries or len(i) * entries > MAX_BASIS_NUMBERS:
        return None
    if not len(i):
        return left.new_empty(0, len(left), len(right))
    products = (U[:, i].T.unsqueeze(2) * V[:, j].mH.unsqueeze(1)).flatten(1)
    # Products come in conjugate pairs: their real and imaginary parts span the real maps.
    candidates = torch.cat([products.real, products.imag])
    weights, mixing = torch.linalg.eigh(candidates @ candidates.T)
    real = weights > 0.25
    basis: Tensor = (mixing[:, real] / weights[real].sqrt()).T @ candidates
    return basis.reshape(-1, len(left), len(right))


CACHE_SIZE = 64
"""Number of bases that are cached."""


@dataclass(frozen=True, eq=False, repr=False)
class MapBasis:
    """A basis of equivariant maps from s to t dimensions.

    Args:
        shape: (t, s).
        labels: for permutation representations, the basis map that each entry belongs to.
        scales: for permutation representations, the value of each basis map at its entries.
        dense: for other representations, the maps themselves.
    """

    shape: tuple[int, int]
    labels: Int[Tensor, "t s"] | None
    scales: Float[Tensor, " b"] | None
    dense: Float[Tensor, "b t s"] | None

    @property
    def count(self) -> int:
        """Number of basis maps."""
        maps = self.scales if self.dense is None else self.dense
        assert maps is not None
        return len(maps)

    def __repr__(self) -> str:
        t, s = self.shape
        return f"<MapBasis {self.count} maps, {s} -> {t} dimensions>"

    def matrices(self) -> Float[Tensor, "b t s"]:
        """Return the basis maps as matrices."""
        if self.dense is not None:
            return self.dense
        assert self.labels is not None and self.scales is not None
        maps = torch.zeros(self.count, self.labels.numel(), dtype=torch.float64)
        flat = self.labels.flatten()
        maps[flat, torch.arange(len(flat))] = self.scales[flat]
        return maps.reshape(self.count, *self.shape)

    def commutes(self, source: Representation, target: Representation) -> bool:
        """Return whether all maps commute with a group, given its action on both spaces."""
        if (target.size, source.size) != self.shape:
            return False
        rows, columns = target.permutations, source.permutations
        if self.labels is not None and rows is not None and columns is not None:
            moved = [self.labels[p][:, q] for p, q in zip(rows, columns, strict=True)]
            return all(torch.equal(labels, self.labels) for labels in moved)
        Q = self.matrices()
        pairs = [*zip(target.discrete, source.discrete, strict=True)]
        pairs += zip(target.flows, source.flows, strict=True)
        return all(float((b @ Q - Q @ a).abs().max()) < 1e-8 for b, a in pairs)

    def orthogonal_to(self, others: Sequence["MapBasis"]) -> "MapBasis":
        """Return the maps that are orthogonal to all maps of other bases of the same shape."""
        maps = self.matrices().flatten(1)
        overlap = torch.cat([other.matrices().flatten(1) @ maps.T for other in others])
        _, sigma, V = torch.linalg.svd(overlap / self.shape[0], full_matrices=True)
        rank = int((sigma > 1e-8).sum())
        kept = (V[rank:] @ maps).reshape(-1, *self.shape)
        return MapBasis(self.shape, None, None, kept)


_cache: OrderedDict[bytes, MapBasis] = OrderedDict()


def equivariant_maps(source: Representation, target: Representation) -> MapBasis:
    """Return a basis of the equivariant maps from one representation to another.

    Bases are cached by content, so that a second layer of the same kind costs nothing.

    Raises:
        ValueError: representations of different groups, or too large a null space.
    """
    if not source.group.is_same(target.group):
        raise ValueError(
            f"The generators of {source.group.name} and {target.group.name} differ. Use "
            "representations of one group."
        )
    key = _key(source, target)
    if key in _cache:
        _cache.move_to_end(key)
        return _cache[key]
    shape = (target.size, source.size)
    if source.permutations is not None and target.permutations is not None:
        if bool(source.flows.any()) or bool(target.flows.any()):
            raise ValueError("A representation has permutations or flows, not both. Use matrices.")
        labels = pair_orbits(target.permutations, source.permutations)
        sizes = labels.flatten().bincount().double()
        basis = MapBasis(shape, labels, (target.size / sizes).sqrt(), None)
    else:
        discrete = list(zip(target.discrete, source.discrete, strict=True))
        flows = list(zip(target.flows, source.flows, strict=True))
        maps = null_space(discrete, flows, shape) * target.size**0.5
        basis = MapBasis(shape, None, None, maps)
    _cache[key] = basis
    if len(_cache) > CACHE_SIZE:
        _cache.popitem(last=False)
    return basis


def _key(source: Representation, target: Representation) -> bytes:
    digest = sha256()
    for rho in (source, target):
        for part in (rho.permutations, rho.matrices, rho.flows):
            digest.update(str(None if part is None else tuple(part.shape)).encode())
            if part is not None:
                digest.update(part.contiguous().numpy().tobytes())
    return digest.digest()
