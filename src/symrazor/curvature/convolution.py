r"""Describe convolutions in the weight-sharing format and compute their input factor.

A convolution is $y[n, t, k, o] = \sum_i W[k, o, i]\, a[n, t, k, i]$ with positions t, groups k and
$i = (\text{channel}, \text{offset})$: the patch of the *padded* input at position t, for every
padding mode.

The input factor $\sum_{n,t} a a^\top$ is computed without storing all patches: at stride 1 from
correlations of the padded input with its shifts, where this is cheaper; otherwise from patches of a
few samples at a time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.accelerate.torch_internals import (
    conv_padding,
    pad_circular,
    weight_gradient_of_conv2d,
)
from symrazor.curvature.convolution_edges import Images, edge_columns, edge_rows
from symrazor.curvature.weight_sharing import Sharing, sharing
from symrazor.linalg.factor import GPU_ROWS_PER_PRODUCT, gram

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d
Maps = Float[Tensor, "n c *size"]


@dataclass(frozen=True)
class Geometry:
    """Kernel size, stride, dilation, padding and groups of a convolution.

    `amounts` is the padding as F.pad expects it: low and high, from the last axis to the first.
    """

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding_mode: str
    amounts: tuple[int, ...]
    groups: int = 1

    @classmethod
    def of(cls, conv: Conv) -> "Geometry":
        """Return the geometry of a torch convolution."""
        amounts = conv_padding(conv)
        return cls(
            conv.kernel_size, conv.stride, conv.dilation, conv.padding_mode, amounts, conv.groups
        )


def functional_amounts(
    padding: int | str | Sequence[int], kernel: Sequence[int], dilation: Sequence[int]
) -> tuple[int, ...]:
    """Return the padding of F.conv1d, F.conv2d or F.conv3d as F.pad expects it."""
    if padding == "same":
        totals = [gap * (k - 1) for k, gap in zip(kernel, dilation, strict=True)]
        sides = [(total // 2, total - total // 2) for total in totals]
    elif isinstance(padding, str):
        sides = [(0, 0)] * len(kernel)
    else:
        sizes = [padding] * len(kernel) if isinstance(padding, int) else list(padding)
        sizes = sizes * len(kernel) if len(sizes) == 1 else sizes
        sides = [(size, size) for size in sizes]
    return tuple(amount for side in reversed(sides) for amount in side)


def pad(x: Tensor, shape: Geometry) -> Tensor:
    """Pad the input as the convolution does."""
    mode = "constant" if shape.padding_mode == "zeros" else shape.padding_mode
    amounts = shape.amounts
    if not any(amounts):
        return x
    return pad_circular(x, amounts) if mode == "circular" else F.pad(x, amounts, mode=mode)


def patches(
    x: Maps,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Float[Tensor, "n t k i"]:
    """Return the patches of a padded input; features are ordered as in a convolution weight."""
    n, c, dims = len(x), x.shape[1], len(kernel)
    for d, (k, step, gap) in enumerate(zip(kernel, stride, dilation, strict=True)):
        x = x.unfold(2 + d, gap * (k - 1) + 1, step)[..., ::gap]
    split = x.reshape(n, groups, c // groups, *x.shape[2:])  # [..., *positions, *offsets]
    order = [0, *range(3, 3 + dims), 1, 2, *range(3 + dims, 3 + 2 * dims)]
    features = c // groups * math.prod(kernel)
    return split.permute(order).reshape(n, -1, groups, features)


def all_patches(x: Maps, shape: Geometry) -> Float[Tensor, "n t k i"]:
    """Pad an input and return its patches."""
    return patches(pad(x, shape), shape.kernel_size, shape.stride, shape.dilation, shape.groups)


CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def projected_patches(
    x: Maps, basis: Float[Tensor, "k i r"], shape: Geometry
) -> Float[Tensor, "n t k r"]:
    """Return the product of all patches and a matrix for each group: a convolution with it."""
    dims, groups = x.dim() - 2, shape.groups
    channels = x.shape[1] // groups
    filters = basis.mT.expand(groups, -1, -1).reshape(-1, channels, *shape.kernel_size)
    if dims == 2 and x.device.type == "cpu":
        filters = filters.contiguous(memory_format=torch.channels_last)
    step, gap = list(shape.stride), list(shape.dilation)
    y = CONVOLVE[dims](pad(x, shape), filters, None, step, 0, gap, groups)
    return channels_to_features(groups, y)


def channels_to_features(groups: int, g: Tensor) -> Float[Tensor, "n t k o"]:
    """Map a tensor [n, k*o, *positions] of the output shape to the format."""
    channels_last = g.movedim(1, -1)
    return channels_last.reshape(len(g), -1, groups, g.shape[1] // groups)


@sharing.register
def _convolution(module: Conv) -> Sharing:
    groups, shape, geometry = module.groups, module.weight.shape, Geometry.of(module)
    return Sharing(
        inputs=lambda x: all_patches(x, geometry),
        outputs=lambda g: channels_to_features(groups, g),
        to_blocks=lambda weight: weight.reshape(groups, shape[0] // groups, -1),
        from_blocks=lambda blocks: blocks.reshape(shape),
        input_factor=lambda x: input_factor(x, geometry),
        project=lambda x, basis: projected_patches(x, basis, geometry),
    )


PATCH_ENTRIES = 2**19
"""Entries of the patches that are made at a time on a CPU: they stay in the cache."""

PATCH_ENTRIES_GPU = 2**24
"""Entries of the patches that are made at a time on a GPU: few launches, 64 MB."""

MAX_FLOAT32_TERMS = 2**12
"""Terms that a weight gradient may sum in float32; longer sums are split and added in float64."""


def input_factor(x: Maps, shape: Geometry) -> Float[Tensor, "k i i"]:
    r"""Return $\sum_{n,t} a a^\top$ over patches, by the cheapest way for this shape."""
    if shape.groups > 1:
        return gram(all_patches(x, shape))
    return _by_correlation(x, shape) if _worth_correlating(x, shape) else _by_patches(x, shape)


def _by_patches(x: Maps, shape: Geometry) -> Float[Tensor, "1 i i"]:
    """Compute the factor from patches ordered (offset, channel), so that whole pixels are copied.

    On maps no larger than the kernel, some offsets lie in the zero padding for every position.
    Their rows of the factor are zero; only the others ("live" offsets) are computed.
    """
    live, positions = _live_offsets(x, shape), _positions(x, shape)
    kernel, channels = [len(span) for span in live], x.shape[1]
    features = math.prod(kernel) * channels
    rows = max(PATCH_ENTRIES // features, 4 * features)
    if x.is_cuda:
        rows = PATCH_ENTRIES_GPU // features
    chunk = max(1, rows // math.prod(positions))
    grams = [gram(_pixel_patches(part, shape, live, positions)) for part in x.split(chunk)]
    A = grams[0][0] if len(grams) == 1 else torch.stack(grams).sum(0, dtype=torch.float64)[0]
    return _channels_first(A.view(*kernel, channels, *kernel, channels), shape.kernel_size, live)


def _pixel_patches(
    x: Maps, shape: Geometry, live: Sequence[range], positions: Sequence[int]
) -> Float[Tensor, "r 1 i"]:
    """Return patches of the live offsets, features ordered (offset, channel)."""
    rows, dims = pad(x, shape).movedim(1, -1).contiguous(), len(live)
    for d, (span, count) in enumerate(zip(live, positions, strict=True)):
        gap, step = shape.dilation[d], shape.stride[d]
        rows = rows.narrow(1 + d, span.start * gap, rows.shape[1 + d] - span.start * gap)
        rows = rows.unfold(1 + d, gap * (len(span) - 1) + 1, step)[..., ::gap]
        rows = rows.narrow(1 + d, 0, count)
    order = [*range(1 + dims), *range(2 + dims, 2 + 2 * dims), 1 + dims]
    features = math.prod(len(span) for span in live) * x.shape[1]
    return rows.permute(order).reshape(-1, 1, features)


def _positions(x: Tensor, shape: Geometry) -> list[int]:
    """Return the size of the output map."""
    amounts = shape.amounts
    extra = [amounts[2 * d] + amounts[2 * d + 1] for d in reversed(range(x.dim() - 2))]
    return [
        (size + padding - gap * (k - 1) - 1) // step + 1
        for size, padding, k, step, gap in zip(
            x.shape[2:], extra, shape.kernel_size, shape.stride, shape.dilation, strict=True
        )
    ]


def _live_offsets(x: Tensor, shape: Geometry) -> list[range]:
    """Return, per axis, the offsets that reach the image and not only its zero padding."""
    if shape.padding_mode != "zeros":
        return [range(k) for k in shape.kernel_size]
    spans = []
    for d, count in enumerate(_positions(x, shape)):
        low = shape.amounts[2 * (x.dim() - 3 - d)]
        gap, last = shape.dilation[d], (count - 1) * shape.stride[d]
        size, k = x.shape[2 + d], shape.kernel_size[d]
        live = [o for o in range(k) if o * gap + last >= low and o * gap < low + size]
        spans.append(range(live[0], live[-1] + 1) if live else range(1))
    return spans


def _channels_first(
    A: Float[Tensor, "*kernel_c_kernel_c"], full: Sequence[int], live: Sequence[range]
) -> Float[Tensor, "1 i i"]:
    """Map [*offsets, c, *offsets, c] of live offsets to [(c, offsets), (c, offsets)] of all."""
    dims, features = len(full), A.shape[len(full)] * math.prod(full)
    A = A.permute([dims, *range(dims), 2 * dims + 1, *range(dims + 1, 2 * dims + 1)])
    amounts: list[int] = []
    for span, k in zip(reversed(live), reversed(full), strict=True):
        amounts += [span.start, k - span.stop]
    padded = F.pad(A, [*amounts, 0, 0, *amounts]) if any(amounts) else A
    return padded.reshape(1, features, features)


MIN_CHANNELS_GPU = 16
"""Channels from which a GPU correlates maps; its products of fewer columns are slow."""
MAX_RELATIVE_COST = {"cpu": 0.4, "cuda": 0.6}
"""Multiplications of correlations over those of patches, up to which correlations are faster."""


def _worth_correlating(x: Tensor, shape: Geometry) -> bool:
    """Return whether shift correlations need clearly fewer multiplications than patches."""
    limit = MAX_RELATIVE_COST.get(x.device.type)
    if limit is None or x.dim() > 4 or any(s != 1 for s in (*shape.stride, *shape.dilation)):
        return False
    if x.is_cuda and x.shape[1] < MIN_CHANNELS_GPU:
        return False
    positions, kernel = _positions(x, shape), shape.kernel_size
    area = math.prod(t + k - 1 for t, k in zip(positions, kernel, strict=True))
    shifts = (kernel[0] if len(kernel) > 1 else 1) * (2 * kernel[-1] - 1)
    return shifts * area < limit * math.prod(kernel) ** 2 * math.prod(positions)


def _by_correlation(x: Maps, shape: Geometry) -> Float[Tensor, "1 i i"]:
    r"""Compute the factor at stride 1, on one or two axes, from correlations of the padded input z.

    With offsets d, e and $\delta = e - d$, the sum $\sum_t z[t + d]\, z[t + e]^\top$ runs over all
    positions $u = t + d$ of z except a few within a kernel of its edges. The sum over all of them,

    $$ C[\delta] = \sum_u z[u]\, z[u + \delta]^\top , $$

    is the weight gradient of one convolution of z with itself, and $\delta$ takes $2k - 1$ values
    per axis (on one axis k, by symmetry) where (d, e) takes $k^2$. The contribution of the edges
    is subtracted: the columns outside of the windows, over all rows, then the rows outside. A
    circular map that keeps its size has no edges.
    """
    positions, before = _positions(x, shape), list(shape.amounts[-2::-2])
    wraps = (
        shape.padding_mode == "circular"
        and positions == list(x.shape[2:])
        and all(k <= size + 1 for k, size in zip(shape.kernel_size, positions, strict=True))
    )
    if not wraps and shape.padding_mode != "zeros":
        x, before = pad(x, shape), [0] * len(positions)
    kernel = shape.kernel_size
    if x.dim() == 3:
        x, kernel, positions, before = x.unsqueeze(2), (1, *kernel), [1, *positions], [0, *before]
    ky, kx = kernel
    C = _products_of_shifts(x, kernel, wraps) if x.is_cuda else _on_cpu(x, kernel, wraps)
    # Not by an index tensor, whose copy to a GPU cannot be recorded.
    pairs = torch.stack([C[kx - 1 - d : 2 * kx - 1 - d] for d in range(kx)])  # [dx, ex, dy, c, c]
    if not wraps:
        pairs = pairs - edge_columns(x, kernel, positions[1], before[1])
    A = pairs.new_empty(ky, kx, x.shape[1], ky, kx, x.shape[1])
    rows = None if wraps else edge_rows(x, kernel, positions, before)
    for d in range(ky):
        for e in range(d, ky):
            block = pairs[:, :, e - d].transpose(1, 2)  # [dx, c, ex, c]
            block = block if rows is None else block - rows[d, e]
            A[d, :, :, e] = block
            A[e, :, :, d] = block.permute(2, 3, 0, 1)
    return _channels_first(A, kernel, [range(ky), range(kx)])


def _on_cpu(x: Images, kernel: Sequence[int], wraps: bool) -> Float[Tensor, "_ ky c c"]:
    """Return C[dx, dy] over all positions of x, by weight gradients of convolutions."""
    ky, kx = kernel
    fold = _fold(x, kx)
    reach = fold if fold > 1 else kx - 1
    around = (reach, reach, 0, ky - 1)
    wide = pad_circular(x, around) if wraps else F.pad(x, around)
    return _correlations(x, wide) if fold == 1 else _folded_correlations(x, wide, fold, kx)


def _correlations(x: Images, wide: Images) -> Float[Tensor, "_ ky c c"]:
    """Return C[dx, dy] over all positions of x in float64; `wide` is x with its surroundings."""
    c, ky, span = x.shape[1], wide.shape[2] - x.shape[2] + 1, wide.shape[3] - x.shape[3] + 1
    like = x.new_empty(c, c, ky, span)
    chunk = max(1, MAX_FLOAT32_TERMS // x[0, 0].numel())
    sums = [
        weight_gradient_of_conv2d(g, z, like)
        for g, z in zip(x.split(chunk), wide.split(chunk), strict=True)
    ]
    return torch.stack(sums).sum(0, dtype=torch.float64).permute(3, 2, 0, 1)


def _products_of_shifts(x: Images, kernel: Sequence[int], wraps: bool) -> Float[Tensor, "_ ky c c"]:
    """Return `_correlations` as one matrix product for each shift, which keeps a GPU busy.

    Pixels are the rows of a matrix, in which a shift of the image is a shift of the rows. Between
    the lines of the image are as many rows of zeros as the shift is wide. Rows are summed in parts,
    and the parts are added in float64. Nothing is read on the host, so that CUDA graphs record it.
    """
    below, reach = (k - 1 for k in kernel)
    c, h, w = x.shape[1:]
    width = w + (2 * reach if wraps else reach)
    frame = (h + below) * width
    totals: dict[tuple[int, int], Tensor] = {}
    for part in x.split(max(1, PATCH_ENTRIES_GPU // (c * frame))):
        products = -(-len(part) * frame // GPU_ROWS_PER_PRODUCT)
        rows = products * GPU_ROWS_PER_PRODUCT

        def pixels(images: Images, start: int, rows: int = rows) -> Float[Tensor, "r c"]:
            """Return rows with the pixels of images from `start` on, and zeros elsewhere."""
            n, _, height, columns = images.shape
            table = images.new_zeros(rows + below * width + 2 * reach, c)
            inside = table[start : start + n * frame].view(n, h + below, width, c)
            inside[:, :height, :columns] = images.movedim(1, -1)
            return table

        around = pixels(pad_circular(part, (reach, reach, 0, below)), 0) if wraps else None
        plain = pixels(part, 0 if wraps else reach)
        left = plain[0 if wraps else reach :][:rows].view(products, -1, c).mT
        for dy in range(below + 1):
            for dx in range(-reach if dy else 0, reach + 1):
                shifted = (plain if around is None else around)[dy * width + dx + reach :]
                product = left @ shifted[:rows].view(products, -1, c)
                total = product.sum(0, dtype=torch.float64)
                totals[dx, dy] = totals[dx, dy] + total if (dx, dy) in totals else total
    for dx in range(1, reach + 1):
        totals[-dx, 0] = totals[dx, 0].mT
    columns = [
        torch.stack([totals[dx, dy] for dy in range(below + 1)]) for dx in range(-reach, reach + 1)
    ]
    return torch.stack(columns)


def _fold(x: Images, kx: int) -> int:
    """Return how many neighbouring pixels to treat as one, so that few channels fill a register."""
    c, w = x.shape[1], x.shape[3]
    folds = [f for f in range(max(kx - 1, 2), w + 1) if w % f == 0 and f * c <= 16]
    return max(folds, default=1)


def _folded_correlations(x: Images, wide: Images, fold: int, kx: int) -> Float[Tensor, "_ ky c c"]:
    """Return `_correlations` from rows split into blocks of f pixels, with f times the channels.

    Pixels i and i + d of a row are (i + d) // f blocks apart, at indices i and (i + d) mod f.
    """
    c = x.shape[1]
    blocks = [
        z.permute(0, 2, 3, 1).reshape(len(z), z.shape[2], -1, fold * c).permute(0, 3, 1, 2)
        for z in (x, wide)
    ]
    C = _correlations(*blocks)
    C = C.view(*C.shape[:2], fold, c, fold, c)
    index = torch.arange(fold)
    other = index + torch.arange(1 - kx, kx).unsqueeze(1)
    return C[other // fold + 1, :, index, :, other % fold].sum(1)
