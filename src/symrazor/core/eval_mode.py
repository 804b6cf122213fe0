"""Put modules into eval mode for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(f: object) -> Iterator[None]:
    """Every module of f in eval mode, for a while."""
    training = [m for m in f.modules() if m.training] if isinstance(f, nn.Module) else []
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
