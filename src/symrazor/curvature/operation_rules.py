"""Say what an operation with a parameter and data records, function by function.

A rule runs the operation and records its uses of parameters; it returns NotImplemented if it does
not apply. Operations without a rule are broadcasting ones, which `OperationRecorder` expands, or
errors. A function that is a composition of others is replaced by these.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from inspect import signature
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.curvature.attention import multi_head_attention
from symrazor.curvature.convolution import (
    Geometry,
    all_patches,
    channels_to_features,
    functional_amounts,
)
from symrazor.curvature.layer_formats import embedding_form
from symrazor.curvature.recurrent import RECURRENT_CELLS, RECURRENT_LAYERS
from symrazor.curvature.weight_sharing import LINEAR, Layer, Sharing

if TYPE_CHECKING:
    from symrazor.curvature.operations import OperationRecorder

ELEMENTWISE = frozenset(
    "add radd iadd sub rsub isub subtract mul rmul imul multiply div rdiv idiv rtruediv truediv "
    "true_divide divide pow rpow maximum minimum where lerp addcmul addcdiv".split()
)
"""Names of broadcasting operations, without underscores."""

JOINING = frozenset(("cat", "concat", "concatenate", "stack", "hstack", "vstack", "where"))
"""Names of operations that put tensors next to each other."""

EXPANDING = frozenset(("expand", "expand_as", "repeat", "broadcast_to", "tile"))
"""Names of operations that repeat a tensor, for example for every sample."""

SHAPE_ONLY = frozenset(
    "type_as view_as expand_as reshape_as to new_zeros new_ones new_empty new_full new_tensor "
    "zeros_like ones_like empty_like full_like size dim numel shape device dtype ndim".split()
)
"""Names of functions whose results depend on a parameter only through its shape and type."""


def _rows(x: Tensor) -> Float[Tensor, "n 1 1 o"]:
    return x.reshape(len(x), 1, 1, -1)


EXPANDED = Sharing(inputs=_rows, outputs=_rows, weight=None)
"""Format of a tensor with one row per sample."""


def linear_rows(rows: slice, total: int) -> Sharing:
    """Return the format of a linear layer whose operation uses some rows of the weight."""
    start, stop, _ = rows.indices(total)

    def outputs(g: Tensor) -> Float[Tensor, "n s 1 o"]:
        return F.pad(g, (start, total - stop)).reshape(len(g), -1, 1, total)

    return replace(LINEAR, outputs=outputs)


def is_linear_layer(layer: Layer, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether weight and bias are those of a registered linear layer."""
    module = layer.module
    if layer.registered is None or not isinstance(module, nn.Linear):
        return False
    return weight is module.weight and bias is module.bias and layer.weight is not None


