"""Where a GPU may round float32 products to TF32 (10 bits), and where it must not."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 in matrix products and convolutions on CUDA devices, for a while.

    Training tolerates it: its gradients are noisier than that. Curvature does not.
    """
    if not torch.cuda.is_available():
        yield
        return
    matmul, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, convolutions.allow_tf32
    matmul.allow_tf32 = convolutions.allow_tf32 = allowed
    try:
        yield
    finally:
        matmul.allow_tf32, convolutions.allow_tf32 = before
