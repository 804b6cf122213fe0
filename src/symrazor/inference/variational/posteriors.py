r"""The structures of a posterior's covariance: diagonal, low rank, blocks, Kronecker, full.

Each overrides the draws of a linear layer's outputs where their distribution is known in closed
form (local reparameterisation); the others draw weights.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.inference.variational.cholesky import Cholesky
from symrazor.inference.variational.gaussian import (
    Draw,
    GaussianPosterior,
    Point,
    best_variance,
    collapsed_kl,
    kl,
)

__all__ = [
    "BlockCholesky",
    "Diagonal",
    "Full",
    "GaussianPosterior",
    "LowRank",
    "MatrixNormal",
    "Point",
    "best_variance",
    "collapsed_kl",
    "kl",
]


class Diagonal(GaussianPosterior):
    r"""$\Sigma = \mathrm{diag}(s^2)$, independent weights ("mean field")."""

    log_scale: nn.Parameter

    def start(self, scale: float) -> None:
        """Equal scales."""
        self.log_scale = _equal(self.mean, scale)

    def deviation_from(self, n: int, draw: Draw) -> Float[Tensor, "n *shape"]:
        """Scale times noise."""
        return self.log_scale.exp() * draw((n, *self.mean.shape))

    def variance(self) -> Float[Tensor, "*shape"]:
        """Squared scales."""
        return (2 * self.log_scale).exp()

    def log_det(self) -> Tensor:
        """Twice the sum of the log scales."""
        return 2 * self._sum(self.log_scale)

    def mahalanobis(self, w: Float[Tensor, "n *shape"]) -> Float[Tensor, "n *batch"]:
        """Sum of squares over the scales."""
        z = ((w - self.mean) / self.log_scale.exp()).reshape(len(w), *self.lead, -1)
        return z.square().sum(-1, dtype=torch.float64)

    def output_variance(self, x: Float[Tensor, "*lead rows in"]) -> Float[Tensor, "*lead rows out"]:
        """Squared inputs times the variances."""
        return torch.einsum("...ni,...oi->...no", x.square(), self.variance())

    def output_deviation(
        self, x: Float[Tensor, "*lead rows in"], n: int, draw: Draw
    ) -> Float[Tensor, "n *lead rows out"]:
        """Independent outputs."""
        spread = _root(self.output_variance(x))
        return spread * draw((n, *spread.shape))


class LowRank(GaussianPosterior):
    r"""$\Sigma = \mathrm{diag}(s^2) + U U^\top$ over all weights, U of `rank` columns.

    U starts with small cosines, a tenth of the scale: at U = 0 its gradient would vanish.
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
        """Start near independent weights of deviation `scale`; see the base class."""
        if rank < 1:
            raise ValueError(f"expected a rank of at least 1, got {rank}")
        self.rank = rank  # `start` needs it
        super().__init__(shape, scale, mean, batch, dtype, device)

    def start(self, scale: float) -> None:
        """Equal scales, and waves of a tenth of them."""
        self.log_scale = _equal(self.mean, scale)
        place = (torch.arange(self.size) + 0.5) / self.size
        waves = (math.pi * torch.arange(1, self.rank + 1).unsqueeze(1) * place).cos()
        begin = (0.1 * scale * waves).to(self.mean).expand(*self.lead, self.rank, self.size)
        self.factor = nn.Parameter(begin.clone())

    def deviation_from(self, n: int, draw: Draw) -> Float[Tensor, "n *shape"]:
        """Scale times noise plus U times a few more numbers."""
        own = draw((n, *self.mean.shape))
        few = draw((n, *self.lead, self.rank))
        shared = torch.einsum("s...r,...rd->s...d", few, self.factor)
        return self.log_scale.exp() * own + shared.reshape(own.shape)

    def variance(self) -> Float[Tensor, "*shape"]:
        """Squared scales plus squared rows of U."""
        shared = self.factor.square().sum(-2).reshape(self.mean.shape)
        return (2 * self.log_scale).exp() + shared

    def log_det(self) -> Tensor:
        r"""$\log|D| + \log|I + U^\top D^{-1} U|$, the matrix determinant lemma."""
        inner, _ = self._inner()
        return 2 * self._sum(self.log_scale) + 2 * inner.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def mahalanobis(self, w: Float[Tensor, "n *shape"]) -> Float[Tensor, "n *batch"]:
        """By Woodbury's identity, with the same small matrix."""
        inner, scaled = self._inner()
        z = ((w - self.mean) / self.log_scale.exp()).reshape(len(w), *self.lead, -1).double()
        few = torch.einsum("...rd,s...d->s...r", scaled, z).unsqueeze(-1)
        inside: Tensor = torch.linalg.solve_triangular(inner, few, upper=False)
        return z.square().sum(-1) - inside.square().sum((-2, -1))

    def _inner(self) -> tuple[Tensor, Tensor]:
        r"""Cholesky factor of $I + U^\top D^{-1} U$, and $D^{-1/2} U$, in float64."""
        flat = self.log_scale.reshape(*self.lead, 1, -1)
        scaled = (self.factor / flat.exp()).double()
        eye = torch.eye(self.rank, dtype=scaled.dtype, device=scaled.device)
        inner: Tensor = torch.linalg.cholesky(eye + scaled @ scaled.mT)
        return inner, scaled

    def output_variance(self, x: Float[Tensor, "*lead rows in"]) -> Float[Tensor, "*lead rows out"]:
        """Of the independent part and of the shared one."""
        own, seen = self._seen(x)
        return own + seen.square().sum(-2)

    def output_deviation(
        self, x: Float[Tensor, "*lead rows in"], n: int, draw: Draw
    ) -> Float[Tensor, "n *lead rows out"]:
        """Independent noise for each output and a few numbers that all of a row's outputs share."""
        own, seen = self._seen(x)
        few = draw((n, *x.shape[:-1], self.rank))
        shared = torch.einsum("s...nr,...nro->s...no", few, seen)
        return _root(own) * draw((n, *own.shape)) + shared

    def _seen(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Variances [rows, out] of the diagonal part; U as outputs see it, [rows, rank, out]."""
        own = torch.einsum("...ni,...oi->...no", x.square(), (2 * self.log_scale).exp())
        factor = self.factor.reshape(*self.lead, self.rank, *self.shape)
        return own, torch.einsum("...ni,...roi->...nro", x, factor)


class BlockCholesky(GaussianPosterior):
    r"""One full covariance $\Sigma_o = L_o L_o^\top$ for each output row of the weight matrix."""

    def start(self, scale: float) -> None:
        """Diagonal factors."""
        rows, columns = self.blocks
        self.root = Cholesky((*self.lead, rows), columns, scale, self.mean.dtype, self.mean.device)

    @property
    def blocks(self) -> tuple[int, int]:
        """Number of blocks, and weights in each."""
        return self.matrix_shape

    def deviation_from(self, n: int, draw: Draw) -> Float[Tensor, "n *shape"]:
        """The factor of each block times noise."""
        noise = draw((n, *self.lead, *self.blocks))
        drawn = torch.einsum("...rij,s...rj->s...ri", self.root.matrix(), noise)
        return drawn.reshape(n, *self.mean.shape)

    def variance(self) -> Float[Tensor, "*shape"]:
        """Squared rows of the factors."""
        return self.root.matrix().square().sum(-1).reshape(self.mean.shape)

    def trace(self) -> Tensor:
        """Squared norms of the factors."""
        return self.root.squared_norm().sum(-1)

    def log_det(self) -> Tensor:
        """Twice the sum of the log diagonals."""
        return self.root.log_det().sum(-1)

    def mahalanobis(self, w: Float[Tensor, "n *shape"]) -> Float[Tensor, "n *batch"]:
        """Squared norm of what the factors leave of the deviation."""
        apart = (w - self.mean).reshape(len(w), *self.lead, *self.blocks)
        white = self.root.whiten(apart.movedim(0, -1))
        return white.square().sum((-3, -2), dtype=torch.float64).movedim(-1, 0)

    def output_variance(self, x: Float[Tensor, "*lead rows in"]) -> Float[Tensor, "*lead rows out"]:
        r"""$\|L_o^\top x\|^2$."""
        return self._spread(x).square()

    def output_deviation(
        self, x: Float[Tensor, "*lead rows in"], n: int, draw: Draw
    ) -> Float[Tensor, "n *lead rows out"]:
        """Independent outputs."""
        spread = self._spread(x)
        return spread * draw((n, *spread.shape))

    def _spread(self, x: Tensor) -> Tensor:
        seen = torch.einsum("...ni,...oij->...noj", x, self.root.matrix())
        spread: Tensor = torch.linalg.vector_norm(seen, dim=-1)
        return spread


class Full(BlockCholesky):
    r"""$\Sigma = L L^\top$ over all weights of the tensor: for small ones only."""

    @property
    def blocks(self) -> tuple[int, int]:
        """One block with all weights."""
        return 1, self.size

    def output_variance(self, x: Float[Tensor, "*lead rows in"]) -> Float[Tensor, "*lead rows out"]:
        r"""Rows of $L$ weighted by the inputs."""
        root = self.root.matrix().reshape(*self.lead, *self.shape, self.size)
        return torch.einsum("...ni,...oid->...nod", x, root).square().sum(-1)

    def output_deviation(
        self, x: Float[Tensor, "*lead rows in"], n: int, draw: Draw
    ) -> Float[Tensor, "n *lead rows out"]:
        """By drawn weights."""
        return GaussianPosterior.output_deviation(self, x, n, draw)


class MatrixNormal(GaussianPosterior):
    r"""$W = M + L_S E L_A^\top$, $\Sigma = S \otimes A$ (row-major), both factors learned.

    The talk's posterior (avoid mean field): D log-diagonals and correlations between all inputs and
    between all outputs at the price of two small triangles.
    """

    def start(self, scale: float) -> None:
        """Diagonal factors, each with half of the scale's logarithm."""
        half, (rows, columns) = math.sqrt(scale), self.matrix_shape
        here = (self.mean.dtype, self.mean.device)
        self.rows = Cholesky(self.lead, rows, half, *here)
        self.columns = Cholesky(self.lead, columns, half, *here)

    def deviation_from(self, n: int, draw: Draw) -> Float[Tensor, "n *shape"]:
        r"""$L_S E L_A^\top$."""
        noise = draw((n, *self.lead, *self.matrix_shape))
        drawn = self.rows.matrix() @ noise @ self.columns.matrix().mT
        return drawn.reshape(n, *self.mean.shape)

    def variance(self) -> Float[Tensor, "*shape"]:
        r"""$S_{oo} A_{ii}$."""
        S, A = (root.matrix().square().sum(-1) for root in (self.rows, self.columns))
        return (S.unsqueeze(-1) * A.unsqueeze(-2)).reshape(self.mean.shape)

    def trace(self) -> Tensor:
        r"""$\mathrm{tr} S \, \mathrm{tr} A$."""
        return self.rows.squared_norm() * self.columns.squared_norm()

    def log_det(self) -> Tensor:
        r"""$\mathrm{in} \log|S| + \mathrm{out} \log|A|$."""
        rows, columns = self.matrix_shape
        return columns * self.rows.log_det() + rows * self.columns.log_det()

    def mahalanobis(self, w: Float[Tensor, "n *shape"]) -> Float[Tensor, "n *batch"]:
        r"""$\|L_S^{-1} (W - M) L_A^{-\top}\|^2$."""
        white = self.rows.whiten(self._matrices(w - self.mean))
        white = self.columns.whiten(white.mT)
        return white.square().sum((-2, -1), dtype=torch.float64)

    def output_variance(self, x: Float[Tensor, "*lead rows in"]) -> Float[Tensor, "*lead rows out"]:
        r"""$S_{oo} \, x^\top A x$."""
        rows = self.rows.matrix().square().sum(-1).unsqueeze(-2)
        return self._spread(x).square() * rows

    def output_deviation(
        self, x: Float[Tensor, "*lead rows in"], n: int, draw: Draw
    ) -> Float[Tensor, "n *lead rows out"]:
        r"""$\|L_A^\top x\| \, L_S e$ (Louizos and Welling 2016)."""
        noise = draw((n, *x.shape[:-1], self.shape[0]))
        return self._spread(x) * (noise @ self.rows.matrix().mT)

    def _spread(self, x: Tensor) -> Tensor:
        seen = x @ self.columns.matrix()
        spread: Tensor = torch.linalg.vector_norm(seen, dim=-1, keepdim=True)
        return spread


def _equal(mean: Tensor, scale: float) -> nn.Parameter:
    """Log scales, one for each weight."""
    return nn.Parameter(torch.full_like(mean, math.log(scale)).detach())


def _root(variance: Tensor) -> Tensor:
    """Square root with a finite slope at zero."""
    return variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()