def replaced(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply a function to every tensor in nested sequences and mappings."""
    if isinstance(value, Mapping):
        return {key: replaced(part, change) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(replaced(part, change) for part in value)
    return change(value) if isinstance(value, Tensor) else value


def _linear(r: "OperationRecorder", func: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    if not r.is_data(x):
        return NotImplemented
    return r.linear(x, weight, bias)


def _matmul(r: "OperationRecorder", func: Any, left: Any, right: Any) -> Any:
    if r.is_parameter(right) and right.dim() == 2 and left.dim() >= 2:
        source = r.transposed(right)
        if source is not None:  # x W'
            return r.linear(left, source)
        y = r.run(func, left, right)
        r.record_linear(y, right, TRANSPOSED, left, "transposed")
        return y
    if r.is_parameter(left) and left.dim() == 2 and right.dim() >= 3:
        y = r.run(func, left, right)
        columns = Sharing(
            inputs=lambda x: x.mT.reshape(len(x), -1, 1, x.shape[-2]),
            outputs=lambda g: g.mT.reshape(len(g), -1, 1, g.shape[-2]),
            bias=None,
        )
        r.record_linear(y, left, columns, right, "columns")
        return y
    parameter, data = (right, left) if r.is_parameter(right) else (left, right)
    if parameter.dim() == data.dim() - 1 >= 2 or parameter.dim() == data.dim() > 2:
        rows = r.expanded(parameter, data)
        return r.run(func, *((left, rows) if parameter is right else (rows, right)))
    return NotImplemented


TRANSPOSED = replace(
    LINEAR,
    to_blocks=lambda weight: weight.T.unsqueeze(0),
    from_blocks=lambda blocks: blocks.squeeze(0).T,
)
"""Format of x @ weight."""


def _addmm(
    r: "OperationRecorder",
    func: Any,
    bias: Any,
    x: Any,
    weight: Any,
    *,
    beta: Any = 1,
    alpha: Any = 1,
) -> Any:
    if beta != 1 or alpha != 1 or not r.is_data(x) or r.is_data(weight) or r.is_data(bias):
        return NotImplemented
    y = r.run(func, bias, x, weight)
    if r.is_parameter(weight):
        r.record_linear(y, weight, TRANSPOSED, x, "transposed")
    r.record_bias(y, bias, LINEAR.outputs)
    return y


def _einsum(r: "OperationRecorder", func: Any, equation: Any, *operands: Any) -> Any:
    """Record y = W a with letters k (in all three), o (not in a), i (not in y), n, s."""
    operands = tuple(operands[0]) if isinstance(operands[0], (list, tuple)) else operands
    if len(operands) != 2 or "." in equation or "->" not in equation:
        return NotImplemented
    terms, out = equation.replace(" ", "").split("->")
    is_left = r.is_parameter(operands[0])
    (w, a) = terms.split(",") if is_left else reversed(terms.split(","))
    weight, data = operands if is_left else reversed(operands)
    k = [c for c in w if c in a and c in out]
    o = [c for c in w if c not in a and c in out]
    i = [c for c in w if c in a and c not in out]
    s = [c for c in out[1:] if c in a and c not in w]
    distinct = len({*w}) == len(w) and len({*a}) == len(a)
    if not distinct or a[0] in w or out[:1] != a[0] or {*w} != {*k, *o, *i}:
        return NotImplemented
    sizes = dict(zip(w, weight.shape, strict=True))

    def blocks(x: Tensor, letters: str, last: list[str]) -> Float[Tensor, "n s k f"]:
        letters_kept = [a[0], *s, *k, *last]
        summed = torch.einsum(f"{letters}->{''.join(letters_kept)}", x)
        return summed.reshape(len(x), -1, prod(sizes[c] for c in k), prod(sizes[c] for c in last))

    order = [w.index(c) for c in (*k, *o, *i)]
    back = [order.index(d) for d in range(len(order))]
    shape = [weight.shape[d] for d in order]
    form = Sharing(
        inputs=lambda x: blocks(x, a, i),
        outputs=lambda g: blocks(g, out, o),
        bias=None,
        to_blocks=lambda v: v.permute(order).reshape(
            *(prod(sizes[c] for c in letters) for letters in (k, o, i))
        ),
        from_blocks=lambda v: v.reshape(shape).permute(back),
    )
    y = r.run(func, equation, *operands)
    r.record_linear(y, weight, form, data, f"einsum {w} {a}->{out}")
    return y


def _convolution(
    r: "OperationRecorder",
    func: Any,
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    if not r.is_data(input) or r.is_data(weight):
        return NotImplemented
    y = r.run(func, input, weight, bias, stride, padding, dilation, groups)
    kernel, shape = weight.shape[2:], weight.shape
    steps, gaps = (
        (v,) * len(kernel) if isinstance(v, int) else tuple(v) for v in (stride, dilation)
    )
    amounts = functional_amounts(padding, kernel, gaps)
    geometry = Geometry(tuple(kernel), steps, gaps, "zeros", amounts, groups)
    outputs = partial(channels_to_features, groups)
    if r.is_parameter(weight):
        form = Sharing(
            inputs=lambda x: all_patches(x, geometry),
            outputs=outputs,
            bias=None,
            to_blocks=lambda w: w.reshape(groups, shape[0] // groups, -1),
            from_blocks=lambda blocks: blocks.reshape(shape),
        )
        r.record_linear(y, weight, form, input, f"convolution {geometry}")
    r.record_bias(y, bias, outputs)
    return y


def _embedding(
    r: "OperationRecorder",
    func: Any,
    input: Any,
    weight: Any,
    padding_idx: Any = None,
    max_norm: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not r.is_data(input) or max_norm is not None:
        return NotImplemented
    y = r.run(func, input, weight, padding_idx, max_norm, *args, **kwargs)
    r.record_linear(y, weight, embedding_form(weight, padding_idx), input, "embedding")
    return y


def _normalisation(r: "OperationRecorder", func: Any, *args: Any, **kwargs: Any) -> Any:
    """Normalise without an affine part, then multiply and add."""
    bound = signature(func).bind(*args, **kwargs)
    arguments = bound.arguments
    affine = [(arguments.get("weight"), torch.mul), (arguments.get("bias"), torch.add)]
    arguments.update({name: None for name in ("weight", "bias") if name in arguments})
    y = r.run(func, *bound.args, **bound.kwargs)
    for value, combine in affine:
        if value is None:
            continue
        shape = tuple(value.shape) if func in LAYER_NORMS else (-1,) + (1,) * (y.dim() - 2)
        rows = value.reshape(shape)
        y = r.run(combine, y, r.expand(value, rows.shape, y) if r.is_parameter(value) else rows)
    return y


def _prelu(r: "OperationRecorder", func: Any, x: Any, weight: Any) -> Any:
    slope = weight if weight.numel() == 1 else None
    shape = (1,) if slope is not None else (len(weight),) + (1,) * max(0, x.dim() - 2)
    rows = r.expand(weight, shape, x)
    return r.run(torch.where, x >= 0, x, r.run(torch.mul, x, rows))


def _attention(r: "OperationRecorder", func: Any, *args: Any, **kwargs: Any) -> Any:
    """Expand a mask that was computed from parameters, such as a relative position."""
    names = ("query", "key", "value", "attn_mask")
    arguments = dict(zip(names, args, strict=False)) | kwargs
    mask = arguments.get("attn_mask")
    if not (isinstance(mask, Tensor) and r.is_parameter(mask)):
        return NotImplemented
    if any(r.is_parameter(arguments[name]) for name in names[:3]):
        return NotImplemented
    rows = r.expanded(mask, arguments["query"])
    changed = (*args[:3], rows, *args[4:])
    if "attn_mask" in kwargs:
        changed, kwargs = args, kwargs | {"attn_mask": rows}
    return r.run(func, *changed, **kwargs)


def _multi_head_attention(r: "OperationRecorder", func: Any, *args: Any, **kwargs: Any) -> Any:
    return r.rerun(partial(multi_head_attention, r.linear), *args, **kwargs)


def _recurrent(r: "OperationRecorder", func: Any, *args: Any) -> Any:
    layer = RECURRENT_LAYERS.get(func.__name__) or RECURRENT_CELLS.get(func.__name__)
    if layer is None:
        return NotImplemented
    return r.rerun(partial(layer, r.linear, r.mark_data), *args)


def _index(r: "OperationRecorder", func: Any, value: Any, index: Any) -> Any:
    """Treat a table that is indexed by data as an embedding."""
    if not r.is_parameter(value) or not isinstance(index, Tensor) or value.dim() != 2:
        return NotImplemented
    return _embedding(r, F.embedding, index, value)


LAYER_NORMS = (F.layer_norm, F.rms_norm)
"""Norms of the last dimensions; those of all others have features in the second dimension."""
NORMS = (*LAYER_NORMS, F.group_norm, F.batch_norm, F.instance_norm)

Rule = Callable[..., Any]
RULES: dict[Any, Rule] = {
    F.linear: _linear,
    F.embedding: _embedding,
    F.conv1d: _convolution,
    F.conv2d: _convolution,
    F.conv3d: _convolution,
    F.prelu: _prelu,
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _multi_head_attention,
    **dict.fromkeys(NORMS, _normalisation),
}
"""Rules by function."""

NAMED_RULES: dict[str, Rule] = {
    **dict.fromkeys(("matmul", "mm", "bmm", "rmatmul"), _matmul),
    "addmm": _addmm,
    "einsum": _einsum,
    "prelu": _prelu,
    "getitem": _index,
    **dict.fromkeys((*RECURRENT_LAYERS, *RECURRENT_CELLS), _recurrent),
}
"""Rules by name, for functions that exist several times."""
