"""Provide the test suite of groups; import it from `symrazor.testing`."""

from abc import ABC, abstractmethod

import torch
from torch.testing import assert_close as close

from symrazor.groups.action import OnVectors
from symrazor.groups.generators import permutation_matrix
from symrazor.groups.group import Group
from symrazor.groups.maps import equivariant_maps
from symrazor.groups.representation import defining


class GroupSuite(ABC):
    """Tests that every group must pass; small groups are enumerated."""

    @abstractmethod
    def make(self) -> Group:
        """Return the group under test."""

    def test_axioms(self) -> None:
        """The group satisfies closure, associativity, identity, inverses and brackets."""
        self.make().check()

    def test_elements_compose_as_their_matrices(self) -> None:
        """The table agrees with products of matrices, and every generator is in the group."""
        group = self.make()
        if not group.is_discrete:
            return
        finite = group.finite()
        rows = torch.stack([finite.matrix(g) for g in finite.elements])
        assert len({tuple(row.flatten().mul(1e6).round().tolist()) for row in rows}) == len(rows)
        for a in range(0, finite.order, max(1, finite.order // 8)):
            close(rows[a] @ rows, rows[finite.table[a]], rtol=0, atol=1e-9)
            close(rows[a] @ rows[finite.inverse[a]], rows[finite.identity], rtol=0, atol=1e-9)
        for generator in group.discrete:
            assert group.contains(generator)
        assert group.is_subgroup_of(group)

    def test_equivariant_maps_commute_with_random_elements(self) -> None:
        """Maps computed from the generators commute with random elements."""
        group = self.make()
        rho = defining(group)
        Q = equivariant_maps(rho, rho).matrices()
        assert len(Q) >= 1  # the identity
        for g in group.sample(6):
            matrix = permutation_matrix(g) if g.dim() == 1 else g
            close(matrix @ Q, Q @ matrix, rtol=0, atol=1e-9)

    def test_elements_are_inverted_by_their_inverses(self) -> None:
        """Acting on vectors by g and then by its inverse returns the vector."""
        group = self.make()
        x = torch.randn(3, group.size, dtype=torch.float64)
        for g in group.sample(4):
            back = g.argsort() if g.dim() == 1 else torch.linalg.inv(g)
            action = OnVectors(group)
            close(action.act(action.act(x, g), back), x, rtol=0, atol=1e-9)
