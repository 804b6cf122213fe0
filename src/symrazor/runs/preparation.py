"""Standardise inputs and targets in float64, and attach these steps to a trained network."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from symrazor.data import Dataset, Tensors
from symrazor.data.resolution import chunks, moments, warn_if_coarse
from symrazor.layers.path import traced


@dataclass(frozen=True)
class Preparation:
    """Standardise each input channel and each regression target to mean 0 and variance 1.

    All constants are float64. Data are centred and scaled in float64 and then rounded to float32.

    Args:
        mean: mean of each channel (or feature) over samples and positions; a single one for all
            features of a vector that groups permute.
        scale: standard deviation of each channel, 1 instead of 0.
        target_mean: mean of each target; 0 for classes.
        target_scale: standard deviation of each target; 1 for classes.
        points: whether inputs [n, points, features] are transposed to [n, features, points].
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
        standardised = torch.empty(x.shape, dtype=torch.float32)
        for source, target in zip(chunks(x), chunks(standardised), strict=True):
            target.copy_((source.double() - mean) / scale)
        return standardised

    def targets(self, y: Tensor) -> Tensor:
        """Return standardised targets in float32; class labels are unchanged."""
        if not y.is_floating_point():
            return y
        return ((y.double() - self.target_mean) / self.target_scale).float()

    def data(self, data: Tensors) -> Tensors:
        """Return standardised inputs and targets."""
        return self.inputs(data[0]), self.targets(data[1])

    def attach(self, network: nn.Module, dims: int) -> nn.Module:
        """Return the network with standardisation before and after it, as plain torch modules.

        It takes float32 or float64 data that are not standardised, and returns targets in float64.

        Args:
            network: plain network on standardised inputs.
            dims: dimensions of a batch of inputs.
        """
        plain = traced(_Attached(self, network, dims), "Network")
        attached = nn.Sequential(plain).eval()
        for tensor in [*attached.parameters(), *attached.buffers()]:  # files store no views
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
        attached.collapse_report = getattr(network, "collapse_report", None)  # type: ignore[assignment]
        return attached


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
        data: data of any kind but trajectories.
        same_scale: whether the features of a vector share one scale, because groups permute them.
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
    """Return the names of the standardised columns for messages."""
    if len(data.columns) == count:
        return [f"column {name!r}" for name in data.columns]
    if count == 1:
        return ["x"]
    return [f"x[:, :, {k}]" if data.kind == "set" else f"x[:, {k}]" for k in range(count)]


def _positive(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, scale, torch.ones_like(scale))
