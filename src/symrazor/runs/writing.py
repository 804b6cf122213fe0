# Over 400 lines: all that writes to a run folder, so that nothing passes by its lock.
"""Write run folders: one owner, one writer at a time, and a seal over the parts.

`run.json` says which command owns a folder, with which arguments, and whether the run is finished.
It is the last file that a run writes, and it has the SHA-256 sum of every file that symrazor reads
from the folder. So a run becomes visible as a whole: a folder in which a process was killed is
unfinished, and files of two runs are never read together.

    {"schema": 1, "command": "fit", "arguments": {...}, "state": "finished",
     "symrazor": "0.1.0", "files": {"config.toml": "9f86d0...", ...}}

While another run is deleted from the folder, the state is "clearing", with the files to delete.

`symrazor.runs.folder` lists the files. `write_discovery` writes those of a discovery, and
`symrazor.runs.training` those of a fit.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from shlex import quote
from typing import Any, Literal

from torch import Tensor, nn

from symrazor.core.files import (
    LOCK,
    check_writable_folder,
    flush,
    is_locked_here,
    is_temporary,
    locked,
    parse_json,
    reader,
    refuse_pipe,
    remove,
    write_atomically,
)
from symrazor.core.version import __version__
from symrazor.inference.last_layer import UNCERTAINTY, LastLayer, write_posterior
from symrazor.report.page import write_page
from symrazor.symmetry.architecture import ARCHITECTURE, WEIGHTS, write_architecture
from symrazor.symmetry.export import UndescribedError, save_network

Command = Literal["discover", "fit"]
COMMANDS = ("discover", "fit")
DOCUMENT, PAGE, FIGURE, ANIMATION = "discover.json", "report.html", "evidence.png", "motion.gif"
PROGRAM = "network.pt2"
PLAIN, README = "plain", "README.txt"
DEFAULT_FOLDER = "run"
MANIFEST, UNFINISHED = "run.json", "unfinished"
SCHEMA = 1
MAX_MANIFEST_BYTES = 1 << 24
OUTPUTS = (
    *("README.txt", "report.html", "evidence.png", "motion.gif", "discover.json"),
    *("config.toml", "events.jsonl", "reading.json", "razor.safetensors", "architecture.json"),
    *(f"{stem}.{end}" for stem in ("network", "plain") for end in ("pt2", "onnx", "safetensors")),
    *("network.onnx.data", "plain.onnx.data", UNCERTAINTY),
    *("checkpoints", "plain", UNFINISHED),
)
"""Files and folders that symrazor writes to a run folder, besides groups and questions."""
_PARTS_OF_EARLIER_VERSIONS = ("discover.json", "config.toml")
_README = """Files of this run

{files}

Predict and export:

    symrazor predict {folder} DATA
    symrazor export {folder}

