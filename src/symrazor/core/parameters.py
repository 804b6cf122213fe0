r"""Separate the weights of a model from its hyperparameters.

Weights $\theta$ are integrated out; hyperparameters $\eta$ maximise the evidence. A tensor is a
hyperparameter if and only if it lives in a `Hyper` module. Names of parameters play no role.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Transform:
    """An invertible map from an unconstrained raw parameter to the value that a model uses."""

    forward: Callable[[Tensor], Tensor]
    inverse: Callable[[Tensor], Tensor]
    domain: str

    def __repr__(self) -> str:
        return f"Transform({self.domain})"


def _identity(value: Tensor) -> Tensor:
    return value


def _scaled_sigmoid(raw: Tensor, low: float, high: float) -> Tensor:
    return low + (high - low) * torch.sigmoid(raw)


def _scaled_logit(value: Tensor, low: float, high: float) -> Tensor:
    return torch.logit((value - low) / (high - low))


real = Transform(_identity, _identity, "real")
positive = Transform(torch.exp, torch.log, "positive")


def interval(low: float, high: float) -> Transform:
    """Return the scaled sigmoid, whose values lie strictly between `low` and `high`."""
    return Transform(
        partial(_scaled_sigmoid, low=low, high=high),
        partial(_scaled_logit, low=low, high=high),
        f"between {low} and {high}",
    )


class Hyper(nn.Module):
    """A hyperparameter: an optimiser moves `raw`, the model uses `value`.

    Args:
        value: starting value.
        transform: `positive` (default), `real` or `interval(low, high)`.

    >>> width = Hyper(0.5)
    >>> width.value = 2.0
    >>> round(width.value.item(), 6)
    2.0
    """

    raw: nn.Parameter

    def __init__(self, value: float | Tensor, transform: Transform = positive) -> None:
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
            raise ValueError(
                f"The value of this hyperparameter must be {self.transform.domain}, got "
                f"{value.tolist()}."
            )
        return raw.clone()

    def extra_repr(self) -> str:
        """Show the value in `print(model)`."""
        return f"value={self.value.detach().cpu().tolist()}, {self.transform.domain}"


def hyperparameters(model: nn.Module) -> dict[str, nn.Parameter]:
    r"""Return the trainable $\eta$ of a model by name: the raw parameters of its `Hyper`s."""
    return {
        f"{prefix}.raw" if prefix else "raw": module.raw
        for prefix, module in model.named_modules()
        if isinstance(module, Hyper) and module.raw.requires_grad
    }


def hyperparameters_of(model: nn.Module, likelihood: nn.Module) -> dict[str, nn.Parameter]:
    """Return the hyperparameters of a model, and those of a likelihood as "likelihood:NAME"."""
    noise = {f"likelihood:{name}": raw for name, raw in hyperparameters(likelihood).items()}
    return {**hyperparameters(model), **noise}


def weights(model: nn.Module) -> dict[str, nn.Parameter]:
    r"""Return the trainable weights $\theta$ by name: all parameters outside of `Hyper`s."""
    eta = {id(parameter) for parameter in hyperparameters(model).values()}
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in eta
    }


@contextmanager
def eval_mode(model: object) -> Iterator[None]:
    """Put every module of `model` into eval mode, and back at the end of the `with` block."""
    training = [m for m in model.modules() if m.training] if isinstance(model, nn.Module) else []
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def copy_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict whose tensors (and other values) are copies."""
    return {
        key: value.detach().clone() if isinstance(value, Tensor) else deepcopy(value)
        for key, value in state.items()
    }
