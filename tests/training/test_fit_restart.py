"""Recognise pruned networks and train them again."""

import logging
import math

import pytest
import torch
from torch import Tensor, nn

import symrazor as sr


def _data(n: int = 60) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 5, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long()


def _fit(data: tuple[Tensor, Tensor], **options: object) -> sr.Fit:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
    config = sr.FitConfig(epochs=40, every=4, batch_size=20, lr=0.01, progress=False)
    return sr.fit(model, data, config=config.change(**options))


def test_the_gain_over_a_constant_is_that_of_the_mean_output() -> None:
    f = torch.tensor([[2.0, 0.0], [0.0, 2.0]])
    gain = sr.Categorical().gain_over_constant(f, torch.tensor([0, 1]))
    assert gain == pytest.approx(2 * math.log(2) - 2 * math.log(1 + math.exp(-2)), rel=1e-12)
    noise = sr.Gaussian(1.0)
    y = torch.tensor([[1.0], [3.0]])
    assert noise.gain_over_constant(y, y) == pytest.approx(1.0, rel=1e-12)


def test_a_pruned_network_is_trained_again_with_a_weaker_prior(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "symrazor"):
        kept = _fit(_data(), prior_precision=1e3, burn_in=0, restart=False)
        assert kept.is_pruned
        assert kept.reading.verdict.startswith("The network predicts the same for every input")
        assert not caplog.records
        again = _fit(_data(), prior_precision=1e3, burn_in=0)
    assert "trained once more" in caplog.text
    assert not again.is_pruned
    assert float(again.evidence.log_evidence) > float(kept.evidence.log_evidence) + 10
    x, y = _data()
    assert float((again.predict(x).mean.argmax(1) == y).double().mean()) > 0.9


def test_labels_without_information_give_a_pruned_network() -> None:
    x, _ = _data()
    y = torch.randint(2, (60,), generator=torch.Generator().manual_seed(1))
    fit = _fit((x, y))
    assert fit.is_pruned
    assert float(fit.predict(x).mean.std(0).max()) < 0.2  # the weights of the first training
    assert sr.reading(fit.model, x).evidence == fit.evidence.to_dict()
    assert not _fit(_data()).is_pruned


def test_the_second_training_is_gentler_and_saves_nothing() -> None:
    options = sr.FitConfig(burn_in=3, burn_in_most=4, save="folder")
    second = options.change(prior_precision=50.0).gentler(100)
    assert second.razor.prior_precision == pytest.approx(0.1)
    assert second.burn_in_steps(100) == (50, 50)
    assert second.save is None
    longer = options.change(burn_in=80, burn_in_most=90).gentler(100)
    assert longer.burn_in_steps(100) == (80, 90)
