r"""Likelihoods of dense outputs: one label for every pixel or token.

With positions t, $p(y \mid f) = \prod_t p(y_t \mid f_t)$, so that the output Hessian has one block
for each position. Positions without a label have no term and no curvature.
"""

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.core.likelihood.base import (
    Likelihood,
    Probe,
    as_likelihood,
    register_likelihood,
)

Rows = Float[Tensor, "nt k"]


@register_likelihood("per_position")
class PerPosition(Likelihood):
    r"""One label at every position: $p(y \mid f) = \prod_t p(y_t \mid f_t)$.

    Outputs are images [n, k, height, width] or sequences [n, t, k] with labels [n, height, width]
    or [n, t]; labels of a Gaussian, Bernoulli or Poisson likelihood have the shape of the outputs.
    The exact curvature has K - 1 columns for every position of a classifier. With
    `estimator="mc"`, one probe covers all positions.

    Args:
        each: likelihood of one position, or its name.
        ignore: label of positions that do not count.
        outputs: dimension of the k outputs of a position; by default the last one of sequences
            [n, t, k], and the second one of images and volumes.
    """

    def __init__(
        self,
        each: str | Likelihood = "categorical",
        ignore: float = -100,
        outputs: Literal["second", "last"] | None = None,
    ) -> None:
        super().__init__()
        self.each = as_likelihood(each)
        self.ignore = ignore
        if outputs not in (None, "second", "last"):
            raise ValueError(f"outputs must be 'second' or 'last', got {outputs!r}.")
        self.outputs = outputs

    def _dimension(self, f: Tensor) -> int:
        """Return the dimension of the k outputs."""
        is_last = f.dim() == 3 if self.outputs is None else self.outputs == "last"
        return -1 if is_last else 1

    def _rows(self, f: Tensor) -> Rows:
        """Return the outputs of all positions, one row each."""
        moved = f.movedim(self._dimension(f), -1)
        return moved.reshape(-1, moved.shape[-1])

    def _restore(self, rows: Float[Tensor, "*s nt k"], f: Tensor) -> Tensor:
        """Undo `_rows`."""
        dimension = self._dimension(f)
        moved = f.movedim(dimension, -1)
        lead = rows.shape[:-2]
        split = rows.reshape(*lead, *moved.shape[:-1], rows.shape[-1])
        return split.movedim(-1, dimension if dimension < 0 else dimension + len(lead))

    def _labels(self, f: Tensor, y: Tensor) -> tuple[Tensor, Float[Tensor, " nt"]]:
        """Return the labels of all positions, those that do not count replaced, and a mask."""
        is_class = y.dim() == f.dim() - 1
        rows = y.reshape(-1) if is_class else self._rows(y)
        counts = rows != self.ignore
        labels = torch.where(counts, rows, torch.zeros_like(rows))
        return labels, (counts if is_class else counts.all(-1))

    def nll(self, f: Tensor, y: Tensor) -> Float[Tensor, " n"]:
        """Return the sum over the positions that count."""
        labels, counts = self._labels(f, y)
        terms = self.each.nll(self._rows(f), labels)
        return torch.where(counts, terms, torch.zeros_like(terms)).reshape(len(f), -1).sum(1)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the gradient of `nll`, zero where no label counts."""
        labels, counts = self._labels(f, y)
        return self._restore(self.each.residual(self._rows(f), labels) * counts.unsqueeze(1), f)

    def hessian_root(self, f: Tensor) -> Float[Tensor, "c n *k"]:
        """Return the columns of every position, zero at all others."""
        rows = self.each.hessian_root(self._rows(f))
        c, n, t = len(rows), len(f), len(rows[0]) // len(f)
        split = rows.reshape(c, n, t, -1)
        columns = torch.einsum("cntk,tu->ucntk", split, torch.eye(t).to(split))
        return self._restore(columns.reshape(t * c, n * t, -1), f)

    def n_columns(self, f: Tensor) -> int:
        """Return the number of columns of `hessian_root`."""
        rows = self._rows(f[:1])
        return len(rows) * self.each.n_columns(rows[:1])

    def probe_numbers(self, f: Tensor, samples: int) -> int:
        """Return the numbers of all positions."""
        rows = self._rows(f[:1])
        return len(rows) * self.each.probe_numbers(rows[:1], samples)

    def sampled_root(
        self,
        f: Tensor,
        samples: int,
        generator: torch.Generator | None = None,
        probe: Probe = "spectral",
    ) -> Float[Tensor, "s n *k"]:
        """Draw probes that cover all positions; signs of positions are independent."""
        rows = self.each.sampled_root(self._rows(f), samples, generator, probe)
        return self._restore(rows, f)

    def masked_root(self, root: Float[Tensor, "c n *k"], y: Tensor) -> Float[Tensor, "c n *k"]:
        """Set the root to zero where no label counts."""
        _, counts = self._labels(root[0], y)
        mask = self._restore(counts.unsqueeze(1).to(root.dtype), root[0])
        return root * mask

    def sample(self, f: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draw a label for every position."""
        drawn = self.each.sample(self._rows(f), generator)
        if drawn.dim() == 1:
            moved = f.movedim(self._dimension(f), -1)
            return drawn.reshape(moved.shape[:-1])
        return self._restore(drawn, f)

    def mean(self, f: Tensor) -> Tensor:
        """Return the mean at every position."""
        return self._restore(self.each.mean(self._rows(f)), f)

    def noise_variance(self, mean: Tensor) -> Tensor | None:
        """Return the variance of y at every position, or None for class labels."""
        variance = self.each.noise_variance(self._rows(mean))
        return None if variance is None else self._restore(variance, mean)

    def check(self, f: Tensor, y: Tensor) -> None:
        """Check the shapes, and the labels that count."""
        if f.dim() < 3:
            raise ValueError(
                "Outputs with one label per position must have shape [n, t, k] or [n, k, height, "
                f"width], got {list(f.shape)}."
            )
        if len(y) != len(f):
            raise ValueError(f"There are {len(f)} outputs but {len(y)} labels.")
        positions = list(f.movedim(self._dimension(f), -1).shape[:-1])
        if list(y.shape) not in (positions, list(f.shape)):
            raise ValueError(
                f"Labels must have shape {positions} for outputs {list(f.shape)}, got "
                f"{list(y.shape)}. Is the dimension of the outputs "
                f"{'the last' if self._dimension(f) == -1 else 'the second'} one? See "
                "PerPosition(outputs=...)."
            )
        labels, counts = self._labels(f, y)
        if not bool(counts.any()):
            raise ValueError(f"No label of the batch counts: all are {self.ignore}.")
        self.each.check(self._rows(f)[counts], labels[counts])

    def scores(self, f: Tensor, y: Tensor) -> dict[str, float]:
        """Return scores per position; see `Likelihood.scores`."""
        with torch.no_grad():
            is_class = y.dim() != f.dim() and y.is_floating_point() is False
            has_draws = f.dim() == y.dim() + (2 if is_class else 1)
            draws = (f if has_draws else f.unsqueeze(0)).double()
            labels, counts = self._labels(draws[0], y)
            rows = torch.stack([self._rows(outputs)[counts] for outputs in draws])
            log_p = torch.stack([-self.each.nll(part, labels[counts]) for part in rows])
            nll = float((math.log(len(draws)) - log_p.logsumexp(0)).mean())
            mean = torch.stack([self.each.mean(part) for part in rows]).mean(0)
            return self.each._scores(mean, labels[counts], nll)
