"""Files of a plain network, which load and run without this library.

| format | file | load |
|---|---|---|
| "torch" | .pt2, a torch.export program | `torch.export.load(file).module()` |
| "safetensors" | .safetensors, weights alone | `safetensors.torch.load_model(network, file)` |
| "onnx" | .onnx | `onnxruntime.InferenceSession(file)` |

The number of data is free in programs and ONNX files. A file is read back and compared before it
takes its name, so that it is there whole and right, or not at all.

`torch.export.load` can unpickle, which can run code: load only .pt2 files that you made yourself.
`symrazor.symmetry.architecture` writes and reads networks without that risk.

Adaptive subsampling keeps the largest of several components. Where two are equal up to rounding,
another runtime may keep the other one, and that datum's outputs are then those of a shifted map.
"""

import importlib.util
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from symrazor.core.version import __version__
from symrazor.curvature.tape import Input, call, map_tensors
from symrazor.layers.path import is_symrazor_module

Format = Literal["torch", "safetensors", "onnx"]
SUFFIXES: dict[str, str] = {"torch": ".pt2", "safetensors": ".safetensors", "onnx": ".onnx"}
ONNX_LIMIT = 2**31 - 2**20
"""Bytes: an ONNX file is one protocol buffer, which ends at 2 GiB."""


def save_network(
    plain: nn.Module,
    path: str | Path,
    example_input: Input,
    format: Format | None = None,
    tolerance: float = 1e-5,
) -> Path:
    """Write a plain network to a file.

    Args:
        plain: what `collapse` returned, or any module without layers of this library.
        path: a file, or a folder for "network.pt2", "network.safetensors" or "network.onnx".
        example_input: a batch as the network takes it, for shapes and for the comparison.
        format: "torch", "safetensors" or "onnx"; by default what the suffix of the file says.
        tolerance: largest difference between the outputs of the file, read back, and of the
            network, relative to the largest output.

    Returns:
        The file.

    Raises:
        ValueError: an unknown format, layers of this library, a network in training mode, one that
            is too large for ONNX or that its runtime cannot run, or outputs that differ.
        FileNotFoundError: a folder that does not exist.
        ModuleNotFoundError: packages that the format needs.
    """
    kind, file = _target(Path(path), format)
    ours = sorted({type(m).__name__ for m in plain.modules() if is_symrazor_module(m)})
    if ours:
        inner = (
            "fit.collapse(), the network inside" if "Augmented" in ours else "collapse(model, x)"
        )
        raise ValueError(f"expected a plain network, got layers {ours}; do: {inner}")
    training = [name or "(root)" for name, m in plain.named_modules() if m.training]
    if training:
        raise ValueError(
            f"expected a network in eval mode, got modules in training mode: {training[:8]}; call "
            ".eval() first"
        )
    write = {"torch": _write_program, "safetensors": _write_weights, "onnx": _write_onnx}[kind]
    with torch.no_grad():
        expected = call(plain, example_input)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.name}.") as folder:
        part = Path(folder) / file.name
        again = write(plain, part, example_input)
        with torch.no_grad():
            _compare(again(example_input), expected, tolerance, kind)
        os.replace(part, file)
    return file


def _target(path: Path, format: str | None) -> tuple[str, Path]:
    """The format and the file."""
    known = {suffix: name for name, suffix in SUFFIXES.items()}
    chosen = known.get(path.suffix) if format is None else format
    if chosen not in SUFFIXES:
        raise ValueError(
            f"expected a format in {sorted(SUFFIXES)} or a file ending in {sorted(known)}, got "
            f"format={format!r} and {path.name!r}"
        )
    file = path / f"network{SUFFIXES[chosen]}" if path.is_dir() else path
    if not file.parent.is_dir():
        raise FileNotFoundError(
            f"expected a folder that exists, got {str(file.parent)!r}; do: mkdir -p {file.parent}"
        )
    return chosen, file


