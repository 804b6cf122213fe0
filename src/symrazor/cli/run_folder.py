"""`symrazor report`, `symrazor export`, `symrazor predict`: what can be done with a run folder."""

from pathlib import Path
from typing import Annotated, Literal

import tyro

from symrazor.cli.terminal import JsonFile, console, write_json
from symrazor.discovery.folder import export_network, network_folder, read_document
from symrazor.discovery.predictions import predict as predicted
from symrazor.discovery.predictions import write_predictions
from symrazor.report.page import write_page
from symrazor.runs.fit_folder import is_fit_run, is_own_file
from symrazor.symmetry.export import SUFFIXES

Run = tyro.conf.Positional[Path]
TrustCode = tyro.conf.FlagCreatePairsOff[bool]


def report(
    run: Run, out: Path | None = None, json_file: JsonFile = None, quiet: bool = False
) -> None:
    """Say again what a run found, and write its page.

    Args:
        run: folder of a run.
        out: file of the page; RUN/report.html by default.
        json_file: write all numbers to this file.
        quiet: print nothing.
    """
    document = read_document(run)
    show = console(quiet)
    for question in document["questions"]:
        show.print(f"[bold]{question['question']}[/bold]", soft_wrap=True)
        show.print(question["verdict"], style="green", soft_wrap=True)
    if "verdict" in document:
        show.print(document["verdict"], style="green", soft_wrap=True)
    write_json(json_file, document)
    file = write_page(document, run / "report.html" if out is None else out)
    show.print(f"Page: {file}")


def export(
    run: Run,
    form: Annotated[
        Literal["torch", "onnx", "safetensors"], tyro.conf.arg(name="format")
    ] = "torch",
    out: Path | None = None,
    question: str | None = None,
    trust_code: TrustCode = False,
    json_file: JsonFile = None,
    quiet: bool = False,
) -> None:
    """Write the network of a run in another format; it is read back and compared.

    Args:
        run: folder of a run.
        form: torch (.pt2), onnx or safetensors.
        out: file to write; RUN/network with the suffix of the format by default, RUN/plain where
            the run's own weights have that name.
        question: which network, if the run answered several questions.
        trust_code: run the code that RUN/config.toml names, if the network needs it.
        json_file: write name and size of the file to this file.
        quiet: print nothing.
    """
    inner = run if is_fit_run(run) else network_folder(run, question)
    target = inner / f"network{SUFFIXES[form]}" if out is None else out
    if out is None and is_fit_run(run) and is_own_file(run, target):
        target = target.with_name(f"plain{SUFFIXES[form]}")
    file = export_network(run, form, target, question, trust_code)
    write_json(json_file, {"file": str(file), "format": form, "bytes": file.stat().st_size})
    console(quiet).print(f"{file} ({file.stat().st_size:,} bytes)", highlight=False)


def predict(
    run: Run,
    data: tyro.conf.Positional[Path],
    out: Path | None = None,
    question: str | None = None,
    trust_code: TrustCode = False,
    json_file: JsonFile = None,
    quiet: bool = False,
) -> None:
    """Predict with the network of a run: probabilities of classes, or targets.

    Args:
        run: folder of a run.
        data: inputs in any format that `discover` reads; labels are not needed.
        out: a .csv or .npz file; standard output (CSV) by default.
        question: which network, if the run answered several questions.
        trust_code: run the code that RUN/config.toml names, if the network needs it.
        json_file: write the predictions to this file as JSON.
        quiet: print nothing but the predictions.
    """
    found = predicted(run, data, question, trust_code)
    write_json(json_file, found.to_dict())
    write_predictions(found, out)
    if out is not None:
        console(quiet).print(f"{len(found.values):,} predictions: {out}", highlight=False)
