r"""Tell the weights of a model from its hyperparameters.

A network has two kinds of trainable tensors: weights $\theta$, which are integrated out, and
hyperparameters $\eta$, which maximise the evidence. A tensor is a hyperparameter if and only if it
lives in a `Hyper`; nothing is recognised by its name.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Transform:
    """An invertible map from the raw parameter (any real) to the value a user thinks in."""

    forward: Callable[[Tensor], Tensor]
    inverse: Callable[[Tensor], Tensor]
    domain: str


def _same(value: Tensor) -> Tensor:
    return value


def _squash(raw: Tensor, low: float, high: float) -> Tensor:
    return low + (high - low) * torch.sigmoid(raw)


def _unsquash(value: Tensor, low: float, high: float) -> Tensor:
    return torch.logit((value - low) / (high - low))


real = Transform(_same, _same, "real")
positive = Transform(torch.exp, torch.log, "positive")


def interval(low: float, high: float) -> Transform:
    """Values strictly between `low` and `high`, by a scaled sigmoid."""
    return Transform(
        partial(_squash, low=low, high=high),
        partial(_unsquash, low=low, high=high),
        f"between {low} and {high}",
    )


class Hyper(nn.Module):
    """A hyperparameter: `raw` is what an optimiser moves, `value` what the model uses.

    >>> width = Hyper(0.5)
    >>> width.value = 2.0
    >>> round(width.value.item(), 6)
    2.0
    """

    raw: nn.Parameter

    def __init__(self, value: float | Tensor, transform: Transform = positive) -> None:
        """Start at `value`; `transform` is `positive` (default), `real` or `interval(a, b)`."""
        super().__init__()
        self.transform = transform
        self.raw = nn.Parameter(self._invert(torch.as_tensor(value)))

    @property
    def value(self) -> Tensor:
        """The transformed parameter, differentiable in `raw`."""
        return self.transform.forward(self.raw)

    @value.setter
    def value(self, value: float | Tensor) -> None:
        raw = self._invert(torch.as_tensor(value)).to(self.raw)
        with torch.no_grad():
            self.raw.copy_(raw.expand_as(self.raw))

    def _invert(self, value: Tensor) -> Tensor:
        value = value.to(torch.get_default_dtype()) if not value.is_floating_point() else value
        raw = self.transform.inverse(value.detach())
        if not bool(torch.isfinite(raw).all()):
            raise ValueError(f"expected a {self.transform.domain} value, got {value}")
        return raw.clone()

    def extra_repr(self) -> str:
        """The value, for `print(model)`."""
        return f"value={self.value.detach().cpu().tolist()}, {self.transform.domain}"


def hyperparameters(model: nn.Module) -> dict[str, nn.Parameter]:
    r"""The trainable $\eta$ of a model: raw parameters of its `Hyper` modules, by name."""
    return {
        f"{prefix}.raw" if prefix else "raw": module.raw
        for prefix, module in model.named_modules()
        if isinstance(module, Hyper) and module.raw.requires_grad
    }


def weights(model: nn.Module) -> dict[str, nn.Parameter]:
    r"""The trainable $\theta$ of a model: every other parameter with requires_grad, by name."""
    eta = {id(parameter) for parameter in hyperparameters(model).values()}
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in eta
    }


@contextmanager
def eval_mode(f: object) -> Iterator[None]:
    """Every module of f in eval mode, for a while."""
    training = [m for m in f.modules() if m.training] if isinstance(f, nn.Module) else []
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
