r"""Map vectors to features that do not change under a group of matrices.

`InvariantForms` computes invariant linear and quadratic forms. They determine every invariant of
rotations, Lorentz transformations and similar groups (first fundamental theorems of invariant
theory). A finite group may need forms of higher degree. `Orbit` returns all transformed copies of a
vector instead; whatever is averaged over the copies is invariant.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.groups import Group, defining, equivariant_maps, invariant

MAX_ORBIT = 64
"""Largest number of elements of a finite group whose orbits are computed."""
FORM_TOLERANCE = 1e-8
"""Singular values below this belong to products of linear forms, which add nothing."""


def invariant_forms(group: Group) -> tuple[Float[Tensor, "l d"], Float[Tensor, "q d d"]]:
    """Return linear forms, and symmetric quadratic forms that are not products of them.

    Both are orthonormal and in float64.
    """
    d, trivial = group.size, invariant(group)
    vector = defining(group)
    linear = _orthonormal(equivariant_maps(vector, trivial).matrices().reshape(-1, d))
    quadratic = equivariant_maps(vector * vector, trivial).matrices().reshape(-1, d, d)
    quadratic = _orthonormal(((quadratic + quadratic.mT) / 2).flatten(1))
    products = linear[:, None, :, None] * linear[None, :, None, :]
    symmetric = ((products + products.mT) / 2).reshape(-1, d * d)
    implied = _orthonormal(symmetric)
    return linear, _orthonormal(quadratic - quadratic @ implied.T @ implied).reshape(-1, d, d)


def _orthonormal(rows: Float[Tensor, "m n"]) -> Float[Tensor, "r n"]:
    """Return an orthonormal basis of the row space."""
    if not len(rows):
        return rows
    _, sigma, V = torch.linalg.svd(rows, full_matrices=False)
    basis: Tensor = V[sigma > FORM_TOLERANCE * max(1.0, float(sigma.max()))]
    return basis


class InvariantForms(nn.Module):
    r"""Return invariant linear forms, and quadratic forms q compressed to $q / \sqrt{1 + |q|}$.

    Args:
        group: a group of matrices.

    Raises:
        ValueError: the group has no invariant forms of degree 1 or 2.
    """

    linear: Tensor
    quadratic: Tensor

    def __init__(self, group: Group) -> None:
        super().__init__()
        linear, quadratic = invariant_forms(group)
        if not len(linear) + len(quadratic):
            raise ValueError(
                f"Group {group.name} has no invariant linear or quadratic form, such as a length. "
                "Only groups with such forms are supported."
            )
        self.register_buffer("linear", linear.float())
        self.register_buffer("quadratic", quadratic.float())

    @property
    def count(self) -> int:
        """Number of features."""
        return len(self.linear) + len(self.quadratic)

    def forward(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n f"]:
        """Return the features."""
        q = torch.einsum("ni,qij,nj->nq", x, self.quadratic, x)
        return torch.cat([x @ self.linear.T, q / (1 + q.abs()).sqrt()], 1)


class Orbit(nn.Module):
    """Return all transformed copies of vectors under a finite group of matrices."""

    elements: Tensor

    def __init__(self, group: Group) -> None:
        super().__init__()
        finite = group.finite(MAX_ORBIT)
        matrices = torch.stack([finite.matrix(g) for g in finite.elements])
        self.register_buffer("elements", matrices.float())

    def forward(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n g d"]:
        """Return the copies."""
        return torch.einsum("gij,nj->ngi", self.elements, x)


class OrbitMean(nn.Module):
    """Return the mean over the copies of an orbit."""

    def forward(self, x: Float[Tensor, "n g d"]) -> Float[Tensor, "n d"]:
        """Return the mean."""
        return x.mean(1)


class MatrixInvariant(nn.Module):
    """A network with two hidden layers that is invariant under a group of matrices.

    Args:
        group: the group; of finite groups, at most `MAX_ORBIT` elements.
        outputs: number of outputs.
        free: whether the first hidden layer also sees the vector itself, which breaks the symmetry.
        width: of the hidden layers.
    """

    def __init__(self, group: Group, outputs: int, free: bool = False, width: int = 64) -> None:
        super().__init__()
        finite = group.finite_or_none()
        self.features: nn.Module
        if finite is not None and finite.order <= MAX_ORBIT:
            lift = nn.Linear(group.size, width)
            self.features, count = nn.Sequential(Orbit(group), lift, nn.Tanh(), OrbitMean()), width
        else:
            self.features = InvariantForms(group)
            count = self.features.count
        self.first = nn.Linear(count, width)
        self.free = nn.Linear(group.size, width, bias=False) if free else None
        self.second = nn.Linear(width, width)
        self.last = nn.Linear(width, outputs)

    def forward(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n k"]:
        """Return the outputs."""
        h = self.first(self.features(x))
        if self.free is not None:
            h = h + self.free(x)
        out: Tensor = self.last(self.second(h.tanh()).tanh())
        return out
