"""Likelihoods and priors of other families, added from outside the package."""

import math
from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import Tensor, nn

import symrazor as sr
from symrazor.core.likelihood import LIKELIHOODS, register_likelihood
from symrazor.inference.evidence import laplace_evidence

F64 = torch.float64


class Exponential(sr.Likelihood):
    """Waiting times y > 0 with log rate f; the Fisher information is the identity."""

    def nll(self, f: Tensor, y: Tensor) -> Tensor:
        return (f.exp() * y.reshape(f.shape) - f).sum(-1)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        return f.exp() * y.reshape(f.shape) - 1

    def hessian_root(self, f: Tensor) -> Tensor:
        n, k = f.shape
        return torch.eye(k, dtype=f.dtype).unsqueeze(1).expand(k, n, k)

    def sample(self, f: Tensor, generator: torch.Generator | None) -> Tensor:
        uniform = torch.rand(f.shape, generator=generator, dtype=f.dtype)
        return -torch.log1p(-uniform) / f.detach().exp()

    def mean(self, f: Tensor) -> Tensor:
        return (-f).exp()


@pytest.fixture
def registered() -> Iterator[str]:
    register_likelihood("exponential")(Exponential)
    yield "exponential"
    del LIKELIHOODS["exponential"]


def _waiting_times() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 2, generator=generator)
    return x, Exponential().sample(x[:, :1], generator)


def test_a_registered_likelihood_works_by_name_in_razor_and_fit(registered: str) -> None:
    x, y = _waiting_times()
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    by_name = sr.Razor(model, registered, 60).evidence([(x, y)])
    by_object = sr.Razor(model, Exponential(), 60).evidence([(x, y)])
    assert float(by_name.log_evidence) == float(by_object.log_evidence)
    fit = sr.fit(nn.Linear(2, 1), (x, y), test=(x, y), likelihood=registered, epochs=20, lr=0.05)
    assert isinstance(fit.razor.likelihood, Exponential)
    assert set(fit.reading.test) == {"mse", "nll"}
    assert fit.history[-1]["nll"] < fit.history[0]["nll"]
    assert fit.razor.posterior([(x, y)]).predict(x, "mc").mean.shape == (60, 1)
    with pytest.raises(ValueError, match="Exponential has no closed-form prediction. Use how='mc'"):
        fit.razor.posterior([(x, y)]).predict(x)


def test_names_of_likelihoods_are_unique() -> None:
    with pytest.raises(ValueError, match="'gaussian' belongs to Gaussian"):
        register_likelihood("gaussian")(Exponential)
    with pytest.raises(
        ValueError, match="Unknown likelihood 'exponential'. Use one of 'categorical'"
    ):
        sr.Razor(nn.Linear(2, 1), "exponential", 10)


