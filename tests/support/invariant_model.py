"""Small models for the tests of invariant weights: rings, and a posterior that is not the prior."""

import torch
from torch import Tensor

from symrazor.data import rings
from symrazor.groups.lie import so2
from symrazor.invariance import AffineLie, InvariantWeights, LieDistribution, RandomFourier
from symrazor.training.batched_training import BatchedConfig, Data, Member

DOUBLE = torch.float64
PLAN = BatchedConfig(steps=120, batch=120, samples=8, width_rate=0.08, rates=(0.3, 0.1), every=8)
"""A short training of `ring_models`."""


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


def ring_models(
    starts: list[float], methods: list[str]
) -> tuple[InvariantWeights, Data, list[Member]]:
    """Return models of rotated rings with these starting widths (degrees), data and members."""
    data = Data.of([rings(120)])
    members = [Member(method=method) for method in methods]  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    features = RandomFourier((2,), 64, 5.0, (len(members),), generator)
    widths = torch.tensor(starts).deg2rad().unsqueeze(1)
    return InvariantWeights(features, LieDistribution(so2(), widths), 2), data, members
