"""Test the training and reading of variational networks."""

import math

import pytest
import torch
from torch import nn
from variational_case import F64, data, mlp

from symrazor.inference.variational import Variational
from symrazor.training.variational import fit_variational


def test_fit_learns_a_function_and_returns_a_reading() -> None:
    torch.manual_seed(0)
    x = torch.randn(400, 2)
    y = (x[:, 0] * x[:, 1] > 0).long()
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
    records: list[dict[str, object]] = []
    fit = fit_variational(
        model,
        (x[:350], y[:350]),
        test=(x[350:], y[350:]),
        epochs=150,
        batch_size=175,
        every=50,
        lr=0.03,
        progress=False,
        callbacks=[records.append],
    )
    assert fit.reading.test["accuracy"] > 0.85
    assert float(fit.evidence.per_datum) > -math.log(2)  # better than knowing nothing
    assert [r["epoch"] for r in records if "per_datum" in r] == [50, 100, 150]
    assert len(fit.history) == 150
    assert [layer.name for layer in fit.reading.layers] == ["0", "2"]
    assert 0 < fit.reading.layers[0].effective_parameters < 48
    assert '"posterior": "matrix-normal"' in fit.reading.to_json()
    assert "Log evidence" in str(fit.reading)
    p = fit.predict(x[350:]).mean
    assert torch.allclose(p.sum(1), torch.ones(50))
    assert float((p.argmax(1) == y[350:]).float().mean()) > 0.85
    entry, two = (
        fit.variational.evidence([(x[:350], y[:350])], draws=32, hidden=hidden)
        for hidden in ((), [("0", "2")])
    )
    assert 0 < float(entry.complexity - two.complexity) <= math.lgamma(17)


def test_unknown_options_are_reported() -> None:
    with pytest.raises(ValueError, match="Unknown option 'epoch'. Did you mean 'epochs'"):
        fit_variational(mlp(), (torch.zeros(4, 2), torch.zeros(4).long()), epoch=3)


def test_fit_is_reproducible_and_rejects_invalid_options() -> None:
    x, y = data(12)
    runs = [
        fit_variational(mlp(), (x, y), epochs=3, batch_size=5, seed=3, progress=False)
        for _ in range(2)
    ]
    assert [r["nll"] for r in runs[0].history] == [r["nll"] for r in runs[1].history]
    assert float(runs[0].evidence.log_evidence) == float(runs[1].evidence.log_evidence)
    for changes, message in (
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"lr": 0.0}, "lr must be positive"),
        ({"warmup": 1.0}, "warmup"),
        ({"estimator": "mc"}, "Unknown option 'estimator'"),
    ):
        with pytest.raises(ValueError, match=message):
            fit_variational(mlp(), (x, y), **changes)  # type: ignore[arg-type]
    with pytest.raises(FloatingPointError, match="norm of the gradient"):
        fit_variational(mlp(), (x, y), epochs=300, lr=1e30, progress=False)


def test_convolutions_are_sampled_and_converted_between_dtypes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))
    vi = Variational(model, "categorical", 5).double()
    x, y = torch.randn(5, 1, 4, 4, dtype=F64), torch.arange(5) % 2
    now = vi.bound(x, y)
    now.log_evidence.backward()
    assert vi.local == ["3"]
    assert all(p.grad is not None for q in vi.posteriors.values() for p in q.parameters())
    assert vi.predict(x, draws=3).mean.dtype == F64
