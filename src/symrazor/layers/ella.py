"""The network of ELLA's tables (section 6.2): blocks of relaxed layers, then two dense ones.

| size | channels, in multiples of alpha | strides | head |
|---|---|---|---|
| 32 | 1, 2, 2, 4, 4, 8, 8, 16 | 1, 2, 1, 2, 1, 2, 2, 2 | 16 -> 64 -> classes |
| 16 | 1, 2, 2, 4, 8 | 1, 2, 2, 2, 2 | 8 -> 16 -> classes |

Both end in one pixel, so that a network of convolutions alone is invariant to translations. No
normalisation, no dropout. Paths are added up, where the reference takes their mean, and strides
keep for each image the component with the largest norm (`Conv`).

With GCONV (Table 3) there are four times the channels, one for each quarter turn; the first block
lifts the image to them, and after the last block the largest of the four is taken. The reference
turns the image, lets the same convolutions run on all four and calls that GCONV; ours connects the
four, with filters turned (`GConv`).
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

from torch import nn

from symrazor.layers import FC, FFC, SFC, Conv, GConv, GroupPool, Path, Relaxed, SConv

FREE_PRECISION = {32: 100.0, 16: 30.0}
"""Size -> free paths beside an equivariant one are drawn from a prior of this precision."""

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
    """Blocks `Relaxed`, `ReLU`; then `Flatten`, `Linear`, `ReLU`, `Linear`.

    Sparse paths have the anchors that the parameter counts of ELLA Table 2 say: half of the pixels
    (S-FC), 4 in a filter of 9 (S-CONV alone), 7 (S-CONV beside S-FC).

    Args:
        paths: one of `PATHS`.
        in_channels: of the images.
        classes: number of outputs.
        alpha: width.
        size: of the images, 32 or 16.
        prior: "weights" fixes the lengthscales of sparse paths, "omega" gives them a prior as well.

    Raises:
        ValueError: paths, size or prior of another kind.
    """
    if paths not in PATHS:
        raise ValueError(f"expected paths in {PATHS}, got {paths!r}")
    if size not in _CHANNELS:
        raise ValueError(f"expected images of 32 x 32 or 16 x 16, got size {size}")
    if prior not in ("weights", "omega") or (prior == "omega" and "s-" not in paths):
        raise ValueError(f"expected prior 'weights', or 'omega' for sparse paths, got {prior!r}")
    makers, hidden, start = _makers(paths, prior), alpha * _HIDDEN[size], FREE_PRECISION[size]
    elements = 4 if "gconv" in paths else 1
    channels = [in_channels, *(elements * alpha * width for width in _CHANNELS[size])]
    blocks: list[nn.Module] = []
    for c, d, stride in zip(channels[:-1], channels[1:], _STRIDES[size], strict=True):
        layer = Relaxed([make(c, d, (size, size), stride) for make in makers])
        if len(makers) > 1:
            layer.scale_free_paths(start)
        makers = [_on_elements if make is _lift else make for make in makers]
        blocks += [layer, nn.ReLU()]
        size //= stride
    if elements > 1:
        blocks.append(GroupPool(elements))
    dense = nn.Linear(channels[-1] // elements, hidden), nn.Linear(hidden, classes)
    for linear in dense:
        nn.init.zeros_(linear.bias)
    return nn.Sequential(*blocks, nn.Flatten(), dense[0], nn.ReLU(), dense[1])


_lift = partial(GConv, group="p4", kind="lift")
_on_elements = partial(GConv, group="p4")


def _makers(paths: str, prior: Prior) -> list[Callable[..., Path]]:
    """Path classes with their options, the equivariant one first."""
    role = "weight" if prior == "omega" else "fixed"
    anchors = 7 if paths == "s-fc+s-conv" else 4
    known: dict[str, Callable[..., Path]] = {
        "gconv": _lift,
        "conv": Conv,
        "s-conv": partial(SConv, anchors=anchors, learn_omega=role),
        "fc": FC,
        "f-fc": FFC,
        "s-fc": partial(SFC, anchors=0.5, learn_omega=role),
    }
    return [known[name] for name in known if name in paths.split("+")]
