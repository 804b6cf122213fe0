r"""Save and load the state of a run, atomically and without pickle.

    DIR/step-00000240-epoch-0005/tensors.safetensors    every tensor, under a flat name
    DIR/step-00000240-epoch-0005/state.json             everything else, and where tensors go

A checkpoint is written under a hidden name, flushed to disk and renamed, so that a kill at any
moment leaves the previous checkpoint intact. The last two are kept. Both files have checksums, and
nothing is unpickled: a checkpoint from an untrusted source can contain wrong numbers but no code.

A state is a nested dictionary of tensors, numbers, strings, lists and None. In the JSON file,
{"tensor": NAME} stands for a tensor of the other file and {"by number": {...}} for a dictionary
with integer keys.
"""

import hashlib
import json
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from symrazor.core.errors import OtherRunError
from symrazor.core.files import flush, named, parse_json, reader, remove, temporary_path
from symrazor.core.tensor_files import write_tensors
from symrazor.core.version import __version__
from symrazor.data import TensorLoader
from symrazor.data.streams import Column
from symrazor.inference.razor import Razor
from symrazor.training.options import FitConfig

SCHEMA = 2
N_KEPT = 2
TENSORS, STATE = "tensors.safetensors", "state.json"
NAME = re.compile(r"step-(\d+)-epoch-(\d+)")
UNFINISHED = "unfinished"
MAX_DIFFERENCES = 5
"""Differences that an error message lists."""
IDENTITY_SAMPLES = 64
"""Samples that identify data that are read batch by batch."""

State = dict[str, Any]


class NewerSchemaError(ValueError):
    """A checkpoint of a newer version, which is not damaged."""


class Checkpoints:
    """The checkpoints of one run in one directory; one process at a time may write to it.

    The directory, which must not have other files, is created with the first checkpoint.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        if self.directory.exists() and not self.directory.is_dir():
            raise ValueError(f"{directory} is a file. Pass a directory for the checkpoints.")
        others = [p.name for p in self._entries() if not NAME.fullmatch(p.name)]
        if others and not self.paths():
            raise ValueError(
                f"{directory} contains {sorted(others)[:MAX_DIFFERENCES]} and no checkpoints. Pass "
                "the directory that fit saved to, or a new or empty one."
            )

    def _entries(self) -> list[Path]:
        """Return all entries that are not hidden."""
        entries = self.directory.iterdir() if self.directory.is_dir() else ()
        return [path for path in entries if not path.name.startswith(".")]

    def paths(self) -> list[Path]:
        """Return the checkpoints, oldest first."""
        matches = [match for p in self._entries() if (match := NAME.fullmatch(p.name))]
        matches.sort(key=lambda match: [int(number) for number in match.groups()])
        return [self.directory / match.string for match in matches]

    def save(self, state: State, step: int, epoch: int) -> Path:
        """Write a checkpoint, then remove all but the last two.

        An existing checkpoint of this step and epoch is kept: it has the same content. If the
        directory cannot be written to, OSError is raised and earlier checkpoints are unchanged.
        """
        target = self.directory / f"step-{step:08d}-epoch-{epoch:04d}"
        self.directory.mkdir(parents=True, exist_ok=True)
        for leftover in self.directory.glob(f".{UNFINISHED}.*"):  # of a process that was killed
            remove(leftover)
        if not target.exists():
            temporary = temporary_path(self.directory, UNFINISHED)
            try:
                temporary.mkdir()
                _write(temporary, state)
                os.rename(temporary, target)
            except OSError as error:
                remove(temporary)
                raise named(error, target) from error
            except BaseException:
                remove(temporary)
                raise
            flush(self.directory)
        for outdated in self.paths()[:-N_KEPT]:
            _discard(outdated)
        return target

    def load(self) -> State | None:
        """Return the newest state with all tensors on the CPU, or None if there is none."""
        paths = self.paths()
        if not paths:
            return None
        try:
            return _read(paths[-1])
        except NewerSchemaError:
            raise
        except ValueError as error:
            older = f" to continue from {paths[-2].name}" if len(paths) > 1 else ""
            raise ValueError(f"{error} Remove {paths[-1]}{older}.") from error


def _write(folder: Path, state: State) -> None:
    tensors: dict[str, Tensor] = {}
    plain = _extract_tensors(state, "", tensors)
    _check_serialisable(plain)
    write_tensors(folder / TENSORS, lambda: save_file(tensors, folder / TENSORS))
    document = {
        "schema": SCHEMA,
        "versions": {
            "symrazor": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        "tensors_blake2b": _file_digest(folder / TENSORS),
        "state_blake2b": _state_digest(plain),
        "state": plain,
    }
    (folder / STATE).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for path in (folder / TENSORS, folder / STATE, folder):
        flush(path)


def _discard(checkpoint: Path) -> None:
    """Remove a checkpoint so that a kill leaves no part of it under its name."""
    hidden = temporary_path(checkpoint.parent, UNFINISHED)
    os.rename(checkpoint, hidden)
    remove(hidden)


@reader
def _read(folder: Path) -> State:
    file = folder / STATE
    try:
        document = parse_json(file)
    except OSError as error:
        raise ValueError(f"Cannot read {file}: {error}.") from error
    schema = document.get("schema") if isinstance(document, dict) else None
    if isinstance(schema, int) and schema > SCHEMA:
        version = str((document.get("versions") or {}).get("symrazor", "a newer version"))[:40]
        raise NewerSchemaError(
            f"{file} has schema {schema}, written by symrazor {version}; this version reads schema "
            f"{SCHEMA}. Update symrazor."
        )
    if schema != SCHEMA:
        raise ValueError(f"{file} has the schema {schema}; this version reads schema {SCHEMA}.")
    digest = _state_digest(document.get("state"))
    if document.get("state_blake2b", digest) != digest:
        raise ValueError(f"{file} is damaged: wrong checksum.")
    try:
        if _file_digest(folder / TENSORS) != document["tensors_blake2b"]:
            raise ValueError("wrong checksum")
        state = _insert_tensors(document["state"], load_file(folder / TENSORS))
        return {**state, "versions": dict(document["versions"])}
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"{folder / TENSORS} is damaged: {error}.") from error
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file} is incomplete: {error} is missing.") from error


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _state_digest(plain: Any) -> str:
    text = json.dumps(plain, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _extract_tensors(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Move tensors to `tensors` and replace them by their names.

    Tensors are copied, because safetensors rejects tensors that share memory.
    """
    if isinstance(value, Tensor):
        assert name not in tensors, name
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"tensor": name}
    if isinstance(value, Mapping):
        parts = {
            str(key): _extract_tensors(part, f"{name}/{key}" if name else str(key), tensors)
            for key, part in value.items()
        }
        numbered = bool(value) and all(isinstance(key, int) for key in value)
        return {"by number": parts} if numbered else parts
    if isinstance(value, (list, tuple)):
        return [_extract_tensors(part, f"{name}/{i}", tensors) for i, part in enumerate(value)]
    return value


