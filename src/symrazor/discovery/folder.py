"""The run folder of a discovery.

    RUN/discover.json          the document
    RUN/report.html            the page
    RUN/evidence.png           training loss, evidence and shares
    RUN/architecture.json      the best network, plain: its modules, as JSON
    RUN/network.safetensors    its weights
    RUN/network.pt2            the same network as a torch.export program; never read by symrazor
    RUN/README.txt             how to load and use them

Of trajectories: no evidence.png, but motion.gif, seen and learned trajectories side by side.
With several questions, each network has a folder of its own, by the name of its question.

No file of a run folder runs code: networks are rebuilt from `architecture.json` and
`network.safetensors` (`symrazor.symmetry.architecture`). `torch.export.load` can unpickle, so
`network.pt2` is an output only.
"""

import json
import shutil
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from symrazor.core.files import write_atomically
from symrazor.discovery.document import BYTES, dtype_name
from symrazor.discovery.figures import evidence_figure
from symrazor.discovery.motion import save_motion
from symrazor.discovery.result import Discovery, Found
from symrazor.report.page import write_page
from symrazor.runs.fit_folder import fit_document, fit_network, is_fit_run, is_own_file
from symrazor.runs.fit_run import MAX_NUMBERS
from symrazor.symmetry.architecture import (
    ARCHITECTURE,
    WEIGHTS,
    read_network,
    write_architecture,
)
from symrazor.symmetry.description import UndescribedError
from symrazor.symmetry.export import Format, save_network
from symrazor.symmetry.vocabulary import DTYPES

DOCUMENT, PAGE, PICTURE = "discover.json", "report.html", "evidence.png"
MOTION = "motion.gif"
_README = """What is in this folder, and how to use it.

{files}
Predict, with symrazor:

    symrazor predict {folder} DATA

or without it:

    import torch
    network = torch.export.load("{network}").module()
    outputs = network(x)    # x: {dtype} [n, {shape}]{scale}; outputs: {outputs}

{safety}

The verdict:

{verdict}
"""

_DYNAMICS = """What is in this folder, and how to use it.

    discover.json               all numbers
    report.html                 the page, for a browser
    architecture.json           the learned dynamics, as JSON
    network.safetensors         its weights
    network.pt2                 the same as a torch.export program
{motion}
Move states by one step of the data, without symrazor:

    import torch
    step = torch.export.load("{network}").module()
    later = step(states)    # float64 [n, {size}] -> the same after a time of {dt:g}

{safety}

The verdict:

{verdict}
"""

_SAFETY = """symrazor predict and symrazor export read architecture.json and
network.safetensors, which cannot run code. network.pt2 is an output: symrazor never reads it, and
torch.export.load can run code from a .pt2 file. Load only .pt2 files that you made yourself."""

_UNDESCRIBED = """There is no architecture.json: {reason}
symrazor predict and symrazor export cannot use this network. network.pt2 is the only file to load
it from, and torch.export.load can run code from a .pt2 file. Load only .pt2 files that you made
yourself."""


