# Over 400 lines: one function, `save_network`, with the three formats that it writes.
"""Write a plain network to a file that loads and runs without this library, or describe it as JSON.

| format | file | load |
|---|---|---|
| "torch" | .pt2, a torch.export program | `torch.export.load(file).module()` |
| "safetensors" | .safetensors, weights alone | `safetensors.torch.load_model(network, file)` |
| "onnx" | .onnx | `onnxruntime.InferenceSession(file)` |

Programs and ONNX files accept any batch size. A file is written under a temporary name, read back
and compared; it takes its final name only if the outputs agree.

`torch.export.load` can unpickle, which can run code: load only .pt2 files that you made yourself.
`symrazor.symmetry.architecture` writes and reads networks without that risk; `describe` returns its
JSON description of a network.

Adaptive subsampling keeps the largest of several components. If two are equal up to rounding,
another runtime may keep the other one, and the outputs for this input are then those of a shifted
map.
"""

import copy
import importlib.util
import io
import json
import logging
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, fx, nn

from symrazor.accelerate.torch_internals import (
    child_modules,
    has_forward_hooks,
    local_buffers,
    local_parameters,
)
from symrazor.core.choices import Format
from symrazor.core.files import named, remove, temporary_path
from symrazor.core.tensor_files import with_sorted_metadata, write_tensors
from symrazor.core.version import __version__
from symrazor.data.batches import Input, call, map_tensors
from symrazor.inference.last_layer import LastLayer, recorded_inputs
from symrazor.layers.path import is_symrazor_module
from symrazor.symmetry.vocabulary import CALLS, FUNCTIONS, METHODS, MODULES

SUFFIXES: dict[str, str] = {"torch": ".pt2", "safetensors": ".safetensors", "onnx": ".onnx"}
_FUNCTION_NAMES = {id(function): name for name, function in FUNCTIONS.items()}
MAX_ONNX_BYTES = 2**31 - 2**20
"""Maximal size: an ONNX file is one protocol buffer, which is limited to 2 GiB."""


def save_network(
    plain: nn.Module,
    path: str | Path,
    example_input: Input,
    format: Format | None = None,
    tolerance: float = 1e-5,
    about: Mapping[str, Any] | None = None,
) -> Path:
    """Write a plain network to a file.

    Args:
        plain: a network made by `collapse`, or any module without layers of this library.
        path: a file, or a folder for "network.pt2", "network.safetensors" or "network.onnx".
        example_input: a batch of inputs, for shapes and for the comparison.
        format: "torch", "safetensors" or "onnx"; by default given by the suffix of the file.
        tolerance: maximal difference between the outputs of the file and of the network, relative
            to the largest output.
        about: what the file says about the network, ready for JSON: added to the metadata
            "network". "outputs", a list of names, also names the outputs of ONNX files.

    Returns:
        The path of the file.

    Raises:
        ValueError: if the format is unknown, the network contains layers of this library, is in
            training mode, is too large for ONNX or not supported by its runtime, or if the outputs
            differ.
        FileNotFoundError: if the folder does not exist.
        ModuleNotFoundError: if a package that the format needs is not installed.
    """
    chosen_format, file = _target(Path(path), format)
    ours = sorted(
        {
            type(m).__name__
            for m in plain.modules()
            if is_symrazor_module(m) and not isinstance(m, WithUncertainty)
        }
    )
    if ours:
        inner = (
            "fit.collapse(), which returns the network inside"
            if "Augmented" in ours
            else "collapse(model, x)"
        )
        raise ValueError(
            f"Only plain networks can be saved; this one has the layers {ours}. Use {inner}."
        )
    training = [name or "(root)" for name, m in plain.named_modules() if m.training]
    if training:
        raise ValueError(
            f"The network must be in eval mode, but these modules are in training mode: "
            f"{training[:8]}. Call .eval() first."
        )
    write = {"torch": _write_program, "safetensors": _write_weights, "onnx": _write_onnx}[
        chosen_format
    ]
    with torch.no_grad():
        expected = _call(plain, example_input)
    folder = temporary_path(file.parent, file.name)
    try:
        folder.mkdir()
        temporary = folder / file.name
        reloaded = write(plain, temporary, example_input, about or {})
        with torch.no_grad():
            outputs = reloaded(example_input)
        error = max(map(_relative_error, outputs, expected))
        if not error <= tolerance:
            raise ValueError(
                f"The outputs of the {chosen_format} file differ from those of the network by "
                f"{error:.1e} (relative), more than tolerance={tolerance:g}; nothing was written. "
                "Pass a larger tolerance to accept this."
            )
        os.replace(temporary, file)
    except OSError as error:
        raise named(error, file) from error
    finally:
        remove(folder)
    return file