class ShiftedGaussian(sr.Prior):
    """Weights with a fixed mean that is not zero, and one learned precision."""

    def __init__(self, theta: Mapping[str, Tensor], mean: float, precision: float = 1.0) -> None:
        super().__init__(theta, "scalar")
        self.mean = mean
        self.log_delta = nn.Parameter(torch.tensor(math.log(precision), dtype=F64))

    def log_prob(self, theta: Mapping[str, Tensor]) -> Tensor:
        scale = (-0.5 * self.log_delta).exp()
        density = torch.distributions.Normal(torch.tensor(self.mean, dtype=F64), scale)
        return torch.stack(
            [density.log_prob(value.double()).sum() for value in theta.values()]
        ).sum()

    def log_curvature(self, theta: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict.fromkeys(theta, self.log_delta)

    def precision_of(self, name: str) -> Tensor:
        return self.log_delta.exp()


def _regression() -> tuple[nn.Linear, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=generator, dtype=F64)
    y = x @ torch.tensor([1.9, 2.1, 2.0], dtype=F64) + 0.1 * torch.randn(40, generator=generator)
    model = nn.Linear(3, 1, bias=False).double()
    return model, x, y


def test_evidence_under_a_shifted_prior_is_exact() -> None:
    """A shifted prior is a centred one for targets from which the prior mean is subtracted."""
    model, x, y = _regression()
    prior = ShiftedGaussian(sr.weights(model), 2.0, 4.0)
    exact = sr.exact_evidence(x, y - 2.0 * x.sum(1), 4.0, 0.3)
    with torch.no_grad():
        model.weight.copy_(2.0 + exact.mean.unsqueeze(0))
    razor = sr.Razor(model, sr.Gaussian(0.3), 40, prior=prior, structure="full")
    evidence = razor.evidence([(x, y.unsqueeze(1))])
    assert float(evidence.log_evidence) == pytest.approx(
        float(exact.evidence.log_evidence), rel=1e-9
    )
    assert float(evidence.log_prior) == pytest.approx(float(exact.evidence.log_prior), rel=1e-9)


def test_razor_trains_and_updates_with_another_prior() -> None:
    """Penalty, its gradient and the implicit step agree, and Adam raises the evidence."""
    model, x, y = _regression()
    batch = [(x, y.unsqueeze(1))]
    prior = ShiftedGaussian(sr.weights(model), 2.0, 4.0)
    razor = sr.Razor(model, sr.Gaussian(0.3), 40, prior=prior, update="adam", inner_steps=20)
    (slope,) = torch.autograd.grad(razor.penalty(), [model.weight])
    torch.testing.assert_close(slope, 4.0 * (model.weight.detach() - 2.0) / 40)
    razor.add_penalty_gradient_()
    torch.testing.assert_close(model.weight.grad, slope)
    before = model.weight.detach().clone()
    razor.shrink_(1e9)
    torch.testing.assert_close(
        model.weight.detach(), torch.full_like(before, 2.0), rtol=1e-6, atol=0
    )
    with torch.no_grad():
        model.weight.copy_(2.0 + sr.exact_evidence(x, y - 2 * x.sum(1), 4.0, 0.3).mean)
    first, second = razor.step(batch), razor.evidence(batch)
    assert float(second.log_evidence) > float(first.log_evidence)
    assert float(razor.prior.precisions["all"]) > 4.0  # the weights are within 0.1 of the mean
    razor.load_state_dict(razor.state_dict())
    with pytest.raises(ValueError, match="ShiftedGaussian has no fixed-point update. Use Razor"):
        sr.Razor(model, sr.Gaussian(0.3), 40, prior=prior).step(batch)
    with pytest.raises(ValueError, match="prior_precision has no effect together with prior="):
        sr.Razor(model, "gaussian", 40, prior=prior, prior_precision=2.0)


def test_prior_without_a_family_is_gaussian() -> None:
    """`Prior` makes a Gaussian prior, whose shortcuts equal the defaults of the interface."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    theta = {name: value.detach() for name, value in sr.weights(model).items()}
    prior = sr.Prior(theta, 3.0, "layer")
    assert isinstance(prior, sr.GaussianPrior)
    assert repr(prior) == "GaussianPrior(2 groups, precision 3)"
    expected = torch.distributions.Normal(0.0, torch.tensor(3.0, dtype=F64).rsqrt())
    total = sum(float(expected.log_prob(value).sum()) for value in theta.values())
    assert float(prior.log_prob(theta).detach()) == pytest.approx(total)
    torch.testing.assert_close(prior.evidence_term(theta), sr.Prior.evidence_term(prior, theta))
    copies = [{k: nn.Parameter(v.detach().clone()) for k, v in theta.items()} for _ in range(2)]
    rates = dict.fromkeys(theta, 0.7)
    prior.shrink_(copies[0], 0.1, rates)
    sr.Prior.shrink_(prior, copies[1], 0.1, rates)
    prior.add_penalty_gradient_(copies[0], 0.1)
    sr.Prior.add_penalty_gradient_(prior, copies[1], 0.1)
    for name in theta:
        torch.testing.assert_close(copies[0][name], copies[1][name])
        torch.testing.assert_close(copies[0][name].grad, copies[1][name].grad)


def test_short_representations() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    razor = sr.Razor(model, "categorical", 30)
    x, y = torch.randn(30, 3), torch.arange(30) % 2
    assert (
        repr(razor) == "Razor(Linear, Categorical, n_data=30, GaussianPrior(2 groups, precision 1))"
    )
    posterior = razor.posterior([(x, y)])
    assert repr(posterior) == "Posterior(Linear, 8 weights, Dense/Kron curvature of 30 data)"
    razor.evidence([(x, y)])
    assert repr(razor).count("\n") == 1 and "Evidence(" in repr(razor)
    assert laplace_evidence(posterior.curvature, razor.prior, sr.weights(model)).n_data == 30
