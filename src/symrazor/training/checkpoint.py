r"""Checkpoints: the state of a run as files that are there whole or not at all.

    DIR/step-00000240-epoch-0005/tensors.safetensors    every tensor, under a flat name
    DIR/step-00000240-epoch-0005/state.json             all the rest, and where the tensors belong

A checkpoint is written under a hidden name, flushed to disk and renamed, so that a kill at any
moment leaves the one before; the last two are kept. No file is ever unpickled: a checkpoint from a
stranger can hold wrong numbers but no code.

A state is a nested dictionary of tensors, numbers, strings, lists and None. In the JSON file,
{"tensor": NAME} stands for a tensor of the other file and {"by number": {...}} for a dictionary
with whole numbers as keys.
"""

import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from symrazor.core.files import temporary_path
from symrazor.core.version import __version__

SCHEMA = 1
KEPT = 2
TENSORS, STATE = "tensors.safetensors", "state.json"
NAME = re.compile(r"step-(\d+)-epoch-(\d+)")
UNFINISHED = ".unfinished-"

State = dict[str, Any]


class Checkpoints:
    """The checkpoints of one run in one directory, which one process at a time may write to.

    Args:
        directory: made when it is first written to.

    Raises:
        ValueError: something that is not a directory, or one that holds other things but no
            checkpoint.
    """

    def __init__(self, directory: str | Path) -> None:
        """Look at the directory; see the class."""
        self.directory = Path(directory)
        if self.directory.exists() and not self.directory.is_dir():
            raise ValueError(f"expected a directory for checkpoints, got the file {directory}")
        others = [p.name for p in self._entries() if not NAME.fullmatch(p.name)]
        if others and not self.found():
            raise ValueError(
                f"expected a directory with checkpoints, or an empty one, got {directory} with "
                f"{sorted(others)[:5]}; do: pass the directory that fit saved to, or a new one"
            )

    def _entries(self) -> list[Path]:
        """What is there, hidden files left out."""
        there = self.directory.iterdir() if self.directory.is_dir() else ()
        return [path for path in there if not path.name.startswith(".")]

    def found(self) -> list[Path]:
        """The checkpoints, oldest first."""
        return sorted((p for p in self._entries() if NAME.fullmatch(p.name)), key=_order)

    def save(self, state: State, step: int, epoch: int) -> Path:
        """Write a checkpoint, then remove all but the last two.

        Where there is one of this step and epoch already, it stays: it holds the same run.

        Returns:
            The directory of the checkpoint.

        Raises:
            OSError: the directory cannot be written to; earlier checkpoints are untouched.
        """
        target = self.directory / f"step-{step:08d}-epoch-{epoch:04d}"
        self.directory.mkdir(parents=True, exist_ok=True)
        for rest in self.directory.glob(f"{UNFINISHED}*"):  # of a process that was killed
            shutil.rmtree(rest, ignore_errors=True)
        if not target.exists():
            part = temporary_path(self.directory, UNFINISHED)
            try:
                part.mkdir()
                _write(part, state)
                os.rename(part, target)
            except BaseException:
                shutil.rmtree(part, ignore_errors=True)
                raise
            _flush(self.directory)
        for old in self.found()[:-KEPT]:
            shutil.rmtree(old)
        return target

    def load(self) -> State | None:
        """The newest state, all tensors on the CPU; None if there is none.

        Raises:
            ValueError: a checkpoint that is damaged or of another schema.
        """
        found = self.found()
        if not found:
            return None
        try:
            return _read(found[-1])
        except ValueError as error:
            older = f", to continue from {found[-2].name}" if len(found) > 1 else ""
            raise ValueError(f"{error}; do: remove {found[-1]}{older}") from error


def _order(path: Path) -> tuple[int, ...]:
    match = NAME.fullmatch(path.name)
    assert match is not None
    return tuple(map(int, match.groups()))


