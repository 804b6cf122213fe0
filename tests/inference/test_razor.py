"""Test evidence steps in a training loop of the user: penalty, updates and burn-in."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from razor_case import F64, data, mlp, train
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import symrazor as sr
from symrazor import curvature
from symrazor.accelerate.processes import ShardedLoader
from symrazor.core.prior import LOG_PRECISION_BOUNDS
from symrazor.data import TensorLoader


@pytest.mark.parametrize("groups", ["tensor", "scalar", "layer", "diagonal"])
def test_penalty_is_the_log_prior(groups: str) -> None:
    model = mlp()
    razor = sr.Razor(model, "categorical", 40, prior_groups=groups, prior_precision=2.5)
    expected = sum(0.5 * 2.5 * p.square().sum() for p in model.parameters()) / 40
    assert float(razor.penalty().detach()) == pytest.approx(float(expected.detach()))


def test_named_groups() -> None:
    groups = {"weights": ["*.weight"], "biases": ["*.bias"]}
    razor = sr.Razor(
        mlp(),
        "categorical",
        40,
        prior_groups=groups,
        prior_precision={"weights": 4.0, "biases": 0.1},
    )
    assert {k: round(float(v), 6) for k, v in razor.prior.precisions.items()} == {
        "weights": 4.0,
        "biases": 0.1,
    }
    with pytest.raises(ValueError, match=r"'0\.bias' must be in exactly one .* but matches none"):
        sr.Razor(mlp(), "categorical", 40, prior_groups={"weights": ["*.weight"]})
    with pytest.raises(ValueError, match="exactly one prior group"):
        sr.Razor(mlp(), "categorical", 40, prior_groups={"a": ["*"], "b": ["0.*"]})


def test_implicit_and_explicit_prior_have_the_same_stationary_point() -> None:
    """SGD on nll + penalty, and SGD on nll with shrink_ afterwards, end at the same mode."""
    x, y = data()
    ends = []
    for implicit in (False, True):
        model = nn.Linear(3, 3).double()
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        razor = sr.Razor(model, "categorical", 40, prior_precision=3.0)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
        for _ in range(1200):
            optimiser.zero_grad()
            loss = F.cross_entropy(model(x), y)
            (loss if implicit else loss + razor.penalty()).backward()
            optimiser.step()
            if implicit:
                razor.shrink_(0.05 / (1 - 0.5))
        ends.append(model.weight.detach().clone())
    assert torch.allclose(ends[0], ends[1], rtol=0.01)


def test_shrinking_is_stable_where_explicit_steps_explode() -> None:
    model = nn.Linear(3, 3).double()
    razor = sr.Razor(model, "categorical", 10, prior_precision=1e9)
    for _ in range(100):
        razor.shrink_(0.1)
    assert float(model.weight.detach().abs().max()) < 1e-12


@pytest.mark.parametrize("update", ["mackay", "adam"])
@pytest.mark.parametrize(
    ("structure", "groups"),
    [("kron", "tensor"), ("full", "scalar"), ("block", "layer"), ("diag", "diagonal")],
)
def test_updates_reach_a_stationary_point_of_the_evidence(
    update: str, structure: str, groups: str
) -> None:
    """With the weights fixed, repeated steps end where the gradient in log precision vanishes."""
    x, y = data()
    model = mlp()
    options = {"update": update, "structure": structure, "prior_groups": groups}
    razor = sr.Razor(model, "categorical", 40, inner_steps=50, lr=0.1, **options)
    train(model, razor, x, y)
    values = [float(razor.step([(x, y)]).log_evidence) for _ in range(12)]
    assert values[-1] > values[0]
    evidence = razor.evidence([(x, y)], differentiable=True)
    slopes = torch.autograd.grad(evidence.log_evidence, list(razor.prior.parameters()))
    low, high = LOG_PRECISION_BOUNDS
    for log_delta, slope in zip(razor.prior.log_precision, slopes, strict=True):
        inside = (log_delta > low + 1) & (log_delta < high - 1)
        assert float((slope * inside).abs().max()) < (2e-3 if update == "mackay" else 0.05)


def test_precision_of_useless_weights_hits_the_bound_and_says_so() -> None:
    x, y = data()
    model = nn.Linear(3, 3).double()
    with torch.no_grad():
        model.weight.zero_()
    razor = sr.Razor(model, "categorical", 40, damping=1.0, inner_steps=30)
    razor.step([(x, y)])
    assert razor.at_bound == ["weight"]
    assert float(razor.prior.precisions["weight"]) == pytest.approx(1e12)


@pytest.mark.parametrize("per_output", [False, True])
@pytest.mark.parametrize("update", ["mackay", "adam"])
def test_noise_is_learned(per_output: bool, update: str) -> None:
    """Two outputs with noise 0.1 and 0.5: found within sampling error."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 4, generator=generator, dtype=F64)
    truth = torch.tensor([0.1, 0.5], dtype=F64) if per_output else torch.tensor(0.3, dtype=F64)
    noise = torch.randn(400, 2, generator=generator, dtype=F64)
    y = x @ torch.randn(4, 2, generator=generator, dtype=F64) + truth * noise
    model = nn.Linear(4, 2).double()
    likelihood = sr.Gaussian(1.0, outputs=2 if per_output else None)
    razor = sr.Razor(model, likelihood, 400, update=update, lr=0.1)
    for _ in range(12 if update == "mackay" else 80):
        train(model, razor, x, y, 30 if update == "mackay" else 10)
        razor.step([(x, y)])
    assert torch.allclose(likelihood.noise.value.detach(), truth, rtol=0.12)


