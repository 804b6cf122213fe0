"""The evidence against closed forms, finite differences, quadrature, and another route."""

import math
import weakref

import pytest
import torch
from torch import Tensor, nn

import symrazor as sr

F64 = torch.float64


@pytest.mark.parametrize("structure", ["full", "block", "kron"])
def test_laplace_is_exact_on_the_linear_gaussian_model(structure: str) -> None:
    """At the posterior mean every structure that is exact must give the closed form."""
    torch.manual_seed(0)
    n, m, delta, sigma = 15, 6, 3.0, 0.4
    phi, y = torch.randn(n, m, dtype=F64), torch.randn(n, dtype=F64)
    model = nn.Linear(m, 1, bias=False).double()
    exact = sr.exact_evidence(phi, y, delta, sigma)
    with torch.no_grad():
        model.weight.copy_(exact.mean.unsqueeze(0))
    razor = sr.Razor(model, sr.Gaussian(sigma), n, structure=structure, prior_precision=delta)
    got = razor.evidence([(phi[:4], y[:4]), (phi[4:], y[4:])])
    assert float(got.log_evidence) == pytest.approx(float(exact.evidence.log_evidence), abs=1e-9)
    assert float(got.log_det) == pytest.approx(float(exact.evidence.log_det), abs=1e-9)
    assert float(got.complexity) == pytest.approx(float(exact.evidence.complexity), abs=1e-9)


