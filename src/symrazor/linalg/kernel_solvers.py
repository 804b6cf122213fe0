r"""Evaluate $\log|I + K|$, $K = \sum_t w_t K_t$, and its derivatives for any weights w.

`ExactSolver` computes all of every $K_t$. `linalg.low_rank_solver` approximates K from some of its
columns, for more rows.

**Rounding.** Products of float32 rows are taken in float32 where that is accurate enough. The error
of an entry is about $\epsilon |J_i| |J_j|$, and independent errors of all entries change the
log-determinant by at most $\epsilon \| D^{1/2} (I + K)^{-1} D^{1/2} \|_F \le \epsilon\,
\mathrm{tr}\, K$ (root mean square), where D is the diagonal of K. Where this exceeds
`MAX_ROUNDING_NATS`, products are taken in float64.
"""

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

PIECE_ROWS = 1024
"""Rows that a CPU multiplies at once, approximately."""
GPU_PIECE_ROWS = 2**14
"""Rows that a GPU multiplies at once, approximately."""
MAX_RIGHT_ENTRIES = 2**26
"""Entries of the right rows of a product that are formed at once, approximately."""
MAX_ROUNDING_NATS = 0.05
"""Largest estimated rounding error of the log-determinant for which products are in float32."""
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
            self._latest = weights, cholesky(plus_identity_(combine(self._grams, weights)))
        return self._latest[1]


def combine(tensors: Sequence[Tensor] | Tensor, weights: Weights) -> Tensor:
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
