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
from jaxtyping import Float, Int
from torch import Tensor

from symrazor.groups.null_space import null_space
from symrazor.groups.orbits import pair_orbits
from symrazor.groups.representation import Representation

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

    def beyond(self, others: Sequence["MapBasis"]) -> "MapBasis":
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
