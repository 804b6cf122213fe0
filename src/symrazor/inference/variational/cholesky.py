"""Parametrise a lower triangular factor by the logarithm of its diagonal."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn


class Cholesky(nn.Module):
    r"""$L = \mathrm{tril}(R, -1) + \mathrm{diag}(e^{r})$ with unconstrained R and r.

    Args:
        lead: leading dimensions of independent factors.
        size: number of rows d of each factor.
        scale: starting value of the diagonal.
        dtype: dtype of the parameters.
        device: device of the parameters.
    """

    log_diagonal: nn.Parameter
    lower: nn.Parameter

    def __init__(
        self,
        lead: Sequence[int],
        size: int,
        scale: float,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        start = torch.full((*lead, size), math.log(scale), dtype=dtype, device=device)
        self.log_diagonal = nn.Parameter(start)
        self.lower = nn.Parameter(torch.zeros(*lead, size, size, dtype=dtype, device=device))

    def matrix(self) -> Float[Tensor, "*lead d d"]:
        """Return L."""
        below = self.lower.tril(-1)
        return torch.diagonal_scatter(below, self.log_diagonal.exp(), dim1=-2, dim2=-1)

    def log_det(self) -> Float[Tensor, "*lead"]:
        r"""Return $\log |L L^\top|$ of each factor, in float64."""
        return 2 * self.log_diagonal.sum(-1, dtype=torch.float64)

    def squared_norm(self) -> Float[Tensor, "*lead"]:
        r"""Return $\|L\|_F^2 = \mathrm{tr}\, L L^\top$ of each factor, in float64."""
        below = self.lower.tril(-1).square().sum((-2, -1), dtype=torch.float64)
        return below + (2 * self.log_diagonal).exp().sum(-1, dtype=torch.float64)

    def whiten(self, x: Float[Tensor, "*lead d m"]) -> Float[Tensor, "*lead d m"]:
        r"""Return $L^{-1} x$."""
        white: Tensor = torch.linalg.solve_triangular(self.matrix(), x, upper=False)
        return white

    @torch.no_grad()
    def set_(self, matrix: Float[Tensor, "*lead d d"]) -> None:
        """Set L to a lower triangular matrix with a positive diagonal."""
        self.log_diagonal.copy_(matrix.diagonal(dim1=-2, dim2=-1).log())
        self.lower.copy_(matrix.tril(-1))
