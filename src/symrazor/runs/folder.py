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
| `uncertainty.safetensors` | both | posterior of the last layer of the plain network |
| `README.txt` | both | how to use the files |
| `run.json` | both | owner and state of the run; written last (`symrazor.runs.writing`) |

A discovery with several questions has a subfolder with a network for each of them. The metadata of
`network.safetensors` of a fit are JSON: "input" (shape of one input), "outputs" (of the data),
"width" (outputs of the network), "n_data" (training samples), "symrazor" (version).

No file of a run folder runs code. Networks are rebuilt from `architecture.json` and
`network.safetensors` (`symrazor.symmetry.architecture`). If the network of a fit is a function of
the user, `symrazor.runs.records.load_run` imports it only with `trust_code=True`.
`torch.export.load` can unpickle, so `network.pt2` is an output only.
"""

from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from symrazor.core.choices import Format
from symrazor.core.files import (
    parse_json,
    reader,
    reading,
    write_atomically,
)
from symrazor.inference.last_layer import UNCERTAINTY, LastLayer, read_posterior
from symrazor.layers.path import is_symrazor_module
from symrazor.report.content import SCHEMA
from symrazor.report.page import page_html
from symrazor.runs.records import (
    MAX_NUMBERS,
    fit_document,
    is_fit_run,
    load_run,
    verify,
)
from symrazor.runs.writing import (
    DOCUMENT,
    MANIFEST,
    PAGE,
    PLAIN,
    PROGRAM,
    about,
    inside,
    writing,
)
from symrazor.symmetry.architecture import (
    ARCHITECTURE,
    WEIGHTS,
    read_network,
)
from symrazor.symmetry.collapse import collapse
from symrazor.symmetry.export import WithUncertainty, save_network
from symrazor.symmetry.reading import Reading
from symrazor.symmetry.vocabulary import DTYPES


def plain_network(model: nn.Module, reading: Reading, example: Tensor) -> nn.Module:
    """Return a trained network as plain torch modules, collapsed if it has other layers."""
    if not any(is_symrazor_module(module) for module in model.modules()):
        return model.eval()
    return collapse(model, example, shares=reading)


def run_files(folder: Path) -> list[Path]:
    """Return the files that a run is read from."""
    return [folder / name for name in (MANIFEST, *(verify(folder).files or ()))]


def is_run_file(folder: Path, file: Path) -> bool:
    """Return whether a file is one that a run is read from."""
    return file.resolve() in {path.resolve() for path in run_files(folder)}


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
        and _are_names(data.get("columns"))
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
    if is_run_file(run, file):
        raise ValueError(f"{file} is part of the run and would be overwritten. Use another --out.")
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
    run: Path,
    form: Format,
    out: Path,
    question: str | None = None,
    trust_code: bool = False,
    uncertainty: bool = False,
) -> Path:
    """Write the network of a run in a format.

    Args:
        run: the run folder.
        form: the format.
        out: the file to write.
        question: name of the question, if the run has several.
        trust_code: see `load_network`.
        uncertainty: add the standard deviation of the predictions as a second output; the first is
            then probabilities in place of logits.

    Raises:
        ValueError: a file that the run is read from, no uncertainty in the run, or as in
            `load_network`.
    """
    if is_run_file(run, out) and not (form == "safetensors" and not is_fit_run(run)):
        other = out.with_name("plain" + out.suffix)
        raise ValueError(f"{out} is part of the run and would be overwritten. Use --out {other}.")
    network = load_network(run, question, trust_code)
    if form == "safetensors" and uncertainty:
        raise ValueError(f"{UNCERTAINTY} in the run folder has the weights. Use torch or onnx.")
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
    with reading(run), torch.no_grad():  # an untrusted network may raise any error
        network(example)
    name = question_of(document, question)["name"] if document["questions"] else None
    described = about(document, name)
    if uncertainty:
        posterior = load_posterior(run, network, question)
        if posterior is None:
            raise ValueError(f"{run} has no {UNCERTAINTY}. Export without --uncertainty.")
        network = WithUncertainty(network, posterior).eval()
        first = "probabilities" if described["classes"] else "mean"
        described["outputs"] = [first, "std"]
    with writing(run, out):
        return save_network(network, out, example, form, about=described)


def load_posterior(run: Path, network: nn.Module, question: str | None = None) -> LastLayer | None:
    """Return the posterior of the network of a run folder, or None if it has none."""
    folder = run / PLAIN if is_fit_run(run) else network_folder(run, question)
    name = (folder / UNCERTAINTY).relative_to(run).as_posix()
    if name not in (verify(run).files or ()):
        return None
    verify(run, name)
    return read_posterior(folder / UNCERTAINTY, network)
