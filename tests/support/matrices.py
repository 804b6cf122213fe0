"""Random matrices, and factors of matrices from the singular value decomposition."""

import torch
from torch import Tensor


def random_psd(k: int, d: int, seed: int, rank: int | None = None) -> Tensor:
    """Return `k` random positive semi-definite matrices of size `d`."""
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(k, d, rank or d, generator=generator, dtype=torch.float64)
    return root @ root.mT


def polar_by_svd(X: Tensor) -> Tensor:
    U, _, Vh = torch.linalg.svd(X, full_matrices=False)
    return U @ Vh
