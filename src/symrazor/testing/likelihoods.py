"""Provide the test suite of likelihoods; import it from `symrazor.testing`."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from symrazor.core.likelihood import Likelihood
from symrazor.testing.oracles import assert_close, output_hessian


class LikelihoodSuite(ABC):
    """Tests that every likelihood must pass."""

    outputs = 4
    extreme = 30.0

    @abstractmethod
    def make(self) -> Likelihood:
        """Return the likelihood under test."""

    @abstractmethod
    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the log probability of each sample from an independent source."""

    def _case(self, n: int = 6) -> tuple[Likelihood, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        f = torch.randn(n, self.outputs, generator=generator, dtype=torch.float64)
        likelihood = self.make()
        return likelihood, f, likelihood.sample(f, generator)

    def test_nll(self) -> None:
        """`nll` equals the independent log probability, constants included."""
        likelihood, f, y = self._case()
        likelihood.check(f, y)
        assert_close(likelihood.nll(f, y), -self.log_prob(f, y), 1e-12)

    def test_residual(self) -> None:
        """`residual` equals the gradient of nll by autograd."""
        likelihood, f, y = self._case()
        f.requires_grad_()
        expected = torch.autograd.grad(likelihood.nll(f, y).sum(), f)[0]
        assert_close(likelihood.residual(f, y).detach(), expected, 1e-12)

    def test_root(self) -> None:
        """R R' equals the Hessian of nll by automatic differentiation."""
        likelihood, f, y = self._case()
        root = likelihood.hessian_root(f).detach()
        product = torch.einsum("cnk,cnl->nkl", root, root)
        for n in range(len(f)):
            assert_close(product[n], output_hessian(likelihood, f[n], y[n]).detach(), 1e-10)

    def test_sampled_roots_are_unbiased(self) -> None:
        """The mean over many draws is the Hessian; every spectral draw has its trace."""
        likelihood, f, y = self._case(2)
        generator = torch.Generator().manual_seed(1)
        for probe in ("spectral", "label"):
            draws = likelihood.sampled_root(f, 10_000, generator, probe).detach()
            product = torch.einsum("snk,snl->nkl", draws, draws)
            for n in range(len(f)):
                assert_close(product[n], output_hessian(likelihood, f[n], y[n]).detach(), 0.05)
        trace = likelihood.hessian_root(f).square().sum((0, 2)).detach()
        draw = likelihood.sampled_root(f, 1, generator).detach()
        assert_close(draw.square().sum((0, 2)), trace, 1e-10)

    def test_extremes_are_finite(self) -> None:
        """Values and gradients stay finite where probabilities reach 0 and 1."""
        likelihood = self.make()
        for dtype in (torch.float32, torch.float64):
            f = self.extreme * torch.eye(self.outputs, dtype=dtype) - self.extreme / 2
            f.requires_grad_()
            y = likelihood.sample(f, torch.Generator().manual_seed(0))
            evaluate: list[Callable[[], Tensor]] = [
                lambda: likelihood.nll(f, y),  # noqa: B023
                lambda: likelihood.hessian_root(f),  # noqa: B023
                lambda: likelihood.sampled_root(f, 3),  # noqa: B023
            ]
            for function in evaluate:
                value = function()
                gradient = torch.autograd.grad(value.sum() + 0 * f.sum(), f)[0]
                assert bool(torch.isfinite(value).all() and torch.isfinite(gradient).all())
