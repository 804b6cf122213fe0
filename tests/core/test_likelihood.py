"""Likelihoods against torch.distributions and autodiff Hessians."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, distributions

import symrazor as sr
from symrazor.testing import LikelihoodSuite


class TestCategorical(LikelihoodSuite):
    extreme = 2000.0

    def make(self) -> sr.Likelihood:
        return sr.Categorical()

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return distributions.Categorical(logits=f).log_prob(y)


class TestBernoulli(LikelihoodSuite):
    extreme = 2000.0

    def make(self) -> sr.Likelihood:
        return sr.Bernoulli()

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return distributions.Bernoulli(logits=f).log_prob(y).sum(-1)


class TestPoisson(LikelihoodSuite):
    def make(self) -> sr.Likelihood:
        return sr.Poisson()

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return distributions.Poisson(f.exp()).log_prob(y).sum(-1)


class TestGaussian(LikelihoodSuite):
    def make(self) -> sr.Likelihood:
        return sr.Gaussian(0.3)

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return distributions.Normal(f, 0.3).log_prob(y).sum(-1)


class TestGaussianPerOutput(LikelihoodSuite):
    sigma = torch.tensor([0.1, 0.5, 1.0, 3.0], dtype=torch.float64)

    def make(self) -> sr.Likelihood:
        likelihood = sr.Gaussian(outputs=4)
        likelihood.noise.value = self.sigma
        return likelihood

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return distributions.Normal(f, self.sigma).log_prob(y).sum(-1)


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 30), st.floats(0.1, 300), st.integers(0, 10_000))
def test_categorical_root_for_any_logits(k: int, spread: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    f = spread * torch.randn(3, k, generator=generator, dtype=torch.float64)
    root = sr.Categorical().hessian_root(f)
    assert root.shape == (k - 1, 3, k)
    p = f.softmax(-1)
    expected = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    assert torch.allclose(torch.einsum("cnk,cnl->nkl", root, root), expected, atol=1e-14)


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 40), st.floats(0.1, 5), st.integers(0, 10_000))
def test_probes_do_not_depend_on_rounding(k: int, spread: float, seed: int) -> None:
    """The same random numbers at outputs that differ in the last digits: the same probes."""
    generator = torch.Generator().manual_seed(seed)
    f = spread * torch.randn(200, k, generator=generator, dtype=torch.float64)
    other = f * (1 + 1e-14 * torch.randn(f.shape, generator=generator, dtype=torch.float64))
    first, second = (
        sr.Categorical().sampled_root(outputs, 1, torch.Generator().manual_seed(1))
        for outputs in (f, other)
    )
    assert float((first - second).abs().max()) < 1e-6


def test_wide_categorical_uses_plain_signs_and_stays_unbiased() -> None:
    f = torch.randn(1, 80, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    draws = sr.Categorical().sampled_root(f, 20_000, torch.Generator().manual_seed(1))
    p = f.softmax(-1)[0]
    got = torch.einsum("snk,snl->kl", draws, draws)
    assert torch.allclose(got, torch.diag(p) - p.unsqueeze(1) * p, atol=2e-3)


@pytest.mark.parametrize(
    ("likelihood", "f", "y", "message"),
    [
        (sr.Categorical(), torch.zeros(2, 3), torch.tensor([0, 3]), "Label 3 at position 1"),
        (sr.Categorical(), torch.zeros(2, 3), torch.tensor([-1, 0]), "Label -1 at position 0"),
        (
            sr.Categorical(),
            torch.zeros(2, 3),
            torch.tensor([0.0, 1.0]),
            "labels must be integers",
        ),
        (sr.Categorical(), torch.zeros(2, 1), torch.tensor([0, 0]), "Use the Bernoulli"),
        (sr.Categorical(), torch.zeros(2), torch.tensor([0, 0]), r"shape \[n, k\]"),
        (sr.Categorical(), torch.zeros(2, 3), torch.tensor([0]), "2 outputs but 1 labels"),
        (sr.Bernoulli(), torch.zeros(2, 1), torch.tensor([0, 2]), "Labels must be 0 or 1, got 2"),
        (
            sr.Poisson(),
            torch.zeros(2, 1),
            torch.tensor([1, -1]),
            "integers from 0 on, got -1",
        ),
        (
            sr.Poisson(),
            torch.zeros(2, 1),
            torch.tensor([1.0, 0.5]),
            "integers from 0 on, got 0.5",
        ),
        (
            sr.Gaussian(),
            torch.zeros(2, 3),
            torch.zeros(2, 2),
            r"shape \[2, 3\], got \[2, 2\]",
        ),
        (
            sr.Gaussian(outputs=2),
            torch.zeros(2, 3),
            torch.zeros(2, 3),
            "2 noise scales",
        ),
    ],
)
def test_bad_labels_are_named(
    likelihood: sr.Likelihood, f: Tensor, y: Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        likelihood.check(f, y)


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match="'categorical'"):
        sr.Razor(torch.nn.Linear(2, 2), "categoricl", 10)


@pytest.mark.parametrize("k", [2, 10, 40])
def test_a_spectral_probe_has_the_length_of_the_trace(k: int) -> None:
    """In every draw, since its directions are orthogonal: few products, and many at once."""
    generator = torch.Generator().manual_seed(k)
    f = 2 * torch.randn(30, k, generator=generator, dtype=torch.float64)
    p = f.softmax(-1)
    for _ in range(3):
        z = sr.Categorical().sampled_root(f, 1, generator)[0]
        torch.testing.assert_close(z.square().sum(-1), 1 - p.square().sum(-1), rtol=1e-9, atol=0)
