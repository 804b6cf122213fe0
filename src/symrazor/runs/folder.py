"""Read and write the run folders of `symrazor discover` and `symrazor fit`.

| file | command | content |
|---|---|---|
| `discover.json` | discover | the document: all numbers, see docs/how-to/discover.md |
| `report.html`, `evidence.png`, `motion.gif` | discover | report and figures |
| `architecture.json`, `network.safetensors` | discover | the recommended plain network |
| `network.pt2` | discover | the same network as a torch.export program; never read by symrazor |
| `config.toml`, `group-0.json`, ... | fit | the `RunConfig` with all defaults, and its groups |
| `checkpoints/`, `events.jsonl` | fit | state of the training, and a record per epoch |
| `network.safetensors` | fit | weights of the trained network, with its relaxed layers |
| `razor.safetensors` | fit | `prior/...`: log precisions; `likelihood/...`: learned noise |
| `plain/` | fit | the collapsed network, as `architecture.json` and `network.safetensors` |
| `reading.json` | fit | the reading |
| `README.txt` | both | how to use the files |
| `run.json` | both | owner and state of the run; written last (`symrazor.runs.ownership`) |

A discovery with several questions has a subfolder with a network for each of them. The metadata of
`network.safetensors` of a fit are JSON: "input" (shape of one input), "outputs" (of the data),
"width" (outputs of the network), "n_data" (training samples), "symrazor" (version).

No file of a run folder runs code. Networks are rebuilt from `architecture.json` and
`network.safetensors` (`symrazor.symmetry.architecture`). If the network of a fit is a function of
the user, `symrazor.runs.records.load_run` imports it only with `trust_code=True`.
`torch.export.load` can unpickle, so `network.pt2` is an output only.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from symrazor.core.choices import Format
from symrazor.core.files import (
    parse_json,
    reader,
    reading,
    remove,
    with_sorted_metadata,
    write_atomically,
)
from symrazor.core.version import __version__
from symrazor.layers.path import is_symrazor_module
from symrazor.report.content import SCHEMA
from symrazor.report.page import page_html, write_page
from symrazor.runs.config import RunConfig
from symrazor.runs.ownership import (
    MANIFEST,
    UNFINISHED,
    Manifest,
    Owner,
    inside,
    read_manifest,
    seal,
    verify,
    write_manifest,
    writing,
)
from symrazor.runs.records import (
    CHECKPOINTS,
    CONFIG,
    EVENTS,
    MAX_NUMBERS,
    NETWORK,
    RAZOR,
    READING,
    fit_document,
    is_fit_run,
    load_run,
)
from symrazor.symmetry.architecture import (
    ARCHITECTURE,
    WEIGHTS,
    read_network,
    write_architecture,
)
from symrazor.symmetry.collapse import collapse
from symrazor.symmetry.export import UndescribedError, save_network
from symrazor.symmetry.reading import Reading
from symrazor.symmetry.vocabulary import DTYPES
from symrazor.training.evidence_training import outputs
from symrazor.training.fit import Fit

DOCUMENT, PAGE, FIGURE, ANIMATION = "discover.json", "report.html", "evidence.png", "motion.gif"
PROGRAM = "network.pt2"
PLAIN, README = "plain", "README.txt"

_README = """Files of this run

{files}

Predict and export:

    symrazor predict {folder} DATA
    symrazor export {folder}

