"""Test automorphisms of graphs."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from symrazor import groups


@given(st.integers(0, 2**30 - 1), st.booleans())
@settings(max_examples=25, deadline=None)
def test_automorphisms_by_brute_force(bits: int, symmetric: bool) -> None:
    n = 5
    A = torch.tensor([bits >> k & 1 for k in range(n * n)]).reshape(n, n)
    A = A | A.T if symmetric else A
    permutations = itertools.permutations(range(n))
    count = sum(torch.equal(A[list(p)][:, list(p)], A) for p in permutations)
    group = groups.automorphisms(A)
    assert group.finite().order == count
    assert group.permutations is not None
    for p in group.permutations:
        assert torch.equal(A[p][:, p], A)


def test_automorphisms_of_known_graphs() -> None:
    cube = torch.tensor([[(a ^ b).bit_count() == 1 for a in range(8)] for b in range(8)])
    assert groups.automorphisms(cube).finite().order == 48
    pairs = list(itertools.combinations(range(5), 2))
    petersen = torch.tensor([[not set(a) & set(b) for a in pairs] for b in pairs])
    assert groups.automorphisms(petersen).finite().order == 120
    complete = groups.automorphisms(torch.ones(30, 30) - torch.eye(30))
    assert complete.is_symmetric and complete.permutations is not None
    assert len(complete.permutations) == 29
    assert groups.automorphisms(torch.zeros(100, 100)).is_symmetric
    with pytest.raises(ValueError, match="adjacency must be a matrix|adjacency matrix"):
        groups.automorphisms(torch.ones(2, 3))


def ring(n: int) -> torch.Tensor:
    step = torch.eye(n).roll(1, 0)
    return step + step.T


def test_automorphisms_of_graphs_with_hidden_parts() -> None:
    """Triangles and a hexagon, whose nodes have equal colours; a ring and a tree, relabelled."""
    parts = torch.block_diag(ring(3), ring(3), ring(6))
    tree = torch.zeros(15, 15)
    for child in range(1, 15):
        tree[child, (child - 1) // 2] = tree[(child - 1) // 2, child] = 2
    one_way = torch.block_diag(torch.eye(7).roll(1, 0), torch.eye(2))
    cases = [(parts, 6 * 6 * 2 * 12), (ring(200), 400), (tree, 2**7), (one_way, 7 * 2)]
    for A, order in cases:
        shuffle = torch.randperm(len(A), generator=torch.Generator().manual_seed(0))
        hidden = A[shuffle][:, shuffle]
        group = groups.automorphisms(hidden)
        assert group.finite().order == order
        assert group.permutations is not None
        assert all(torch.equal(hidden[p][:, p], hidden) for p in group.permutations)
