"""Annealed importance sampling against closed forms, quadrature and nested sampling."""

import math

import pytest
import torch
from torch import Tensor, nn

import symrazor as sr
from symrazor.inference.exact import exact_evidence
from symrazor.testing.annealing import BatchedLikelihood, annealed_log_evidence

F64 = torch.float64


def regression_data(n: int, inputs: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, inputs, generator=generator, dtype=F64)
    return x, torch.sin(2 * x[:, :1]) + 0.3 * torch.randn(n, 1, generator=generator, dtype=F64)


def perceptron(inputs: int, width: int, outputs: int, bias: bool = True) -> nn.Module:
    hidden, head = nn.Linear(inputs, width, bias), nn.Linear(width, outputs, bias)
    return nn.Sequential(hidden, nn.Tanh(), head).double()


def log_grid_integral(target: BatchedLikelihood, points: int, limit: float = 6.0) -> float:
    """Return the log evidence by the trapezoidal rule on a grid of whitened weights."""
    axis = torch.linspace(-limit, limit, points, dtype=F64)
    z = torch.cartesian_prod(*[axis] * target.size)
    with torch.no_grad():
        log_density = torch.cat(
            [target(part) - 0.5 * part.square().sum(1) for part in z.split(8192)]
        )
    cell = math.log(2 * limit / (points - 1)) - 0.5 * math.log(2 * math.pi)
    return float(log_density.logsumexp(0)) + target.size * cell


