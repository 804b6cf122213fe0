"""Variational networks: draws, local reparameterisation, bound, closed forms."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from variational_case import F64, data, linear_gaussian_bound, mlp

import symrazor as sr
from symrazor.inference.exact import exact_evidence
from symrazor.inference.posterior import Prediction
from symrazor.inference.variational import (
    Diagonal,
    Full,
    LowRank,
    MatrixNormal,
    Point,
    Variational,
    collapsed_kl,
    kl,
)

# ------------------------------------------------------------------------- which posterior is whose


def test_any_mix_of_posteriors_over_layers() -> None:
    model = mlp()
    posterior = LowRank((2, 3), rank=1, scale=0.3, dtype=F64)
    kinds = {"0.weight": "full", "0.bias": Diagonal, "2.weight": posterior, "*": "point"}
    vi = Variational(model, "categorical", 6, posterior=kinds)
    classes = {name: type(q) for name, q in vi.posteriors.items()}
    assert classes == {"0.weight": Full, "0.bias": Diagonal, "2.weight": LowRank, "2.bias": Point}
    assert set(vi.prior.group_of) == {"0.weight", "0.bias", "2.weight"}
    for name, parameter in model.named_parameters():
        assert vi.posteriors[name].mean is parameter  # the model is the mean
    assert len({id(p) for p in vi.parameters()}) == len(list(vi.parameters()))
    plain = Variational(mlp(), "categorical", 6)
    assert isinstance(plain.posteriors["0.weight"], MatrixNormal)
    assert isinstance(plain.posteriors["0.bias"], Diagonal)
    spread = plain.posteriors["2.weight"].variance().mean().sqrt()
    size = plain.model[2].weight.square().mean().sqrt()  # type: ignore[index,union-attr,operator]
    assert float((spread / size).detach()) == pytest.approx(0.1)


def test_point_estimates_pay_nothing_and_do_not_vary() -> None:
    x, y = data()
    vi = Variational(mlp(), "categorical", 6, posterior="point")
    f = vi.outputs(x, 3)
    assert torch.equal(f[0], f[2]) and torch.equal(f[0], vi(x))
    with torch.no_grad():
        evidence = vi.evidence([(x, y)])
    assert float(evidence.complexity) == 0
    assert sum(evidence.effective_parameters.values()) == sum(
        p.numel() for p in vi.model.parameters()
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"posterior": {"3.weight": "full", "*": "point"}},
            "No parameter of the model matches '3.weight'",
        ),
        ({"posterior": {"0.*": "full"}}, "no pattern for '2.weight'"),
        ({"posterior": "mean-field"}, "Unknown posterior 'mean-field' for '0.weight'"),
        (
            {"posterior": {"2.weight": Full((3, 2)), "*": "point"}},
            r"must have shape \[2, 3\]",
        ),
        ({"draws": 0}, "draws must be at least 1, got 0"),
        ({"prior_update": "mackay"}, "prior_update must be 'collapsed'"),
        ({"noise_update": "mackay"}, "noise_update must be 'closed-form'"),
        ({"damping": 0.0}, "damping"),
        ({"scale": -1.0}, "scale must be positive"),
        ({"structure": "kron"}, "Unknown option 'structure'"),
        (
            {"prior_groups": {"a": ["0.*"]}},
            "'2.weight' must be in exactly one",
        ),
    ],
)
def test_bad_options_are_rejected(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Variational(mlp(), "categorical", 6, **options)


def test_bad_calls_are_rejected() -> None:
    x, y = data()
    vi = Variational(mlp(), "categorical", 7)
    with pytest.raises(ValueError, match="draws must be at least 1, got 0"):
        vi.outputs(x, 0)
    with pytest.raises(ValueError, match="The loader yielded 6 samples, but n_data or subset is 7"):
        vi.evidence([(x, y)])
    with pytest.raises(ValueError, match="not between 0 and 1"):
        vi.bound(x, y + 1)
    with pytest.raises(ValueError, match="n_data must be a positive integer"):
        Variational(mlp(), "categorical", 0)
    with pytest.raises(ValueError, match="no trainable weights"):
        Variational(nn.ReLU(), "categorical", 6)
    with pytest.raises(ValueError, match="two layers with posteriors"):
        Variational(mlp(), "categorical", 6).evidence([(x, y)], hidden=[("5", "6")])
    with pytest.raises(ValueError, match="the same for all hidden units"):
        diagonal = Variational(mlp(), "categorical", 6, prior_groups="diagonal")
        diagonal.evidence([(x, y)], hidden=[("0", "2")])


# ------------------------------------------------------------------------- local reparameterisation


class _Twice(nn.Module):
    def __init__(self, use: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.use = nn.Linear(2, 2), use
        self.out = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2) if use == "batchnorm" else nn.Identity()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        match self.use:
            case "called twice":
                return self.out(self.inner(self.inner(x)))
            case "transposed":
                return self.out(nn.functional.linear(self.inner(x), self.inner.weight.T))
            case "tokens":
                return self.out(self.inner(torch.stack([x, 2 * x], 1)).sum(1))
            case "folded tokens":
                both = self.inner(torch.stack([x, 2 * x], 1).reshape(-1, 2))
                return self.out(both.reshape(len(x), -1, 2).sum(1))
            case "mixed data":
                return self.out(self.inner(x - x.mean(0)))
        return self.out(self.norm(self.inner(x)))


@pytest.mark.parametrize(
    ("use", "local"),
    [
        ("plain", ["inner", "out"]),
        ("called twice", ["out"]),
        ("transposed", ["out"]),
        ("tokens", ["out"]),
        ("folded tokens", ["out"]),
        ("mixed data", []),
        ("batchnorm", []),
    ],
)
def test_local_reparameterisation_only_where_it_is_exact(use: str, local: list[str]) -> None:
    x, _ = data()
    model = _Twice(use).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    vi = Variational(model, "categorical", 6, scale=0.3)
    if use == "batchnorm":
        model.eval()
    vi.outputs(x)
    assert vi.local == local
    assert model.training == (use != "batchnorm")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("posterior", ["matrix-normal", "block", "diagonal", "low-rank"])
def test_local_draws_have_the_distribution_of_drawn_weights(posterior: str) -> None:
    """Mean and variance of every datum's outputs, after a nonlinearity."""
    x, _ = data(3)
    moments = []
    for local in (True, False):
        vi = Variational(mlp(), "categorical", 6, posterior=posterior, scale=0.4, local=local)
        with torch.no_grad():
            f = vi.outputs(x, 2500)
        assert vi.local == (["0", "2"] if local else [])
        moments.append((f.mean(0), f.var(0)))
    (mean, variance), (mean_drawn, variance_drawn) = moments
    error = (mean - mean_drawn).abs() / (variance / 1250).sqrt()
    assert float(error.max()) < 5
    assert torch.allclose(variance, variance_drawn, rtol=0.2)


