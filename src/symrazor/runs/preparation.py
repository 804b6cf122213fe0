"""Inputs and targets as a network likes them, and the network as its user likes it."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from symrazor.data import Dataset
from symrazor.layers.trace import traced


@dataclass(frozen=True)
class Preparation:
    """Mean 0 and variance 1 for each input channel and each regression target; points last.

    Args:
        mean: of each channel (features of a set or vector), over data and positions; one for all
            features of a vector that groups exchange.
        scale: their standard deviation, 1 where it is 0.
        target_mean: of each target; 0 for classes.
        target_scale: their standard deviation; 1 for classes.
        points: whether inputs come as [n, points, features] and go in as [n, features, points].
    """

    mean: Tensor
    scale: Tensor
    target_mean: Tensor
    target_scale: Tensor
    points: bool = False

    def inputs(self, x: Tensor) -> Tensor:
        """What the network is trained on."""
        x = x.transpose(1, 2).contiguous() if self.points else x
        shape = (-1, *[1] * (x.ndim - 2))
        return (x - self.mean.reshape(shape)) / self.scale.reshape(shape)

    def targets(self, y: Tensor) -> Tensor:
        """What it is trained to say."""
        return (y - self.target_mean) / self.target_scale if y.is_floating_point() else y

    def attach(self, network: nn.Module, dims: int) -> nn.Module:
        """The network on data as they came, saying targets as they came; plain torch modules.

        Args:
            network: on prepared inputs, made of torch's own modules.
            dims: of an input, the data's included.
        """
        plain = traced(_Attached(self, network, dims), "Network")
        found = nn.Sequential(plain).eval()
        for tensor in [*found.parameters(), *found.buffers()]:  # no views: files hold them whole
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
        found.collapse_report = getattr(network, "collapse_report", None)  # type: ignore[assignment]
        return found


class _Attached(nn.Module):
    mean: Tensor
    scale: Tensor
    target_mean: Tensor
    target_scale: Tensor

    def __init__(self, preparation: Preparation, network: nn.Module, dims: int) -> None:
        super().__init__()
        shape = (-1, *[1] * (dims - 2))
        self.points = preparation.points
        self.network = network
        scaled = bool((preparation.target_scale != 1).any())
        self.real = scaled or bool((preparation.target_mean != 0).any())
        self.register_buffer("mean", preparation.mean.reshape(shape).clone())
        self.register_buffer("scale", preparation.scale.reshape(shape).clone())
        if self.real:
            self.register_buffer("target_mean", preparation.target_mean.clone())
            self.register_buffer("target_scale", preparation.target_scale.clone())

    def forward(self, x: Tensor) -> Tensor:
        if self.points:
            x = x.transpose(1, 2)
        f: Tensor = self.network((x - self.mean) / self.scale)
        return f * self.target_scale + self.target_mean if self.real else f


def prepare(data: Dataset, same_scale: bool = False) -> Preparation:
    """Means and scales of the training data.

    Args:
        data: of any kind but trajectories.
        same_scale: one for all features of a vector, which are places of a group.
    """
    x = data.x.transpose(1, 2) if data.kind == "set" else data.x
    x = x.unsqueeze(1) if same_scale and data.kind == "vector" else x
    over = [0, *range(2, x.ndim)]
    mean, scale = x.mean(over), x.std(over, correction=0)
    one, zero = torch.ones(1), torch.zeros(1)
    if data.task == "regression" and data.y is not None:
        zero, one = data.y.mean(0), _positive(data.y.std(0, correction=0))
    return Preparation(mean, _positive(scale), zero, one, data.kind == "set")


def _positive(scale: Tensor) -> Tensor:
    """1 in place of 0."""
    return torch.where(scale > 0, scale, torch.ones_like(scale))
