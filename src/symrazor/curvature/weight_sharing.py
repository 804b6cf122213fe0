r"""Define the weight-sharing format and describe the layers of torch in it.

Every linear operation with parameters is

$$ y[n, s, k, o] = \sum_i W[k, o, i]\, a[n, s, k, i] + b[k, o] $$

with n samples, s shared uses of the weight (positions, tokens, group elements), k independent
blocks, and i input and o output features. The curvature engine knows nothing else about a layer. A
new layer type is one function registered with `sharing`:

    @symrazor.curvature.sharing.register
    def _(module: MyLinear) -> symrazor.curvature.Sharing:
        return symrazor.curvature.Sharing(inputs=..., outputs=...)

| layer | s | k | i | o |
|---|---|---|---|---|
| Linear | leading dimensions | 1 | in | out |
| Conv | positions | groups | patch | channels |
| Embedding | tokens | vocabulary (a is one-hot) | 1 | width |
| affine part of a norm | positions | features | 1 | 1 |
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, singledispatch
from types import EllipsisType

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from symrazor.curvature.convolution import (
    Conv,
    Geometry,
    all_patches,
    channels_to_features,
    input_factor,
    patches,
    projected_patches,
)

Map = Callable[[Tensor], Tensor]
ConvTranspose = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


@dataclass(frozen=True)
class Sharing:
    """Description of one module in the weight-sharing format.

    Args:
        inputs: maps the input of the module to a[n, s, k, i].
        outputs: maps a tensor of the module's output shape to [n, s, k, o]; applied to cotangents.
        weight: name of the module's weight parameter, or None.
        bias: name of its bias b[k, o], flattened in that order, or None.
        to_blocks: maps the weight parameter to W[k, o, i].
        from_blocks: the inverse of `to_blocks`.
        input_factor: optional faster sum of a a' over n and s, [k, i, i].
        project: optional faster product of a and a matrix [k, i, r]; maps the input of the module
            and the matrix to [n, s, k, r].
        dense: whether the weight gets an exact dense block instead of Kronecker factors; for
            weights with few entries, such as the scale of a norm.
        shaping: names of further parameters of the module or its children that shape the weight
            (lengthscales, for example); they have few entries and exact blocks.
    """

    inputs: Map
    outputs: Map
    weight: str | None = "weight"
    bias: str | None = "bias"
    to_blocks: Map = field(default=partial(torch.unsqueeze, dim=0))
    from_blocks: Map = field(default=partial(torch.squeeze, dim=0))
    input_factor: Map | None = None
    project: Callable[[Tensor, Tensor], Tensor] | None = None
    dense: bool = False
    shaping: tuple[str, ...] = ()


@singledispatch
def sharing(module: nn.Module) -> Sharing:
    """Return the format of a module, by its type; raise TypeError if none is registered."""
    raise TypeError(f"No weight-sharing format is registered for {type(module).__name__}.")


def registered_type(kind: type) -> type | None:
    """Return the base class of `kind` whose registration `sharing` would use, or None."""
    return next((c for c in kind.__mro__ if c in sharing.registry and c is not object), None)


def _last_dimension(x: Float[Tensor, "n *s f"]) -> Float[Tensor, "n s 1 f"]:
    return x.reshape(len(x), -1, 1, x.shape[-1])


LINEAR = Sharing(inputs=_last_dimension, outputs=_last_dimension)
"""Format of F.linear."""


@sharing.register
def _linear(module: nn.Linear) -> Sharing:
    return LINEAR


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
        every: list[slice | EllipsisType] = [slice(None, None, step) for step in steps]
        spread[(..., *every)] = x
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
        outputs=_last_dimension,
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


def _without_format(x: Tensor) -> Tensor:
    raise ValueError("This parameter has no common format: its operations have formats.")


SINGLE = Sharing(inputs=_without_format, outputs=_without_format, bias=None, dense=True)
"""Format of a parameter whose operations are recorded one by one."""


@dataclass(frozen=True)
class Layer:
    """A module with at least one trainable weight, and its format.

    A parameter outside of registered layers is a layer of its own. Its operations are recorded (see
    `operations`), and its format is known once a model has run.

    Args:
        name: name of the module, or of the parameter.
        module: the module that holds the parameters.
        registered: the registered format of the module, None for a single parameter.
        weight: full name of the weight, None if absent or frozen.
        bias: full name of the bias, None if absent or frozen.
        shaping: full names of shaping parameters by local name.
        recorded: the format of a single parameter, if all its operations have the same.
    """

    name: str
    module: nn.Module
    registered: Sharing | None
    weight: str | None
    bias: str | None
    shaping: dict[str, str] = field(default_factory=dict)
    recorded: list[Sharing] = field(default_factory=list, compare=False, repr=False)

    @property
    def form(self) -> Sharing:
        """The format."""
        if self.registered is not None:
            return self.registered
        return self.recorded[0] if self.recorded else SINGLE

    @property
    def local_names(self) -> dict[str, str]:
        """Full names of all trainable parameters by their names in the module."""
        if self.registered is None:
            return {str(self.weight).rpartition(".")[2]: str(self.weight)}
        pairs = {self.registered.weight: self.weight, self.registered.bias: self.bias}
        return {k: v for k, v in pairs.items() if k is not None and v is not None} | self.shaping

    @property
    def factored_weight(self) -> str | None:
        """Full name of its weight if that has Kronecker factors, not an exact block."""
        return None if self.form.dense else self.weight

    @property
    def tensors(self) -> list[str]:
        """Full names of all its trainable tensors: bias, weight, shaping parameters."""
        return [n for n in (self.bias, self.weight, *self.shaping.values()) if n is not None]
