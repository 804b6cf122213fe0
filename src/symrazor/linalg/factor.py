r"""Sum outer products, $A_k = \sum_r a_{rk} a_{rk}^\top$, in the smaller of two spaces.

With the rows $a_{rk}$ stacked as $R_k$, the matrix $A_k = R_k^\top R_k$ has one column per feature
and $R_k R_k^\top$ one column per row. Both have the same non-zero eigenvalues, and zeros do not
change a log-determinant. A `Factor` therefore keeps the rows while there are clearly fewer rows
than features (`ROWS_PER_FEATURE`) and switches to the matrix afterwards.

`Symmetric` stores the matrices as panels right of the diagonal, which halves the memory of large
factors: they are most of what an evidence estimate holds for maps of 32 x 32 pixels.
"""

import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.linalg.eigen_jobs import eigenvalues, eigenvectors

PANEL = 128
"""Rows of a panel of `Symmetric`."""
MIN_COLUMNS_UNFOLDED = 16
"""Rows with fewer columns are folded before they are multiplied."""
GPU_ROWS_PER_PRODUCT = 2**12
"""Rows that a GPU sums in one product; more rows are split and added in float64."""
ROWS_PER_FEATURE = 0.75
"""Rows per feature from which the matrix is formed: its float32 product is cheaper than the float64
product $R_k R_k^\\top$, and keeping that many rows would only halve the eigenvalue time."""
MAX_PENDING_ROWS = 200
"""Rows kept beside a matrix before they are multiplied: few products, little memory."""


class Symmetric:
    r"""Symmetric float64 matrices [k, i, i], stored as panels on and right of the diagonal.

    A panel holds rows [start, start + PANEL) and the columns from start on. The memory is
    $\tfrac12 (1 + \text{PANEL}/i)$ of the full square. Matrices with fewer than two panels, and
    matrices that require a gradient, are stored whole.

    Args:
        panels: [k, height, i - start] each; the first has all i columns.
        loan: an object that lives as long as the memory of the panels is in use; set by the owner
            of that memory.
    """

    def __init__(self, panels: Sequence[Tensor], loan: object | None = None) -> None:
        self.panels, self.loan = list(panels), loan

    @classmethod
    def of(cls, matrix: Float[Tensor, "k i i"]) -> "Symmetric":
        """Store matrices that are symmetric up to rounding; small ones are not copied."""
        matrix = matrix.double()
        starts = panel_starts(matrix.shape[-1])
        if len(starts) == 1 or matrix.requires_grad:
            return cls([matrix])
        return cls([matrix[:, s : s + PANEL, s:].clone() for s in starts])

    @classmethod
    def zeros(cls, k: int, i: int, device: torch.device) -> "Symmetric":
        """Return k zero matrices of i columns."""
        starts = panel_starts(i)
        height = PANEL if len(starts) > 1 else i
        sizes = [(k, min(height, i - s), i - s) for s in starts]
        return cls([torch.zeros(size, dtype=torch.float64, device=device) for size in sizes])

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape (k, i, i) of the matrices."""
        k, _, i = self.panels[0].shape
        return k, i, i

    @property
    def device(self) -> torch.device:
        """Device of the panels."""
        return self.panels[0].device

    @property
    def whole(self) -> bool:
        """Whether the matrices are stored whole, as one panel."""
        return len(self.panels) == 1

    @property
    def mutable(self) -> bool:
        """Whether sums can be taken in place."""
        return not any(p.requires_grad or not p.is_contiguous() for p in self.panels)

    @property
    def matrix(self) -> Float[Tensor, "k i i"]:
        """The full matrices; borrowed memory is copied."""
        if self.whole:
            return self.panels[0] if self.loan is None else self.panels[0].clone()
        total = self.panels[0].new_empty(self.shape)
        for s, panel in zip(panel_starts(self.shape[-1]), self.panels, strict=True):
            stop = s + panel.shape[1]
            total[:, s:stop, s:] = panel
            total[:, stop:, s:stop] = panel[..., panel.shape[1] :].mT
        return total

    def select(self, first: int, stop: int) -> "Symmetric":
        """Return matrices first, ..., stop - 1."""
        return Symmetric([panel[first:stop] for panel in self.panels], self.loan)

    def mean(self) -> "Symmetric":
        """Return the mean over k as one matrix."""
        return Symmetric([panel.mean(0, keepdim=True) for panel in self.panels])

    def __add__(self, other: "Symmetric") -> "Symmetric":
        if self.whole != other.whole:  # one of them requires a gradient
            return Symmetric([self.matrix + other.matrix])
        return Symmetric([a + b for a, b in zip(self.panels, other.panels, strict=True)])

    def add_(self, other: "Symmetric") -> "Symmetric":
        """Add in place."""
        for a, b in zip(self.panels, other.panels, strict=True):
            a.add_(b)
        return self

    def add_products_(self, rows: Float[Tensor, "r k i"]) -> "Symmetric":
        r"""Add $\sum_r a_{rk} a_{rk}^\top$ in place, panel by panel, in the rows' precision."""
        x = rows.transpose(0, 1)
        for s, total in zip(panel_starts(self.shape[-1]), self.panels, strict=True):
            total.add_(x[..., s : s + total.shape[1]].mT @ x[..., s:])
        return self