def _write(folder: Path, state: State) -> None:
    """Both files, on disk and not only on their way there."""
    tensors: dict[str, Tensor] = {}
    plain = _take_apart(state, "", tensors)
    _check_plain(plain)
    try:
        save_file(tensors, folder / TENSORS)
    except SafetensorError as error:  # what it makes of a full disk
        raise OSError(f"{folder / TENSORS}: {error}") from error
    document = {
        "schema": SCHEMA,
        "versions": {
            "symrazor": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        "tensors_blake2b": _digest(folder / TENSORS),
        "state_blake2b": _digest_of(plain),
        "state": plain,
    }
    (folder / STATE).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for path in (folder / TENSORS, folder / STATE, folder):
        _flush(path)


def _read(folder: Path) -> State:
    try:
        document = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # no file, no text, no JSON
        raise ValueError(f"expected a whole {STATE} in {folder}, got: {error}") from error
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"expected schema {SCHEMA} in {folder / STATE}, got {schema}")
    digest = _digest_of(document.get("state"))
    if document.get("state_blake2b", digest) != digest:  # older ones have none
        raise ValueError(f"expected a whole {STATE} in {folder}, got another checksum of its state")
    try:
        digest = _digest(folder / TENSORS)
        if digest != document["tensors_blake2b"]:
            raise ValueError(f"checksum {digest[:12]}... instead of the one in {STATE}")
        state = _put_together(document["state"], load_file(folder / TENSORS))
        return {**state, "versions": dict(document["versions"])}
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"expected a whole {TENSORS} in {folder}, got: {error}") from error
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"expected a whole {STATE} in {folder}, got one without {error}"
        ) from error


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _digest_of(plain: Any) -> str:
    text = json.dumps(plain, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _flush(path: Path) -> None:
    """Let the disk have it, where the system can (a directory cannot be opened on Windows)."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _take_apart(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Move tensors into `tensors` and leave their names; a copy each, for none may share memory."""
    if isinstance(value, Tensor):
        assert name not in tensors, name
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"tensor": name}
    if isinstance(value, Mapping):
        parts = {
            str(key): _take_apart(part, f"{name}/{key}" if name else str(key), tensors)
            for key, part in value.items()
        }
        numbered = bool(value) and all(isinstance(key, int) for key in value)
        return {"by number": parts} if numbered else parts
    if isinstance(value, (list, tuple)):
        return [_take_apart(part, f"{name}/{i}", tensors) for i, part in enumerate(value)]
    return value


def _check_plain(value: Any, name: str = "") -> None:
    """Refuse what JSON has no words for: a module may return anything as its extra state.

    Raises:
        ValueError: names it.
    """
    if isinstance(value, Mapping | list):
        parts = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, part in parts:
            _check_plain(part, f"{name}/{key}".removeprefix("/"))
    elif not isinstance(value, str | int | float | None):
        raise ValueError(
            f"expected tensors, numbers and strings in a checkpoint, got {type(value).__name__} as "
            f"{name}; do: return such from get_extra_state, or train without save and resume"
        )


def _put_together(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `_take_apart`."""
    if isinstance(value, dict):
        if value.keys() == {"tensor"} and isinstance(value["tensor"], str):
            return tensors[value["tensor"]].clone()
        if value.keys() == {"by number"}:
            return {int(k): _put_together(v, tensors) for k, v in value["by number"].items()}
        return {k: _put_together(v, tensors) for k, v in value.items()}
    if isinstance(value, list):
        return [_put_together(part, tensors) for part in value]
    return value


def fingerprint(*tensors: Tensor) -> str:
    """A hash of shapes, types and values, the same on every device; reads about a GB a second."""
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        found.update(f"{list(tensor.shape)} {tensor.dtype}".encode())
        for part in tensor.detach().split(1024):
            found.update(part.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def compare(name: str, expected: Mapping[str, Any], got: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that belongs to something else.

    Args:
        name: what is compared, for the message.
        expected: of the checkpoint, by name.
        got: of the run that is to continue from it.

    Raises:
        ValueError: with the differences, five at most.
    """
    missing = "(nothing)"
    different = [
        f"{key}: expected {expected.get(key, missing)}, got {got.get(key, missing)}"
        for key in sorted({*expected, *got})
        if expected.get(key, missing) != got.get(key, missing)
    ]
    if different:
        more = f" and {len(different) - 5} more" if len(different) > 5 else ""
        raise ValueError(
            f"expected the {name} of the checkpoint, got a difference in "
            f"{'; '.join(different[:5])}{more}; do: pass what the run was started with, or save to "
            "a new directory"
        )
