r"""Hold per-sample gradients of all weights, and compute their inner products.

With outputs $f$ and the columns $r_c$ of the root of the output Hessian, row (n, c) of the Jacobian
is $J_{nc} = r_c^\top \partial f_n / \partial \theta$, so that the Gauss-Newton matrix is
$H = J^\top J$. The rows of one tensor are held in the smaller of two forms:

| form | content | memory of a sample |
|---|---|---|
| `DenseRows` | $J$ itself | c p |
| `SharedRows` | inputs and cotangents: $J_{nc} = \sum_s g_{ncs} a_{ns}^\top$ | s (i + c o) |

`inner_products` computes $\langle J_{nc}, J_{md} \rangle$ from either form. For a weight that is
used once per sample (s = 1) it is $(a_n^\top a_m)(g_{nc}^\top g_{md})$, without forming J. For few
positions,

$$ \langle J_{nc}, J_{md} \rangle
   = \sum_s g_{ncs}^\top \Big[ \sum_t (a_{ns}^\top a_{mt})\, g_{mdt} \Big] . $$
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

Index = Int[Tensor, " r"]
Layout = Callable[[Tensor], Tensor]
"""Maps a weight in blocks [k, o, i] to the layout of its parameter."""

POSITION_PENALTY = 3.0
"""Cost of a multiplication in the sums over positions, relative to one large matrix product."""
MAX_LOOPED_BLOCKS = 256
"""Independent blocks k that inner products loop over; weights with more are formed as rows."""


@dataclass(frozen=True)
class DenseRows:
    """Rows of one tensor as a matrix, flattened in the layout of the parameter."""

    j: Float[Tensor, "n c p"]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that define the rows."""
        return (self.j,)

    @property
    def width(self) -> int:
        """Number p of weights."""
        return self.j.shape[2]

    def matrix(self, layout: Layout | None = None) -> Float[Tensor, "nc p"]:
        """Return the rows."""
        return self.j.flatten(0, 1)

    def squared_lengths(self) -> Float[Tensor, " nc"]:
        """Return the squared length of every row in float64."""
        return self.matrix().double().square().sum(1)

    def select(self, samples: slice, columns: slice = slice(None)) -> "DenseRows":
        """Return the rows of some samples and columns of the root."""
        return DenseRows(self.j[samples, columns])

    def pick(self, samples: Index, columns: Index) -> "DenseRows":
        """Return single rows, each as a sample with one column."""
        return DenseRows(self.j[samples, columns].unsqueeze(1))


@dataclass(frozen=True)
class SharedRows:
    """Rows of one weight as inputs and cotangents of its layer, in the weight-sharing format."""

    a: Float[Tensor, "n k s i"]
    g: Float[Tensor, "n k c o s"]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that define the rows."""
        return self.a, self.g

    @property
    def width(self) -> int:
        """Number p of weights."""
        return self.a.shape[1] * self.g.shape[3] * self.a.shape[3]

    def matrix(self, layout: Layout | None = None) -> Float[Tensor, "nc p"]:
        """Form the rows, flattened in the layout of the parameter, or in blocks without one."""
        n, k, c, o, _ = self.g.shape
        blocks = (self.g.flatten(2, 3) @ self.a).reshape(n, k, c, o, -1).transpose(1, 2)
        flat = blocks.flatten(0, 1)
        return (flat if layout is None else torch.vmap(layout)(flat)).flatten(1)

    def select(self, samples: slice, columns: slice = slice(None)) -> "SharedRows":
        """Return the rows of some samples and columns of the root."""
        return SharedRows(self.a[samples], self.g[samples, :, columns])

    def squared_lengths(self) -> Float[Tensor, " nc"]:
        r"""Return $\sum_{s,t} (a_s^\top a_t) (g_s^\top g_t)$, or the lengths of the formed rows."""
        _, _, c, o, s = self.g.shape
        i = self.a.shape[3]
        if s * (i + c * o) > c * o * i:
            return self.matrix().double().square().sum(1)
        a, g = self.a.double(), self.g.double()
        return torch.einsum("nkst,nkcst->nc", a @ a.mT, g.mT @ g).flatten()

    def double(self) -> "SharedRows":
        """Return the rows in float64."""
        return SharedRows(self.a.double(), self.g.double())

    def pick(self, samples: Index, columns: Index) -> "SharedRows":
        """Return single rows, each as a sample with one column."""
        return SharedRows(self.a[samples], self.g[samples, :, columns].unsqueeze(2))


Rows = DenseRows | SharedRows


@dataclass(frozen=True)
class BatchRows:
    """Rows of all tensors for the same samples and columns of the root.

    Args:
        n: number of samples.
        c: number of columns.
        tensors: rows by tensor; a tensor that does not act on the outputs is missing.
    """

    n: int
    c: int
    tensors: Mapping[str, Rows]

    @property
    def size(self) -> int:
        """Number of rows."""
        return self.n * self.c

    def select(self, samples: slice, columns: slice = slice(None)) -> "BatchRows":
        """Return the rows of some samples and columns."""
        n = len(range(*samples.indices(self.n)))
        c = len(range(*columns.indices(self.c)))
        return BatchRows(n, c, {k: v.select(samples, columns) for k, v in self.tensors.items()})

    def pick(self, rows: Index) -> "BatchRows":
        """Return single rows, each as a sample with one column."""
        samples, columns = rows // self.c, rows % self.c
        picked = {name: part.pick(samples, columns) for name, part in self.tensors.items()}
        return BatchRows(len(rows), 1, picked)

    def pieces(self, samples: int) -> Iterator["BatchRows"]:
        """Split into parts of at most this many samples."""
        for start in range(0, self.n, samples):
            yield self.select(slice(start, start + samples))


class JacobianRows:
    """Rows of several batches; adding two appends the batches.

    Args:
        batches: the rows of each batch.
        first_local: position of the first batch that this process has computed.
    """

    def __init__(self, batches: Sequence[BatchRows], first_local: int = 0) -> None:
        self.batches, self.first_local = tuple(batches), first_local

    def __add__(self, other: "JacobianRows") -> "JacobianRows":
        return JacobianRows(self.batches + other.batches)

    @property
    def n(self) -> int:
        """Number of samples."""
        return sum(batch.n for batch in self.batches)

    @property
    def size(self) -> int:
        """Number of rows."""
        return sum(batch.size for batch in self.batches)

    def pick(self, rows: Index) -> Iterator[tuple[BatchRows, Index]]:
        """Yield single rows and their places in `rows`; together where their shapes allow it."""
        start = 0
        merged: dict[tuple[object, ...], list[tuple[BatchRows, Index]]] = {}
        for batch in self.batches:
            places = ((rows >= start) & (rows < start + batch.size)).nonzero().squeeze(1)
            if len(places):
                picked = batch.pick(rows[places] - start)
                form = tuple(
                    (k, *(t.shape[1:] for t in v.tensors)) for k, v in picked.tensors.items()
                )
                merged.setdefault(form, []).append((picked, places))
            start += batch.size
        for parts in merged.values():
            yield _concatenate([part for part, _ in parts]), torch.cat([p for _, p in parts])

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, batch by batch."""
        return [t for batch in self.batches for t in batch_tensors(batch)]

    def replace(self, tensors: Sequence[Tensor]) -> "JacobianRows":
        """Return the same rows with other tensors, in the order of `tensors`."""
        source = iter(tensors)
        batches = []
        for batch in self.batches:
            rows = {
                name: type(part)(*(next(source) for _ in part.tensors))
                for name, part in batch.tensors.items()
            }
            batches.append(BatchRows(batch.n, batch.c, rows))
        return JacobianRows(batches, self.first_local)