class Network(nn.Module):
    """A network with hyperparameters in its forward pass: input scale, lengthscale, width."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.scale = sr.Hyper(torch.tensor(0.8, dtype=F64))
        self.shift = sr.Hyper(torch.tensor(0.3, dtype=F64), sr.real)
        self.width = sr.Hyper(torch.tensor([0.2, 0.6], dtype=F64), sr.interval(0.0, 1.0))
        self.conv = nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular").double()
        self.norm = nn.GroupNorm(1, 2).double()
        self.head = nn.Linear(2 * 9, outputs).double()

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale.value + self.shift.value
        h = torch.tanh(self.norm(self.conv(x)))
        h = h * self.width.value.reshape(1, 2, 1, 1)
        return self.head(h.flatten(1))


LIKELIHOODS = {
    "categorical": (sr.Categorical, 3),
    "gaussian": (lambda: sr.Gaussian(0.5), 2),
    "gaussian per output": (lambda: sr.Gaussian(0.5, outputs=2), 2),
    "bernoulli": (sr.Bernoulli, 2),
    "poisson": (sr.Poisson, 2),
}


def _case(likelihood: str, **options: object) -> tuple[sr.Razor, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    make, outputs = LIKELIHOODS[likelihood]
    model, owner = Network(outputs), make()
    x = torch.randn(7, 1, 3, 3, dtype=F64)
    y = owner.sample(model(x).detach(), torch.Generator().manual_seed(0))
    razor = sr.Razor(model, owner, 7, prior_precision=0.7, **options)
    return razor, [(x[:3], y[:3]), (x[3:], y[3:])]


@pytest.mark.parametrize("likelihood", list(LIKELIHOODS))
@pytest.mark.parametrize("structure", ["kron", "diag", "block", "full", "kernel"])
def test_gradient_in_every_hyperparameter_by_finite_differences(
    likelihood: str, structure: str
) -> None:
    """Prior precisions, noise, and what enters the forward pass; both routes, all structures."""
    razor, batches = _case(likelihood, structure=structure)
    evidence = razor.evidence(batches, differentiable=True)
    moved = [*razor.prior.log_precision, *razor.eta.values()]
    kept = torch.autograd.grad(evidence.log_evidence, moved)
    estimate = razor._curvature(batches, None)
    products = razor.hyper_gradient(batches, estimate)
    for (name, parameter), got in zip(
        razor.eta.items(), kept[len(razor.prior.names) :], strict=True
    ):
        fit, occam = products[name]
        assert torch.allclose(fit + occam, got, rtol=1e-8, atol=1e-9), name
        assert parameter.grad is None
    step = 1e-5
    for parameter, got in zip(moved, kept, strict=True):
        for index in range(parameter.numel()):
            values = []
            for sign in (1, -1):
                with torch.no_grad():
                    parameter.view(-1)[index] += sign * step
                values.append(float(razor.evidence(batches).log_evidence))
                with torch.no_grad():
                    parameter.view(-1)[index] -= sign * step
            slope = (values[0] - values[1]) / (2 * step)
            assert float(got.reshape(-1)[index]) == pytest.approx(slope, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("estimator", ["mc", "empirical"])
@pytest.mark.parametrize("flavour", ["expand", "reduce"])
def test_both_routes_agree_for_every_estimator(estimator: str, flavour: str) -> None:
    razor, batches = _case("categorical", estimator=estimator, flavour=flavour, samples=2)
    start = razor.generator.get_state()
    evidence = razor.evidence(batches, differentiable=True)
    kept = torch.autograd.grad(evidence.log_evidence, list(razor.eta.values()))
    razor.generator.set_state(start)
    estimate = razor._curvature(batches, None)
    razor.generator.set_state(start)
    products = razor.hyper_gradient(batches, estimate)
    assert float(estimate.log_likelihood) == pytest.approx(float(evidence.log_likelihood.detach()))
    for (fit, occam), got in zip(products.values(), kept, strict=True):
        assert torch.allclose(fit + occam, got, rtol=1e-8, atol=1e-10)


def test_vector_products_hold_one_batch_at_a_time() -> None:
    """Activations of earlier batches are gone when the next one comes; a kept graph holds all."""
    alive: list[int] = []
    seen: list[weakref.ref[Tensor]] = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = sr.Hyper(torch.tensor(1.0, dtype=F64))
            self.fc = nn.Linear(3, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            alive.append(sum(ref() is not None for ref in seen))
            hidden = torch.tanh(x * self.scale.value)
            seen.append(weakref.ref(hidden))
            return self.fc(hidden)

    torch.manual_seed(0)
    batches = [(torch.randn(4, 3, dtype=F64), torch.arange(4) % 3) for _ in range(8)]
    razor = sr.Razor(Watched(), "categorical", 32)
    estimate = razor._curvature(batches, None)
    alive.clear()
    seen.clear()
    razor.hyper_gradient(batches, estimate)
    assert max(alive) == 0
    razor.evidence(batches, differentiable=True)
    assert max(alive) >= 7


def test_temperature_tempers_fit_and_curvature() -> None:
    cold, batches = _case("categorical", structure="full", temperature=0.5)
    warm, _ = _case("categorical", structure="full")
    a, b = cold.evidence(batches), warm.evidence(batches)
    assert float(a.log_likelihood) == pytest.approx(2 * float(b.log_likelihood))
    (block,) = warm._curvature(batches, None).blocks
    assert float(a.log_det) == pytest.approx(
        float(torch.linalg.slogdet(torch.eye(len(block.H), dtype=F64) + 2 * block.H / 0.7)[1])
    )


def test_effective_parameters_by_their_definition() -> None:
    razor, batches = _case("categorical", structure="full")
    evidence = razor.evidence(batches)
    (block,) = razor._curvature(batches, None).blocks
    posterior = torch.linalg.inv(block.H + 0.7 * torch.eye(len(block.H), dtype=F64))
    share = (block.H @ posterior).diagonal()
    sizes = [block.shapes[name].numel() for name in block.names]
    for name, part in zip(block.names, share.split(sizes), strict=True):
        assert evidence.effective_parameters[name] == pytest.approx(float(part.sum()), abs=1e-9)


def test_quality_of_laplace_by_quadrature() -> None:
    """Three weights, brute force over a grid: the error of Laplace is reported, and bounded.

    The posterior is not Gaussian, so Laplace is not exact; the figure is in docs/benchmarks-all.md.
    """
    torch.manual_seed(0)
    n, delta = 20, 1.0
    x = torch.randn(n, 1, dtype=F64)
    y = (
        (torch.sigmoid(3 * torch.tanh(1.5 * x + 0.3)) > torch.rand(n, 1, dtype=F64))
        .long()
        .squeeze()
    )

    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(1, 1).double()
            self.second = nn.Linear(1, 1, bias=False).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x)))

    model = Tiny()
    razor = sr.Razor(model, "bernoulli", n, structure="full", prior_precision=delta)
    optimiser = torch.optim.LBFGS(model.parameters(), max_iter=500, tolerance_grad=1e-12)

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = razor.likelihood.nll(model(x), y).mean() + razor.penalty()
        loss.backward()
        return loss

    optimiser.step(closure)
    laplace = float(razor.evidence([(x, y)]).log_evidence)
    grid = torch.linspace(-6, 6, 121, dtype=F64)
    w, b, v = torch.meshgrid(grid, grid, grid, indexing="ij")
    f = v.unsqueeze(-1) * torch.tanh(w.unsqueeze(-1) * x.squeeze() + b.unsqueeze(-1))
    log_joint = -nn.functional.softplus(torch.where(y == 1, -f, f)).sum(-1)
    log_joint -= 0.5 * delta * (w**2 + b**2 + v**2) + 1.5 * math.log(2 * math.pi / delta)
    spacing = float(grid[1] - grid[0])
    truth = float(torch.logsumexp(log_joint.flatten(), 0)) + 3 * math.log(spacing)
    # Both signs of (w, b, v) fit equally well: Laplace sees one mode, the integral two.
    error = laplace + math.log(2) - truth
    print(f"quadrature {truth:.4f}, Laplace with both modes {laplace + math.log(2):.4f}")
    assert abs(error) < 0.6, f"Laplace is off by {error:.3f} nats"
