"""A model to propose quantities for, and definitions of mechanics, for tests of dynamics."""

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.dynamics import FlowTimes, HamiltonianNetwork, Quadratic, SymmetrisedNetwork
from symrazor.dynamics.mechanics import (
    Scalar,
    apply_symplectic_form,
    degrees_of_freedom,
    gradient,
    symplectic_form,
)


def proposal_template(phase: int, count: int, width: int = 8) -> SymmetrisedNetwork:
    """Return a small network that may select up to `count` quadratic quantities."""
    generator = torch.Generator().manual_seed(0)
    network = HamiltonianNetwork(phase, width=width, activation="elu", generator=generator)
    conserved = Quadratic(phase, count, generator=generator)
    return SymmetrisedNetwork(network, conserved, FlowTimes(count, "ball", "antithetic"))


def poisson_bracket(f: Scalar, g: Scalar, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b"]:
    r"""Return $\{f, g\} = \nabla f^\top J \nabla g$, the rate of f along the flow of g."""
    return (gradient(f, x) * apply_symplectic_form(gradient(g, x))).sum(-1)


def is_symplectic(matrix: Float[Tensor, "*b d d"], tolerance: float = 1e-8) -> bool:
    r"""Return whether $M^\top J M = J$ within a tolerance relative to $\max |M|^2$."""
    M = matrix.detach().double()
    J = symplectic_form(degrees_of_freedom(M.shape[-1])).to(M.device)
    error = (M.mT @ J @ M - J).abs().amax()
    return bool(error <= tolerance * max(1.0, float(M.abs().amax()) ** 2))
