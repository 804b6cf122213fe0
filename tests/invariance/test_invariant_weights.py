"""Test features, averages, the bound and a head of invariant weights against brute force."""

import math

import pytest
import torch
from invariant_model import DOUBLE, labels, noise, small
from torch import Tensor, nn

from symrazor.core.parameters import hyperparameters, weights
from symrazor.groups.lie import so2
from symrazor.inference.variational import kl
from symrazor.invariance import (
    AffineLie,
    InvariantHead,
    InvariantWeights,
    LieDistribution,
    RandomFourier,
    Rectified,
    Sampling,
)
from symrazor.invariance.transformation import act, resample
from symrazor.training.batched_training import Data, Member, train


@pytest.mark.parametrize("kind", [RandomFourier, Rectified])
def test_vectors_weights_and_inputs_agree_exactly(kind: type) -> None:
    maps = AffineLie("affine", torch.full((6,), 0.5, dtype=DOUBLE)).matrices(noise(4, 6) / 3)
    x, result = noise(5, 2, seed=1), []
    for where in ("weights", "input"):
        layer = kind((2,), 9, generator=torch.Generator().manual_seed(0), where=where).double()
        with torch.no_grad():
            layer.bias.copy_(noise(9, seed=3))
        result.append(layer(x, maps))
        by_hand = [
            layer.activation(act(x, maps)[:, s] @ _weight(layer).T + layer.bias) for s in range(4)
        ]
        expected = layer.scale * torch.stack(by_hand).mean(0)
        assert torch.allclose(result[-1], expected, atol=1e-12)
    assert torch.allclose(*result, atol=1e-12)


def _weight(layer: nn.Module) -> Tensor:
    factor = layer.frequency()  # type: ignore[operator]
    weight: Tensor = layer.weight  # type: ignore[assignment]
    return weight if factor is None else factor * weight


def test_images_by_hand_with_leading_dimensions_and_weights() -> None:
    layer = Rectified((2, 5, 5), 6, (3,), torch.Generator().manual_seed(0), where="input").double()
    with torch.no_grad():
        layer.weight.add_(0.1 * noise(*layer.weight.shape))
    maps = AffineLie("affine", torch.full((3, 6), 0.3, dtype=DOUBLE)).matrices(noise(4, 6) / 3)
    x, shares = noise(3, 5, 2, 5, 5, seed=1), torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=DOUBLE)
    result = layer(x, maps, shares)
    for m in range(3):
        moved = resample(x[m], maps[m]).flatten(2)
        z = (moved @ layer.weight[m].flatten(1).T + layer.bias[m]).relu() / math.sqrt(6)
        assert torch.allclose(result[m], torch.einsum("nsw,s->nw", z, shares), atol=1e-12)


@pytest.mark.parametrize("degrees", [90, 180])
def test_quarter_turns_of_images_agree_exactly(degrees: float) -> None:
    angle = torch.tensor([[math.radians(degrees)]], dtype=DOUBLE)
    maps = torch.linalg.matrix_exp(angle.unsqueeze(-1) * AffineLie("rotation").generators.double())
    x, result = noise(4, 2, 6, 6), []
    for where in ("weights", "input"):
        generator = torch.Generator().manual_seed(0)
        layer = RandomFourier((2, 6, 6), 8, 0.5, (), generator, where)  # type: ignore[arg-type]
        result.append(layer.double()(x, maps))
    assert torch.allclose(*result, atol=1e-10)


def test_features_approach_a_gaussian_kernel() -> None:
    layer = RandomFourier((2,), 40_000, 0.7, generator=torch.Generator().manual_seed(0)).double()
    x = noise(4, 2)
    phi = layer(x, torch.eye(2, dtype=DOUBLE).unsqueeze(0))
    expected = (-0.5 * 0.7**2 * torch.cdist(x, x).square()).exp()
    assert torch.allclose(phi @ phi.T, expected, atol=0.03)


@pytest.mark.parametrize("average", ["logits", "probs"])
def test_averages_by_hand(average: str) -> None:
    """With almost no posterior variance the model has a closed form."""
    model, x, y = small(average), noise(6, 2, seed=2), labels(6)
    with torch.no_grad():
        model.posterior.root.set_(1e-9 * torch.eye(7, dtype=DOUBLE).expand(3, 7, 7))
    how = Sampling(5, 2, "stochastic", torch.Generator().manual_seed(1))
    result = model.log_likelihood(x, y, how)
    maps, _ = model.distribution.draw(5, "stochastic", torch.Generator().manual_seed(1))
    f = torch.stack(
        [2.0 * model.features(x, maps[s : s + 1]) @ model.posterior.mean.T for s in range(5)]
    )
    p = f.mean(0).softmax(-1) if average == "logits" else f.softmax(-1).mean(0)
    assert torch.allclose(result, p.gather(1, y[:, None]).squeeze(1).log(), atol=1e-6)


