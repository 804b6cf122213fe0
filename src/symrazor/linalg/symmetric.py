r"""Sums of symmetric matrices in float64, of which only panels right of the diagonal are kept.

With panels of `PANEL` rows a matrix of i columns takes $\tfrac12 (1 + \text{PANEL}/i)$ of the
memory of its square: the factors of a network with maps of 32 x 32 pixels are most of what an
evidence estimate holds. Matrices of less than two panels, and those with a gradient, are kept
whole.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

PANEL = 128
"""Rows of a panel."""


def starts(i: int) -> list[int]:
    """First row of each panel of a matrix with i columns; one panel is the whole matrix."""
    return list(range(0, i, PANEL)) if i >= 2 * PANEL else [0]


class Symmetric:
    """Matrices [k, i, i], panel by panel: rows [start, start + PANEL), columns from start on.

    Args:
        panels: float64, [k, height, i - start] each; the first has all i columns.
        loan: whoever lends the memory can tell by this object whether it is still in use.
    """

    def __init__(
        self, panels: Sequence[Float[Tensor, "k _ _"]], loan: object | None = None
    ) -> None:
        """Keep them."""
        self.panels, self.loan = list(panels), loan

    @classmethod
    def of(cls, matrix: Float[Tensor, "k i i"]) -> "Symmetric":
        """Matrices that are symmetric up to rounding; what is kept whole is kept itself."""
        matrix = matrix.double()
        first = starts(matrix.shape[-1])
        if len(first) == 1 or matrix.requires_grad:
            return cls([matrix])
        return cls([matrix[:, s : s + PANEL, s:].clone() for s in first])

    @classmethod
    def zeros(cls, k: int, i: int, device: torch.device) -> "Symmetric":
        """The empty sum."""
        height = PANEL if len(starts(i)) > 1 else i
        sizes = [(k, min(height, i - s), i - s) for s in starts(i)]
        return cls([torch.zeros(size, dtype=torch.float64, device=device) for size in sizes])

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the matrices."""
        k, _, i = self.panels[0].shape
        return k, i, i

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.panels[0].device

    @property
    def whole(self) -> bool:
        """Whether there is one panel, the matrices themselves."""
        return len(self.panels) == 1

    @property
    def mutable(self) -> bool:
        """Whether sums may be taken in place."""
        return not any(p.requires_grad or not p.is_contiguous() for p in self.panels)

    @property
    def matrix(self) -> Float[Tensor, "k i i"]:
        """The matrices, written out; lent ones in memory of their own."""
        if self.whole:
            return self.panels[0] if self.loan is None else self.panels[0].clone()
        total = self.panels[0].new_empty(self.shape)
        for s, panel in zip(starts(self.shape[-1]), self.panels, strict=True):
            stop = s + panel.shape[1]
            total[:, s:stop, s:] = panel
            total[:, stop:, s:stop] = panel[..., panel.shape[1] :].mT
        return total

    def some(self, first: int, stop: int) -> "Symmetric":
        """Some of the matrices."""
        return Symmetric([panel[first:stop] for panel in self.panels], self.loan)

    def mean(self) -> "Symmetric":
        """The mean over k, as one matrix."""
        return Symmetric([panel.mean(0, keepdim=True) for panel in self.panels])

    def __add__(self, other: "Symmetric") -> "Symmetric":
        """The sum, as a third."""
        if self.whole != other.whole:  # one of them has a gradient
            return Symmetric([self.matrix + other.matrix])
        return Symmetric([a + b for a, b in zip(self.panels, other.panels, strict=True)])

    def add_(self, other: "Symmetric") -> "Symmetric":
        """The sum, in this one's memory."""
        for a, b in zip(self.panels, other.panels, strict=True):
            a.add_(b)
        return self

    def add_products_(self, rows: Float[Tensor, "r k i"]) -> "Symmetric":
        r"""Add $\sum_r a_{rk} a_{rk}^\top$, a panel at a time, in the arithmetic of the rows."""
        x = rows.transpose(0, 1)
        for s, total in zip(starts(self.shape[-1]), self.panels, strict=True):
            total.add_(x[..., s : s + total.shape[1]].mT @ x[..., s:])
        return self
