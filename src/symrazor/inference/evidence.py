r"""Define `Evidence`, and compute the Laplace evidence, differentiable in every hyperparameter.

Every estimator of the evidence returns an `Evidence`. That of a network is, by Laplace,

$$ \log p(D \mid \eta) \approx \log p(D \mid \theta_*, \eta)
   - \tfrac12 \theta_*^\top \Delta \theta_* - \tfrac12 \log |I + \Delta^{-1} H_\eta| $$

for a Gaussian prior; `Prior.evidence_term` and `Prior.log_curvature` define the second and third
term of other families. The derivative in $\eta$ is taken at fixed weights: at a mode the first two
terms are stationary in $\theta$, and the drift of the curvature with the mode is neglected.

Hyperparameters of the forward pass enter the log-determinant through $H_\eta$: see
`symrazor.inference.hyper_updates`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from symrazor.core.errors import DivergenceError
from symrazor.core.prior import Prior
from symrazor.curvature.estimate import Curvature
from symrazor.curvature.kernel import Kernel, SubsetKernel
from symrazor.curvature.task import Method

ByName = Mapping[str, Tensor]


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
    def is_exact(self) -> bool:
        """Whether the curvature is the full Gauss-Newton matrix."""
        return self.structure == Method(structure="full").description

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

    def check_finite(self) -> None:
        """Raise DivergenceError if the value is infinite or NaN."""
        if not math.isfinite(float(self.log_evidence.detach())):
            raise DivergenceError(
                f"The evidence is not finite ({self}). The weights may have diverged: lower the "
                "learning rate."
            )

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


def log_curvatures(prior: Prior, curvature: Curvature, theta: ByName) -> dict[str, Tensor]:
    """Return the prior's log curvature of every tensor that has a curvature block."""
    names = [name for block in curvature.blocks for name in block.names]
    return prior.log_curvature({name: theta[name] for name in names})


def laplace_evidence(curvature: Curvature, prior: Prior, theta: ByName) -> Evidence:
    """Return the Laplace evidence, differentiable in prior, weights and curvature blocks."""
    log_curvature = log_curvatures(prior, curvature, theta)
    return Evidence(
        curvature.log_likelihood,
        prior.evidence_term(theta),
        curvature.stacked.logdet(log_curvature),
        curvature.n_data,
        effective_parameters(curvature, log_curvature),
        curvature.method.description,
        _gap(curvature, log_curvature),
    )


def _gap(curvature: Curvature, log_curvature: Mapping[str, Tensor]) -> float | None:
    """Return the distance to another bound, or the width of the interval of a kernel form."""
    for block in curvature.blocks:
        if isinstance(block, SubsetKernel):
            lower, upper = block.bounds(log_curvature)
            return 0.5 * float((upper - lower).detach())
    kernels = [block for block in curvature.blocks if isinstance(block, Kernel)]
    if curvature.gap is not None or not kernels:
        return curvature.gap
    return 0.5 * sum(kernel.residual(log_curvature) for kernel in kernels)


def tightest(estimates: Sequence[Curvature], prior: Prior, theta: ByName) -> Curvature:
    """Return the estimate with the highest evidence, of several lower bounds, with its lead."""
    if len(estimates) == 1:
        return estimates[0]
    log_curvature = log_curvatures(prior, estimates[0], theta)
    values = [float(c.prepare().stacked.logdet(log_curvature).detach()) for c in estimates]
    best = min(range(len(values)), key=values.__getitem__)
    return replace(estimates[best], gap=0.5 * (max(values) - min(values)))


def effective_parameters(curvature: Curvature, log_curvature: ByName) -> dict[str, float]:
    r"""Return $\gamma = \mathrm{tr}\, H (H + \Delta)^{-1}$ of each tensor.

    $\gamma$ is minus the derivative of the log-determinant in the log curvature of the prior, so
    one backward pass computes it for every structure.
    """
    leaves = {name: v.detach().clone().requires_grad_() for name, v in log_curvature.items()}
    log_det = curvature.stacked.logdet(leaves)
    gradients = torch.autograd.grad(log_det, list(leaves.values()), retain_graph=True)
    gamma = torch.stack([-g.sum() for g in gradients]).tolist()  # one synchronisation for all
    return dict(zip(leaves, gamma, strict=True))
