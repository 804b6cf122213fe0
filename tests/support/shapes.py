"""Types and shapes as they are annotated, checked at every call (see CONTRIBUTING).

Where a test waits for an error of ours its wrong arguments are let through, and where torch.fx
follows a forward pass nothing is checked. Tests of torch.compile, which cannot follow a check, are
skipped. Only the check imports this file.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch
from beartype import BeartypeConf, FrozenDict, beartype
from torch import Tensor
from torch._dynamo import OptimizedModule
from torch.fx import Tracer

TAKEN = {
    int: int | np.integer,
    float: float | int | np.integer | np.floating | jaxtyping.Shaped[Tensor, ""],
    str: str | torch.device,
}
"""Options may be numbers of numpy and torch, and devices for their names."""
checked = beartype(conf=BeartypeConf(hint_overrides=FrozenDict(TAKEN)))


@contextmanager
def unchecked() -> Iterator[None]:
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


def _unchecked_raises(raises: Callable[..., Any]) -> Callable[..., Any]:
    @contextmanager
    def inner(*args: Any, **kwargs: Any) -> Iterator[pytest.ExceptionInfo]:
        with unchecked(), raises(*args, **kwargs) as caught:
            yield caught

    return inner


def _skipped(*args: Any, **kwargs: Any) -> None:
    pytest.skip("torch.compile does not follow checked functions")


pytest.raises = _unchecked_raises(pytest.raises)
Tracer.trace = unchecked()(Tracer.trace)
OptimizedModule.__call__ = _skipped