def _target(path: Path, format: str | None) -> tuple[str, Path]:
    formats = {suffix: name for name, suffix in SUFFIXES.items()}
    chosen = formats.get(path.suffix) if format is None else format
    if chosen not in SUFFIXES:
        raise ValueError(
            f"Unknown format: format={format!r}, file {path.name!r}. Use a format among "
            f"{sorted(SUFFIXES)} or a file ending in {sorted(formats)}."
        )
    file = path / f"network{SUFFIXES[chosen]}" if path.is_dir() else path
    if file.suffix != SUFFIXES[chosen]:
        other = f", or use --format {formats[file.suffix]}" if file.suffix in formats else ""
        raise ValueError(
            f"{file} must end in {SUFFIXES[chosen]} for the format {chosen}. Rename it{other}."
        )
    if not file.parent.is_dir():
        raise FileNotFoundError(
            f"No such folder: {file.parent}. Create it with: mkdir -p {file.parent}"
        )
    return chosen, file


About = Mapping[str, Any]
Run = Callable[[Input], tuple[Tensor, ...]]


def _call(model: Callable[..., Any], x: Input) -> tuple[Tensor, ...]:
    """Return the outputs of a network, or of one with uncertainty."""
    outputs = model(x) if isinstance(x, Tensor) else call(model, x)
    return outputs if isinstance(outputs, tuple) else (call(lambda _: outputs, torch.ones(1)),)


def _relative_error(outputs: Tensor, expected: Tensor) -> float:
    scale = float(expected.abs().max()) or 1.0
    return float((outputs.to(expected) - expected).abs().max()) / scale


def _describe(plain: nn.Module, x: Input, about: About) -> str:
    """Return shapes, versions, the collapse report and what the caller says, as JSON."""
    with torch.no_grad():
        outputs = _call(plain, x)
    description = {
        "symrazor": __version__,
        "torch": str(torch.__version__),
        "input": map_tensors(x, lambda part: ["n", *part.shape[1:]]),
        "output": ["n", *outputs[0].shape[1:]],
        "collapse": getattr(plain, "collapse_report", None),
    }
    return json.dumps({**description, **about})