@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize("average", ["logits", "probs"])
def test_gradient_in_the_widths_by_finite_differences(average: str, images: bool) -> None:
    model = small(average, images)
    x = noise(6, 1, 6, 6, seed=2) if images else noise(6, 2, seed=2)
    y = labels(6)

    def bound() -> Tensor:
        how = Sampling(4, 2, "antithetic", torch.Generator().manual_seed(1))
        return model.evidence(x, y, 100, how).log_evidence

    bound().backward()
    for raw in hyperparameters(model).values():  # widths, the scale, the frequencies
        assert raw.grad is not None
        flat, grad = raw.data.view(-1), raw.grad.view(-1)
        for i in range(raw.numel()):
            step, kept = 1e-6, flat[i].item()
            with torch.no_grad():
                flat[i] = kept + step
                above = bound()
                flat[i] = kept - step
                below = bound()
                flat[i] = kept
            numeric = (above - below).item() / (2 * step)
            assert grad[i].item() == pytest.approx(numeric, rel=1e-5, abs=1e-5)


def test_local_reparameterisation_has_the_moments_of_draws() -> None:
    model, x = small(), noise(3, 2, seed=2)
    h = model.averaged(x, Sampling(8, generator=torch.Generator().manual_seed(0))).detach()
    generator = torch.Generator().manual_seed(1)
    direct = model.posterior.linear(h, 40_000, generator)
    by_weights = torch.einsum("nd,lcd->lnc", h, model.posterior.sample(40_000, generator))
    mean = h @ model.posterior.mean.T
    root = model.posterior.root.matrix()
    deviation = torch.einsum("nd,cde->nce", h, root).norm(dim=-1)
    for drawn in (direct, by_weights):
        assert torch.allclose(drawn.mean(0), mean, atol=0.03)
        assert torch.allclose(drawn.std(0), deviation, rtol=0.03)


def test_complexity_is_the_divergence() -> None:
    model, q = small(), small().posterior
    result = model.evidence(noise(6, 2), labels(6), 50).complexity
    root = q.root.matrix()
    posterior = torch.distributions.MultivariateNormal(q.mean, scale_tril=root)
    prior = torch.distributions.MultivariateNormal(
        torch.zeros(3, 7, dtype=DOUBLE), torch.eye(7, dtype=DOUBLE).expand(3, 7, 7)
    )
    expected = torch.distributions.kl_divergence(posterior, prior).sum()
    assert result.item() == pytest.approx(expected.item(), rel=1e-10)
    assert kl(q, 1.0).item() == pytest.approx(expected.item(), rel=1e-10)


def test_bound_is_below_importance_sampling() -> None:
    """E log p - KL never exceeds log E p, here by 200,000 draws from the posterior."""
    model, x, y = small(), noise(12, 2, seed=2), labels(12)
    nodes = model.distribution.nodes(16)
    maps, shares = model.distribution.at(nodes)
    q = model.posterior
    with torch.no_grad():
        h = 2.0 * model.features(x, maps, shares)
        w = q.sample(200_000, torch.Generator().manual_seed(0))
        f = torch.einsum("nd,lcd->lnc", h, w).log_softmax(-1)
        log_p = f.gather(-1, y.expand(len(w), -1).unsqueeze(-1)).sum((1, 2))
        log_prior = -0.5 * (w.square().sum((1, 2)) + 21 * math.log(2 * math.pi))
        exact = (log_p + log_prior - q.log_prob(w)).logsumexp(0) - math.log(len(w))
        bound = model.bound(log_p.mean(), 12).log_evidence
    assert bound < exact


def test_predictions_are_invariant_at_the_whole_circle() -> None:
    generator = torch.Generator().manual_seed(0)
    features = RandomFourier((2,), 20, 2.0, generator=generator).double()
    widths = torch.tensor([math.pi - 1e-9], dtype=DOUBLE)
    model = InvariantWeights(features, LieDistribution(so2(), widths), 2).double()
    with torch.no_grad():
        model.posterior.mean.copy_(noise(2, 20))
    nodes, x = model.distribution.nodes(12), noise(5, 2)
    turned = act(x, LieDistribution(so2(), widths).matrices(torch.tensor([[1 / 6]])))[:, 0]
    assert torch.allclose(model.predict(x, nodes), model.predict(turned, nodes), atol=1e-6)