def save(discovery: Discovery, folder: Path) -> Path:
    """Write a run folder; what was unfinished in it is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    document = discovery.to_dict()
    write_json(folder / DOCUMENT, document)
    if discovery.found:
        evidence_figure([one.answer for one in discovery.found], folder / PICTURE)
    several, safety = len(discovery.found) > 1, _SAFETY
    write_page(document, folder / PAGE)
    for one in discovery.found:
        inner = folder / one.answer.name if several else folder
        inner.mkdir(exist_ok=True)
        example = one.data.x[:8]
        safety = _save_network(one.network.cpu(), inner, example)
    if discovery.found:
        text = _readme(discovery, folder, several, safety)
        write_atomically(folder / "README.txt", text.encode())
    else:
        _save_dynamics(discovery, folder)
    shutil.rmtree(folder / "unfinished", ignore_errors=True)
    return folder


def _save_network(network: nn.Module, folder: Path, example: Tensor) -> str:
    """Write all files of a network, and return what README.txt says about loading them."""
    save_network(network, folder, example, "torch")
    save_network(network, folder, example, "safetensors")
    try:
        write_architecture(network, folder, example)
    except UndescribedError as error:
        return _UNDESCRIBED.format(reason=error)
    return _SAFETY


def _save_dynamics(discovery: Discovery, folder: Path) -> None:
    """The network that moves states by one step, what it does, and how to use it."""
    network, size = discovery.network(), len(discovery.dynamics.found.units.scale)
    generator = torch.Generator().manual_seed(0)
    example = torch.rand(8, size, generator=generator, dtype=torch.float64)
    safety = _save_network(network, folder, example)
    dynamics = discovery.dynamics
    moves = save_motion(dynamics.found.simulator(), dynamics.seen, folder / MOTION)
    shown = f"    {MOTION:<28}trajectories that were seen, and learned ones\n" if moves else ""
    text = _DYNAMICS.format(
        motion=shown,
        folder=folder,
        network=folder / "network.pt2",
        size=size,
        dt=dynamics.dt,
        safety=safety,
        verdict=discovery.verdict,
    )
    write_atomically(folder / "README.txt", text.encode())


def _readme(discovery: Discovery, folder: Path, several: bool, safety: str) -> str:
    one: Found = discovery.found[0]
    name = f"{one.answer.name}/network.pt2" if several else "network.pt2"
    classifies = one.data.task == "classification"
    files = {
        DOCUMENT: "all numbers",
        PAGE: "the page, for a browser",
        PICTURE: "training loss, evidence, what each layer kept",
        name.replace("network.pt2", ARCHITECTURE): "the network to use, as JSON",
        name.replace("pt2", "safetensors"): "its weights",
        name: "the same network as a torch.export program",
    }
    there = {file: text for file, text in files.items() if (folder / file).exists()}
    return _README.format(
        files="\n".join(f"    {file:<28}{text}" for file, text in there.items()) + "\n",
        folder=folder,
        network=folder / name,
        dtype=dtype_name(one.data),
        shape=", ".join(map(str, one.data.x.shape[1:])),
        scale=BYTES if one.data.kind in ("image", "volume", "series") else "",
        outputs="logits of the classes " + ", ".join(one.data.names[:12])
        if classifies
        else "the targets, float64",
        safety=safety,
        verdict=discovery.verdict,
    )


def write_json(file: Path, document: dict[str, Any]) -> None:
    """A document as a file."""
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    write_atomically(file, text.encode())


def read_document(run: Path) -> dict[str, Any]:
    """The document of a run folder, of `symrazor discover` or `symrazor fit`.

    Raises:
        ValueError: no run folder, or a document of another version.
    """
    file = run / DOCUMENT
    if not file.is_file() and is_fit_run(run):
        return fit_document(run)
    if not file.is_file():
        raise ValueError(
            f"expected a run folder with {DOCUMENT}, got {run}; do: symrazor discover --out {run}"
        )
    try:
        found: dict[str, Any] = json.loads(file.read_text())
        schema = found["schema"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"expected a JSON document in {file}, got {error}; do: discover again"
        ) from error
    if schema != 1:
        raise ValueError(f"expected schema 1 in {file}, got {schema!r}; do: update symrazor")
    return found


def input_dtype(document: dict[str, Any]) -> torch.dtype:
    """Return the type of inputs that the network of a discovery takes.

    Raises:
        ValueError: a name of no type.
    """
    name = document["data"].get("dtype", "float32")
    if not isinstance(name, str) or name not in DTYPES:
        raise ValueError(f"{DOCUMENT}: data.dtype is {name!r}, expected one of {', '.join(DTYPES)}")
    return DTYPES[name]


def question_of(document: dict[str, Any], name: str | None) -> dict[str, Any]:
    """The question of a name; without a name, the only one.

    Raises:
        ValueError: no such question, or several to choose from.
    """
    questions: list[dict[str, Any]] = document["questions"]
    names = [question["name"] for question in questions]
    if not questions:
        raise ValueError(
            "expected a run with classes or targets, got one of conserved quantities; do: "
            "symrazor.discovery.folder.load_network(run)(states), which moves states by one step"
        )
    if name is None and len(questions) > 1:
        raise ValueError(
            f"expected one of the questions {names}, got none; do: --question {names[0]}"
        )
    if name is not None and name not in names:
        raise ValueError(f"expected a question among {names}, got {name!r}")
    return questions[0 if name is None else names.index(name)]


def network_folder(run: Path, question: str | None = None) -> Path:
    """Return the folder of a network in the run folder of a discovery.

    Raises:
        ValueError: no such run or question, or a question that is not the name of a folder.
    """
    document = read_document(run)
    if "dynamics" in document:
        return run
    name = question_of(document, question)["name"]
    if len(document["questions"]) == 1:
        return run
    if not isinstance(name, str) or Path(name).name != name:  # "../other", "/other"
        raise ValueError(f"{run / DOCUMENT}: the question {name!r} is not the name of a folder")
    return run / name


def load_network(run: Path, question: str | None = None, trust_code: bool = False) -> nn.Module:
    """Return the plain network of a run folder. No file of the folder runs code.

    Args:
        run: the folder.
        question: which network, if the run answered several questions.
        trust_code: see `symrazor.runs.fit_run.load_run`.

    Raises:
        ValueError: no such run or question, a file that cannot be read, or code without
            `trust_code`.
    """
    if is_fit_run(run):
        return fit_network(run, trust_code)
    folder = network_folder(run, question)
    if not (folder / ARCHITECTURE).is_file():
        raise ValueError(
            f"No such file: {folder / ARCHITECTURE}. symrazor does not read network.pt2, because "
            "that can run code. Run symrazor discover again to write both files."
        )
    return read_network(folder)


def export_network(
    run: Path,
    form: Format,
    out: Path,
    question: str | None = None,
    trust_code: bool = False,
) -> Path:
    """Write the network of a run in a format.

    Args:
        run: the folder.
        form: of the file.
        out: the file.
        question: which network, if the run answered several questions.
        trust_code: see `symrazor.runs.fit_run.load_run`.

    Raises:
        ValueError: a file of the run itself, which would be lost; or as in `load_network`.
    """
    if is_fit_run(run) and is_own_file(run, out):
        raise ValueError(
            f"expected another file than {out}, which is part of the run and would be lost; do: "
            f"--out {out.with_name('plain' + out.suffix)}"
        )
    network = load_network(run, question, trust_code)
    if form == "safetensors" and not is_fit_run(run):  # the file is there, with its metadata
        file = network_folder(run, question) / WEIGHTS
        if out.resolve() != file.resolve():
            write_atomically(out, file.read_bytes())
        return out
    document = read_document(run)
    shape = document["data"]["shape"]
    shape = [len(document["dynamics"]["scale"])] if "dynamics" in document else shape
    if not all(isinstance(n, int) and n > 0 for n in shape) or prod(shape) > MAX_NUMBERS:
        raise ValueError(f"{run / DOCUMENT}: no shape of an input: {str(shape)[:80]}")
    generator = torch.Generator().manual_seed(0)
    example = torch.rand(8, *shape, generator=generator)
    weight = next(network.parameters(), None)
    example = example if weight is None else example.to(weight)
    if not is_fit_run(run):
        example = example.to(input_dtype(document))
    return save_network(network, out, example, form)