def _arguments(x: Input) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Return positional and keyword arguments with two inputs each, and their free dimensions."""
    two = map_tensors(x, lambda part: torch.cat([part[:1], part[:1]]))
    batch = torch.export.Dim("batch")
    free = map_tensors(x, lambda part: {0: batch})
    if isinstance(x, Tensor):
        return (two,), {}, (free,)
    if isinstance(x, Mapping):
        return (), two, free
    return tuple(two), {}, tuple(free)


def _write_program(plain: nn.Module, file: Path, x: Input, about: About) -> Run:
    args, kwargs, dynamic_shapes = _arguments(x)
    program = torch.export.export(plain, args, kwargs, dynamic_shapes=dynamic_shapes)
    buffer = io.BytesIO()  # torch aborts the process if its own writer finds the disk full
    torch.export.save(program, buffer, extra_files={"network.json": _describe(plain, x, about)})
    file.write_bytes(buffer.getbuffer())
    # safe although it can unpickle: the file was written above, in a private temporary folder
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # torch 2.11
        reloaded = torch.export.load(file).module()
    return lambda x: _call(reloaded, x)


def _write_weights(plain: nn.Module, file: Path, x: Input, about: About) -> Run:
    metadata = {"format": "pt", "network": _describe(plain, x, about)}
    write_tensors(file, lambda: save_model(plain, str(file), metadata))
    file.write_bytes(with_sorted_metadata(file.read_bytes()))
    reloaded = copy.deepcopy(plain)
    with torch.no_grad():
        for tensor in reloaded.state_dict().values():
            tensor.zero_()
    load_model(reloaded, str(file))
    return lambda x: _call(reloaded, x)


def _write_onnx(plain: nn.Module, file: Path, x: Input, about: About) -> Run:
    packages = ("onnx", "onnxscript", "onnxruntime")
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(
            f"ONNX export needs the packages {', '.join(missing)}. Install them with: "
            "pip install symrazor[onnx]"
        )
    size = sum(tensor.nbytes for tensor in plain.state_dict().values())
    if size > MAX_ONNX_BYTES:
        raise ValueError(
            f"ONNX files are limited to 2 GiB; this network has {size:,} bytes. Use format='torch'."
        )
    args, kwargs, dynamic = _arguments(x)
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)  # the exporter reports its own parts, such as a missing torchvision
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                plain,
                args,
                kwargs=kwargs,
                dynamic_shapes=dynamic,
                input_names=["input"] if isinstance(x, Tensor) else None,
                output_names=about.get("outputs", ["output"]),
                dynamo=True,
                verbose=False,
            )
    finally:
        log.setLevel(level)
    assert program is not None
    program.model.metadata_props["network"] = _describe(plain, x, about)
    for name in ("classes", "targets", "inputs"):
        if about.get(name):
            value = about[name]
            program.model.metadata_props[name] = (
                value if isinstance(value, str) else json.dumps(value)
            )
    program.save(str(file))
    dtypes = sorted({str(tensor.dtype) for tensor in plain.state_dict().values()})
    return _onnx_session(file, dtypes)


def _onnx_session(file: Path, dtypes: list[str]) -> Run:
    import onnxruntime

    try:
        session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    except Exception as error:  # its error classes have no common base
        raise ValueError(
            f"ONNX Runtime cannot run this network of {dtypes}: {error}. Nothing was written. "
            "Convert the network and its input first: plain.float(), x.float()."
        ) from error
    names = [value.name for value in session.get_inputs()]

    def run(x: Input) -> tuple[Tensor, ...]:
        if isinstance(x, Mapping):
            values = [x[name] for name in names]
        else:
            values = [x] if isinstance(x, Tensor) else list(x)
        feed = {k: v.detach().cpu().numpy() for k, v in zip(names, values, strict=True)}
        return tuple(map(torch.from_numpy, session.run(None, feed)))

    return run


class WithUncertainty(nn.Module):
    """A plain network with a second output: the standard deviation of the first.

    It returns (probabilities, epistemic standard deviation) or (means, standard deviation with
    noise), each [n, k], in float64.

    Args:
        network: the plain network.
        posterior: the posterior of its last layer.
    """

    def __init__(self, network: nn.Module, posterior: LastLayer) -> None:
        super().__init__()
        self.network, self.posterior = network, posterior
        for name in ("features", "weights", "outputs", "scale", "noise", "factor"):
            self.register_buffer(name, getattr(posterior, name))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return prediction and standard deviation."""
        head = self.posterior.head
        with recorded_inputs(self.network, head) as inputs:
            f = self.network(x)
        phi = torch.cat([inputs[name] for name in head], 1)
        tensors: dict[str, Any] = dict(self.named_buffers(recurse=False))
        prediction = replace(self.posterior, **tensors).predict(f, phi)
        std = prediction.std
        assert std is not None
        return prediction.mean, std


class UndescribedError(ValueError):
    """A network outside the vocabulary of `architecture.json`."""


def describe(module: nn.Module, where: str = "") -> dict[str, Any]:
    """Return the description of a module, as `symrazor.symmetry.architecture` specifies it.

    Raises `UndescribedError`, with the name `where` of the module, outside of the vocabulary.
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
    for name in MODULES[type(module)]:
        value = getattr(module, name)
        if name == "bias":
            value = value is not None
        arguments[name] = list(value) if isinstance(value, list | tuple) else value
    return arguments


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
    numbers: dict[fx.Node, int] = {}
    steps: list[dict[str, Any]] = []
    for node in graph.nodes:
        numbers[node] = len(steps)
        target: Any = node.target
        if node.op == "call_function":
            target = _FUNCTION_NAMES.get(id(node.target))
        is_known = target is not None and (node.op != "call_method" or target in METHODS)
        if not is_known:
            raise UndescribedError(f"{place} calls {node.target}, which is not in the vocabulary.")
        step: dict[str, Any] = {"call": CALLS[node.op], "target": target}
        if node.args:
            step["arguments"] = [_encode(value, numbers) for value in node.args]
        if node.kwargs:
            step["keywords"] = {k: _encode(value, numbers) for k, value in node.kwargs.items()}
        steps.append(step)
    return steps


def _encode(value: Any, numbers: Mapping[fx.Node, int]) -> Any:
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