{usage}
"""
_FIT_FILES = {
    CONFIG: "data, network and training options",
    EVENTS: "a record per epoch",
    READING: "what was learned",
    NETWORK: "weights of the trained network, with all its paths",
    RAZOR: "learned prior precisions and noise",
    CHECKPOINTS: "state of the training, for symrazor fit --resume",
    f"{PLAIN}/{ARCHITECTURE}": "modules of the collapsed network, as JSON",
    f"{PLAIN}/{WEIGHTS}": "weights of the collapsed network",
}
_DISCOVERY_FILES = {
    DOCUMENT: "all numbers",
    PAGE: "the report, for a browser",
    FIGURE: "training loss, evidence, symmetry of each layer",
    ANIMATION: "observed and learned trajectories",
}
_NETWORK_FILES = {
    ARCHITECTURE: "modules of the recommended network, as JSON",
    WEIGHTS: "its weights",
    PROGRAM: "the same network as a torch.export program",
}
_SAFETY = """No file runs code when symrazor reads it. symrazor never reads a .pt2 file, because
torch.export.load can run code from it. Load only .pt2 files that you made yourself."""


# Write


def write_discovery(
    folder: Path, document: dict[str, Any], networks: Mapping[str, tuple[nn.Module, Tensor]]
) -> Path:
    """Write the run folder of a discovery, and remove checkpoints of the unfinished run.

    Args:
        folder: the run folder, owned by the caller (`owned_folder`); figures may already be in it.
        document: all numbers, ready for JSON.
        networks: subfolder ("" for the run folder) -> plain network and example input.
    """
    owner = _owner(folder, Owner("discover"))
    write_manifest(folder, Manifest(owner))
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    write_atomically(inside(folder, DOCUMENT), text.encode())
    write_page(document, inside(folder, PAGE))
    files, undescribed, parts = dict(_DISCOVERY_FILES), "", [DOCUMENT]
    for subfolder, (network, example) in networks.items():
        place = inside(folder, subfolder)
        place.mkdir(exist_ok=True)
        undescribed = _write_network(network, place, example) or undescribed
        names = {(Path(subfolder) / name).as_posix(): name for name in _NETWORK_FILES}
        files |= {path: _NETWORK_FILES[name] for path, name in names.items()}
        parts += [path for path, name in names.items() if name != PROGRAM]
    code = "\n".join(f"    {line}".rstrip() for line in document["load"].splitlines())
    verdicts = [question["verdict"] for question in document["questions"]]
    verdict = "\n".join(verdicts or [document["verdict"]])
    usage = f"Use the network without symrazor, in this folder:\n\n{code}\n\n"
    usage += f"{undescribed}{_SAFETY}\n\nVerdict:\n\n{verdict}"
    _write_readme(folder, files, usage)
    seal(folder, owner, [name for name in parts if (folder / name).is_file()])
    remove(folder / UNFINISHED)
    return folder


def _owner(folder: Path, default: Owner) -> Owner:
    """Return the owner of a folder, which has marked it, or the default."""
    manifest = read_manifest(folder)
    return default if manifest is None else manifest.owner


def _write_network(network: nn.Module, folder: Path, example: Tensor) -> str:
    """Write all files of a network; return a text if it has no description."""
    save_network(network, folder, example, "torch")
    save_network(network, folder, example, "safetensors")
    try:
        write_architecture(network, folder, example)
    except UndescribedError as error:
        consequence = f"symrazor predict and symrazor export cannot use {folder / PROGRAM}."
        return f"There is no {ARCHITECTURE}: {error}\n{consequence}\n\n"
    return ""


def write_fit(
    folder: Path, fit: Fit, stored: RunConfig, x: Tensor, n_outputs: int, groups: Sequence[str]
) -> None:
    """Write the files of a finished fit to a folder that the caller owns.

    Args:
        folder: the run folder; events and groups are already in it.
        fit: the trained network.
        stored: the configuration, with groups as files in the run folder.
        x: training inputs.
        n_outputs: classes, or columns of the targets.
        groups: names of the group files in the run folder.
    """
    model, example = copy.deepcopy(fit.model).cpu().eval(), x[:8].cpu()
    width = outputs(model, example).shape[1]
    record = {"input": list(x.shape[1:]), "outputs": n_outputs, "width": width}
    record |= {"n_data": fit.razor.n_data, "symrazor": __version__}
    metadata = {key: json.dumps(value) for key, value in record.items()}
    parts = {"prior": fit.razor.prior, "likelihood": fit.razor.likelihood}
    learned = {
        f"{name}/{key}": value
        for name, part in parts.items()
        for key, value in part.state_dict().items()
    }
    owner = _owner(folder, Owner("fit"))
    write_manifest(folder, Manifest(owner))
    write_atomically(inside(folder, CONFIG), stored.to_toml().encode())
    weights = with_sorted_metadata(save(_contiguous(fit.model.state_dict()), metadata))
    write_atomically(inside(folder, NETWORK), weights)
    write_atomically(inside(folder, RAZOR), save(_contiguous(learned)))
    undescribed = _write_plain(inside(folder, PLAIN), model, fit.reading, example, stored)
    _write_readme(folder, _FIT_FILES, undescribed + _SAFETY)
    write_atomically(inside(folder, READING), (fit.json + "\n").encode())
    plain = [f"{PLAIN}/{name}" for name in (ARCHITECTURE, WEIGHTS)]
    names = [CONFIG, EVENTS, NETWORK, RAZOR, READING, *groups, *plain]
    seal(folder, owner, [name for name in names if (folder / name).is_file()])


def _write_plain(
    folder: Path, model: nn.Module, reading: Reading, example: Tensor, config: RunConfig
) -> str:
    """Write the collapsed network; return a text if it cannot be written."""
    try:
        plain = plain_network(model, reading, example)
        write_atomically(folder / WEIGHTS, save(_contiguous(plain.state_dict())))
        write_architecture(plain, folder, example)
    except OSError:  # a full disk, for example: the run is not finished, and can be resumed
        raise
    except Exception as error:  # code of the user's network may raise anything; the run is kept
        remove(folder)
        text = f"There is no {PLAIN}/{ARCHITECTURE}: {error}\nsymrazor predict and symrazor export "
        text += f"rebuild the network from {CONFIG}.\n"
        code = config.code().get("model.name")
        if code is not None:
            text += f"{CONFIG} names the code {code}, so both commands need --trust-code.\n"
        return f"{text}\n"
    return ""


def _write_readme(folder: Path, files: Mapping[str, str], usage: str) -> None:
    """Write README.txt with a description of the files that exist."""
    existing = {
        name: text
        for name, text in files.items()
        if (folder / name).exists() or name == READING  # written later
    }
    width = max(map(len, existing), default=0) + 2
    lines = "\n".join(f"    {name:<{width}}{text}" for name, text in existing.items())
    text = _README.format(files=lines, folder=quote(str(folder)), usage=usage)
    write_atomically(inside(folder, README), text.encode())


def plain_network(model: nn.Module, reading: Reading, example: Tensor) -> nn.Module:
    """Return a trained network as plain torch modules, collapsed if it has other layers."""
    if not any(is_symrazor_module(module) for module in model.modules()):
        return model.eval()
    return collapse(model, example, shares=reading)


def _contiguous(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies on the CPU that share no memory."""
    return {
        key: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for key, value in state.items()
    }


