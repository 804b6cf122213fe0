r"""Define `Group` by its generators: permutations or matrices, and a Lie algebra.

Layers need only the generators, because maps that commute with every generator commute with the
group. Groups may therefore be infinite, or as large as the permutations of a hundred points, at no
cost. `finite()` lists the elements of small groups.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from symrazor.core.validation import check_positive_integer
from symrazor.groups.finite import MAX_ELEMENTS, FiniteGroup
from symrazor.groups.generators import (
    ELEMENT_TOLERANCE,
    as_numbers,
    as_permutation,
    check_letters,
    check_matrices,
    check_name,
    check_permutations,
    no_matrices,
    pair_orbits,
    permutation_matrices,
    permutation_matrix,
    product_letters,
    product_of_permutations,
    stack_matrices,
    sum_of_permutations,
)
from symrazor.groups.lie import LieAlgebra

Element = int | str | Tensor | Sequence[Any]
"""Index or name of an element of a finite group, or a permutation [n], or a matrix [d, d], as a
tensor or as nested lists."""


@dataclass(frozen=True, eq=False, repr=False)
class Group:
    """A group acting on n positions, by permutations, or on n-dimensional vectors, by matrices.

    Args:
        name: name in reports.
        size: n.
        permutations: discrete generators; position i moves to p[i].
        matrices: discrete generators, instead of permutations.
        lie: continuous generators, together with matrices.
        letters: names of the discrete generators, of which names of elements are composed.
    """

    name: str
    size: int
    permutations: Int[Tensor, "m n"] | None = None
    matrices: Float[Tensor, "m n n"] | None = None
    lie: LieAlgebra | None = None
    letters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_name(self.name)
        _check_lie(self.lie, self.name)
        if self.permutations is not None and (self.matrices is not None or self.lie is not None):
            raise ValueError(f"{self.name} needs permutations or matrices, got both.")
        if self.permutations is not None:
            object.__setattr__(self, "permutations", check_permutations(self.permutations))
        if self.matrices is not None:
            object.__setattr__(self, "matrices", check_matrices(self.matrices))
        generators = self.matrices if self.permutations is None else self.permutations
        kind = "matrices" if self.permutations is None else "permutations"
        sizes = {} if generators is None else {kind: generators.shape[1]}
        sizes |= {} if self.lie is None else {"lie": self.lie.size}
        wrong = {kind: size for kind, size in sizes.items() if size != self.size}
        if wrong:
            raise ValueError(f"Generators of {self.name} must have size {self.size}, got {wrong}.")
        check_letters(self.letters, generators, self.name)

    def __repr__(self) -> str:
        space = f"{self.size} {'dimensions' if self.permutations is None else 'positions'}"
        counts = dict(zip(("discrete", "continuous"), self.counts, strict=True))
        listed = " and ".join(f"{count} {kind}" for kind, count in counts.items() if count)
        return f"<Group {self.name} on {space}, generators: {listed or 'none'}>"

    @classmethod
    def from_permutations(
        cls, name: str, permutations: object, letters: Sequence[str] = ()
    ) -> "Group":
        """Return the group that permutations [m, n] generate."""
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
        """Return the group that matrices [m, d, d] and a Lie algebra generate."""
        check_name(name)
        _check_lie(lie, name)
        discrete = as_numbers(matrices, "square matrices [m, d, d]").double()
        if lie is not None and not discrete.numel():
            discrete = discrete.new_empty(0, lie.size, lie.size)
        discrete = check_matrices(discrete)
        return cls(name, discrete.shape[1], matrices=discrete, lie=lie, letters=tuple(letters))

    @property
    def is_discrete(self) -> bool:
        """Whether the group has no continuous generators."""
        return self.lie is None or self.lie.dim == 0

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of discrete and of continuous generators."""
        discrete = self.matrices if self.permutations is None else self.permutations
        return 0 if discrete is None else len(discrete), 0 if self.lie is None else self.lie.dim

    def is_same(self, other: "Group") -> bool:
        """Return whether both groups have equal generators."""
        if self is other:
            return True
        generators = [
            (g.permutations, g.matrices, g.lie and g.lie.generators) for g in (self, other)
        ]
        return self.size == other.size and all(
            a is b or (a is not None and b is not None and torch.equal(a, b))
            for a, b in zip(*generators, strict=True)
        )

    @property
    def discrete(self) -> Float[Tensor, "m n n"]:
        """Discrete generators as matrices."""
        if self.permutations is not None:
            return permutation_matrices(self.permutations)
        return no_matrices(self.size) if self.matrices is None else self.matrices

    @cached_property
    def _cache(self) -> dict[str, FiniteGroup]:
        return {}

    def finite(self, limit: int = MAX_ELEMENTS) -> FiniteGroup:
        """Return all elements; ValueError for continuous groups or more than `limit` elements."""
        if not self.is_discrete:
            raise ValueError(f"{self.name} is continuous: its elements cannot be enumerated.")
        if "finite" not in self._cache:
            enumerate_group, generators = FiniteGroup.from_matrices, self.discrete
            if self.permutations is not None:
                enumerate_group, generators = FiniteGroup.from_permutations, self.permutations
            self._cache["finite"] = enumerate_group(self.name, generators, self.letters, limit)
        return self._cache["finite"]

    def element(self, g: Element) -> Tensor:
        """Return an element as a permutation or matrix; indices and names are looked up.

        Whether a permutation or matrix belongs to the group is not checked, see `contains`.

        Raises:
            ValueError: an unknown index or name, or a permutation or matrix of another size.
        """
        if (not isinstance(g, str) and not hasattr(g, "__index__")) or isinstance(g, Tensor):
            g = as_numbers(g, f"an element of {self.name}")
        n, element = self.size, f"An element of {self.name}"
        if isinstance(g, Tensor) and g.dim() == 1:
            if sorted(g.tolist()) != list(range(n)):
                got = g[:12].tolist()
                raise ValueError(f"{element} is a permutation of 0 to {n - 1}, got {got}.")
            return g
        if isinstance(g, Tensor) and g.dim() > 1:
            if tuple(g.shape) != (n, n):
                raise ValueError(f"{element} is a {n} x {n} matrix, got {list(g.shape)}.")
            if not bool(g.isfinite().all()):
                raise ValueError(f"{element} has finite entries, got nan.")
            return g
        not_integer = isinstance(g, Tensor) and (g.is_floating_point() or g.dtype == torch.bool)
        if isinstance(g, bool) or not_integer:
            raise ValueError(f"The index of an element of {self.name} is an integer, got {g!r}.")
        finite = self.finite()
        if isinstance(g, str) and g not in finite.names:
            names = ", ".join(finite.names[:12])
            raise ValueError(f"{self.name} has no element {g!r}. Elements: {names}.")
        index = finite.names.index(g) if isinstance(g, str) else int(g)
        if not 0 <= index < finite.order:
            raise ValueError(
                f"Elements of {self.name} have indices 0 to {finite.order - 1}, got {index}."
            )
        if finite.permutations is None:
            return finite.matrix(index).clone()
        return finite.permutations[index].clone()

    def sample(self, count: int, seed: int = 0, reach: float = 1.0) -> list[Tensor]:
        """Return elements other than the identity: all of a small finite group, else random ones.

        A random element is a product of random generators and their inverses, and of exponentials
        of coefficients between -reach and reach.
        """
        check_positive_integer("count", count)
        generator = torch.Generator().manual_seed(seed)
        finite = self.finite_or_none()
        if finite is not None:
            moving = [g for g in finite.elements if g != finite.identity]
            order = torch.randperm(len(moving), generator=generator).tolist()
            chosen = moving if len(moving) <= count else sorted(moving[i] for i in order[:count])
            return [self.element(g) for g in chosen]
        return [self._random(generator, reach) for _ in range(count)]

    def finite_or_none(self) -> FiniteGroup | None:
        """Return all elements, or None if they cannot be enumerated."""
        try:
            return self.finite() if self.is_discrete else None
        except ValueError:
            return None

    def _random(self, generator: torch.Generator, reach: float) -> Tensor:
        if self.permutations is not None:
            permutation = torch.arange(self.size)
            for k in torch.randint(len(self.permutations), (4 * self.size,), generator=generator):
                permutation = permutation[self.permutations[int(k)]]
            return permutation
        product = torch.eye(self.size, dtype=torch.float64)
        if len(self.discrete):
            for k in torch.randint(len(self.discrete), (8,), generator=generator):
                product = product @ self.discrete[int(k)]
        if self.lie is not None and self.lie.dim:
            unit = torch.rand(self.lie.dim, generator=generator, dtype=torch.float64)
            product = product @ self.lie.exp((2 * unit - 1) * reach)
        return product

    def __mul__(self, other: "Group") -> "Group":
        """Return the direct product, acting on the sum of both spaces: n + n' dimensions."""
        return self._product(other, sum_of_permutations, torch.block_diag)

    def __matmul__(self, other: "Group") -> "Group":
        """Return the direct product, acting on pairs of positions or tensor products: n n'."""
        return self._product(other, product_of_permutations, torch.kron)

    def _product(
        self,
        other: "Group",
        join_permutations: Callable[[Tensor, Tensor], Tensor],
        join_matrices: Callable[[Tensor, Tensor], Tensor],
    ) -> "Group":
        if not isinstance(other, Group):
            return NotImplemented
        name, letters = f"{self.name} x {other.name}", product_letters(self.letters, other.letters)
        if self.permutations is not None and other.permutations is not None:
            left, right = torch.arange(self.size), torch.arange(other.size)
            right_identity = right.expand(len(self.permutations), -1)
            left_identity = left.expand(len(other.permutations), -1)
            rows = [
                join_permutations(self.permutations, right_identity),
                join_permutations(left_identity, other.permutations),
            ]
            return Group.from_permutations(name, torch.cat(rows), letters)
        left, right = (torch.eye(g.size, dtype=torch.float64) for g in (self, other))
        size = len(join_matrices(left, right))
        matrices = [join_matrices(m, right) for m in self.discrete]
        matrices += [join_matrices(left, m) for m in other.discrete]
        if join_matrices is torch.block_diag:  # a flow on a sum does not move the other space
            left, right = torch.zeros_like(left), torch.zeros_like(right)
        algebras = [g.lie or LieAlgebra.of(no_matrices(g.size)) for g in (self, other)]
        flows = [join_matrices(A, right) for A in algebras[0].generators]
        flows += [join_matrices(left, A) for A in algebras[1].generators]
        first_names = algebras[0].names
        names = [f"{name}'" if name in first_names else name for name in algebras[1].names]
        algebra = LieAlgebra(
            (*first_names, *names),
            algebras[0].units + algebras[1].units,
            stack_matrices(flows, size),
        )
        return Group(
            name, size, None, stack_matrices(matrices, size), algebra if flows else None, letters
        )

    @property
    def is_symmetric(self) -> bool:
        """Whether the group is recognised as all permutations of its positions.

        By a theorem of Jordan, this holds if it is 2-transitive and contains a transposition, which
        is looked for among the generators.
        """
        if self.permutations is None:
            return False
        if self.size == 1:
            return True
        moved = (self.permutations != torch.arange(self.size)).sum(1)
        return bool((moved == 2).any()) and len(pair_orbits(self.permutations).unique()) == 2

    def contains(self, element: object) -> bool:
        """Return whether a permutation or matrix belongs to the group.

        Raises:
            ValueError: not numbers, or a continuous group for which this cannot be decided.
        """
        tensor = as_numbers(element, f"an element of {self.name}").detach().cpu()
        if tensor.dim() not in (1, 2) or {*tensor.shape} != {self.size}:
            return False
        if not bool(tensor.isfinite().all()):
            return False
        permutation = as_permutation(tensor)
        if tensor.dim() == 1 or self.permutations is not None:
            if permutation is None:
                return False
            if self.is_symmetric:
                return True
            tensor = permutation
        if self.permutations is None:
            tensor = permutation_matrix(tensor) if tensor.dim() == 1 else tensor.double()
        if self.is_discrete:
            return self.finite().find(tensor) is not None
        assert self.lie is not None
        return self.lie.contains(tensor, self.discrete, self.name)

    def is_subgroup_of(self, other: "Group") -> bool:
        """Return whether every generator belongs to the other group; both act on the same space."""
        if self.size != other.size:
            return False
        if not self.is_discrete:
            assert self.lie is not None
            if other.is_discrete or other.lie is None:
                return False
            distance = other.lie.coordinates(self.lie.generators)[1]
            sizes = self.lie.generators.flatten(1).norm(dim=1)
            if bool((distance > ELEMENT_TOLERANCE * sizes).any()):
                return False
        generators = self.discrete
        if self.permutations is not None and other.permutations is not None:
            generators = self.permutations
        return all(other.contains(element) for element in generators)

    def check(self) -> None:
        """Raise ValueError, naming the elements, if an axiom fails; small groups are enumerated."""
        if self.lie is not None:
            self.lie.check()
            self.lie.check_normalised_by(self.discrete, self.letters, self.name)
        finite = self.finite_or_none()
        if finite is not None:
            finite.check()


def _check_lie(lie: object, name: str) -> None:
    if lie is not None and not isinstance(lie, LieAlgebra):
        raise ValueError(
            f"lie of {name} must be a LieAlgebra, got {type(lie).__name__}. Use "
            "LieAlgebra.of(generators)."
        )
