r"""Predict by which angle an image was rotated, with a network that is equivariant to rotations.

In polar coordinates around the centre, a rotation is a cyclic shift of the angles. `TurnNetwork`
reads an image on `RADII` circles and is convolutional along the angles, with one output for each of
them: a rotation of the image shifts its prediction. Rotations need not be learned from examples,
so that a thousand images are enough.

Every reading is enlarged and shifted a little at random, so that few images give many inputs.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

ANGLES, RADII = 72, 8
"""Angles and radii at which an image is read; predictions have half as many angles."""
OUTER_RADIUS, MAX_ENLARGEMENT, MAX_SHIFT = 0.85, 0.08, 0.06
"""Outer radius in half-sides, and the largest change of it and shift of the centre. No reading is
outside of the image, where nothing is known."""
CHANNELS, HIDDEN, DROPOUT = 16, 64, 0.3
REACH, DILATION = 9, 4
"""Number and distance of the angles that a prediction sees: together the whole circle."""


def polar_view(
    size: tuple[int, int], x: Float[Tensor, "n c h2 w2"], amount: Float[Tensor, " n"]
) -> Float[Tensor, "n c radii angles"]:
    """Return images, rotated by an angle each, in polar coordinates.

    Args:
        size: height and width of the images before `prepared_images`.
        x: prepared images.
        amount: the angles.
    """
    n, (h, w) = len(x), size
    angle = 2 * math.pi * torch.arange(ANGLES) / ANGLES - amount.view(-1, 1, 1)
    jitter = 2 * torch.rand(n, 3, 1, 1) - 1
    zoom, dx, dy = (1 + MAX_ENLARGEMENT * jitter[:, 0]), *(MAX_SHIFT * jitter[:, 1:]).unbind(1)
    radius = OUTER_RADIUS * zoom * ((torch.arange(RADII) + 0.5) / RADII).view(1, -1, 1)
    side = min(h, w)
    places = [
        (radius * angle.cos() + dx) * (side / w),
        (radius * angle.sin() + dy) * (side / h),
    ]
    return F.grid_sample(x, torch.stack(places, -1), padding_mode="border", align_corners=False)


class CircularConv(nn.Module):
    """Convolution over radii and, cyclically, angles.

    Args:
        inputs: channels.
        outputs: channels.
        stride: of radii and angles.
        dilation: of angles.
    """

    def __init__(self, inputs: int, outputs: int, stride: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.pad = 2 * dilation
        self.conv = nn.Conv2d(
            inputs, outputs, (3, 5), stride, padding=(1, 0), dilation=(1, dilation)
        )

    def forward(self, x: Float[Tensor, "n c r a"]) -> Float[Tensor, "n c2 r2 a2"]:
        """Return the convolved channels."""
        y: Tensor = self.conv(F.pad(x, (self.pad, self.pad, 0, 0), mode="circular"))
        return y


class TurnNetwork(nn.Module):
    """Predicts the angle of a rotation of polar views, given labels and without labels.

    Args:
        channels: of the views.
        classes: number of classes.
    """

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            CircularConv(channels, CHANNELS),
            nn.ReLU(),
            CircularConv(CHANNELS, 2 * CHANNELS, stride=2),
            nn.ReLU(),
            CircularConv(2 * CHANNELS, 2 * CHANNELS, dilation=2),
            nn.ReLU(),
            nn.Flatten(1, 2),
        )
        self.linear = nn.Conv1d(CHANNELS * RADII, HIDDEN, 1)
        self.label = nn.Embedding(classes + 1, 2 * HIDDEN)  # the last row: label unknown
        nn.init.normal_(self.label.weight, 0, 0.3)
        self.dropout = nn.Dropout(DROPOUT)
        self.around = nn.Conv1d(HIDDEN, HIDDEN, REACH, dilation=DILATION)
        self.head = nn.Conv1d(HIDDEN, 1, 1)
        self.unknown = classes

    def forward(
        self, x: Float[Tensor, "n c r a"], y: Tensor
    ) -> tuple[Float[Tensor, "n bins"], Float[Tensor, "n bins"]]:
        """Return log probabilities of the cells of the circle, given labels and without labels."""
        hidden = self.linear(self.dropout(self.trunk(x)))
        unknown = torch.full_like(y, self.unknown)
        with_label, without = (self._predict(hidden, self.label(v)) for v in (y, unknown))
        return with_label, without

    def _predict(self, hidden: Tensor, label: Tensor) -> Tensor:
        scale, shift = label.unsqueeze(2).chunk(2, 1)
        near = self.dropout(torch.relu(hidden * (1 + scale) + shift))
        pad = DILATION * (REACH // 2)
        far = self.around(F.pad(near, (pad, pad), mode="circular"))
        log_p: Tensor = self.head(torch.relu(near + far)).squeeze(1).log_softmax(1)
        return log_p
