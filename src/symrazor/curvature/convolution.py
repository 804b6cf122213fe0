r"""Convolutions in the weight-sharing format: patches with the true padding, and their factor.

A convolution is $y[n, t, k, o] = \sum_i W[k, o, i]\, a[n, t, k, i]$ with positions t, groups k and
$i = (\text{channel}, \text{offset})$: the patch of the *padded* input under position t, whatever the
padding mode. The input factor $\sum_{n,t} a a^\top$ never needs whole patches: see `input_factor`.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.curvature.sharing import Sharing, sharing
from symrazor.linalg import gram

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d
ConvTranspose = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


def pad(x: Tensor, module: Conv) -> Tensor:
    """The input as the convolution sees it."""
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    amounts = module._reversed_padding_repeated_twice
    return F.pad(x, amounts, mode=mode) if any(amounts) else x


def windows(
    x: Float[Tensor, "n c *size"],
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
) -> Float[Tensor, "n c *out_and_kernel"]:
    """View of all windows: [n, c, *positions, *offsets], without copying."""
    for d, (k, step, gap) in enumerate(zip(kernel, stride, dilation, strict=True)):
        x = x.unfold(2 + d, gap * (k - 1) + 1, step)[..., ::gap]
    return x


def patches(
    x: Float[Tensor, "n c *size"],
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Float[Tensor, "n t k i"]:
    """Patches of an already padded input, i ordered as in a convolution weight."""
    view = windows(x, kernel, stride, dilation)
    n, c, dims = len(x), x.shape[1], len(kernel)
    split = view.reshape(n, groups, c // groups, *view.shape[2:])
    order = [0, *range(3, 3 + dims), 1, 2, *range(3 + dims, 3 + 2 * dims)]
    features = c // groups * math.prod(kernel)
    return split.permute(order).reshape(n, -1, groups, features)


def input_factor(x: Float[Tensor, "n c *size"], module: Conv) -> Float[Tensor, "k i i"]:
    r"""$\sum_{n,t} a a^\top$ from patches along one axis only.

    Let $P[u]$ be the patches of padded row u along all axes but the first. The block of A between
    row offsets d and d' is $\sum_t P[st + d]^\top P[st + d']$. It depends on (d, d') only through
    the rows it runs over, so that for stride 1 all pairs of equal $d' - d$ share one product over
    the common rows and differ by a few rows at the ends: K products of size $(iK^{-1})^2$ in place
    of $K^2$, and patches K times smaller.
    """
    if module.groups > 1:
        return gram(_all_patches(x, module))
    (k, *kernel), (step, *stride), (gap, *dilation) = (
        module.kernel_size,
        module.stride,
        module.dilation,
    )
    rows = _row_patches(pad(x, module), kernel, stride, dilation)
    n, height, positions, channels, offsets = rows.shape
    rows = rows.reshape(n, height, positions, channels * offsets)
    count = (height - gap * (k - 1) - 1) // step + 1
    A = x.new_empty(channels, k, offsets, channels, k, offsets)
    shared: dict[tuple[int, int], tuple[Tensor, int]] = {}
    for d in range(k):
        for e in range(d, k):
            first = d * gap
            key = (first % step, e - d)
            if key not in shared:
                shared[key] = (_product(rows, first, e * gap, count, step), first)
            total, start = shared[key]
            moved = (first - start) // step
            block = _slide(rows, total, start, (e - d) * gap, count, step, moved)
            block = block.view(channels, offsets, channels, offsets)
            A[:, d, :, :, e] = block
            A[:, e, :, :, d] = block.permute(2, 3, 0, 1)
    features = channels * k * offsets
    return A.reshape(1, features, features)


def _row_patches(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Float[Tensor, "n height positions channels offsets"]:
    """Patches along every axis but the first spatial one."""
    for d, (k, step, gap) in enumerate(zip(kernel, stride, dilation, strict=True)):
        x = x.unfold(3 + d, gap * (k - 1) + 1, step)[..., ::gap]
    dims = len(kernel)
    order = [0, 2, *range(3, 3 + dims), 1, *range(3 + dims, 3 + 2 * dims)]
    x = x.permute(order)
    shape = x.shape
    positions = math.prod(shape[2 : 2 + dims])
    return x.reshape(shape[0], shape[1], positions, shape[2 + dims], math.prod(kernel))


def _take(rows: Tensor, first: int, count: int, step: int) -> Tensor:
    chosen = rows[:, first : first + (count - 1) * step + 1 : step]
    return chosen.reshape(-1, 1, rows.shape[-1])


def _product(rows: Tensor, left: int, right: int, count: int, step: int) -> Tensor:
    """Sum over t of P[left + s t]' P[right + s t]."""
    a = _take(rows, left, count, step)
    if left == right:
        return gram(a)[0]
    return a[:, 0].T @ _take(rows, right, count, step)[:, 0]


def _slide(
    rows: Tensor, total: Tensor, start: int, apart: int, count: int, step: int, moved: int
) -> Tensor:
    """Move a product over rows by `moved` steps: add what enters, take away what leaves."""
    if moved == 0:
        return total
    if moved >= count:
        first = start + moved * step
        return _product(rows, first, first + apart, count, step)
    enters = start + count * step
    added = _product(rows, enters, enters + apart, moved, step)
    removed = _product(rows, start, start + apart, moved, step)
    return total + added - removed


def _all_patches(x: Tensor, module: Conv) -> Tensor:
    return patches(
        pad(x, module), module.kernel_size, module.stride, module.dilation, module.groups
    )


def _channels_to_features(groups: int, g: Tensor) -> Float[Tensor, "n t k o"]:
    """Output-shaped tensor [n, k*o, *positions] -> the format."""
    last = g.movedim(1, -1)
    return last.reshape(len(g), -1, groups, g.shape[1] // groups)


@sharing.register(nn.Conv1d)
@sharing.register(nn.Conv2d)
@sharing.register(nn.Conv3d)
def _convolution(module: Conv) -> Sharing:
    groups, shape = module.groups, module.weight.shape
    return Sharing(
        inputs=lambda x: _all_patches(x, module),
        outputs=lambda g: _channels_to_features(groups, g),
        to_blocks=lambda weight: weight.reshape(groups, shape[0] // groups, -1),
        from_blocks=lambda blocks: blocks.reshape(shape),
        input_factor=lambda x: input_factor(x, module),
    )


@sharing.register(nn.ConvTranspose1d)
@sharing.register(nn.ConvTranspose2d)
@sharing.register(nn.ConvTranspose3d)
def _transposed(module: ConvTranspose) -> Sharing:
    """A transposed convolution is a stride-1 convolution, kernel flipped, of the spread-out input."""
    groups, (c_in, c_out, *kernel) = module.groups, module.weight.shape
    dims = len(kernel)
    flipped = list(range(-dims, 0))
    paddings = [
        int(gap * (k - 1) - p)
        for k, p, gap in zip(kernel, module.padding, module.dilation, strict=True)
    ]

    def inputs(x: Float[Tensor, "n c *size"]) -> Float[Tensor, "n t k i"]:
        sizes = [(s - 1) * step + 1 for s, step in zip(x.shape[2:], module.stride, strict=True)]
        spread = x.new_zeros(*x.shape[:2], *sizes)
        spread[(..., *(slice(None, None, step) for step in module.stride))] = x
        amounts: list[int] = []
        for p, extra in zip(reversed(paddings), reversed(module.output_padding), strict=True):
            amounts += [p, p + int(extra)]
        ones = (1,) * dims
        return patches(F.pad(spread, amounts), kernel, ones, module.dilation, groups)

    def to_blocks(weight: Tensor) -> Float[Tensor, "k o i"]:
        split = weight.reshape(groups, c_in // groups, c_out, *kernel)
        return split.transpose(1, 2).flip(flipped).reshape(groups, c_out, -1)

    def from_blocks(blocks: Float[Tensor, "k o i"]) -> Tensor:
        split = blocks.reshape(groups, c_out, c_in // groups, *kernel).flip(flipped)
        return split.transpose(1, 2).reshape(module.weight.shape)

    return Sharing(
        inputs=inputs,
        outputs=lambda g: _channels_to_features(groups, g),
        to_blocks=to_blocks,
        from_blocks=from_blocks,
    )
