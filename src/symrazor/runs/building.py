"""Build the data and the network that the configuration of a run names."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from symrazor.data import (
    Tensors,
    cifar10,
    digits,
    fashion_mnist,
    mnist,
    normalised,
    on_canvas,
    quadrants,
    read_npz,
)
from symrazor.data.arrays import moments, warn_if_coarse
from symrazor.groups.constructors import from_file, is_group_file
from symrazor.layers.ella import ella_network
from symrazor.layers.plain import convolutional, fully_connected
from symrazor.runs.config import DataConfig, ModelConfig, import_function
from symrazor.symmetry.relax import relax

Split = Literal["train", "test"]


def make_data(config: DataConfig) -> tuple[Tensors, Tensors | None]:
    """Return training and test data; None if there are no test data."""
    train = _read(config, "train")
    test = None if config.name == "npz" and config.test is None else _read(config, "test")
    if config.limit is not None:
        train = (train[0][: config.limit], train[1][: config.limit])
    dtype = getattr(torch, config.dtype)
    if train[0].dtype != dtype:
        columns = train[0].unsqueeze(1) if train[0].ndim == 1 else train[0]
        names = [f"x[:, {k}]" for k in range(columns.shape[1])]
        warn_if_coarse(*moments(columns), dtype, names, str(config.path or config.name))
    return _as_dtype(train, dtype), None if test is None else _as_dtype(test, dtype)


def _as_dtype(data: Tensors, dtype: torch.dtype) -> Tensors:
    x, y = (part.to(dtype) if part.is_floating_point() else part for part in data)
    return x, y


def _read(config: DataConfig, split: Split) -> Tensors:
    """Read one split; the test split places digits on the canvas with another seed."""
    seed = config.seed + (split == "test")
    if config.name == "digits":
        x, y = digits(split)
        return (x, y) if config.task == "plain" else on_canvas(x, y, seed=seed, task=config.task)
    assert config.path is not None
    if config.name == "npz":
        return read_npz(config.path if split == "train" or config.test is None else config.test)
    if config.name == "mnist" and config.task != "plain":
        return quadrants(*mnist(config.path, split), config.task, seed=seed)
    readers = {"mnist": mnist, "fashion-mnist": fashion_mnist, "cifar-10": cifar10}
    x, y = readers[config.name](config.path, split)
    return normalised(x, config.name), y


def outputs_for(likelihood: str, *targets: Tensor) -> int:
    """Return the number of outputs of a network: classes, or columns of the targets."""
    if likelihood == "categorical":
        return 1 + max(int(y.max()) for y in targets)
    return targets[0].shape[1] if targets[0].dim() > 1 else 1


def make_model(
    config: ModelConfig, shape: Sequence[int], outputs: int, dtype: torch.dtype
) -> nn.Module:
    """Build the network, with weights from torch's global random state.

    This runs the code that "package.module:function" names. Call it only for configurations that
    the user gave; for others, see `symrazor.runs.config.refuse_code`.

    Args:
        config: the network.
        shape: shape of one input.
        outputs: number of outputs.
        dtype: number type of the weights.

    Raises:
        ValueError: an unknown network, one that does not fit the inputs, or one without layers to
            relax.
    """
    model: object
    match config.name:
        case "convolutional" if len(shape) == 3:
            model = convolutional(shape, outputs, config.width)
        case "fully-connected":
            model = fully_connected(shape, outputs, config.width)
        case "ella" if len(shape) == 3:
            model = ella_network(config.paths, shape[0], outputs, config.width, shape[-1])
        case name if ":" in name:
            function = import_function(name)
            try:
                model = function(**config.arguments)
            except Exception as error:
                raise ValueError(
                    f"model.name = {name!r}: the call with the arguments {dict(config.arguments)} "
                    f"failed ({type(error).__name__}: {error}). Check the function and "
                    "[model.arguments]."
                ) from error
        case name:
            raise ValueError(
                f"model.name = {name!r} does not fit inputs {list(shape)}. Use 'convolutional' or "
                "'ella' (inputs [channels, height, width]), 'fully-connected' or "
                "'package.module:function'."
            )
    if not isinstance(model, nn.Module):
        raise ValueError(f"{config.name} must return a torch module, got {type(model).__name__}.")
    model = model.to(dtype)
    if config.relax:
        groups = [from_file(g) if is_group_file(g) else g for g in config.groups]
        model = relax(model, torch.zeros(2, *shape, dtype=dtype), groups, config.paths)
    return model
