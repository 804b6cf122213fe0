"""The gradient of the evidence in the widths of series, points, colours and mixtures."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import symrazor as sr
from symrazor.augment import (
    Augment,
    Augmented,
    Flips,
    Jitter,
    Mixture,
    Noise,
    Saturation,
    TimeScale,
    TimeShift,
    affine,
    lie,
)
from symrazor.groups.lie import so3
from symrazor.hyper import hyperparameters


def _data(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(5, *shape, generator=generator, dtype=torch.float64)


CASES: dict[str, tuple[Callable[[], Augment | Mixture], Tensor, dict[str, str]]] = {
    "colours": (lambda: Augment([Saturation(0.4), Flips()], 3), _data(3, 4, 4), {}),
    "series": (lambda: Augment([TimeShift(0.7), TimeScale(0.2), Noise()], 4), _data(2, 7), {}),
    "points": (lambda: Augment([lie(so3(), 0.5), Jitter()], 4), _data(4, 3), {}),
    "mixture": (
        lambda: Mixture([Augment(affine("rotation", 0.4), 2), Augment(Flips())], [0.7, 0.3]),
        _data(1, 5, 5),
        {"average": "joint"},
    ),
    "features": (lambda: Augment(affine("scale", 0.3), 3), _data(1, 5, 5), {"at": "2"}),
    "not square": (lambda: Augment(affine("affine", 0.2), 3), _data(1, 4, 6), {"average": "joint"}),
    "one copy": (lambda: Augment(affine("rotation", 0.4), 1), _data(1, 5, 5), {}),
}


@pytest.mark.parametrize("copies", ["reduce", "expand"])
@pytest.mark.parametrize("case", CASES)
def test_gradient_is_that_of_finite_differences(case: str, copies: str) -> None:
    make, x, options = CASES[case]
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), 6), nn.Tanh(), nn.Linear(6, 3))
    model = Augmented(network, make(), **options).double().eval()  # type: ignore[arg-type]
    y = torch.tensor([0, 1, 2, 0, 1])
    batches = [(x[:3], y[:3]), (x[3:], y[3:])]
    razor = sr.Razor(model, "categorical", 5, copies=copies)
    found = razor.hyper_gradient(batches, razor._collect(batches, None))
    for key, raw in hyperparameters(model).items():
        exact, flat, step = sum(found[key]).reshape(-1), raw.data.view(-1), 1e-5
        for i in range(raw.numel()):
            values = []
            for move in (step, -2 * step, step):
                flat[i] += move
                values.append(float(razor.evidence(batches).log_evidence))
            slope = (values[0] - values[1]) / (2 * step)
            assert float(exact[i]) == pytest.approx(slope, rel=1e-5, abs=1e-7)
