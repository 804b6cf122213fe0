r"""All linear maps that commute with a group: $\rho'(g)\, W = W \rho(g)$ for every element g.

They are a vector space, whose basis is found from the generators alone:

- Where both representations permute coordinates, W must be constant on the orbits of pairs (t, s):
  the basis is the indicators of the orbits, found by joining labels, in milliseconds.
- Else it is the null space of the constraints, one generator at a time (`null_space`).

Basis maps are orthogonal, with a squared Frobenius norm of the number t of outputs: each passes on
unit variance. A Gaussian on the coefficients is then the same isotropic Gaussian on the space
itself, whatever the basis.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from symrazor.groups.orbits import pair_orbits
from symrazor.groups.representation import Representation

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


KEPT = 64
"""Bases that are remembered."""


@dataclass(frozen=True, eq=False)
class MapBasis:
    """A basis of equivariant maps from s to t dimensions.

    Args:
        shape: (t, s).
        labels: of permutation representations: which basis map an entry belongs to.
        scales: of permutation representations: what that basis map is there.
        given: of other representations: the maps themselves.
    """

    shape: tuple[int, int]
    labels: Int[Tensor, "t s"] | None
    scales: Float[Tensor, " b"] | None
    given: Float[Tensor, "b t s"] | None

    @property
    def count(self) -> int:
        """Number of basis maps."""
        found = self.scales if self.given is None else self.given
        assert found is not None
        return len(found)

    def matrices(self) -> Float[Tensor, "b t s"]:
        """The basis maps, written out."""
        if self.given is not None:
            return self.given
        assert self.labels is not None and self.scales is not None
        every = torch.zeros(self.count, self.labels.numel(), dtype=torch.float64)
        flat = self.labels.flatten()
        every[flat, torch.arange(len(flat))] = self.scales[flat]
        return every.reshape(self.count, *self.shape)

    def commutes(self, source: Representation, target: Representation) -> bool:
        """Whether all its maps commute with a group, by what the generators do to both spaces."""
        if (target.size, source.size) != self.shape:
            return False
        rows, columns = target.permutations, source.permutations
        if self.labels is not None and rows is not None and columns is not None:
            moved = [self.labels[p][:, q] for p, q in zip(rows, columns, strict=True)]
            return all(torch.equal(one, self.labels) for one in moved)
        Q = self.matrices()
        pairs = [*zip(target.discrete, source.discrete, strict=True)]
        pairs += zip(target.flows, source.flows, strict=True)
        return all(float((b @ Q - Q @ a).abs().max()) < 1e-8 for b, a in pairs)

    def orthogonal_to(self, others: Sequence["MapBasis"]) -> "MapBasis":
        """Those maps that are orthogonal to all of some others, between the same spaces."""
        own = self.matrices().flatten(1)
        overlap = torch.cat([other.matrices().flatten(1) @ own.T for other in others])
        _, sigma, V = torch.linalg.svd(overlap / self.shape[0], full_matrices=True)
        rank = int((sigma > 1e-8).sum())
        kept = (V[rank:] @ own).reshape(-1, *self.shape)
        return MapBasis(self.shape, None, None, kept)


_known: OrderedDict[bytes, MapBasis] = OrderedDict()


def equivariant_maps(source: Representation, target: Representation) -> MapBasis:
    """A basis of the maps from one representation of a group to another.

    Remembered by content: a second layer of the same kind costs nothing.

    Raises:
        ValueError: representations of two groups, or too large a null space.
    """
    if not source.group.is_same(target.group):
        raise ValueError(
            f"expected representations of one group, got {source.group.name} and "
            f"{target.group.name}, whose generators differ; do: use one group for both"
        )
    key = _key(source, target)
    if key in _known:
        _known.move_to_end(key)
        return _known[key]
    if source.permutations is not None and target.permutations is not None:
        found = _orbits(source, target)
    else:
        found = _null_space(source, target)
    _known[key] = found
    if len(_known) > KEPT:
        _known.popitem(last=False)
    return found


def _key(source: Representation, target: Representation) -> bytes:
    digest = sha256()
    for one in (source, target):
        for part in (one.permutations, one.matrices, one.flows):
            digest.update(str(None if part is None else tuple(part.shape)).encode())
            if part is not None:
                digest.update(part.contiguous().numpy().tobytes())
    return digest.digest()


def _orbits(source: Representation, target: Representation) -> MapBasis:
    assert source.permutations is not None and target.permutations is not None
    if bool(source.flows.any()) or bool(target.flows.any()):
        raise ValueError("expected permutations without flows, got both; use matrices")
    labels = pair_orbits(target.permutations, source.permutations)
    sizes = labels.flatten().bincount().double()
    return MapBasis((target.size, source.size), labels, (target.size / sizes).sqrt(), None)


def _null_space(source: Representation, target: Representation) -> MapBasis:
    shape = (target.size, source.size)
    discrete = list(zip(target.discrete, source.discrete, strict=True))
    flows = list(zip(target.flows, source.flows, strict=True))
    return MapBasis(shape, None, None, null_space(discrete, flows, shape) * target.size**0.5)
