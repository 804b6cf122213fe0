"""Invariant outputs on the features of any network, whose inputs are transformed."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.core.eval_mode import evaluating
from symrazor.invariance.features import Averaged
from symrazor.invariance.invariant_weights import Average, InvariantWeights
from symrazor.invariance.lie_distributions import LieDistribution
from symrazor.invariance.resampling import act, resample


class NetworkFeatures(Averaged):
    """Features of a network under transformations of its input.

    Args:
        network: pictures [n, c, h, w] or vectors [n, d] -> features [n, width].
        example: a few inputs, to see what comes out.

    Raises:
        ValueError: outputs that are not vectors.
    """

    def __init__(self, network: nn.Module, example: Tensor) -> None:
        """Look at the features of an example; see the class."""
        super().__init__()
        if not example.is_floating_point():
            raise ValueError(f"expected inputs of real numbers, got {example.dtype}; do x.float()")
        with torch.no_grad(), evaluating(network):  # batch norms keep their averages
            found = network(example)
        if found.dim() != 2 or len(found) != len(example):
            raise ValueError(
                f"expected features [{len(example)}, width] from the network, got "
                f"{list(found.shape)}; do add nn.Flatten()"
            )
        if example.dim() not in (2, 4):
            raise ValueError(
                f"expected pictures [n, c, h, w] or vectors [n, d], got {list(example.shape)}"
            )
        self.network, self.width, self.dim = network, found.shape[1], example.dim()
        self.like = found

    def raw(self, x: Tensor, maps: Tensor) -> Float[Tensor, "n s width"]:
        """Each datum under each map through the network, as one large batch."""
        if x.dim() != self.dim:
            raise ValueError(f"expected inputs with {self.dim} dimensions, got {list(x.shape)}")
        if not x.is_floating_point():
            raise ValueError(f"expected inputs of real numbers, got {x.dtype}; do x.float()")
        moved = act(x, maps) if self.dim == 2 else resample(x, maps)
        found: Tensor = self.network(moved.flatten(0, 1))
        return found.reshape(*moved.shape[:2], self.width)


class InvariantHead(InvariantWeights):
    """`InvariantWeights` on a network of your own: features are averaged, outputs integrated out.

    The network's weights are point estimates. Any torch optimiser can raise `evidence` in
    everything at once.

    Args:
        network: inputs -> features, see `NetworkFeatures`.
        example: a few inputs.
        distribution: over transformations of the input.
        classes: number of classes.
        average: see `InvariantWeights`.
        scale: see `InvariantWeights`.
    """

    def __init__(
        self,
        network: nn.Module,
        example: Tensor,
        distribution: LieDistribution,
        classes: int,
        average: Average = "logits",
        scale: float = 10.0,
    ) -> None:
        """Wrap the network; see the class."""
        super().__init__(NetworkFeatures(network, example), distribution, classes, average, scale)
