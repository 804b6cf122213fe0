r"""Phase space: states $x = (q, p)$, the symplectic form, Poisson brackets."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

Scalar = Callable[[Tensor], Tensor]
"""A function of a state: [..., 2n] -> [...]."""
Field = Callable[[Tensor], Tensor]
"""A vector field: [..., 2n] -> [..., 2n]."""


def freedom(phase: int) -> int:
    """Degrees of freedom n of states with 2n entries.

    Raises:
        ValueError: an odd number of entries.
    """
    if phase < 2 or phase % 2:
        raise ValueError(
            f"expected states (q, p) with an even number of entries, got {phase}; "
            "give a momentum for every position, or positions only with positions=True"
        )
    return phase // 2


def symplectic_form(n: int) -> Float[Tensor, "d d"]:
    r"""$J = \begin{pmatrix} 0 & I \\ -I & 0 \end{pmatrix}$ for n degrees of freedom, float64."""
    one = torch.eye(n, dtype=torch.float64)
    zero = torch.zeros_like(one)
    return torch.cat([torch.cat([zero, one], 1), torch.cat([-one, zero], 1)])


def turn(gradient: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
    r"""$J \nabla H$: $\dot q = \partial H/\partial p$ and $\dot p = -\partial H/\partial q$."""
    dq, dp = gradient.chunk(2, dim=-1)
    return torch.cat([dp, -dq], dim=-1)


def gradient(scalar: Scalar, x: Float[Tensor, "*b d"], create_graph: bool = False) -> Tensor:
    """Gradient of a scalar function at many states by reverse mode."""
    with torch.enable_grad():
        at = x if create_graph and x.requires_grad else x.detach().requires_grad_()
        total = scalar(at).sum()
        (found,) = torch.autograd.grad(total, at, create_graph=create_graph)
    return found


def hamiltonian_field(scalar: Scalar) -> Field:
    r"""The vector field $J\nabla H$ of a function of the state."""

    def field(x: Tensor) -> Tensor:
        return turn(gradient(scalar, x))

    return field


def poisson_bracket(f: Scalar, g: Scalar, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b"]:
    r"""$\{f, g\} = \nabla f^\top J \nabla g$: the rate of f along the flow of g."""
    return (gradient(f, x) * turn(gradient(g, x))).sum(-1)


def is_symplectic(matrix: Float[Tensor, "*b d d"], tolerance: float = 1e-8) -> bool:
    r"""Whether $M^\top J M = J$, relative to the size of M."""
    wide = matrix.detach().double()
    J = symplectic_form(freedom(wide.shape[-1])).to(wide.device)
    error = (wide.mT @ J @ wide - J).abs().amax()
    return bool(error <= tolerance * max(1.0, float(wide.abs().amax()) ** 2))
