"""Closed vocabulary of `architecture.json`: every module, function and method a file may name.

A file can only select entries of these tables. No name from a file is ever imported or looked up on
a module, so reading an architecture cannot run foreign code. To support another layer, add it here
with the types of its constructor arguments.
"""

import builtins
import operator
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

Argument = Literal["int", "ints", "float", "float?", "bool", "padding", "mode", "approximate"]
"""Type of a constructor argument.

"ints" is an integer or a list of integers, "float?" a number or null, "padding" is "ints", "same"
or "valid", "mode" a padding mode of convolutions, "approximate" the option of GELU.
"""

CHOICES: dict[str, tuple[str, ...]] = {
    "padding": ("same", "valid"),
    "mode": ("zeros", "reflect", "replicate", "circular"),
    "approximate": ("none", "tanh"),
}

_CONV: dict[str, Argument] = {
    **{"in_channels": "int", "out_channels": "int", "kernel_size": "ints", "stride": "ints"},
    **{"padding": "padding", "dilation": "ints", "groups": "int", "bias": "bool"},
    "padding_mode": "mode",
}
_POOL: dict[str, Argument] = {
    **{"kernel_size": "ints", "stride": "ints", "padding": "ints", "ceil_mode": "bool"}
}
_MAX_POOL: dict[str, Argument] = {**_POOL, "dilation": "ints"}
_AVERAGE_POOL: dict[str, Argument] = {**_POOL, "count_include_pad": "bool"}
_BATCH_NORM: dict[str, Argument] = {
    **{"num_features": "int", "eps": "float", "momentum": "float?", "affine": "bool"},
    "track_running_stats": "bool",
}
_LAYER_NORM: dict[str, Argument] = {
    **{"normalized_shape": "ints", "eps": "float", "elementwise_affine": "bool", "bias": "bool"}
}
_NOTHING: dict[str, Argument] = {}
_PROBABILITY: dict[str, Argument] = {"p": "float"}
_SIZE: dict[str, Argument] = {"output_size": "ints"}

MODULES: dict[type[nn.Module], dict[str, Argument]] = {
    **dict.fromkeys((nn.Identity, nn.ReLU, nn.Tanh, nn.Sigmoid, nn.SiLU), _NOTHING),
    nn.Linear: {"in_features": "int", "out_features": "int", "bias": "bool"},
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _CONV),
    **dict.fromkeys((nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d), _MAX_POOL),
    **dict.fromkeys((nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d), _AVERAGE_POOL),
    **dict.fromkeys((nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d), _SIZE),
    **dict.fromkeys((nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d), _SIZE),
    nn.Flatten: {"start_dim": "int", "end_dim": "int"},
    nn.Unflatten: {"dim": "int", "unflattened_size": "ints"},
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _BATCH_NORM),
    nn.GroupNorm: {"num_groups": "int", "num_channels": "int", "eps": "float", "affine": "bool"},
    nn.LayerNorm: _LAYER_NORM,
    **dict.fromkeys((nn.Dropout, nn.Dropout2d), _PROBABILITY),
    nn.GELU: {"approximate": "approximate"},
    nn.ELU: {"alpha": "float"},
    nn.LeakyReLU: {"negative_slope": "float"},
    nn.Softplus: {"beta": "float", "threshold": "float"},
}
"""Layers and their constructor arguments, which are also names of their attributes."""

_OPERATORS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "neg", "matmul", "gt", "eq"),
    "getitem",
)
_TORCH = "arange bmm cat einsum gather stack where exp log sin cos tanh sigmoid relu".split()
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in _OPERATORS},
    "attribute": builtins.getattr,  # of `ATTRIBUTES` only
    **{name: getattr(torch, name) for name in _TORCH},
    **{name: getattr(F, name) for name in ("elu", "softplus", "linear", "pad")},
}
"""Functions that a step of a graph may call."""

ATTRIBUTES = ("device", "mT", "shape")
"""Attributes of a tensor that a step may read."""

METHODS = (
    *("abs", "amax", "argmax", "chunk", "clamp_min", "contiguous", "detach", "double", "expand"),
    *("flatten", "float", "mean", "permute", "reshape", "rsqrt", "square", "squeeze", "sum"),
    *("transpose", "type_as", "unflatten", "unsqueeze"),
)
"""Methods of a tensor that a step may call."""

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in ("float16", "bfloat16", "float32", "float64", "int32", "int64", "uint8", "bool")
}
"""Types of tensors."""

CALLS = {
    "placeholder": "input",
    "get_attr": "tensor",
    "call_module": "module",
    "call_function": "function",
    "call_method": "method",
    "output": "output",
}
"""Operations of torch.fx -> what a step calls them."""
