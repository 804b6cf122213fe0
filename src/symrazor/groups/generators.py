"""What generators must be: one name for each, and flows that discrete ones turn into flows."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from symrazor.groups.closure import TOLERANCE, permutation_matrix
from symrazor.groups.lie import LieAlgebra


def check_name(name: object) -> None:
    """Raise ValueError for what cannot name a group, such as its generators."""
    if not isinstance(name, str) or not name:
        got = repr(name) if name is None or name == "" else type(name).__name__
        raise ValueError(f"expected the name of a group first, got {got}; do: name it")


def check_lie(lie: object, name: str) -> None:
    """Raise ValueError for anything else than a Lie algebra or None."""
    if lie is not None and not isinstance(lie, LieAlgebra):
        raise ValueError(
            f"expected a LieAlgebra in {name}, got {type(lie).__name__}; do: "
            "LieAlgebra.of(generators)"
        )


def check_letters(letters: Sequence[str], generators: Tensor | None, name: str) -> None:
    """Elements are told apart by name: a letter for each generator, "e" for the identity.

    Args:
        letters: none, or one per generator.
        generators: permutations [m, n] or matrices [m, n, n].
        name: of the group.

    Raises:
        ValueError: too few letters, or two elements of one name.
    """
    listed = ", ".join(map(str, letters))
    count = 0 if generators is None else len(generators)
    if letters and len(letters) != count:
        raise ValueError(
            f"expected a letter for each of {count} generators in {name}, got "
            f"{len(letters)}: {listed}"
        )
    if len(set(letters)) < len(letters):
        raise ValueError(f"expected different letters in {name}, got {listed}")
    if "e" in letters and generators is not None:
        own = generators[letters.index("e")]
        n = len(own)
        if not torch.equal(own, torch.arange(n) if own.dim() == 1 else torch.eye(n).to(own)):
            raise ValueError(
                f'expected "e" for the identity alone in {name}, got it as the letter of another '
                "element; do: use another letter"
            )


def joined_letters(ours: Sequence[str], theirs: Sequence[str]) -> tuple[str, ...]:
    """Of a product; equal ones are told apart by primes. None where one has none, or "e"."""
    if not ours or not theirs or "e" in (*ours, *theirs):
        return ()
    found = [*ours]
    for letter in theirs:
        primed = letter
        while primed in found:
            primed += "'"
        found.append(primed)
    return tuple(found)


def check_flows(
    lie: LieAlgebra, discrete: Float[Tensor, "m n n"], letters: Sequence[str], name: str
) -> None:
    """Verify that discrete generators turn a Lie algebra into itself: g A g^-1 is in it.

    Raises:
        ValueError: names the pair g, A.
    """
    named = letters or tuple(f"generator {k}" for k in range(len(discrete)))
    for letter, g in zip(named, discrete, strict=True):
        back = torch.linalg.inv(g)
        apart = lie.coordinates(g @ lie.generators @ back)[1]
        scale = float(g.norm() * back.norm()) * lie.generators.flatten(1).norm(dim=1)
        wrong = (apart > TOLERANCE * scale).nonzero().flatten().tolist()
        if wrong:
            raise ValueError(
                f"expected the discrete generators of {name} to keep its Lie algebra, got "
                f"g·A·g^-1 outside for the pair {letter}, {lie.names[wrong[0]]}; add it as a "
                "generator"
            )


def as_permutation(given: Tensor) -> Int[Tensor, " n"] | None:
    """A permutation, or the one of a permutation matrix; None for anything else."""
    p = given if given.dim() == 1 else given.argmax(0)
    if sorted(p.tolist()) != list(range(len(p))):
        return None
    p = p.long()
    same = given.dim() == 1 or torch.equal(permutation_matrix(p), given.double())
    return p if same else None
