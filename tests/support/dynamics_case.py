"""A model with quadratic quantities to propose, for tests of proposals and selection."""

import torch

from symrazor.dynamics import FlowTimes, HamiltonianNetwork, Quadratic, SymmetrisedNetwork


def proposal_template(phase: int, count: int, width: int = 8) -> SymmetrisedNetwork:
    """Return a small network that may select up to `count` quadratic quantities."""
    generator = torch.Generator().manual_seed(0)
    network = HamiltonianNetwork(phase, width=width, activation="elu", generator=generator)
    conserved = Quadratic(phase, count, generator=generator)
    return SymmetrisedNetwork(network, conserved, FlowTimes(count, "ball", "antithetic"))
