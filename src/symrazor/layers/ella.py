"""Build the network of the ELLA paper: blocks of relaxed layers, then two dense layers.

The architecture is that of the paper's tables (section 6.2):

| image size | channels, in multiples of alpha | strides | head |
|---|---|---|---|
| 32 | 1, 2, 2, 4, 4, 8, 8, 16 | 1, 2, 1, 2, 1, 2, 2, 2 | 16 -> 64 -> classes |
| 16 | 1, 2, 2, 4, 8 | 1, 2, 2, 2, 2 | 8 -> 16 -> classes |

Both end in one pixel, so that a network of convolutions alone is translation-invariant. There is no
normalisation and no dropout. Paths are summed, where the reference implementation averages them,
and strides keep for each image the polyphase component with the largest norm (see `Conv`).

With GCONV (Table 3) there are four times as many channels, one per quarter turn. The first block
lifts the image to the group, and the maximum over the four is taken after the last block. The
reference rotates the image, applies the same convolutions to all four copies and calls this GCONV;
here the four are connected by rotated filters (`GConv`).
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

from torch import nn

from symrazor.layers import FC, FFC, SFC, Conv, GConv, GroupPool, Path, Relaxed, SConv

FREE_PRECISION = {32: 100.0, 16: 30.0}
"""Image size -> precision of the initial prior of free paths beside an equivariant path."""

_CHANNELS = {32: (1, 2, 2, 4, 4, 8, 8, 16), 16: (1, 2, 2, 4, 8)}
_STRIDES = {32: (1, 2, 1, 2, 1, 2, 2, 2), 16: (1, 2, 2, 2, 2)}
_HIDDEN = {32: 64, 16: 16}

Prior = Literal["weights", "omega"]
PATHS = (
    *("fc", "conv", "fc+conv", "f-fc", "f-fc+conv", "s-fc", "s-conv", "s-fc+s-conv"),
    *("gconv", "f-fc+conv+gconv"),
)


def ella_network(
    paths: str,
    in_channels: int,
    classes: int,
    alpha: int = 10,
    size: int = 32,
    prior: Prior = "weights",
) -> nn.Sequential:
    """Return the ELLA network: blocks `Relaxed`, `ReLU`, then `Linear`, `ReLU`, `Linear`.

    Sparse paths have the numbers of anchors implied by the parameter counts of ELLA Table 2: half
    of the pixels (S-FC), 4 of 9 filter entries (S-CONV alone), 7 of 9 (S-CONV beside S-FC).

    Args:
        paths: one of `PATHS`.
        in_channels: channels of the images.
        classes: number of outputs.
        alpha: width multiplier.
        size: side of the images, 32 or 16.
        prior: "weights" fixes the lengthscales of sparse paths, "omega" gives them a prior too.

    Raises:
        ValueError: paths, size or prior is not one of these values.
    """
    if paths not in PATHS:
        raise ValueError(f"paths must be one of {PATHS}, got {paths!r}.")
    if size not in _CHANNELS:
        raise ValueError(f"size must be 32 or 16, got {size}.")
    if prior not in ("weights", "omega") or (prior == "omega" and "s-" not in paths):
        raise ValueError(f"prior must be 'weights', or 'omega' for sparse paths, got {prior!r}.")
    path_makers, hidden, precision = _path_makers(paths, prior), _HIDDEN[size], FREE_PRECISION[size]
    elements = 4 if "gconv" in paths else 1
    channels = [in_channels, *(elements * alpha * width for width in _CHANNELS[size])]
    blocks: list[nn.Module] = []
    for c, d, stride in zip(channels[:-1], channels[1:], _STRIDES[size], strict=True):
        layer = Relaxed([make(c, d, (size, size), stride) for make in path_makers])
        if len(path_makers) > 1:
            layer.scale_free_paths(precision)
        path_makers = [_group_conv if make is _lifting_conv else make for make in path_makers]
        blocks += [layer, nn.ReLU()]
        size //= stride
    if elements > 1:
        blocks.append(GroupPool(elements))
    dense = (
        nn.Linear(channels[-1] // elements, alpha * hidden),
        nn.Linear(alpha * hidden, classes),
    )
    for linear in dense:
        nn.init.zeros_(linear.bias)
    return nn.Sequential(*blocks, nn.Flatten(), dense[0], nn.ReLU(), dense[1])


_lifting_conv = partial(GConv, group="p4", kind="lift")
_group_conv = partial(GConv, group="p4")


def _path_makers(paths: str, prior: Prior) -> list[Callable[..., Path]]:
    """Return path classes with their options, the equivariant one first."""
    role = "weight" if prior == "omega" else "fixed"
    anchors = 7 if paths == "s-fc+s-conv" else 4
    makers: dict[str, Callable[..., Path]] = {
        "gconv": _lifting_conv,
        "conv": Conv,
        "s-conv": partial(SConv, anchors=anchors, learn_omega=role),
        "fc": FC,
        "f-fc": FFC,
        "s-fc": partial(SFC, anchors=0.5, learn_omega=role),
    }
    return [makers[name] for name in makers if name in paths.split("+")]
