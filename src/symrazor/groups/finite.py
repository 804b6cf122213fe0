r"""Finite groups: elements are indices, composition is a table.

A group is closed by brute force from a few generators, permutations or matrices. Conventions: a
permutation p sends place i to place p[i], products act from the right, (a·b)(i) = a(b(i)), and the
matrix of p has a 1 at [p[i], i], so that matrices compose as their elements do.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from symrazor.groups.closure import (
    LIMIT,
    TOLERANCE,
    as_numbers,
    check_matrices,
    check_permutations,
    close,
    permutation_matrix,
    table_of,
    words,
)

LARGEST = 1e4
"""Entries of an element: beyond, powers grow and the group is taken as infinite."""


@dataclass(frozen=True, eq=False)
class FiniteGroup:
    """All elements of a group, how they compose, and what they do to a space if they do.

    Args:
        name: for reports.
        table: table[a, b] is the index of a·b.
        names: one per element.
        generators: indices of elements that generate the group.
        permutations: what each element does to n places, p[i] being where i goes.
        matrices: what each element does to vectors.
    """

    name: str
    table: Int[Tensor, "g g"]
    names: tuple[str, ...]
    generators: tuple[int, ...]
    permutations: Int[Tensor, "g n"] | None = None
    matrices: Float[Tensor, "g d d"] | None = None

    @classmethod
    def from_table(cls, name: str, table: object, names: Sequence[str] = ()) -> "FiniteGroup":
        """A group from its table alone; it is checked.

        Raises:
            ValueError: what makes it no group.
        """
        found = as_numbers(table, "a square table of indices")
        _check_table(found, name)
        named = tuple(names) or tuple(f"g{i}" for i in range(len(found)))
        if len(named) != len(found) or len(set(named)) < len(named):
            raise ValueError(
                f"expected a name of its own for each of {len(found)} elements of {name}, got "
                f"{', '.join(map(str, named))}"
            )
        group = cls(name, found.long(), named, tuple(range(len(found))))
        group.check()
        return group

    @classmethod
    def from_permutations(
        cls,
        name: str,
        generators: Int[Tensor, "m n"],
        names: Sequence[str] = (),
        limit: int = LIMIT,
    ) -> "FiniteGroup":
        """The closure of some permutations.

        Raises:
            ValueError: rows that are no permutations, or more than `limit` elements.
        """
        rows = check_permutations(generators)
        identity = torch.arange(rows.shape[1])
        index = {identity.numpy().tobytes(): 0}

        def find(products: Tensor) -> list[int]:
            return [index.setdefault(row.numpy().tobytes(), len(index)) for row in products]

        closed = close(identity, rows, lambda some, g: some[:, g], find, limit, name)
        table = table_of(closed)
        chosen = tuple(closed.right[k][0] for k in range(len(rows)))
        return cls(name, table, words(closed, names), chosen, permutations=closed.elements)

    @classmethod
    def from_matrices(
        cls,
        name: str,
        generators: Float[Tensor, "m d d"],
        names: Sequence[str] = (),
        limit: int = LIMIT,
    ) -> "FiniteGroup":
        """The closure of some matrices, equal up to `TOLERANCE`.

        Raises:
            ValueError: matrices that are singular or generate more than `limit` elements, or grow.
        """
        given = check_matrices(generators)
        sizes = torch.linalg.det(given).abs()
        if bool(((sizes - 1).abs() > LARGEST * TOLERANCE).any()):
            raise ValueError(
                f"expected generators of finite order in {name}, got one that changes volumes"
            )
        known = torch.eye(given.shape[-1], dtype=torch.float64).reshape(1, -1)

        def find(products: Tensor) -> list[int]:
            nonlocal known
            found = []
            if not float(products.abs().max()) < LARGEST:
                raise ValueError(
                    f"expected generators of finite order in {name}, got products that grow "
                    "without bound"
                )
            for product in products.flatten(1):
                apart = (known - product).abs().amax(1)
                nearest = int(apart.argmin())
                if float(apart[nearest]) > TOLERANCE * max(1.0, float(product.abs().max())):
                    nearest = len(known)
                    known = torch.cat([known, product.unsqueeze(0)])
                found.append(nearest)
            return found

        unit = torch.eye(given.shape[-1], dtype=torch.float64)
        closed = close(unit, given, torch.matmul, find, limit, name)
        chosen = tuple(closed.right[k][0] for k in range(len(given)))
        named = words(closed, names)
        return cls(name, table_of(closed), named, chosen, matrices=closed.elements)

    @property
    def order(self) -> int:
        """Number of elements."""
        return len(self.table)

    @property
    def elements(self) -> range:
        """Their indices."""
        return range(self.order)

    @cached_property
    def identity(self) -> int:
        """Index of the neutral element.

        Raises:
            ValueError: a table without one.
        """
        everything = torch.arange(self.order)
        left = (self.table == everything).all(1)
        right = (self.table == everything.unsqueeze(1)).all(0)
        found = (left & right).nonzero().flatten().tolist()
        if not found:
            raise ValueError(f"expected an identity in {self.name}, got a table without one")
        return int(found[0])

    @cached_property
    def inverse(self) -> Int[Tensor, " g"]:
        """Index of the inverse of every element.

        Raises:
            ValueError: an element without one.
        """
        both = (self.table == self.identity) & (self.table.T == self.identity)
        without = (~both.any(1)).nonzero().flatten().tolist()
        if without:
            raise ValueError(
                f"expected an inverse for every element of {self.name}, got none for "
                f"{self.names[without[0]]!r}"
            )
        return both.long().argmax(1)

    @property
    def space(self) -> int | None:
        """Number of places or dimensions it acts on, or None for an abstract group."""
        if self.permutations is not None:
            return self.permutations.shape[1]
        return None if self.matrices is None else self.matrices.shape[1]

    def matrix(self, g: int) -> Float[Tensor, "d d"]:
        """What an element does to vectors."""
        if self.matrices is not None:
            return self.matrices[g]
        if self.permutations is None:
            raise ValueError(f"expected a group that acts on a space, got the abstract {self.name}")
        return permutation_matrix(self.permutations[g])

    def __mul__(self, other: "FiniteGroup") -> "FiniteGroup":
        """The direct product: pairs (a, b) with index a |H| + b, on both spaces side by side."""
        h = other.order
        left, right = self.table, other.table
        table = (left[:, None, :, None] * h + right[None, :, None, :]).reshape(self.order * h, -1)
        names = tuple(f"({a}, {b})" for a, b in itertools.product(self.names, other.names))
        generators = tuple(g * h + other.identity for g in self.generators)
        generators += tuple(self.identity * h + g for g in other.generators)
        name = f"{self.name} x {other.name}"
        if self.permutations is not None and other.permutations is not None:
            p, q = self.permutations, other.permutations + self.permutations.shape[1]
            rows = torch.cat([p.repeat_interleave(h, 0), q.repeat(self.order, 1)], 1)
            return FiniteGroup(name, table, names, generators, permutations=rows)
        if self.space is None or other.space is None:
            return FiniteGroup(name, table, names, generators)
        pairs = itertools.product(self.elements, other.elements)
        blocks = [torch.block_diag(self.matrix(a), other.matrix(b)) for a, b in pairs]
        return FiniteGroup(name, table, names, generators, matrices=torch.stack(blocks))

    def subgroup(self, generators: Sequence[int], name: str | None = None) -> "FiniteGroup":
        """The subgroup that some elements generate, with the action restricted to it."""
        wrong = [g for g in generators if not 0 <= g < self.order]
        if wrong:
            raise ValueError(f"expected elements 0 to {self.order - 1}, got {wrong}")
        members = {self.identity: 0}
        waiting = [self.identity]
        for a in waiting:
            for g in generators:
                product = int(self.table[a, g])
                if product not in members:
                    members[product] = len(members)
                    waiting.append(product)
        kept = torch.tensor(list(members))
        place = torch.full((self.order,), -1)
        place[kept] = torch.arange(len(kept))
        return FiniteGroup(
            name or f"subgroup of order {len(kept)} of {self.name}",
            place[self.table[kept][:, kept]],
            tuple(self.names[a] for a in members),
            tuple(members[g] for g in generators),
            None if self.permutations is None else self.permutations[kept],
            None if self.matrices is None else self.matrices[kept],
        )

    def find(self, element: Tensor) -> int | None:
        """Index of a permutation or matrix, or None if it is no element."""
        if self.permutations is not None and element.dim() == 1:
            if element.shape != self.permutations.shape[1:]:
                return None
            hits = (self.permutations == element).all(1)
        else:
            if self.space is None or tuple(element.shape) != (self.space, self.space):
                return None
            every = self.matrices
            if every is None:
                every = torch.stack([self.matrix(g) for g in self.elements])
            scale = max(1.0, float(element.abs().max()))
            hits = (every - element).abs().amax((1, 2)) <= 10 * TOLERANCE * scale
        return int(hits.long().argmax()) if bool(hits.any()) else None

    def is_subgroup_of(self, other: "FiniteGroup") -> bool:
        """Whether every element is one of the other group, as they act on the same space."""
        if self.space is None or self.space != other.space:
            return False
        own = self.matrices if self.permutations is None else self.permutations
        assert own is not None
        if self.permutations is not None and other.permutations is None:
            own = torch.stack([self.matrix(g) for g in self.generators])
            return all(other.find(element) is not None for element in own)
        return all(other.find(own[g]) is not None for g in self.generators)

    def check(self) -> None:
        """Verify the axioms, and that the action composes as the table says.

        Raises:
            ValueError: names the entry, the pair or the triple that fails.
        """
        _check_table(self.table, self.name)
        outside = ((self.table < 0) | (self.table >= self.order)).nonzero().tolist()
        if outside:
            a, b = (self.names[i] for i in outside[0])
            raise ValueError(f"expected {a}·{b} in {self.name}, got {int(self.table[*outside[0]])}")
        for b in self._enough():  # (a b) c = a (b c), a matrix over a and c at a time
            wrong = (self.table[self.table[:, b]] != self.table[:, self.table[b]]).nonzero()
            if len(wrong):
                a, c = wrong[0].tolist()
                x, y, z = (self.names[i] for i in (a, b, c))
                raise ValueError(
                    f"expected an associative table in {self.name}, got ({x}·{y})·{z} != "
                    f"{x}·({y}·{z})"
                )
        _ = self.identity, self.inverse
        self._check_action()

    def _enough(self) -> Sequence[int]:
        """Elements b for which (a b) c = a (b c) and rho(a b) = rho(a) rho(b) say so for all.

        Those that pass are closed under products (Light's test), so that generators will do.
        """
        reached, waiting = {*self.generators}, [*self.generators]
        for a in waiting:
            fresh = {int(self.table[a, g]) for g in self.generators} - reached
            reached |= fresh
            waiting += sorted(fresh)
        return self.generators if len(reached) == self.order else self.elements

    def _check_action(self) -> None:
        own = self.matrices if self.permutations is None else self.permutations
        if own is None:
            return
        for b in self._enough():
            image = own[self.table[:, b]]
            if self.permutations is not None:
                wrong = (self.permutations[:, self.permutations[b]] != image).any(1)
            else:
                scale = image.abs().amax((1, 2)).clamp(min=1)
                wrong = (own @ own[b] - image).abs().amax((1, 2)) > 100 * TOLERANCE * scale
            if bool(wrong.any()):
                a = int(wrong.long().argmax())
                raise ValueError(
                    f"expected the action of {self.name} to compose as its table, got another one "
                    f"for the pair {self.names[a]}, {self.names[b]}"
                )


def _check_table(table: Tensor, name: str) -> None:
    """Raise ValueError for what is no square of whole numbers."""
    broken = table.is_floating_point()
    if broken or table.dim() != 2 or table.shape[0] != table.shape[1]:
        got = "numbers with a point of shape" if broken else "shape"
        raise ValueError(
            f"expected a square table of indices in {name}, got {got} {list(table.shape)}"
        )
