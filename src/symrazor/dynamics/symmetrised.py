r"""The symmetrised Hamiltonian $H(x) = \int F(\Phi^\tau x)\, d\mu(\tau)$, an average over flows.

Once F is averaged over the flow of C, C is conserved by the dynamics of H: Noether's theorem. Both
come as a draw: R sets of weights, and S flows for each.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.dynamics.conserved import ConservedQuantities, Flows
from symrazor.dynamics.hamiltonian import Energy, HamiltonianNetwork
from symrazor.dynamics.measures import FlowTimes
from symrazor.dynamics.phase import turn


class Hamiltonian:
    """One draw of a Hamiltonian: `value`, `gradient` and `field` at states [r, n, 2n].

    Args:
        energy: R draws of F.
        flows: S maps for each, or None for F itself.
    """

    def __init__(self, energy: Energy, flows: Flows | None = None) -> None:
        """Hold the draw."""
        self.energy, self.flows = energy, flows

    def value(self, x: Float[Tensor, "r n d"]) -> Float[Tensor, "r n"]:
        """H."""
        if self.flows is None:
            return self.energy(x)
        moved, _ = self.flows.transport(x)
        values = self.energy(moved.flatten(1, 2))
        return values.reshape(moved.shape[:3]).mean(dim=1)

    def gradient(self, x: Float[Tensor, "r n d"]) -> Float[Tensor, "r n d"]:
        r"""$\frac1S\sum_s (\partial\Phi_s/\partial x)^\top \nabla F(\Phi_s x)$."""
        if self.flows is None:
            return self.energy.gradient(x)
        moved, pull = self.flows.transport(x)
        g = self.energy.gradient(moved.flatten(1, 2))
        return pull(g.reshape(moved.shape))

    def field(self, x: Float[Tensor, "r n d"]) -> Float[Tensor, "r n d"]:
        r"""$J\nabla H$."""
        return turn(self.gradient(x))


class SymmetrisedNetwork(nn.Module):
    """A network over phase space, averaged over the flows of conserved quantities.

    Args:
        network: F.
        conserved: the quantities, learned or fixed; None for a plain Hamiltonian network.
        times: measure over flow times; the cube with quasi-Monte-Carlo draws by default.
    """

    def __init__(
        self,
        network: HamiltonianNetwork,
        conserved: ConservedQuantities | None = None,
        times: FlowTimes | None = None,
    ) -> None:
        """Hold both."""
        super().__init__()
        self.network, self.conserved = network, conserved
        if conserved is not None:
            times = times or FlowTimes(conserved.flow_count, "cube", "quasi")
            if times.dimension != conserved.flow_count:
                raise ValueError(
                    f"expected flow times of {conserved.flow_count} flows, got {times.dimension}"
                )
        self.times = times

    def draw(self, draws: int, flows: int, generator: torch.Generator | None = None) -> Hamiltonian:
        """R draws from the posterior over weights, each with S flows of its own."""
        return Hamiltonian(
            self.network.draw(draws, generator), self._flows(draws, flows, generator)
        )

    def mean(self, flows: int, generator: torch.Generator | None = None) -> Hamiltonian:
        """Mean weights and one set of flows."""
        return Hamiltonian(self.network.mean(), self._flows(1, flows, generator))

    def _flows(self, draws: int, flows: int, generator: torch.Generator | None) -> Flows | None:
        if self.conserved is None or self.times is None:
            return None
        tau = self.times(draws, flows, generator)
        return self.conserved.flows(tau)
