"""Transform inputs by a random element of a symmetry, to measure whether a network has it."""

import torch
from torch import Tensor

from symrazor.bench.truth.networks import mirror, quarter_turn
from symrazor.bench.truth.task import Problem
from symrazor.groups import Group

MAX_WORD_LENGTH = 20
"""Random elements of a permutation group are products of up to as many generators."""


def transformed(problem: Problem, symmetry: str, x: Tensor, generator: torch.Generator) -> Tensor:
    """Return inputs of a problem, all transformed by one random element of a symmetry.

    Raises:
        ValueError: the problem has no symmetry of this name.
    """
    for group in problem.groups or ():
        if isinstance(group, Group) and group.name == symmetry:
            return _moved(problem, group, x, generator)
    match symmetry:
        case "translation":
            sizes = x.shape[2:]
            shifts = [int(torch.randint(1, size, (1,), generator=generator)) for size in sizes]
            return x.roll(shifts, list(range(2, x.dim())))
        case "x-translation" | "y-translation":
            dim = 3 if symmetry == "x-translation" else 2
            return x.roll(int(torch.randint(1, x.shape[dim], (1,), generator=generator)), dim)
        case "permutation":
            return x[:, torch.randperm(x.shape[1], generator=generator)]
        case "p4":
            return quarter_turn(x, int(torch.randint(1, 4, (1,), generator=generator)))
        case "pm":
            return mirror(x)
    raise ValueError(f"Unknown symmetry {symmetry!r} of {problem.kind} data.")


def _moved(problem: Problem, group: Group, x: Tensor, generator: torch.Generator) -> Tensor:
    if group.permutations is not None:
        axis = 2 if problem.kind == "series" else 1
        length = int(torch.randint(1, MAX_WORD_LENGTH, (1,), generator=generator))
        for index in torch.randint(len(group.permutations), (length,), generator=generator):
            x = x.index_select(axis, group.permutations[index])
        return x
    if group.lie is None:
        raise ValueError(f"Group {group.name} has neither permutations nor a Lie algebra.")
    angles = 6.2832 * torch.rand(len(group.lie.generators), generator=generator).double()
    matrix = torch.linalg.matrix_exp(torch.einsum("k,kij->ij", angles, group.lie.generators))
    moved: Tensor = x @ matrix.to(x).mT
    return moved
