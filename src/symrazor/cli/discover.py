"""Define the options of `symrazor discover`; `symrazor.cli.discover_work` does the work."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from symrazor.cli.terminal import (
    Flag,
    JsonFile,
    OptionalFile,
    OptionalFolder,
    OptionalInt,
    OptionalName,
    load,
    parsed_by,
)
from symrazor.core.choices import KIND_OPTIONS, TASKS, KindOption, Task

_DataFile = Annotated[Path | None, tyro.conf.arg(metavar="[DATA]", help_behavior_hint="")]
_Minutes = Annotated[
    float | None, parsed_by(float), tyro.conf.arg(metavar="MINUTES", help_behavior_hint="")
]
_OptionalKind = Annotated[
    KindOption | None,
    parsed_by(str, KIND_OPTIONS),
    tyro.conf.arg(metavar="KIND", help_behavior_hint=""),
]
_OptionalTask = Annotated[
    Task | None, parsed_by(str, TASKS), tyro.conf.arg(metavar="TASK", help_behavior_hint="")
]
_OptionalHeader = Annotated[
    Literal["yes", "no"] | None,
    parsed_by(str, ("yes", "no")),
    tyro.conf.arg(metavar="YES|NO", help_behavior_hint=""),
]
_Columns = Annotated[
    tuple[str, ...] | None, tyro.conf.arg(metavar="COLUMN [COLUMN ...]", help_behavior_hint="")
]
_Groups = Annotated[
    tuple[str, ...] | None, tyro.conf.arg(metavar="GROUP [GROUP ...]", help_behavior_hint="")
]


@dataclass(frozen=True)
class Arguments:
    """Arguments of the command.

    Args:
        data: a table (.csv, .tsv, .parquet), arrays (.npz, .npy, .h5, .pt), IDX or CIFAR files, or
            a folder of images, .wav, .nii or .npy files; without it, the embedded digits.
        minutes: time for everything (default: 2; no limit for the embedded digits). With --epochs,
            it only limits the learned invariances and the cost of an exact evidence.
        out: run folder for numbers, report, figures and network; if not given, the first of
            run, run-2, ... without another run.
        overwrite: delete the run that is in the run folder, and start anew.
        report: also write the report to this file.
        json_file: also write all numbers to this file.
        groups: symmetries to relax, such as p4, p4m, O, permutation, cyclic, or .json files.
        kind: kind of the inputs: image, volume, series, set, vector or trajectory; series-last for
            series [n, time, channels].
        task: classification or regression; by default recognised from the labels.
        columns: columns of a table to use as inputs; by default all but the label.
        group_column: column of a table that says which rows belong together, such as the patient;
            they stay on one side of every split.
        header: whether the first row of a CSV file has the names of the columns.
        seed: seed of splits, initial weights and shuffling.
        device: auto, cpu or cuda.
        epochs: epochs of each start of each network, in place of a time limit; makes the result
            reproducible.
        starts: number of starts of each network: trainings with different initial weights. With a
            time limit, more follow while the answer is undecided.
        invariances: learn invariances of images also with --epochs.
        no_invariances: do not learn invariances of images.
        positions: the trajectories are positions; estimate momenta by finite differences.
        verbose: also print the evidence, the layers, and a table with all numbers.
        quiet: print only the verdict.
    """

    data: tyro.conf.Positional[_DataFile] = None
    minutes: _Minutes = None
    out: OptionalFolder = None
    overwrite: Flag = False
    report: OptionalFile = None
    json_file: JsonFile = None
    groups: _Groups = None
    kind: _OptionalKind = None
    task: _OptionalTask = None
    columns: _Columns = None
    group_column: OptionalName = None
    header: _OptionalHeader = None
    seed: int = 0
    device: str = "auto"
    epochs: OptionalInt = None
    starts: int = 3
    invariances: Flag = False
    no_invariances: Flag = False
    positions: Flag = False
    verbose: Flag = False
    quiet: Flag = False


def discover(arguments: Annotated[Arguments, tyro.conf.arg(name="")]) -> None:
    """Find the structure of a data set, and train a network that has it.

    Example: symrazor discover data.npz --minutes 5

    Prints a verdict and writes a run folder with a report and a plain PyTorch network. After Ctrl-C
    the same command resumes the run.
    """
    load("discover_work").discover(arguments)  # needs torch