def nested_sampling(
    target: BatchedLikelihood, live: int, removed: int, moves: int, seed: int
) -> tuple[float, float]:
    """Return the log evidence by nested sampling (Skilling 2006), and its standard error.

    In each round the `removed` worst of `live` draws from the prior are replaced by copies of
    others, which then move by random walks that leave the prior invariant, above the likelihood of
    the worst one kept.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=F64)

    z = normal(live, target.size)
    value, log_volume, step = target(z), 0.0, 0.5
    terms, volumes = [], []
    while True:
        order = value.argsort()
        z, value = z[order], value[order]
        for index in range(removed):
            smaller = log_volume - 1 / (live - index)
            volumes.append(log_volume + math.log1p(-math.exp(smaller - log_volume)))
            terms.append(float(value[index]))
            log_volume = smaller
        total = torch.logsumexp(torch.tensor(terms) + torch.tensor(volumes), 0)
        if float(value[-1]) + log_volume < float(total) - 5:
            break
        threshold = value[removed - 1]
        source = torch.randint(removed, live, (removed,), generator=generator)
        new, new_value, accepted = z[source], value[source], 0.0
        for _ in range(moves):
            # Autoregressive proposals are reversible for the standard normal prior.
            proposal = math.sqrt(1 - step**2) * new + step * normal(*new.shape)
            proposed = target(proposal)
            accept = proposed > threshold
            new = torch.where(accept.unsqueeze(1), proposal, new)
            new_value = torch.where(accept, proposed, new_value)
            accepted += float(accept.double().mean()) / moves
        step = min(step * math.exp(accepted - 0.3), 0.99)
        z[:removed], value[:removed] = new, new_value
    rest = value[removed:].logsumexp(0) + log_volume - math.log(live - removed)
    log_evidence = float(torch.logaddexp(total, rest))
    # The log volume of the bulk is a sum of about live x information exponential variables.
    shares = (torch.tensor(terms) + torch.tensor(volumes)).softmax(0)
    information = float((shares * torch.tensor(terms)).sum()) - log_evidence
    return log_evidence, math.sqrt(information / live)


def test_linear_regression_has_the_closed_form() -> None:
    x, y = regression_data(12, 3, seed=0)
    model = nn.Linear(3, 1, bias=False).double()
    prior = sr.GaussianPrior(sr.weights(model), 2.0)
    exact = float(exact_evidence(x, y[:, 0], 2.0, 0.7).evidence.log_evidence)
    options = {"chains": 1024, "temperatures": 800, "leapfrog_steps": 2}
    result = annealed_log_evidence(model, sr.Gaussian(0.7), (x, y), prior, **options)
    assert result.standard_error < 1e-2
    assert abs(result.log_evidence - exact) < 3 * result.standard_error
    assert abs(result.reverse_log_evidence - exact) < 3e-2


def test_precisions_by_group_enter_the_closed_form() -> None:
    x, y = regression_data(12, 2, seed=1)
    model = nn.Linear(2, 1).double()
    prior = sr.GaussianPrior(sr.weights(model), {"weight": 0.5, "bias": 4.0})
    features = torch.cat([x, torch.ones(12, 1, dtype=F64)], 1)
    precision = torch.tensor([0.5, 0.5, 4.0], dtype=F64)
    exact = float(exact_evidence(features, y[:, 0], precision, 0.7).evidence.log_evidence)
    result = annealed_log_evidence(model, sr.Gaussian(0.7), (x, y), prior)
    assert abs(result.log_evidence - exact) < 4 * result.standard_error < 0.3


@pytest.mark.parametrize("likelihood", ["gaussian", "bernoulli"])
def test_a_network_of_two_weights_agrees_with_quadrature(likelihood: str) -> None:
    """The posterior has two modes, at (v, w) and (-v, -w), and Laplace counts one."""
    x, y = regression_data(16, 1, seed=2)
    model = perceptron(1, 1, 1, bias=False)
    prior = sr.GaussianPrior(sr.weights(model), 1.0)
    noise = sr.Gaussian(0.5) if likelihood == "gaussian" else sr.Bernoulli()
    data = (x, y) if likelihood == "gaussian" else (x, (y > 0).long())
    exact = log_grid_integral(BatchedLikelihood(model, noise, data, prior), points=301)
    result = annealed_log_evidence(model, noise, data, prior)
    assert abs(result.log_evidence - exact) < 4 * result.standard_error < 0.3
    signs = result.samples.sign()
    assert abs(float(signs[:, 0].mean())) < 0.4  # both modes are found
    assert float(signs.prod(1).mean()) > 0.6


def test_a_network_of_three_weights_agrees_with_quadrature() -> None:
    x, y = regression_data(16, 1, seed=3)
    model = nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 1, bias=False)).double()
    prior = sr.GaussianPrior(sr.weights(model), 0.5)
    target = BatchedLikelihood(model, sr.Gaussian(0.5), (x, y), prior)
    exact = log_grid_integral(target, points=121)
    assert log_grid_integral(target, points=101) == pytest.approx(exact, abs=1e-3)
    result = annealed_log_evidence(model, sr.Gaussian(0.5), (x, y), prior)
    assert abs(result.log_evidence - exact) < 4 * result.standard_error < 0.3


def test_the_nested_sampler_has_the_closed_form() -> None:
    x, y = regression_data(12, 3, seed=0)
    model = nn.Linear(3, 1, bias=False).double()
    target = BatchedLikelihood(
        model, sr.Gaussian(0.7), (x, y), sr.GaussianPrior(sr.weights(model), 2.0)
    )
    exact = float(exact_evidence(x, y[:, 0], 2.0, 0.7).evidence.log_evidence)
    estimate, error = nested_sampling(target, live=400, removed=40, moves=20, seed=0)
    assert abs(estimate - exact) < 3 * error < 0.5


@pytest.mark.parametrize("likelihood", ["gaussian", "categorical"])
def test_a_network_of_ten_weights_agrees_with_nested_sampling(likelihood: str) -> None:
    x, y = regression_data(16, 1, seed=4)
    model = perceptron(1, 3, 1) if likelihood == "gaussian" else perceptron(1, 2, 2)
    noise = sr.Gaussian(0.5) if likelihood == "gaussian" else sr.Categorical()
    data = (x, y) if likelihood == "gaussian" else (x, (y[:, 0] > 0).long())
    prior = sr.GaussianPrior(sr.weights(model), 1.0)
    result = annealed_log_evidence(model, noise, data, prior)
    target = BatchedLikelihood(model, noise, data, prior)
    assert target.size == 10
    estimate, error = nested_sampling(target, live=400, removed=40, moves=40, seed=0)
    tolerance = 3 * math.hypot(error, result.standard_error)
    assert abs(result.log_evidence - estimate) < tolerance < 0.9


@pytest.mark.slow
def test_shared_weights_agree_with_nested_sampling() -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(24, 1, 5, generator=generator, dtype=F64)
    y = (x * x.roll(1, -1)).sum((1, 2)).sign().clamp(min=0).long()
    conv = nn.Conv1d(1, 2, 3, padding=1, padding_mode="circular")
    head = [nn.Tanh(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(2, 2)]
    model = nn.Sequential(conv, *head).double()
    prior = sr.GaussianPrior(sr.weights(model), 1.0)
    result = annealed_log_evidence(model, "categorical", (x, y), prior, temperatures=400)
    target = BatchedLikelihood(model, "categorical", (x, y), prior)
    estimate, error = nested_sampling(target, live=1000, removed=50, moves=60, seed=0)
    tolerance = 3 * math.hypot(error, result.standard_error)
    assert abs(result.log_evidence - estimate) < tolerance < 0.5


def test_the_seed_determines_the_result_and_the_weights_do_not() -> None:
    x, y = regression_data(8, 1, seed=0)
    options = {"chains": 16, "temperatures": 20}
    model = perceptron(1, 1, 1)
    prior = sr.GaussianPrior(sr.weights(model), 1.0)
    first = annealed_log_evidence(model, sr.Gaussian(), (x, y), prior, **options)
    other_weights = perceptron(1, 1, 1)
    again = annealed_log_evidence(other_weights, sr.Gaussian(), (x, y), prior, **options)
    other_seed = annealed_log_evidence(model, sr.Gaussian(), (x, y), prior, seed=1, **options)
    assert first.log_evidence == again.log_evidence != other_seed.log_evidence
    assert torch.equal(first.samples, again.samples)


def test_the_standard_error_covers_the_spread_over_seeds() -> None:
    x, y = regression_data(12, 3, seed=0)
    model = nn.Linear(3, 1, bias=False).double()
    prior = sr.GaussianPrior(sr.weights(model), 2.0)
    exact = float(exact_evidence(x, y[:, 0], 2.0, 0.7).evidence.log_evidence)
    scores = []
    for seed in range(12):
        options = {"chains": 64, "temperatures": 30, "leapfrog_steps": 2, "seed": seed}
        result = annealed_log_evidence(model, sr.Gaussian(0.7), (x, y), prior, **options)
        scores.append((result.log_evidence - exact) / result.standard_error)
    mean_square = sum(score**2 for score in scores) / len(scores)
    assert 0.2 < mean_square < 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chains": 12}, "chains must be a multiple of 8, at least 16, got 12"),
        ({"chains": 8}, "chains must be a multiple of 8, at least 16, got 8"),
        ({"temperatures": 1}, "temperatures must be at least 2"),
        ({"leapfrog_steps": 0}, "leapfrog_steps at least 1"),
    ],
)
def test_invalid_options_are_errors(options: dict[str, int], message: str) -> None:
    model = nn.Linear(1, 1).double()
    prior = sr.GaussianPrior(sr.weights(model), 1.0)
    with pytest.raises(ValueError, match=message):
        annealed_log_evidence(model, "gaussian", regression_data(4, 1, 0), prior, **options)
