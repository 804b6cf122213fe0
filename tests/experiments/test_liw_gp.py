"""Test the comparison with a sparse Gaussian process."""

import sys

import pytest
import torch

from symrazor.experiments import liw_gp
from symrazor.experiments.liw import Options
from symrazor.inference.variational import BlockCholesky, kl


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_kl_of_the_sparse_gaussian_process_equals_ours() -> None:
    pytest.importorskip("gpytorch", reason="a development extra")
    latent, _ = liw_gp.gaussian_process(torch.rand(5, 3), 2)
    latent(torch.rand(4, 3))  # the first call sets q to the prior, and a little noise
    q = latent.variational_strategy.base_variational_strategy._variational_distribution
    with torch.no_grad():
        q.chol_variational_covar.copy_(torch.eye(5) + 0.2 * torch.rand(2, 5, 5).tril())
        q.variational_mean.copy_(torch.rand(2, 5))
    latent(torch.rand(4, 3))  # and the second one forgets what it was
    posterior = BlockCholesky((2, 5), 1.0, mean=q.variational_mean)
    posterior.root.set_(q.chol_variational_covar.detach().tril())
    gpytorch_kl = latent.variational_strategy.kl_divergence()
    assert gpytorch_kl.item() == pytest.approx(kl(posterior, 1.0).item(), rel=1e-4)


def test_missing_gpytorch_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gpytorch", None)
    with pytest.raises(ValueError, match="pip install gpytorch"):
        liw_gp.gaussian_process(torch.rand(5, 3), 2)
    with pytest.raises(ValueError, match="Rows: fully rotated, translated"):
        liw_gp.run(Options(small=True, rows=("table 9",)))
