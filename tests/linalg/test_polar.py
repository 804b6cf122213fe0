"""Test polar factors against the singular value decomposition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import polar_by_svd

from symrazor.linalg.polar import polar_factors

SIZES = st.tuples(st.integers(1, 4), st.integers(1, 20), st.integers(1, 20))


@settings(deadline=None, max_examples=30)
@given(st.lists(SIZES, min_size=1, max_size=5), st.integers(0, 1000))
def test_polar_factors_match_the_svd(sizes: list[tuple[int, int, int]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    blocks = []
    for k, o, i in sizes:  # singular values between 0.05 and 1, as far as the sizes allow
        drawn = torch.randn(k, o, i, generator=generator, dtype=torch.float64)
        U, sigma, Vh = torch.linalg.svd(drawn, full_matrices=False)
        values = 0.05 + 0.95 * torch.rand(sigma.shape, generator=generator, dtype=torch.float64)
        blocks.append(U * values.unsqueeze(1) @ Vh * 10.0 ** (seed % 7 - 3))
    for fill in (False, True):
        for result, block in zip(polar_factors(blocks, fill), blocks, strict=True):
            assert result.shape == block.shape
            torch.testing.assert_close(result, polar_by_svd(block), rtol=0, atol=6e-3)


def test_singular_values_stay_at_most_one() -> None:
    """For any spectrum, singular vectors match the SVD and values are between 0 and 1.006."""
    sigma = torch.logspace(-8, 0, 12, dtype=torch.float64)
    torch.manual_seed(0)
    U, V = (torch.linalg.qr(torch.randn(n, n).double())[0] for n in (12, 30))
    X = (U * sigma) @ V[:12]
    (result,) = polar_factors([X.unsqueeze(0)])
    inner = U.T @ result[0] @ V[:12].T
    values = inner.diagonal()
    torch.testing.assert_close(inner, torch.diag(values), rtol=0, atol=1e-12)
    assert (values > 0).all()
    assert (values < 1.006).all()
    assert (values[sigma > 0.005] > 0.994).all()


@pytest.mark.parametrize("scale", [1e-44, 1e-37, 1e-25, 1e-12, 1e15, 1e37])
def test_polar_factors_of_any_scale(scale: float) -> None:
    """In single precision the square of 1e-25 is zero; other matrices are in the same batch."""
    torch.manual_seed(0)
    drawn = torch.randn(3, 5, 9)
    other = torch.randn(2, 4, 11)
    result = polar_factors([drawn * scale, other], fill=True)
    for got, block in zip(result, (drawn, other), strict=True):
        coarse = 0.3 if block is drawn and scale < 1e-40 else 6e-3  # one digit is all it has
        torch.testing.assert_close(got, polar_by_svd(block), rtol=0, atol=coarse)


def test_zeros_and_large_matrices() -> None:
    torch.manual_seed(0)
    blocks = [torch.randn(*s).double() for s in ((1, 260, 100), (2, 3, 4), (1, 1, 1500), (3, 1, 2))]
    blocks[1][1] = 0
    for fill in (False, True):
        result = polar_factors(blocks, fill)
        assert not result[1][1].any()
        torch.testing.assert_close(result[1][0], polar_by_svd(blocks[1][0]), rtol=0, atol=6e-3)
        for number in (0, 2, 3):
            expected = polar_by_svd(blocks[number])
            torch.testing.assert_close(result[number], expected, rtol=0, atol=6e-3)
