"""One Kronecker-factored estimate by laplace-torch, through each of its backends."""

import torch
from laplace import KronLaplace
from laplace.curvature import AsdlGGN, CurvlinopsGGN
from torch import Tensor, nn

from symrazor.data import TensorLoader

BATCH = 250
PEERS = {"laplace-torch ASDL": AsdlGGN, "laplace-torch curvlinops": CurvlinopsGGN}


class Loader(TensorLoader):
    """Batches that all libraries share; laplace-torch also reads the length of `dataset`."""

    @property
    def dataset(self) -> Tensor:
        """What the loader runs over."""
        return self.x


def fit_peer(
    model: nn.Module, loader: Loader, backend: type, stochastic: bool = False
) -> KronLaplace:
    """Kronecker factors and eigenvalues by laplace-torch."""
    laplace = KronLaplace(
        model, "classification", backend=backend, backend_kwargs={"stochastic": stochastic}
    )
    laplace.fit(loader)
    return laplace


def peer_evidence(laplace: KronLaplace) -> tuple[float, Tensor]:
    """Log evidence at unit precisions, and its gradient in one log precision per tensor."""
    theta = list(laplace.model.parameters())
    log_delta = theta[0].new_zeros(len(theta), requires_grad=True)
    value: Tensor = laplace.log_marginal_likelihood(log_delta.exp())
    (gradient,) = torch.autograd.grad(value, log_delta)
    return value.item(), gradient
