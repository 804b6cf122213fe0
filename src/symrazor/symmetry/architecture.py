"""Describe plain networks as JSON, and rebuild them from JSON and safetensors.

| file | content |
|---|---|
| `architecture.json` | modules with their arguments, and graphs of tensor operations |
| `network.safetensors` | the weights |

Neither file can run code: a file can only select modules, functions and methods from the closed
tables of `symrazor.symmetry.vocabulary`, and nothing is unpickled. `read_network` builds the
network on the meta device, which allocates no memory, and compares every tensor with the header of
the weights before it reads them.

A module is one of

    {"type": "Conv2d", "arguments": {"in_channels": 1, ...}}         a layer of the vocabulary
    {"type": "Sequential", "children": {"0": ..., "1": ...}}         also "ModuleList"
    {"type": "Module", "children": {...}, "tensors": {...}}          holds tensors and layers
    {"type": "Graph", "children": {...}, "tensors": {...}, "steps": [...]}

A tensor is {"kind": "parameter" or "buffer", "shape": [2, 3], "dtype": "float32"}. A step is
{"call": "input" | "tensor" | "module" | "function" | "method" | "output", "target": name,
"arguments": [...], "keywords": {...}}. An argument {"step": 3} is the result of step 3; JSON lacks
{"tuple": [1, 2]}, {"slice": [start, stop, step]} and {"ellipsis": []}.
"""

import json
import math
import re
from collections.abc import Callable
from keyword import iskeyword
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import fx, nn

from symrazor.core.files import reader, write_atomically
from symrazor.data.batches import Input, call
from symrazor.symmetry.export import UndescribedError, describe
from symrazor.symmetry.vocabulary import (
    ATTRIBUTES,
    CALLS,
    CHOICES,
    DTYPES,
    FUNCTIONS,
    METHODS,
    MODULES,
)

ARCHITECTURE, WEIGHTS = "architecture.json", "network.safetensors"
SCHEMA = 1
MAX_BYTES = 16 * 2**20
MAX_DEPTH = 32
MAX_INTEGER = 2**24
"""Largest magnitude of an integer argument, so that no single size asks for much memory."""
MAX_STRING = 200

_LAYERS = {module.__name__: module for module in MODULES}
_OPS = {name: op for op, name in CALLS.items()}
_WRAPPED: dict[str, Callable[..., Any]] = {
    "tuple": lambda *items: items,
    "slice": slice,
    "ellipsis": lambda: ...,
}
"""Python values that JSON lacks, from the items of a list."""
# Names end up in the source code that torch.fx generates for a graph: letters and digits only.
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*|_(?:tensor|param)_constant[0-9]+|[0-9]+", re.ASCII)


def write_architecture(plain: nn.Module, folder: Path, example: Input) -> None:
    """Write `architecture.json` beside the weights of a network in `network.safetensors`.

    The network, in eval mode, is rebuilt and its outputs on the example are compared before
    `architecture.json` is written. A description of an earlier network is removed if this one
    cannot be described.

    Raises:
        UndescribedError: a network that the vocabulary cannot describe.
    """
    (folder / ARCHITECTURE).unlink(missing_ok=True)
    try:
        description = {"schema": SCHEMA, "network": describe(plain)}
        content = (json.dumps(description, separators=(",", ":"), allow_nan=False) + "\n").encode()
        reread = _load(_parse(content), folder / WEIGHTS)
        with torch.no_grad():
            torch.testing.assert_close(call(reread, example), call(plain, example))
    except (ValueError, AssertionError) as error:
        raise UndescribedError(f"{error}") from error
    write_atomically(folder / ARCHITECTURE, content)


