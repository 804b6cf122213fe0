"""Compare factors stored as panels with dense matrices: same sums, half of the memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from symrazor.linalg.factor import PANEL, Factor, Symmetric


def rows(r: int, k: int, i: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(r, k, i, generator=generator, dtype=dtype)


def dense(a: Tensor) -> Tensor:
    return torch.einsum("rki,rkj->kij", a.double(), a.double())


@settings(max_examples=15, deadline=None)
@given(
    k=st.integers(1, 3),
    i=st.integers(1, 3 * PANEL + 5),
    sizes=st.lists(st.integers(1, 320), min_size=1, max_size=5),
    seed=st.integers(0, 99),
)
def test_running_sums_match_dense_matrices(k: int, i: int, sizes: list[int], seed: int) -> None:
    parts = [rows(r, k, i, seed + number) for number, r in enumerate(sizes)]
    expected = dense(torch.cat(parts))
    summed, absorbed = Factor.of_rows(parts[0]), Factor.of_rows(parts[0])
    for part in parts[1:]:
        summed = summed + Factor.of_rows(part)
        absorbed = absorbed.absorb(Factor.of_rows(part.clone()))
    tolerance = 1e-12 * float(expected.abs().max())
    assert torch.allclose(summed.matrix, expected, rtol=0, atol=tolerance)
    assert torch.equal(summed.matrix, absorbed.matrix)
    for block in range(k):
        alone = absorbed.select(block, block + 1).matrix[0]
        assert torch.allclose(alone, expected[block], rtol=0, atol=tolerance)
    mean = absorbed.averaged().matrix
    assert torch.allclose(mean[0], expected.mean(0), rtol=0, atol=tolerance)


@pytest.mark.parametrize("i", [2 * PANEL, 2 * PANEL + 1, 8 * PANEL])
def test_a_large_matrix_takes_little_more_than_half_of_the_memory(i: int) -> None:
    matrix = dense(rows(4, 2, i))
    matrix = (matrix + matrix.mT) / 2
    kept = Symmetric.of(matrix)
    numbers = sum(panel.numel() for panel in kept.panels)
    assert numbers <= matrix.numel() * (1 + PANEL / i) / 2 + i * PANEL
    assert torch.equal(kept.matrix, matrix)
    assert kept.shape == matrix.shape and not kept.whole
    assert not Symmetric.zeros(2, i, matrix.device).matrix.any()


def test_small_matrices_and_those_with_a_gradient_are_stored_whole() -> None:
    small = dense(rows(4, 2, 2 * PANEL - 1))
    assert Symmetric.of(small).panels[0] is small
    large = dense(rows(2, 1, 2 * PANEL)).requires_grad_()
    kept, other = Symmetric.of(large), Symmetric.of(large.detach())
    assert kept.whole and not other.whole and not kept.mutable
    both = (other + kept).matrix
    (gradients,) = torch.autograd.grad(both[0].trace(), large)
    assert torch.equal(gradients[0], torch.eye(2 * PANEL, dtype=torch.float64))
    assert torch.allclose(both.detach(), 2 * large.detach(), rtol=0, atol=1e-13)


def test_eigenvalues_of_panels() -> None:
    a = rows(600, 2, 2 * PANEL + 40, dtype=torch.float32)
    factor = Factor.of_rows(a[:300]) + Factor.of_rows(a[300:])
    assert factor.total is not None and not factor.total.whole
    eigenvalues = factor.spectrum("a factor", torch.finfo(torch.float32).eps)
    expected = torch.linalg.eigvalsh(dense(a))
    assert torch.allclose(eigenvalues, expected, rtol=1e-4, atol=1e-6 * float(expected.max()))


@pytest.mark.parametrize("i", [40, 300])
def test_borrowed_matrices_keep_their_loan(i: int) -> None:
    """Views keep the loan; full matrices are copies."""
    matrix = torch.randn(3, i, i, dtype=torch.float64)
    matrix = matrix + matrix.mT
    lent = Symmetric.of(matrix.clone())
    lent.loan = object()
    assert lent.select(1, 3).loan is lent.loan
    assert lent.select(1, 3).panels[0].data_ptr() == lent.panels[0][1:].data_ptr()
    for other in (lent + lent, lent.mean(), Symmetric.of(matrix)):
        assert other.loan is None
    full, part = lent.matrix, lent.select(1, 3).matrix
    for panel in lent.panels:
        panel.zero_()
    assert torch.equal(full, matrix) and torch.equal(part, matrix[1:])
