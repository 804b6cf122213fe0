r"""Update hyperparameters inside the network, and the noise, by the gradient of the evidence.

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
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from symrazor.accelerate.processes import all_reduce_
from symrazor.core.likelihood import Gaussian
from symrazor.curvature.estimate import Curvature
from symrazor.curvature.kernel import ROWS_KEY
from symrazor.curvature.task import CurvatureTask, Key, Statistic
from symrazor.data.batches import Loader, numbered_batches
from symrazor.inference.evidence import ByName
from symrazor.linalg.blocks import StackedSpectra
from symrazor.linalg.factor import Factor
from symrazor.linalg.jacobian_rows import JacobianRows, batch_tensors

if TYPE_CHECKING:
    from symrazor.inference.razor import Razor


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


def update_hyperparameters_(
    razor: "Razor", gradient: Mapping[str, tuple[Tensor, Tensor]], n_outputs: int
) -> None:
    """Move the hyperparameters of network and likelihood, after `hyper_gradient`."""
    noise = razor.likelihood.noise.raw if isinstance(razor.likelihood, Gaussian) else None
    config, optimiser = razor.config, razor.eta_optimiser
    assert optimiser is not None
    optimiser.zero_grad()
    for name, parameter in razor.eta.items():
        fit, occam = gradient[name]
        if parameter is noise and config.update == "mackay":
            n_targets = razor.n_data * n_outputs / parameter.numel()
            update_noise_(parameter, fit, occam, n_targets, config.temperature, config.damping)
        else:
            parameter.grad = -(fit + occam).to(parameter)
    optimiser.step()
    optimiser.zero_grad()


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