{usage}
"""
_DISCOVERY_FILES = {
    DOCUMENT: "all numbers",
    PAGE: "the report, for a browser",
    FIGURE: "training loss, evidence, symmetry of each layer",
    ANIMATION: "observed and learned trajectories",
}
_NETWORK_FILES = {
    ARCHITECTURE: "modules of the recommended network, as JSON",
    WEIGHTS: "its weights",
    UNCERTAINTY: "posterior of its last layer, for the uncertainty of predictions",
    PROGRAM: "the same network as a torch.export program",
}
SAFETY = """No file runs code when symrazor reads it. symrazor never reads a .pt2 file, because
torch.export.load can run code from it. Load only .pt2 files that you made yourself."""
_SUM = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Owner:
    """A command and the arguments that its result depends on, ready for JSON."""

    command: Command
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """The content of `run.json`.

    `files` is None for an unfinished run, and `cleared` unless a former run is being deleted.
    `version` is that of symrazor when the run was written.
    """

    owner: Owner
    files: Mapping[str, str] | None = None
    cleared: Mapping[str, str] | None = None
    version: str = __version__

    def describe(self) -> str:
        """Return the state and the command, for an error message."""
        state = "an unfinished" if self.files is None else "a finished"
        return f"{state} run of symrazor {self.owner.command}"


def inside(folder: Path, name: str) -> Path:
    """Return folder / name; ValueError if it leads out of the folder, or is a pipe or a device."""
    path = folder / name
    if PurePosixPath(name).is_absolute() or not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(
            f"{path} leads out of the run folder, to {path.resolve()}. Links and absolute names in "
            "a run folder are not followed. Remove it."
        )
    refuse_pipe(path)
    return path


@reader
def read_manifest(folder: Path) -> Manifest | None:
    """Return the content of `run.json`, or None if there is none; ValueError if it is damaged."""
    file = inside(folder, MANIFEST)
    if not file.is_file():
        return None
    document = parse_json(file, MAX_MANIFEST_BYTES)
    schema = document.get("schema") if isinstance(document, dict) else None
    if isinstance(schema, int) and schema > SCHEMA:
        version = str(document.get("symrazor", "a newer version"))[:40]
        raise ValueError(
            f"{file} has schema {schema}, written by symrazor {version}; this version reads up to "
            f"schema {SCHEMA}. Update symrazor."
        )
    files = document.get("files") if isinstance(document, dict) else None
    is_valid = (
        schema == SCHEMA
        and document.get("command") in COMMANDS
        and document.get("state") in ("finished", "unfinished", "clearing")
        and isinstance(document.get("arguments"), dict)
        and isinstance(files, dict)
        and all(isinstance(s, str) and _SUM.fullmatch(s) for s in files.values())
    )
    if not is_valid:
        raise ValueError(f"{file} is damaged. Run the command again with another --out.")
    owner = Owner(document["command"], document["arguments"])
    state, version = document["state"], str(document.get("symrazor"))[:40]
    finished = files if state == "finished" else None
    return Manifest(owner, finished, files if state == "clearing" else None, version)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `run.json`."""
    state = "unfinished" if manifest.files is None else "finished"
    document = {
        "schema": SCHEMA,
        "command": manifest.owner.command,
        "arguments": manifest.owner.arguments,
        "state": state if manifest.cleared is None else "clearing",
        "symrazor": manifest.version,
        "files": manifest.files or manifest.cleared or {},
    }
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    write_atomically(inside(folder, MANIFEST), text.encode())


def seal(folder: Path, owner: Owner, names: Sequence[str]) -> None:
    """Declare a run finished: flush its parts to disk and store their sums."""
    files = {}
    for name in names:
        path = inside(folder, name)
        flush(path)
        flush(path.parent)
        files[name] = digest(path)
    write_manifest(folder, Manifest(owner, files))


def choose_folder(out: Path | None, owner: Owner, overwrite: bool) -> Path:
    """Return the run folder of a command: the given one, or the first free of run, run-2, ...

    A folder is free if it has no run, or an unfinished run of the same command, which is resumed.
    """
    if out is not None:
        return out
    number = 1
    while True:
        folder = Path(DEFAULT_FOLDER if number == 1 else f"{DEFAULT_FOLDER}-{number}")
        if overwrite or not folder.is_dir() or _problem(folder, owner) is None:
            return folder
        number += 1


