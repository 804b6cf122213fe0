r"""Fixed points of the evidence: what `Razor` moves hyperparameters towards.

The evidence is stationary in the precision of a group where
$\delta = \gamma / \lVert\theta\rVert^2$ (MacKay 1992), and in the noise of a Gaussian likelihood
where $\sigma^2 = \mathrm{SSE} / (n - \gamma)$: so many data are left to tell the noise once
$\gamma$ parameters are determined. Both are taken a fraction `damping` of the way, in log space.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from symrazor.hyper import Prior

TINY = torch.finfo(torch.float64).tiny


@torch.no_grad()
def precisions_(prior: Prior, theta: Mapping[str, Tensor], damping: float) -> None:
    r"""Move every $\log\delta$ towards $\log \gamma / \lVert\theta\rVert^2$.

    Expects in `log_precision[g].grad` the derivative of the log-determinant, which is $-\gamma$.
    """
    for group, log_delta in zip(prior.names, prior.log_precision, strict=True):
        squares = [theta[name].double().square() for name in prior.members(group)]
        size = squares[0] if prior.diagonal else torch.stack([s.sum() for s in squares]).sum()
        gamma = torch.zeros_like(log_delta) if log_delta.grad is None else -log_delta.grad
        target = gamma.clamp(min=TINY).log() - size.clamp(min=TINY).log()
        log_delta.add_(damping * (target - log_delta))


@torch.no_grad()
def noise_(
    log_sigma: Tensor, fit: Tensor, occam: Tensor, n: float, temperature: float, damping: float
) -> None:
    r"""Move $\log\sigma$ towards $\tfrac12 \log \mathrm{SSE} / (n - T\gamma)$.

    As $T\, \partial_{\log\sigma} \log p = \mathrm{SSE}/\sigma^2 - n$ and
    $-\tfrac12 \partial_{\log\sigma} \log\det = \gamma$, the two gradients are all it needs.

    Args:
        log_sigma: one, or one per output.
        fit: derivative of the log likelihood.
        occam: derivative of -log_det / 2.
        n: number of targets behind each noise scale.
        temperature: T.
        damping: fraction of the way.
    """
    errors = (n + temperature * fit).clamp(min=TINY)
    free = (n - temperature * occam).clamp(min=1e-3 * n)
    log_sigma.add_(damping * 0.5 * (errors / free).log())
