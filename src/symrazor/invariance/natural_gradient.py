r"""Natural-gradient steps for the posterior of a linear output layer under a softmax.

With $q(w_c) = N(\mu_c, \Lambda_c^{-1})$ for each class c, a prior of precision $\delta$ and
features h,

$$ \Lambda_c \leftarrow (1-\rho) \Lambda_c
     + \rho \Big(\delta I + \sum_n \mathrm{E}_q[p_{nc}(1 - p_{nc})] h_n h_n^\top\Big), \qquad
   \mu_c \leftarrow \mu_c + \rho \Lambda_c^{-1} \Big(\sum_n (y_{nc} - \mathrm{E}_q p_{nc}) h_n
     - \delta \mu_c\Big). $$

These are the natural gradients of the evidence lower bound in the mean and precision of a Gaussian,
with sums over data estimated from a batch. A million entries of a Cholesky factor converge in
hundreds of steps instead of tens of thousands.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.inference.variational.posteriors import BlockCholesky

WARM_UP_BATCHES = 4
"""Number of batches whose curvature is averaged before the first step of the mean."""

MIN_BATCH_WEIGHT = 0.005
"""Minimal weight of a new batch in the precision, which has to follow changing features."""


class NaturalSteps:
    """Updates a `BlockCholesky` posterior over [classes, width], of one model or of many.

    The precision follows every batch. Its inverse factor, which the posterior holds, is recomputed
    every few steps, and more often at the start. A step of the mean is shortened so that the logits
    of the batch change by at most 1 (root mean square).

    Args:
        q: the posterior.
        prior: prior precision, one number or one per model.
        every: number of steps between two factorisations.
    """

    def __init__(self, q: BlockCholesky, prior: float | Tensor = 1.0, every: int = 20) -> None:
        self.q, self.every, self.taken = q, every, 0
        self.prior = torch.as_tensor(prior).to(q.mean)[..., None, None]
        self._eye = torch.eye(q.shape[1], dtype=q.mean.dtype, device=q.mean.device)
        block = self.prior.unsqueeze(-1) * self._eye
        self.precision = block.expand(*q.lead, q.shape[0], -1, -1).clone()

    @torch.no_grad()
    def step(
        self,
        h: Float[Tensor, "*lead n width"],
        residual: Float[Tensor, "*lead n classes"],
        curvature: Float[Tensor, "*lead n classes"],
        n_data: int,
        rate: float,
    ) -> None:
        r"""Update the posterior at rate $\rho$ with one batch that represents `n_data` data.

        The residual is $y - \mathrm{E}_q p$, the curvature $\mathrm{E}_q[p (1 - p)]$.
        """
        scale = n_data / h.shape[-2]
        # A product of a matrix with its transpose is positive semidefinite despite rounding.
        rows = h.unsqueeze(-3) * (scale * curvature.mT.unsqueeze(-1)).sqrt()
        self.follow(rows.mT @ rows, scale * residual.mT @ h, h, rate)

    @torch.no_grad()
    def follow(
        self,
        information: Float[Tensor, "*lead classes width width"],
        gradient: Float[Tensor, "*lead classes width"],
        h: Float[Tensor, "*lead rows width"],
        rate: float,
    ) -> None:
        r"""Update the posterior at rate $\rho$ with derivatives of the expected fit of all data.

        `information` holds the negative second derivatives or the Fisher information, `gradient`
        the first derivatives in the means. Outputs of h change by at most 1, see the class.
        """
        self.taken += 1
        new = information + self.prior.unsqueeze(-1) * self._eye
        self.precision.lerp_(new, max(rate, MIN_BATCH_WEIGHT, 1 / self.taken))
        if self.taken < WARM_UP_BATCHES:
            return
        is_power_of_two = self.taken & (self.taken - 1) == 0
        if self.taken % self.every == 0 or is_power_of_two:
            self.renew()
        root = self.q.root.matrix()
        gradient = (gradient - self.prior * self.q.mean).unsqueeze(-1)
        change = rate * (root @ (root.mT @ gradient)).squeeze(-1)
        logit_change = (h @ change.mT).square().mean((-2, -1), keepdim=True).sqrt()
        self.q.mean.add_(change / logit_change.clamp_min(1.0))

    @torch.no_grad()
    def renew(self) -> None:
        r"""Recompute the posterior's factor L of $\Lambda^{-1} = L L^\top$ in float64.

        With J the reversal of the order and $J \Lambda J = G G^\top$, $L = J G^{-\top} J$. A block
        that cannot be factorised keeps its previous factor.
        """
        blocks = self.precision.reshape(-1, *self.precision.shape[-2:])
        eye = self._eye.double()
        parts, is_valid = [], []
        for block in blocks.split(self.q.shape[0]):
            flipped = block.double().flip(-2, -1)
            factor, info = torch.linalg.cholesky_ex(0.5 * (flipped + flipped.mT))
            is_valid.append(info == 0)
            inverse = torch.linalg.solve_triangular(factor, eye.expand_as(factor), upper=False)
            parts.append(inverse.mT.flip(-2, -1).to(block.dtype))
        keep_new = torch.cat(is_valid).reshape(*self.precision.shape[:-2], 1, 1)
        factors = torch.cat(parts).reshape(self.precision.shape)
        self.q.root.set_(torch.where(keep_new, factors, self.q.root.matrix()))
