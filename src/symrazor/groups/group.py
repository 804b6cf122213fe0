r"""A group is its generators: discrete ones, permutations or matrices, and a Lie algebra.

Layers need no more than that: what commutes with every generator commutes with the group. So a
group may be infinite, or as large as the permutations of a hundred things, at no cost; `finite()`
lists the elements of those that are small.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from symrazor.groups.closure import (
    LIMIT,
    TOLERANCE,
    as_numbers,
    check_matrices,
    check_permutations,
    permutation_matrix,
)
from symrazor.groups.finite import FiniteGroup
from symrazor.groups.generators import (
    as_permutation,
    check_flows,
    check_letters,
    check_lie,
    check_name,
    joined_letters,
)
from symrazor.groups.lie import LieAlgebra
from symrazor.groups.membership import in_continuous
from symrazor.groups.orbits import pair_orbits

Element = int | str | Tensor | Sequence[Any]
"""Index or name of an element of a finite group, or a permutation [n], or a matrix [d, d]; lists
of numbers are taken for tensors."""


@dataclass(frozen=True, eq=False, repr=False)
class Group:
    """A group acting on n places, by permutations, or on vectors of n numbers, by matrices.

    Args:
        name: for reports.
        size: n.
        permutations: discrete generators; p[i] is where place i goes.
        matrices: discrete generators, in place of permutations.
        lie: continuous generators, beside matrices.
        letters: names of the discrete generators, of which those of elements are made.
    """

    name: str
    size: int
    permutations: Int[Tensor, "m n"] | None = None
    matrices: Float[Tensor, "m n n"] | None = None
    lie: LieAlgebra | None = None
    letters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the name and the generators."""
        check_name(self.name)
        check_lie(self.lie, self.name)
        if self.permutations is not None and (self.matrices is not None or self.lie is not None):
            raise ValueError(f"expected permutations or matrices in {self.name}, got both")
        if self.permutations is not None:
            object.__setattr__(self, "permutations", check_permutations(self.permutations))
        if self.matrices is not None:
            object.__setattr__(self, "matrices", check_matrices(self.matrices))
        sizes = {
            "permutations": None if self.permutations is None else self.permutations.shape[1],
            "matrices": None if self.matrices is None else self.matrices.shape[1],
            "lie": None if self.lie is None else self.lie.size,
        }
        wrong = {k: size for k, size in sizes.items() if size not in (None, self.size)}
        if wrong:
            raise ValueError(f"expected generators of size {self.size} in {self.name}, got {wrong}")
        generators = self.matrices if self.permutations is None else self.permutations
        check_letters(self.letters, generators, self.name)

    def __repr__(self) -> str:
        """Name, space and generators, in a line."""
        discrete, flows = self.counts
        space = f"{self.size} {'numbers' if self.permutations is None else 'places'}"
        kinds = {"discrete": discrete, "continuous": flows}
        made = " and ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
        return f"<Group {self.name} on {space}, generators: {made or 'none'}>"

    @classmethod
    def from_permutations(
        cls, name: str, permutations: object, letters: Sequence[str] = ()
    ) -> "Group":
        """The group that some permutations [m, n] generate."""
        check_name(name)
        rows = check_permutations(permutations)
        return cls(name, rows.shape[1], permutations=rows, letters=tuple(letters))

    @classmethod
    def from_matrices(
        cls,
        name: str,
        matrices: object = (),
        lie: LieAlgebra | None = None,
        letters: Sequence[str] = (),
    ) -> "Group":
        """The group that some matrices [m, d, d] and a Lie algebra generate."""
        check_name(name)
        check_lie(lie, name)
        given = as_numbers(matrices, "square matrices [m, d, d]").double()
        if lie is not None and not given.numel():
            given = given.new_empty(0, lie.size, lie.size)
        found = check_matrices(given)
        return cls(name, found.shape[1], matrices=found, lie=lie, letters=tuple(letters))

    @property
    def is_discrete(self) -> bool:
        """Whether it has no continuous generators."""
        return self.lie is None or self.lie.dim == 0

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of discrete and of continuous generators."""
        given = self.matrices if self.permutations is None else self.permutations
        return 0 if given is None else len(given), 0 if self.lie is None else self.lie.dim

    def is_same(self, other: "Group") -> bool:
        """Whether both are given by equal generators: perhaps two objects, but one group."""
        if self is other:
            return True
        parts = [(g.permutations, g.matrices, g.lie and g.lie.generators) for g in (self, other)]
        return self.size == other.size and all(
            a is b or (a is not None and b is not None and torch.equal(a, b))
            for a, b in zip(*parts, strict=True)
        )

    @property
    def discrete(self) -> Float[Tensor, "m n n"]:
        """Discrete generators as matrices."""
        if self.permutations is not None:
            rows = [permutation_matrix(p) for p in self.permutations]
            return torch.stack(rows) if rows else torch.empty(0, self.size, self.size).double()
        if self.matrices is not None:
            return self.matrices
        return torch.empty(0, self.size, self.size, dtype=torch.float64)

    @cached_property
    def _finite(self) -> dict[str, FiniteGroup]:
        return {}

    def finite(self, limit: int = LIMIT) -> FiniteGroup:
        """All elements.

        Raises:
            ValueError: a continuous group, or one of more than `limit` elements.
        """
        if not self.is_discrete:
            raise ValueError(f"expected a finite group, got the continuous {self.name}")
        if "all" not in self._finite:
            if self.permutations is not None:
                found = FiniteGroup.from_permutations(
                    self.name, self.permutations, self.letters, limit
                )
            else:
                found = FiniteGroup.from_matrices(self.name, self.discrete, self.letters, limit)
            self._finite["all"] = found
        return self._finite["all"]

    def element(self, g: Element) -> Tensor:
        """A permutation or matrix; an index or name is looked up among those of a finite group.

        Raises:
            ValueError: no such index or name, or a permutation or matrix of another size. Whether
                it belongs to the group is not asked, see `contains`.
        """
        if (not isinstance(g, str) and not hasattr(g, "__index__")) or isinstance(g, Tensor):
            g = as_numbers(g, f"an element of {self.name}")
        if isinstance(g, Tensor) and g.dim() > 0:
            n = self.size
            if g.dim() == 1 and sorted(g.tolist()) == list(range(n)):
                return g
            if g.dim() == 1 or tuple(g.shape) != (n, n):
                form = f"a permutation of 0 to {n - 1}" if g.dim() == 1 else f"a {n} x {n} matrix"
                raise ValueError(
                    f"expected {form} for {self.name}, got "
                    f"{g[:12].tolist() if g.dim() == 1 else list(g.shape)}"
                )
            if not bool(g.isfinite().all()):
                raise ValueError(f"expected finite numbers as an element of {self.name}, got nan")
            return g
        fraction = isinstance(g, Tensor) and (g.is_floating_point() or g.dtype == torch.bool)
        if isinstance(g, bool) or fraction:
            raise ValueError(f"expected a whole number as an element of {self.name}, got {g!r}")
        every = self.finite()
        if isinstance(g, str) and g not in every.names:
            some = ", ".join(every.names[:12])
            raise ValueError(f"expected the name of an element of {self.name}: {some}; got {g!r}")
        index = every.names.index(g) if isinstance(g, str) else int(g)
        if not 0 <= index < every.order:
            raise ValueError(f"expected an element 0 to {every.order - 1}, got {index}")
        found = every.matrix(index) if every.permutations is None else every.permutations[index]
        return found.clone()

    def sample(self, count: int, seed: int = 0, reach: float = 1.0) -> list[Tensor]:
        """Elements other than the identity: all of a small finite group, else random ones.

        A random element is a product of random generators and their inverses, and of exponentials
        of coefficients between -reach and reach.
        """
        given: object = count
        if isinstance(given, bool) or not isinstance(given, int) or count < 1:
            raise ValueError(f"expected a count of at least 1, a whole number, got {count!r}")
        generator = torch.Generator().manual_seed(seed)
        every = self._small()
        if every is not None:
            others = [g for g in every.elements if g != every.identity]
            order = torch.randperm(len(others), generator=generator).tolist()
            chosen = others if len(others) <= count else sorted(others[i] for i in order[:count])
            return [self.element(g) for g in chosen]
        return [self._random(generator, reach) for _ in range(count)]

    def _small(self) -> FiniteGroup | None:
        """All elements, if they are few."""
        try:
            return self.finite() if self.is_discrete else None
        except ValueError:
            return None

    def _random(self, generator: torch.Generator, reach: float) -> Tensor:
        if self.permutations is not None:
            found = torch.arange(self.size)
            for k in torch.randint(len(self.permutations), (4 * self.size,), generator=generator):
                found = found[self.permutations[int(k)]]
            return found
        product = torch.eye(self.size, dtype=torch.float64)
        if len(self.discrete):
            for k in torch.randint(len(self.discrete), (8,), generator=generator):
                product = product @ self.discrete[int(k)]
        if self.lie is not None and self.lie.dim:
            unit = torch.rand(self.lie.dim, generator=generator, dtype=torch.float64)
            product = product @ self.lie.exp((2 * unit - 1) * reach)
        return product

    def __mul__(self, other: "Group") -> "Group":
        """The direct product, acting on both spaces side by side: n + n' places or numbers."""
        if not isinstance(other, Group):
            return NotImplemented
        name, size = f"{self.name} x {other.name}", self.size + other.size
        letters = joined_letters(self.letters, other.letters)
        if self.permutations is not None and other.permutations is not None:
            left = torch.arange(size).repeat(len(self.permutations), 1)
            right = torch.arange(size).repeat(len(other.permutations), 1)
            left[:, : self.size] = self.permutations
            right[:, self.size :] = other.permutations + self.size
            return Group(name, size, permutations=torch.cat([left, right]), letters=letters)
        ours, theirs = _unit(self.size), _unit(other.size)
        blocks = [torch.block_diag(m, theirs) for m in self.discrete]
        blocks += [torch.block_diag(ours, m) for m in other.discrete]
        zeros = (torch.zeros_like(ours), torch.zeros_like(theirs))
        flows = [torch.block_diag(A, zeros[1]) for A in _flows(self)]
        flows += [torch.block_diag(zeros[0], A) for A in _flows(other)]
        return _of_matrices(name, size, blocks, _joined(self, other, flows), letters)

    def __matmul__(self, other: "Group") -> "Group":
        """The direct product, acting on pairs of places, or on tensor products: n n' of them."""
        if not isinstance(other, Group):
            return NotImplemented
        name, size = f"{self.name} x {other.name}", self.size * other.size
        letters = joined_letters(self.letters, other.letters)
        if self.permutations is not None and other.permutations is not None:
            grid = torch.arange(size).reshape(self.size, other.size)
            rows = [grid[p].reshape(-1) for p in self.permutations]
            rows += [grid[:, p].reshape(-1) for p in other.permutations]
            return Group(name, size, permutations=torch.stack(rows), letters=letters)
        ours, theirs = _unit(self.size), _unit(other.size)
        products = [torch.kron(m, theirs) for m in self.discrete]
        products += [torch.kron(ours, m) for m in other.discrete]
        flows = [torch.kron(A, theirs) for A in _flows(self)]
        flows += [torch.kron(ours, A) for A in _flows(other)]
        return _of_matrices(name, size, products, _joined(self, other, flows), letters)

    @property
    def is_symmetric(self) -> bool:
        """Whether it is visibly all permutations of its places.

        A group that can move any pair of places to any other and contains a transposition is
        (Jordan); looked for among the generators.
        """
        if self.permutations is None:
            return False
        if self.size == 1:
            return True
        moved = (self.permutations != torch.arange(self.size)).sum(1)
        return bool((moved == 2).any()) and len(pair_orbits(self.permutations).unique()) == 2

    def contains(self, element: object) -> bool:
        """Whether a permutation or matrix belongs to the group.

        Raises:
            ValueError: no numbers, or a continuous group for which this is not known.
        """
        given = as_numbers(element, f"an element of {self.name}").detach().cpu()
        if given.dim() not in (1, 2) or {*given.shape} != {self.size}:
            return False
        if not bool(given.isfinite().all()):
            return False
        permutation = as_permutation(given)
        if given.dim() == 1 or self.permutations is not None:
            if permutation is None:
                return False
            if self.is_symmetric:
                return True
            given = permutation
        if self.permutations is None:
            given = permutation_matrix(given) if given.dim() == 1 else given.double()
        if self.is_discrete:
            return self.finite().find(given) is not None
        assert self.lie is not None
        return in_continuous(self.lie, self.discrete, given, self.name)

    def is_subgroup_of(self, other: "Group") -> bool:
        """Whether every generator belongs to the other group, as both act on the same space."""
        if self.size != other.size:
            return False
        if not self.is_discrete:
            assert self.lie is not None
            if other.is_discrete or other.lie is None:
                return False
            apart = other.lie.coordinates(self.lie.generators)[1]
            if bool((apart > TOLERANCE * self.lie.generators.flatten(1).norm(dim=1)).any()):
                return False
        own = self.discrete
        if self.permutations is not None and other.permutations is not None:
            own = self.permutations
        return all(other.contains(element) for element in own)

    def check(self) -> None:
        """Verify what makes it a group; those with few elements are enumerated.

        Raises:
            ValueError: names the pair or triple that fails.
        """
        if self.lie is not None:
            self.lie.check()
            check_flows(self.lie, self.discrete, self.letters, self.name)
        every = self._small()
        if every is not None:
            every.check()


def _unit(size: int) -> Float[Tensor, "n n"]:
    return torch.eye(size, dtype=torch.float64)


def _flows(group: Group) -> Sequence[Tensor]:
    return [] if group.lie is None else list(group.lie.generators)


def _joined(one: Group, two: Group, flows: Sequence[Tensor]) -> LieAlgebra | None:
    """The Lie algebra of a product; equal names are told apart by a prime."""
    if not flows:
        return None
    ours = () if one.lie is None else one.lie.names
    theirs = () if two.lie is None else two.lie.names
    units = tuple(u for g in (one, two) if g.lie is not None for u in g.lie.units)
    names = ours + tuple(f"{name}'" if name in ours else name for name in theirs)
    return LieAlgebra(names, units, torch.stack(list(flows)))


def _of_matrices(
    name: str,
    size: int,
    matrices: Sequence[Tensor],
    lie: LieAlgebra | None,
    letters: tuple[str, ...],
) -> Group:
    empty = torch.empty(0, size, size, dtype=torch.float64)
    rows = torch.stack(list(matrices)) if matrices else empty
    return Group(name, size, matrices=rows, lie=lie, letters=letters)
