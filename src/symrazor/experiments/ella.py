"""Run the tables of ELLA: their options, and one training run of one row.

Rows with method "map" keep every precision at 1, which is plain weight decay. Rows with "laplace"
learn the precisions by the evidence. Everything else is the same for both.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

import symrazor as sr
from symrazor.core.errors import CurvatureError
from symrazor.core.files import check_writable_file, check_writable_folder
from symrazor.experiments.ella_figures import draw
from symrazor.experiments.images import Images, validation_images
from symrazor.experiments.options import OfOfficialData, OfTable, parse_settings
from symrazor.experiments.results import Run, check_figures, gather, markdown, merged, read_runs
from symrazor.layers.ella import Prior, ella_network
from symrazor.training.events import JsonLines

BURN_IN_EPOCHS = 10
"""Epochs before the first update of a precision, as in the paper; at most half of a short run."""


@dataclass(frozen=True)
class Options(OfOfficialData, OfTable):
    """Options of a table of ELLA.

    Args:
        small: Use the embedded digits and a small network, in minutes on two cores.
        epochs: Number of epochs, if not the experiment's default.
        merge: Further files with results to merge and show.
        figure: Folder for figures of the rows with relaxed layers, see `ella_figures`.
        set: Changes of the training, for example lr=0.01 every=3 (see FitConfig and RazorConfig).
        events: Folder for one JSON-lines file per run with a record of every epoch.
        validation: Test on the last sixth of the training images, which are left out, to choose
            settings without the test images.
    """

    epochs: int | None = None
    merge: tuple[Path, ...] = ()
    figure: Path | None = None
    set: tuple[str, ...] = ()
    events: Path | None = None
    validation: bool = False


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
        classes: Number of classes.
    """

    name: str
    task: str
    paths: str
    method: Literal["map", "laplace"]
    prior: Prior = "weights"
    paper: dict[str, float] = field(default_factory=dict)
    small: bool = True
    classes: int = 10


@dataclass(frozen=True)
class Table:
    """A table of ELLA.

    Args:
        name: Name of the command.
        rows: All rows.
        data: Function from task, options and seed to training and test data on the CPU.
        config: Function from row and `small` to training options.
        alpha: Width of the network on the real data and on the embedded digits.
        more: Function from runs of one size to text after the table.
    """

    name: str
    rows: Sequence[Row]
    data: Callable[[str, Options, int], Images]
    config: Callable[[Row, bool], sr.FitConfig]
    alpha: tuple[int, int] = (10, 4)
    more: Callable[[Sequence[Run]], str] | None = None

    def run(self, options: Options) -> str:
        """Train the requested rows one after the other and return the table as markdown.

        Results are saved after every run; a run that diverges is saved with its error.

        Raises:
            ValueError: An option matches nothing.
        """
        rows = {row.name: row for row in self.rows if row.small or not options.small}
        chosen = [rows[name] for name in options.choose(rows)]
        _check_checkpoints(options, len(chosen) * len(options.seed))
        missing = [str(file) for file in options.merge if not file.exists()]
        if missing:
            raise ValueError(f"No such result files: {' '.join(missing)}")
        runs = merged([], [run for file in options.merge for run in read_runs(self.name, file)])
        check_figures(runs)
        check_writable_file(options.json)
        if options.json is not None:
            check_figures(read_runs(self.name, options.json))
        for folder in (options.figure, options.events):
            if folder is not None:
                check_writable_folder(folder)
        runs = gather(self.name, options.json, _jobs(self, chosen, options), runs)
        size_runs = [run for run in runs if run["small"] == options.small]
        text = markdown(size_runs, {row.name: row.paper for row in self.rows})
        if options.figure is not None and not draw(size_runs, options.figure):
            text += "\n\nNo pictures: none of these rows has a layer of several paths."
        return text if self.more is None else f"{text}\n\n{self.more(size_runs)}"


def _check_checkpoints(options: Options, runs: int) -> None:
    """Check that there is something to run, and no checkpoint folder shared by several runs."""
    if not options.seed:
        raise ValueError("No seeds given. For example: --seed 0 1 2")
    folders = [text for text in options.set if text.partition("=")[0] in ("save", "resume")]
    if folders and runs > 1:
        raise ValueError(
            f"--set {folders[0]} allows one run, but {runs} are requested: a folder holds the "
            "checkpoints of one run. Use one command and folder for each."
        )


def _jobs(table: Table, rows: Sequence[Row], options: Options) -> Iterator[Callable[[], Run]]:
    """Yield one job for each row and seed; one task with one seed at a time is in memory."""
    for task in dict.fromkeys(row.task for row in rows):
        for seed in options.seed:
            data = table.data(task, options, seed)
            if options.validation:
                data = validation_images(data[0])
            for row in rows:
                if row.task == task:
                    yield partial(run_row, table, row, options, seed, data)


def run_row(table: Table, row: Row, options: Options, seed: int, data: Images) -> Run:
    """Train one network and return its figures."""
    train, test = data
    base = table.config(row, options.small)
    config = _config(base, row, options, len(train[1]))
    config = config.change(seed=seed, evidence_structure=None)  # as in the papers
    torch.manual_seed(seed)
    channels, size = train[0].shape[1], train[0].shape[-1]
    alpha = table.alpha[options.small]
    model = ella_network(row.paths, channels, row.classes, alpha, size, row.prior)
    result: Run = {"row": row.name, "seed": seed, "small": options.small, "alpha": alpha}
    result |= {"epochs": config.epochs, "parameters": sum(p.numel() for p in model.parameters())}
    result |= {"config": _plain(config), "device": _device_name(config.device)}
    result["config"]["validation"] = options.validation
    callbacks = []
    if options.events is not None:
        file = options.events / f"{row.name.replace('/', '_')}-{seed}.jsonl"
        if config.resume is None:  # the file may hold epochs of another run with this name
            file.unlink(missing_ok=True)
        callbacks = [JsonLines(file)]
    try:
        fit = sr.fit(model, train, test=test, config=config, callbacks=callbacks)
    except (FloatingPointError, CurvatureError) as error:
        return result | {"error": str(error)}
    reading = fit.reading
    relaxed = [layer for layer in reading.layers if layer.relaxed]
    return result | {
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
    changes = parse_settings(options.set)
    if "seed" in changes:
        raise ValueError(f"Use --seed {changes['seed']} instead of --set seed={changes['seed']}.")
    if options.epochs is not None:
        changes = {"epochs": options.epochs, **changes}
    changed = base.change(**changes)
    epochs, steps = changed.epochs, -(-n // changed.batch_size)
    changes = {"burn_in": steps * min(BURN_IN_EPOCHS, epochs // 2), **changes}
    if row.method == "map":
        never = steps * epochs + 1
        changes |= {"burn_in": never, "every": epochs, "keep": "last"}
        changes = {"free_precision": 1.0, "start": "given", "switch_off": False, **changes}
    return base.change(**{"device": options.resolved_device, **changes})


def _plain(config: sr.FitConfig) -> dict[str, Any]:
    """Return training options as JSON values; the options of the evidence are in the reading."""
    values = {f.name: getattr(config, f.name) for f in fields(config) if f.name != "razor"}
    simple = (str, int, float, bool, type(None))
    return {
        name: value if isinstance(value, simple) else getattr(value, "__name__", str(value))
        for name, value in values.items()
    }


def _device_name(device: str) -> str:
    is_gpu = device.startswith("cuda") and torch.cuda.is_available()
    return torch.cuda.get_device_name(device) if is_gpu else device
