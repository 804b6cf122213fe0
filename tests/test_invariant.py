"""Invariant weights: features, the bound, natural gradients and training, against brute force."""

import math

import pytest
import torch
from torch import Tensor, nn

from symrazor.data.toy import rings
from symrazor.groups.lie import so2
from symrazor.hyper import hyperparameters, weights
from symrazor.invariant import (
    Data,
    InvariantHead,
    InvariantWeights,
    Member,
    RandomFourier,
    Rectified,
    Sampling,
    Schedule,
    choose_starts,
    evaluate,
    mixture,
    train,
)
from symrazor.invariant.natural import NaturalSteps
from symrazor.transforms import AffineLie, LieDistribution, act, resample
from symrazor.variational import kl

DOUBLE = torch.float64


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def labels(n: int, classes: int = 3) -> Tensor:
    return torch.arange(n) % classes


def small(average: str = "logits", images: bool = False) -> InvariantWeights:
    """A model of three classes in float64 whose posterior is not the prior."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, 6, 6) if images else (2,)
    features = RandomFourier(shape, 7, 1.0, (), generator)
    group = "affine" if images else "rotation"
    widths = torch.full((6 if images else 1,), 0.4, dtype=DOUBLE)
    model = InvariantWeights(features.double(), AffineLie(group, widths), 3, average, 2.0)  # type: ignore[arg-type]
    model = model.double()
    with torch.no_grad():
        model.posterior.mean.copy_(noise(3, 7, seed=5))
        root = torch.linalg.cholesky(torch.cov(noise(7, 30, seed=6)) + 0.1 * torch.eye(7))
        model.posterior.root.set_(0.4 * root.expand(3, 7, 7))
    return model


# ---------------------------------------------------------------------------------------- features


@pytest.mark.parametrize("kind", [RandomFourier, Rectified])
def test_vectors_weights_and_inputs_agree_exactly(kind: type) -> None:
    maps = AffineLie("affine", torch.full((6,), 0.5, dtype=DOUBLE)).matrices(noise(4, 6) / 3)
    x, found = noise(5, 2, seed=1), []
    for where in ("weights", "input"):
        layer = kind((2,), 9, generator=torch.Generator().manual_seed(0), where=where).double()
        with torch.no_grad():
            layer.bias.copy_(noise(9, seed=3))
        found.append(layer(x, maps))
        by_hand = [
            layer.activation(act(x, maps)[:, s] @ _weight(layer).T + layer.bias) for s in range(4)
        ]
        expected = layer.scale * torch.stack(by_hand).mean(0)
        assert torch.allclose(found[-1], expected, atol=1e-12)
    assert torch.allclose(*found, atol=1e-12)


def _weight(layer: nn.Module) -> Tensor:
    factor = layer.frequency()  # type: ignore[operator]
    weight: Tensor = layer.weight  # type: ignore[assignment]
    return weight if factor is None else factor * weight


def test_pictures_by_hand_with_leading_dimensions_and_weights() -> None:
    layer = Rectified((2, 5, 5), 6, (3,), torch.Generator().manual_seed(0), where="input").double()
    with torch.no_grad():
        layer.weight.add_(0.1 * noise(*layer.weight.shape))
    maps = AffineLie("affine", torch.full((3, 6), 0.3, dtype=DOUBLE)).matrices(noise(4, 6) / 3)
    x, shares = noise(3, 5, 2, 5, 5, seed=1), torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=DOUBLE)
    found = layer(x, maps, shares)
    for m in range(3):
        moved = resample(x[m], maps[m]).flatten(2)
        z = (moved @ layer.weight[m].flatten(1).T + layer.bias[m]).relu() / math.sqrt(6)
        assert torch.allclose(found[m], torch.einsum("nsw,s->nw", z, shares), atol=1e-12)


@pytest.mark.parametrize("degrees", [90, 180])
def test_pictures_quarter_turns_agree_exactly(degrees: float) -> None:
    angle = torch.tensor([[math.radians(degrees)]], dtype=DOUBLE)
    maps = torch.linalg.matrix_exp(angle.unsqueeze(-1) * AffineLie("rotation").generators.double())
    x, found = noise(4, 2, 6, 6), []
    for where in ("weights", "input"):
        generator = torch.Generator().manual_seed(0)
        layer = RandomFourier((2, 6, 6), 8, 0.5, (), generator, where)  # type: ignore[arg-type]
        found.append(layer.double()(x, maps))
    assert torch.allclose(*found, atol=1e-10)


def test_features_approach_a_gaussian_kernel() -> None:
    layer = RandomFourier((2,), 40_000, 0.7, generator=torch.Generator().manual_seed(0)).double()
    x = noise(4, 2)
    phi = layer(x, torch.eye(2, dtype=DOUBLE).unsqueeze(0))
    expected = (-0.5 * 0.7**2 * torch.cdist(x, x).square()).exp()
    assert torch.allclose(phi @ phi.T, expected, atol=0.03)


# --------------------------------------------------------------------------------------- the bound


@pytest.mark.parametrize("average", ["logits", "probs"])
def test_averages_by_hand(average: str) -> None:
    """With hardly any posterior variance, what the model is can be written down."""
    model, x, y = small(average), noise(6, 2, seed=2), labels(6)
    with torch.no_grad():
        model.posterior.root.set_(1e-9 * torch.eye(7, dtype=DOUBLE).expand(3, 7, 7))
    how = Sampling(5, 2, "stochastic", torch.Generator().manual_seed(1))
    found = model.log_likelihood(x, y, how)
    maps, _ = model.distribution.draw(5, "stochastic", torch.Generator().manual_seed(1))
    f = torch.stack(
        [2.0 * model.features(x, maps[s : s + 1]) @ model.posterior.mean.T for s in range(5)]
    )
    p = f.mean(0).softmax(-1) if average == "logits" else f.softmax(-1).mean(0)
    assert torch.allclose(found, p.gather(1, y[:, None]).squeeze(1).log(), atol=1e-6)


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
    found = model.evidence(noise(6, 2), labels(6), 50).complexity
    root = q.root.matrix()
    mine = torch.distributions.MultivariateNormal(q.mean, scale_tril=root)
    prior = torch.distributions.MultivariateNormal(
        torch.zeros(3, 7, dtype=DOUBLE), torch.eye(7, dtype=DOUBLE).expand(3, 7, 7)
    )
    expected = torch.distributions.kl_divergence(mine, prior).sum()
    assert found.item() == pytest.approx(expected.item(), rel=1e-10)
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


# ------------------------------------------------------------------------------- natural gradients


def test_renewed_factor_is_a_root_of_the_inverse() -> None:
    q = small().posterior
    steps = NaturalSteps(q)
    A = noise(3, 7, 20)
    steps.precision = A @ A.mT + torch.eye(7, dtype=DOUBLE)
    steps.renew()
    root = q.root.matrix()
    assert torch.allclose(root @ root.mT, steps.precision.inverse(), atol=1e-12)
    assert torch.equal(root, root.tril())


def test_a_block_without_a_factor_keeps_the_old_one() -> None:
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


# ------------------------------------------------------------------------ averaged probabilities


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
    found = mixture.information(joint, log_p, shares, h)
    assert torch.allclose(found, torch.stack(blocks), atol=1e-12)
    same = h[:, :1].expand(-1, 4, -1)  # all maps alike: the curvature of a plain softmax
    log_p, joint = mixture.log_mixture(same @ w.T, shares)
    curvature = (log_p.exp() * (1 - log_p.exp())).T[..., None] * h[:, 0]
    found = mixture.information(joint, log_p, shares, same)
    assert torch.allclose(found, curvature.mT @ h[:, 0], atol=1e-12)


def test_averaged_probabilities_are_trained_like_features() -> None:
    """Without any width both averages are the same model, and end at the same bound."""
    found = []
    for average in ("logits", "probs"):
        features = RandomFourier((2,), 24, 5.0, (1,), torch.Generator().manual_seed(0))
        group = LieDistribution(so2(), torch.full((1, 1), 1e-6))
        model = InvariantWeights(features, group, 2, average)  # type: ignore[arg-type]
        data, members = Data.of([rings(120)]), [Member(learn=False)]
        train(model, data, members, Schedule(100, 120, 2, rates=(0.3, 0.02), every=8))
        model.average = "logits"  # the same draws for both
        bound, accuracy = evaluate(model, data, members, model.distribution.nodes(2))
        found.append((bound.per_datum.item(), accuracy.item()))
    assert found[0][0] == pytest.approx(found[1][0], abs=0.01)
    assert found[1][1] > 0.95


# ---------------------------------------------------------------------------------------- training


def _rings(starts: list[float], methods: list[str]) -> tuple[InvariantWeights, Data, list[Member]]:
    data = Data.of([rings(120)])
    members = [Member(method=method) for method in methods]  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    features = RandomFourier((2,), 64, 5.0, (len(members),), generator)
    widths = torch.tensor(starts).deg2rad().unsqueeze(1)
    return InvariantWeights(features, LieDistribution(so2(), widths), 2), data, members


PLAN = Schedule(steps=120, batch=120, samples=8, width_rate=0.08, rates=(0.3, 0.1), every=8)


def test_the_bound_learns_the_rotation_and_maximum_likelihood_does_not() -> None:
    model, data, members = _rings([5.0, 5.0, 90.0, 90.0], ["vi", "ml", "vi", "ml"])
    train(model, data, members, PLAN)
    vi, ml, vi_90, ml_90 = model.distribution.widths.rad2deg().squeeze(1).tolist()
    assert vi > 60
    assert ml < 30
    assert vi_90 > 115
    assert ml_90 < 110
    bound, accuracy = evaluate(model, data, members)
    assert float(accuracy.min()) > 0.95
    assert bound.per_datum[2] > bound.per_datum[0] - 0.02


def test_fixed_widths_stay_and_notes_are_taken() -> None:
    model, data, _ = _rings([30.0, 30.0], ["vi", "vi"])
    members = [Member(learn=False), Member()]
    plan = Schedule(steps=21, batch=50, samples=4, note_every=5)
    seen: list[int] = []
    history = train(model, data, members, plan, lambda step, m, h: seen.append(step))
    assert seen == history.steps == [0, 5, 10, 15, 20]
    assert torch.stack(history.widths).shape == (5, 2, 1)
    widths = model.distribution.widths.rad2deg().squeeze(1).tolist()
    assert widths[0] == pytest.approx(30, rel=1e-5)
    assert abs(widths[1] - 30) > 0.1


def test_the_closed_form_scale_leaves_outputs_and_raises_the_bound() -> None:
    model, h, y = small(), noise(6, 2, seed=2), labels(6)

    def bound() -> Tensor:
        how = Sampling(4, 2, "antithetic", torch.Generator().manual_seed(1))
        return model.evidence(h, y, 6, how).log_evidence.detach()

    before, fit, scale = bound(), model.predict(h), model.scale.value.item()
    q, D = model.posterior, 21
    moment = (q.trace() + q.mean.square().sum()).item()
    k = model.rescale()
    assert torch.allclose(model.predict(h), fit, atol=1e-12)
    assert model.scale.value.item() == pytest.approx(scale * math.sqrt(moment / D), rel=1e-12)
    gain = 0.5 * (moment - D - D * math.log(moment / D))  # of any prior over the best one
    assert bound().item() - before.item() == pytest.approx(gain, rel=1e-9)
    assert model.rescale().item() == pytest.approx(1.0, abs=1e-12)
    assert k.item() != pytest.approx(1.0, abs=0.01)


def test_the_scale_learned_by_gradient_is_that_in_closed_form() -> None:
    model, data, _ = _rings([60.0], ["vi"])
    model.features.requires_grad_(False)
    plan = Schedule(150, 120, 4, scale_rate=0.1, rates=(0.3, 0.02), every=4)
    train(model, data, [Member(learn=False)], plan)
    assert model.scale.value.item() != pytest.approx(10, rel=0.1)  # where it started
    assert model.rescale().item() == pytest.approx(1.0, abs=0.03)


def test_same_seed_same_result() -> None:
    found = []
    for _ in range(2):
        model, data, members = _rings([20.0], ["vi"])
        train(model, data, members, Schedule(steps=10, batch=40, samples=4))
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*found)


def test_starts_are_compared_by_the_bound() -> None:
    """On whole rings a small rotation is worse than a large one, and the start is kept."""
    model, data, members = _rings([170.0, 170.0], ["vi", "vi"])
    members[1] = Member(learn=False)
    bounds = choose_starts(model, data, members, PLAN, (1.0, 0.1), steps=30)
    assert bounds.shape == (2, 2)
    assert bounds[0, 0] > bounds[1, 0]
    assert torch.allclose(model.distribution.widths.rad2deg(), torch.tensor(170.0), rtol=1e-4)
    assert float(model.posterior.mean.detach().abs().max()) == 0


def test_learned_filters_raise_the_bound() -> None:
    data, found = Data.of([rings(120, seed=1)]), []
    for rate in (0.03, 0.0):
        features = Rectified((2,), 32, (1,), torch.Generator().manual_seed(0))
        model = InvariantWeights(features, LieDistribution(so2(), torch.full((1, 1), 0.1)), 2)
        plan = Schedule(80, 120, 4, weight_rate=rate, rates=(0.3, 0.1), every=8)
        train(model, data, [Member()], plan)
        found.append(evaluate(model, data, [Member()])[0].per_datum.item())
    assert found[0] > found[1] + 0.02


def test_a_head_on_any_network_learns_everything_at_once() -> None:
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


def test_wrong_models_are_refused() -> None:
    features, group = Rectified((1, 6, 6), 5), AffineLie("rotation")
    with pytest.raises(ValueError, match="expected average='logits' or 'probs', got 'votes'"):
        InvariantWeights(features, group, 3, "votes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 2 classes"):
        InvariantWeights(features, group, 1)
    model = InvariantWeights(features, group, 3)
    with pytest.raises(ValueError, match="expected inputs \\['n', 1, 6, 6\\], got \\[4, 36\\]"):
        model.evidence(torch.zeros(4, 36), labels(4), 4)
    with pytest.raises(ValueError, match="got S = 0"):
        model.evidence(torch.zeros(4, 1, 6, 6), labels(4), 4, Sampling(0))
    with pytest.raises(ValueError, match="the leading dimension 1, one place for each"):
        train(model, Data(torch.zeros(1, 4, 1, 6, 6), labels(4)[None]), [Member()])
    with pytest.raises(ValueError, match="do add nn.Flatten"):
        InvariantHead(nn.Conv2d(1, 2, 3), torch.zeros(2, 1, 6, 6), group, 3)
    with pytest.raises(ValueError, match="data sets of the same shape"):
        Data.of([(torch.zeros(3, 2), labels(3)), (torch.zeros(4, 2), labels(4))])
    with pytest.raises(ValueError, match="expected as many x as y, got 3 and 4"):
        Data.of([(torch.zeros(3, 2), labels(4))])
    with pytest.raises(ValueError, match="at least one data set"):
        Data.of([])
    with pytest.raises(ValueError, match="at least 1 feature"):
        Rectified((2,), 0)
    with pytest.raises(ValueError, match="expected where='weights' or 'input'"):
        Rectified((2,), 4, where="output")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (labels(4, 4), "expected labels between 0 and 2, got 3"),
        (labels(4) - 1, "expected labels between 0 and 2, got -1"),
        (labels(4).float(), "expected integer class labels of shape \\[4\\], got torch.float32"),
        (labels(3), "of shape \\[4\\], got torch.int64 \\[3\\]"),
        (nn.functional.one_hot(labels(4)), "of shape \\[4\\], got torch.int64 \\[4, 3\\]"),
    ],
)
def test_wrong_labels_are_refused(y: Tensor, message: str) -> None:
    model = InvariantWeights(Rectified((1, 6, 6), 5), AffineLie("rotation"), 3)
    with pytest.raises(ValueError, match=message):
        model.evidence(torch.zeros(4, 1, 6, 6), y, 4)
    with pytest.raises(ValueError, match="n_data of at least 1, got 0"):
        model.evidence(torch.zeros(4, 1, 6, 6), labels(4), 0)


def test_wrong_members_and_schedules_are_refused() -> None:
    model, data, _ = _rings([30.0], ["vi"])
    plan = Schedule(steps=2)
    with pytest.raises(ValueError, match="between 0 and 0, got data=3"):
        train(model, data, [Member(data=3)], plan)
    with pytest.raises(ValueError, match="expected method in .*, got 'mle'"):
        train(model, data, [Member(method="mle")], plan)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected labels between 0 and 1, got 2"):
        train(model, Data(data.x, data.y + 1), [Member()], plan)
    model.distribution = LieDistribution(so2(), 0.2)
    with pytest.raises(ValueError, match="expected widths \\[1, 1\\], a row for each member"):
        train(model, data, [Member()], plan)
    with pytest.raises(ValueError, match="expected samples of at least 1, got 0"):
        Schedule(samples=0)
    with pytest.raises(ValueError, match="expected rates above 0"):
        Schedule(rates=(0.1, 0.0))
