r"""Define representations: the action of the generators of a group on a space.

A homomorphism is determined by the images of the generators, and only these are stored. `a + b`
acts on the direct sum of two spaces, and `a * b` on their tensor product.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from symrazor.core.validation import check_positive_integer
from symrazor.groups.generators import (
    ELEMENT_TOLERANCE,
    as_numbers,
    check_permutations,
    no_matrices,
    permutation_matrices,
    product_of_permutations,
    stack_matrices,
    sum_of_permutations,
)
from symrazor.groups.group import Group
from symrazor.groups.lie import matrix_exponential


@dataclass(frozen=True, eq=False, repr=False)
class Representation:
    """Images of the generators of a group on a d-dimensional space.

    Args:
        group: the group.
        size: d.
        permutations: images of the discrete generators, if they permute coordinates.
        matrices: images of the discrete generators, instead of permutations.
        flows: images of the continuous generators.
    """

    group: Group
    size: int
    permutations: Int[Tensor, "m d"] | None
    matrices: Float[Tensor, "m d d"] | None
    flows: Float[Tensor, "k d d"]

    def __post_init__(self) -> None:
        discrete = self.permutations if self.matrices is None else self.matrices
        counts = (0 if discrete is None else len(discrete), len(self.flows))
        if counts != self.group.counts:
            expected = self.group.counts
            raise ValueError(
                f"{self.group.name} has {expected[0]} discrete and {expected[1]} continuous "
                f"generators, got images of {counts[0]} and {counts[1]}."
            )
        for images in (self.matrices, self.flows):
            wrong = images is not None and tuple(images.shape[1:]) != (self.size, self.size)
            if images is not None and (wrong or not bool(images.isfinite().all())):
                got = list(images.shape) if wrong else "nan or infinity"
                raise ValueError(
                    f"Images of {self.group.name} must be finite matrices "
                    f"[m, {self.size}, {self.size}], got {got}."
                )

    def __repr__(self) -> str:
        return f"<Representation of {self.group.name} on {self.size} dimensions>"

    @classmethod
    def of(cls, group: Group, discrete: object = None, flows: object = None) -> "Representation":
        """Return a representation by permutations [m, d] or matrices [m, d, d], and flows.

        `check` raises ValueError if it is not a homomorphism.
        """
        images = None if discrete is None else as_numbers(discrete, "matrices [m, d, d]")
        moves = None if flows is None else as_numbers(flows, "flows [k, d, d]").double()
        if images is not None and images.dim() == 2:
            rows = check_permutations(images)
            size = rows.shape[1]
            representation = cls(group, size, rows, None, no_matrices(size))
        else:
            given = moves if images is None else images
            if given is None:
                raise ValueError(f"Pass images of the generators of {group.name}.")
            size = given.shape[-1] if given.dim() else 0
            matrices = no_matrices(size) if images is None else images.double()
            flow_images = no_matrices(size) if moves is None else moves
            representation = cls(group, size, None, matrices, flow_images)
        representation.check()
        return representation

    @property
    def discrete(self) -> Float[Tensor, "m d d"]:
        """Images of the discrete generators as matrices."""
        if self.permutations is not None:
            return permutation_matrices(self.permutations)
        return self.flows[:0] if self.matrices is None else self.matrices

    def check(self) -> None:
        """Raise ValueError, naming the pair, if images do not compose as elements do.

        Elements of small groups and generators of Lie algebras are checked.
        """
        lie = self.group.lie
        if lie is not None and lie.dim:
            f = lie.structure_constants()
            brackets = lie.bracket(self.flows[:, None], self.flows[None])
            expected = torch.einsum("ijl,lab->ijab", f, self.flows)
            difference = (brackets - expected).abs().amax((2, 3))
            wrong = (difference > 1e3 * ELEMENT_TOLERANCE).nonzero().tolist()
            if wrong:
                i, j = (lie.names[k] for k in wrong[0])
                raise ValueError(
                    f"The flows do not compose as {self.group.name} for the pair {i}, {j}."
                )
            self._check_conjugated_flows()
        finite = self.group.finite_or_none()
        if finite is None:
            return
        images: dict[int, Tensor] = {finite.identity: torch.eye(self.size, dtype=torch.float64)}
        waiting = [finite.identity]
        for a in waiting:  # two words for the same element must have the same image
            for g, matrix in zip(finite.generators, self.discrete, strict=True):
                product, image = int(finite.table[a, g]), images[a] @ matrix
                if product not in images:
                    images[product] = image
                    waiting.append(product)
                elif float((images[product] - image).abs().max()) > 1e3 * ELEMENT_TOLERANCE:
                    raise ValueError(
                        f"The images do not compose as {self.group.name} for the pair "
                        f"{finite.names[a]}, {finite.names[g]}."
                    )

    def _check_conjugated_flows(self) -> None:
        """Check that the image of g A g^-1 is that of g, A and g^-1 together."""
        lie = self.group.lie
        assert lie is not None
        for k, (g, image) in enumerate(zip(self.group.discrete, self.discrete, strict=True)):
            if int(torch.linalg.matrix_rank(image)) < self.size:
                raise ValueError(
                    f"The image of discrete generator {k} of {self.group.name} is not invertible."
                )
            c = lie.coordinates(g @ lie.generators @ torch.linalg.inv(g))[0]
            expected = torch.einsum("ij,jab->iab", c, self.flows)
            difference = (image @ self.flows - expected @ image).abs().amax((1, 2))
            wrong = (difference > 1e3 * ELEMENT_TOLERANCE).nonzero().flatten().tolist()
            if wrong:
                letter = self.group.letters[k] if self.group.letters else f"generator {k}"
                raise ValueError(
                    f"The images do not compose as {self.group.name} for the pair {letter}, "
                    f"{lie.names[wrong[0]]}."
                )

    def __add__(self, other: "Representation") -> "Representation":
        """Return the representation on the direct sum."""
        flows = map(torch.block_diag, self.flows, other.flows)
        return self._combined(other, sum_of_permutations, torch.block_diag, flows)

    def __mul__(self, other: "Representation") -> "Representation":
        """Return the representation on the tensor product, coordinates in row-major order."""
        left, right = (torch.eye(r.size, dtype=torch.float64) for r in (self, other))
        pairs = zip(self.flows, other.flows, strict=False)
        flows = (torch.kron(a, right) + torch.kron(left, b) for a, b in pairs)
        return self._combined(other, product_of_permutations, torch.kron, flows)

    def _combined(
        self,
        other: "Representation",
        join_permutations: Callable[[Tensor, Tensor], Tensor],
        join_matrices: Callable[[Tensor, Tensor], Tensor],
        flows: Iterable[Tensor],
    ) -> "Representation":
        if not other.group.is_same(self.group):
            raise ValueError(
                f"The generators of {self.group.name} and {other.group.name} differ. Use "
                "representations of one group."
            )
        size = len(join_matrices(torch.eye(self.size), torch.eye(other.size)))
        rows: Tensor | None = None
        matrices: Tensor | None = None
        if self.permutations is not None and other.permutations is not None:
            rows = join_permutations(self.permutations, other.permutations)
        else:
            joined = list(map(join_matrices, self.discrete, other.discrete))
            matrices = stack_matrices(joined, size)
        return Representation(self.group, size, rows, matrices, stack_matrices(list(flows), size))

    def moves(self, count: int = 16, seed: int = 0) -> list[Tensor]:
        """Return images of the generators, then of random words, as permutations or matrices.

        The words depend on the group and the seed only, so that two representations correspond.
        """
        generator = torch.Generator().manual_seed(seed)
        permutes = self.permutations is not None and not len(self.flows)
        discrete = self.permutations if permutes else self.discrete
        assert discrete is not None
        letters = [*discrete, *(matrix_exponential(A) for A in self.flows)]
        images = list(letters[:count])
        while letters and len(images) < count:
            word = torch.randint(len(letters), (4,), generator=generator).tolist()
            size = 2 * torch.rand(len(self.flows), generator=generator, dtype=torch.float64) - 1
            product = _product([letters[k] for k in word])
            for A, c in zip(self.flows, size, strict=True):
                product = product @ matrix_exponential(c * A)
            images.append(product)
        return images


def defining(group: Group) -> Representation:
    """Return the representation on the space on which the group is defined."""
    flows = no_matrices(group.size) if group.lie is None else group.lie.generators
    return Representation(group, group.size, group.permutations, group.matrices, flows)


def invariant(group: Group, size: int = 1) -> Representation:
    """Return the trivial representation on `size` numbers, which no element changes."""
    check_positive_integer("size", size)
    lie = 0 if group.lie is None else group.lie.dim
    flows = torch.zeros(lie, size, size, dtype=torch.float64)
    rows = torch.arange(size).repeat(group.counts[0], 1)
    return Representation(group, size, rows, None, flows)


def regular(group: Group) -> Representation:
    """Return the regular representation of a finite group: element h moves to g·h."""
    finite = group.finite()
    rows = finite.table[list(finite.generators)]
    return Representation(group, finite.order, rows, None, no_matrices(finite.order))


def _product(letters: Sequence[Tensor]) -> Tensor:
    """Return the product of permutations or of matrices."""
    product = letters[0]
    for letter in letters[1:]:
        product = product[letter] if product.dim() == 1 else product @ letter
    return product
