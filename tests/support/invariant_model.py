"""A small model with a posterior that is not the prior, for the tests of invariant weights."""

import torch
from torch import Tensor

from symrazor.invariance import AffineLie, InvariantWeights, RandomFourier

DOUBLE = torch.float64


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def labels(n: int, classes: int = 3) -> Tensor:
    return torch.arange(n) % classes


def small(average: str = "logits", images: bool = False) -> InvariantWeights:
    """A model of three classes in float64 whose posterior is not the prior."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, 6, 6) if images else (2,)
    features = RandomFourier(shape, 7, 1.0, (), generator)
    group = "affine" if images else "rotation"
    widths = torch.full((6 if images else 1,), 0.4, dtype=DOUBLE)
    model = InvariantWeights(features.double(), AffineLie(group, widths), 3, average, 2.0)  # type: ignore[arg-type]
    model = model.double()
    with torch.no_grad():
        model.posterior.mean.copy_(noise(3, 7, seed=5))
        root = torch.linalg.cholesky(torch.cov(noise(7, 30, seed=6)) + 0.1 * torch.eye(7))
        model.posterior.root.set_(0.4 * root.expand(3, 7, 7))
    return model
