"""Standardise inputs and targets in float64, and attach these steps to a trained network."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from symrazor.data import Dataset, Tensors
from symrazor.data.resolution import chunks, moments, warn_if_coarse
from symrazor.layers.path import traced


@dataclass(frozen=True)
class Preparation:
    """Mean 0 and variance 1 for each input channel and each regression target; points last.

    All constants are float64. Data are centred and scaled in float64 and rounded to float32 after.

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
        """Return standardised inputs in float32, converted in chunks to save memory."""
        x = x.transpose(1, 2) if self.points else x
        shape = (-1, *[1] * (x.ndim - 2))
        mean, scale = self.mean.reshape(shape), self.scale.reshape(shape)
        found = torch.empty(x.shape, dtype=torch.float32)
        for part, into in zip(chunks(x), chunks(found), strict=True):
            into.copy_((part.double() - mean) / scale)
        return found

    def targets(self, y: Tensor) -> Tensor:
        """Return standardised targets in float32; class labels are unchanged."""
        if not y.is_floating_point():
            return y
        return ((y.double() - self.target_mean) / self.target_scale).float()

    def data(self, data: Tensors) -> Tensors:
        """Return standardised inputs and targets."""
        return self.inputs(data[0]), self.targets(data[1])

    def attach(self, network: nn.Module, dims: int) -> nn.Module:
        """Return the network with standardisation before and after it; plain torch modules.

        It takes the data of the user, as float32 or float64. Targets come out as float64.

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
        f: Tensor = self.network(((x.double() - self.mean) / self.scale).float())
        return f.double() * self.target_scale + self.target_mean if self.real else f


def prepare(data: Dataset, same_scale: bool = False) -> Preparation:
    """Return means and scales of the training data; warn about columns that are rounded away.

    Args:
        data: of any kind but trajectories.
        same_scale: one for all features of a vector, which are places of a group.
    """
    x = data.x.transpose(1, 2) if data.kind == "set" else data.x
    x = x.unsqueeze(1) if same_scale and data.kind == "vector" else x
    mean, scale = moments(x)
    warn_if_coarse(mean, scale, x.dtype, _column_names(data, len(mean)), data.source)
    target_mean, target_scale = torch.zeros(1).double(), torch.ones(1).double()
    if data.task == "regression" and data.y is not None:
        target_mean, target_scale = moments(data.y)
        names = [f"y[:, {k}]" for k in range(len(target_mean))]
        warn_if_coarse(target_mean, target_scale, data.y.dtype, names, data.source)
    points = data.kind == "set"
    return Preparation(mean, _positive(scale), target_mean, _positive(target_scale), points)


def _column_names(data: Dataset, count: int) -> list[str]:
    """Return what messages call the columns that have a mean each."""
    if len(data.columns) == count:
        return [f"column {name!r}" for name in data.columns]
    if count == 1:
        return ["x"]
    return [f"x[:, :, {k}]" if data.kind == "set" else f"x[:, {k}]" for k in range(count)]


def _positive(scale: Tensor) -> Tensor:
    """1 in place of 0."""
    return torch.where(scale > 0, scale, torch.ones_like(scale))
