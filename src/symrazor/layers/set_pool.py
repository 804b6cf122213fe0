"""Invariant read-outs: one value per channel, whatever the order of the places."""

from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn

from symrazor.layers.trace import is_symbolic

SetReduction = Literal["sum", "mean", "max"]


class SetPool(nn.Module):
    """The sum, mean or maximum over the places of [n, c, *shape].

    Args:
        reduction: which.
    """

    def __init__(self, reduction: SetReduction = "mean") -> None:
        """Check the name."""
        super().__init__()
        if reduction not in ("sum", "mean", "max"):
            raise ValueError(f"expected reduction 'sum', 'mean' or 'max', got {reduction!r}")
        self.reduction = reduction

    def forward(self, x: Float[Tensor, "n c *size"]) -> Float[Tensor, "n c"]:
        """Reduce all places."""
        if not is_symbolic(x) and (x.dim() < 3 or not x.numel()):
            raise ValueError(f"expected maps [n, c, *size] with places, got {list(x.shape)}")
        flat = x.flatten(2)
        if self.reduction == "max":
            return flat.amax(2)
        return flat.sum(2) if self.reduction == "sum" else flat.mean(2)

    def extra_repr(self) -> str:
        """The reduction, for `print(model)`."""
        return repr(self.reduction)