def panel_starts(i: int) -> list[int]:
    """Return the first row of each panel of a matrix with i columns; [0] if it is stored whole."""
    return list(range(0, i, PANEL)) if i >= 2 * PANEL else [0]


class Factor:
    r"""The sums $A_k = \sum_r a_{rk} a_{rk}^\top$, kept as rows while these are the smaller form.

    Factors are values: adding two makes a third. Rows that arrive after the switch to a matrix
    wait until there are enough of them for one large product.

    Args:
        parts: rows [r, k, i] that are not multiplied yet.
        total: sum of the outer products of all other rows, or None.
    """

    def __init__(self, parts: Sequence[Tensor], total: Symmetric | None = None) -> None:
        self.parts, self.total = tuple(parts), total
        if self._has_enough_rows():
            self.parts, self.total = (), self.outer_products

    def _has_enough_rows(self) -> bool:
        pending, rows_needed = sum(map(len, self.parts)), ROWS_PER_FEATURE * self.features
        threshold = rows_needed if self.total is None else min(MAX_PENDING_ROWS, rows_needed)
        return pending > 0 and pending >= threshold

    @classmethod
    def of_rows(cls, rows: Float[Tensor, "*r k i"]) -> "Factor":
        """Sum the outer products of rows over all leading dimensions."""
        return cls([rows.reshape(math.prod(rows.shape[:-2]), *rows.shape[-2:])])

    @classmethod
    def of_matrix(cls, matrix: Float[Tensor, "k i i"]) -> "Factor":
        """Wrap sums that are already known as matrices."""
        return cls([], Symmetric.of(matrix))

    def __add__(self, other: "Factor") -> "Factor":
        total = other.total if self.total is None else self.total
        if self.total is not None and other.total is not None:
            total = self.total + other.total
        return Factor(self.parts + other.parts, total)

    def absorb(self, other: "Factor") -> "Factor":
        """Return `self + other`, bit for bit, reusing the memory of this factor's matrix.

        For running sums: neither operand may be used afterwards.
        """
        total, rows = self.total, self.parts + other.parts
        panels = [] if other.total is None else other.total.panels
        if total is None or not total.mutable or any(t.requires_grad for t in (*rows, *panels)):
            return self + other
        if other.total is not None:
            total.add_(other.total)
        result = object.__new__(Factor)  # __init__ would multiply the rows out of place
        result.parts, result.total = rows, total
        if result._has_enough_rows():
            result.parts = ()
            stacked = _concatenate(rows)
            if total.whole:
                total.add_(_outer_products(stacked))
            else:
                total.add_products_(stacked)
        return result

    def multiplied(self) -> "Factor":
        """Return the same factor with the rows that wait beside a matrix multiplied."""
        return self if self.total is None or not self.parts else Factor([], self.outer_products)

    def prepared_for(self, n_batches: float) -> "Factor":
        """Switch to matrix form now if `n_batches` such batches would force it anyway."""
        becomes_matrix = self.size * n_batches >= ROWS_PER_FEATURE * self.features
        return Factor([], self.outer_products) if self.is_rows and becomes_matrix else self

    def averaged(self) -> "Factor":
        """Return the mean over the blocks k as one block."""
        k = self.blocks
        rows = [part.reshape(-1, 1, self.features) / math.sqrt(k) for part in self.parts]
        return Factor(rows, None if self.total is None else self.total.mean())

    @property
    def rows(self) -> Float[Tensor, "r k i"]:
        """All rows that are kept."""
        return _concatenate(self.parts)

    @property
    def features(self) -> int:
        """Number i of columns."""
        return self.parts[0].shape[-1] if self.total is None else self.total.shape[-1]

    @property
    def blocks(self) -> int:
        """Number k of blocks."""
        return self.parts[0].shape[-2] if self.total is None else self.total.shape[0]

    @property
    def device(self) -> torch.device:
        """Device of rows and matrix."""
        return self.parts[0].device if self.total is None else self.total.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the rows; matrices are always float64."""
        return self.parts[0].dtype if self.total is None else torch.float64

    @property
    def is_rows(self) -> bool:
        """Whether only rows are kept, fewer than there are features."""
        return self.total is None

    @property
    def size(self) -> int:
        """Columns of the smaller of the two matrices."""
        return sum(map(len, self.parts)) if self.is_rows else self.features

    def select(self, first: int, stop: int) -> "Factor":
        """Return blocks first, ..., stop - 1."""
        total = None if self.total is None else self.total.select(first, stop)
        return Factor([part[:, first:stop] for part in self.parts], total)

    @property
    def outer_products(self) -> Symmetric:
        """The sums of all outer products."""
        if not self.parts:
            assert self.total is not None
            return self.total
        product = _outer_products(self.rows)
        return product if self.total is None else self.total + product

    @property
    def matrix(self) -> Float[Tensor, "k i i"]:
        """The sums of all outer products as full float64 matrices."""
        return self.outer_products.matrix

    def _double_rows(self) -> Float[Tensor, "k r i"]:
        return self.rows.transpose(0, 1).double()

    def smaller_matrix(self) -> Float[Tensor, "k d d"]:
        """Return the smaller of the two matrices in float64, with d = `size` columns."""
        return _products(self._double_rows().mT) if self.is_rows else self.matrix

    def spectrum(self, name: str, resolution: float) -> Float[Tensor, "k d"]:
        """Return d = `size` eigenvalues without rounding noise (`eigenvalues`); others are zero."""
        return eigenvalues(self.smaller_matrix(), name, resolution)

    def eigenvectors(
        self, name: str, resolution: float
    ) -> tuple[Float[Tensor, "k d"], Float[Tensor, "k i d"]]:
        """Return the eigenvalues and orthonormal eigenvectors; their complement is a null space."""
        if not self.is_rows:
            return eigenvectors(self.matrix, name, resolution)
        basis = self._basis()
        values, vectors = eigenvectors(self._project(basis, self), name, resolution)
        return values, basis @ vectors

    def projection(self) -> Callable[["Factor"], Float[Tensor, "k d d"]]:
        r"""Return the map $B \mapsto Q^\top B Q$, Q an orthonormal basis of this factor's rows.

        Q is the identity if this factor is a matrix. The map is linear, so that it commutes with
        the sum over batches, and it keeps all non-zero eigenvalues of this factor.
        """
        if not self.is_rows:
            return lambda other: other.matrix
        basis = self._basis().detach()
        return lambda other: self._project(basis, other)

    def _basis(self) -> Float[Tensor, "k i d"]:
        return cast(Tensor, torch.linalg.qr(self._double_rows().mT).Q)

    @staticmethod
    def _project(basis: Float[Tensor, "k i d"], other: "Factor") -> Float[Tensor, "k d d"]:
        if other.is_rows:
            return _products(other._double_rows() @ basis)
        return basis.mT @ other.matrix @ basis


def gram(rows: Float[Tensor, "*r k i"]) -> Float[Tensor, "k i i"]:
    r"""Return $\sum_r a_{rk} a_{rk}^\top$ for each block k, summed over all leading dimensions.

    A matrix product of narrow rows is slow. Several of them are therefore placed side by side, and
    the diagonal blocks of the wider product are added. On a GPU a sum over many rows would keep few
    units busy: it is split, and the parts are added in float64.
    """
    k, i = rows.shape[-2:]
    flat = rows.reshape(math.prod(rows.shape[:-2]), k, i)
    if flat.is_cuda and k == 1 and len(flat) >= 2 * GPU_ROWS_PER_PRODUCT:
        return _gram_in_parts(flat.squeeze(1))
    fold = -(-MIN_COLUMNS_UNFOLDED // i) if i else 1  # rows without features cannot be folded
    if k > 1 or fold == 1 or len(flat) < 64 * fold:
        return _products(flat.transpose(0, 1))
    flat = flat.squeeze(1)
    folded_rows = len(flat) - len(flat) % fold
    folded, tail = flat[:folded_rows].reshape(-1, fold * i), flat[folded_rows:]
    wide = (folded.T @ folded).view(fold, i, fold, i)
    return (torch.einsum("fifj->ij", wide) + tail.T @ tail).unsqueeze(0)


def _gram_in_parts(rows: Float[Tensor, "r i"]) -> Float[Tensor, "1 i i"]:
    full_rows = len(rows) - len(rows) % GPU_ROWS_PER_PRODUCT
    parts = rows[:full_rows].view(-1, GPU_ROWS_PER_PRODUCT, rows.shape[1])
    total = (parts.mT @ parts).sum(0, keepdim=True, dtype=torch.float64)
    return total if full_rows == len(rows) else total + rows[full_rows:].T @ rows[full_rows:]


def _products(x: Float[Tensor, "k r i"]) -> Float[Tensor, "k i i"]:
    """Return x' x for each block; a CPU computes only the panels on and right of the diagonal."""
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


def _outer_products(rows: Float[Tensor, "r k i"]) -> Symmetric:
    k, i = rows.shape[1:]
    if rows.requires_grad or i < 2 * PANEL:
        return Symmetric.of(gram(rows))
    return Symmetric.zeros(k, i, rows.device).add_products_(rows)


def _concatenate(parts: Sequence[Tensor]) -> Float[Tensor, "r k i"]:
    """Concatenate rows and keep whichever of r and i is contiguous in memory."""
    if len(parts) == 1:
        return parts[0]
    if all(part.stride(0) == 1 for part in parts):
        return torch.cat([part.permute(1, 2, 0) for part in parts], 2).permute(2, 0, 1)
    return torch.cat(list(parts))
