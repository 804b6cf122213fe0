"""The group of a graph: permutations of its nodes that keep every edge."""

from itertools import pairwise

import torch
from jaxtyping import Shaped
from torch import Tensor

from symrazor.groups.closure import LIMIT
from symrazor.groups.group import Group


def automorphisms(adjacency: Shaped[Tensor, "n n"], name: str = "automorphisms") -> Group:
    """Generators of the automorphisms of a graph, weighted or not, directed or not.

    A search with backtracking: nodes are sent, one by one, where their edges to the nodes sent
    before them stay what they are. For every node, from the last, it looks for automorphisms that
    fix the nodes before it and move it to later ones; together they generate the group.

    Args:
        adjacency: weight of the edge from i to j; loops on the diagonal tell nodes apart.
        name: of the group.

    Raises:
        ValueError: no square matrix, or a graph that is too hard for this search.
    """
    A = torch.as_tensor(adjacency)
    if A.dim() != 2 or A.shape[0] != A.shape[1] or not len(A):
        raise ValueError(f"expected an adjacency matrix [n, n], got {list(A.shape)}")
    if bool(A.isnan().any()):
        raise ValueError("expected weights of edges, got nan; for no edge: 0")
    kinds = A.unique(return_inverse=True)[1].tolist()
    n = len(kinds)
    colours = _colours(kinds)
    found: list[list[int]] = []
    for first in reversed(range(n)):  # what was found so far fixes all nodes up to this one
        reached = {first}
        for image in range(first + 1, n):
            if image in reached or colours[first] != colours[image]:
                continue
            move = _extend(kinds, colours, [*range(first), image])
            if move is not None:
                found.append(move)
                reached = _orbit(first, found)
    rows = torch.tensor(found) if found else torch.arange(n).unsqueeze(0)
    return Group.from_permutations(name, rows)


def _colours(kinds: list[list[int]]) -> list[int]:
    """Nodes that edges tell apart have different colours; refined until nothing changes."""
    n = len(kinds)
    colours = [kinds[i][i] for i in range(n)]
    while True:
        seen = [
            (colours[i], sorted((colours[j], kinds[i][j], kinds[j][i]) for j in range(n)))
            for i in range(n)
        ]
        order = sorted(range(n), key=lambda i: seen[i])
        fresh = [0] * n
        for before, i in pairwise(order):
            fresh[i] = fresh[before] + (seen[i] != seen[before])
        if len(set(fresh)) == len(set(colours)):
            return fresh
        colours = fresh


def _extend(kinds: list[list[int]], colours: list[int], start: list[int]) -> list[int] | None:
    """An automorphism that begins with these images, or None."""
    n, budget = len(kinds), LIMIT * len(kinds)

    def fits(images: list[int], image: int) -> bool:
        i = len(images)
        if image in images or colours[i] != colours[image]:
            return False
        same = kinds[i][i] == kinds[image][image]
        pairs = (
            (kinds[i][j], kinds[image][k], kinds[j][i], kinds[k][image])
            for j, k in enumerate(images)
        )
        return same and all(a == b and c == d for a, b, c, d in pairs)

    stack: list[list[int]] = []
    given: list[int] = []
    for image in start:
        if not fits(given, image):
            return None
        given = [*given, image]
    stack.append(given)
    while stack:
        images = stack.pop()
        if len(images) == n:
            return images
        budget -= 1
        if budget < 0:
            raise ValueError(f"expected a graph with a short search, got none for {n} nodes")
        stack += [[*images, image] for image in reversed(range(n)) if fits(images, image)]
    return None


def _orbit(node: int, moves: list[list[int]]) -> set[int]:
    """Where some permutations can move a node."""
    reached, waiting = {node}, [node]
    for place in waiting:
        for move in moves:
            if move[place] not in reached:
                reached.add(move[place])
                waiting.append(move[place])
    return reached
