r"""Compute the log-determinant of the full Gauss-Newton matrix in kernel form.

With the rows $J_t$ of every tensor t, the precision $\delta_t$ of its prior, $w_t = 1/\delta_t$ and
$K_t = J_t J_t^\top$,

$$ \log |I + \Delta^{-1} J^\top J| = \log |I + K|, \qquad K = \sum_t w_t K_t , $$

a matrix with one row per sample and column of the root of the output Hessian, whatever the number
of weights. The matrices $K_t$ are computed once. The value, the effective parameters
$\gamma_t = w_t\, \mathrm{tr}\,[(I + K)^{-1} K_t]$ and MacKay's updates for any precisions then need
no further pass over the data.

Up to `EXACT_ROWS` rows, all of $K_t$ is computed. For more rows, K is approximated from r of its
columns: with $C = K_{:,S}$ and $W = K_{S,S}$, the Nyström approximation $\hat K = C W^{-1} C^\top$
leaves a residual $R = K - \hat K$ that is positive semi-definite. As $\log\det$ is concave and
increasing,

$$ \log|I + \hat K| \;\le\; \log|I + K| \;\le\; \log|I + \hat K| + \mathrm{tr}\, R . $$

The upper end is used, so that the evidence is a lower bound. Columns are added until
$\mathrm{tr}\,R$ is at most `TOLERANCE_NATS`; they are drawn at random in proportion to the diagonal
of R (Chen, Epperly, Tropp and Webber 2024).

**Bounds.** $I + K$ is positive definite. Fischer's inequality bounds the determinant of such a
matrix by the product of the determinants of its diagonal blocks. Leaving out the entries of K
between blocks of samples, or between columns of the root, therefore never lowers the
log-determinant, and never raises the evidence:

1. Blocks that partition the samples give a lower bound of the evidence. Merging blocks tightens it;
   one block is exact.
2. Independent outputs (one block per column of the root) give a lower bound, too.
3. A random subset of n of N samples as one block, its log-determinant times N/n, has as its
   expectation the mean of (1) over all partitions into blocks of n. It is a lower bound in
   expectation, not for each draw. The same holds for one random column, times their number.
4. Scaling the matrix of a subset instead, $\log|I + (N/n) \Delta^{-1} H_n|$, is no lower bound: by
   Jensen's inequality, its expectation is at most $\log|I + \Delta^{-1} H|$.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.core.errors import CurvatureError
from symrazor.linalg.blocks import Block, LogPrecisions
from symrazor.linalg.eigen_jobs import LinAlgError, Spectrum, eigenvalues, eigenvectors
from symrazor.linalg.jacobian_rows import BatchRows, Index, JacobianRows, Layout, inner_products

EXACT_ROWS = 1000
"""Kernels with more rows are approximated from some of their columns."""
TOLERANCE_NATS = 2.0
"""Largest trace of the residual of the approximation: the evidence is certain to half of it."""
MIN_ADDED_COLUMNS = 256
"""Columns are added in steps of this many, or of half of the present ones if that is more."""
PIECE_ROWS = 1024
"""Rows that are formed at once, approximately."""
MAX_COLUMN_SHARE = 0.4
"""Share of the columns from which computing all of them is cheaper."""
JITTER = 1e-12
"""Added to the diagonal of the chosen rows and columns, relative to its largest entry."""


@dataclass
class Kernel(Block):
    """The full Gauss-Newton matrix of some samples in kernel form.

    Args:
        shapes: tensor name -> shape.
        rows: rows of the Jacobian.
        scale: factor of the Gauss-Newton matrix.
        repeats: factor of the log-determinant, the size of the data set over the samples read.
        layouts: tensor name -> map from blocks [k, o, i] to the layout of the parameter.
        exact_rows: up to this many rows, no approximation is made.
    """

    shapes: dict[str, torch.Size]
    rows: JacobianRows
    scale: float = 1.0
    repeats: float = 1.0
    layouts: Mapping[str, Layout] = field(default_factory=dict, repr=False)
    exact_rows: int = EXACT_ROWS

    def __post_init__(self) -> None:
        self.names = tuple(self.shapes)
        self._kept_solver: _Solver | None = None

    def logdet(self, log_precision: LogPrecisions) -> Tensor:
        r"""Return $\log|I + \Delta^{-1} H|$, differentiable in log precisions and rows."""
        for name in self.names:
            if log_precision[name].dim():
                raise ValueError(
                    f"Tensor {name} has one prior precision per weight, but the kernel form needs "
                    "one per tensor. Use structure='full' or 'diag', or prior_groups='tensor'."
                )
        log_weights = torch.stack([-log_precision[name].double() for name in self.names])
        if any(tensor.requires_grad for tensor in self.rows.tensors):
            return self._differentiable_logdet(log_weights)
        value: Tensor = _LogDeterminant.apply(log_weights, self)  # type: ignore[no-untyped-call]
        return value

    def _differentiable_logdet(self, log_weights: Float[Tensor, " t"]) -> Tensor:
        root = (0.5 * log_weights).exp().unbind()
        parts = [w * self.jacobian(name) for name, w in zip(self.names, root, strict=True)]
        B = torch.cat(parts, 1) * math.sqrt(self.scale)
        K = B @ B.mT + torch.eye(len(B), dtype=B.dtype, device=B.device)
        L: Tensor = torch.linalg.cholesky(K)
        return self.repeats * 2 * L.diagonal().log().sum()

    def residual(self, log_precision: LogPrecisions) -> float:
        """Return the width of the interval that contains the log-determinant, in nats."""
        if any(tensor.requires_grad for tensor in self.rows.tensors):
            return 0.0  # computed without approximation
        weights = self._weights(log_precision)
        return self.repeats * self._solver(weights).residual(weights)

    def _weights(self, log_precision: LogPrecisions) -> tuple[float, ...]:
        return tuple(
            self.scale * float((-log_precision[name].detach()).exp()) for name in self.names
        )

    def _solver(self, weights: "Weights") -> "_Solver":
        """Return an approximation that is accurate for these weights, or the exact solver."""
        if self._kept_solver is None:
            exact = self.rows.size <= self.exact_rows
            self._kept_solver = _Exact(self) if exact else _LowRank(self)
        if isinstance(self._kept_solver, _LowRank) and not self._kept_solver.is_accurate(weights):
            self._kept_solver = _Exact(self)
        return self._kept_solver

    def jacobian(self, name: str) -> Float[Tensor, "m p"]:
        """Return the rows of a tensor in float64."""
        layout, width = self.layouts.get(name), self.shapes[name].numel()
        parts = []
        for batch in self.rows.batches:
            part = batch.tensors.get(name)
            if part is None:  # it does not act on the outputs
                parts.append(
                    torch.zeros(batch.size, width, dtype=torch.float64, device=self.device)
                )
            else:
                parts.append(part.matrix(layout).double())
        return torch.cat(parts)

    @property
    def device(self) -> torch.device:
        """Device of the rows."""
        return self.rows.tensors[0].device

    @cached_property
    def pieces(self) -> list[BatchRows]:
        """The rows, about `PIECE_ROWS` at a time."""
        return [
            piece
            for batch in self.rows.batches
            for piece in batch.pieces(max(1, PIECE_ROWS // batch.c))
        ]

    def gauss_newton(self) -> Float[Tensor, "p p"]:
        r"""Return H; for networks with fewer weights than rows."""
        size = sum(shape.numel() for shape in self.shapes.values())
        total = torch.zeros(size, size, dtype=torch.float64, device=self.device)
        for piece in self.pieces:
            J = Kernel(self.shapes, JacobianRows([piece]), self.scale, layouts=self.layouts).whole
            total = total + J.mT @ J
        return total

    # The posterior.

    @property
    def whole(self) -> Float[Tensor, "m p"]:
        """Rows of all tensors side by side, scaled."""
        root = math.sqrt(self.scale)
        return torch.cat([self.jacobian(name) for name in self.names], 1) * root

    @property
    def _label(self) -> str:
        return ", ".join(self.names)

    @property
    def _resolution(self) -> float:
        return torch.finfo(self.rows.tensors[0].dtype).eps

    @property
    def spectrum(self) -> Float[Tensor, " m"]:
        """Eigenvalues of H; zeros may be missing."""
        J = self.whole
        return eigenvalues(J @ J.mT, self._label, self._resolution)

    def prepare(self) -> list[Spectrum]:
        """Return no jobs: there are no eigenvalues."""
        return []

    def _deviations(self, log_precision: LogPrecisions) -> Float[Tensor, " p"]:
        parts = [
            (-0.5 * log_precision[name].detach()).exp().expand(shape).reshape(-1)
            for name, shape in self.shapes.items()
        ]
        return torch.cat(parts)

    def draw(
        self, log_precision: LogPrecisions, noise: Float[Tensor, "s p"]
    ) -> Float[Tensor, "s p"]:
        r"""Multiply the noise by a root of the covariance.

        With $B = J \Delta^{-1/2}$ and $B B^\top = U \lambda U^\top$,
        $(I + B^\top B)^{-1/2} = I + B^\top U \frac{(1 + \lambda)^{-1/2} - 1}{\lambda} U^\top B$.
        """
        deviation = self._deviations(log_precision)
        B = self.whole * deviation
        values, vectors = eigenvectors(B @ B.mT, self._label, self._resolution)
        root = (1 + values).sqrt()
        shrinkage = -1 / (root * (1 + root))  # ((1 + x)^(-1/2) - 1) / x without cancellation
        white = noise.double()
        inside = (vectors * shrinkage) @ (vectors.mT @ (B @ white.mT))
        return (white + (B.mT @ inside).mT) * deviation

    def covariance(
        self, log_precision: LogPrecisions, jacobian: Float[Tensor, "n c p"]
    ) -> Float[Tensor, "n c c"]:
        r"""Return $\tilde J \tilde J^\top - \tilde J B^\top (I + B B^\top)^{-1} B \tilde J^\top$.

        $\tilde J$ is the Jacobian scaled by the prior's standard deviations.
        """
        deviation = self._deviations(log_precision)
        B, scaled = self.whole * deviation, jacobian.double() * deviation
        L = _cholesky(_plus_identity_(B @ B.mT))
        half: Tensor = torch.linalg.solve_triangular(L, B @ scaled.flatten(0, 1).mT, upper=False)
        explained: Tensor = half.mT.unflatten(0, scaled.shape[:2])
        return scaled @ scaled.mT - explained @ explained.mT


class _LogDeterminant(torch.autograd.Function):
    """Compute log|I + K|; its derivatives in the log weights are the effective parameters."""

    @staticmethod
    def forward(ctx: Any, log_weights: Float[Tensor, " t"], kernel: Kernel) -> Tensor:
        """Return the value."""
        ctx.kernel = kernel
        ctx.weights = tuple((kernel.scale * log_weights.exp()).tolist())
        value = kernel._solver(ctx.weights).value(ctx.weights)
        return value * kernel.repeats

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the effective parameters times the gradient."""
        kernel: Kernel = ctx.kernel
        slopes = kernel._solver(ctx.weights).slopes(ctx.weights)
        weights = slopes.new_tensor(ctx.weights)
        return gradients[0] * kernel.repeats * weights * slopes, None


