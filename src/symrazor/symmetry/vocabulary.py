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
    "in_channels": "int",
    "out_channels": "int",
    "kernel_size": "ints",
    "stride": "ints",
    "padding": "padding",
    "dilation": "ints",
    "groups": "int",
    "bias": "bool",
    "padding_mode": "mode",
}
_MAX_POOL: dict[str, Argument] = {
    "kernel_size": "ints",
    "stride": "ints",
    "padding": "ints",
    "dilation": "ints",
    "ceil_mode": "bool",
}
_AVERAGE_POOL: dict[str, Argument] = {
    "kernel_size": "ints",
    "stride": "ints",
    "padding": "ints",
    "ceil_mode": "bool",
    "count_include_pad": "bool",
}
_BATCH_NORM: dict[str, Argument] = {
    "num_features": "int",
    "eps": "float",
    "momentum": "float?",
    "affine": "bool",
    "track_running_stats": "bool",
}

MODULES: dict[type[nn.Module], dict[str, Argument]] = {
    nn.Identity: {},
    nn.Linear: {"in_features": "int", "out_features": "int", "bias": "bool"},
    nn.Conv1d: _CONV,
    nn.Conv2d: _CONV,
    nn.Conv3d: _CONV,
    nn.MaxPool1d: _MAX_POOL,
    nn.MaxPool2d: _MAX_POOL,
    nn.MaxPool3d: _MAX_POOL,
    nn.AvgPool1d: _AVERAGE_POOL,
    nn.AvgPool2d: _AVERAGE_POOL,
    nn.AvgPool3d: _AVERAGE_POOL,
    nn.AdaptiveMaxPool1d: {"output_size": "ints"},
    nn.AdaptiveMaxPool2d: {"output_size": "ints"},
    nn.AdaptiveMaxPool3d: {"output_size": "ints"},
    nn.AdaptiveAvgPool1d: {"output_size": "ints"},
    nn.AdaptiveAvgPool2d: {"output_size": "ints"},
    nn.AdaptiveAvgPool3d: {"output_size": "ints"},
    nn.Flatten: {"start_dim": "int", "end_dim": "int"},
    nn.Unflatten: {"dim": "int", "unflattened_size": "ints"},
    nn.BatchNorm1d: _BATCH_NORM,
    nn.BatchNorm2d: _BATCH_NORM,
    nn.BatchNorm3d: _BATCH_NORM,
    nn.GroupNorm: {"num_groups": "int", "num_channels": "int", "eps": "float", "affine": "bool"},
    nn.LayerNorm: {
        "normalized_shape": "ints",
        "eps": "float",
        "elementwise_affine": "bool",
        "bias": "bool",
    },
    nn.Dropout: {"p": "float"},
    nn.Dropout2d: {"p": "float"},
    nn.ReLU: {},
    nn.Tanh: {},
    nn.Sigmoid: {},
    nn.SiLU: {},
    nn.GELU: {"approximate": "approximate"},
    nn.ELU: {"alpha": "float"},
    nn.LeakyReLU: {"negative_slope": "float"},
    nn.Softplus: {"beta": "float", "threshold": "float"},
}
"""Layers and their constructor arguments, which are also names of their attributes."""

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "neg": operator.neg,
    "matmul": operator.matmul,
    "gt": operator.gt,
    "getitem": operator.getitem,
    "attribute": builtins.getattr,  # of `ATTRIBUTES` only
    "arange": torch.arange,
    "bmm": torch.bmm,
    "cat": torch.cat,
    "einsum": torch.einsum,
    "gather": torch.gather,
    "stack": torch.stack,
    "where": torch.where,
    "exp": torch.exp,
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "elu": F.elu,
    "softplus": F.softplus,
    "linear": F.linear,
    "pad": F.pad,
}
"""Functions that a step of a graph may call."""

ATTRIBUTES = ("device", "mT", "shape")
"""Attributes of a tensor that a step may read."""

METHODS = (
    "abs",
    "amax",
    "argmax",
    "chunk",
    "contiguous",
    "detach",
    "double",
    "expand",
    "flatten",
    "float",
    "mean",
    "permute",
    "reshape",
    "square",
    "squeeze",
    "sum",
    "transpose",
    "unflatten",
    "unsqueeze",
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
