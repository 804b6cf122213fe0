r"""Define `Evidence`, and compute the Laplace evidence, differentiable in every hyperparameter.

Every estimator of the evidence returns an `Evidence`. That of a network is, by Laplace,

$$ \log p(D \mid \eta) \approx \log p(D \mid \theta_*, \eta)
   - \tfrac12 \theta_*^\top \Delta \theta_* - \tfrac12 \log |I + \Delta^{-1} H_\eta| $$

for a Gaussian prior; `Prior.evidence_term` and `Prior.log_curvature` define the second and third
term of other families. The derivative in $\eta$ is taken at fixed weights: at a mode the first two
terms are stationary in $\theta$, and the drift of the curvature with the mode is neglected.

Hyperparameters of the forward pass enter the log-determinant through $H_\eta$. Two methods compute
the same derivative. `keep_graph=True` keeps the graph of all batches. `hyper_gradient` needs the
memory of one batch: with
$V_Q = -\tfrac12\, \partial \log|I + \Delta^{-1} H| / \partial Q$ for every sum $Q$ that H consists
of, computed once, the derivative is that of

$$ \sum_b \Big[ \log p(D_b \mid \theta_*, \eta) + \sum_Q \langle V_Q, Q_b(\eta) \rangle \Big] , $$

a sum over batches in which each $Q_b$ is computed with its graph, differentiated, and freed. Where
Q is kept as rows (`linalg.factor`), Q and all $Q_b$ are projected to the span of these rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from symrazor.accelerate.processes import all_reduce_
from symrazor.core.prior import Prior
from symrazor.curvature.accumulate import Key, Statistic
from symrazor.curvature.estimate import Curvature, CurvatureTask
from symrazor.curvature.kernel import ROWS_KEY
from symrazor.data.batches import Loader, numbered_batches
from symrazor.linalg.blocks import StackedSpectra
from symrazor.linalg.factor import Factor
from symrazor.linalg.jacobian_rows import JacobianRows, batch_tensors
from symrazor.linalg.kernel import Kernel

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
    kernels = [block for block in curvature.blocks if isinstance(block, Kernel)]
    if curvature.gap is not None or not kernels:
        return curvature.gap
    return 0.5 * sum(kernel.residual(log_curvature) for kernel in kernels)


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


def hyper_gradient(
    task: CurvatureTask,
    curvature: Curvature,
    log_curvature: ByName,
    loader: Loader,
    eta: ByName,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return derivatives of log likelihood and -log_det/2 in each hyperparameter, by name.

    Args:
        task: the task that computed `curvature`, with its generator reset.
        curvature: a detached estimate over the same data.
        log_curvature: log curvature of the prior, by tensor.
        loader: the same data again.
        eta: hyperparameters of the forward pass, by name.
    """
    views, sensitivities = _sensitivities(curvature, log_curvature)
    row_sensitivities = _row_sensitivities(curvature, log_curvature)
    parameters = list(eta.values())
    fit = [torch.zeros_like(parameter) for parameter in parameters]
    occam = [torch.zeros_like(parameter) for parameter in parameters]
    task_of_batch = replace(task, bases=curvature.bases).by_batch()
    for number, x, y in numbered_batches(loader, task.pieces):
        batch = task_of_batch(number).batch_sums(x, y, f"batch {number}", keep_graph=True)
        product = torch.zeros((), dtype=torch.float64)
        for key, sensitivity in sensitivities.items():
            if key in batch.sums:
                product = product + (sensitivity * views[key](batch.sums[key])).sum()
        rows = batch.sums.get(ROWS_KEY)
        if isinstance(rows, JacobianRows):
            for tensor in rows.tensors:
                product = product + (next(row_sensitivities) * tensor).sum()
        _add_gradient(fit, batch.log_likelihood * curvature.scale, parameters, retain=True)
        _add_gradient(occam, product, parameters, retain=False)
        del batch, product  # frees the graph of this batch before the next one is made
    all_reduce_([*fit, *occam])
    return {name: (f, o) for name, f, o in zip(eta, fit, occam, strict=True)}


