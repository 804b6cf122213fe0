"""Weighted samples: integer weights against repeated samples, in float64."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import symrazor as sr
from symrazor.core.likelihood import (
    Bernoulli,
    Categorical,
    Gaussian,
    Likelihood,
    Ordinal,
    Poisson,
    Weighted,
    with_weights,
)
from symrazor.testing import assert_close

CASES = [(Categorical(), 3), (Bernoulli(), 2), (Gaussian(outputs=2), 2), (Poisson(), 2)]
COUNTS = torch.tensor([1, 3, 2, 1, 4, 2])


def _case(likelihood: Likelihood, outputs: int) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()
    x = torch.randn(len(COUNTS), 3).double()
    y = likelihood.sample(torch.randn(len(COUNTS), outputs).double(), None)
    return model, x, y


@pytest.mark.parametrize("estimator", ["exact", "empirical"])
@pytest.mark.parametrize(("likelihood", "outputs"), [*CASES, (Ordinal(3), 1)])
def test_a_sample_of_weight_two_counts_as_two(
    likelihood: Likelihood, outputs: int, estimator: str
) -> None:
    model, x, y = _case(likelihood, outputs)
    labels = with_weights(y, COUNTS.double())
    options = {"structure": "full", "estimator": estimator}
    weighted = sr.Razor(model, Weighted(likelihood), len(x), **options).evidence((x, labels))
    repeated = (x.repeat_interleave(COUNTS, 0), y.repeat_interleave(COUNTS, 0))
    expected = sr.Razor(model, likelihood, int(COUNTS.sum()), **options).evidence(repeated)
    assert_close(weighted.log_evidence, expected.log_evidence, 1e-10)
    assert_close(weighted.log_likelihood, expected.log_likelihood, 1e-12)


def test_the_residual_is_the_gradient() -> None:
    likelihood = Weighted("categorical")
    f = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    y = with_weights(torch.arange(6) % 3, COUNTS.double())
    likelihood.check(f, y)
    expected = torch.autograd.grad(likelihood.nll(f, y).sum(), f)[0]
    assert_close(likelihood.residual(f, y).detach(), expected, 1e-12)
    assert likelihood.scores(f, y) == Categorical().scores(f, torch.arange(6) % 3)


def test_fit_accepts_sample_weights() -> None:
    """Two classes at the same place: the weights decide about the probability."""
    x, y = np.zeros((40, 1), np.float32), np.arange(40) % 2
    weights = np.where(y == 1, 3.0, 1.0)
    fit = sr.fit(
        nn.Linear(1, 2), (x, y), sample_weights=weights, test=(x, y), epochs=60, lr=0.1,
        progress=False,
    )  # fmt: skip
    assert float(fit.predict(x[:1]).mean[0, 1]) == pytest.approx(0.75, abs=0.05)


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (torch.zeros(2, dtype=torch.long), "with_weights"),
        (torch.tensor([[0.0, 1.0], [1.0, 0.0]]), "must be positive"),
    ],
)
def test_wrong_weights_are_explained(y: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Weighted("categorical").check(torch.zeros(2, 2), y)
    with pytest.raises(ValueError, match="weights have shape"):
        with_weights(torch.zeros(3), torch.ones(2))
