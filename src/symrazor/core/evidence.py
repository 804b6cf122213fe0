r"""The one type that every evidence estimator returns."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Evidence:
    r"""The log evidence $\log p(D \mid \eta)$ of a whole data set, all constants included.

    Natural logarithm; log_evidence = log_likelihood + log_prior - log_det / 2. The parts are
    described as exact and Laplace estimates have them. A variational one is a lower bound: its
    first part is expected under the posterior, and its third has all of the divergence that is not
    in the second (`evidence.variational`), so that `complexity` is the divergence.

    Args:
        log_likelihood: $\log p(D \mid \theta_*, \eta)$ at the weights in use (divided by the
            temperature).
        log_prior: $-\tfrac12 \theta_*^\top \Delta \theta_*$, the log prior density relative to its
            peak.
        log_det: $\log |I + \Delta^{-1} H|$, twice the log ratio of the prior's to the posterior's
            volume; the Gaussian normalisers $(2\pi)^{P/2}$ of the two cancel.
        n_data: number of data the figures stand for.
        effective_parameters: tensor name -> $\gamma = \mathrm{tr}\, H (H + \Delta)^{-1}$, between 0
            and the number of weights: how many of them the data determined.
    """

    log_likelihood: Tensor
    log_prior: Tensor
    log_det: Tensor
    n_data: int
    effective_parameters: dict[str, float] = field(default_factory=dict)

    @property
    def complexity(self) -> Tensor:
        """Occam's share: what the fit has to pay, log_likelihood - log_evidence."""
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
        """The same values without a graph."""
        return Evidence(
            self.log_likelihood.detach(),
            self.log_prior.detach(),
            self.log_det.detach(),
            self.n_data,
            self.effective_parameters,
        )

    @classmethod
    def from_dict(
        cls, values: Mapping[str, float], n_data: int, effective_parameters: dict[str, float]
    ) -> "Evidence":
        """The evidence that `to_dict` came from."""
        fit, prior, det = (
            torch.tensor(values[part], dtype=torch.float64)
            for part in ("log_likelihood", "log_prior", "log_det")
        )
        return cls(fit, prior, det, n_data, effective_parameters)

    def to_dict(self) -> dict[str, float]:
        """Plain numbers, as they stand in a report."""
        return {
            "log_evidence": float(self.log_evidence),
            "log_likelihood": float(self.log_likelihood),
            "log_prior": float(self.log_prior),
            "log_det": float(self.log_det),
            "per_datum": float(self.per_datum),
        }

    def __repr__(self) -> str:
        """The value and its two terms."""
        with torch.no_grad():
            return (
                f"Evidence({float(self.log_evidence):.3f} = "
                f"fit {float(self.log_likelihood):.3f} - "
                f"complexity {float(self.complexity):.3f}, "
                f"{float(self.per_datum):.4f} per datum)"
            )
