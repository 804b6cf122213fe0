"""Run the tables of ELLA: their options, and one training run of one row.

Rows with method "map" keep every precision at 1, which is plain weight decay. Rows with "laplace"
learn the precisions by the evidence. Everything else is the same for both.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

import symrazor as sr
from symrazor.core.errors import CurvatureError
from symrazor.core.files import check_writable_file, check_writable_folder
from symrazor.data import Tensors
from symrazor.experiments.command import command
from symrazor.experiments.figures import draw
from symrazor.experiments.options import OfTable
from symrazor.experiments.results import Run, add_runs, check_figures, markdown, merged, read_runs
from symrazor.layers.ella import Prior, ella_network

BURN_IN_EPOCHS = 10
"""Epochs before the first update of a precision, as in the paper; at most half of a short run."""


@dataclass(frozen=True)
class Options(OfTable):
    """Options of a table of ELLA.

    Args:
        small: Use the embedded digits and a small network, in minutes on two cores.
        data: Folder with the official files (not needed with small).
        device: "auto" uses a GPU if there is one.
        seed: One or more seeds of initial weights, shuffling and probes.
        json: File to merge the results into after each run.
        rows: Patterns of the rows to run, for example "digit/*"; empty to show the file only.
        epochs: Number of epochs, if not the experiment's default.
        merge: Further files with results to merge and show.
        figure: Folder for figures of the rows with relaxed layers, see `figures`.
        set: Changes of the training, for example lr=0.01 every=3 (see FitConfig and RazorConfig).
        events: Folder for one JSON-lines file per run with a record of every epoch.
    """

    epochs: int | None = None
    merge: tuple[Path, ...] = ()
    figure: Path | None = None
    set: tuple[str, ...] = ()
    events: Path | None = None


@dataclass(frozen=True)
class Row:
    """One row of a table: a task, the paths of the network, and the method.

    Args:
        name: Name that `--rows` matches.
        task: Name of the data.
        paths: See `ella_network`.
        method: "map" or "laplace".
        prior: See `ella_network`.
        paper: Figures of the paper: "accuracy" in per cent, "nll", "evidence" (-log evidence / N).
        small: Whether the row exists for the embedded digits.
    """

    name: str
    task: str
    paths: str
    method: Literal["map", "laplace"]
    prior: Prior = "weights"
    paper: dict[str, float] = field(default_factory=dict)
    small: bool = True


@dataclass(frozen=True)
class Experiment:
    """A table of ELLA.

    Args:
        name: Name of the command.
        rows: All rows.
        data: Function from task and options to training and test data on the CPU.
        classes: Function from task to number of classes.
        config: Function from row and `small` to training options.
        alpha: Width of the network on the real data and on the embedded digits.
        more: Function from runs of one size to text after the table.
    """

    name: str
    rows: Sequence[Row]
    data: Callable[[str, Options], tuple[Tensors, Tensors]]
    classes: Callable[[str], int]
    config: Callable[[Row, bool], sr.FitConfig]
    alpha: tuple[int, int] = (10, 4)
    more: Callable[[Sequence[Run]], str] | None = None


def run(experiment: Experiment, options: Options) -> str:
    """Train the requested rows one after the other and return the table as markdown.

    Results are saved after every run; a run that diverges is saved with its error.

    Raises:
        ValueError: An option matches nothing.
    """
    there = [row for row in experiment.rows if row.small or not options.small]
    chosen = [row for row in there if options.wants(row.name)]
    idle = [rows for rows in options.rows if not any(fnmatchcase(row.name, rows) for row in there)]
    if idle:
        names = ", ".join(row.name for row in there)
        raise ValueError(f"No row matches {' '.join(idle)}. Rows: {names}.")
    _check_many(options, len(chosen) * len(options.seed))
    missing = [str(file) for file in options.merge if not file.exists()]
    if missing:
        raise ValueError(f"No such result files: {' '.join(missing)}")
    runs = merged([], [run for file in options.merge for run in read_runs(experiment.name, file)])
    check_figures(runs)
    check_writable_file(options.json)
    if options.json is not None:  # before the work: a run must not be lost to a bad path
        check_figures(read_runs(experiment.name, options.json))
        runs = add_runs(experiment.name, options.json, runs)
    for folder in (options.figure, options.events):
        if folder is not None:
            check_writable_folder(folder)
    loaded: dict[str, tuple[Tensors, Tensors]] = {}
    for row in chosen:
        if row.task not in loaded:
            loaded = {row.task: experiment.data(row.task, options)}
        for seed in options.seed:
            new = run_row(experiment, row, options, seed, loaded[row.task])
            runs = merged(runs, [new])
            if options.json is not None:
                runs = merged(runs, add_runs(experiment.name, options.json, [new]))
    paper = {row.name: row.paper for row in experiment.rows}
    shown = [run for run in runs if run["small"] == options.small]
    text = markdown(shown, paper)
    if options.figure is not None and not draw(shown, options.figure):
        text += "\n\nNo pictures: none of these rows has a layer of several paths."
    return text if experiment.more is None else f"{text}\n\n{experiment.more(shown)}"


def _check_many(options: Options, runs: int) -> None:
    """Check that there is something to run, and no checkpoint folder shared by several runs."""
    if not options.seed:
        raise ValueError("No seeds given. For example: --seed 0 1 2")
    folders = [text for text in options.set if text.partition("=")[0] in ("save", "resume")]
    if folders and runs > 1:
        raise ValueError(
            f"--set {folders[0]} allows one run, but {runs} are requested: a folder holds the "
            "checkpoints of one run. Use one command and folder for each."
        )


def run_row(
    experiment: Experiment,
    row: Row,
    options: Options,
    seed: int,
    data: tuple[Tensors, Tensors],
) -> Run:
    """Train one network and return its figures."""
    train, test = data
    base = experiment.config(row, options.small)
    config = _config(base, row, options, len(train[1])).change(seed=seed)
    torch.manual_seed(seed)
    channels, size = train[0].shape[1], train[0].shape[-1]
    classes, alpha = experiment.classes(row.task), experiment.alpha[options.small]
    model = ella_network(row.paths, channels, classes, alpha, size, row.prior)
    found: Run = {"row": row.name, "seed": seed, "small": options.small, "alpha": alpha}
    found |= {"epochs": config.epochs, "parameters": sum(p.numel() for p in model.parameters())}
    found |= {"config": _plain(config), "device": _device_name(config.device)}
    file = f"{row.name.replace('/', '_')}-{seed}.jsonl"
    callbacks = []
    if options.events is not None:
        if config.resume is None:  # of another run of this name: its epochs are others
            (options.events / file).unlink(missing_ok=True)
        callbacks = [sr.JsonLines(options.events / file)]
    try:
        fit = sr.fit(model, train, test=test, config=config, callbacks=callbacks)
    except (FloatingPointError, CurvatureError) as error:
        return found | {"error": str(error)}
    reading = fit.reading
    relaxed = [layer for layer in reading.layers if layer.relaxed]
    return found | {
        "accuracy": 100 * reading.test["accuracy"],
        "nll": reading.test["nll"],
        "evidence": -reading.evidence["per_datum"],
        "free_shares": [layer.free_share for layer in relaxed],
        "equivariance_errors": [layer.error for layer in relaxed],
        "seconds": reading.train["seconds"],
        "history": fit.history,
        "reading": reading.to_dict(),
    }


def _config(base: sr.FitConfig, row: Row, options: Options, n: int) -> sr.FitConfig:
    """Return the training options of a row."""
    changes = dict(_setting(text) for text in options.set)
    if "seed" in changes:
        raise ValueError(f"Use --seed {changes['seed']} instead of --set seed={changes['seed']}.")
    if options.epochs is not None:
        changes = {"epochs": options.epochs, **changes}
    told = base.change(**changes)
    epochs, steps = told.epochs, -(-n // told.batch_size)
    changes = {"burn_in": steps * min(BURN_IN_EPOCHS, epochs // 2), **changes}
    if row.method == "map":
        never = steps * epochs + 1
        changes |= {"burn_in": never, "every": epochs, "keep": "last"}
        changes = {"free_precision": 1.0, "start": "given", "switch_off": False, **changes}
    return base.change(**{"device": options.place, **changes})


def _setting(text: str) -> tuple[str, Any]:
    """Parse "name=value"."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set takes name=value, got {text!r}. For example: --set lr=0.01")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _plain(config: sr.FitConfig) -> dict[str, Any]:
    """Return training options as JSON values; the options of the evidence are in the reading."""
    values = {f.name: getattr(config, f.name) for f in fields(config) if f.name != "razor"}
    simple = (str, int, float, bool, type(None))
    return {
        name: value if isinstance(value, simple) else getattr(value, "__name__", str(value))
        for name, value in values.items()
    }


def _device_name(device: str) -> str:
    there = device.startswith("cuda") and torch.cuda.is_available()
    return torch.cuda.get_device_name(device) if there else device


def main(experiment: Experiment, arguments: Sequence[str] | None = None) -> None:
    """Run the table as a command."""
    command(experiment.name, partial(run, experiment), Options, arguments)
