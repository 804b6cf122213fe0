r"""Define `Evidence`, the value that every estimator of the evidence returns."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Evidence:
    r"""The log evidence $\log p(D \mid \eta)$ of a whole data set, with all constants.

    Natural logarithm; log_evidence = log_likelihood + log_prior - log_det / 2. The terms below are
    those of exact and Laplace estimates. A variational estimate is a lower bound: its
    `log_likelihood` is an expectation under the posterior, and its `log_det` holds the part of the
    divergence that is not in `log_prior`, so that `complexity` is the divergence
    (`inference.variational.bound`).

    Args:
        log_likelihood: $\log p(D \mid \theta_*, \eta)$ at the present weights, divided by the
            temperature.
        log_prior: $-\tfrac12 \theta_*^\top \Delta \theta_*$, the log prior density relative to its
            peak.
        log_det: $\log |I + \Delta^{-1} H|$, twice the log ratio of the prior's to the posterior's
            volume. The Gaussian normalisers $(2\pi)^{P/2}$ of the two cancel.
        n_data: number of data.
        effective_parameters: tensor name -> $\gamma = \mathrm{tr}\, H (H + \Delta)^{-1}$, between 0
            and the number of weights: how many of them the data determined.
        structure: structure of the curvature in words, "" if there is none.
        gap: uncertainty in nats, or None. For the higher of two lower bounds it is the distance
            to the lower one. For a kernel form, the exact value is at most this much higher.
    """

    log_likelihood: Tensor
    log_prior: Tensor
    log_det: Tensor
    n_data: int
    effective_parameters: dict[str, float] = field(default_factory=dict)
    structure: str = ""
    gap: float | None = None

    @property
    def complexity(self) -> Tensor:
        """The Occam factor in nats: log_likelihood - log_evidence."""
        return 0.5 * self.log_det - self.log_prior

    @property
    def log_evidence(self) -> Tensor:
        """The log marginal likelihood."""
        return self.log_likelihood - self.complexity

    @property
    def per_datum(self) -> Tensor:
        """log_evidence / n_data."""
        return self.log_evidence / self.n_data

    def detach(self) -> "Evidence":
        """Return the same values without a graph."""
        terms = ("log_likelihood", "log_prior", "log_det")
        return replace(self, **{name: getattr(self, name).detach() for name in terms})

    @classmethod
    def from_dict(
        cls, values: Mapping[str, float], n_data: int, effective_parameters: dict[str, float]
    ) -> "Evidence":
        """Return the evidence that `to_dict` was called on."""
        log_likelihood, log_prior, log_det = (
            torch.tensor(values[term], dtype=torch.float64)
            for term in ("log_likelihood", "log_prior", "log_det")
        )
        return cls(log_likelihood, log_prior, log_det, n_data, effective_parameters)

    def to_dict(self) -> dict[str, float]:
        """Return the terms as plain numbers."""
        return {
            "log_evidence": float(self.log_evidence),
            "log_likelihood": float(self.log_likelihood),
            "log_prior": float(self.log_prior),
            "log_det": float(self.log_det),
            "per_datum": float(self.per_datum),
        }

    def __repr__(self) -> str:
        with torch.no_grad():
            return (
                f"Evidence({float(self.log_evidence):.3f} = "
                f"fit {float(self.log_likelihood):.3f} - "
                f"complexity {float(self.complexity):.3f}, "
                f"{float(self.per_datum):.4f} per datum)"
            )
