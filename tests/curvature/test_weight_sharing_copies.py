"""Check that copies of a sample in the first dimension count as further uses of a weight."""

from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import symrazor as sr
from symrazor.curvature.estimate import Method, estimate_curvature
from symrazor.layers import SConv


class Averages(nn.Module):
    """Averages over scaled copies of x, folded into the first dimension or with their own index."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.flat = flat
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        copies = x.unsqueeze(1) * torch.tensor([0.5, 1.0, 1.5]).to(x).reshape(3, 1)
        if self.flat:
            copies = copies.flatten(0, 1)
        f = self.b(torch.tanh(self.a(copies)))
        return f.reshape(len(x), 3, 3).mean(1)


class Films(nn.Module):
    """Applies a sparse convolution with a trainable lengthscale to every frame."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frame = SConv(1, 2, (4, 4), anchors=5, learn_omega="weight")
        self.head = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.frame(x.flatten(0, 1).unsqueeze(1)))
        return self.head(h.flatten(1)).unflatten(0, x.shape[:2]).mean(1)


def _dense(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return the blocks of the Gauss-Newton matrix of a unit Gaussian by autodiff."""
    theta = {k: v.detach() for k, v in model.named_parameters() if v.requires_grad}
    J = jacrev(lambda p: functional_call(model, p, (x,)))(theta)
    flat = {name: j.reshape(j.shape[0] * j.shape[1], -1) for name, j in J.items()}
    return {name: j.T @ j for name, j in flat.items()}


@pytest.mark.parametrize("kind", [lambda: Averages(flat=True), Films])
def test_blocks_match_autodiff(kind: type[nn.Module]) -> None:
    model = kind().double()
    x = torch.randn((6, 2, 4, 4) if isinstance(model, Films) else (6, 4), dtype=torch.float64)
    likelihood = sr.Gaussian(noise=1.0)
    estimate = estimate_curvature(
        model, likelihood, [(x, x.new_zeros(6, 3))], Method(structure="block")
    )
    expected = _dense(model, x)
    seen = {block.names[0]: block for block in estimate.blocks}
    assert set(seen) == set(expected)
    for name, H in expected.items():
        torch.testing.assert_close(seen[name].H, H, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("flavour", ["expand", "reduce"])
@pytest.mark.parametrize("estimator", ["exact", "mc"])
def test_folded_copies_match_copies_with_an_index(
    flavour: Literal["expand", "reduce"], estimator: Literal["exact", "mc"]
) -> None:
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.arange(8) % 3
    values = []
    for flat in (True, False):
        model = Averages(flat).double()
        razor = sr.Razor(model, "categorical", 8, flavour=flavour, estimator=estimator)
        values.append(razor.evidence([(x, y)]))
    assert float(values[0].log_evidence) == pytest.approx(float(values[1].log_evidence), rel=1e-12)
    assert values[0].effective_parameters == pytest.approx(values[1].effective_parameters)
