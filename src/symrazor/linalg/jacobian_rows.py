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
   = \sum_{s,t} (a_{ns}^\top a_{mt}) (g_{ncs}^\top g_{mdt}) , $$

two matrix products for each pair of positions. For many, the rows are formed, some at a time.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

Index = Int[Tensor, " r"]
Layout = Callable[[Tensor], Tensor]
"""Maps a weight in blocks [k, o, i] to the layout of its parameter."""

PASS_PENALTY = 30
"""Cost of reading and writing a number, in multiplications of a large matrix product."""
MAX_LOOPED_PAIRS = 512
"""Pairs of positions, times blocks, that inner products loop over; rows of others are formed."""
MAX_FORMED_ENTRIES = 2**23
"""Entries of rows that a CPU forms at once, approximately."""
GPU_FORMED_ENTRIES = 2**28
"""Entries of rows that a GPU forms at once, approximately."""


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

    @property
    def samples(self) -> int:
        """Number n of samples."""
        return len(self.j)

    @property
    def columns(self) -> int:
        """Number c of rows of a sample."""
        return self.j.shape[1]

    def matrix(self, layout: Layout | None = None) -> Float[Tensor, "nc p"]:
        """Return the rows."""
        return self.j.flatten(0, 1)

    def squared_lengths(self, dtype: torch.dtype) -> Float[Tensor, " nc"]:
        """Return the squared length of every row in float64, from products of this precision."""
        return self.matrix().to(dtype).square().sum(1, dtype=torch.float64)

    def select(self, samples: slice | Index, columns: slice = slice(None)) -> "DenseRows":
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

    @property
    def samples(self) -> int:
        """Number n of samples."""
        return len(self.a)

    @property
    def columns(self) -> int:
        """Number c of rows of a sample."""
        return self.g.shape[2]

    def matrix(self, layout: Layout | None = None) -> Float[Tensor, "nc p"]:
        """Form the rows, flattened in the layout of the parameter, or in blocks without one."""
        n, k, c, o, _ = self.g.shape
        blocks = (self.g.flatten(2, 3) @ self.a).reshape(n, k, c, o, -1).transpose(1, 2)
        flat = blocks.flatten(0, 1)
        return (flat if layout is None else torch.vmap(layout)(flat)).flatten(1)

    def select(self, samples: slice | Index, columns: slice = slice(None)) -> "SharedRows":
        """Return the rows of some samples and columns of the root."""
        return SharedRows(self.a[samples], self.g[samples, :, columns])

    def squared_lengths(self, dtype: torch.dtype) -> Float[Tensor, " nc"]:
        r"""Return $\sum_{s,t} (a_s^\top a_t) (g_s^\top g_t)$, or the lengths of the formed rows."""
        _, _, c, o, s = self.g.shape
        i = self.a.shape[3]
        if s * (i + c * o) > c * o * i:
            return self.matrix().to(dtype).square().sum(1, dtype=torch.float64)
        a, g = self.a.to(dtype), self.g.to(dtype)
        products = (g.mT @ g) * (a @ a.mT).unsqueeze(2)
        return products.sum((1, 3, 4), dtype=torch.float64).flatten()

    def to(self, dtype: torch.dtype) -> "SharedRows":
        """Return the rows in another precision."""
        return SharedRows(self.a.to(dtype), self.g.to(dtype))

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
        labels: class of each sample, if the samples are grouped by class.
        stands_for: number of columns that each of the c columns stands for, if they were sampled.
    """

    n: int
    c: int
    tensors: Mapping[str, Rows]
    labels: tuple[int, ...] = ()
    stands_for: float = 1.0

    @property
    def size(self) -> int:
        """Number of rows."""
        return self.n * self.c

    def select(self, samples: slice | Index, columns: slice = slice(None)) -> "BatchRows":
        """Return the rows of some samples and columns."""
        numbers = range(self.n)[samples] if isinstance(samples, slice) else samples.tolist()
        c = len(range(*columns.indices(self.c)))
        tensors = {k: v.select(samples, columns) for k, v in self.tensors.items()}
        labels = tuple(self.labels[i] for i in numbers) if self.labels else ()
        return replace(self, n=len(numbers), c=c, tensors=tensors, labels=labels)

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
            batches.append(replace(batch, tensors=rows))
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


def inner_products(
    left: Sequence[Rows], right: Rows, layout: Layout | None, dtype: torch.dtype
) -> Float[Tensor, "nc md"]:
    r"""Return $\langle J_{nc}, J_{md} \rangle$ for all rows of `left` and of `right`.

    Args:
        left: parts whose rows follow each other.
        right: rows that are formed at most once.
        layout: layout of the parameter in which rows are formed.
        dtype: precision of the products.
    """
    formed: Tensor | None = None
    parts = []
    for rows in left:
        if sums_positions(rows, right):
            assert isinstance(rows, SharedRows) and isinstance(right, SharedRows)
            parts.append(_by_positions(rows.to(dtype), right.to(dtype)))
            continue
        if formed is None:
            formed = right.matrix(layout).to(dtype).T
        entries = GPU_FORMED_ENTRIES if formed.is_cuda else MAX_FORMED_ENTRIES
        samples = max(1, entries // (rows.columns * rows.width))
        for first in range(0, rows.samples, samples):
            part = rows.select(slice(first, first + samples))
            parts.append(part.matrix(layout).to(dtype) @ formed)
    return torch.cat(parts)


def sums_positions(left: Rows, right: Rows) -> bool:
    """Return whether summing over pairs of positions is cheaper than forming the rows."""
    if isinstance(left, DenseRows) or isinstance(right, DenseRows):
        return False
    _, k, s, i = left.a.shape
    t = right.a.shape[2]
    (c, o), d = left.g.shape[2:4], right.g.shape[2]
    summed = k * s * t * (i + c * d * (o + PASS_PENALTY))
    return summed < c * d * k * o * i and k * s * t <= MAX_LOOPED_PAIRS


def _by_positions(left: SharedRows, right: SharedRows) -> Float[Tensor, "nc md"]:
    """Sum over blocks and pairs of positions, two matrix products for each."""
    n, k, c, o, s = left.g.shape
    m, _, d, _, t = right.g.shape
    total = left.g.new_zeros(n, c, m, d)
    for block in range(k):
        a, b = left.a[:, block].unbind(1), right.a[:, block].unbind(1)
        g = [left.g[:, block, ..., at].reshape(n * c, o) for at in range(s)]
        h = [right.g[:, block, ..., at].reshape(m * d, o).T for at in range(t)]
        for here in range(s):
            for there in range(t):
                inputs = (a[here] @ b[there].T).reshape(n, 1, m, 1)
                total = total.addcmul((g[here] @ h[there]).reshape(n, c, m, d), inputs)
    return total.reshape(n * c, m * d)


def blocks_of_samples(batches: Iterable[BatchRows], block: int) -> Iterator[list[BatchRows]]:
    """Cut batches, in order, into blocks of this many samples; the last may be smaller."""
    current: list[BatchRows] = []
    missing = block
    for batch in batches:
        start = 0
        while start < batch.n:
            part = batch.select(slice(start, start + missing))
            current.append(part)
            start, missing = start + part.n, missing - part.n
            if not missing:
                yield current
                current, missing = [], block
    if current:
        yield current


def by_class(batches: Sequence[BatchRows]) -> Iterator[list[BatchRows]]:
    """Yield the rows of each class."""
    for label in sorted({label for batch in batches for label in batch.labels}):
        parts = []
        for batch in batches:
            index = [i for i, other in enumerate(batch.labels) if other == label]
            if index:
                parts.append(
                    batch.select(torch.tensor(index, device=batch_tensors(batch)[0].device))
                )
        yield parts


def split_outputs(samples: list[BatchRows], outputs: str) -> Iterator[JacobianRows]:
    """Yield the rows of a block, together or for each output."""
    if outputs != "independent":
        yield JacobianRows(samples)
        return
    for column in range(samples[0].c):
        part = slice(column, column + 1)
        yield JacobianRows([s.select(slice(None), part) for s in samples])
