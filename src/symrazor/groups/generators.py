"""Validate the generators of a group: permutations, matrices, and their names."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

ELEMENT_TOLERANCE = 1e-8
"""Matrices with entries that differ by at most this are the same element."""


def as_numbers(value: object, expected: str) -> Tensor:
    """Convert nested lists, arrays, a tensor or several tensors to a tensor.

    Python floats become float64.

    Args:
        value: the numbers.
        expected: what they should be, for the error message.

    Raises:
        ValueError: lists of different lengths, or entries that are not real numbers.
    """
    try:
        sequence = value if isinstance(value, list | tuple) else ()
        if sequence and all(isinstance(entry, Tensor | np.ndarray) for entry in sequence):
            numbers = torch.stack([torch.as_tensor(entry) for entry in sequence])
        else:
            numbers = torch.as_tensor(value)
            if sequence and numbers.is_floating_point():
                numbers = torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        got = type(value).__name__
        raise ValueError(f"Pass {expected}, got a {got}: {error}.") from error
    if numbers.is_complex():
        raise ValueError(
            f"Pass {expected}, got complex numbers. Write a + bi as the real matrix "
            "[[a, -b], [b, a]]."
        )
    return numbers


def check_permutations(rows: object) -> Int[Tensor, "m n"]:
    """Return a copy of permutations of 0..n-1 as a tensor, or raise ValueError."""
    expected = "permutations [m, n] of integers"
    permutations = as_numbers(rows, expected)
    wrong_type = permutations.is_floating_point() or permutations.dtype == torch.bool
    if permutations.dim() != 2 or wrong_type or permutations.shape[1] < 1:
        raise ValueError(
            f"Pass {expected}, one row each, got {permutations.dtype} of shape "
            f"{list(permutations.shape)}."
        )
    permutations = permutations.detach().long().cpu().clone()
    n = permutations.shape[1]
    wrong = (permutations.sort(1).values != torch.arange(n)).any(1).nonzero().flatten()
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(
            f"Row {row} is not a permutation of 0 to {n - 1}: {permutations[row, :12].tolist()}."
        )
    return permutations


def check_matrices(value: object) -> Float[Tensor, "m d d"]:
    """Return a copy of invertible square matrices in float64, or raise ValueError."""
    matrices = as_numbers(value, "square matrices [m, d, d]").detach().to("cpu", torch.float64)
    matrices = matrices.clone()
    if matrices.dim() != 3 or matrices.shape[1] != matrices.shape[2] or matrices.shape[1] < 1:
        raise ValueError(
            "Pass square matrices [m, d, d], one per generator, got the shape "
            f"{list(matrices.shape)}."
        )
    for row, matrix in enumerate(matrices):
        if not bool(matrix.isfinite().all()) or int(torch.linalg.matrix_rank(matrix)) < len(matrix):
            raise ValueError(f"Matrix {row} is not invertible: {matrix.tolist()}.")
    return matrices


def permutation_matrix(p: Int[Tensor, " n"]) -> Float[Tensor, "n n"]:
    """Return the matrix with a 1 at [p[i], i]."""
    return torch.eye(len(p), dtype=torch.float64)[:, p]


def permutation_matrices(rows: Int[Tensor, "m n"]) -> Float[Tensor, "m n n"]:
    """Return the matrices of several permutations, possibly none."""
    n = rows.shape[1]
    matrices = [permutation_matrix(p) for p in rows]
    return torch.stack(matrices) if matrices else torch.empty(0, n, n, dtype=torch.float64)


def as_permutation(element: Tensor) -> Int[Tensor, " n"] | None:
    """Return a permutation, or the one of a permutation matrix; None for anything else."""
    p = element if element.dim() == 1 else element.argmax(0)
    if sorted(p.tolist()) != list(range(len(p))):
        return None
    p = p.long()
    same = element.dim() == 1 or torch.equal(permutation_matrix(p), element.double())
    return p if same else None


def check_name(name: object) -> None:
    """Raise ValueError unless the name of a group is a non-empty string."""
    if not isinstance(name, str) or not name:
        got = repr(name) if name is None or name == "" else type(name).__name__
        raise ValueError(f"The first argument is the name of the group, got {got}.")


def check_letters(letters: Sequence[str], generators: Tensor | None, name: str) -> None:
    """Check the letters of the generators, of which the names of elements are composed.

    Args:
        letters: none, or one per generator; "e" is reserved for the identity.
        generators: permutations [m, n] or matrices [m, n, n].
        name: name of the group.

    Raises:
        ValueError: a wrong number of letters, or two elements with the same letter.
    """
    listed = ", ".join(map(str, letters))
    count = 0 if generators is None else len(generators)
    if letters and len(letters) != count:
        raise ValueError(
            f"{name} needs one letter for each of its {count} generators, got {len(letters)}: "
            f"{listed}."
        )
    if len(set(letters)) < len(letters):
        raise ValueError(f"The letters of {name} must be distinct, got {listed}.")
    if "e" in letters and generators is not None:
        generator = generators[letters.index("e")]
        n = len(generator)
        identity = torch.arange(n) if generator.dim() == 1 else torch.eye(n).to(generator)
        if not torch.equal(generator, identity):
            raise ValueError(
                f'The letter "e" of {name} is reserved for the identity. Use another letter.'
            )


def product_letters(first: Sequence[str], second: Sequence[str]) -> tuple[str, ...]:
    """Return the letters of a product of groups; equal letters are distinguished by primes.

    There are none if one group has none, or uses "e".
    """
    if not first or not second or "e" in (*first, *second):
        return ()
    letters = [*first]
    for letter in second:
        primed = letter
        while primed in letters:
            primed += "'"
        letters.append(primed)
    return tuple(letters)
