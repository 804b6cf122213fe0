"""Likelihoods of samples that count more or less than once."""

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.core.likelihood.base import (
    Categorical,
    Columns,
    Covariances,
    Likelihood,
    MeanAndVariance,
    Outputs,
    Probe,
    as_likelihood,
)
from symrazor.core.likelihood.ordinal import Ordinal


class Weighted(Likelihood):
    r"""Another likelihood with a weight for each sample: $\prod_n p(y_n \mid f_n)^{w_n}$.

    A sample of weight 2 counts as two equal samples. Labels are [n, k + 1]: the k labels of another
    likelihood, then the weight (`with_weights`). Test scores do not use the weights.

    Args:
        each: the likelihood of a sample of weight 1, or its name.
    """

    def __init__(self, each: str | Likelihood = "categorical") -> None:
        super().__init__()
        self.each = as_likelihood(each)
        self.has_classes = isinstance(self.each, Categorical | Ordinal)

    def labels(self, y: Tensor) -> Tensor:
        """Return the labels without the weights."""
        return y[:, 0].long() if self.has_classes else y[:, :-1]

    def nll(self, f: Outputs, y: Tensor) -> Float[Tensor, " n"]:
        """Return the weighted negative log likelihood of each sample."""
        return y[:, -1] * self.each.nll(f, self.labels(y))

    def residual(self, f: Outputs, y: Tensor) -> Outputs:
        """Return the gradient of `nll` in `f`."""
        return y[:, -1:] * self.each.residual(f, self.labels(y))

    def hessian_root(self, f: Outputs) -> Columns:
        """Return the root for weight 1; `masked_root` multiplies it by the root of the weight."""
        return self.each.hessian_root(f)

    def masked_root(self, root: Columns, y: Tensor) -> Columns:
        """Multiply the root of each sample by the root of its weight."""
        return root * y[:, -1:].to(root.dtype).sqrt()

    def empirical_root(self, f: Outputs, y: Tensor) -> Columns:
        """Return residuals times the root of the weight, as of repeated samples."""
        return self.masked_root(self.each.empirical_root(f, self.labels(y)), y)

    def sampled_root(
        self,
        f: Outputs,
        samples: int,
        generator: torch.Generator | None = None,
        probe: Probe = "spectral",
    ) -> Float[Tensor, "s n k"]:
        """Draw probes for weight 1."""
        return self.each.sampled_root(f, samples, generator, probe)

    def n_columns(self, f: Outputs) -> int:
        """Return the number of columns of `hessian_root`."""
        return self.each.n_columns(f)

    def probe_numbers(self, f: Outputs, samples: int) -> int:
        """Return the numbers of the probes per sample."""
        return self.each.probe_numbers(f, samples)

    def sample(self, f: Outputs, generator: torch.Generator | None) -> Tensor:
        """Draw labels of weight 1."""
        labels = self.each.sample(f, generator)
        return with_weights(labels, torch.ones(len(f), dtype=f.dtype, device=f.device))

    def mean(self, f: Outputs) -> Outputs:
        """Return the mean of y given f."""
        return self.each.mean(f)

    def noise_variance(self, mean: Outputs) -> Outputs | None:
        """Return the variance of y of weight 1 given its mean, or None for class labels."""
        return self.each.noise_variance(mean)

    def closed_form_prediction(self, f: Outputs, covariance: Covariances) -> MeanAndVariance:
        """Return mean and variance of y."""
        return self.each.closed_form_prediction(f, covariance)

    def scores(self, f: Outputs | Float[Tensor, "s n k"], y: Tensor) -> dict[str, float]:
        """Return the scores of the other likelihood, without weights."""
        return self.each.scores(f, self.labels(y))

    def check(self, f: Tensor, y: Tensor) -> None:
        """Check labels and weights."""
        if y.dim() != 2 or y.shape[1] < 2 or not y.is_floating_point():
            raise ValueError(
                "Labels of a Weighted likelihood must be real numbers [n, k + 1] with the weights "
                f"last, got {y.dtype} {list(y.shape)}. Use with_weights(y, weights)."
            )
        if not bool((y[:, -1] > 0).all()):
            raise ValueError("Weights must be positive. Leave out samples of weight 0.")
        self.each.check(f, self.labels(y))


def with_weights(y: Tensor, weights: Tensor) -> Float[Tensor, "n k+1"]:
    """Return labels for `Weighted`: labels [n] or [n, k] and the weights [n] as last column."""
    if weights.shape != y.shape[:1]:
        raise ValueError(
            f"There are {len(y)} labels, but weights have shape {list(weights.shape)}."
        )
    columns = y.reshape(len(y), -1)
    dtype = torch.promote_types(columns.dtype, torch.float32)
    return torch.cat([columns.to(dtype), weights.to(dtype).unsqueeze(1)], 1)