def _concatenate(parts: Sequence[BatchRows]) -> BatchRows:
    """Concatenate rows of the same form."""
    tensors: dict[str, Rows] = {}
    for name, first in parts[0].tensors.items():
        columns = zip(*(part.tensors[name].tensors for part in parts), strict=True)
        joined = [torch.cat(column) for column in columns]
        tensors[name] = DenseRows(*joined) if isinstance(first, DenseRows) else SharedRows(*joined)
    return BatchRows(sum(part.n for part in parts), parts[0].c, tensors)


def batch_tensors(batch: BatchRows) -> list[Tensor]:
    """Return all tensors of a batch."""
    return [t for rows in batch.tensors.values() for t in rows.tensors]


def inner_products(left: Rows, right: Rows, layout: Layout | None = None) -> Float[Tensor, "nc md"]:
    r"""Return $\langle J_{nc}, J_{md} \rangle$ for all rows of both, in float64."""
    if isinstance(left, SharedRows) and isinstance(right, SharedRows):
        if pair_cost(left, right)[1]:
            return _by_positions(left.double(), right.double())
        layout = None  # both in blocks
    return left.matrix(layout).double() @ right.matrix(layout).double().T


def pair_cost(left: Rows, right: Rows) -> tuple[float, bool]:
    """Return multiplications per pair of samples, and whether positions are summed pair by pair."""
    if isinstance(left, DenseRows) or isinstance(right, DenseRows):
        c, d = (
            rows.j.shape[1] if isinstance(rows, DenseRows) else rows.g.shape[2]
            for rows in (left, right)
        )
        return float(c * d * left.width), False
    _, k, s, i = left.a.shape
    t = right.a.shape[2]
    (c, o), d = left.g.shape[2:4], right.g.shape[2]
    formed = float(c * d * k * o * i)
    if s == t == 1:
        summed = float(k * (i + c * d * (o + POSITION_PENALTY)))
    else:
        summed = k * (s * t * i + POSITION_PENALTY * d * s * o * (t + c))
    return (summed, True) if summed < formed and k <= MAX_LOOPED_BLOCKS else (formed, False)


def _by_positions(left: SharedRows, right: SharedRows) -> Float[Tensor, "nc md"]:
    """Sum over pairs of positions, block by block."""
    n, k, c, o, s = left.g.shape
    m, _, d, _, t = right.g.shape
    total: Tensor | None = None
    for block in range(k):
        a, g = left.a[:, block], left.g[:, block]
        b, h = right.a[:, block], right.g[:, block]
        A = (a.reshape(n * s, -1) @ b.reshape(m * t, -1).T).reshape(n, s, m, t)
        if s == t == 1:
            G = g.reshape(n * c, o) @ h.reshape(m * d, o).T
            part = G.reshape(n, c, m, d) * A.reshape(n, 1, m, 1)
        else:
            weighted = A.permute(2, 0, 1, 3).reshape(m, n * s, t)
            weighted = weighted @ h.permute(0, 3, 2, 1).reshape(m, t, o * d)
            columns = g.transpose(2, 3).reshape(1, n, c, s * o)
            part = (columns @ weighted.reshape(m, n, s * o, d)).permute(1, 2, 0, 3)
        total = part if total is None else total + part
    assert total is not None
    return total.reshape(n * c, m * d)