Weights = tuple[float, ...]


class _Solver(ABC):
    """Evaluate log|I + K| for any weights, from quantities that are computed once."""

    @abstractmethod
    def value(self, weights: Weights) -> Float[Tensor, ""]:
        """Return the log-determinant."""

    @abstractmethod
    def slopes(self, weights: Weights) -> Float[Tensor, " t"]:
        """Return its derivatives in the weights."""

    @abstractmethod
    def residual(self, weights: Weights) -> float:
        """Return the width of the interval that contains the log-determinant."""


class _Exact(_Solver):
    """All of every K_t."""

    def __init__(self, kernel: Kernel) -> None:
        self._grams = [_gram(kernel, name) for name in kernel.names]
        self._latest: tuple[Weights, Tensor] | None = None

    def value(self, weights: Weights) -> Float[Tensor, ""]:
        """Return the log-determinant by a Cholesky factor."""
        return 2 * self._cholesky(weights).diagonal().log().sum()

    def slopes(self, weights: Weights) -> Float[Tensor, " t"]:
        """Return tr (I + K)^-1 K_t."""
        inverse = torch.cholesky_inverse(self._cholesky(weights))
        return torch.stack([(inverse * gram).sum() for gram in self._grams])

    def residual(self, weights: Weights) -> float:
        """Return zero."""
        return 0.0

    def _cholesky(self, weights: Weights) -> Float[Tensor, "m m"]:
        if self._latest is None or self._latest[0] != weights:
            self._latest = weights, _cholesky(_plus_identity_(_combine(self._grams, weights)))
        return self._latest[1]


