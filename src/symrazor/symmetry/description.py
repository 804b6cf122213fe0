"""Describe a plain network as JSON, in the vocabulary of `architecture.json`."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx, nn

from symrazor.accelerate.torch_internals import (
    child_modules,
    has_forward_hooks,
    local_buffers,
    local_parameters,
)
from symrazor.symmetry.vocabulary import CALLS, FUNCTIONS, METHODS, MODULES

_FUNCTION_NAMES = {id(function): name for name, function in FUNCTIONS.items()}


class UndescribedError(ValueError):
    """A network outside the vocabulary of `architecture.json`."""


def describe(module: nn.Module, where: str = "") -> dict[str, Any]:
    """Return the description of a module, as `symrazor.symmetry.architecture` specifies it.

    Args:
        module: the network, or a part of it.
        where: name of the part, for errors.

    Raises:
        UndescribedError: a class, function or argument outside the vocabulary.
    """
    kind, place = type(module), where or "the network"
    if has_forward_hooks(module):
        raise UndescribedError(f"{place} has forward hooks.")
    if kind in MODULES:
        return {"type": kind.__name__, "arguments": _constructor_arguments(module)}
    children = {
        name: describe(child, f"{where}.{name}".lstrip("."))
        for name, child in child_modules(module).items()
        if child is not None
    }
    if kind in (nn.Sequential, nn.ModuleList):
        return {"type": kind.__name__, "children": children}
    held = {"children": children, "tensors": _held_tensors(module)}
    if isinstance(module, fx.GraphModule):
        return {"type": "Graph", **held, "steps": _steps(module.graph, place)}
    if kind is nn.Module:
        return {"type": "Module", **held}
    raise UndescribedError(f"{place} is a {kind.__module__}.{kind.__qualname__}.")


def _constructor_arguments(module: nn.Module) -> dict[str, Any]:
    """Return constructor arguments as JSON values, read from the attributes of a layer."""
    arguments: dict[str, Any] = {}
    for name, kind in MODULES[type(module)].items():
        value = getattr(module, name)
        if name == "bias":
            value = value is not None
        is_list = kind in ("ints", "padding") and _is_list(value)
        arguments[name] = list(value) if is_list else value
    return arguments


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)


def _held_tensors(module: nn.Module) -> dict[str, Any]:
    """Return kind, shape and type of the tensors that a module itself holds."""
    kinds: dict[str, Mapping[str, Tensor | None]]
    kinds = {"parameter": local_parameters(module), "buffer": local_buffers(module)}
    return {
        name: {
            "kind": kind,
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
        }
        for kind, tensors in kinds.items()
        for name, tensor in tensors.items()
        if tensor is not None
    }


def _steps(graph: fx.Graph, place: str) -> list[dict[str, Any]]:
    """Return the nodes of a graph as steps."""
    numbers: dict[fx.Node, int] = {}
    steps: list[dict[str, Any]] = []
    for node in graph.nodes:
        numbers[node] = len(steps)
        target: Any = node.target
        if node.op == "call_function":
            target = _FUNCTION_NAMES.get(id(node.target))
        known = target is not None and (node.op != "call_method" or target in METHODS)
        if not known:
            raise UndescribedError(f"{place} calls {node.target}, which is not in the vocabulary.")
        step: dict[str, Any] = {"call": CALLS[node.op], "target": target}
        if node.args:
            step["arguments"] = [_encode(value, numbers) for value in node.args]
        if node.kwargs:
            step["keywords"] = {k: _encode(value, numbers) for k, value in node.kwargs.items()}
        steps.append(step)
    return steps


def _encode(value: Any, numbers: Mapping[fx.Node, int]) -> Any:
    """Return an argument of a step as a JSON value."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, fx.Node):
        return {"step": numbers[value]}
    if isinstance(value, list):
        return [_encode(item, numbers) for item in value]
    wrapped: dict[str, Any] = {}
    if isinstance(value, tuple):
        wrapped["tuple"] = list(value)
    elif isinstance(value, slice):
        wrapped["slice"] = [value.start, value.stop, value.step]
    elif value is Ellipsis:
        wrapped["ellipsis"] = []
    else:
        raise UndescribedError(f"an argument of type {type(value).__name__} has no description.")
    return {kind: _encode(items, numbers) for kind, items in wrapped.items()}
