r"""Sums of symmetric matrices in float64, of which only panels right of the diagonal are kept.

With panels of `PANEL` rows a matrix of i columns takes $\tfrac12 (1 + \text{PANEL}/i)$ of the
memory of its square: the factors of a network with maps of 32 x 32 pixels are most of what an
evidence estimate holds. Matrices of less than two panels, and those with a gradient, are kept
whole.
"""

import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.linalg.spectra import eigenvalues, eigenvectors

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


NARROW = 16
TALL = 2**12
"""Rows that a GPU sums up in one go."""
ENOUGH = 0.75
"""Rows per feature from which the matrix is formed: its float32 product is cheaper than $S_k$ in
float64, and that many rows would save only half of the time of the eigenvalues."""
WAIT = 200
"""Rows that wait, beside a matrix, until they are multiplied: few products, and little memory."""


def gram(rows: Float[Tensor, "*r k i"]) -> Float[Tensor, "k i i"]:
    r"""$\sum_r a_{rk} a_{rk}^\top$ for each block k; the leading dimensions are summed over.

    Narrow rows, for which a plain matrix product is slow, are folded so that several stand side by
    side, and the diagonal blocks of the wider product are added up. On a GPU, where the sum over
    many rows would keep few of its units busy, it is split instead, and the parts are added in
    float64.
    """
    k, i = rows.shape[-2:]
    flat = rows.reshape(math.prod(rows.shape[:-2]), k, i)
    if flat.is_cuda and k == 1 and len(flat) >= 2 * TALL:
        return _in_parts(flat.squeeze(1))
    fold = -(-NARROW // i) if i else 1  # rows without features cannot stand side by side
    if k > 1 or fold == 1 or len(flat) < 64 * fold:
        return _squared(flat.transpose(0, 1))
    flat = flat.squeeze(1)
    whole = len(flat) - len(flat) % fold
    folded, tail = flat[:whole].reshape(-1, fold * i), flat[whole:]
    wide = (folded.T @ folded).view(fold, i, fold, i)
    return (torch.einsum("fifj->ij", wide) + tail.T @ tail).unsqueeze(0)


def _in_parts(rows: Float[Tensor, "r i"]) -> Float[Tensor, "1 i i"]:
    """Sums over `TALL` rows at a time, all in one batch of products."""
    whole = len(rows) - len(rows) % TALL
    parts = rows[:whole].view(-1, TALL, rows.shape[1])
    total = (parts.mT @ parts).sum(0, keepdim=True, dtype=torch.float64)
    return total if whole == len(rows) else total + rows[whole:].T @ rows[whole:]


def _squared(x: Float[Tensor, "k r i"]) -> Float[Tensor, "k i i"]:
    """Of x' x, block by block; on a CPU only panels on and right of the diagonal are computed."""
    i = x.shape[2]
    if i <= PANEL or x.is_cuda:
        return x.mT @ x
    total = x.new_empty(len(x), i, i)
    for start in range(0, i, PANEL):
        stop = start + PANEL
        panel = x[..., start:stop].mT @ x[..., start:]
        total[:, start:stop, start:] = panel
        total[:, stop:, start:stop] = panel[..., PANEL:].mT
    return total


class Factor:
    r"""$A_k = \sum_r a_{rk} a_{rk}^\top$: rows while there are fewer of them than features.

    A value: adding two factors makes a third. Once there is a matrix, new rows still wait until
    there are enough of them, so that few and large products are added to it.

    Args:
        parts: rows [r, k, i] that have not been multiplied yet.
        total: sum of outer products [k, i, i] of all other rows, or None where there are none.
    """

    def __init__(self, parts: Sequence[Tensor], total: Symmetric | None = None) -> None:
        """Keep the rows, or multiply them; see the class."""
        self.parts, self.total = tuple(parts), total
        if self._enough():
            self.parts, self.total = (), self.squared

    def _enough(self) -> bool:
        waiting = sum(map(len, self.parts))
        enough = ENOUGH * self.features
        return waiting > 0 and waiting >= (enough if self.total is None else min(WAIT, enough))

    @classmethod
    def of_rows(cls, rows: Float[Tensor, "*r k i"]) -> "Factor":
        """The factor of some rows; the leading dimensions are summed over."""
        return cls([rows.reshape(math.prod(rows.shape[:-2]), *rows.shape[-2:])])

    @classmethod
    def of_matrix(cls, matrix: Float[Tensor, "k i i"]) -> "Factor":
        """A factor that is known as a matrix."""
        return cls([], Symmetric.of(matrix))

    def __add__(self, other: "Factor") -> "Factor":
        """The factor of all rows of both."""
        total = other.total if self.total is None else self.total
        if self.total is not None and other.total is not None:
            total = self.total + other.total
        return Factor(self.parts + other.parts, total)

    def absorb(self, other: "Factor") -> "Factor":
        """`self + other`, bit for bit, in the memory of this factor's matrix where it has one.

        For running sums: neither of the two is to be used any more.
        """
        total, rows = self.total, self.parts + other.parts
        others = [] if other.total is None else other.total.panels
        if total is None or not total.mutable or any(t.requires_grad for t in (*rows, *others)):
            return self + other
        if other.total is not None:
            total.add_(other.total)
        waiting = object.__new__(Factor)
        waiting.parts, waiting.total = rows, total
        if waiting._enough():
            waiting.parts = ()
            joined = _joined(rows)
            if total.whole:
                total.add_(_product(joined))
            else:
                total.add_products_(joined)
        return waiting

    def settled(self) -> "Factor":
        """The same factor without rows that wait beside a matrix."""
        return self if self.total is None or not self.parts else Factor([], self.squared)

    def for_more(self, times: float) -> "Factor":
        """The same factor for a sum of so many such: a matrix now, if that will be one at last."""
        will_be = self.size * times >= ENOUGH * self.features
        return Factor([], self.squared) if self.small and will_be else self

    def averaged(self) -> "Factor":
        """The mean over blocks, as one block."""
        k = self.blocks
        rows = [part.reshape(-1, 1, self.features) / math.sqrt(k) for part in self.parts]
        return Factor(rows, None if self.total is None else self.total.mean())

    @property
    def rows(self) -> Float[Tensor, "r k i"]:
        """All rows that are kept."""
        return _joined(self.parts)

    @property
    def features(self) -> int:
        """Columns i of every block."""
        return self.parts[0].shape[-1] if self.total is None else self.total.shape[-1]

    @property
    def blocks(self) -> int:
        """Number k of blocks."""
        return self.parts[0].shape[-2] if self.total is None else self.total.shape[0]

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.parts[0].device if self.total is None else self.total.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows; a matrix is always float64."""
        return self.parts[0].dtype if self.total is None else torch.float64

    @property
    def small(self) -> bool:
        """Whether only rows are kept, fewer than there are features."""
        return self.total is None

    @property
    def size(self) -> int:
        """Columns of the smaller of the two matrices."""
        return sum(map(len, self.parts)) if self.small else self.features

    def some(self, first: int, stop: int) -> "Factor":
        """Some of the blocks."""
        total = None if self.total is None else self.total.some(first, stop)
        return Factor([part[:, first:stop] for part in self.parts], total)

    @property
    def squared(self) -> Symmetric:
        """The sum of all outer products."""
        if not self.parts:
            assert self.total is not None
            return self.total
        product = _product(self.rows)
        return product if self.total is None else self.total + product

    @property
    def matrix(self) -> Float[Tensor, "k i i"]:
        """The same, written out in float64."""
        return self.squared.matrix

    def _double_rows(self) -> Float[Tensor, "k r i"]:
        return self.rows.transpose(0, 1).double()

    def smaller(self) -> Float[Tensor, "k d d"]:
        """The smaller of the two matrices, in float64, d = `size`."""
        return _squared(self._double_rows().mT) if self.small else self.matrix

    def spectrum(self, name: str, resolution: float) -> Float[Tensor, "k d"]:
        """Eigenvalues without rounding noise, d = `size` of them: none of the others is above zero.

        Args:
            name: what to call the factor in an error.
            resolution: machine epsilon of the arithmetic that made the rows.
        """
        return eigenvalues(self.smaller(), name, resolution)

    def eigenvectors(
        self, name: str, resolution: float
    ) -> tuple[Float[Tensor, "k d"], Float[Tensor, "k i d"]]:
        """The same eigenvalues, and orthonormal eigenvectors; their complement is a null space."""
        if not self.small:
            return eigenvectors(self.matrix, name, resolution)
        basis = self._basis()
        values, vectors = eigenvectors(self._inside(basis, self), name, resolution)
        return values, basis @ vectors

    def projection(self) -> Callable[["Factor"], Float[Tensor, "k d d"]]:
        r"""The map $B \mapsto Q^\top B Q$ of factors, Q an orthonormal basis of this one's rows.

        Q is the identity where this factor is a matrix. Applied to the factor itself it keeps all
        eigenvalues but zeros, and it is linear: the sum over batches may be taken after it.
        """
        if not self.small:
            return lambda other: other.matrix
        basis = self._basis().detach()
        return lambda other: self._inside(basis, other)

    def _basis(self) -> Float[Tensor, "k i d"]:
        return cast(Tensor, torch.linalg.qr(self._double_rows().mT).Q)

    @staticmethod
    def _inside(basis: Float[Tensor, "k i d"], other: "Factor") -> Float[Tensor, "k d d"]:
        if other.small:
            return _squared(other._double_rows() @ basis)
        return basis.mT @ other.matrix @ basis


def _product(rows: Float[Tensor, "r k i"]) -> Symmetric:
    """Sums of outer products; large ones are made panel by panel."""
    k, i = rows.shape[1:]
    if rows.requires_grad or i < 2 * PANEL:
        return Symmetric.of(gram(rows))
    return Symmetric.zeros(k, i, rows.device).add_products_(rows)


def _joined(parts: Sequence[Tensor]) -> Float[Tensor, "r k i"]:
    """Rows joined along whichever of r and i is contiguous in memory."""
    if len(parts) == 1:
        return parts[0]
    if all(part.stride(0) == 1 for part in parts):
        return torch.cat([part.permute(1, 2, 0) for part in parts], 2).permute(2, 0, 1)
    return torch.cat(list(parts))