@contextmanager
def owned_folder(
    folder: Path, owner: Owner, overwrite: bool = False, resume: bool = False
) -> Iterator[None]:
    """Create, lock and mark a run folder; remove it again if the work fails and leaves no files.

    Args:
        folder: the run folder.
        owner: the command that writes to it.
        overwrite: delete a run in the folder first.
        resume: accept an unfinished or finished run of the same command with other arguments.

    Raises:
        ValueError: the folder belongs to another run, or another process writes to it.
    """
    if is_locked_here(folder):  # by a caller
        yield
        return
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    check_writable_folder(folder)
    try:
        with locked(folder):
            problem = _problem(folder, owner, resume)
            if problem is not None and not overwrite:
                raise ValueError(problem)
            manifest = read_manifest(folder)
            is_cleared = manifest is not None and manifest.cleared is not None
            if problem is not None or is_cleared:
                _delete_run(folder, owner, manifest)
            remove_temporaries(folder)
            check_links(folder)
            present = _names(folder)
            is_new = problem is not None or manifest is None or is_cleared
            if is_new:
                write_manifest(folder, Manifest(owner))
            try:
                yield
            except BaseException:
                if is_new and _names(folder) <= present:  # nothing to resume
                    remove(folder / MANIFEST)
                raise
    except BaseException:
        with suppress(OSError):  # a folder with files stays
            for path in created:
                path.rmdir()
        raise


@contextmanager
def writing(folder: Path, file: Path) -> Iterator[None]:
    """Lock the folder of a finished run while a further file is written, if that is inside."""
    if not file.resolve().is_relative_to(folder.resolve()):
        yield
        return
    with locked(folder):
        remove_temporaries(folder)
        yield


def remove_temporaries(folder: Path) -> None:
    """Remove what a process that was killed while it wrote to a run folder has left."""
    for path in [*folder.glob("*"), *folder.glob("*/*")]:
        if is_temporary(path.name) and not path.parent.is_symlink():
            remove(path)


def check_links(folder: Path) -> None:
    """Raise ValueError if a link in a place that a run writes to leads out of the folder."""
    for name in OUTPUTS:
        inside(folder, name)
        for place, folders, files in os.walk(folder / name):
            for path in (Path(place, inner) for inner in (*folders, *files)):
                if path.is_symlink():
                    inside(folder, path.relative_to(folder).as_posix())


def _problem(folder: Path, owner: Owner, resume: bool = False) -> str | None:
    """Return why a folder cannot be used by an owner, or None."""
    action = "Add --overwrite to delete it, or use another --out."
    manifest = read_manifest(folder)
    if manifest is None:
        if any((folder / name).exists() for name in _PARTS_OF_EARLIER_VERSIONS):
            return f"{folder} has files of another run without a {MANIFEST}. {action}"
        return None
    is_same = manifest.owner == owner
    if manifest.owner.command == owner.command and (resume or (manifest.files is None and is_same)):
        return None
    if manifest.files is not None and (folder / UNFINISHED).is_dir():
        remove(folder / UNFINISHED)  # of a process that was killed after it had finished the run
    if manifest.owner.command == "fit" == owner.command:
        action = "Add --resume or --overwrite, or use another --out."
    return f"{folder} already has {manifest.describe()}. {action}"


def _delete_run(folder: Path, owner: Owner, manifest: Manifest | None) -> None:
    """Delete the files of a run; other files in the folder are kept.

    The folder is first marked for its new owner with the state "clearing": if the process is
    killed, no reader mistakes the remaining files for a run, and the next process deletes them.
    """
    files = None if manifest is None else manifest.files or manifest.cleared
    write_manifest(folder, Manifest(owner, cleared=files or {}))
    places = {folder, *(inside(folder, name).parent for name in files or ())}
    for name in files or ():
        remove(inside(folder, name))
    for place in sorted(places, reverse=True):
        for name in OUTPUTS:
            remove(place / name)
        if place != folder and place.is_dir() and not any(place.iterdir()):
            place.rmdir()


def _names(folder: Path) -> set[str]:
    """Return the names of all files except those of this module."""
    return {path.name for path in folder.iterdir()} - {MANIFEST, LOCK}