@reader
def read_network(folder: Path) -> nn.Module:
    """Rebuild the network of a folder in eval mode from its two files; run no code from them.

    Raises:
        ValueError: a missing or damaged file, a name outside the vocabulary, or weights that do
            not fit the architecture.
    """
    file, weights = folder / ARCHITECTURE, folder / WEIGHTS
    for required in (file, weights):
        if not required.is_file():
            raise ValueError(f"No such file: {required}. It is needed to rebuild the network.")
    if file.stat().st_size > MAX_BYTES:
        raise ValueError(f"{file}: larger than {MAX_BYTES:,} bytes. Save the run again.")
    try:
        network = _parse(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    return _load(network, weights)


def _load(network: nn.Module, weights: Path) -> nn.Module:
    """Give weights to a network on the meta device, if they fit."""
    _check_tensors(network, weights)
    network.load_state_dict(load_file(weights), assign=True)
    return network.eval()


def _check_tensors(network: nn.Module, weights: Path) -> None:
    """Compare names, shapes and kinds of tensors with the header of the weights."""
    expected = network.state_dict()
    try:
        with safe_open(weights, "pt") as file:
            stored = {name: file.get_slice(name) for name in file.keys()}
            shapes = {name: tuple(entry.get_shape()) for name, entry in stored.items()}
            floats = {
                name: entry.get_dtype() in ("F16", "BF16", "F32", "F64")
                for name, entry in stored.items()
            }
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{weights}: not a safetensors file ({error}).") from error
    if different := sorted(expected.keys() ^ shapes.keys()):
        raise ValueError(
            f"{weights}: tensors do not match {ARCHITECTURE}: {', '.join(different[:4])}. "
            "Tensors that several layers share cannot be described."
        )
    for name, tensor in expected.items():
        if tuple(tensor.shape) != shapes[name] or tensor.is_floating_point() != floats[name]:
            raise ValueError(
                f"{weights}: tensor {name!r} has shape {list(shapes[name])}, but {ARCHITECTURE} "
                f"needs {list(tensor.shape)} of {tensor.dtype}."
            )


def _parse(content: bytes) -> nn.Module:
    """Build a network on the meta device from the bytes of `architecture.json`."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error}).") from error
    _check_keys(document, {"schema", "network"}, "document")
    if document["schema"] != SCHEMA:
        raise ValueError(f"schema {document['schema']!r} instead of {SCHEMA}. Update symrazor.")
    try:
        return _build(document["network"], "network", 0)
    except (RuntimeError, TypeError, KeyError, AttributeError, SyntaxError) as error:
        # raised by torch for arguments of the right type that do not make a module
        raise ValueError(f"no network can be built ({error}).") from error


def _check_object(entry: Any, where: str) -> None:
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: not an object ({type(entry).__name__}).")


def _check_keys(
    entry: Any, keys: set[str], where: str, optional: frozenset[str] = frozenset()
) -> None:
    """Raise ValueError unless an entry is an object with these keys."""
    _check_object(entry, where)
    if not keys <= entry.keys() or not entry.keys() <= keys | optional:
        raise ValueError(f"{where}: the keys must be {sorted(keys)}, got {sorted(entry)[:8]}.")


def _checked_name(name: object, where: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or iskeyword(name):
        raise ValueError(f"{where}: {str(name)[:40]!r} is not allowed as a name.")
    return name


def _build(entry: Any, where: str, depth: int) -> nn.Module:
    if depth > MAX_DEPTH:
        raise ValueError(f"{where}: nested deeper than {MAX_DEPTH} modules.")
    kind = entry.get("type") if isinstance(entry, dict) else None
    if isinstance(kind, str) and kind in _LAYERS:
        _check_keys(entry, {"type", "arguments"}, where)
        return _build_layer(_LAYERS[kind], entry["arguments"], where)
    if kind not in ("Sequential", "ModuleList", "Module", "Graph"):
        raise ValueError(
            f"{where}: {str(kind)[:80]!r} is not a module of the vocabulary, so it is not built. "
            "Do not use this file unless you know where it comes from."
        )
    holds = kind in ("Module", "Graph")
    keys = {"type", "children"} | ({"tensors"} if holds else set())
    _check_keys(entry, keys | ({"steps"} if kind == "Graph" else set()), where)
    _check_object(entry["children"], f"{where}.children")
    module = {"Sequential": nn.Sequential, "ModuleList": nn.ModuleList}.get(kind, nn.Module)()
    for name, child in entry["children"].items():
        inside = f"{where}.{_checked_name(name, where)}"
        module.add_module(name, _build(child, inside, depth + 1))
    if holds:
        _add_tensors(module, entry["tensors"], where)
    return _build_graph(module, entry["steps"], where) if kind == "Graph" else module


def _build_layer(kind: type[nn.Module], arguments: Any, where: str) -> nn.Module:
    """Build a layer of the vocabulary after checking each argument."""
    expected = MODULES[kind]
    _check_keys(arguments, set(expected), f"{where} ({kind.__name__})")
    for name, value in arguments.items():
        if not _has_type(value, expected[name]):
            raise ValueError(
                f"{where} ({kind.__name__}): argument {name} must be {expected[name]}, with "
                f"integers up to {MAX_INTEGER:,}, got {str(value)[:80]!r}."
            )
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in arguments.items()}
    with torch.device("meta"):
        return kind(**options)


def _has_type(value: Any, kind: str) -> bool:
    """Return whether a JSON value has the type required by the vocabulary."""
    if isinstance(value, str):
        return value in CHOICES.get(kind, ())
    number = _is_integer(value) or (isinstance(value, float) and math.isfinite(value))
    several = isinstance(value, list) and 0 < len(value) <= 8 and all(map(_is_integer, value))
    return {
        "bool": isinstance(value, bool),
        "int": _is_integer(value),
        "ints": _is_integer(value) or several,
        "padding": _is_integer(value) or several,
        "float": number,
        "float?": number or value is None,
    }.get(kind, False)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_INTEGER


def _add_tensors(module: nn.Module, tensors: Any, where: str) -> None:
    """Register the tensors of a holder or graph, on the meta device."""
    _check_object(tensors, f"{where}.tensors")
    for name, tensor in tensors.items():
        place = f"{where}.{_checked_name(name, where)}"
        _check_keys(tensor, {"kind", "shape", "dtype"}, place)
        kind, shape, dtype = tensor["kind"], tensor["shape"], tensor["dtype"]
        sizes = isinstance(shape, list) and len(shape) <= 16 and all(map(_is_integer, shape))
        if kind not in ("parameter", "buffer") or not sizes or dtype not in tuple(DTYPES):
            raise ValueError(
                f"{place}: needs the keys kind, shape and dtype, got {str(tensor)[:80]}."
            )
        value = torch.empty(shape, dtype=DTYPES[dtype], device="meta")
        if kind == "parameter":
            trains = value.is_floating_point()
            module.register_parameter(name, nn.Parameter(value, requires_grad=trains))
        else:
            module.register_buffer(name, value)


def _build_graph(root: nn.Module, steps: Any, where: str) -> nn.Module:
    """Build a torch.fx graph from steps of the vocabulary.

    torch.fx turns the graph into Python source. Every name in it is checked here: targets are
    names of tensors and modules of `root`, which `_checked_name` accepted, or entries of the
    vocabulary; arguments are numbers, short strings (quoted by torch.fx) and earlier steps.
    """
    if not isinstance(steps, list) or not steps:
        raise ValueError(f"{where}: the steps must be a list.")
    tensors = {name for name, _ in (*root.named_parameters(), *root.named_buffers())}
    targets: dict[str, Any] = {
        "tensor": tensors,
        "module": {name for name, _ in root.named_modules() if name},
        "function": FUNCTIONS,
        "method": METHODS,
        "output": ("output",),
    }
    graph, nodes = fx.Graph(), []
    for number, step in enumerate(steps):
        place = f"{where}, step {number}"
        _check_keys(step, {"call", "target"}, place, frozenset({"arguments", "keywords"}))
        how, target = step["call"], step["target"]
        args, kwargs = step.get("arguments", []), step.get("keywords", {})
        if not isinstance(args, list) or not isinstance(kwargs, dict):
            raise ValueError(f"{place}: arguments must be a list and keywords an object.")
        if how == "input" and not args and not kwargs:
            nodes.append(graph.placeholder(_checked_name(target, place)))
            continue
        if not isinstance(target, str) or target not in targets.get(str(how), ()):
            raise ValueError(
                f"{place}: {str(how)[:40]} {str(target)[:80]!r} is not in the vocabulary, so it "
                "is not called. Do not use this file unless you know where it comes from."
            )
        if target == "attribute" and (len(args) != 2 or args[1] not in ATTRIBUTES or kwargs):
            raise ValueError(f"{place}: the attribute must be one of {', '.join(ATTRIBUTES)}.")
        values = tuple(_decode(value, nodes, place) for value in args)
        named = {
            _checked_name(key, place): _decode(value, nodes, place) for key, value in kwargs.items()
        }
        function: str | Callable[..., Any] = FUNCTIONS[target] if how == "function" else target
        nodes.append(graph.create_node(_OPS[how], function, values, named))
    if [node.op == "output" for node in nodes] != [False] * (len(nodes) - 1) + [True]:
        raise ValueError(f"{where}: there must be one output, as the last step.")
    graph.lint()
    network = fx.GraphModule(root, graph, "Graph")
    del type(network).__call__  # torch.fx prints tracebacks there; the class is of this network
    return network


def _decode(value: Any, nodes: list[fx.Node], place: str, depth: int = 0) -> Any:
    if value is None or isinstance(value, bool | float) or _is_integer(value):
        return value
    if isinstance(value, str) and len(value) <= MAX_STRING and value.isascii():
        return value
    if isinstance(value, list) and depth < MAX_DEPTH:
        return [_decode(item, nodes, place, depth + 1) for item in value]
    if isinstance(value, dict) and len(value) == 1:
        ((kind, inner),) = value.items()
        if kind == "step" and _is_integer(inner) and 0 <= inner < len(nodes):
            return nodes[inner]
        if kind in _WRAPPED and isinstance(inner, list):
            return _WRAPPED[kind](*_decode(inner, nodes, place, depth + 1))
    raise ValueError(f"{place}: {str(value)[:80]} is not allowed as an argument.")
