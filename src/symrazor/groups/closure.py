"""From a few generators to all elements, by brute force: a breadth-first walk."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

LIMIT = 2000
"""Elements that are enumerated at most, unless more are asked for: the table has their square."""

TOLERANCE = 1e-8
"""Largest difference of two matrices that are the same element."""


def as_numbers(given: object, expected: str) -> Tensor:
    """Nested lists, arrays, a tensor or several, as a tensor; numbers of Python in float64.

    Raises:
        ValueError: lists of different lengths, or no real numbers; says what was expected.
    """
    try:
        listed = given if isinstance(given, list | tuple) else ()
        if listed and all(isinstance(one, Tensor | np.ndarray) for one in listed):
            found = torch.stack([torch.as_tensor(one) for one in listed])
        else:
            found = torch.as_tensor(given)
            if listed and found.is_floating_point():
                found = torch.as_tensor(given, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        got = type(given).__name__
        raise ValueError(f"expected {expected}, got a {got}: {error}") from error
    if found.is_complex():
        raise ValueError(
            f"expected {expected}, got complex numbers; do: a + bi as the real matrix "
            "[[a, -b], [b, a]]"
        )
    return found


def check_permutations(rows: object) -> Int[Tensor, "m n"]:
    """Rows that are permutations of 0..n-1, as a tensor.

    Raises:
        ValueError: names the row.
    """
    found = as_numbers(rows, "permutations [m, n] of whole numbers")
    if found.dim() != 2 or found.is_floating_point() or found.shape[1] < 1:
        kind = "numbers with a point" if found.is_floating_point() else "whole numbers"
        raise ValueError(
            "expected permutations [m, n] of whole numbers, one row for each, got "
            f"{kind} of shape {list(found.shape)}"
        )
    if found.dtype == torch.bool:
        raise ValueError("expected permutations [m, n] of whole numbers, got true and false")
    found = found.detach().long().cpu().clone()  # what happens to the caller's is no matter
    wrong = (found.sort(1).values != torch.arange(found.shape[1])).any(1).nonzero().flatten()
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(
            f"expected a permutation of 0 to {found.shape[1] - 1} in row {row}, "
            f"got {found[row, :12].tolist()}"
        )
    return found


def check_matrices(matrices: object) -> Float[Tensor, "m d d"]:
    """Invertible square matrices in float64.

    Raises:
        ValueError: names the matrix.
    """
    found = as_numbers(matrices, "square matrices [m, d, d]").detach().to("cpu", torch.float64)
    found = found.clone()
    if found.dim() != 3 or found.shape[1] != found.shape[2] or found.shape[1] < 1:
        raise ValueError(
            f"expected square matrices [m, d, d], one for each generator, got {list(found.shape)}"
        )
    for row, matrix in enumerate(found):
        if not bool(matrix.isfinite().all()) or int(torch.linalg.matrix_rank(matrix)) < len(matrix):
            raise ValueError(f"expected an invertible matrix in row {row}, got {matrix.tolist()}")
    return found


def permutation_matrix(p: Int[Tensor, " n"]) -> Float[Tensor, "n n"]:
    """1 at [p[i], i]."""
    return torch.eye(len(p), dtype=torch.float64)[:, p]


@dataclass(frozen=True)
class Closed:
    """Elements; for each the (parent, generator) it came from; right[k][a] is a·generator k."""

    elements: Tensor
    parents: list[tuple[int, int]]
    right: list[list[int]]


def close(
    identity: Tensor,
    generators: Tensor,
    compose: Callable[[Tensor, Tensor], Tensor],
    find: Callable[[Tensor], list[int]],
    limit: int,
    name: str,
) -> Closed:
    """Breadth-first closure under multiplication by generators from the right."""
    elements, parents = [identity.unsqueeze(0)], [(0, 0)]
    right: list[list[int]] = [[] for _ in generators]
    start, count = 0, 1
    while start < count:
        frontier = elements[-1]
        fresh: list[Tensor] = []
        for k, generator in enumerate(generators):
            products = compose(frontier, generator)
            found = find(products)
            right[k] += found
            for row, index in enumerate(found):
                if index == len(parents):
                    parents.append((start + row, k))
                    fresh.append(products[row])
            if len(parents) > limit:
                raise ValueError(
                    f"expected at most {limit} elements in {name}, got more; are its generators "
                    "of finite order, and in float64? raise the limit if so"
                )
        start, count = count, len(parents)
        elements.append(torch.stack(fresh) if fresh else identity.new_empty(0, *identity.shape))
    return Closed(torch.cat(elements), parents, right)


def table_of(closed: Closed) -> Int[Tensor, "g g"]:
    """a·b = (a·parent of b)·generator: a column from an earlier one."""
    order = len(closed.parents)
    right = torch.tensor(closed.right).reshape(-1, order)
    columns = torch.empty(order, order, dtype=torch.long)  # [b, a]
    columns[0] = torch.arange(order)
    for b in range(1, order):
        parent, k = closed.parents[b]
        columns[b] = right[k][columns[parent]]
    return columns.T.contiguous()


def words(closed: Closed, names: Sequence[str]) -> tuple[str, ...]:
    """Every element as a word in the generators, "e" for the identity."""
    letters = [*names] or [_letter(k) for k in range(len(closed.right))]
    spelled: list[tuple[str, ...]] = [()]
    for parent, k in closed.parents[1:]:
        spelled.append((*spelled[parent], letters[k]))
    return tuple("·".join(map(_power, _runs(word))) or "e" for word in spelled)


def _letter(k: int) -> str:
    """a, b, ..., z, a1, b1, ..., without e, which is the identity."""
    alphabet = "abcdfghijklmnopqrstuvwxyz"
    return alphabet[k % 25] + (str(k // 25) if k >= 25 else "")


def _runs(word: Sequence[str]) -> list[tuple[str, int]]:
    return [(letter, len(list(run))) for letter, run in itertools.groupby(word)]


def _power(run: tuple[str, int]) -> str:
    return run[0] if run[1] == 1 else f"{run[0]}^{run[1]}"
