"""Do the work of `symrazor report`, `export`, `predict` and `serve`."""

from pathlib import Path

from rich.markup import escape

from symrazor.cli.answer import print_question
from symrazor.cli.terminal import check_output, console, print_verdict, write_json
from symrazor.core.choices import Format
from symrazor.core.files import reading
from symrazor.core.text import printable
from symrazor.runs.folder import (
    export_network,
    is_run_file,
    network_folder,
    read_document,
    run_files,
    write_report,
)
from symrazor.runs.predictions import check_suffix, write_predictions
from symrazor.runs.predictions import predict as predict_with_run
from symrazor.runs.records import is_fit_run
from symrazor.runs.writing import inside
from symrazor.serving import serve as serve_run
from symrazor.symmetry.export import SUFFIXES


def report(run: Path, out: Path | None, json_file: Path | None, verbose: bool, quiet: bool) -> None:
    """Print the verdict of a run again, and write its report."""
    document = read_document(run)
    check_output(json_file, *run_files(run))
    terminal = console(quiet)
    if not quiet:
        for question in document["questions"]:
            text = escape(printable(question["question"]))
            terminal.print(text, soft_wrap=True, highlight=False)
            with reading(run):  # an untrusted document may lack any key
                print_question(question, verbose)
        if "verdict" in document:
            print_verdict(terminal, document["verdict"])
    write_json(json_file, document)
    file = write_report(run, document, out)
    terminal.print(escape(f"Report: {file}"), soft_wrap=True, highlight=False)


def export(
    run: Path,
    form: Format,
    out: Path | None,
    question: str | None,
    uncertainty: bool,
    trust_code: bool,
    json_file: Path | None,
    quiet: bool,
) -> None:
    """Export the network of a run, read the file back and compare the outputs."""
    check_output(json_file, *run_files(run))
    folder = run if is_fit_run(run) else network_folder(run, question)
    target = inside(folder, f"network{SUFFIXES[form]}") if out is None else out
    if out is None and is_fit_run(run) and is_run_file(run, target):
        target = inside(folder, f"plain{SUFFIXES[form]}")
    file = export_network(run, form, target, question, trust_code, uncertainty)
    size = file.stat().st_size
    write_json(json_file, {"file": str(file), "format": form, "bytes": size})
    console(quiet).print(escape(f"{file} ({size:,} bytes)"), highlight=False)


def predict(
    run: Path,
    data: Path,
    out: Path | None,
    question: str | None,
    trust_code: bool,
    json_file: Path | None,
    quiet: bool,
) -> None:
    """Predict with the network of a run."""
    check_suffix(out)
    check_output(out, data, *run_files(run))
    check_output(json_file, data, *run_files(run))
    predictions = predict_with_run(run, data, question, trust_code)
    write_json(json_file, predictions.to_dict())
    write_predictions(predictions, out)
    if out is not None:
        text = f"{len(predictions.values):,} predictions: {out}"
        console(quiet).print(escape(text), highlight=False)


def serve(run: Path, question: str | None, port: int) -> None:
    """Serve the page of a run, and print its address."""
    terminal = console()

    def tell(address: str) -> None:
        terminal.print(escape(f"{run}: {address}  (Ctrl-C stops)"), soft_wrap=True, highlight=False)

    try:
        serve_run(run, question, port, tell)
    except KeyboardInterrupt:
        terminal.print()
