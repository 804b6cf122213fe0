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
    back = [list(column) for column in zip(*kinds, strict=True)]
    images: list[int] = []

    def fits(image: int) -> bool:
        i, m = len(images), len(images)
        if colours[i] != colours[image] or image in images:
            return False
        ahead, behind = kinds[image], back[image]
        return (
            kinds[i][i] == ahead[image]
            and kinds[i][:m] == [ahead[k] for k in images]
            and back[i][:m] == [behind[k] for k in images]
        )

    for image in start:
        if not fits(image):
            return None
        images.append(image)
    waiting = [iter(range(n))]  # images that are left to try, for every node after the given ones
    while len(images) < n:
        following = next((image for image in waiting[-1] if fits(image)), None)
        if following is not None:
            images.append(following)
            waiting.append(iter(range(n)))
            continue
        waiting.pop()
        budget -= 1
        if budget < 0:
            raise ValueError(f"expected a graph with a short search, got none for {n} nodes")
        if not waiting:
            return None
        images.pop()
    return images


def _orbit(node: int, moves: list[list[int]]) -> set[int]:
    """Where some permutations can move a node."""
    reached, waiting = {node}, [node]
    for place in waiting:
        for move in moves:
            if move[place] not in reached:
                reached.add(move[place])
                waiting.append(move[place])
    return reached