View = Callable[[Any], Tensor]


def _sensitivities(
    curvature: Curvature, log_curvature: ByName
) -> tuple[dict[Key, View], dict[Key, Tensor]]:
    r"""Return a linear view of each sum Q, and $V_Q$ in the coordinates of that view."""
    views = {
        key: _view(key, Q)
        for key, Q in curvature.sums.items()
        if key[1] != "count" and not isinstance(Q, JacobianRows)
    }
    if not views:
        return {}, {}
    leaves = {
        key: view(curvature.sums[key]).detach().clone().requires_grad_()
        for key, view in views.items()
    }
    sums = {
        key: Factor.of_matrix(leaf) if isinstance(curvature.sums[key], Factor) else leaf
        for key, leaf in leaves.items()
    }
    blocks = curvature.build({**curvature.sums, **sums})
    fixed = {name: value.detach() for name, value in log_curvature.items()}
    value = -0.5 * StackedSpectra(blocks).logdet(fixed)
    gradients: Sequence[Tensor | None] = torch.autograd.grad(
        value, list(leaves.values()), allow_unused=True
    )
    used = {key: g for key, g in zip(leaves, gradients, strict=True) if g is not None}
    return views, used


def _row_sensitivities(
    curvature: Curvature, log_curvature: Mapping[str, Tensor]
) -> Iterator[Tensor]:
    r"""Yield $V_Q$ of the rows of the kernel form, batch by batch, for this process's batches."""
    rows = curvature.sums.get(ROWS_KEY)
    if not isinstance(rows, JacobianRows):
        return
    leaves = [tensor.detach().clone().requires_grad_() for tensor in rows.tensors]
    blocks = curvature.build({ROWS_KEY: rows.replace(leaves)})
    fixed = {name: value.detach() for name, value in log_curvature.items()}
    gradients = torch.autograd.grad(-0.5 * StackedSpectra(blocks).logdet(fixed), leaves)
    earlier = sum(len(batch_tensors(batch)) for batch in rows.batches[: rows.first_local])
    yield from gradients[earlier:]


def _view(key: Key, total: Statistic) -> View:
    """Return a linear map from a sum to a tensor that determines the log-determinant."""
    if not isinstance(total, Factor):
        return torch.Tensor.clone
    return total.projection() if key[1] in ("A", "G") else lambda factor: factor.matrix


def _add_gradient(
    totals: list[Tensor], value: Tensor, parameters: list[Tensor], retain: bool
) -> None:
    if not value.requires_grad:
        return
    gradients = torch.autograd.grad(value, parameters, retain_graph=retain, allow_unused=True)
    for total, gradient in zip(totals, gradients, strict=True):
        if gradient is not None:
            total.add_(gradient)


@torch.no_grad()
def update_noise_(
    log_sigma: Tensor,
    fit: Tensor,
    occam: Tensor,
    n_targets: float,
    temperature: float,
    damping: float,
) -> None:
    r"""Move $\log\sigma$ towards $\tfrac12 \log \mathrm{SSE} / (n - T\gamma)$.

    There the evidence is stationary in the noise of a Gaussian likelihood: $n - \gamma$ targets are
    left to determine the noise once $\gamma$ parameters are determined. As
    $T\, \partial_{\log\sigma} \log p = \mathrm{SSE}/\sigma^2 - n$ and
    $-\tfrac12 \partial_{\log\sigma} \log\det = \gamma$, the two gradients `fit` and `occam` of
    `hyper_gradient` suffice. `n_targets` counts the targets behind each noise scale.
    """
    errors = (n_targets + temperature * fit).clamp(min=torch.finfo(torch.float64).tiny)
    free = (n_targets - temperature * occam).clamp(min=1e-3 * n_targets)
    log_sigma.add_(damping * 0.5 * (errors / free).log())