def _insert_tensors(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Invert `_extract_tensors`."""
    if isinstance(value, dict):
        if value.keys() == {"tensor"} and isinstance(value["tensor"], str):
            return tensors[value["tensor"]].clone()
        if value.keys() == {"by number"}:
            return {int(k): _insert_tensors(v, tensors) for k, v in value["by number"].items()}
        return {k: _insert_tensors(v, tensors) for k, v in value.items()}
    if isinstance(value, list):
        return [_insert_tensors(part, tensors) for part in value]
    return value


def _check_serialisable(value: Any, name: str = "") -> None:
    """Raise ValueError unless JSON can represent a value, such as a module's extra state."""
    if isinstance(value, Mapping | list):
        parts = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, part in parts:
            _check_serialisable(part, f"{name}/{key}".removeprefix("/"))
    elif not isinstance(value, str | int | float | None):
        raise ValueError(
            f"Cannot save {name} in a checkpoint: it is of type {type(value).__name__}. Return "
            "tensors, numbers and strings from get_extra_state, or train without save and resume."
        )


def fingerprint(*tensors: Tensor) -> str:
    """Return a hash of shapes, dtypes and values, equal on all devices."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(f"{list(tensor.shape)} {tensor.dtype}".encode())
        for part in tensor.detach().split(1024):
            digest.update(part.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def describe_tensor(value: object) -> str:
    """Return shape and dtype, as in "[4, 3] float32"; the type name of other values."""
    if not isinstance(value, Tensor | Column):
        return type(value).__name__
    return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"


def compare(name: str, saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raise OtherRunError with the first differences, unless a checkpoint belongs to this run."""
    missing = "nothing"
    differences = [
        f"{key} was {saved.get(key, missing)} and is {current.get(key, missing)}"
        for key in sorted({*saved, *current})
        if saved.get(key, missing) != current.get(key, missing)
    ]
    if differences:
        n_more = len(differences) - MAX_DIFFERENCES
        more = f"; and {n_more} more" if n_more > 0 else ""
        raise OtherRunError(
            f"This run and the checkpoint differ in the {name}: "
            f"{'; '.join(differences[:MAX_DIFFERENCES])}{more}. Continue with the {name} that the "
            "run was started with, or save to a new directory."
        )


def run_identity(razor: Razor, data: TensorLoader, options: FitConfig) -> dict[str, dict[str, Any]]:
    """Return what a resumed run of `fit` must share with its checkpoint."""
    x, y = data.x, data.y
    return {
        "options": options.fixed(),
        "data": {
            "x": describe_tensor(x),
            "y": describe_tensor(y),
            "fingerprint": fingerprint(*_some(x, y)),
        },
        "likelihood": {"class": type(razor.likelihood).__name__},
        "model": {k: describe_tensor(v) for k, v in razor.model.state_dict().items()},
    }


def _some(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return all data in memory, or the first samples of data that are read batch by batch."""
    return (x[:IDENTITY_SAMPLES], y[:IDENTITY_SAMPLES]) if isinstance(x, Column) else (x, y)


def check_identity(saved: State, current: State) -> None:
    """Check that a checkpoint belongs to this run of `fit`; newer options have their defaults."""
    options = FitConfig().fixed() | saved["options"]
    epochs = options["epochs"]
    if epochs != current["options"]["epochs"]:
        raise OtherRunError(
            f"The run was started with epochs={epochs}, got epochs={current['options']['epochs']}. "
            "The learning rate of every step, including those already taken, depends on it. Pass "
            f"epochs={epochs}, or fit the trained model again with a new directory."
        )
    compare("options", options, current["options"])
    for name in ("data", "likelihood", "model"):
        compare(name, saved[name], current[name])


def open_checkpoints(save: str | Path | None, resume: str | Path | None) -> Checkpoints | None:
    """Return the checkpoints to continue from or to save to."""
    if resume is not None:
        return Checkpoints(resume)
    if save is None:
        return None
    checkpoints = Checkpoints(save)
    if checkpoints.paths():
        raise ValueError(
            f"{save} already has the checkpoints of another run. Use resume={str(save)!r} to "
            "continue that run, or choose a new directory."
        )
    return checkpoints
