r"""Representations: what the generators of a group do to a space.

A homomorphism is known by the images of the generators, and that is all that is stored. Sums and
products of representations are those of their spaces: `a + b` acts on both side by side, `a * b` on
their tensor product.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from symrazor.groups.closure import TOLERANCE, as_numbers, check_permutations, permutation_matrix
from symrazor.groups.group import Group
from symrazor.linalg.matrix_functions import matrix_exponential


@dataclass(frozen=True, eq=False)
class Representation:
    """Images of the generators, on a space of so many dimensions.

    Args:
        group: whose generators they are.
        size: d.
        permutations: of the discrete generators, if they permute coordinates.
        matrices: of the discrete generators, in place of permutations.
        flows: of the continuous generators.
    """

    group: Group
    size: int
    permutations: Int[Tensor, "m d"] | None
    matrices: Float[Tensor, "m d d"] | None
    flows: Float[Tensor, "k d d"]

    def __post_init__(self) -> None:
        """Check that there is one image per generator."""
        given = self.permutations if self.matrices is None else self.matrices
        count = 0 if given is None else len(given)
        wanted = self.group.counts
        if (count, len(self.flows)) != wanted:
            raise ValueError(
                f"expected {wanted[0]} discrete and {wanted[1]} continuous generators of "
                f"{self.group.name}, got {count} and {len(self.flows)}"
            )
        for images in (self.matrices, self.flows):
            wrong = images is not None and tuple(images.shape[1:]) != (self.size, self.size)
            if images is not None and (wrong or not bool(images.isfinite().all())):
                got = list(images.shape) if wrong else "nan or infinity"
                raise ValueError(
                    f"expected images [m, {self.size}, {self.size}] of finite numbers for "
                    f"{self.group.name}, got {got}"
                )

    @classmethod
    def of(cls, group: Group, discrete: object = None, flows: object = None) -> "Representation":
        """A representation of one's own: permutations [m, d] or matrices [m, d, d], and flows.

        For a group with few elements it is checked to be a homomorphism.

        Raises:
            ValueError: images that do not compose as the group does.
        """
        given = None if discrete is None else as_numbers(discrete, "matrices [m, d, d]")
        moves = None if flows is None else as_numbers(flows, "flows [k, d, d]").double()
        if given is not None and given.dim() == 2:
            rows = check_permutations(given)
            empty = torch.empty(0, rows.shape[1], rows.shape[1], dtype=torch.float64)
            found = cls(group, rows.shape[1], rows, None, empty)
        else:
            some = moves if given is None else given
            if some is None:
                raise ValueError(f"expected images of the generators of {group.name}, got none")
            size = some.shape[-1] if some.dim() else 0
            empty = torch.empty(0, size, size, dtype=torch.float64)
            matrices = empty if given is None else given.double()
            found = cls(group, size, None, matrices, empty if moves is None else moves)
        found.check()
        return found

    @property
    def discrete(self) -> Float[Tensor, "m d d"]:
        """Images of the discrete generators as matrices."""
        if self.permutations is not None:
            rows = [permutation_matrix(p) for p in self.permutations]
            return torch.stack(rows) if rows else torch.empty(0, self.size, self.size).double()
        return self.flows[:0] if self.matrices is None else self.matrices

    def check(self) -> None:
        """Verify that images compose as elements do, for groups with few elements and algebras.

        Raises:
            ValueError: names the pair that fails.
        """
        lie = self.group.lie
        if lie is not None and lie.dim:
            f = lie.structure_constants()
            brackets = lie.bracket(self.flows[:, None], self.flows[None])
            wanted = torch.einsum("ijl,lab->ijab", f, self.flows)
            wrong = ((brackets - wanted).abs().amax((2, 3)) > 1e3 * TOLERANCE).nonzero().tolist()
            if wrong:
                i, j = (lie.names[k] for k in wrong[0])
                raise ValueError(
                    f"expected flows that compose as {self.group.name}, got others: {i}, {j}"
                )
            self._check_turned_flows()
        every = self.group._small()
        if every is None:
            return
        images: dict[int, Tensor] = {every.identity: torch.eye(self.size, dtype=torch.float64)}
        waiting = [every.identity]
        for a in waiting:  # the image of a·g by two words must be one matrix
            for g, matrix in zip(every.generators, self.discrete, strict=True):
                product, image = int(every.table[a, g]), images[a] @ matrix
                if product not in images:
                    images[product] = image
                    waiting.append(product)
                elif float((images[product] - image).abs().max()) > 1e3 * TOLERANCE:
                    raise ValueError(
                        f"expected images that compose as {self.group.name}, got others for the "
                        f"pair {every.names[a]}, {every.names[g]}"
                    )

    def _check_turned_flows(self) -> None:
        """Images of g A g^-1 must be those of g and A: for groups with both kinds of generators."""
        lie = self.group.lie
        assert lie is not None
        for k, (g, image) in enumerate(zip(self.group.discrete, self.discrete, strict=True)):
            if int(torch.linalg.matrix_rank(image)) < self.size:
                raise ValueError(
                    f"expected invertible images of {self.group.name}, got another for the "
                    f"discrete generator {k}"
                )
            c = lie.coordinates(g @ lie.generators @ torch.linalg.inv(g))[0]
            wanted = torch.einsum("ij,jab->iab", c, self.flows)
            apart = (image @ self.flows - wanted @ image).abs().amax((1, 2))
            wrong = (apart > 1e3 * TOLERANCE).nonzero().flatten().tolist()
            if wrong:
                letter = self.group.letters[k] if self.group.letters else f"generator {k}"
                raise ValueError(
                    f"expected images that compose as {self.group.name}, got others for the pair "
                    f"{letter}, {lie.names[wrong[0]]}"
                )

    def __add__(self, other: "Representation") -> "Representation":
        """On both spaces side by side."""
        self._same_group(other)
        size = self.size + other.size
        flows = _pairs(torch.block_diag, self.flows, other.flows, size)
        if self.permutations is not None and other.permutations is not None:
            rows = torch.cat([self.permutations, other.permutations + self.size], 1)
            return Representation(self.group, size, rows, None, flows)
        blocks = _pairs(torch.block_diag, self.discrete, other.discrete, size)
        return Representation(self.group, size, None, blocks, flows)

    def __mul__(self, other: "Representation") -> "Representation":
        """On the tensor product, coordinates in row-major order."""
        self._same_group(other)
        size = self.size * other.size
        ours, theirs = (torch.eye(r.size, dtype=torch.float64) for r in (self, other))
        flows = [
            torch.kron(a, theirs) + torch.kron(ours, b)
            for a, b in zip(self.flows, other.flows, strict=True)
        ]
        joined = torch.stack(flows) if flows else torch.empty(0, size, size, dtype=torch.float64)
        if self.permutations is not None and other.permutations is not None:
            pairs = self.permutations.unsqueeze(2) * other.size + other.permutations.unsqueeze(1)
            return Representation(self.group, size, pairs.flatten(1), None, joined)
        products = _pairs(torch.kron, self.discrete, other.discrete, size)
        return Representation(self.group, size, None, products, joined)

    def _same_group(self, other: "Representation") -> None:
        if not other.group.is_same(self.group):
            raise ValueError(
                f"expected representations of one group, got {self.group.name} and "
                f"{other.group.name}, whose generators differ"
            )

    def moves(self, count: int = 16, seed: int = 0) -> list[Tensor]:
        """Images of the generators, then of random words in them; permutations or matrices.

        The words depend on the group and the seed alone, so that two representations move alike.
        """
        generator = torch.Generator().manual_seed(seed)
        own = self.discrete if self.permutations is None or len(self.flows) else self.permutations
        letters = [*own, *(matrix_exponential(A) for A in self.flows)]
        found = list(letters[:count])
        while letters and len(found) < count:
            word = torch.randint(len(letters), (4,), generator=generator).tolist()
            size = 2 * torch.rand(len(self.flows), generator=generator, dtype=torch.float64) - 1
            product = _product([letters[k] for k in word])
            for A, c in zip(self.flows, size, strict=True):
                product = product @ matrix_exponential(c * A)
            found.append(product)
        return found


def defining(group: Group) -> Representation:
    """The space that the group is given on."""
    none = torch.empty(0, group.size, group.size, dtype=torch.float64)
    flows = none if group.lie is None else group.lie.generators
    return Representation(group, group.size, group.permutations, group.matrices, flows)


def invariant(group: Group, size: int = 1) -> Representation:
    """So many numbers that no element changes."""
    given: object = size
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ValueError(f"expected a whole number of at least 1 invariants, got {size!r}")
    lie = 0 if group.lie is None else group.lie.dim
    flows = torch.zeros(lie, size, size, dtype=torch.float64)
    rows = torch.arange(size).repeat(group.counts[0], 1)
    return Representation(group, size, rows, None, flows)


def regular(group: Group) -> Representation:
    """One coordinate per element of a finite group: h goes to g·h."""
    every = group.finite()
    rows = every.table[list(every.generators)]
    empty = torch.empty(0, every.order, every.order, dtype=torch.float64)
    return Representation(group, every.order, rows, None, empty)


def _pairs(join: object, ours: Tensor, theirs: Tensor, size: int) -> Float[Tensor, "m d d"]:
    assert callable(join)
    rows = [join(a, b) for a, b in zip(ours, theirs, strict=True)]
    return torch.stack(rows) if rows else torch.empty(0, size, size, dtype=torch.float64)


def _product(letters: Sequence[Tensor]) -> Tensor:
    """Of permutations or of matrices."""
    found = letters[0]
    for letter in letters[1:]:
        found = found[letter] if found.dim() == 1 else found @ letter
    return found