# Read


def is_run_file(folder: Path, file: Path) -> bool:
    """Return whether a file is one that a run is read from."""
    names = [MANIFEST, *(verify(folder).files or ())]
    return file.resolve() in {(folder / name).resolve() for name in names}


@reader
def read_document(run: Path) -> dict[str, Any]:
    """Return the document of a run folder of either command; ValueError if it has none."""
    file = run / DOCUMENT
    if verify(run).owner.command == "fit":
        return fit_document(run)
    verify(run, DOCUMENT)
    document = parse_json(file)
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        writer = verify(run).version
        raise ValueError(
            f"{file} has schema {schema!r}, written by symrazor {writer}; this version reads "
            f"schema {SCHEMA}. Update symrazor."
        )
    if not _has_questions(document):
        raise ValueError(f"{file} is damaged: questions or data are missing. Run it again.")
    return dict(document)


def _has_questions(document: dict[str, Any]) -> bool:
    """Return whether a document has the entries that this module and the command read."""
    data, questions = document.get("data"), document.get("questions")
    return (
        isinstance(data, dict)
        and isinstance(data.get("shape"), list)
        and isinstance(document.get("kind"), str)
        and isinstance(document.get("verdict", ""), str)
        and isinstance(questions, list)
        and all(
            isinstance(question, dict)
            and all(isinstance(question.get(key), str) for key in ("name", "question", "verdict"))
            and isinstance(question.get("headline", ""), str)
            and all(_are_names(question.get(key)) for key in ("classes", "targets"))
            for question in questions
        )
    )


def _are_names(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(v, str) for v in value))


def write_report(run: Path, document: dict[str, Any], out: Path | None = None) -> Path:
    """Write the report of a run, by default to `report.html` in its folder."""
    with reading(run):
        page = page_html(document)
    file = inside(run, PAGE) if out is None else out
    with writing(run, file):
        write_atomically(file, page.encode())
    return file


