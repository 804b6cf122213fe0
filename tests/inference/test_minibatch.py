"""Test evidence steps from one mini-batch of an automatic size."""

import math

import pytest
import torch
from torch import Tensor, nn

import symrazor as sr
from symrazor.data import TensorLoader
from symrazor.inference.minibatch import MiniBatch, minibatch_size, minibatch_step

N = 160


def _case() -> tuple[nn.Module, TensorLoader]:
    torch.manual_seed(0)
    x = torch.randn(N, 4, dtype=torch.float64)
    y = (x[:, 0] + 0.3 * torch.randn(N, dtype=torch.float64) > 0).long()
    model = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 2)).double()
    return model, TensorLoader(x, y, 40, shuffle=True, generator=torch.Generator().manual_seed(0))


def _razor(model: nn.Module, **options: object) -> sr.Razor:
    options = {"structure": "kernel", "scaling": "geometric", **options}
    return sr.Razor(model, "categorical", N, prior_precision=0.5, **options)


def test_the_error_is_the_wanted_one() -> None:
    """Smaller wanted errors take more data; without enough of them, all data are used."""
    model, loader = _case()
    razor = _razor(model)
    exact = float(_razor(model, scaling="matrix").evidence(loader).log_det)
    sizes = []
    for wanted in (3.0, 0.5, 0.2, 1e-6):
        batch = minibatch_size(razor, loader, wanted, first=5)
        sizes.append(batch.samples)
        assert batch.relative_error <= wanted
        assert batch.lower <= batch.upper * (1 + 1e-12)
        estimate = math.sqrt(batch.lower * batch.upper)
        assert abs(estimate - exact) <= wanted * exact * 1.5 + 1e-9
    assert sizes == sorted(sizes)
    assert sizes[0] == 5 < sizes[1] < sizes[-1] == N
    smaller = minibatch_size(razor, loader, 0.5, first=sizes[1] // 2)
    assert smaller.samples == sizes[1]  # half as many were not enough


def test_steps_from_mini_batches_find_the_precisions_of_all_data() -> None:
    model, loader = _case()
    precisions: dict[str, Tensor] = {}
    for name, options in (("geometric", {}), ("matrix", {"scaling": "matrix"})):
        razor = _razor(model, **options)
        for _ in range(15):
            if name == "geometric":
                evidence = minibatch_step(razor, loader, 0.4)
                assert evidence.structure == "a subset, between two bounds"
                assert evidence.gap is not None and evidence.gap > 0
            else:
                razor.step(loader)
        precisions[name] = torch.stack([*razor.prior.precisions.values()]).log()
    assert float((precisions["geometric"] - precisions["matrix"]).abs().max()) < 0.5


def test_the_gradient_reaches_the_forward_pass() -> None:
    """Both routes of the hyper-gradient agree for a subset."""

    class Scaled(nn.Module):
        def __init__(self, body: nn.Module) -> None:
            super().__init__()
            self.scale, self.body = sr.Hyper(torch.tensor(0.8)), body

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x * self.scale.value)  # type: ignore[no-any-return]

    body, loader = _case()
    model, batches = Scaled(body).double(), [(loader.x[:9], loader.y[:9])]
    razor = _razor(model)
    (kept,) = torch.autograd.grad(
        razor.evidence(batches, 9, differentiable=True).log_evidence, list(razor.eta.values())
    )
    curvature = razor._curvature(batches, 9)
    ((fit, occam),) = razor.hyper_gradient(batches, curvature, 9).values()
    assert float(fit + occam) == pytest.approx(float(kept), rel=1e-8)
    assert float(occam) != 0


def test_errors_name_the_next_step() -> None:
    model, loader = _case()
    with pytest.raises(ValueError, match="structure='kernel' and scaling='geometric'"):
        minibatch_size(_razor(model, scaling="matrix"), loader)
    with pytest.raises(ValueError, match="relative_error must be positive"):
        minibatch_size(_razor(model), loader, 0.0)
    with pytest.raises(ValueError, match="generator"):
        minibatch_size(_razor(model), iter(loader))
    assert MiniBatch(5, 0.0, 0.0).relative_error == 0
