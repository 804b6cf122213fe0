"""Predict by which amount an input was moved."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.invariance.flows import Flow
from symrazor.invariance.polar import TurnNetwork

HIDDEN, CHANNELS, HARMONICS = 64, 16, 8
"""Features before the output, channels of the first convolution, and frequencies on a circle."""
DROPOUT = 0.3


class PoseNetwork(nn.Module):
    """Predicts the amount of every flow, with the label of the input and without.

    Args:
        x: one input, as flows expect it, [1, ...].
        flows: the flows.
        classes: number of classes.
        is_cloud: whether inputs [n, points, d] are point clouds, not series.
    """

    circle: Tensor

    def __init__(
        self, x: Tensor, flows: Sequence[Flow], classes: int, is_cloud: bool = False
    ) -> None:
        super().__init__()
        views = [flow.move(x, torch.zeros(1)) for flow in flows]
        plain = [view for view, flow in zip(views, flows, strict=True) if not flow.is_polar]
        self.trunk = trunk_for(plain[0], is_cloud) if plain else nn.Flatten()
        features = self.trunk(plain[0]).shape[1] if plain else 1
        self.linear = nn.Linear(features, HIDDEN)
        self.label = nn.Embedding(classes + 1, 2 * HIDDEN)  # the last row: label unknown
        nn.init.normal_(self.label.weight, 0, 0.3)
        self.dropout = nn.Dropout(DROPOUT)
        self.unknown, self.flows = classes, flows
        circles = [flow for flow in flows if flow.kind == "circle" and not flow.is_polar]
        self.heads = nn.ModuleList(
            TurnNetwork(view.shape[1], classes)
            if flow.is_polar
            else nn.Linear(HIDDEN, 2 * HARMONICS if flow in circles else flow.bins)
            for view, flow in zip(views, flows, strict=True)
        )
        bins = max([flow.bins for flow in circles], default=1)
        angle = 2 * math.pi * (torch.arange(bins) + 0.5) / bins
        orders = torch.arange(1, HARMONICS + 1).unsqueeze(1)
        self.register_buffer("circle", torch.cat([(orders * angle).cos(), (orders * angle).sin()]))

    def forward(
        self, x: Tensor, y: Tensor, flow: int
    ) -> tuple[Float[Tensor, "n bins"], Float[Tensor, "n bins"]]:
        """Return log probabilities of the cells of a flow, given labels and without labels."""
        if self.flows[flow].is_polar:
            predicted: tuple[Tensor, Tensor] = self.heads[flow](x, y)
            return predicted
        hidden = self.linear(self.dropout(self.trunk(x)))
        unknown = torch.full_like(y, self.unknown)
        with_label, without = (self._predict(hidden, self.label(v), flow) for v in (y, unknown))
        return with_label, without

    def _predict(self, hidden: Tensor, label: Tensor, flow: int) -> Tensor:
        scale, shift = label.chunk(2, 1)
        logits = self.heads[flow](self.dropout(torch.relu(hidden * (1 + scale) + shift)))
        logits = logits @ self.circle if self.flows[flow].kind == "circle" else logits
        log_p: Tensor = logits.log_softmax(1)
        return log_p


class PointFeatures(nn.Module):
    """Features of point clouds [n, points, d]: the mean and the maximum over points.

    Args:
        size: number of coordinates.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.each = _dense(size)

    def forward(self, x: Float[Tensor, "n points d"]) -> Float[Tensor, "n features"]:
        """Return features that do not depend on the order of the points."""
        h = self.each(x)
        return torch.cat([h.mean(1), h.amax(1)], 1)


def _dense(size: int) -> nn.Module:
    return nn.Sequential(nn.Linear(size, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU())


def trunk_for(example: Tensor, is_cloud: bool = False) -> nn.Module:
    """Return features for images [n, c, h, w], series [n, c, t], point clouds or vectors [n, d]."""
    c = example.shape[1]
    if example.dim() == 2:
        return _dense(c)
    if is_cloud:
        return PointFeatures(example.shape[2])
    conv = nn.Conv2d if example.dim() == 4 else nn.Conv1d
    return nn.Sequential(
        conv(c, CHANNELS, 3, padding=1),
        nn.ReLU(),
        conv(CHANNELS, 2 * CHANNELS, 3, stride=2, padding=1),
        nn.ReLU(),
        conv(2 * CHANNELS, 2 * CHANNELS, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
    )
