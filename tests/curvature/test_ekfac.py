"""Compare EKFAC with the dense Gauss-Newton matrix in its eigenbasis."""

import pytest
import torch
from torch import Tensor, nn

import symrazor as sr
from symrazor.core.likelihood import Categorical
from symrazor.curvature import Method, estimate_curvature
from symrazor.curvature.coverage import layers
from symrazor.curvature.ekfac import Eigenbasis, Moments
from symrazor.curvature.operations import record
from symrazor.curvature.task import CurvatureTask
from symrazor.linalg.blocks import Kron
from symrazor.linalg.factor import Factor
from symrazor.testing import assert_close, dense_ggn

F64 = torch.float64


def _convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 4, 3, padding=1, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(20, 3)
    )


def _relaxed() -> nn.Module:
    paths = [sr.layers.Conv(2, 3, (4, 4)), sr.layers.FFC(2, 3, (4, 4))]
    return nn.Sequential(
        sr.layers.Relaxed(paths), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3)
    )


def _scaled() -> nn.Module:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = sr.Hyper(torch.tensor(0.8))
            self.body = _convolutional()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(torch.tanh(x * self.scale.value))  # type: ignore[no-any-return]

    return Scaled()


CASES = {"convolutional": (_convolutional, (2, 5)), "relaxed": (_relaxed, (2, 4, 4))}


def _case(name: str, n: int = 7) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    make, shape = CASES[name]
    model, x = make().double(), torch.randn(n, *shape, dtype=F64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    y = torch.arange(n) % 3
    return model, [(x[:3], y[:3]), (x[3:], y[3:])]


@pytest.mark.parametrize("name", list(CASES))
def test_moments_are_the_diagonal_in_the_eigenbasis(name: str) -> None:
    model, batches = _case(name)
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    blocks = estimate_curvature(model, "categorical", batches, Method(structure="ekfac")).blocks
    weights = [block for block in blocks if isinstance(block, Eigenbasis)]
    assert weights
    for block in weights:
        _, left, right = block.eigenvectors
        H = dense_ggn(model, Categorical(), x, y, block.names)
        k, shape = max(len(left), len(right)), block._shape
        directions = []  # columns of the basis, as parameters
        for number in range(k):
            for u in left[number % len(left)].mT:
                for v in right[number % len(right)].mT:
                    W = torch.zeros(k, block.G.features, block.A.features, dtype=F64)
                    W[number] = torch.outer(u, v)
                    directions.append(block.from_blocks(W).reshape(-1))
        Q = torch.stack(directions, 1)
        assert Q.shape[0] == shape.numel()
        assert_close(Q.mT @ Q, torch.eye(Q.shape[1], dtype=F64), 1e-10)
        assert_close(block.moments.flatten(), (Q.mT @ H @ Q).diagonal(), 1e-10)
        assert_close(block.energy, H.trace(), 1e-10)
        assert_close(block.spectrum.sum(), H.trace(), 1e-10)


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("flavour", ["expand", "reduce"])
@pytest.mark.parametrize("precision", [0.01, 1.0, 30.0])
def test_it_bounds_the_evidence_of_the_block_diagonal(
    name: str, flavour: str, precision: float
) -> None:
    model, batches = _case(name)
    log_det = {
        structure: float(
            sr.Razor(
                model, "categorical", 7, structure=structure, prior_precision=precision, **options
            )
            .evidence(batches)
            .log_det
        )
        for structure, options in (("ekfac", {"flavour": flavour}), ("block", {}), ("full", {}))
    }
    assert log_det["ekfac"] >= log_det["block"] * (1 - 1e-10) >= log_det["full"] * (1 - 1e-9)


@pytest.mark.parametrize("rows", [2, 40])
@pytest.mark.parametrize("positions", [1, 3, 9])
def test_second_moments_by_every_route(positions: int, rows: int) -> None:
    """Pairs of positions or formed gradients; a basis of the whole space, or of a part of it."""
    torch.manual_seed(0)
    columns = torch.randn(2, 5, positions, 2, 3, dtype=F64)
    layer = nn.Conv1d(8, 6, 1, groups=2).double()
    (found,) = layers(layer)
    tape = record(layer, [found], torch.randn(5, 8, positions, dtype=F64))
    a = tape.uses[0].inputs(tape.uses[0].input.detach())
    factors = (Factor.of_rows(torch.randn(rows, 2, f, dtype=F64)) for f in (4, 3))
    basis = Kron("w", *factors, 1.0, 1e-16, torch.clone, torch.clone)
    moments = Moments(tape.uses, basis)
    for g in columns:
        moments.add(g)
    squares, energy = moments.total()
    _, left, right = basis.eigenvectors
    J = torch.einsum("cnsko,nski->cnkoi", columns, a)
    rotated = left.mT @ J @ right
    assert_close(squares, rotated.square().sum((0, 1)), 1e-12)
    assert_close(energy, J.square().sum(), 1e-12)


def test_many_data_get_a_basis_from_probes_and_the_bound_remains() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5)).double()
    x, y = torch.randn(1000, 3, dtype=F64), torch.arange(1000) % 5
    values = {}
    for structure in ("ekfac", "block"):
        razor = sr.Razor(model, "categorical", 1000, structure=structure)
        values[structure] = [float(razor.evidence([(x, y)]).log_det) for _ in range(2)]
    assert values["ekfac"][0] == values["ekfac"][1]  # no dependence on a random state
    assert values["block"][0] <= values["ekfac"][0] <= 1.3 * values["block"][0]
    task = CurvatureTask(model, layers(model), Categorical(), Method(structure="ekfac"))
    assert task.structure.first_method(task, 1000).estimator == "mc"
    assert task.structure.first_method(task, 30).estimator == "exact"


