"""Test mixtures of likelihoods against automatic differentiation."""

import torch
from invariant_model import DOUBLE, noise

from symrazor.invariance import mixture


def test_score_and_information_of_a_mixture_by_autodiff() -> None:
    h, w = noise(2, 4, 5), noise(3, 5, seed=1).requires_grad_()
    shares, y = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=DOUBLE), torch.tensor([2, 0])
    log_p, joint = mixture.log_mixture(h @ w.T, shares)
    score = torch.einsum("nsc,nsd->cd", mixture.score(joint[None], log_p[None], y, shares), h)
    information, slope = torch.zeros(15, 15, dtype=DOUBLE), torch.zeros(3, 5, dtype=DOUBLE)
    for n in range(2):
        for c in range(3):
            p = (shares[:, None] * (h[n] @ w.T).softmax(-1)).sum(0)[c]
            (g,) = torch.autograd.grad(p.log(), w)
            slope += g if c == y[n] else 0
            information += log_p[n, c].exp() * g.flatten().outer(g.flatten())
    assert torch.allclose(score, slope, atol=1e-12)
    blocks = [information[5 * k : 5 * k + 5, 5 * k : 5 * k + 5] for k in range(3)]
    result = mixture.information(joint, log_p, shares, h)
    assert torch.allclose(result, torch.stack(blocks), atol=1e-12)
    same = h[:, :1].expand(-1, 4, -1)  # all maps alike: the curvature of a plain softmax
    log_p, joint = mixture.log_mixture(same @ w.T, shares)
    curvature = (log_p.exp() * (1 - log_p.exp())).T[..., None] * h[:, 0]
    result = mixture.information(joint, log_p, shares, same)
    assert torch.allclose(result, curvature.mT @ h[:, 0], atol=1e-12)
