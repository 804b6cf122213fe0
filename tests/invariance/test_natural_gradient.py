"""Test natural gradients of the posterior, with averaged features and probabilities."""

import pytest
import torch
from invariant_model import DOUBLE, labels, noise, small
from torch import Tensor

from symrazor.data import rings
from symrazor.groups.lie import so2
from symrazor.invariance import InvariantWeights, LieDistribution, RandomFourier, Rectified, mixture
from symrazor.invariance.natural_gradient import NaturalSteps
from symrazor.training.batched_training import BatchedConfig, Data, Member, evaluate, train


def test_the_factor_is_a_root_of_the_inverse_precision() -> None:
    q = small().posterior
    steps = NaturalSteps(q)
    A = noise(3, 7, 20)
    steps.precision = A @ A.mT + torch.eye(7, dtype=DOUBLE)
    steps.renew()
    root = q.root.matrix()
    assert torch.allclose(root @ root.mT, steps.precision.inverse(), atol=1e-12)
    assert torch.equal(root, root.tril())


def test_a_block_without_a_factor_keeps_its_previous_factor() -> None:
    q = small().posterior
    steps, before = NaturalSteps(q), q.root.matrix().detach().clone()
    steps.precision[1] = -steps.precision[1]
    steps.renew()
    after = q.root.matrix()
    assert torch.allclose(after[1], before[1])
    assert torch.allclose(after[0], torch.eye(7, dtype=DOUBLE))


def test_natural_steps_reach_the_optimum_of_the_bound() -> None:
    """A long run of L-BFGS on the same bound, by fixed Gauss-Hermite-like noise, is no better."""
    h, y = noise(40, 4), labels(40)
    z = noise(64, 40, 3, seed=9)
    z = torch.cat([z, -z])

    def bound(q: InvariantWeights) -> Tensor:
        post = q.posterior
        spread = torch.einsum("nd,cde->nce", h, post.root.matrix()).norm(dim=-1)
        f = (h @ post.mean.T + spread * z).log_softmax(-1)
        fit = f.gather(-1, y.expand(len(z), -1).unsqueeze(-1)).mean(0).sum()
        return q.bound(fit, 40).log_evidence

    def fresh() -> InvariantWeights:
        layer = Rectified((2,), 4).double()
        return InvariantWeights(layer, LieDistribution(so2()), 3).double()

    natural = fresh()
    steps = NaturalSteps(natural.posterior, every=1)
    hot = torch.nn.functional.one_hot(y, 3).double()
    for _ in range(150):
        spread = torch.einsum("nd,cde->nce", h, natural.posterior.root.matrix()).norm(dim=-1)
        p = (h @ natural.posterior.mean.T + spread * z).softmax(-1).detach()
        steps.step(h, hot - p.mean(0), (p * (1 - p)).mean(0), 40, 0.3)
    steps.renew()
    other = fresh()
    solver = torch.optim.LBFGS(
        other.posterior.parameters(), max_iter=300, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        solver.zero_grad()
        loss = -bound(other)
        loss.backward()
        return loss

    solver.step(closure)
    assert bound(natural).item() == pytest.approx(bound(other).item(), abs=0.02)
    assert torch.allclose(natural.posterior.mean, other.posterior.mean, atol=0.05)


def test_outputs_of_all_maps_share_the_weights_of_a_draw() -> None:
    model, h = small("probs"), noise(2, 4, 7, seed=1)
    f = mixture.outputs(model.posterior, h, 20_000, torch.Generator().manual_seed(0)).detach()
    mean, root = h @ model.posterior.mean.T, model.posterior.root.matrix()
    assert torch.allclose(f.mean(0), mean, atol=1e-10)  # in pairs
    for n in range(2):
        for c in range(3):
            expected = (h[n] @ root[c]) @ (h[n] @ root[c]).T
            assert torch.allclose(torch.cov(f[:, n, :, c].T), expected, atol=0.1)
    other = (f - mean)[:, 0, 0, 0] * (f - mean)[:, 1, 0, 0]
    assert abs(other.mean()) < 0.1  # of another datum: independent
    point = mixture.outputs(model.posterior, h, 3, noise=torch.zeros(1, 1, dtype=DOUBLE))
    assert torch.allclose(point, mean.expand(3, -1, -1, -1))


def test_averaged_probabilities_and_features_reach_the_same_bound() -> None:
    """At width zero both averages are the same model."""
    result = []
    for average in ("logits", "probs"):
        features = RandomFourier((2,), 24, 5.0, (1,), torch.Generator().manual_seed(0))
        group = LieDistribution(so2(), torch.full((1, 1), 1e-6))
        model = InvariantWeights(features, group, 2, average)  # type: ignore[arg-type]
        data, members = Data.of([rings(120)]), [Member(learn=False)]
        train(model, data, members, BatchedConfig(100, 120, 2, rates=(0.3, 0.02), every=8))
        model.average = "logits"  # the same draws for both
        bound, accuracy = evaluate(model, data, members, model.distribution.nodes(2))
        result.append((bound.per_datum.item(), accuracy.item()))
    assert result[0][0] == pytest.approx(result[1][0], abs=0.01)
    assert result[1][1] > 0.95
