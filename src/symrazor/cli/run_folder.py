"""Define `symrazor report`, `export`, `predict` and `serve`, which take a run folder.

`symrazor.cli.run_folder_work` does the work; it needs torch, which help does not.
"""

from pathlib import Path
from typing import Annotated

import tyro

from symrazor.cli.terminal import Flag, JsonFile, OptionalFile, OptionalName, load
from symrazor.core.choices import Format

RunFolder = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
Port = Annotated[int, tyro.conf.arg(metavar="PORT", help_behavior_hint="(default: a free port)")]


def report(
    run: RunFolder,
    out: OptionalFile = None,
    json_file: JsonFile = None,
    verbose: Flag = False,
    quiet: Flag = False,
) -> None:
    """Print the verdict of a run again, and write its report.

    Args:
        run: run folder.
        out: file of the report; RUN/report.html by default.
        json_file: write all numbers to this file.
        verbose: also print the evidence, the layers, and a table with all numbers.
        quiet: print nothing.
    """
    load("run_folder_work").report(run, out, json_file, verbose, quiet)


def export(
    run: RunFolder,
    form: Annotated[Format, tyro.conf.arg(name="format")] = "torch",
    out: OptionalFile = None,
    question: OptionalName = None,
    uncertainty: Flag = False,
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
        uncertainty: add the standard deviation of the predictions as a second output; the first
            output is then the probabilities, in place of logits.
        trust_code: run the code that RUN/config.toml names, if the network needs it.
        json_file: write name and size of the file to this file.
        quiet: print nothing.
    """
    load("run_folder_work").export(
        run, form, out, question, uncertainty, trust_code, json_file, quiet
    )


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
    load("run_folder_work").predict(run, data, out, question, trust_code, json_file, quiet)


def serve(run: RunFolder, question: OptionalName = None, port: Port = 0) -> None:
    """Try the network of a run in a browser: drop files, or move examples by hand.

    The page is served to this machine only (127.0.0.1), until Ctrl-C.

    Args:
        run: run folder.
        question: name of the question, if the run has several.
        port: port to listen on.
    """
    load("run_folder_work").serve(run, question, port)
