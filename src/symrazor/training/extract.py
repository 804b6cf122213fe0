"""What a page shows of a trained network: calibration, filters, anchors, costs."""

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from symrazor.curvature.tape import Input, call
from symrazor.layers import Basis, Conv, SConv
from symrazor.symmetry.collapse import batch_length

AnyConv = nn.Conv1d | nn.Conv2d | nn.Conv3d


def calibration_bins(
    probabilities: Float[Tensor, "n k"], labels: Int[Tensor, " n"], bins: int = 10
) -> dict[str, list[float]]:
    """How often a classifier is right where it says it is, in bins of equal width.

    Args:
        probabilities: of each class.
        labels: the true ones.
        bins: of the confidence, the probability of the predicted class; empty ones are left out.

    Returns:
        Mean confidence, accuracy and count of each bin. The gaps, weighted by the counts, are
        `calibration_error` with as many bins.
    """
    confidence, predicted = probabilities.detach().double().max(1)
    correct = (predicted == labels.to(predicted.device)).double()
    index = (confidence * bins).long().clamp(max=bins - 1)
    sums = [
        torch.zeros(bins, dtype=torch.float64, device=confidence.device).index_add_(0, index, v)
        for v in (confidence, correct, torch.ones_like(correct))
    ]
    total = sums[2]
    some = total > 0
    return {
        "confidence": (sums[0] / total)[some].tolist(),
        "accuracy": (sums[1] / total)[some].tolist(),
        "count": [int(value) for value in total[some].tolist()],
    }


@torch.no_grad()
def filters_of(model: nn.Module, most: int = 48) -> dict[str, Float[Tensor, "_ _ _"]]:
    """Filters [m, h, w] of every convolution with more than one position, by the layer's name.

    Of `Conv` and `SConv` paths and of torch's own convolutions; (output, input) pairs in order, at
    most so many of a layer, one line high in one dimension and the middle slice in three.
    """
    found: dict[str, Tensor] = {}
    inside: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{path}.") for path in inside):
            continue
        if isinstance(module, (Conv, SConv)):
            dense = module.dense()
            weight = dense.conv.weight if isinstance(dense, Conv) else None
            inside.append(name)
        else:
            weight = module.weight if isinstance(module, AnyConv) else None
        if isinstance(weight, Tensor) and math.prod(weight.shape[2:]) > 1:
            found[name or "network"] = _planes(weight.detach())[:most].cpu().clone()
    return found


def _planes(weight: Float[Tensor, "d c *size"]) -> Float[Tensor, "m h w"]:
    flat = weight.flatten(0, 1)
    match flat.dim():
        case 2:
            return flat.unsqueeze(1)
        case 4:
            return flat[:, flat.shape[1] // 2]
        case _:
            return flat


@torch.no_grad()
def anchors_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Places of the anchors of every `Basis` on a map, in pixels from its middle, and its shape."""
    return {
        name: {
            "shape": list(module.shape),
            "points": module.anchors.tolist(),
            "omega": abs(float(module.value("omega"))),
        }
        for name, module in model.named_modules()
        if isinstance(module, Basis) and len(module.shape) == 2
    }


@torch.no_grad()
def layer_costs(model: nn.Module, x: Input, names: list[str]) -> dict[str, dict[str, int]]:
    """Parameters and floating-point operations per datum of some modules, by name.

    Modules that are not there are left out.
    """
    with FlopCounterMode(display=False) as counter:
        call(model, x)
    flops = counter.get_flop_counts()
    modules = dict(model.named_modules())
    root = type(model).__name__
    found = {}
    for name in names:
        if name not in modules:
            continue
        of_layer = flops.get(f"{root}.{name}" if name else root, {})
        found[name] = {
            "parameters": sum(p.numel() for p in modules[name].parameters()),
            "flops": sum(of_layer.values()) // batch_length(x),
        }
    return found
