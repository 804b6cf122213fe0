"""Test the exact evidence of linear models."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import symrazor as sr

F64 = torch.float64


def dense_log_marginal(phi: Tensor, y: Tensor, delta: float, sigma: float) -> float:
    """log N(y | 0, Phi Phi' / delta + sigma^2 I), written down directly."""
    covariance = phi @ phi.T / delta + sigma**2 * torch.eye(len(y), dtype=F64)
    normal = torch.distributions.MultivariateNormal(torch.zeros(len(y), dtype=F64), covariance)
    return float(normal.log_prob(y))


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 12),
    st.integers(1, 12),
    st.floats(-4, 4),
    st.floats(-2, 2),
    st.integers(0, 1000),
)
def test_exact_evidence_is_the_marginal_density(
    n: int, m: int, log_delta: float, log_sigma: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    phi = torch.randn(n, m, generator=generator, dtype=F64)
    y = torch.randn(n, generator=generator, dtype=F64)
    delta, sigma = math.exp(log_delta), math.exp(log_sigma)
    got = float(sr.exact_evidence(phi, y, delta, sigma).evidence.log_evidence)
    assert got == pytest.approx(dense_log_marginal(phi, y, delta, sigma), rel=1e-9, abs=1e-9)


def test_exact_evidence_with_one_precision_per_weight() -> None:
    torch.manual_seed(0)
    phi, y = torch.randn(7, 4, dtype=F64), torch.randn(7, dtype=F64)
    delta = torch.tensor([0.1, 1.0, 10.0, 100.0], dtype=F64)
    expected = dense_log_marginal(phi * delta.rsqrt(), y, 1.0, 0.5)
    assert float(sr.exact_evidence(phi, y, delta, 0.5).evidence.log_evidence) == pytest.approx(
        expected, rel=1e-12
    )


@pytest.mark.parametrize(
    ("phi", "y", "options", "message"),
    [
        (torch.zeros(3, 2), torch.zeros(4), {}, "got .3, 2. and .4."),
        (torch.zeros(3, 2), torch.zeros(3), {"precision": 0.0}, "precision must be positive"),
        (torch.zeros(3, 2), torch.zeros(3), {"noise": -1.0}, "noise must be positive"),
        (torch.full((3, 2), math.nan), torch.zeros(3), {}, "Features and targets must be finite"),
        (
            torch.zeros(3, 2),
            torch.zeros(3),
            {"precision": torch.ones(3)},
            "must be one number or 2",
        ),
    ],
)
def test_exact_evidence_rejects_invalid_arguments(
    phi: Tensor, y: Tensor, options: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sr.exact_evidence(phi, y, **options)