def test_antithetic_draws_mirror_every_layer() -> None:
    """A linear network's outputs are linear in its noise: pairs average to the mean exactly."""
    x, _ = data()
    for local in (True, False):
        vi = Variational(nn.Linear(2, 2).double(), "categorical", 6, scale=1.0, local=local)
        f = vi.outputs(x, 5, antithetic=True)
        mean = vi(x)
        for first, second in ((0, 3), (1, 4)):
            assert torch.allclose((f[first] + f[second]) / 2, mean, atol=1e-12)
        assert not torch.allclose(f[0], f[1])


# ---------------------------------------------------------------------------------------- the bound


def _linear(posterior: str = "block", **options: object) -> tuple[Variational, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 3, generator=generator, dtype=F64)
    slope = torch.tensor([[1.0], [-0.5], [0.2]], dtype=F64)
    y = x @ slope + 0.3 * torch.randn(20, 1, generator=generator, dtype=F64)
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False).double()
    kinds = {"weight": posterior}
    vi = Variational(model, sr.Gaussian(0.5), 20, posterior=kinds, scale=0.3, **options)
    return vi, x, y


@pytest.mark.parametrize("local", [True, False])
def test_the_estimate_is_unbiased(local: bool) -> None:
    """Mini-batches and draws against the closed form of the linear-Gaussian bound."""
    vi, x, y = _linear(prior_update="fixed", local=local)
    with torch.no_grad():
        exact = linear_gaussian_bound(x, y, vi.posteriors["weight"], 1.0, 0.5)
        parts = [x[:4], x[4:8], x[8:12], x[12:16], x[16:]]
        batches = list(zip(parts, y.split(4), strict=True))
        estimates = [[float(vi.bound(*b).log_evidence) for b in batches] for _ in range(200)]
        means = torch.tensor(estimates).mean(1)  # one pass over the data each
        whole = vi.evidence(batches, draws=2000)
    error = float(means.std()) / math.sqrt(len(means))
    assert abs(float(means.mean()) - float(exact.log_evidence)) < 4 * error
    assert error < 0.5
    assert float(whole.log_evidence) == pytest.approx(float(exact.log_evidence), abs=0.5)
    assert float(whole.complexity) == pytest.approx(float(exact.complexity), abs=1e-10)
    assert whole.effective_parameters["weight"] == pytest.approx(
        exact.effective_parameters["weights"]
    )


def test_gradient_in_every_hyperparameter_by_finite_differences() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.body = sr.Hyper(torch.tensor(0.8, dtype=F64)), mlp()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.body(self.scale.value * x)
            return out

    x, _ = data()
    y = torch.randn(6, 2, dtype=F64)
    vi = Variational(Scaled(), sr.Gaussian(0.7), 6, prior_update="gradient", scale=0.5)
    start = vi.generator.get_state()

    def value() -> Tensor:
        vi.generator.set_state(start)
        return vi.evidence([(x, y)], draws=3, differentiable=True).log_evidence

    vi.outputs(x)
    moved = {name: p for name, p in vi.named_parameters() if p.requires_grad}
    assert "model.scale.raw" in moved and "likelihood.noise.raw" in moved
    gradients = torch.autograd.grad(value(), list(moved.values()), allow_unused=True)
    step = 1e-6
    for (name, parameter), got in zip(moved.items(), gradients, strict=True):
        gradient = torch.zeros_like(parameter) if got is None else got
        for index in range(0, parameter.numel(), 3):
            values = []
            for sign in (1, -1):
                with torch.no_grad():
                    parameter.view(-1)[index] += sign * step
                    values.append(float(value()))
                    parameter.view(-1)[index] -= sign * step
            slope = (values[0] - values[1]) / (2 * step)
            assert float(gradient.reshape(-1)[index]) == pytest.approx(slope, rel=1e-4, abs=1e-6), (
                name
            )


