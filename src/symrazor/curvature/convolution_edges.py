"""Sum products of pixels near the edges, which no window of a convolution contains together.

`convolution` subtracts these sums from correlations over the whole padded image.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from symrazor.linalg.factor import gram

Images = Float[Tensor, "n c h w"]


def _edges(size: int, k: int, positions: int, before: int) -> list[tuple[range, int]]:
    """Return, for both edges, the image lines within k - 1 lines of the padded image's edge.

    The second number of each pair counts the padding lines before them in their edge.
    """
    after = before + size
    first = range(before, max(before, min(k - 1, after)))
    start = max(positions, before)
    last = range(start, max(start, min(positions + k - 1, after)))
    return [
        (range(first.start - before, first.stop - before), first.start),
        (range(last.start - before, last.stop - before), last.start - positions),
    ]


def _outside(k: int, edges: Sequence[tuple[Float[Tensor, "_ _ *s"], int]]) -> Tensor:
    """Return the sums over the lines that offsets d, e leave out, [k, k, *s].

    The first edge loses the pairs of lines (d - j, e - j), j > 0; the last (d + j, e + j), j >= 0.
    """
    (first, skip), (last, skip_last) = edges
    total = first.new_zeros(k, k, *first.shape[2:])
    for j in range(1, k):
        low = skip + j
        r = max(0, min(len(first), k - low))
        total[low : low + r, low : low + r] += first[:r, :r]
    for j in range(k - 1):
        drop, low = max(0, j - skip_last), max(0, skip_last - j)
        r = max(0, len(last) - drop)
        total[low : low + r, low : low + r] += last[drop:, drop:]
    return total


def edge_columns(
    x: Images, kernel: Sequence[int], positions: int, before: int
) -> Float[Tensor, "kx kx ky c c"]:
    """Return products of pairs of columns outside of the windows, for rows 0 .. ky-1 apart."""
    (ky, kx), (n, c, h, w) = kernel, x.shape
    edges = []
    for columns, skip in _edges(w, kx, positions, before):
        r = len(columns)
        strip = x[..., columns.start : columns.stop].permute(0, 2, 3, 1).reshape(n, h, r * c)
        below = F.pad(strip, (0, 0, 0, ky - 1)).unfold(1, ky, 1).transpose(2, 3)
        outer = strip.reshape(n * h, r * c).T @ below.reshape(n * h, ky * r * c)
        products = outer.double().view(r, c, ky, r, c).permute(0, 3, 2, 1, 4)
        edges.append((products, skip))
    return _outside(kx, edges)


def edge_rows(
    x: Images,
    kernel: Sequence[int],
    positions: Sequence[int],
    before: Sequence[int],
) -> Float[Tensor, "ky ky kx c kx c"]:
    """Return products of the patches of pairs of rows outside of the windows."""
    (ky, kx), (n, c, h, w) = kernel, x.shape
    edges = []
    for rows, skip in _edges(h, ky, positions[0], before[0]):
        r = len(rows)
        strip = x[:, :, rows.start : rows.stop].permute(0, 3, 2, 1)
        after = positions[1] + kx - 1 - before[1] - w
        strip = F.pad(strip, (0, 0, 0, 0, before[1], after)).unfold(1, kx, 1)
        products = gram(strip.permute(0, 1, 2, 4, 3).reshape(n * positions[1], 1, r * kx * c))[0]
        products = products.double().view(r, kx, c, r, kx, c).permute(0, 3, 1, 2, 4, 5)
        edges.append((products, skip))
    return _outside(ky, edges)
