"""Test the gradient of the evidence in the widths of series, points, colours and mixtures."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import symrazor as sr
import symrazor.core.likelihood
from symrazor.core.parameters import hyperparameters
from symrazor.groups.lie import so3
from symrazor.invariance import (
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
def test_gradient_equals_finite_differences(case: str, copies: str) -> None:
    make, x, options = CASES[case]
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), 6), nn.Tanh(), nn.Linear(6, 3))
    model = Augmented(network, make(), **options).double().eval()  # type: ignore[arg-type]
    y = torch.tensor([0, 1, 2, 0, 1])
    batches = [(x[:3], y[:3]), (x[3:], y[3:])]
    razor = sr.Razor(model, "categorical", 5, copies=copies)
    result = razor.hyper_gradient(batches, razor._curvature(batches, None))
    for key, raw in hyperparameters(model).items():
        exact, flat, step = sum(result[key]).reshape(-1), raw.data.view(-1), 1e-5
        for i in range(raw.numel()):
            values = []
            for move in (step, -2 * step, step):
                flat[i] += move
                values.append(float(razor.evidence(batches).log_evidence))
            slope = (values[0] - values[1]) / (2 * step)
            assert float(exact[i]) == pytest.approx(slope, rel=1e-5, abs=1e-7)


def _model_and_razor(estimator: str = "exact", n: int = 5) -> tuple[Augmented, sr.Razor]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(25, 6), nn.Tanh(), nn.Linear(6, 3))
    parts = [affine("affine", 0.2), Flips((-1,), 0.2)]
    model = Augmented(network, Augment(parts, 3), average="joint").double().eval()
    return model, sr.Razor(model, "categorical", n, estimator=estimator)


def test_the_gradient_of_a_monte_carlo_estimate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Use the same probes at every width, in a basis that does not depend on the width."""
    monkeypatch.setattr(symrazor.core.likelihood.base, "MAX_SPECTRAL_COLUMNS", 0)
    model, razor = _model_and_razor("mc")
    batches, state = [(_data(1, 5, 5), torch.tensor([0, 1, 2, 0, 1]))], razor.generator.get_state()
    slopes, exact = [], []
    collected = razor._curvature(batches, None)
    razor.generator.set_state(state)
    result = razor.hyper_gradient(batches, collected)
    for key, raw in hyperparameters(model).items():
        exact += sum(result[key]).reshape(-1).tolist()
        flat, step = raw.data.view(-1), 1e-5
        for i in range(raw.numel()):
            values = []
            for move in (step, -2 * step, step):
                flat[i] += move
                razor.generator.set_state(state)
                values.append(float(razor.evidence(batches).log_evidence))
            slopes.append((values[0] - values[1]) / (2 * step))
    assert exact == pytest.approx(slopes, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_the_gradient_is_independent_of_the_number_of_batches(parts: int) -> None:
    """One of three equal parts of the data, or all of them, represent the same N."""
    _, razor = _model_and_razor(n=15)
    batch = (_data(1, 5, 5), torch.tensor([0, 1, 2, 0, 1]))
    whole = razor.hyper_gradient([batch] * 3, razor._curvature([batch] * 3, None))
    used = ([batch] * parts, 5 * parts)
    subset_gradient = razor.hyper_gradient(used[0], razor._curvature(*used), used[1])
    for key, (fit, occam) in whole.items():
        torch.testing.assert_close(subset_gradient[key][0], fit, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(subset_gradient[key][1], occam, rtol=1e-8, atol=1e-10)
