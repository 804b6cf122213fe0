r"""Laplace evidence of a network, differentiable in every hyperparameter.

$$ \log p(D \mid \eta) \approx \log p(D \mid \theta_*, \eta)
   - \tfrac12 \theta_*^\top \Delta \theta_* - \tfrac12 \log |I + \Delta^{-1} H_\eta| $$

Its derivative in $\eta$ is taken at fixed weights: at a mode the first two terms are stationary in
$\theta$, and the drift of the curvature with the mode is neglected, as everywhere in this field.

Hyperparameters that enter the forward pass reach the log-determinant through $H_\eta$. Two ways
lead to the same derivative. `keep_graph=True` keeps the graph of all batches. `hyper_gradient`
needs the memory of one batch: with
$V_Q = -\tfrac12\, \partial \log|I + \Delta^{-1} H| / \partial Q$ for every sum $Q$ that H is made
of, computed once, the derivative is that of

$$ \sum_b \Big[ \log p(D_b \mid \theta_*, \eta) + \sum_Q \langle V_Q, Q_b(\eta) \rangle \Big] , $$

a sum over batches in which each $Q_b$ is computed with its graph, differentiated, and forgotten.
Where Q is kept as rows (see factor.py), Q and all $Q_b$ are seen in a basis of these rows.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from symrazor.accelerate.processes import all_reduce_
from symrazor.core.evidence import Evidence
from symrazor.core.prior import Prior
from symrazor.curvature.accumulate import Key
from symrazor.curvature.estimate import Curvature, Loader, numbered_batches
from symrazor.curvature.task import CurvatureTask
from symrazor.linalg.blocks import StackedSpectra
from symrazor.linalg.factor import Factor


def log_precisions(prior: Prior, curvature: Curvature) -> dict[str, Tensor]:
    """Tensor name -> log precision, for every tensor that has curvature."""
    return {name: prior.log_of(name) for block in curvature.blocks for name in block.names}


def laplace_evidence(curvature: Curvature, prior: Prior, theta: Mapping[str, Tensor]) -> Evidence:
    """The Laplace evidence, differentiable in the prior precisions and in whatever made the blocks.

    The effective parameters of a tensor are minus the derivative of the log-determinant in its log
    precision, so one backward pass finds them for every structure.
    """
    shared = log_precisions(prior, curvature)
    value = curvature.stacked.logdet(shared)
    return Evidence(
        curvature.log_likelihood,
        -0.5 * prior.scatter(theta),
        value,
        curvature.n_data,
        effective_parameters(curvature, prior),
    )


def effective_parameters(curvature: Curvature, prior: Prior) -> dict[str, float]:
    r"""$\gamma = \mathrm{tr}\, H (H + \Delta)^{-1}$ of each tensor."""
    own = {
        name: value.detach().clone().requires_grad_()
        for name, value in log_precisions(prior, curvature).items()
    }
    found = torch.autograd.grad(
        curvature.stacked.logdet(own), list(own.values()), retain_graph=True
    )
    sums = torch.stack([-g.sum() for g in found]).tolist()  # one look at the device for all
    return dict(zip(own, sums, strict=True))


def hyper_gradient(
    source: CurvatureTask,
    curvature: Curvature,
    prior: Prior,
    loader: Loader,
    eta: Mapping[str, Tensor],
) -> dict[str, tuple[Tensor, Tensor]]:
    """Derivatives of log likelihood and of -log_det/2 in each hyperparameter of the forward pass.

    Args:
        source: what `curvature` was computed from, with its generator as it was before.
        curvature: a detached estimate over the same data.
        prior: the prior precisions.
        loader: the data again.
        eta: hyperparameters, by name.

    Returns:
        name -> (d log_likelihood, d (-log_det / 2)).
    """
    views = {key: _view(key, Q) for key, Q in curvature.sums.items() if key[1] != "count"}
    leaves = {
        key: view(curvature.sums[key]).detach().clone().requires_grad_()
        for key, view in views.items()
    }
    deltas = {k: v.detach() for k, v in log_precisions(prior, curvature).items()}
    seen = {
        key: Factor.of_matrix(leaf) if isinstance(curvature.sums[key], Factor) else leaf
        for key, leaf in leaves.items()
    }
    value = -0.5 * StackedSpectra(curvature.build({**curvature.sums, **seen})).logdet(deltas)
    found = torch.autograd.grad(value, list(leaves.values()))
    vectors = dict(zip(leaves, found, strict=True))
    scale = curvature.scale
    names, tensors = list(eta), list(eta.values())
    fit = [torch.zeros_like(t) for t in tensors]
    occam = [torch.zeros_like(t) for t in tensors]
    of_batch = source.by_batch()
    for number, x, y in numbered_batches(loader, source.pieces):
        batch = of_batch(number).batch_sums(x, y, f"batch {number}", keep_graph=True)
        product = torch.zeros((), dtype=torch.float64)
        for key, vector in vectors.items():
            if key in batch.sums:
                product = product + (vector * views[key](batch.sums[key])).sum()
        _add_gradient(fit, batch.log_likelihood * scale, tensors, retain=True)
        _add_gradient(occam, product, tensors, retain=False)
        del batch, product  # the graph of this batch goes before the next one comes
    all_reduce_([*fit, *occam])
    return {name: (f, o) for name, f, o in zip(names, fit, occam, strict=True)}


def _view(key: Key, total: Tensor | Factor) -> Callable[[Any], Tensor]:
    """A linear map of sums to tensors that keeps all that a log-determinant sees of `total`."""
    if not isinstance(total, Factor):
        return torch.Tensor.clone
    return total.projection() if key[1] in ("A", "G") else lambda factor: factor.matrix


def _add_gradient(total: list[Tensor], value: Tensor, eta: list[Tensor], retain: bool) -> None:
    if not value.requires_grad:
        return
    found = torch.autograd.grad(value, eta, retain_graph=retain, allow_unused=True)
    for sum_so_far, g in zip(total, found, strict=True):
        if g is not None:
            sum_so_far.add_(g)
