r"""Evaluate $\log|I + K|$ from some columns of K, as an upper end that is certified.

`LowRankSolver` approximates K from r of its columns: with $C = K_{:,S}$ and $W = K_{S,S}$, the
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
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.core.errors import CurvatureError
from symrazor.linalg.kernel_solvers import (
    Products,
    Solver,
    Weights,
    cholesky,
    combine,
    plus_identity_,
)

TOLERANCE_NATS = 2.0
"""Largest trace of the residual of the approximation: the evidence is certain to half of it."""
FIRST_COLUMNS = 64
"""Columns of the first approximation."""
MAX_ADDED_COLUMNS = 1024
"""Columns are doubled until the approximation is accurate, by at most this many at a time."""
MAX_COLUMN_SHARE = 0.2
"""Share of the columns from which computing all of them is cheaper."""
JITTER = {torch.float32: 1e-6, torch.float64: 1e-12}
"""Added to the diagonal of the chosen rows and columns, relative to the largest entry of K."""


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
        W = combine(self._corners, weights)
        jitter = JITTER[self._dtype] * float(combine(self._diagonals, weights).max())
        W.diagonal().add_(jitter)
        L = cholesky(W)
        C = combine(columns, weights)
        F = torch.linalg.solve_triangular(L, C.mT, upper=False).mT
        remaining = self.trace(weights) - float(F.square().sum())
        return _Solution(weights, columns, L, F, max(0.0, remaining))

    def _add_columns(self, solution: _Solution) -> None:
        """Add columns drawn in proportion to the diagonal of the residual."""
        diagonal = combine(self._diagonals, solution.weights)
        remaining = (diagonal - solution.F.square().sum(1)).clamp(min=0)
        remaining[self._chosen] = 0
        allowed = math.ceil(MAX_COLUMN_SHARE * len(diagonal)) - len(self._chosen)
        proposed = min(max(FIRST_COLUMNS, min(len(self._chosen), MAX_ADDED_COLUMNS)), allowed)
        count = min(proposed, int((remaining > 0).sum()))
        drawn = torch.multinomial(remaining.cpu(), count, generator=self._generator)
        drawn = drawn.to(remaining.device)
        self._chosen = torch.cat([self._chosen, drawn])
        self._columns = [
            torch.cat([columns, self._products.columns(name, drawn, self._dtype)], 1)
            for name, columns in zip(self._products.names, self._columns, strict=True)
        ]
        self._corners = [columns[self._chosen].double() for columns in self._columns]
