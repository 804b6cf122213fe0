"""Eigenvalues of many matrices by one call of cuSOLVER: arguments, chunks, failures."""

import pytest
import torch
from fake_cusolver import Library, OnCPU
from torch import Tensor

from symrazor.accelerate import cusolver


def _matrices(k: int, n: int) -> Tensor:
    """Symmetric; the second is singular, the third has repeated eigenvalues."""
    generator = torch.Generator().manual_seed(n)
    rows = torch.randn(k, n, n, generator=generator, dtype=torch.float64)
    rows[1:2, n // 2 :] = 0
    made = rows.mT @ rows
    made[2:3] = torch.diag(torch.arange(n, dtype=torch.float64) // 2)
    return made


@pytest.mark.parametrize(
    ("workspace", "batches"),
    [(700, [7]), (699, [4, 3]), (300, [3, 3, 1]), (100, [1] * 7), (1, [1] * 7)],
)
def test_chunks_are_as_large_as_the_workspace_allows(workspace: int, batches: list[int]) -> None:
    library = Library(bytes_each=100)
    matrices = _matrices(7, 5)
    before = matrices.clone()
    eigenvalues = OnCPU(library).eigenvalues(matrices, workspace)
    assert library.batches == batches
    assert torch.equal(matrices, before)
    torch.testing.assert_close(eigenvalues, torch.linalg.eigvalsh(matrices), rtol=1e-13, atol=1e-13)


def test_slices_are_taken_as_they_are() -> None:
    matrices = _matrices(9, 8)[::2, 1:6, 1:6]
    eigenvalues = OnCPU(Library()).eigenvalues(matrices)
    torch.testing.assert_close(eigenvalues, torch.linalg.eigvalsh(matrices), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_nothing_to_do(shape: tuple[int, int]) -> None:
    k, n = shape
    library = Library()
    empty = torch.zeros(k, n, n, dtype=torch.float64)
    assert OnCPU(library).eigenvalues(empty).shape == shape
    assert not library.batches


def test_what_does_not_converge_is_left_to_torch() -> None:
    matrices = _matrices(7, 5)
    library = Library(not_converged=(0, 2))
    eigenvalues = OnCPU(library).eigenvalues(matrices, 300)
    assert library.batches == [3, 3, 1]
    torch.testing.assert_close(eigenvalues, torch.linalg.eigvalsh(matrices), rtol=1e-13, atol=1e-13)


def test_a_status_is_an_error_and_torch_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = OnCPU(Library(status=6))
    matrices = _matrices(4, 40)
    with pytest.raises(cusolver.CuSolverError, match="cusolverDnXsyevBatched failed with status 6"):
        broken.eigenvalues(matrices)
    monkeypatch.setattr(cusolver, "solver", lambda device: broken)
    assert torch.equal(cusolver.eigvalsh(matrices), torch.linalg.eigvalsh(matrices))


def test_it_is_tried_out_on_known_eigenvalues() -> None:
    for n in (20, 150):
        matrices, expected = cusolver.known(n)
        assert torch.equal(matrices, matrices.mT)
        result = torch.linalg.eigvalsh(matrices)
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-13)
    OnCPU(Library()).try_out()

    class Wrong(OnCPU):
        def eigenvalues(self, matrices: Tensor, workspace: int = 0) -> Tensor:
            return super().eigenvalues(matrices) + 1e-9

    with pytest.raises(cusolver.CuSolverError, match="known eigenvalues of 20 rows have errors"):
        Wrong(Library()).try_out()


def test_others_are_for_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other devices and types, small matrices, and whatever is differentiated."""
    assert cusolver.solver(torch.device("cpu")) is None
    library = Library()
    monkeypatch.setattr(cusolver, "solver", lambda device: OnCPU(library))
    matrices, small = _matrices(3, 33), _matrices(3, cusolver.MAX_ROWS_BATCHED_BY_TORCH)
    for given in (matrices.float(), matrices.clone().requires_grad_(), small):
        assert torch.equal(cusolver.eigvalsh(given), torch.linalg.eigvalsh(given))
    assert not library.batches
    cusolver.eigvalsh(matrices)
    assert library.batches == [3]
