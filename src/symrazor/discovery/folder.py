"""The run folder of a discovery.

    RUN/discover.json          the document
    RUN/report.html            the page
    RUN/evidence.png           training loss, evidence and shares
    RUN/network.pt2            the best network, plain: torch.export.load(file).module()
    RUN/network.safetensors    its weights alone
    RUN/README.txt             how to load and use them

Of trajectories: no evidence.png, but motion.gif, seen and learned trajectories side by side.
With several questions, each network has a folder of its own, by the name of its question.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from symrazor.core.files import write_atomically
from symrazor.discovery.document import BYTES, dtype_name
from symrazor.discovery.figures import evidence_figure
from symrazor.discovery.motion import save_motion
from symrazor.discovery.result import Discovery, Found
from symrazor.report.page import write_page
from symrazor.runs.fit_folder import fit_document, fit_network, is_fit_run, is_own_file
from symrazor.symmetry.export import SUFFIXES, Format, save_network

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

The verdict:

{verdict}
"""

_DYNAMICS = """What is in this folder, and how to use it.

    discover.json               all numbers
    report.html                 the page, for a browser
    network.pt2                 the learned dynamics, a torch.export program
    network.safetensors         its weights alone
{motion}
Move states by one step of the data, without symrazor:

    import torch
    step = torch.export.load("{network}").module()
    later = step(states)    # float64 [n, {size}] -> the same after a time of {dt:g}

The verdict:

{verdict}
"""


def save(discovery: Discovery, folder: Path) -> Path:
    """Write a run folder; what was unfinished in it is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    document = discovery.to_dict()
    write_json(folder / DOCUMENT, document)
    if discovery.found:
        evidence_figure([one.answer for one in discovery.found], folder / PICTURE)
    several = len(discovery.found) > 1
    write_page(document, folder / PAGE)
    for one in discovery.found:
        inner = folder / one.answer.name if several else folder
        inner.mkdir(exist_ok=True)
        example = one.data.x[:8]
        network = one.network.cpu()
        save_network(network, inner, example, "torch")
        save_network(network, inner, example, "safetensors")
    if discovery.found:
        write_atomically(folder / "README.txt", _readme(discovery, folder, several).encode())
    else:
        _save_dynamics(discovery, folder)
    shutil.rmtree(folder / "unfinished", ignore_errors=True)
    return folder


def _save_dynamics(discovery: Discovery, folder: Path) -> None:
    """The network that moves states by one step, what it does, and how to use it."""
    network, size = discovery.network(), len(discovery.dynamics.found.units.scale)
    generator = torch.Generator().manual_seed(0)
    example = torch.rand(8, size, generator=generator, dtype=torch.float64)
    save_network(network, folder, example, "torch")
    save_network(network, folder, example, "safetensors")
    dynamics = discovery.dynamics
    moves = save_motion(dynamics.found.simulator(), dynamics.seen, folder / MOTION)
    shown = f"    {MOTION:<28}trajectories that were seen, and learned ones\n" if moves else ""
    text = _DYNAMICS.format(
        motion=shown,
        folder=folder,
        network=folder / "network.pt2",
        size=size,
        dt=dynamics.dt,
        verdict=discovery.verdict,
    )
    write_atomically(folder / "README.txt", text.encode())


def _readme(discovery: Discovery, folder: Path, several: bool) -> str:
    one: Found = discovery.found[0]
    name = f"{one.answer.name}/network.pt2" if several else "network.pt2"
    classifies = one.data.task == "classification"
    files = {
        DOCUMENT: "all numbers",
        PAGE: "the page, for a browser",
        PICTURE: "training loss, evidence, what each layer kept",
        name: "the network to use, a torch.export program",
        name.replace("pt2", "safetensors"): "its weights alone",
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
            "torch.export.load('network.pt2').module()(states), which moves states by one step"
        )
    if name is None and len(questions) > 1:
        raise ValueError(
            f"expected one of the questions {names}, got none; do: --question {names[0]}"
        )
    if name is not None and name not in names:
        raise ValueError(f"expected a question among {names}, got {name!r}")
    return questions[0 if name is None else names.index(name)]


def network_file(run: Path, question: str | None = None, form: Format = "torch") -> Path:
    """The file of a network in a run folder.

    Raises:
        ValueError: no such run, question or file.
    """
    document = read_document(run)
    inner = run
    if "dynamics" not in document:
        name = question_of(document, question)["name"]
        inner = run / name if len(document["questions"]) > 1 else run
    file = inner / f"network{SUFFIXES[form]}"
    if not file.is_file():
        raise ValueError(f"expected the network {file}, got none; do: discover again")
    return file


def load_network(run: Path, question: str | None = None) -> nn.Module:
    """The plain network of a run folder.

    Raises:
        ValueError: no such run or question, or a file that cannot be read.
    """
    if is_fit_run(run):
        return fit_network(run)
    file = network_file(run, question)
    try:
        program = torch.export.load(file)
    except Exception as error:  # whatever the archive's reader raises
        raise ValueError(
            f"expected a network in {file}, got {error}; do: discover again"
        ) from error
    module: nn.Module = program.module()
    return module


def export_network(run: Path, form: Format, out: Path, question: str | None = None) -> Path:
    """The network of a run in a format: the file that is there already, or a new one (ONNX).

    Raises:
        ValueError: a file of the run itself, which would be lost.
    """
    if is_fit_run(run) and is_own_file(run, out):
        raise ValueError(
            f"expected another file than {out}, which is part of the run and would be lost; do: "
            f"--out {out.with_name('plain' + out.suffix)}"
        )
    if form != "onnx" and not is_fit_run(run):
        file = network_file(run, question, form)
        if out.resolve() != file.resolve():
            write_atomically(out, file.read_bytes())
        return out
    network = load_network(run, question)
    document = read_document(run)
    shape = document["data"]["shape"]
    shape = [len(document["dynamics"]["scale"])] if "dynamics" in document else shape
    generator = torch.Generator().manual_seed(0)
    example = torch.rand(8, *shape, generator=generator)
    weight = next(network.parameters(), None)
    example = example if weight is None else example.to(weight)
    if not is_fit_run(run):
        example = example.to(getattr(torch, document["data"].get("dtype", "float32")))
    return save_network(_plain(network), out, example, form)


def _plain(network: nn.Module) -> nn.Module:
    """A loaded program, whose flags say that it does not train, which it does not."""
    for module in network.modules():
        module.training = False
    return network
