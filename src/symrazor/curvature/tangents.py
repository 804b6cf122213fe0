r"""Curvature of parameters that shape a weight: lengthscales, anchor positions.

Such a parameter p is not the W of a weight-sharing format, but there are few of them in a layer, so
that their exact block is cheap. The gradient of one datum is the product of its output cotangent
with the derivative of its output, which forward-mode differentiation of the layer gives:

$$ J_n[p] = \sum_y g_n[y]\, \frac{\partial y_n}{\partial p} . $$
"""

from operator import attrgetter

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import functional_call, jacfwd

from symrazor.curvature.coverage import Layer


def tangents(layer: Layer, x: Tensor) -> dict[str, Float[Tensor, "n y _"]]:
    """Derivative of the layer's output in each of its shaping parameters, by full name."""
    module = layer.module
    found: dict[str, Tensor] = {}
    for local, name in layer.shaping.items():
        value: Tensor = attrgetter(local)(module)  # no parameter where weights are functional

        def output(p: Tensor, local: str = local, value: Tensor = value) -> Tensor:
            y: Tensor = functional_call(module, {local: p.reshape(value.shape)}, (x,))
            return y.flatten(1)

        found[name] = jacfwd(output)(value.reshape(-1))
    return found


def shaped(tangent: Float[Tensor, "n y p"], g: Tensor) -> Float[Tensor, "n p"]:
    """Per-datum gradients of a shaping parameter from the cotangent of the layer's output."""
    return torch.einsum("ny,nyp->np", g.flatten(1), tangent)
