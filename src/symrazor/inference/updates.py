r"""Fixed points of the evidence: what `Razor` moves hyperparameters towards.

The evidence is stationary in the precision of a group where
$\delta = \gamma / \lVert\theta\rVert^2$ (MacKay 1992), and in the noise of a Gaussian likelihood
where $\sigma^2 = \mathrm{SSE} / (n - \gamma)$: so many data are left to tell the noise once
$\gamma$ parameters are determined. Both are taken a fraction `damping` of the way, in log space.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.core.prior import Prior

TINY = torch.finfo(torch.float64).tiny


@torch.no_grad()
def squares(prior: Prior, theta: Mapping[str, Tensor]) -> Float[Tensor, " g"]:
    r"""$\lVert\theta\rVert^2$ of every group of the prior, or of every weight if it is diagonal."""
    found = []
    for group in prior.names:
        parts = [theta[name].double().square() for name in prior.members(group)]
        total = parts[0] if prior.diagonal else torch.stack([part.sum() for part in parts]).sum()
        found.append(total.flatten())
    return torch.cat(found)


@torch.no_grad()
def precisions_(prior: Prior, sizes: Float[Tensor, " g"], damping: float) -> None:
    r"""Move every $\log\delta$ towards $\log \gamma / \lVert\theta\rVert^2$, all in one go.

    Expects in `log_precision[g].grad` the derivative of the log-determinant, which is $-\gamma$.

    Args:
        prior: whose precisions are moved.
        sizes: what `squares` finds.
        damping: fraction of the way.
    """
    now = list(prior.log_precision)
    gamma = [torch.zeros_like(one) if one.grad is None else -one.grad for one in now]
    target = (
        torch.cat([g.flatten() for g in gamma]).clamp(min=TINY).log() - sizes.clamp(min=TINY).log()
    )
    flat = torch.cat([one.flatten() for one in now])
    prior.set_(flat + damping * (target - flat))


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
