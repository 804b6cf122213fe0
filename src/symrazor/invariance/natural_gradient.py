r"""Natural-gradient steps for the posterior of a linear output under a softmax.

With $q(w_c) = N(\mu_c, \Lambda_c^{-1})$ for each class c, a prior of precision $\delta$ and
features h,

$$ \Lambda_c \leftarrow (1-\rho) \Lambda_c
     + \rho \Big(\delta I + \sum_n \mathrm{E}_q[p_{nc}(1 - p_{nc})] h_n h_n^\top\Big), \qquad
   \mu_c \leftarrow \mu_c + \rho \Lambda_c^{-1} \Big(\sum_n (y_{nc} - \mathrm{E}_q p_{nc}) h_n
     - \delta \mu_c\Big). $$

These are the natural gradients of the evidence lower bound in a Gaussian's mean and precision, with
sums over data replaced by those over a batch. A million entries of a Cholesky factor converge in
hundreds of steps instead of tens of thousands.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.inference.variational.posteriors import BlockCholesky

WARM_UP = 4
"""Batches whose curvature is averaged before the mean moves for the first time."""

SLOWEST = 0.005
"""Least share of a new batch in the precision, which has to follow the features."""


class NaturalSteps:
    """Moves a `BlockCholesky` posterior over [classes, width], of one model or of many.

    The precision follows every batch; its inverse factor, which the posterior holds, is renewed
    every few steps and early on more often. A step of the mean is cut so that logits of the batch
    move by 1 at most (root mean square).

    Args:
        q: the posterior.
        prior: precision of the prior, one number or one per model.
        every: steps between two factorisations.
    """

    def __init__(self, q: BlockCholesky, prior: float | Tensor = 1.0, every: int = 20) -> None:
        """Start at the prior's precision."""
        self.q, self.every, self.taken = q, every, 0
        self.prior = torch.as_tensor(prior).to(q.mean)[..., None, None]
        width = q.shape[1]
        eye = torch.eye(width, dtype=q.mean.dtype, device=q.mean.device)
        self._eye = eye
        self.precision = (
            (self.prior.unsqueeze(-1) * eye).expand(*q.lead, q.shape[0], -1, -1).clone()
        )

    @torch.no_grad()
    def step(
        self,
        h: Float[Tensor, "*lead n width"],
        residual: Float[Tensor, "*lead n classes"],
        curvature: Float[Tensor, "*lead n classes"],
        n_data: int,
        rate: float,
    ) -> None:
        r"""Take in one batch.

        Args:
            h: features.
            residual: $y - \mathrm{E}_q p$.
            curvature: $\mathrm{E}_q[p (1 - p)]$.
            n_data: number of data that the batch stands for.
            rate: $\rho$, between 0 and 1.
        """
        scale = n_data / h.shape[-2]
        # The same factor twice: positive semidefinite whatever the rounding of products.
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
        r"""Take in curvature and gradient of the expected fit of all data.

        Args:
            information: the negative second derivatives, or what stands in for them.
            gradient: in the means.
            h: features whose outputs shall not move by more than 1; see the class.
            rate: $\rho$, between 0 and 1.
        """
        self.taken += 1
        new = information + self.prior.unsqueeze(-1) * self._eye
        self.precision.lerp_(new, max(rate, SLOWEST, 1 / self.taken))
        if self.taken >= WARM_UP and (
            self.taken % self.every == 0 or (self.taken & (self.taken - 1)) == 0
        ):
            self.renew()
        if self.taken >= WARM_UP:
            self._move(h, gradient, rate)

    def _move(self, h: Tensor, gradient: Tensor, rate: float) -> None:
        root = self.q.root.matrix()
        gradient = (gradient - self.prior * self.q.mean).unsqueeze(-1)
        change = rate * (root @ (root.mT @ gradient)).squeeze(-1)
        moved = (h @ change.mT).square().mean((-2, -1), keepdim=True).sqrt()
        self.q.mean.add_(change / moved.clamp_min(1.0))

    @torch.no_grad()
    def renew(self) -> None:
        r"""Give the posterior the lower factor L of $\Lambda^{-1} = L L^\top$, by float64.

        With J the reversal of the order and $J \Lambda J = G G^\top$, $L = J G^{-\top} J$. A block
        that cannot be factorised keeps the factor it had.
        """
        blocks = self.precision.reshape(-1, *self.precision.shape[-2:])
        eye = self._eye.double()
        parts, sound = [], []
        for block in blocks.split(self.q.shape[0]):
            flipped = block.double().flip(-2, -1)
            factor, info = torch.linalg.cholesky_ex(0.5 * (flipped + flipped.mT))
            sound.append(info == 0)
            inverse = torch.linalg.solve_triangular(factor, eye.expand_as(factor), upper=False)
            parts.append(inverse.mT.flip(-2, -1).to(block.dtype))
        good = torch.cat(sound).reshape(*self.precision.shape[:-2], 1, 1)
        found = torch.cat(parts).reshape(self.precision.shape)
        self.q.root.set_(torch.where(good, found, self.q.root.matrix()))
