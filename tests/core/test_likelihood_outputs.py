"""Dense outputs, ordered classes, predicted noise and many classes, against independent oracles."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributions, nn
from torch.func import hessian

import symrazor as sr
from symrazor.core.likelihood import Heteroscedastic, Likelihood, Ordinal, PerPosition
from symrazor.core.parameters import weights
from symrazor.curvature import Method, estimate_curvature
from symrazor.linalg.blocks import Dense
from symrazor.testing import assert_close
from symrazor.testing.oracles import output_hessian


def _expected_hessian(likelihood: Likelihood, f: Tensor, classes: int) -> Tensor:
    """Return the mean over y of the Hessian of the nll of one sample, from all classes."""
    labels = torch.arange(classes)
    p = (-likelihood.nll(f.expand(classes, -1), labels)).exp().detach()
    assert float(p.sum()) == pytest.approx(1, abs=1e-12)
    return sum(q * output_hessian(likelihood, f[0], y) for q, y in zip(p, labels, strict=True))


@pytest.mark.parametrize("classes", [2, 5])
def test_ordinal(classes: int) -> None:
    likelihood = Ordinal(classes)
    torch.manual_seed(0)
    f, y = torch.randn(6, 1).double(), torch.arange(6) % classes
    cumulative = torch.sigmoid(likelihood.thresholds.detach() - f)
    edges = torch.cat([torch.zeros(6, 1), cumulative, torch.ones(6, 1)], 1)
    p = edges.diff(dim=1)
    assert_close(likelihood.nll(f, y), -p.log()[torch.arange(6), y], 1e-10)
    assert_close(likelihood.mean(f), p, 1e-10)
    f.requires_grad_()
    expected = torch.autograd.grad(likelihood.nll(f, y).sum(), f)[0]
    assert_close(likelihood.residual(f, y).detach(), expected, 1e-10)
    root = likelihood.hessian_root(f).detach()
    for n in range(6):
        assert_close(
            root[:, n].T @ root[:, n],
            _expected_hessian(likelihood, f[n : n + 1].detach(), classes),
            1e-9,
        )
    drawn = likelihood.sample(
        f.detach().expand(6, 1).repeat(2000, 1), torch.Generator().manual_seed(0)
    )
    counts = torch.stack([(drawn.view(2000, 6) == c).double().mean(0) for c in range(classes)], 1)
    assert_close(counts, p, 0.08)


def test_ordinal_is_finite_at_extremes_and_learns_thresholds() -> None:
    likelihood = Ordinal(4)
    f = torch.tensor([[-80.0], [80.0]], requires_grad=True)
    for y in (torch.tensor([0, 0]), torch.tensor([3, 2])):
        value = likelihood.nll(f, y).sum() + likelihood.hessian_root(f).sum()
        gradients = torch.autograd.grad(value, [f, likelihood.first.raw, likelihood.gaps.raw])
        assert all(bool(torch.isfinite(g).all()) for g in gradients)
    torch.manual_seed(0)
    x = torch.randn(60, 2)
    y = (x[:, 0] * 2).round().clamp(0, 1).long() * 2
    razor = sr.Razor(nn.Linear(2, 1), Ordinal(3), 60, update="adam", lr=0.3)
    gap = razor.likelihood.gaps.value.item()
    for _ in range(5):
        razor.step([(x, y)])
    assert razor.likelihood.gaps.value.item() < gap  # nobody has class 1
    with pytest.raises(ValueError, match="between 0 and 2"):
        razor.likelihood.check(torch.zeros(2, 1), torch.tensor([0, 3]))


def test_heteroscedastic() -> None:
    likelihood = Heteroscedastic()
    torch.manual_seed(0)
    f, y = torch.randn(5, 4).double(), torch.randn(5, 2).double()
    m, s = f.chunk(2, 1)
    assert_close(likelihood.nll(f, y), -distributions.Normal(m, s.exp()).log_prob(y).sum(1), 1e-12)
    f.requires_grad_()
    expected = torch.autograd.grad(likelihood.nll(f, y).sum(), f)[0]
    assert_close(likelihood.residual(f, y).detach(), expected, 1e-12)
    f = f.detach()
    root = likelihood.hessian_root(f)
    draws = likelihood.sample(f[:1].expand(200_000, -1), torch.Generator().manual_seed(0))
    scores = likelihood.residual(f[:1].expand(200_000, -1), draws)
    assert_close(root[:, 0].T @ root[:, 0], scores.T @ scores / 200_000, 0.03)
    covariance = torch.diag_embed(torch.rand(5, 4).double())
    mean, variance = likelihood.closed_form_prediction(f, covariance)
    noise = torch.randn(100_000, 5, 4).double() * covariance.diagonal(dim1=1, dim2=2).sqrt()
    sampled = f + noise
    total = sampled[..., 2:].mul(2).exp().mean(0) + sampled[..., :2].var(0)
    assert_close(mean, m.detach(), 1e-12)
    assert_close(variance, total, 0.06)
    with pytest.raises(ValueError, match="two outputs per target"):
        likelihood.check(torch.zeros(2, 3), torch.zeros(2, 1))


class Segments(nn.Module):
    """A convolution [n, 1, h, w] -> [n, 3, h, w], or tokens [n, t, 4] -> [n, t, 3]."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        images = kind == "images"
        first, last = (
            (nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 3, 1))
            if images
            else (nn.Linear(4, 3), nn.TransformerEncoderLayer(3, 1, 4, 0.0, batch_first=True))
        )
        self.net = nn.Sequential(first, nn.Tanh(), last)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        return y


