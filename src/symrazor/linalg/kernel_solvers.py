r"""Evaluate $\log|I + K|$, $K = \sum_t w_t K_t$, and its derivatives for any weights w.

Up to `exact_rows` rows, all of every $K_t$ is computed (`ExactSolver`). For more rows, K is
approximated from r of its columns (`LowRankSolver`): with $C = K_{:,S}$ and $W = K_{S,S}$, the
Nyström approximation $\hat K = C W^{-1} C^\top$ leaves a residual $K - \hat K$ that is positive
semi-definite. As $\log\det$ is concave and increasing,

$$ \log|I + \hat K| \;\le\; \log|I + K| \;\le\; \log|I + \hat K| + \mathrm{tr}\, (K - \hat K) . $$

The upper end is used, so that the evidence is a lower bound. Columns are added until the trace is
at most `TOLERANCE_NATS`; they are drawn at random in proportion to the diagonal of the residual
(Chen, Epperly, Tropp and Webber 2024).

**New weights.** Let Q be an orthonormal basis of the columns of C at the first weights. For new
weights, the matrices $Q^\top C_t$ take the place of the columns $C_t$ of every tensor, so that
$\hat K$ becomes $Q Q^\top \hat K Q Q^\top$ at a cost that does not depend on the number of rows.
The interval is certified as before: by Fischer's inequality
$\log|I + K| \le \log|I + Q^\top K Q| + \mathrm{tr}\, K - \mathrm{tr}\, Q^\top K Q$, and
$\log|I + B| - \mathrm{tr}\, B$ decreases in B, so that $B = Q^\top \hat K Q$ may replace
$Q^\top K Q$. The eigenvalues of $Q^\top K Q$ interlace with those of K, which gives the lower end.
If the interval is too wide, the approximation is computed again from all rows.

**Rounding.** Products of float32 rows are taken in float32 where that is accurate enough. The error
of an entry is about $\epsilon |J_i| |J_j|$, and independent errors of all entries change the
log-determinant by at most $\epsilon \| D^{1/2} (I + K)^{-1} D^{1/2} \|_F \le \epsilon\,
\mathrm{tr}\, K$ (root mean square), where D is the diagonal of K. Where this exceeds
`MAX_ROUNDING_NATS`, products are taken in float64.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.core.errors import CurvatureError
from symrazor.linalg.eigen_jobs import LinAlgError
from symrazor.linalg.jacobian_rows import (
    BatchRows,
    Index,
    JacobianRows,
    Layout,
    Rows,
    inner_products,
)

TOLERANCE_NATS = 2.0
"""Largest trace of the residual of the approximation: the evidence is certain to half of it."""
FIRST_COLUMNS = 64
"""Columns of the first approximation."""
MAX_ADDED_COLUMNS = 1024
"""Columns are doubled until the approximation is accurate, by at most this many at a time."""
PIECE_ROWS = 1024
"""Rows that a CPU multiplies at once, approximately."""
GPU_PIECE_ROWS = 2**14
"""Rows that a GPU multiplies at once, approximately."""
MAX_RIGHT_ENTRIES = 2**26
"""Entries of the right rows of a product that are formed at once, approximately."""
MAX_COLUMN_SHARE = 0.2
"""Share of the columns from which computing all of them is cheaper."""
MAX_ROUNDING_NATS = 0.05
"""Largest estimated rounding error of the log-determinant for which products are in float32."""
JITTER = {torch.float32: 1e-6, torch.float64: 1e-12}
"""Added to the diagonal of the chosen rows and columns, relative to the largest entry of K."""

Weights = tuple[float, ...]


@dataclass(frozen=True)
class Products:
    """Inner products of the rows of each tensor.

    Args:
        names: names of the tensors.
        rows: rows of the Jacobian.
        layouts: tensor name -> map from blocks [k, o, i] to the layout of the parameter.
    """

    names: Sequence[str]
    rows: JacobianRows
    layouts: Mapping[str, Layout]

    @property
    def device(self) -> torch.device:
        """Device of the rows."""
        return self.rows.tensors[0].device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the rows."""
        return self.rows.tensors[0].dtype

    @cached_property
    def pieces(self) -> list[BatchRows]:
        """The rows, in parts that are multiplied at once."""
        size = GPU_PIECE_ROWS if self.device.type == "cuda" else PIECE_ROWS
        return [
            piece for batch in self.rows.batches for piece in batch.pieces(max(1, size // batch.c))
        ]

    def diagonals(self, dtype: torch.dtype) -> Float[Tensor, "t m"]:
        """Return the squared length of every row in every tensor, in float64."""
        lengths = []
        for name in self.names:
            parts = []
            for piece in self.pieces:
                rows = piece.tensors.get(name)
                if rows is None:
                    zeros = torch.zeros(piece.size, dtype=torch.float64, device=self.device)
                    parts.append(zeros)
                else:
                    parts.append(rows.squared_lengths(dtype))
            lengths.append(torch.cat(parts))
        return torch.stack(lengths)

    def gram(self, name: str, dtype: torch.dtype) -> Float[Tensor, "m m"]:
        """Return the inner products of all rows in one tensor."""
        total = torch.empty(self.rows.size, self.rows.size, dtype=dtype, device=self.device)
        start = 0
        for number, piece in enumerate(self.pieces):
            stop = start + piece.size
            total[start:, start:stop] = self._with(name, self.pieces[number:], piece, dtype)
            total[start:stop, stop:] = total[stop:, start:stop].T
            start = stop
        return total

    def columns(self, name: str, chosen: Index, dtype: torch.dtype) -> Float[Tensor, "m r"]:
        """Return the inner products of all rows with some of them."""
        parts = list(self.rows.pick(chosen))
        columns = [self._with(name, self.pieces, part, dtype) for part, _ in parts]
        result = columns[0].new_empty(self.rows.size, len(chosen))
        result[:, torch.cat([places for _, places in parts])] = torch.cat(columns, 1)
        return result

    def _with(
        self, name: str, left: Iterable[BatchRows], right: BatchRows, dtype: torch.dtype
    ) -> Float[Tensor, "l r"]:
        """Return the inner products of two sets of rows in one tensor."""
        rows, layout = right.tensors.get(name), self.layouts.get(name)
        parts, run = list[Tensor](), list[Rows]()
        for piece in left:
            part = piece.tensors.get(name)
            if part is not None and rows is not None:
                run.append(part)
                continue
            if run:
                parts.append(_in_portions(run, rows, layout, dtype))
                run = []
            parts.append(torch.zeros(piece.size, right.size, dtype=dtype, device=self.device))
        if run:
            parts.append(_in_portions(run, rows, layout, dtype))
        return torch.cat(parts)


def _in_portions(
    left: Sequence[Rows], right: Rows | None, layout: Layout | None, dtype: torch.dtype
) -> Float[Tensor, "l r"]:
    """Return inner products, forming a limited number of right rows at a time."""
    assert right is not None
    count = max(1, MAX_RIGHT_ENTRIES // (right.columns * right.width))
    portions = [right.select(slice(i, i + count)) for i in range(0, right.samples, count)]
    return torch.cat([inner_products(left, portion, layout, dtype) for portion in portions], 1)


class Solver(ABC):
    """Evaluate log|I + K| for any weights, from quantities that are computed once.

    Args:
        products: inner products of the rows.
        diagonals: diagonal of every K_t.
        dtype: precision of the products.
    """

    def __init__(self, products: Products, diagonals: Tensor, dtype: torch.dtype) -> None:
        self._products, self._diagonals, self._dtype = products, diagonals, dtype
        self._traces: list[float] = diagonals.sum(1).tolist()

    def trace(self, weights: Weights) -> float:
        """Return the trace of K."""
        return sum(w * trace for w, trace in zip(weights, self._traces, strict=True))

    def is_accurate(self, weights: Weights) -> bool:
        """Solve for these weights; False if the error is too large."""
        return self._dtype == torch.float64 or rounding_error(self.trace(weights)) <= 1

    @abstractmethod
    def value(self, weights: Weights) -> Float[Tensor, ""]:
        """Return the log-determinant."""

    @abstractmethod
    def slopes(self, weights: Weights) -> Float[Tensor, " t"]:
        """Return its derivatives in the weights."""

    @abstractmethod
    def residual(self, weights: Weights) -> float:
        """Return the width of the interval that contains the log-determinant."""


def rounding_error(trace: float) -> float:
    """Return the rounding error of float32 products as a fraction of the tolerated one."""
    return torch.finfo(torch.float32).eps * trace / MAX_ROUNDING_NATS


def accurate_solver(products: Products, weights: Weights, exact_rows: int) -> Solver:
    """Return the cheapest solver that is accurate for these weights."""
    diagonals = products.diagonals(products.dtype)
    trace = float(_combine(diagonals.sum(1).unsqueeze(1), weights))
    dtype = torch.float32
    if products.dtype == torch.float64 or rounding_error(trace) > 1:
        dtype, diagonals = torch.float64, products.diagonals(torch.float64)
    if products.rows.size > exact_rows:
        low_rank = LowRankSolver(products, diagonals, dtype)
        if low_rank.is_accurate(weights):
            return low_rank
    return ExactSolver(products, diagonals, dtype)


class ExactSolver(Solver):
    """All of every K_t."""

    def __init__(self, products: Products, diagonals: Tensor, dtype: torch.dtype) -> None:
        super().__init__(products, diagonals, dtype)
        self._grams = [products.gram(name, dtype) for name in products.names]
        self._latest: tuple[Weights, Tensor] | None = None
        self._slopes: tuple[Weights, Tensor] | None = None

    def value(self, weights: Weights) -> Float[Tensor, ""]:
        """Return the log-determinant by a Cholesky factor."""
        return 2 * self._cholesky(weights).diagonal().log().sum()

    def slopes(self, weights: Weights) -> Float[Tensor, " t"]:
        """Return tr (I + K)^-1 K_t."""
        if self._slopes is None or self._slopes[0] != weights:
            # The inverse has the precision of the products, which is accurate enough here as well.
            inverse = torch.cholesky_inverse(self._cholesky(weights).to(self._dtype))
            # Rows first: sums in float64 of float32 numbers are slow.
            traces = [(inverse * gram).sum(1).sum(dtype=torch.float64) for gram in self._grams]
            self._slopes = weights, torch.stack(traces)
        return self._slopes[1]

    def residual(self, weights: Weights) -> float:
        """Return zero."""
        return 0.0

    def _cholesky(self, weights: Weights) -> Float[Tensor, "m m"]:
        if self._latest is None or self._latest[0] != weights:
            self._latest = weights, cholesky(plus_identity_(_combine(self._grams, weights)))
        return self._latest[1]


@dataclass(frozen=True)
class _Solution:
    r"""The approximation for given weights.

    Args:
        weights: the weights.
        columns: C_t of every tensor, or Q' C_t.
        L: Cholesky factor of W.
        F: factor of the approximation, $\hat K = F F^\top$, so that C = F L'.
        remaining: trace of the residual.
    """

    weights: Weights
    columns: Sequence[Tensor]
    L: Float[Tensor, "r r"]
    F: Float[Tensor, "m r"]
    remaining: float

    @cached_property
    def gram(self) -> Float[Tensor, "r r"]:
        """F' F."""
        return self.F.mT @ self.F

    @cached_property
    def inner(self) -> Float[Tensor, "r r"]:
        """Cholesky factor of I + F' F."""
        return cholesky(plus_identity_(self.gram.clone()))


class LowRankSolver(Solver):
    """Some columns of every K_t, and its diagonal."""

    def __init__(self, products: Products, diagonals: Tensor, dtype: torch.dtype) -> None:
        super().__init__(products, diagonals, dtype)
        self._generator = torch.Generator().manual_seed(0)
        self._chosen = torch.zeros(0, dtype=torch.long, device=diagonals.device)
        empty = torch.zeros(diagonals.shape[1], 0, dtype=dtype, device=diagonals.device)
        self._columns = [empty for _ in products.names]
        # W_t, the chosen rows of the columns
        self._corners = [empty[:0].double() for _ in products.names]
        self._reduced: list[Tensor] | None = None  # Q' C_t
        self._latest: _Solution | None = None

    def is_accurate(self, weights: Weights) -> bool:
        """Solve for these weights, with more columns if needed; False if that takes too many."""
        if self._latest is not None and self._latest.weights == weights:
            return True
        if not super().is_accurate(weights):
            return False
        if self._latest is not None and self._reduced is None:
            basis: Tensor = torch.linalg.qr(self._latest.F.to(self._dtype)).Q.mT
            self._reduced = [basis @ columns for columns in self._columns]
        try:
            return self._solve(weights)
        except CurvatureError:  # the chosen rows are singular to rounding
            return False

    def _solve(self, weights: Weights) -> bool:
        if self._reduced is not None:
            self._latest = self._solution(self._reduced, weights)
            if self._latest.remaining <= TOLERANCE_NATS:
                return True
            self._reduced = None
        self._latest = None  # frees its memory
        latest = self._solution(self._columns, weights)
        while latest.remaining > TOLERANCE_NATS:
            if len(self._chosen) >= MAX_COLUMN_SHARE * self._diagonals.shape[1]:
                return False
            self._add_columns(latest)
            latest = self._solution(self._columns, weights)
        self._latest = latest
        return True

    def value(self, weights: Weights) -> Float[Tensor, ""]:
        """Return the upper end of the interval."""
        solution = self._solution_for(weights)
        return 2 * solution.inner.diagonal().log().sum() + solution.remaining

    def slopes(self, weights: Weights) -> Float[Tensor, " t"]:
        r"""Return the derivatives of the upper end.

        With $M = W + C^\top C$ the upper end is
        $\log|M| - \log|W| + \mathrm{tr}\,K - \mathrm{tr}\,W^{-1} C^\top C$, where C and W are
        linear in the weights.
        """
        solution = self._solution_for(weights)
        L, F = solution.L, solution.F
        change = torch.cholesky_inverse(solution.inner)
        change.diagonal().sub_(1)  # L' (M^-1 - W^-1) L
        eye = torch.eye(len(L), dtype=L.dtype, device=L.device)
        inverse: Tensor = torch.linalg.solve_triangular(L, eye, upper=False)
        on_corner = inverse.mT @ (change + solution.gram) @ inverse
        on_columns = (2 * F @ (change @ inverse)).to(self._dtype)
        traces = [
            trace + (columns * on_columns).sum(dtype=torch.float64) + (corner * on_corner).sum()
            for trace, columns, corner in zip(
                self._traces, solution.columns, self._corners, strict=True
            )
        ]
        return torch.stack(traces)

    def residual(self, weights: Weights) -> float:
        """Return the trace of the residual."""
        return self._solution_for(weights).remaining

    def _solution_for(self, weights: Weights) -> _Solution:
        assert self._latest is not None and self._latest.weights == weights
        return self._latest

    def _solution(self, columns: Sequence[Tensor], weights: Weights) -> _Solution:
        """Return the approximation from these columns."""
        if not len(self._chosen):
            empty = self._diagonals.new_zeros(0, 0)
            F = self._diagonals.new_zeros(len(columns[0]), 0)
            return _Solution(weights, columns, empty, F, self.trace(weights))
        W = _combine(self._corners, weights)
        jitter = JITTER[self._dtype] * float(_combine(self._diagonals, weights).max())
        W.diagonal().add_(jitter)
        L = cholesky(W)
        C = _combine(columns, weights)
        F = torch.linalg.solve_triangular(L, C.mT, upper=False).mT
        remaining = self.trace(weights) - float(F.square().sum())
        return _Solution(weights, columns, L, F, max(0.0, remaining))

    def _add_columns(self, solution: _Solution) -> None:
        """Add columns drawn in proportion to the diagonal of the residual."""
        diagonal = _combine(self._diagonals, solution.weights)
        remaining = (diagonal - solution.F.square().sum(1)).clamp(min=0)
        remaining[self._chosen] = 0
        allowed = math.ceil(MAX_COLUMN_SHARE * len(diagonal)) - len(self._chosen)
        wanted = min(max(FIRST_COLUMNS, min(len(self._chosen), MAX_ADDED_COLUMNS)), allowed)
        count = min(wanted, int((remaining > 0).sum()))
        drawn = torch.multinomial(remaining.cpu(), count, generator=self._generator)
        drawn = drawn.to(remaining.device)
        self._chosen = torch.cat([self._chosen, drawn])
        self._columns = [
            torch.cat([columns, self._products.columns(name, drawn, self._dtype)], 1)
            for name, columns in zip(self._products.names, self._columns, strict=True)
        ]
        self._corners = [columns[self._chosen].double() for columns in self._columns]


def _combine(tensors: Sequence[Tensor] | Tensor, weights: Weights) -> Tensor:
    """Return the weighted sum in float64, added in the precision of the tensors."""
    total = tensors[0] * weights[0]
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        total.add_(tensor, alpha=weight)
    return total.double()


def plus_identity_(K: Float[Tensor, "m m"]) -> Float[Tensor, "m m"]:
    """Add the identity in place."""
    K.diagonal().add_(1)
    return K


def cholesky(matrix: Float[Tensor, "m m"]) -> Float[Tensor, "m m"]:
    """Return the Cholesky factor, or raise CurvatureError."""
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