def test_mackay_noise_on_the_linear_model_maximises_the_exact_evidence() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 5, generator=generator, dtype=F64)
    w = torch.randn(5, 1, generator=generator, dtype=F64)
    y = (x @ w + 0.4 * torch.randn(30, 1, generator=generator, dtype=F64)).squeeze(1)
    model = nn.Linear(5, 1, bias=False).double()
    likelihood = sr.Gaussian(1.0)
    razor = sr.Razor(model, likelihood, 30, damping=1.0)
    for _ in range(60):
        delta, sigma = razor.prior.precisions["weight"], likelihood.noise.value.detach()
        with torch.no_grad():
            model.weight.copy_(sr.exact_evidence(x, y, delta, sigma).mean.unsqueeze(0))
        razor.step([(x, y)])
    leaves = [
        razor.prior.precisions["weight"].clone().requires_grad_(),
        likelihood.noise.value.detach().clone().requires_grad_(),
    ]
    exact = sr.exact_evidence(x, y, leaves[0], leaves[1]).evidence.log_evidence
    for slope in torch.autograd.grad(exact, leaves):
        assert abs(float(slope)) < 1e-5


def test_hyperparameter_in_the_network_climbs_the_evidence() -> None:
    """Inputs were made 100 times too small; the evidence scales them up again."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = sr.Hyper(torch.tensor(1.0, dtype=F64))
            self.body = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x * self.scale.value)

    x, y = data(60)
    model = Net()
    razor = sr.Razor(model, "categorical", 60, lr=0.3, inner_steps=0)
    values = []
    for _ in range(30):
        train(model, razor, x / 100, y, 20)
        values.append(float(razor.step([(x / 100, y)]).log_evidence))
    assert float(model.scale.value.detach()) > 10
    assert values[-1] > values[0] + 10


def test_in_anybodys_training_loop_with_a_data_loader() -> None:
    x, y = data(50)
    model = mlp()
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
    razor = sr.Razor(model, "categorical", n_data=50, estimator="mc")
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(15):
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb) + razor.penalty()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        evidence = razor.step(loader)
    total = evidence.log_likelihood + evidence.log_prior - 0.5 * evidence.log_det
    assert float(evidence.log_evidence) == pytest.approx(float(total))
    assert math.isfinite(float(evidence.log_evidence))
    assert "per data point" in repr(evidence)


def test_burn_in_counts_training_steps() -> None:
    x, y = data()
    model = mlp()
    razor = sr.Razor(model, "categorical", 40, burn_in=5)
    razor.step([(x, y)])
    assert all(float(v) == 1.0 for v in razor.prior.precisions.values())
    assert razor.best is None
    train(model, razor, x, y, 5)
    razor.step([(x, y)])
    assert all(float(v) != 1.0 for v in razor.prior.precisions.values())


def test_subset_is_scaled_up() -> None:
    x, y = data(40)
    razor = sr.Razor(mlp(), "categorical", 40)
    whole, part = razor.evidence([(x, y)]), razor.evidence([(x, y)], subset=10)
    alone = sr.Razor(mlp(), "categorical", 10).evidence([(x[:10], y[:10])])
    assert float(part.log_likelihood) == pytest.approx(4 * float(alone.log_likelihood))
    assert part.n_data == whole.n_data == 40


def test_a_use_without_effect_does_not_count() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            self.fc(7 * x + 1)
            return self.fc(x)

    torch.manual_seed(0)
    model = Twice()
    x, y = data(1)
    (_, kron) = curvature.estimate_curvature(model, "categorical", [(x, y)]).blocks
    (_, plain) = curvature.estimate_curvature(model.fc, "categorical", [(x, y)]).blocks
    assert float(kron.spectrum.sum()) == pytest.approx(float(plain.spectrum.sum()), rel=1e-12)


def test_vector_products_use_the_data_of_the_estimate() -> None:
    """With a subset of a shuffling loader, both routes see the same data."""
    x, y = data(40)
    model = nn.Linear(3, 1).double()
    loader = DataLoader(TensorDataset(x, y.double()), batch_size=8, shuffle=True)
    seen = []

    class Spy(sr.Gaussian):
        def nll(self, f: Tensor, y: Tensor) -> Tensor:
            seen.append(float(y.sum() + 100 * f.detach().sum()))
            return super().nll(f, y)

    sr.Razor(model, Spy(), 40).step(loader, subset=16)
    assert sorted(seen[:2]) == pytest.approx(sorted(seen[2:4]))


class Scaled(nn.Module):
    """A network with a hyperparameter."""

    def __init__(self) -> None:
        super().__init__()
        self.width, self.net = sr.Hyper(0.7), mlp()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(self.width.value * x)
        return y


SHUFFLED: dict[str, Callable[[TensorDataset], Any]] = {
    "TensorLoader": lambda d: TensorLoader(*d.tensors, 4, shuffle=True),
    "DataLoader": lambda d: DataLoader(d, batch_size=4, shuffle=True),
    "its own generator": lambda d: DataLoader(
        d, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1)
    ),
    "shared": lambda d: ShardedLoader(TensorLoader(*d.tensors, 4, shuffle=True)),
}


@pytest.mark.parametrize("kind", SHUFFLED)
def test_a_step_differentiates_the_estimate_that_it_found(kind: str) -> None:
    """Probes stay with their data, though the loader shuffles anew for every pass."""
    model, steps, kept = Scaled().double(), list[float](), list[float]()
    dataset = TensorDataset(*data(9))
    for route in (steps, kept):
        torch.manual_seed(0)
        razor = sr.Razor(model, "categorical", 9, estimator="mc")
        loader, raw = SHUFFLED[kind](dataset), model.width.raw
        if route is kept:
            iter(loader)  # a step looks whether it can be read twice
            evidence = razor.evidence(loader, differentiable=True).log_evidence
            kept.append(float(torch.autograd.grad(evidence, raw)[0]))
        else:
            before = float(raw.detach())
            razor.eta_optimiser = torch.optim.SGD([raw], lr=1.0)
            razor.step(loader)
            steps.append(float(raw.detach()) - before)
            raw.data.fill_(before)
    assert steps == pytest.approx(kept, rel=1e-9)


def test_single_precision_does_not_take_rounding_for_information() -> None:
    """30 data cannot determine 2,400 weights: small precisions must not find rank in noise."""
    torch.manual_seed(0)
    x, y = torch.randn(30, 60), torch.randint(0, 10, (30,))
    model = nn.Linear(60, 10)
    for delta in (1e-6, 1e-8):
        values = []
        for dtype in (torch.float32, torch.float64):
            net = copy.deepcopy(model).to(dtype)
            razor = sr.Razor(net, "categorical", 30, prior_precision=delta)
            values.append(float(razor.evidence([(x.to(dtype), y)]).log_det))
        assert values[0] == pytest.approx(values[1], rel=1e-3)