def question_of(document: dict[str, Any], name: str | None) -> dict[str, Any]:
    """Return the question of a name; without a name, the only question; else raise ValueError."""
    questions: list[dict[str, Any]] = document["questions"]
    names = [question["name"] for question in questions]
    if not questions:
        raise ValueError(
            "A run on trajectories predicts no classes or targets. Use "
            "symrazor.runs.folder.load_network(run)(states), which moves states by one time step."
        )
    if name is None and len(questions) > 1:
        raise ValueError(
            f"The run has the questions {', '.join(names)}. Choose one: --question {names[0]}."
        )
    if name is not None and name not in names:
        raise ValueError(f"Unknown question {name!r}. Questions of the run: {', '.join(names)}.")
    return questions[0 if name is None else names.index(name)]


def input_dtype(document: dict[str, Any]) -> torch.dtype:
    """Return the type of inputs that the network of a discovery takes."""
    name = document["data"].get("dtype", "float32")
    if not isinstance(name, str) or name not in DTYPES:
        raise ValueError(
            f"{DOCUMENT}: data.dtype must be one of {', '.join(DTYPES)}, got {name!r}."
        )
    return DTYPES[name]


def network_folder(run: Path, question: str | None = None) -> Path:
    """Return the folder of a network of a discovery; ValueError if there is no such question."""
    document = read_document(run)
    if "dynamics" in document:
        return run
    name = question_of(document, question)["name"]
    if len(document["questions"]) == 1:
        return run
    if not isinstance(name, str) or Path(name).name != name:  # "../other", "/other"
        raise ValueError(f"{run / DOCUMENT}: the question {name!r} is not the name of a folder")
    return inside(run, name)


@reader
def load_network(run: Path, question: str | None = None, trust_code: bool = False) -> nn.Module:
    """Return the plain network of a run folder.

    Args:
        run: the run folder.
        question: name of the question, if the run has several.
        trust_code: see `symrazor.runs.records.load_run`; used only for a fit without a collapsed
            network.

    Raises:
        ValueError: no such run or question, a damaged file, or code without `trust_code`.
    """
    if is_fit_run(run):
        if f"{PLAIN}/{ARCHITECTURE}" in (verify(run).files or ()):
            verify(run, f"{PLAIN}/{ARCHITECTURE}", f"{PLAIN}/{WEIGHTS}")
            return read_network(run / PLAIN)
        loaded = load_run(run, trust_code)
        dtype = getattr(torch, loaded.config.data.dtype)
        return plain_network(loaded.model, loaded.reading, _random_input(loaded.shape).to(dtype))
    folder = network_folder(run, question)
    if not (folder / ARCHITECTURE).is_file():
        raise ValueError(
            f"No such file: {folder / ARCHITECTURE}. symrazor does not read {PROGRAM}, because "
            "that can run code. Run symrazor discover again to write both files."
        )
    verify(run, *((folder / name).relative_to(run).as_posix() for name in (ARCHITECTURE, WEIGHTS)))
    return read_network(folder)


def _random_input(shape: tuple[int, ...]) -> Tensor:
    return torch.rand(8, *shape, generator=torch.Generator().manual_seed(0))


def export_network(
    run: Path, form: Format, out: Path, question: str | None = None, trust_code: bool = False
) -> Path:
    """Write the network of a run in a format.

    Args:
        run: the run folder.
        form: the format.
        out: the file to write.
        question: name of the question, if the run has several.
        trust_code: see `load_network`.

    Raises:
        ValueError: a file that the run is read from, or as in `load_network`.
    """
    if is_run_file(run, out) and not (form == "safetensors" and not is_fit_run(run)):
        other = out.with_name("plain" + out.suffix)
        raise ValueError(f"{out} is part of the run and would be overwritten. Use --out {other}.")
    network = load_network(run, question, trust_code)
    if form == "safetensors" and not is_fit_run(run):  # the file exists, with its metadata
        file = network_folder(run, question) / WEIGHTS
        if out.resolve() != file.resolve():
            with writing(run, out):
                write_atomically(out, file.read_bytes())
        return out
    document = read_document(run)
    shape = document["data"]["shape"]
    shape = [len(document["dynamics"]["scale"])] if "dynamics" in document else shape
    if not all(isinstance(n, int) and n > 0 for n in shape) or prod(shape) > MAX_NUMBERS:
        raise ValueError(f"{run / DOCUMENT}: not the shape of an input: {str(shape)[:80]}")
    example = _random_input(tuple(shape))
    weight = next(network.parameters(), None)
    example = example if weight is None else example.to(weight)
    if not is_fit_run(run):
        example = example.to(input_dtype(document))
    with writing(run, out):
        return save_network(network, out, example, form)
