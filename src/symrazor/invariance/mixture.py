r"""Average probabilities: $p(y \mid x) = \sum_s c_s\, \mathrm{softmax}(W h_s)_y$.

This is the average of the paper (Learning Invariant Weights, eqs. 2 and 6). The outputs under all
maps share one draw of W, and every input has its own draw, which leaves a sum over inputs unbiased
and lowers its variance. Natural-gradient steps need, for each row $w_k$ of W and with the
responsibilities $r_s = c_s p_{sy} / p_y$,

$$ \nabla_k \log p_y = \sum_s r_s (y_k - p_{sk}) h_s, \qquad
   F_k = \sum_c \frac{1}{p_c} u_{ck} u_{ck}^\top, \quad
   u_{ck} = \nabla_k p_c = \sum_s c_s p_{sc} (\delta_{ck} - p_{sk}) h_s . $$

The Fisher information $F_k$ replaces the negative second derivative: it is positive semidefinite,
and for equal $h_s$ it is $p_k (1 - p_k) h h^\top$.
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from symrazor.inference.variational.gaussian import GaussianPosterior


def outputs(
    q: GaussianPosterior,
    h: Float[Tensor, "*lead n s width"],
    draws: int,
    generator: torch.Generator | None = None,
    noise: Tensor | None = None,
) -> Float[Tensor, "draws *lead n s classes"]:
    """Return outputs under every map, with weights drawn for each input, in antithetic pairs.

    `noise` is a factor of the weights' deviation, [*lead, 1, 1]: 1 by default, 0 for a point
    estimate.
    """
    n, lead = h.shape[-3], len(q.lead)
    pairs = (draws + 1) // 2
    deviations = q.deviation(pairs * n, generator).unflatten(0, (pairs, n))  # [.., n, *lead, c, d]
    deviations = deviations.movedim((0, 1), (lead + 1, lead)).flatten(lead + 1, lead + 2)
    mean: Tensor = (h.flatten(-3, -2) @ q.mean.mT).unflatten(-2, h.shape[-3:-1])
    spread = (h @ deviations.mT).unflatten(-1, (pairs, -1)).movedim(-2, 0)
    if noise is not None:
        spread = noise.unsqueeze(-1) * spread
    return mean + (torch.cat([spread, -spread])[:draws] if draws > 1 else spread)


def log_mixture(
    f: Float[Tensor, "*rows s classes"], shares: Float[Tensor, " s"]
) -> tuple[Float[Tensor, "*rows classes"], Float[Tensor, "*rows s classes"]]:
    """Return log probabilities of the average, and of every map weighted by its share."""
    joint = f.log_softmax(-1) + shares.log().unsqueeze(-1)
    return joint.logsumexp(-2), joint


def score(
    joint: Float[Tensor, "draws *lead n s classes"],
    log_p: Float[Tensor, "draws *lead n classes"],
    y: Int64[Tensor, "*lead n"],
    shares: Float[Tensor, " s"],
) -> Float[Tensor, "*lead n s classes"]:
    """Return $r_s (y_k - p_{sk})$ averaged over draws; times features, it is the gradient."""
    index = y.expand(log_p.shape[:-1]).unsqueeze(-1)
    s = joint.shape[-2]
    at_label = joint.gather(-1, index.unsqueeze(-2).expand(*index.shape[:-1], s, 1))
    r = (at_label - log_p.gather(-1, index).unsqueeze(-2)).exp()
    one_hot_labels = torch.nn.functional.one_hot(y, log_p.shape[-1]).to(r).unsqueeze(-2)
    return (r * (one_hot_labels - joint.exp() / shares.unsqueeze(-1))).mean(0)


def information(
    joint: Float[Tensor, "*lead n s classes"],
    log_p: Float[Tensor, "*lead n classes"],
    shares: Float[Tensor, " s"],
    h: Float[Tensor, "*lead n s width"],
) -> Float[Tensor, "*lead classes width width"]:
    """Return the Fisher information $F_k$ of each class, summed over inputs, at one draw."""
    weighted = joint.exp()  # c_s p_sc
    p = weighted / shares.unsqueeze(-1)
    scaled = weighted * (-0.5 * log_p).exp().unsqueeze(-2)
    classes = p.shape[-1]
    eye = torch.eye(classes, dtype=p.dtype, device=p.device)
    factor = torch.einsum("...sc,...sck->...kcs", scaled, eye - p.unsqueeze(-2))
    rows: Tensor = factor.flatten(-3, -2) @ h  # [*lead, n, k * c, width]
    rows = rows.unflatten(-2, (classes, classes)).movedim(-3, -4).flatten(-3, -2)
    return rows.mT @ rows