def test_a_head_on_any_network_learns_all_parameters() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 16))
    x, y = torch.randn(20, 1, 8, 8), labels(20)
    model = InvariantHead(network, x[:2], AffineLie("rotation", 0.3), 3)
    how = Sampling(4, 2, "shifted", torch.Generator().manual_seed(0))
    before = model.evidence(x, y, 20, how).log_evidence
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(60):
        optimiser.zero_grad()
        loss = -model.evidence(x, y, 20, how).log_evidence
        loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
        optimiser.step()
    assert -loss.item() > before.item() + 10
    assert model.predict(x).shape == (20, 3)
    assert "features.network.0.weight" in weights(model)
    assert "distribution.width.raw" in hyperparameters(model)


def test_a_head_does_not_change_the_network() -> None:
    norm = nn.BatchNorm2d(1)
    network = nn.Sequential(norm, nn.Dropout(), nn.Flatten())
    InvariantHead(network, torch.ones(4, 1, 6, 6), AffineLie("rotation"), 3)
    assert norm.running_mean.item() == 0  # type: ignore[union-attr]
    assert network.training
    assert norm.training


@pytest.mark.parametrize("average", ["logits", "probs"])
def test_predictions_are_independent_of_the_batch_size(average: str) -> None:
    model, x = small(average), noise(7, 2, seed=4)
    with torch.no_grad():  # a posterior without spread: nothing is drawn
        model.posterior.root.set_(1e-12 * torch.eye(7, dtype=DOUBLE).expand(3, 7, 7))
    result = model.predict(x, batch=3)
    assert result.shape == (7, 3)
    assert torch.allclose(result, model.predict(x), atol=1e-9)


def test_invalid_models_raise() -> None:
    features, group = Rectified((1, 6, 6), 5), AffineLie("rotation")
    with pytest.raises(ValueError, match="average must be 'logits' or 'probs', got 'votes'"):
        InvariantWeights(features, group, 3, "votes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 2 classes"):
        InvariantWeights(features, group, 1)
    model = InvariantWeights(features, group, 3)
    with pytest.raises(ValueError, match="must have shape \\['n', 1, 6, 6\\], got \\[4, 36\\]"):
        model.evidence(torch.zeros(4, 36), labels(4), 4)
    with pytest.raises(ValueError, match="at least 1 transformation, got 0"):
        model.evidence(torch.zeros(4, 1, 6, 6), labels(4), 4, Sampling(0))
    with pytest.raises(ValueError, match="the leading dimension 1, one entry per member"):
        train(model, Data(torch.zeros(1, 4, 1, 6, 6), labels(4)[None]), [Member()])
    with pytest.raises(ValueError, match="Add nn.Flatten"):
        InvariantHead(nn.Conv2d(1, 2, 3), torch.zeros(2, 1, 6, 6), group, 3)
    with pytest.raises(ValueError, match="floating-point numbers, got torch.uint8. Use x.float"):
        InvariantHead(nn.Flatten(), torch.zeros(2, 1, 6, 6, dtype=torch.uint8), group, 3)
    with pytest.raises(ValueError, match="data sets must have the same shape"):
        Data.of([(torch.zeros(3, 2), labels(3)), (torch.zeros(4, 2), labels(4))])
    with pytest.raises(ValueError, match="x and y in data set 0 must have the same number"):
        Data.of([(torch.zeros(3, 2), labels(4))])
    with pytest.raises(ValueError, match="No data sets: pass at least one pair"):
        Data.of([])
    with pytest.raises(ValueError, match="at least 1 feature"):
        Rectified((2,), 0)
    with pytest.raises(ValueError, match="where must be 'weights' or 'input'"):
        Rectified((2,), 4, where="output")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (labels(4, 4), "Labels must be between 0 and 2, got 3"),
        (labels(4) - 1, "Labels must be between 0 and 2, got -1"),
        (labels(4).float(), "integer class labels of shape \\[4\\], got torch.float32"),
        (labels(0), "of shape \\[4\\], got torch.int64 of shape \\[0\\]"),
        (labels(3), "of shape \\[4\\], got torch.int64 of shape \\[3\\]"),
        (nn.functional.one_hot(labels(4)), "of shape \\[4\\], got torch.int64 of shape \\[4, 3\\]"),
    ],
)
def test_invalid_labels_raise(y: Tensor, message: str) -> None:
    model = InvariantWeights(Rectified((1, 6, 6), 5), AffineLie("rotation"), 3)
    with pytest.raises(ValueError, match=message):
        model.evidence(torch.zeros(4, 1, 6, 6), y, 4)
    with pytest.raises(ValueError, match="batch is empty"):
        model.evidence(torch.zeros(0, 1, 6, 6), labels(0), 4)
    with pytest.raises(ValueError, match="n_data must be at least 1, got 0"):
        model.evidence(torch.zeros(4, 1, 6, 6), labels(4), 0)