def digest(path: Path) -> str:
    """Return the SHA-256 sum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_discovery(
    folder: Path,
    document: dict[str, Any],
    networks: Mapping[str, tuple[nn.Module, Tensor]],
    posteriors: Mapping[str, LastLayer | None],
) -> Path:
    """Write the run folder of a discovery, and remove checkpoints of the unfinished run.

    Args:
        folder: the run folder, owned by the caller (`owned_folder`); figures may already be in it.
        document: all numbers, ready for JSON.
        networks: subfolder ("" for the run folder) -> plain network and example input.
        posteriors: subfolder -> posterior of the last layer of its network, if it has one.
    """
    owner = owner_of_folder(folder, Owner("discover"))
    write_manifest(folder, Manifest(owner))
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    write_atomically(inside(folder, DOCUMENT), text.encode())
    write_page(document, inside(folder, PAGE))
    files, undescribed, parts = dict(_DISCOVERY_FILES), "", [DOCUMENT]
    for subfolder, (network, example) in networks.items():
        place = inside(folder, subfolder)
        place.mkdir(exist_ok=True)
        name = subfolder or None
        undescribed = _write_network(network, place, example, about(document, name)) or undescribed
        posterior = posteriors.get(subfolder)
        remove(place / UNCERTAINTY)
        if posterior is not None:
            write_posterior(posterior, place)
        names = {(Path(subfolder) / name).as_posix(): name for name in _NETWORK_FILES}
        files |= {path: _NETWORK_FILES[name] for path, name in names.items()}
        parts += [path for path, name in names.items() if name != PROGRAM]
    code = "\n".join(f"    {line}".rstrip() for line in document["load"].splitlines())
    verdicts = [question["verdict"] for question in document["questions"]]
    verdict = "\n".join(verdicts or [document["verdict"]])
    usage = f"Use the network without symrazor, in this folder:\n\n{code}\n\n"
    usage += f"{undescribed}{SAFETY}\n\nVerdict:\n\n{verdict}"
    write_readme(folder, files, usage)
    seal(folder, owner, [name for name in parts if (folder / name).is_file()])
    remove(folder / UNFINISHED)
    return folder


def owner_of_folder(folder: Path, default: Owner) -> Owner:
    """Return the owner of a folder, which has marked it, or the default."""
    manifest = read_manifest(folder)
    return default if manifest is None else manifest.owner


def about(document: Mapping[str, Any], question: str | None) -> dict[str, Any]:
    """Return what a file says about the network of a question of a document."""
    data, questions = document["data"], document["questions"]
    entry: dict[str, Any] = next((q for q in questions if question in (None, q["name"])), {})
    classes, targets = entry.get("classes") or [], entry.get("targets") or []
    shape = ", ".join(map(str, data["shape"]))
    dtype, kind = data.get("dtype", "float32"), document["kind"]
    scaled = kind in ("image", "volume", "series") and dtype != "float64"
    inputs = f"{kind}, {dtype} [n, {shape}]{', bytes divided by 255' if scaled else ''}"
    outputs = ["logits"] if classes else ["targets"] if questions else ["states"]
    return {"inputs": inputs, "classes": classes, "targets": targets, "outputs": outputs}


def _write_network(
    network: nn.Module, folder: Path, example: Tensor, described: Mapping[str, Any]
) -> str:
    """Write all files of a network; return a text if it has no description."""
    save_network(network, folder, example, "torch", about=described)
    save_network(network, folder, example, "safetensors", about=described)
    try:
        write_architecture(network, folder, example)
    except UndescribedError as error:
        consequence = f"symrazor predict and symrazor export cannot use {folder / PROGRAM}."
        return f"There is no {ARCHITECTURE}: {error}\n{consequence}\n\n"
    return ""


def write_readme(
    folder: Path, files: Mapping[str, str], usage: str, pending: Sequence[str] = ()
) -> None:
    """Write README.txt with a description of the files that exist or are still to be written."""
    existing = {
        name: text for name, text in files.items() if (folder / name).exists() or name in pending
    }
    width = max(map(len, existing), default=0) + 2
    lines = "\n".join(f"    {name:<{width}}{text}" for name, text in existing.items())
    text = _README.format(files=lines, folder=quote(str(folder)), usage=usage)
    write_atomically(inside(folder, README), text.encode())
