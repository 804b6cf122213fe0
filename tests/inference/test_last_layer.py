"""Test the posterior of the last layer against dense matrices and samples, in float64."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from symrazor.core.likelihood import Categorical, Gaussian, Poisson
from symrazor.inference import last_layer
from symrazor.inference.last_layer import (
    LastLayer,
    Unseen,
    calibrated,
    features_of,
    find_head,
    last_layer_posterior,
)

F64 = torch.float64


def network(outputs: int, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs, bias=bias))
    return layers.double().eval()


def posterior_of(
    model: nn.Module, x: Tensor, likelihood: nn.Module, scale: Tensor | float = 1.0
) -> LastLayer:
    found = last_layer_posterior(model, x, likelihood, scale)  # type: ignore[arg-type]
    assert found is not None
    return found


def prior_precision(found: LastLayer, one: Tensor, G: Tensor) -> float:
    """Return what was added to the product of the smallest eigenvalues of the data."""
    product = torch.linalg.eigvalsh(one.T @ one)[0] * torch.linalg.eigvalsh(G.double())[0]
    return float(1 / found.weights[0, 0] - product)


def inputs(n: int = 40, seed: int = 1) -> Tensor:
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(seed), dtype=F64)


@pytest.mark.parametrize("bias", [True, False])
def test_targets_against_dense_linear_regression(bias: bool) -> None:
    """The posterior of Gaussian targets is exact: compare with the dense covariance."""
    model, x, new = network(2, bias), inputs(), inputs(7, 2)
    likelihood = Gaussian(outputs=2)
    noise = torch.tensor([0.3, 0.7], dtype=F64)
    with torch.no_grad():
        likelihood.noise.value = noise  # type: ignore[misc]
    scale = torch.tensor([10.0, 0.1], dtype=F64)
    found = posterior_of(model, x, likelihood, scale)
    f, phi = features_of(model, ["2"], new)
    prediction = found.predict(f, phi)
    own = features_of(model, ["2"], x)[1]
    if bias:
        own, phi = (torch.cat([part, torch.ones_like(part[:, :1])], 1) for part in (own, phi))
    delta = prior_precision(found, own, (1 / noise.square()).diag())
    for k in range(2):
        precision = own.T @ own / noise[k] ** 2 + delta * torch.eye(own.shape[1], dtype=F64)
        epistemic = (phi @ torch.linalg.inv(precision) * phi).sum(1) * scale[k] ** 2
        assert prediction.epistemic is not None and prediction.variance is not None
        torch.testing.assert_close(prediction.epistemic[:, k], epistemic.sqrt(), rtol=1e-8, atol=0)
        total = epistemic + (noise[k] * scale[k]) ** 2
        torch.testing.assert_close(prediction.variance[:, k], total, rtol=1e-8, atol=0)


def test_the_prior_precision_maximises_the_evidence_of_the_layer() -> None:
    """Compare the fixed point with the maximum of the dense log evidence on a grid."""
    model, x = network(1), inputs()
    found = posterior_of(model, x, Gaussian(0.5, 1))
    _, phi = features_of(model, ["2"], x)
    one = torch.cat([phi, torch.ones_like(phi[:, :1])], 1)
    layer = model[2]
    assert isinstance(layer, nn.Linear)
    square = float((layer.weight.square().sum() + layer.bias.square().sum()).detach())
    H = one.T @ one / 0.25

    def log_evidence(delta: float) -> float:
        identity = torch.eye(len(H), dtype=F64)
        det = torch.linalg.slogdet(H + delta * identity)[1]
        prior = len(H) * torch.tensor(delta).log() - delta * square
        return float(0.5 * (prior - det))

    best = max(torch.logspace(-3, 3, 20_001).tolist(), key=log_evidence)
    assert prior_precision(found, one, 4 * torch.ones(1, 1)) == pytest.approx(best, rel=1e-3)


def test_classes_against_a_dense_kronecker_product_and_samples() -> None:
    model, x, new = network(3), inputs(400), inputs(4, 2)
    found = replace(posterior_of(model, x, Categorical(), 0.5), averaged=False)
    f, phi = features_of(model, ["2"], new)
    f = 0.5 * f  # a network with temperature 2
    _, own = features_of(model, ["2"], x)
    own = torch.cat([own, torch.ones_like(own[:, :1])], 1)
    p = (2 * features_of(model, ["2"], x)[0] / 2).softmax(1)
    G = (torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)).mean(0)
    one = torch.cat([phi, torch.ones_like(phi[:, :1])], 1)
    H = torch.kron(own.T @ own, G)
    H += torch.eye(len(H), dtype=F64) * prior_precision(found, own, G)
    covariance = torch.linalg.inv(H)
    prediction = found.predict(f, phi)
    assert prediction.epistemic is not None
    torch.testing.assert_close(prediction.mean, f.softmax(1))
    torch.manual_seed(0)
    for n in range(len(new)):
        J = torch.kron(one[n : n + 1], torch.eye(3, dtype=F64))
        V = 0.25 * J @ covariance @ J.T
        v = found.variances(phi[n : n + 1])[0]
        torch.testing.assert_close(
            0.25 * found.outputs @ v.diag() @ found.outputs.T, V, rtol=1e-8, atol=1e-12
        )
        q = f[n].softmax(0)
        jacobian = torch.diag(q) - torch.outer(q, q)
        dense = (jacobian @ V @ jacobian).diagonal().sqrt()
        torch.testing.assert_close(prediction.epistemic[n], dense, rtol=1e-8, atol=0)
        # To first order this is the spread of the probabilities of sampled networks.
        draws = torch.distributions.MultivariateNormal(f[n], V + 1e-12 * torch.eye(3)).sample(
            (20_000,)
        )
        torch.testing.assert_close(draws.softmax(1).std(0), dense, rtol=0.2, atol=2e-3)


@pytest.mark.parametrize(("classes", "tolerance"), [(2, 0.01), (4, 0.03)])
def test_averaged_probabilities_agree_with_samples(classes: int, tolerance: float) -> None:
    model, x, new = network(classes), inputs(12), 5 * inputs(5, 2)
    with torch.no_grad():
        model[2].weight *= 4  # type: ignore[operator]
    found = replace(posterior_of(model, x, Categorical()), averaged=True)
    f, phi = features_of(model, ["2"], new)
    v = found.variances(phi)
    torch.manual_seed(0)
    noise = torch.randn(50_000, *v.shape, dtype=F64) * v.sqrt()
    sampled = (f + noise @ found.outputs.T).softmax(2).mean(0)
    probit, plug_in = found.predict(f, phi).mean, f.softmax(1)
    assert float((probit - sampled).abs().max()) < tolerance
    assert float((plug_in - sampled).abs().max()) > 3 * tolerance  # the test can fail


def test_far_from_the_data_the_uncertainty_grows() -> None:
    model = nn.Sequential(nn.Linear(3, 1)).double().eval()
    found = posterior_of(model, inputs(), Gaussian(0.5, 1))
    near, far = (found.variances(s * inputs(5, 3)) for s in (1.0, 10.0))
    assert bool((far > 10 * near).all())


def test_the_epistemic_deviation_of_a_probability_is_possible() -> None:
    """A number between 0 and 1 with mean p has a deviation of at most sqrt(p (1 - p))."""
    found = posterior_of(network(3), inputs(5), Categorical())
    prediction = found.predict(100 * inputs(9, 4), 100 * torch.randn(9, 5).double())
    p = prediction.mean
    assert prediction.epistemic is not None
    assert bool((prediction.epistemic <= (p * (1 - p)).sqrt() + 1e-12).all())


@pytest.mark.parametrize(
    ("model", "head"),
    [
        (nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), ("2",)),
        (nn.Sequential(nn.Linear(3, 2), nn.Tanh()), ()),
        (nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), nn.Identity()), ("2",)),
        (nn.Sequential(nn.Unflatten(1, (3, 1)), nn.Linear(1, 2), nn.Flatten()), ()),
        (nn.Sequential(nn.Flatten()), ()),
    ],
)
def test_the_head_is_the_linear_layer_that_ends_the_network(
    model: nn.Module, head: tuple[str, ...]
) -> None:
    assert find_head(model, torch.randn(8, 3)) == head


class TwoParts(nn.Module):
    """A readout of two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2).double(), nn.Linear(1, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = 10 * (self.a(x[:, :2]) + self.b(x[:, 2:])) - 3
        return y


def test_two_layers_that_are_added_are_one_layer() -> None:
    torch.manual_seed(0)
    model = TwoParts().eval()
    x, new = inputs(), inputs(6, 2)
    found = posterior_of(model, x, Gaussian(0.5, 2), 10.0)
    assert found.head == ("a", "b")
    one = nn.Sequential(nn.Linear(3, 2)).double().eval()
    with torch.no_grad():
        one[0].weight.copy_(torch.cat([model.a.weight, model.b.weight], 1))
        one[0].bias.copy_(model.a.bias + model.b.bias)
    same = posterior_of(one, x, Gaussian(0.5, 2), 10.0)
    f, phi = features_of(model, found.head, new)
    torch.testing.assert_close(f, 10 * one(new).detach() - 3)
    got, expected = found.predict(f, phi), same.predict(f, new)
    torch.testing.assert_close(got.variance, expected.variance)


def test_other_likelihoods_and_large_layers_have_no_posterior(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert last_layer_posterior(network(1), inputs(), Poisson()) is None
    monkeypatch.setattr(last_layer, "MAX_FEATURES", 5)
    assert last_layer_posterior(network(1), inputs(), Gaussian()) is None


def test_a_part_of_the_training_data_gives_nearly_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x, new = network(1), inputs(4000), inputs(5, 2)
    whole = posterior_of(model, x, Gaussian(0.5, 1))
    monkeypatch.setattr(last_layer, "MAX_SAMPLES", 1000)
    part = posterior_of(model, x, Gaussian(0.5, 1))
    phi = features_of(model, ["2"], new)[1]
    torch.testing.assert_close(part.variances(phi), whole.variances(phi), rtol=0.2, atol=0)


def test_calibration_chooses_the_better_prediction() -> None:
    """With few training data the weights are uncertain, and with many they are not."""
    generator = torch.Generator().manual_seed(0)
    x, unseen = torch.randn(2, 400, 30, generator=generator, dtype=F64).unbind()
    truth = torch.randn(30, 1, generator=generator, dtype=F64)
    y = unseen @ truth + 0.5 * torch.randn(400, 1, generator=generator, dtype=F64)
    model = nn.Sequential(nn.Linear(30, 1)).double().eval()
    noisy = x[:40] @ truth + 0.5 * torch.randn(40, 1, generator=generator, dtype=F64)
    with torch.no_grad():
        ridge = x[:40].T @ x[:40] + 0.25 * torch.eye(30, dtype=F64)
        model[0].weight.copy_(torch.linalg.solve(ridge, x[:40].T @ noisy).T)
        model[0].bias.zero_()
    found = posterior_of(model, x[:40], Gaussian(0.5, 1))
    f, phi = features_of(model, ["0"], unseen)
    halves = [Unseen(found, f[part], phi[part], y[part]) for part in (slice(200), slice(200, 400))]
    best, scores = calibrated(halves)
    assert best.averaged and scores["averaged"] < scores["plug-in"]
    errors = (f - y).square().mean()
    variance = best.predict(f, phi).variance
    assert variance is not None
    ratio = ((f - y).square() / variance).mean()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0.1, atol=0)
    plug_in = 0.5 * (1 + (2 * torch.pi * errors).log())
    assert scores["plug-in"] == pytest.approx(float(plug_in), rel=1e-6)


def test_calibration_keeps_the_plug_in_prediction_of_classes_that_is_right() -> None:
    """Labels drawn from the plug-in probabilities are predicted best by these."""
    model, x = network(3), inputs(30)
    with torch.no_grad():
        model[2].weight *= 6  # type: ignore[operator]
    found = posterior_of(model, x, Categorical())
    f, phi = features_of(model, ["2"], 4 * inputs(4000, 5))
    y = torch.multinomial(f.softmax(1), 1, generator=torch.Generator().manual_seed(0))[:, 0]
    best, scores = calibrated([Unseen(found, f, phi, y)])
    assert not best.averaged and float(best.factor) == 1
    entropy = -(f.softmax(1) * f.log_softmax(1)).sum(1).mean()
    assert scores["plug-in"] == pytest.approx(float(entropy), abs=0.03)