def _dense_case(kind: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Segments(kind).double().eval()
    x = (torch.randn(4, 1, 2, 3) if kind == "images" else torch.randn(4, 5, 4)).double()
    y = torch.randint(0, 3, (4, 2, 3) if kind == "images" else (4, 5))
    y[1] = -100
    y[2, 0] = -100
    return model, x, y


def _dense_ggn(model: nn.Module, x: Tensor, y: Tensor, order: tuple[str, ...]) -> Tensor:
    theta = [weights(model)[name] for name in order]
    total = torch.zeros((), dtype=torch.float64)
    for sample, labels in zip(x, y, strict=True):
        f = model(sample.unsqueeze(0))[0]
        rows = f.movedim(0, -1).reshape(-1, 3) if f.dim() == 3 else f
        for outputs, label in zip(rows, labels.flatten(), strict=True):
            if label == -100:
                continue
            J = torch.stack(
                [
                    torch.cat(
                        [g.flatten() for g in torch.autograd.grad(o, theta, retain_graph=True)]
                    )
                    for o in outputs
                ]
            )
            p = outputs.detach().softmax(0)
            total = total + J.T @ (torch.diag(p) - p.outer(p)) @ J
    return total


@pytest.mark.parametrize("kind", ["images", "tokens"])
def test_dense_outputs_with_ignored_labels(kind: str) -> None:
    model, x, y = _dense_case(kind)
    data = [(x[:2], y[:2]), (x[2:], y[2:])]
    estimate = estimate_curvature(model, PerPosition(), data, Method(structure="full"))
    (block,) = estimate.blocks
    assert isinstance(block, Dense)
    expected = _dense_ggn(model, x, y, block.names)
    assert_close(block.H, expected, 1e-10)
    f = model(x).detach()
    last = f.movedim(1, -1) if kind == "images" else f
    terms = F.cross_entropy(last.flatten(0, -2), y.flatten(), ignore_index=-100, reduction="sum")
    assert float(estimate.log_likelihood) == pytest.approx(-float(terms), rel=1e-12)
    log_dets = {
        structure: float(
            sr.Razor(model, PerPosition(), 4, structure=structure).evidence(data).log_det
        )
        for structure in ("full", "kernel", "auto", "block", "ekfac")
    }
    exact = float(torch.logdet(torch.eye(len(expected)).double() + expected))
    for structure in ("full", "kernel", "auto"):
        assert log_dets[structure] == pytest.approx(exact, rel=1e-7)
    assert log_dets["ekfac"] >= log_dets["block"] * (1 - 1e-9) >= exact * (1 - 1e-9)


@pytest.mark.parametrize("probe", ["spectral", "label"])
def test_one_probe_of_dense_outputs_is_unbiased(probe: str) -> None:
    model, x, y = _dense_case("images")
    exact, sampled = (
        estimate_curvature(
            model,
            PerPosition(),
            [(x, y)],
            Method(structure="full", estimator=estimator, samples=samples, probe=probe),
            generator=torch.Generator().manual_seed(0),
        ).blocks[0]
        for estimator, samples in (("exact", 1), ("mc", 500))
    )
    assert isinstance(exact, Dense)
    assert isinstance(sampled, Dense)
    assert_close(sampled.H, exact.H, 0.15)


@pytest.mark.parametrize("each", ["gaussian", "bernoulli", "poisson"])
def test_dense_targets_with_missing_values(each: str) -> None:
    """The nll, its gradient and the root of every position that counts, and zero elsewhere."""
    torch.manual_seed(0)
    likelihood, inner = PerPosition(each), PerPosition(each).each
    f = torch.randn(3, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    y = likelihood.sample(f, torch.Generator().manual_seed(0)).double()
    y[0, :, 1] = -100
    likelihood.check(f, y)
    rows, labels = (t.movedim(1, -1).reshape(-1, 2) for t in (f, y))
    counts = (labels != -100).all(1)
    expected = inner.nll(rows[counts], labels[counts]).sum()
    assert_close(likelihood.nll(f, y).sum(), expected, 1e-12)
    gradient = torch.autograd.grad(expected, f)[0]
    assert_close(likelihood.residual(f, y).detach(), gradient, 1e-12)
    root = likelihood.masked_root(likelihood.hessian_root(f), y).detach().flatten(2)

    def nll(outputs: Tensor) -> Tensor:
        return likelihood.nll(outputs.view(1, 2, 2, 2), y[:1]).sum()

    assert_close(root[:, 0].T @ root[:, 0], hessian(nll)(f[0].detach().flatten()), 1e-10)
    assert math.isfinite(likelihood.scores(f.detach(), y)["nll"])


def test_scores_predictions_and_training_of_dense_outputs() -> None:
    model, x, y = _dense_case("images")
    likelihood = PerPosition()
    f = model(x).detach()
    accuracy = (f.argmax(1) == y)[y != -100].double().mean()
    assert likelihood.scores(f, y)["accuracy"] == pytest.approx(float(accuracy))
    assert likelihood.scores(torch.stack([f, f]), y) == pytest.approx(likelihood.scores(f, y))
    posterior = sr.Razor(model, likelihood, 4).posterior([(x, y)])
    for how in ("mc", "sampling"):
        mean = posterior.predict(x, how=how, samples=20).mean
        assert mean.shape == f.shape
        assert_close(mean.sum(1), torch.ones(4, 2, 3).double(), 1e-10)
    fit = sr.fit(model, (x, y), PerPosition(), epochs=2, test=(x, y), progress=False)
    assert math.isfinite(float(fit.evidence.log_evidence))


@pytest.mark.parametrize(
    ("f", "y", "hint"),
    [
        (torch.zeros(2, 3), torch.zeros(2).long(), "one label per position"),
        (torch.zeros(2, 3, 4, 4), torch.zeros(2, 4, 3).long(), "second one"),
        (torch.zeros(2, 5, 3), torch.full((2, 5), -100), "No label"),
        (torch.zeros(2, 5, 3), torch.full((2, 5), 3), "not between 0 and 2"),
    ],
)
def test_wrong_dense_labels(f: Tensor, y: Tensor, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        PerPosition().check(f, y)


def test_dense_outputs_without_a_dense_likelihood() -> None:
    model, x, y = _dense_case("images")
    with pytest.raises(ValueError, match="PerPosition"):
        sr.Razor(model, "categorical", 4).evidence([(x, y)])


def test_probes_of_many_classes_do_not_form_the_root() -> None:
    """The probe is unbiased, and its memory is proportional to the number of classes."""
    torch.manual_seed(0)
    likelihood, f = sr.Categorical(), torch.randn(2, 70).double()
    draws = likelihood.sampled_root(f, 40_000, torch.Generator().manual_seed(0))
    product = torch.einsum("snk,snl->nkl", draws, draws)
    p = f.softmax(1)
    for n in range(2):
        assert_close(product[n], torch.diag(p[n]) - p[n].outer(p[n]), 0.05)
    large = torch.zeros(4, 200_000)
    assert likelihood.sampled_root(large, 1).shape == (1, 4, 200_000)