def _compare(got: Tensor, expected: Tensor, tolerance: float, format: str) -> None:
    scale = float(expected.abs().max()) or 1.0
    error = float((got.to(expected) - expected).abs().max()) / scale
    if not error <= tolerance:
        raise ValueError(
            f"expected the outputs of the {format} file within {tolerance:g} of the network's, got "
            f"a relative difference of {error:.1e}; nothing was written. Pass a larger tolerance "
            "if that is good enough"
        )


Run = Callable[[Input], Tensor]


def _describe(plain: nn.Module, x: Input) -> str:
    """Shapes, versions and the collapse report as JSON."""
    with torch.no_grad():
        output = call(plain, x)
    about = {
        "symrazor": __version__,
        "torch": str(torch.__version__),
        "input": map_tensors(x, lambda part: ["n", *part.shape[1:]]),
        "output": ["n", *output.shape[1:]],
        "collapse": getattr(plain, "collapse_report", None),
    }
    return json.dumps(about)


def _arguments(x: Input) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Positional and named arguments with two data each, and which of their sizes are free."""
    two = map_tensors(x, lambda part: torch.cat([part[:1], part[:1]]))
    batch = torch.export.Dim("batch")
    free = map_tensors(x, lambda part: {0: batch})
    if isinstance(x, Tensor):
        return (two,), {}, (free,)
    if isinstance(x, Mapping):
        return (), two, free
    return tuple(two), {}, tuple(free)


def _write_program(plain: nn.Module, file: Path, x: Input) -> Run:
    args, kwargs, free = _arguments(x)
    program = torch.export.export(plain, args, kwargs, dynamic_shapes=free)
    torch.export.save(program, file, extra_files={"network.json": _describe(plain, x)})
    # safe although it can unpickle: the file was written above, in a private temporary folder
    again = torch.export.load(file).module()
    return lambda x: call(again, x)


def _write_weights(plain: nn.Module, file: Path, x: Input) -> Run:
    from copy import deepcopy

    from safetensors.torch import load_model, save_model

    save_model(plain, str(file), metadata={"format": "pt", "network": _describe(plain, x)})
    again = deepcopy(plain)
    with torch.no_grad():
        for tensor in again.state_dict().values():
            tensor.zero_()
    load_model(again, str(file))
    return lambda x: call(again, x)


def _write_onnx(plain: nn.Module, file: Path, x: Input) -> Run:
    needed = ("onnx", "onnxscript", "onnxruntime")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(
            f"expected the packages {', '.join(needed)}, got no {', '.join(missing)}; do: "
            "pip install symrazor[onnx]"
        )
    size = sum(tensor.nbytes for tensor in plain.state_dict().values())
    if size > ONNX_LIMIT:
        raise ValueError(f"expected a network below 2 GiB for an ONNX file, got {size:,} bytes")
    args, kwargs, free = _arguments(x)
    with _quiet():
        program = torch.onnx.export(
            plain, args, kwargs=kwargs, dynamic_shapes=free, dynamo=True, verbose=False
        )
    assert program is not None
    program.model.metadata_props["network"] = _describe(plain, x)
    program.save(str(file))
    dtypes = sorted({str(tensor.dtype) for tensor in plain.state_dict().values()})
    return _onnx_session(file, dtypes)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporter says about its own parts, such as a torchvision that is missing."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def _onnx_session(file: Path, dtypes: list[str]) -> Run:
    import onnxruntime

    try:
        session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    except Exception as error:  # classes of its compiled module, without a common base
        raise ValueError(
            f"expected a network that ONNX Runtime has kernels for, got {dtypes}: {error}; nothing "
            "was written. Convert the network and its input first: plain.float(), x.float()"
        ) from error
    names = [value.name for value in session.get_inputs()]

    def run(x: Input) -> Tensor:
        if isinstance(x, Mapping):
            values = [x[name] for name in names]
        else:
            values = [x] if isinstance(x, Tensor) else list(x)
        feed = {k: v.detach().cpu().numpy() for k, v in zip(names, values, strict=True)}
        return torch.from_numpy(session.run(None, feed)[0])

    return run