def test_collapsed_prior_has_value_and_gradient_of_the_collapsed_divergence() -> None:
    vi, x, y = _linear(prior_update="collapsed")
    q = vi.posteriors["weight"]
    bound = vi.bound(x, y)
    assert float(bound.complexity.detach()) == pytest.approx(float(collapsed_kl(q).detach()))
    parameters = list(q.parameters())
    gradients = torch.autograd.grad(bound.complexity, parameters)
    for got, expected in zip(
        gradients, torch.autograd.grad(collapsed_kl(q), parameters), strict=True
    ):
        assert torch.allclose(got, expected, atol=1e-10)


def test_prior_groups_share_a_best_variance() -> None:
    x, y = data()
    vi = Variational(mlp(), "categorical", 6, prior_groups={"all": ["*.weight"], "b": ["*.bias"]})
    vi.bound(x, y)
    qs = [vi.posteriors[name] for name in ("0.weight", "2.weight")]
    best = sum(float(q.second_moment().detach()) for q in qs) / sum(q.size for q in qs)
    assert float(vi.prior.precisions["all"]) == pytest.approx(1 / best)
    diagonal = Variational(mlp(), "categorical", 6, prior_groups="diagonal")
    bound = diagonal.bound(x, y)
    for name, q in diagonal.posteriors.items():
        moments = q.variance() + q.mean.square()
        assert torch.allclose(diagonal.prior.precision_of(name), 1 / moments.detach())
    total = sum(kl(q, diagonal.prior.precision_of(n)) for n, q in diagonal.posteriors.items())
    assert float(bound.complexity.detach()) == pytest.approx(float(total.detach()))  # type: ignore[union-attr]


def test_burn_in_and_damping_of_the_closed_form() -> None:
    vi, x, y = _linear(prior_update="closed-form", damping=0.25, burn_in=2)
    for _ in range(2):
        vi.bound(x, y)
        assert float(vi.prior.precisions["weight"]) == 1
    vi.bound(x, y)
    best = float((vi.posteriors["weight"].second_moment() / 3).detach())
    assert float(vi.prior.precisions["weight"]) == pytest.approx(best**-0.25)


def _best_evidence(x: Tensor, y: Tensor) -> tuple[float, float, float]:
    """The exact evidence at its best precision and noise."""
    logs = torch.zeros(2, dtype=F64, requires_grad=True)
    optimiser = torch.optim.LBFGS([logs], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = -exact_evidence(x, y.squeeze(1), logs[0].exp(), logs[1].exp()).evidence.log_evidence
        loss.backward()
        return loss

    optimiser.step(closure)
    delta, sigma = logs.detach().exp().tolist()
    return -float(closure().detach()), delta, sigma


@pytest.mark.parametrize(
    ("prior_update", "noise_update"),
    [("gradient", "gradient"), ("closed-form", "closed-form"), ("collapsed", "closed-form")],
)
def test_three_ways_to_learn_prior_and_noise_agree_at_the_optimum(
    prior_update: str, noise_update: str
) -> None:
    """All end at the maximum of the exact evidence in both."""
    vi, x, y = _linear(prior_update=prior_update, noise_update=noise_update, draws=8, damping=0.05)
    best, delta, sigma = _best_evidence(x, y)
    optimiser = torch.optim.Adam(vi.parameters(), lr=0.05)
    steps = 300
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = 0.05 * 0.5 * (1 + math.cos(math.pi * step / steps))
        optimiser.zero_grad()
        (-vi.bound(x, y).per_datum).backward()
        optimiser.step()
    with torch.no_grad():
        noise = float(vi.likelihood.noise.value)  # type: ignore[union-attr,operator,arg-type]
        precision = float(vi.prior.precisions["weight"])
        bound = linear_gaussian_bound(x, y, vi.posteriors["weight"], precision, noise)
    assert noise == pytest.approx(sigma, rel=0.05)
    assert precision == pytest.approx(delta, rel=0.05)
    assert best - 0.03 < float(bound.log_evidence) <= best + 1e-9


def test_regression_predictive_has_the_exact_variance() -> None:
    vi, x, _ = _linear()
    q = vi.posteriors["weight"]
    predict: Callable[..., Prediction] = vi.predict
    prediction = predict(x, draws=4000)
    assert prediction.variance is not None
    with torch.no_grad():
        expected = q.output_variance(x) + 0.25
    assert torch.allclose(prediction.variance, expected, rtol=0.05)
    assert torch.allclose(prediction.mean, vi(x).detach(), atol=1e-9)