class _Approximation(NamedTuple):
    r"""The Nyström approximation for given weights.

    Args:
        L: Cholesky factor of W.
        F: the factor of the approximation, $\hat K = F F^\top$, so that C = F L'.
        remaining: diagonal of the residual.
    """

    L: Float[Tensor, "r r"]
    F: Float[Tensor, "m r"]
    remaining: Float[Tensor, " m"]


class _LowRank(_Solver):
    """Some columns of every K_t, and its diagonal."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._generator = torch.Generator().manual_seed(0)
        self._diagonals = torch.stack([_diagonal(kernel, name) for name in kernel.names])
        self._columns: list[list[Tensor]] = []  # columns of every tensor, step by step
        self._chosen = torch.zeros(0, dtype=torch.long, device=kernel.device)
        self._latest: tuple[Weights, _Approximation, Tensor, Tensor] | None = None

    def is_accurate(self, weights: Weights) -> bool:
        """Add columns until the residual is small enough; False if that takes too many."""
        if self._latest is None or self._latest[0] != weights:
            self._latest = None  # free its memory first
            approximation = self._approximate(weights)
            while float(approximation.remaining.sum()) > TOLERANCE_NATS:
                if len(self._chosen) >= MAX_COLUMN_SHARE * len(approximation.remaining):
                    return False
                approximation = self._extend(approximation, weights)
            gram = approximation.F.mT @ approximation.F
            inner = _cholesky(_plus_identity_(gram.clone()))
            self._latest = weights, approximation, gram, inner
        return True

    def value(self, weights: Weights) -> Float[Tensor, ""]:
        """Return the upper end of the interval."""
        approximation, _, inner = self._solve(weights)
        return 2 * inner.diagonal().log().sum() + approximation.remaining.sum()

    def slopes(self, weights: Weights) -> Float[Tensor, " t"]:
        r"""Return the derivatives of the upper end.

        With $M = W + C^\top C$ the upper end is
        $\log|M| - \log|W| + \mathrm{tr}\,K - \mathrm{tr}\,W^{-1} C^\top C$, where C and W are
        linear in the weights.
        """
        (L, F, _), gram, inner = self._solve(weights)
        change = torch.cholesky_inverse(inner)
        change.diagonal().sub_(1)  # L' (M^-1 - W^-1) L
        eye = torch.eye(len(L), dtype=L.dtype, device=L.device)
        inverse: Tensor = torch.linalg.solve_triangular(L, eye, upper=False)
        on_chosen = inverse.mT @ (change + gram) @ inverse
        on_columns = 2 * F @ (change @ inverse)
        traces = []
        for number, diagonal in enumerate(self._diagonals):
            trace, start = diagonal.sum(), 0
            for step in self._columns:
                columns = step[number]
                part = slice(start, start + columns.shape[1])
                trace = trace + (columns * on_columns[:, part]).sum()
                trace = trace + (columns[self._chosen] * on_chosen[:, part]).sum()
                start = part.stop
            traces.append(trace)
        return torch.stack(traces)

    def residual(self, weights: Weights) -> float:
        """Return the trace of the residual."""
        return float(self._solve(weights)[0].remaining.sum())

    def _solve(self, weights: Weights) -> tuple[_Approximation, Tensor, Tensor]:
        """Return the approximation, F'F, and the Cholesky factor of I + F'F."""
        assert self._latest is not None and self._latest[0] == weights
        return self._latest[1:]

    def _approximate(self, weights: Weights) -> _Approximation:
        """Return the approximation from the present columns."""
        empty = self._diagonals.new_zeros(self._diagonals.shape[1], 0)
        C = torch.cat([empty, *(_combine(step, weights) for step in self._columns)], 1)
        L = _cholesky(_with_jitter_(C[self._chosen]))
        F: Tensor = torch.linalg.solve_triangular(L, C.mT, upper=False).mT
        return _Approximation(L, F, self._remaining(F, weights))

    def _remaining(self, F: Tensor, weights: Weights) -> Float[Tensor, " m"]:
        remaining = (_combine(self._diagonals, weights) - F.square().sum(1)).clamp(min=0)
        remaining[self._chosen] = 0
        return remaining

    def _extend(self, approximation: _Approximation, weights: Weights) -> _Approximation:
        """Add columns drawn in proportion to the diagonal of the residual."""
        L, F, remaining = approximation
        count = min(max(MIN_ADDED_COLUMNS, len(L) // 2), int((remaining > 0).sum()))
        drawn = torch.multinomial(remaining.cpu(), count, generator=self._generator)
        drawn = drawn.to(remaining.device)
        added = [_columns(self._kernel, name, drawn) for name in self._kernel.names]
        self._columns.append(added)
        self._chosen = torch.cat([self._chosen, drawn])
        unexplained = _combine(added, weights) - F @ F[drawn].mT
        corner = _cholesky(_with_jitter_(unexplained[drawn]))
        more_F: Tensor = torch.linalg.solve_triangular(corner, unexplained.mT, upper=False).mT
        lower = torch.cat([F[drawn], corner], 1)
        L = torch.cat([torch.nn.functional.pad(L, (0, count)), lower])
        F = torch.cat([F, more_F], 1)
        return _Approximation(L, F, self._remaining(F, weights))


def _with_jitter_(matrix: Float[Tensor, "r r"]) -> Float[Tensor, "r r"]:
    if len(matrix):
        matrix.diagonal().add_(JITTER * matrix.diagonal().max())
    return matrix


def _combine(tensors: Sequence[Tensor] | Tensor, weights: Weights) -> Tensor:
    total = torch.zeros_like(tensors[0])
    for tensor, weight in zip(tensors, weights, strict=True):
        total.add_(tensor, alpha=weight)
    return total


def _gram(kernel: Kernel, name: str) -> Float[Tensor, "m m"]:
    """Return the inner products of all rows in one tensor, in float64."""
    size = kernel.rows.size
    total = torch.zeros(size, size, dtype=torch.float64, device=kernel.device)
    stop = 0
    for number, left in enumerate(kernel.pieces):
        start, stop = stop, stop + left.size
        before = [_products(kernel, name, left, right) for right in kernel.pieces[: number + 1]]
        total[start:stop, :stop] = torch.cat(before, 1)
        total[:start, start:stop] = total[start:stop, :start].T
    return total


def _columns(kernel: Kernel, name: str, rows: Index) -> Float[Tensor, "m r"]:
    """Return the inner products of all rows with some of them."""
    parts = list(kernel.rows.pick(rows))
    columns = torch.cat(
        [
            torch.cat([_products(kernel, name, piece, part) for piece in kernel.pieces])
            for part, _ in parts
        ],
        1,
    )
    result = torch.empty_like(columns)
    result[:, torch.cat([places for _, places in parts])] = columns
    return result


def _products(kernel: Kernel, name: str, left: BatchRows, right: BatchRows) -> Float[Tensor, "l r"]:
    """Return the inner products of two sets of rows in one tensor."""
    left_rows, right_rows = left.tensors.get(name), right.tensors.get(name)
    if left_rows is None or right_rows is None:
        return torch.zeros(left.size, right.size, dtype=torch.float64, device=kernel.device)
    return inner_products(left_rows, right_rows, kernel.layouts.get(name))


def _diagonal(kernel: Kernel, name: str) -> Float[Tensor, " m"]:
    """Return the squared length of every row in one tensor."""
    parts = []
    for piece in kernel.pieces:
        rows = piece.tensors.get(name)
        if rows is None:
            parts.append(torch.zeros(piece.size, dtype=torch.float64, device=kernel.device))
        else:
            parts.append(rows.squared_lengths())
    return torch.cat(parts)


def _plus_identity_(K: Float[Tensor, "m m"]) -> Float[Tensor, "m m"]:
    K.diagonal().add_(1)
    return K


def _cholesky(matrix: Float[Tensor, "m m"]) -> Float[Tensor, "m m"]:
    if not bool(torch.isfinite(matrix.diagonal()).all()):
        raise CurvatureError(
            "The kernel of the curvature contains NaN or infinity. The weights have probably "
            "diverged: lower the learning rate."
        )
    try:
        L: Tensor = torch.linalg.cholesky(matrix)
    except LinAlgError as error:
        raise CurvatureError(
            "The kernel of the curvature is singular to rounding. Use larger prior precisions."
        ) from error
    return L
