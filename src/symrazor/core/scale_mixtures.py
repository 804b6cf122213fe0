r"""Priors beyond the Gaussian: scale mixtures, one scale for each group of weights.

$$ p(\theta_g) = \int N(\theta_g \mid 0, \delta_g^{-1} I)\; p(\delta_g)\, d\delta_g $$

with d weights in the group. The mixing density makes groups shrink together (Student-t), to zero
(Laplace), or either to zero or hardly at all (horseshoe):

| family | mixing density | $p(\theta_g)$ |
|---|---|---|
| "student" | $\delta \sim \mathrm{Gamma}(\nu/2, \nu s^2/2)$ | t, $\nu$ degrees of freedom |
| "laplace" | $\delta^{-1} \sim \mathrm{Gamma}((d+1)/2, 1/2s^2)$ | $\propto e^{-|\theta_g|/s}$ |
| "horseshoe" | $\delta^{-1/2} \sim$ half-Cauchy(s) | horseshoe |

The scales are not integrated out: each $\log \delta_g$ maximises the evidence plus its log density,
of which the evidence term of the prior contains the second. Given the scales the prior is Gaussian,
so that curvature, Kronecker factors and effective parameters stay as they are.
"""

import math
from collections.abc import Mapping
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.core.prior import SMALLEST_POSITIVE, GaussianPrior, Groups, Theta
from symrazor.core.validation import check_choice

Family = Literal["student", "laplace", "horseshoe"]


class ScaleMixturePrior(GaussianPrior):
    r"""Scale mixture of Gaussians with one precision $\delta_g$ per group of weights.

    Args:
        theta: the weights, by name.
        family: "student", "laplace" or "horseshoe".
        scale: the scale s of the family.
        degrees: degrees of freedom of "student".
        precision: starting precision of every group, or group name -> precision.
        groups: see `Prior`; not "diagonal".

    Raises:
        ValueError: an unknown family, or a scale or degrees that are not positive.
    """

    def __init__(
        self,
        theta: Theta,
        family: Family = "horseshoe",
        scale: float = 1.0,
        degrees: float = 3.0,
        precision: float | Mapping[str, float] = 1.0,
        groups: Groups = "tensor",
    ) -> None:
        super().__init__(theta, precision, groups)
        check_choice("family", family, Family)
        if self.diagonal:
            raise ValueError("A scale mixture has one scale per group: groups='diagonal' has none.")
        if not (scale > 0 and degrees > 0):
            raise ValueError(f"scale and degrees must be positive, got {scale} and {degrees}.")
        self.family, self.scale, self.degrees = family, scale, degrees
        sizes = [sum(theta[name].numel() for name in self.members(group)) for group in self.names]
        self.register_buffer("sizes", torch.tensor(sizes, dtype=torch.float64), persistent=False)

    sizes: Float[Tensor, " g"]

    def log_mixing_density(self, log_delta: Float[Tensor, " g"]) -> Float[Tensor, " g"]:
        r"""Return the log density of $\log \delta_g$ of every group, with all constants."""
        s = self.scale
        if self.family == "student":
            a, b = 0.5 * self.degrees, 0.5 * self.degrees * s**2
            constant = a * math.log(b) - math.lgamma(a)
            return constant + a * log_delta - b * log_delta.exp()
        if self.family == "laplace":
            k, rate = 0.5 * (self.sizes + 1), 0.5 / s**2
            return k * math.log(rate) - torch.lgamma(k) - k * log_delta - rate * (-log_delta).exp()
        log_ratio = -0.5 * log_delta - math.log(s)  # log of standard deviation over s
        return log_ratio - torch.nn.functional.softplus(2 * log_ratio) - math.log(math.pi)

    def evidence_term(self, theta: Theta) -> Tensor:
        r"""Return $-\tfrac12 \theta^\top \Delta \theta + \sum_g \log p(\log \delta_g)$."""
        flat = torch.stack(list(self.log_precision))
        return super().evidence_term(theta) + self.log_mixing_density(flat).sum()

    def fixed_point_targets(
        self, gamma: Float[Tensor, " g"], squares: Float[Tensor, " g"]
    ) -> Float[Tensor, " g"]:
        r"""Return the $\log \delta_g$ at which evidence plus log mixing density are stationary.

        With effective parameters $\gamma$, $\gamma - \delta \lVert\theta\rVert^2 +
        2\, \partial_{\log\delta} \log p(\log\delta) = 0$, linear or quadratic in $\delta$.
        """
        s = self.scale
        if self.family == "student":
            nu = self.degrees
            return ((gamma + nu) / (squares + nu * s**2)).log()
        if self.family == "laplace":  # squares d^2 - half d - 1 / s^2 = 0
            half = gamma - self.sizes - 1
            root = (half.square() + 4 * squares / s**2).sqrt()
            # The form without cancellation, as `half` is negative.
            return (2 / s**2 / (root - half)).clamp(min=SMALLEST_POSITIVE).log()
        # squares s^2 d^2 + b d - (gamma + 1) = 0
        b = squares + s**2 * (1 - gamma)
        root = (b.square() + 4 * squares * s**2 * (gamma + 1)).sqrt()
        return (2 * (gamma + 1) / (b + root)).log()
