r"""Define the covariance structures: diagonal, low rank, blocks, Kronecker, full.

A structure overrides the sampling of a linear layer's outputs where their distribution is known in
closed form (local reparameterisation); the others sample weights.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.inference.variational.gaussian import (
    Draw,
    GaussianPosterior,
    Inputs,
    Outputs,
    OutputSamples,
    Samples,
)


class Cholesky(nn.Module):
    r"""A triangular factor $L = \mathrm{tril}(R, -1) + \mathrm{diag}(e^{r})$ with free R and r.

    Args:
        shape: leading dimensions of independent factors, then the number of rows d of each.
        scale: starting value of the diagonal.
        like: tensor with the dtype and device of the parameters.
    """

    def __init__(self, shape: Sequence[int], scale: float, like: Tensor) -> None:
        super().__init__()
        self.log_diagonal = nn.Parameter(like.new_full(shape, math.log(scale)))
        self.lower = nn.Parameter(like.new_zeros(*shape, shape[-1]))

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


class Diagonal(GaussianPosterior):
    r"""$\Sigma = \mathrm{diag}(s^2)$, independent weights ("mean field")."""

    log_scale: nn.Parameter

    def start(self, scale: float) -> None:
        """Create equal scales."""
        self.log_scale = _equal(self.mean, scale)

    def deviation_from(self, n: int, draw: Draw) -> Samples:
        """Return scale times noise."""
        return self.log_scale.exp() * draw((n, *self.mean.shape))

    def variance(self) -> Float[Tensor, "*shape"]:
        """Return squared scales."""
        return (2 * self.log_scale).exp()

    def log_det(self) -> Tensor:
        """Return twice the sum of the log scales."""
        return 2 * self._sum(self.log_scale)

    def mahalanobis(self, w: Samples) -> Float[Tensor, "n *batch"]:
        """Return the sum of squares over the scales."""
        z = ((w - self.mean) / self.log_scale.exp()).reshape(len(w), *self.lead, -1)
        return z.square().sum(-1, dtype=torch.float64)

    def output_variance(self, x: Inputs) -> Outputs:
        """Return squared inputs times the variances."""
        return torch.einsum("...ni,...oi->...no", x.square(), self.variance())

    def output_deviation(self, x: Inputs, n: int, draw: Draw) -> OutputSamples:
        """Sample independent outputs."""
        spread = _root(self.output_variance(x))
        return spread * draw((n, *spread.shape))


class LowRank(GaussianPosterior):
    r"""$\Sigma = \mathrm{diag}(s^2) + U U^\top$ over all weights, U of `rank` columns.

    U starts with small cosines, a tenth of the scale, because at U = 0 its gradient would vanish.
    """

    log_scale: nn.Parameter
    factor: nn.Parameter

    def __init__(
        self,
        shape: Sequence[int],
        rank: int = 2,
        scale: float = 0.1,
        mean: Tensor | None = None,
        batch: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        if rank < 1:
            raise ValueError(f"rank must be at least 1, got {rank}.")
        self.rank = rank  # `start` needs it
        super().__init__(shape, scale, mean, batch, dtype, device)

    def start(self, scale: float) -> None:
        """Create equal scales, and cosines of a tenth of them."""
        self.log_scale = _equal(self.mean, scale)
        place = (torch.arange(self.size) + 0.5) / self.size
        waves = (math.pi * torch.arange(1, self.rank + 1).unsqueeze(1) * place).cos()
        begin = (0.1 * scale * waves).to(self.mean).expand(*self.lead, self.rank, self.size)
        self.factor = nn.Parameter(begin.clone())

    def deviation_from(self, n: int, draw: Draw) -> Samples:
        """Return scale times noise plus U times shared noise."""
        noise = draw((n, *self.mean.shape))
        shared_noise = draw((n, *self.lead, self.rank))
        shared = torch.einsum("s...r,...rd->s...d", shared_noise, self.factor)
        return self.log_scale.exp() * noise + shared.reshape(noise.shape)

    def variance(self) -> Float[Tensor, "*shape"]:
        """Return squared scales plus squared rows of U."""
        shared = self.factor.square().sum(-2).reshape(self.mean.shape)
        return (2 * self.log_scale).exp() + shared

    def log_det(self) -> Tensor:
        r"""Return $\log|D| + \log|I + U^\top D^{-1} U|$, the matrix determinant lemma."""
        inner, _ = self._inner()
        return 2 * self._sum(self.log_scale) + 2 * inner.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def mahalanobis(self, w: Samples) -> Float[Tensor, "n *batch"]:
        """Use Woodbury's identity with the same small matrix."""
        inner, scaled = self._inner()
        z = ((w - self.mean) / self.log_scale.exp()).reshape(len(w), *self.lead, -1).double()
        projected = torch.einsum("...rd,s...d->s...r", scaled, z).unsqueeze(-1)
        inside: Tensor = torch.linalg.solve_triangular(inner, projected, upper=False)
        return z.square().sum(-1) - inside.square().sum((-2, -1))

    def _inner(self) -> tuple[Tensor, Tensor]:
        r"""Return the Cholesky factor of $I + U^\top D^{-1} U$, and $D^{-1/2} U$, in float64."""
        flat = self.log_scale.reshape(*self.lead, 1, -1)
        scaled = (self.factor / flat.exp()).double()
        eye = torch.eye(self.rank, dtype=scaled.dtype, device=scaled.device)
        inner: Tensor = torch.linalg.cholesky(eye + scaled @ scaled.mT)
        return inner, scaled

    def output_variance(self, x: Inputs) -> Outputs:
        """Return the variance of the independent and of the shared part."""
        independent, shared = self._output_parts(x)
        return independent + shared.square().sum(-2)

    def output_deviation(self, x: Inputs, n: int, draw: Draw) -> OutputSamples:
        """Sample noise per output, plus noise of low rank that the outputs of a row share."""
        independent, shared = self._output_parts(x)
        shared_noise = draw((n, *x.shape[:-1], self.rank))
        deviation = torch.einsum("s...nr,...nro->s...no", shared_noise, shared)
        return _root(independent) * draw((n, *independent.shape)) + deviation

    def _output_parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return variances [rows, out] of the diagonal part, and x U as [rows, rank, out]."""
        independent = torch.einsum("...ni,...oi->...no", x.square(), (2 * self.log_scale).exp())
        factor = self.factor.reshape(*self.lead, self.rank, *self.shape)
        return independent, torch.einsum("...ni,...roi->...nro", x, factor)


class BlockCholesky(GaussianPosterior):
    r"""One full covariance $\Sigma_o = L_o L_o^\top$ for each output row of the weight matrix."""

    def start(self, scale: float) -> None:
        """Create diagonal factors."""
        self.root = Cholesky((*self.lead, *self.blocks), scale, self.mean)

    @property
    def blocks(self) -> tuple[int, int]:
        """Number of blocks, and weights in each."""
        return self.matrix_shape

    def deviation_from(self, n: int, draw: Draw) -> Samples:
        """Return the factor of each block times noise."""
        noise = draw((n, *self.lead, *self.blocks))
        drawn = torch.einsum("...rij,s...rj->s...ri", self.root.matrix(), noise)
        return drawn.reshape(n, *self.mean.shape)

    def variance(self) -> Float[Tensor, "*shape"]:
        """Return squared rows of the factors."""
        return self.root.matrix().square().sum(-1).reshape(self.mean.shape)

    def trace(self) -> Tensor:
        """Return squared norms of the factors."""
        return self.root.squared_norm().sum(-1)

    def log_det(self) -> Tensor:
        """Return twice the sum of the log diagonals."""
        return self.root.log_det().sum(-1)

    def mahalanobis(self, w: Samples) -> Float[Tensor, "n *batch"]:
        """Return the squared norm of the whitened deviation."""
        apart = (w - self.mean).reshape(len(w), *self.lead, *self.blocks)
        white = self.root.whiten(apart.movedim(0, -1))
        return white.square().sum((-3, -2), dtype=torch.float64).movedim(-1, 0)

    def output_variance(self, x: Inputs) -> Outputs:
        r"""Return $\|L_o^\top x\|^2$."""
        return self._spread(x).square()

    def output_deviation(self, x: Inputs, n: int, draw: Draw) -> OutputSamples:
        """Sample independent outputs."""
        spread = self._spread(x)
        return spread * draw((n, *spread.shape))

    def _spread(self, x: Tensor) -> Tensor:
        projected = torch.einsum("...ni,...oij->...noj", x, self.root.matrix())
        spread: Tensor = torch.linalg.vector_norm(projected, dim=-1)
        return spread


class Full(BlockCholesky):
    r"""$\Sigma = L L^\top$ over all weights of the tensor, for small tensors."""

    @property
    def blocks(self) -> tuple[int, int]:
        """One block with all weights."""
        return 1, self.size

    def output_variance(self, x: Inputs) -> Outputs:
        r"""Return squared rows of $L$ weighted by the inputs."""
        root = self.root.matrix().reshape(*self.lead, *self.shape, self.size)
        return torch.einsum("...ni,...oid->...nod", x, root).square().sum(-1)

    def output_deviation(self, x: Inputs, n: int, draw: Draw) -> OutputSamples:
        """Sample weights."""
        return GaussianPosterior.output_deviation(self, x, n, draw)


class MatrixNormal(GaussianPosterior):
    r"""$W = M + L_S E L_A^\top$, $\Sigma = S \otimes A$ (row-major), both factors learned.

    It has correlations between all inputs and between all outputs at the cost of two small
    triangular factors.
    """

    def start(self, scale: float) -> None:
        """Create diagonal factors, each with the square root of the scale."""
        rows, columns = self.matrix_shape
        self.rows = Cholesky((*self.lead, rows), math.sqrt(scale), self.mean)
        self.columns = Cholesky((*self.lead, columns), math.sqrt(scale), self.mean)

    def deviation_from(self, n: int, draw: Draw) -> Samples:
        r"""Return $L_S E L_A^\top$."""
        noise = draw((n, *self.lead, *self.matrix_shape))
        drawn = self.rows.matrix() @ noise @ self.columns.matrix().mT
        return drawn.reshape(n, *self.mean.shape)

    def variance(self) -> Float[Tensor, "*shape"]:
        r"""Return $S_{oo} A_{ii}$."""
        S, A = (root.matrix().square().sum(-1) for root in (self.rows, self.columns))
        return (S.unsqueeze(-1) * A.unsqueeze(-2)).reshape(self.mean.shape)

    def trace(self) -> Tensor:
        r"""Return $\mathrm{tr} S \, \mathrm{tr} A$."""
        return self.rows.squared_norm() * self.columns.squared_norm()

    def log_det(self) -> Tensor:
        r"""Return $\mathrm{in} \log|S| + \mathrm{out} \log|A|$."""
        rows, columns = self.matrix_shape
        return columns * self.rows.log_det() + rows * self.columns.log_det()

    def mahalanobis(self, w: Samples) -> Float[Tensor, "n *batch"]:
        r"""Return $\|L_S^{-1} (W - M) L_A^{-\top}\|^2$."""
        apart = (w - self.mean).reshape(len(w), *self.lead, *self.matrix_shape)
        white = self.columns.whiten(self.rows.whiten(apart).mT)
        return white.square().sum((-2, -1), dtype=torch.float64)

    def output_variance(self, x: Inputs) -> Outputs:
        r"""Return $S_{oo} \, x^\top A x$."""
        rows = self.rows.matrix().square().sum(-1).unsqueeze(-2)
        return self._spread(x).square() * rows

    def output_deviation(self, x: Inputs, n: int, draw: Draw) -> OutputSamples:
        r"""Sample $\|L_A^\top x\| \, L_S e$ (Louizos and Welling 2016)."""
        noise = draw((n, *x.shape[:-1], self.shape[0]))
        return self._spread(x) * (noise @ self.rows.matrix().mT)

    def _spread(self, x: Tensor) -> Tensor:
        projected = x @ self.columns.matrix()
        spread: Tensor = torch.linalg.vector_norm(projected, dim=-1, keepdim=True)
        return spread


def _equal(mean: Tensor, scale: float) -> nn.Parameter:
    """Return equal log scales, one for each weight."""
    return nn.Parameter(torch.full_like(mean, math.log(scale)).detach())


def _root(variance: Tensor) -> Tensor:
    """Return the square root, with a finite slope at zero."""
    return variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()