def test_both_routes_of_the_hyper_gradient_agree() -> None:
    """The basis is held fixed: a bound for any basis, so its derivative is one of a bound."""
    torch.manual_seed(0)
    model, x = _scaled().double(), torch.randn(7, 2, 5, dtype=F64)
    y = torch.arange(7) % 3
    batches = [(x[:3], y[:3]), (x[3:], y[3:])]
    razor = sr.Razor(model, "categorical", 7, structure="ekfac")
    (kept,) = torch.autograd.grad(
        razor.evidence(batches, differentiable=True).log_evidence, list(razor.eta.values())
    )
    curvature = razor._curvature(batches, None)
    ((fit, occam),) = razor.hyper_gradient(batches, curvature).values()
    assert float(fit + occam) == pytest.approx(float(kept), rel=1e-8)
    assert float(occam) != 0
    before = float(razor.prior.precisions["body.3.weight"])
    razor.step(batches)
    assert float(razor.prior.precisions["body.3.weight"]) != before


def test_the_posterior_has_the_moments_as_precision() -> None:
    model, batches = _case("convolutional")
    razor = sr.Razor(model, "categorical", 7, structure="ekfac", prior_precision=0.5)
    curvature = razor._curvature(batches, None)
    (block,) = (b for b in curvature.blocks if b.names == ("3.weight",))
    fixed = {"3.weight": torch.tensor(0.5, dtype=F64).log()}
    root = block.draw(fixed, torch.eye(60, dtype=F64))
    covariance = root.mT @ root
    expected = (1 / (block.spectrum + 0.5)).sort().values
    assert_close(torch.linalg.eigvalsh(covariance), expected, 1e-9)


def test_a_generator_cannot_be_read_twice() -> None:
    model, batches = _case("convolutional")
    razor = sr.Razor(model, "categorical", 7, structure="ekfac")
    with pytest.raises(ValueError, match="'ekfac' reads the data twice.*DataLoader"):
        razor.evidence(batch for batch in batches)
