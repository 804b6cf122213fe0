"""Describe transposed convolutions, embeddings and norms of torch in the weight-sharing format."""

from collections.abc import Sequence
from dataclasses import replace
from types import EllipsisType

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from symrazor.curvature.convolution import channels_to_features, patches
from symrazor.curvature.weight_sharing import Map, Sharing, last_dimension, sharing

ConvTranspose = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


@sharing.register
def _transposed(module: ConvTranspose) -> Sharing:
    """Describe a transposed convolution: stride 1, flipped kernel, on the spread-out input."""
    groups, (c_in, c_out, *kernel) = module.groups, module.weight.shape
    dims = len(kernel)
    flipped = list(range(-dims, 0))
    before: Sequence[int] = module.padding  # type: ignore[assignment]
    paddings = [
        gap * (k - 1) - p for k, p, gap in zip(kernel, before, module.dilation, strict=True)
    ]
    steps = [int(step) for step in module.stride]

    def inputs(x: Float[Tensor, "n c *size"]) -> Float[Tensor, "n t k i"]:
        sizes = [(s - 1) * step + 1 for s, step in zip(x.shape[2:], steps, strict=True)]
        spread = x.new_zeros(*x.shape[:2], *sizes)
        strides: list[slice | EllipsisType] = [slice(None, None, step) for step in steps]
        spread[(..., *strides)] = x
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
        outputs=lambda g: channels_to_features(groups, g),
        to_blocks=to_blocks,
        from_blocks=from_blocks,
    )


def embedding_form(weight: Tensor, padding_idx: int | None = None) -> Sharing:
    """Return the format of F.embedding."""
    vocabulary, dtype = len(weight), weight.dtype

    def one_hot(index: Int[Tensor, "n *s"]) -> Float[Tensor, "n s v 1"]:
        flat = index.reshape(len(index), -1)
        hot = F.one_hot(flat, vocabulary).to(dtype)
        if padding_idx is not None:
            hot[..., padding_idx] = 0
        return hot.unsqueeze(-1)

    def counts(index: Int[Tensor, "n *s"]) -> Float[Tensor, "v 1 1"]:
        count = torch.bincount(index.reshape(-1), minlength=vocabulary)
        if padding_idx is not None:
            count[padding_idx] = 0
        return count.to(dtype).reshape(-1, 1, 1)

    return Sharing(
        inputs=one_hot,
        outputs=last_dimension,
        bias=None,
        to_blocks=lambda weight: weight.unsqueeze(2),
        from_blocks=lambda blocks: blocks.squeeze(2),
        input_factor=counts,
    )


@sharing.register
def _embedding(module: nn.Embedding) -> Sharing:
    return embedding_form(module.weight, module.padding_idx)


def _elementwise(normalise: Map, features_last: int | None, bias: str | None = "bias") -> Sharing:
    """Describe y = w * xhat + b; features are the last dimensions, or dimension 1 if None."""

    def blocks(x: Tensor) -> Float[Tensor, "n s k 1"]:
        if features_last is None:
            return x.reshape(*x.shape[:2], -1).transpose(1, 2).unsqueeze(-1)
        return x.reshape(len(x), -1, x.shape[-features_last:].numel(), 1)

    return Sharing(
        inputs=lambda x: blocks(normalise(x)),
        outputs=blocks,
        bias=bias,
        to_blocks=lambda weight: weight.reshape(-1, 1, 1),
        from_blocks=lambda values: values.reshape(values.shape[0]),
        dense=True,
    )


@sharing.register
def _layer_norm(module: nn.LayerNorm) -> Sharing:
    shape = module.normalized_shape
    form = _elementwise(lambda x: F.layer_norm(x, shape, eps=module.eps), len(shape))
    return replace(form, from_blocks=lambda values: values.reshape(shape))


@sharing.register
def _rms_norm(module: nn.RMSNorm) -> Sharing:
    shape = list(module.normalized_shape)
    form = _elementwise(lambda x: F.rms_norm(x, shape, eps=module.eps), len(shape), bias=None)
    return replace(form, from_blocks=lambda values: values.reshape(shape))


@sharing.register
def _group_norm(module: nn.GroupNorm) -> Sharing:
    return _elementwise(lambda x: F.group_norm(x, module.num_groups, eps=module.eps), None)


@sharing.register
def _batch_norm(module: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) -> Sharing:
    """Describe a batch norm in eval mode, a fixed normalisation; see `coverage.check_mode`."""

    def normalise(x: Tensor) -> Tensor:
        return F.batch_norm(x, module.running_mean, module.running_var, eps=module.eps)

    return _elementwise(normalise, None)
