r"""The group of a graph: permutations of its nodes that keep every edge.

Nodes get colours that no automorphism can mix: a node's colour and those at the other ends of its
edges, again and again, until no more nodes are told apart. Colours of neighbours are summed up as
$\sum_j c[\mathrm{colour}_j]\, k[\mathrm{kind}_{ij}]$ with random integers c and k; if two sums
should ever agree by chance, nodes that could be told apart are not, and the search is longer, but
what it finds is checked edge by edge.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from symrazor.groups.closure import as_numbers
from symrazor.groups.group import Group
from symrazor.groups.orbits import joined

LONGEST = 10_000
"""Steps of one search, at most."""


def automorphisms(adjacency: Shaped[Tensor, "n n"], name: str = "automorphisms") -> Group:
    """Generators of the automorphisms of a graph, weighted or not, directed or not.

    Nodes are fixed, one by one, until colours tell all of them apart. For each of these, from the
    last, we look for automorphisms that fix the ones before it and move it to others of its colour;
    together they generate the group.

    Args:
        adjacency: weight of the edge from i to j; loops on the diagonal tell nodes apart.
        name: of the group.

    Raises:
        ValueError: no square matrix, or a graph that is too hard for this search.
    """
    A = as_numbers(adjacency, "an adjacency matrix [n, n]")
    if A.dim() != 2 or A.shape[0] != A.shape[1] or not len(A):
        raise ValueError(f"expected an adjacency matrix [n, n], got {list(A.shape)}")
    if bool(A.isnan().any()):
        raise ValueError("expected weights of edges, got nan; for no edge: 0")
    graph = _Graph.of(A)
    found: list[Tensor] = []
    orbits = torch.arange(len(A))  # of what was found so far
    for colours, base in reversed(_chain(graph)):
        tried = orbits == orbits[base]
        for image in (colours == colours[base]).nonzero().flatten().tolist():
            if bool(tried[image]):
                continue
            move = _search(graph, colours, base, image)
            if move is not None:
                found.append(move)
                orbits = joined(torch.stack([orbits, orbits[move]]), len(A))[orbits]
                tried |= orbits == orbits[base]
            tried |= orbits == orbits[image]
    rows = torch.stack(found) if found else torch.arange(len(A)).unsqueeze(0)
    return Group.from_permutations(name, rows)


@dataclass(frozen=True)
class _Graph:
    """Edges of all kinds but the most frequent one, and random numbers for what they are.

    Args:
        loops: kind of the edge from each node to itself.
        kinds: of the pair of edges between two nodes, one in each direction.
        ends: the pairs that are not of the most frequent kind.
        weights: a random number for the kind of each.
        numbers: two random numbers for each colour.
    """

    loops: Int[Tensor, " n"]
    kinds: Int[Tensor, "n n"]
    ends: tuple[Int[Tensor, " e"], Int[Tensor, " e"]]
    weights: Int[Tensor, " e"]
    numbers: Int[Tensor, "2 m"]

    @classmethod
    def of(cls, A: Shaped[Tensor, "n n"]) -> "_Graph":
        n = len(A)
        one_way = A.to("cpu").unique(return_inverse=True)[1]
        loops = one_way.diagonal().clone()
        kinds = (one_way * n * n + one_way.T).unique(return_inverse=True)[1].fill_diagonal_(-1)
        counts = (kinds + 1).flatten().bincount()[1:]
        common = int(counts.argmax()) if n > 1 else 0
        i, j = ((kinds != common) & (kinds >= 0)).nonzero().unbind(1)
        seed = torch.Generator().manual_seed(0)
        drawn = torch.empty(len(counts) + 1 + 4 * (n + 1), dtype=torch.long)
        drawn.random_(-(2**63), 2**63 - 1, generator=seed)
        weights = drawn[: len(counts) + 1][kinds[i, j]]
        return cls(loops, kinds, (i, j), weights, drawn[len(counts) + 1 :].reshape(2, -1))

    def refined(self, colours: Int[Tensor, "r n"]) -> Int[Tensor, "r n"]:
        """Colours of one or two copies of the graph, told apart as far as edges can."""
        i, j = self.ends
        colours = colours.unique(return_inverse=True)[1]
        while True:
            seen = self.numbers[0][colours]
            seen = seen.index_add(1, i, self.numbers[1][colours[:, j]] * self.weights)
            values, finer = seen.unique(return_inverse=True)
            if len(values) <= int(colours.max()) + 1:
                return colours
            colours = finer

    def matched(self, left: Int[Tensor, " n"], right: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
        """A permutation that keeps colours, and leaves nodes alone where it can."""
        move = torch.arange(len(left))
        rest = (left != right).nonzero().flatten()
        move[rest[left[rest].argsort(stable=True)]] = rest[right[rest].argsort(stable=True)]
        return move

    def is_kept(self, move: Int[Tensor, " n"]) -> bool:
        """Whether a permutation moves edges to edges of their kind, and loops to such loops."""
        i, j = self.ends
        same: Bool[Tensor, " e"] = self.kinds[move[i], move[j]] == self.kinds[i, j]
        return bool(same.all()) and torch.equal(self.loops[move], self.loops)


def _chain(graph: _Graph) -> list[tuple[Int[Tensor, " n"], int]]:
    """Colours, and a node that they do not tell from others; the next ones with that node fixed."""
    found: list[tuple[Tensor, int]] = []
    colours = graph.refined(graph.loops.unsqueeze(0))[0]
    while (base := _shared(colours)) is not None:
        found.append((colours, base))
        colours = colours.clone()
        colours[base] = len(colours)
        colours = graph.refined(colours.unsqueeze(0))[0]
    return found


def _shared(colours: Int[Tensor, " n"]) -> int | None:
    """The first node that has its colour with others, if any."""
    shared = (colours.bincount()[colours] > 1).nonzero()
    return int(shared[0]) if len(shared) else None


def _search(
    graph: _Graph, colours: Int[Tensor, " n"], base: int, image: int
) -> Int[Tensor, " n"] | None:
    """An automorphism that keeps colours and moves one node to another, or None.

    The graph and its image are coloured side by side. Where colours leave a choice, each is tried.
    """
    waiting = [(torch.stack([colours, colours]), base, [image])]
    for _ in range(LONGEST):
        if not waiting:
            return None
        both, node, images = waiting[-1]
        if not images:
            waiting.pop()
            continue
        fixed = both.clone()
        fixed[0, node] = fixed[1, images.pop()] = 2 * len(colours)
        left, right = fixed = graph.refined(fixed)
        if not torch.equal(left.sort()[0], right.sort()[0]):
            continue
        move = graph.matched(left, right)
        if graph.is_kept(move):
            return move
        following = _shared(left)
        if following is not None:
            images = (right == left[following]).nonzero().flatten().tolist()
            waiting.append((fixed, following, images))
    raise ValueError(f"expected a graph with a short search, got none for {len(colours)} nodes")
