"""Define `symrazor report`, `symrazor export` and `symrazor predict`, which take a run folder."""

from pathlib import Path
from typing import Annotated

import tyro
from rich.markup import escape

from symrazor.cli.terminal import (
    Flag,
    JsonFile,
    OptionalFile,
    OptionalName,
    console,
    print_verdict,
    write_json,
)
from symrazor.core.text import printable
from symrazor.runs.folder import (
    export_network,
    is_run_file,
    network_folder,
    read_document,
    write_report,
)
from symrazor.runs.ownership import inside
from symrazor.runs.predictions import predict as predict_with_run
from symrazor.runs.predictions import write_predictions
from symrazor.runs.records import is_fit_run
from symrazor.symmetry.export import SUFFIXES, Format

RunFolder = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]


def report(
    run: RunFolder, out: OptionalFile = None, json_file: JsonFile = None, quiet: Flag = False
) -> None:
    """Print the verdict of a run again, and write its report.

    Args:
        run: run folder.
        out: file of the report; RUN/report.html by default.
        json_file: write all numbers to this file.
        quiet: print nothing.
    """
    document = read_document(run)
    terminal = console(quiet)
    for question in document["questions"]:
        terminal.print(escape(printable(question["question"])), soft_wrap=True)
        headline = question.get("headline", "")
        print_verdict(terminal, headline, question["verdict"].removeprefix(f"{headline} "))
    if "verdict" in document:
        print_verdict(terminal, document["verdict"], "")
    write_json(json_file, document)
    file = write_report(run, document, out)
    terminal.print(escape(f"Report: {file}"))


def export(
    run: RunFolder,
    form: Annotated[Format, tyro.conf.arg(name="format")] = "torch",
    out: OptionalFile = None,
    question: OptionalName = None,
    trust_code: Flag = False,
    json_file: JsonFile = None,
    quiet: Flag = False,
) -> None:
    """Export the network of a run, read the file back and compare the outputs.

    Args:
        run: run folder.
        form: torch (.pt2), safetensors or onnx.
        out: file to write; by default RUN/network, or RUN/plain if that name is taken by the run.
        question: name of the question, if the run has several.
        trust_code: run the code that RUN/config.toml names, if the network needs it.
        json_file: write name and size of the file to this file.
        quiet: print nothing.
    """
    folder = run if is_fit_run(run) else network_folder(run, question)
    target = inside(folder, f"network{SUFFIXES[form]}") if out is None else out
    if out is None and is_fit_run(run) and is_run_file(run, target):
        target = inside(folder, f"plain{SUFFIXES[form]}")
    file = export_network(run, form, target, question, trust_code)
    size = file.stat().st_size
    write_json(json_file, {"file": str(file), "format": form, "bytes": size})
    console(quiet).print(escape(f"{file} ({size:,} bytes)"), highlight=False)


def predict(
    run: RunFolder,
    data: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DATA")],
    out: OptionalFile = None,
    question: OptionalName = None,
    trust_code: Flag = False,
    json_file: JsonFile = None,
    quiet: Flag = False,
) -> None:
    """Predict probabilities of classes, or targets, with the network of a run.

    Args:
        run: run folder.
        data: inputs in any format that `discover` reads; labels are not needed.
        out: a .csv or .npz file; CSV on standard output by default.
        question: name of the question, if the run has several.
        trust_code: run the code that RUN/config.toml names, if the network needs it.
        json_file: write the predictions to this file as JSON.
        quiet: print nothing but the predictions.
    """
    predictions = predict_with_run(run, data, question, trust_code)
    write_json(json_file, predictions.to_dict())
    write_predictions(predictions, out)
    if out is not None:
        text = f"{len(predictions.values):,} predictions: {out}"
        console(quiet).print(escape(text), highlight=False)
