r"""Enumerate finite groups: elements are indices, composition is a table.

A group is closed by breadth-first search from a few generators, permutations or matrices.
Conventions: a permutation p sends position i to position p[i]; products act from the right,
(a·b)(i) = a(b(i)); and the matrix of p has a 1 at [p[i], i], so that matrices compose as their
elements do.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from symrazor.groups.generators import (
    ELEMENT_TOLERANCE,
    as_numbers,
    check_matrices,
    check_permutations,
    permutation_matrix,
)

MAX_ELEMENTS = 2000
"""Default limit on the number of elements; the table has the square of it as entries."""

MAX_ENTRY = 1e4
"""A matrix element with larger entries is taken as evidence of an infinite group."""


@dataclass(frozen=True)
class _Closure:
    """Elements, the (parent, generator) of each, and right[k][a], the index of a·generator k."""

    elements: Tensor
    parents: list[tuple[int, int]]
    right: list[list[int]]

    def structure(self, letters: Sequence[str]) -> tuple[Tensor, tuple[str, ...], tuple[int, ...]]:
        """Return the multiplication table, names of the elements, and indices of the generators."""
        generators = tuple(products[0] for products in self.right)
        return self._table(), self._words(letters), generators

    def _table(self) -> Int[Tensor, "g g"]:
        # Column by column: a·b = (a·parent of b)·generator.
        order = len(self.parents)
        right = torch.tensor(self.right).reshape(-1, order)
        columns = torch.empty(order, order, dtype=torch.long)  # [b, a]
        columns[0] = torch.arange(order)
        for b in range(1, order):
            parent, k = self.parents[b]
            columns[b] = right[k][columns[parent]]
        return columns.T.contiguous()

    def _words(self, letters: Sequence[str]) -> tuple[str, ...]:
        """Return every element as a word in the generators, as in r^2·m; "e" for the identity.

        By default the letters are a, b, ..., z, a1, b1, ..., without e.
        """
        alphabet = "abcdfghijklmnopqrstuvwxyz"
        letters = letters or [f"{alphabet[k % 25]}{k // 25 or ''}" for k in range(len(self.right))]
        words: list[tuple[str, ...]] = [()]
        for parent, k in self.parents[1:]:
            words.append((*words[parent], letters[k]))
        names = []
        for word in words:
            runs = [(letter, len(list(run))) for letter, run in itertools.groupby(word)]
            powers = [letter if count == 1 else f"{letter}^{count}" for letter, count in runs]
            names.append("·".join(powers) or "e")
        return tuple(names)


def _close(
    identity: Tensor,
    generators: Tensor,
    compose: Callable[[Tensor, Tensor], Tensor],
    find: Callable[[Tensor], list[int]],
    limit: int,
    name: str,
) -> _Closure:
    """Multiply by generators from the right, breadth first, until no new element appears."""
    elements, parents = [identity.unsqueeze(0)], [(0, 0)]
    right: list[list[int]] = [[] for _ in generators]
    start, count = 0, 1
    while start < count:
        frontier = elements[-1]
        new: list[Tensor] = []
        for k, generator in enumerate(generators):
            products = compose(frontier, generator)
            indices = find(products)
            right[k] += indices
            for row, index in enumerate(indices):
                if index == len(parents):
                    parents.append((start + row, k))
                    new.append(products[row])
            if len(parents) > limit:
                raise ValueError(
                    f"{name} has more than {limit} elements. Check that its generators have finite "
                    "order and are in float64, or raise the limit."
                )
        start, count = count, len(parents)
        elements.append(torch.stack(new) if new else identity.new_empty(0, *identity.shape))
    return _Closure(torch.cat(elements), parents, right)


@dataclass(frozen=True, eq=False, repr=False)
class FiniteGroup:
    """All elements of a group, their multiplication table, and their action on a space, if any.

    Args:
        name: name of the group in reports.
        table: table[a, b] is the index of a·b.
        names: names of the elements.
        generators: indices of elements that generate the group.
        permutations: action of each element on n positions; position i moves to p[i].
        matrices: action of each element on vectors.
    """

    name: str
    table: Int[Tensor, "g g"]
    names: tuple[str, ...]
    generators: tuple[int, ...]
    permutations: Int[Tensor, "g n"] | None = None
    matrices: Float[Tensor, "g d d"] | None = None

    @classmethod
    def from_table(cls, name: str, table: object, names: Sequence[str] = ()) -> "FiniteGroup":
        """Return a group with a given multiplication table; ValueError if it violates an axiom."""
        entries = as_numbers(table, "a square table of indices")
        _check_table(entries, name)
        order = len(entries)
        named = tuple(names) or tuple(f"g{i}" for i in range(order))
        if len(named) != order or len(set(named)) < order:
            raise ValueError(
                f"The {order} elements of {name} need distinct names, got "
                f"{', '.join(map(str, named))}."
            )
        group = cls(name, entries.long(), named, tuple(range(order)))
        group.check()
        return group

    @classmethod
    def from_permutations(
        cls,
        name: str,
        generators: Int[Tensor, "m n"],
        names: Sequence[str] = (),
        limit: int = MAX_ELEMENTS,
    ) -> "FiniteGroup":
        """Return the group that permutations generate, at most `limit` elements."""
        rows = check_permutations(generators)
        identity = torch.arange(rows.shape[1])
        index = {identity.numpy().tobytes(): 0}

        def find(products: Tensor) -> list[int]:
            return [index.setdefault(row.numpy().tobytes(), len(index)) for row in products]

        closure = _close(identity, rows, lambda elements, g: elements[:, g], find, limit, name)
        return cls(name, *closure.structure(names), permutations=closure.elements)

    @classmethod
    def from_matrices(
        cls,
        name: str,
        generators: Float[Tensor, "m d d"],
        names: Sequence[str] = (),
        limit: int = MAX_ELEMENTS,
    ) -> "FiniteGroup":
        """Return the group that matrices generate, equal up to `ELEMENT_TOLERANCE`.

        Raises:
            ValueError: singular matrices, more than `limit` elements, or an infinite group.
        """
        matrices = check_matrices(generators)
        volumes = torch.linalg.det(matrices).abs()
        if bool(((volumes - 1).abs() > MAX_ENTRY * ELEMENT_TOLERANCE).any()):
            raise ValueError(
                f"The generators of {name} must have finite order, but one changes volumes."
            )
        identity = torch.eye(matrices.shape[-1], dtype=torch.float64)
        found_elements = identity.reshape(1, -1)

        def find(products: Tensor) -> list[int]:
            nonlocal found_elements
            indices = []
            if not float(products.abs().max()) < MAX_ENTRY:
                raise ValueError(
                    f"The generators of {name} must have finite order, but their products grow "
                    "without bound."
                )
            for product in products.flatten(1):
                distance = (found_elements - product).abs().amax(1)
                nearest = int(distance.argmin())
                scale = max(1.0, float(product.abs().max()))
                if float(distance[nearest]) > ELEMENT_TOLERANCE * scale:
                    nearest = len(found_elements)
                    found_elements = torch.cat([found_elements, product.unsqueeze(0)])
                indices.append(nearest)
            return indices

        closure = _close(identity, matrices, torch.matmul, find, limit, name)
        return cls(name, *closure.structure(names), matrices=closure.elements)

    def __repr__(self) -> str:
        space = "abstract" if self.space is None else f"on {self.space} dimensions"
        return f"<FiniteGroup {self.name}, {self.order} elements, {space}>"

    @property
    def order(self) -> int:
        """Number of elements."""
        return len(self.table)

    @property
    def elements(self) -> range:
        """Indices of the elements."""
        return range(self.order)

    @cached_property
    def identity(self) -> int:
        """Index of the identity; ValueError if the table has none."""
        indices = torch.arange(self.order)
        left = (self.table == indices).all(1)
        right = (self.table == indices.unsqueeze(1)).all(0)
        identities = (left & right).nonzero().flatten().tolist()
        if not identities:
            raise ValueError(f"The table of {self.name} has no identity.")
        return int(identities[0])

    @cached_property
    def inverse(self) -> Int[Tensor, " g"]:
        """Index of the inverse of every element; ValueError if an element has none."""
        is_inverse = (self.table == self.identity) & (self.table.T == self.identity)
        without = (~is_inverse.any(1)).nonzero().flatten().tolist()
        if without:
            raise ValueError(f"{self.names[without[0]]!r} of {self.name} has no inverse.")
        return is_inverse.long().argmax(1)

    @property
    def space(self) -> int | None:
        """Number of positions or dimensions it acts on, or None for an abstract group."""
        if self.permutations is not None:
            return self.permutations.shape[1]
        return None if self.matrices is None else self.matrices.shape[1]

    def matrix(self, g: int) -> Float[Tensor, "d d"]:
        """Return the action of an element on vectors as a matrix."""
        if self.matrices is not None:
            return self.matrices[g]
        if self.permutations is None:
            raise ValueError(f"The abstract group {self.name} does not act on a space.")
        return permutation_matrix(self.permutations[g])

    def __mul__(self, other: "FiniteGroup") -> "FiniteGroup":
        """Return the direct product: pairs (a, b) with index a |H| + b, on both spaces."""
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
        """Return the subgroup that elements generate, with the restricted action."""
        wrong = [g for g in generators if not 0 <= g < self.order]
        if wrong:
            raise ValueError(f"Elements have indices 0 to {self.order - 1}, got {wrong}.")
        members = self._reached([self.identity], generators)
        member_index = torch.tensor(members)
        place = torch.full((self.order,), -1)
        place[member_index] = torch.arange(len(member_index))
        return FiniteGroup(
            name or f"subgroup of order {len(member_index)} of {self.name}",
            place[self.table[member_index][:, member_index]],
            tuple(self.names[a] for a in members),
            tuple(members.index(g) for g in generators),
            None if self.permutations is None else self.permutations[member_index],
            None if self.matrices is None else self.matrices[member_index],
        )

    def _reached(self, start: Sequence[int], generators: Sequence[int]) -> list[int]:
        """Return products of `start` with generators from the right, breadth first."""
        reached = [*dict.fromkeys(start)]
        seen = {*reached}
        for a in reached:
            for g in generators:
                product = int(self.table[a, g])
                if product not in seen:
                    seen.add(product)
                    reached.append(product)
        return reached

    def find(self, element: Tensor) -> int | None:
        """Return the index of a permutation or matrix, or None if it is not an element."""
        if self.permutations is not None and element.dim() == 1:
            if element.shape != self.permutations.shape[1:]:
                return None
            hits = (self.permutations == element).all(1)
        else:
            if self.space is None or tuple(element.shape) != (self.space, self.space):
                return None
            matrices = self.matrices
            if matrices is None:
                matrices = torch.stack([self.matrix(g) for g in self.elements])
            scale = max(1.0, float(element.abs().max()))
            hits = (matrices - element).abs().amax((1, 2)) <= 10 * ELEMENT_TOLERANCE * scale
        return int(hits.long().argmax()) if bool(hits.any()) else None

    def is_subgroup_of(self, other: "FiniteGroup") -> bool:
        """Return whether every element belongs to the other group; both act on the same space."""
        if self.space is None or self.space != other.space:
            return False
        permutations = None if other.permutations is None else self.permutations
        element = self.matrix if permutations is None else permutations.__getitem__
        return all(other.find(element(g)) is not None for g in self.generators)

    def check(self) -> None:
        """Raise ValueError, naming the elements, if an axiom or the action of the table fails."""
        _check_table(self.table, self.name)
        outside = ((self.table < 0) | (self.table >= self.order)).nonzero().tolist()
        if outside:
            a, b = (self.names[i] for i in outside[0])
            raise ValueError(
                f"{a}·{b} is not an element of {self.name}: {int(self.table[*outside[0]])}."
            )
        for b in self._sufficient_elements():  # (a b) c = a (b c), for all a and c at a time
            wrong = (self.table[self.table[:, b]] != self.table[:, self.table[b]]).nonzero()
            if len(wrong):
                a, c = wrong[0].tolist()
                x, y, z = (self.names[i] for i in (a, b, c))
                raise ValueError(
                    f"The table of {self.name} is not associative: ({x}·{y})·{z} != {x}·({y}·{z})."
                )
        _ = self.identity, self.inverse
        self._check_action()

    def _sufficient_elements(self) -> Sequence[int]:
        """Return elements b for which (a b) c = a (b c) must be checked, to hold for all.

        Elements that pass are closed under products (Light's test), so that generators suffice. The
        same holds for rho(a b) = rho(a) rho(b).
        """
        reached = self._reached(self.generators, self.generators)
        return self.generators if len(reached) == self.order else self.elements

    def _check_action(self) -> None:
        action = self.matrices if self.permutations is None else self.permutations
        if action is None:
            return
        for b in self._sufficient_elements():
            image = action[self.table[:, b]]
            if self.permutations is not None:
                wrong = (self.permutations[:, self.permutations[b]] != image).any(1)
            else:
                scale = image.abs().amax((1, 2)).clamp(min=1)
                difference = (action @ action[b] - image).abs().amax((1, 2))
                wrong = difference > 100 * ELEMENT_TOLERANCE * scale
            if bool(wrong.any()):
                a = int(wrong.long().argmax())
                raise ValueError(
                    f"The action of {self.name} does not compose as its table for the pair "
                    f"{self.names[a]}, {self.names[b]}."
                )


def _check_table(table: Tensor, name: str) -> None:
    """Raise ValueError unless the table is a square of integers."""
    if table.is_floating_point() or table.dim() != 2 or table.shape[0] != table.shape[1]:
        raise ValueError(
            f"{name} needs a square table of integers, got {table.dtype} of shape "
            f"{list(table.shape)}."
        )
