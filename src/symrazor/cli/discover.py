"""Define `symrazor discover`: from a data file to a verdict, a report and a plain network."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.markup import escape
from rich.table import Table

from symrazor.cli.terminal import (
    Flag,
    JsonFile,
    OptionalFile,
    OptionalFolder,
    OptionalInt,
    console,
    parsed_by,
    print_verdict,
)
from symrazor.core.files import check_writable_file, write_atomically
from symrazor.core.text import printable
from symrazor.data.datasets import KINDS, TASKS, Kind, Task
from symrazor.discovery.answer import Answer, Candidate
from symrazor.discovery.api import discover as run_discovery
from symrazor.discovery.digits import discover_digits
from symrazor.discovery.question import Options, groups_as_json
from symrazor.runs.folder import DOCUMENT
from symrazor.runs.ownership import Owner, choose_folder, owned_folder

_DataFile = Annotated[Path | None, tyro.conf.arg(metavar="[DATA]", help_behavior_hint="")]
_Minutes = Annotated[
    float | None, parsed_by(float), tyro.conf.arg(metavar="MINUTES", help_behavior_hint="")
]
_OptionalKind = Annotated[
    Kind | None, parsed_by(str, KINDS), tyro.conf.arg(metavar="KIND", help_behavior_hint="")
]
_OptionalTask = Annotated[
    Task | None, parsed_by(str, TASKS), tyro.conf.arg(metavar="TASK", help_behavior_hint="")
]
_Groups = Annotated[
    tuple[str, ...] | None, tyro.conf.arg(metavar="GROUP [GROUP ...]", help_behavior_hint="")
]


@dataclass(frozen=True)
class Arguments:
    """Arguments of the command.

    Args:
        data: .npz, .npy, .csv, IDX or CIFAR file, or folder of images; default: embedded digits.
        minutes: training time of all networks together (default: 2; digits: no limit).
        out: run folder for numbers, report, figures and network; if not given, the first of
            run, run-2, ... without another run.
        overwrite: delete a run in the run folder first.
        report: also write the report to this file.
        json_file: also write all numbers to this file.
        groups: symmetries to relax, such as p4, p4m, O, permutation, cyclic, or .json files.
        kind: kind of the inputs: image, volume, series, set, vector or trajectory.
        task: classification or regression; recognised by the labels if not given.
        seed: seed of splits, initial weights and shuffling.
        device: auto, cpu or cuda.
        epochs: epochs of each start of each network; replaces --minutes.
        starts: starts of each network; more follow where the decision is close.
        invariances: learn invariances of images also with --epochs.
        no_invariances: do not learn invariances of images.
        positions: trajectories are positions only; estimate momenta by finite differences.
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
    seed: int = 0
    device: str = "auto"
    epochs: OptionalInt = None
    starts: int = 3
    invariances: Flag = False
    no_invariances: Flag = False
    positions: Flag = False
    quiet: Flag = False

    def options(self) -> Options:
        """Return the options of `discover`.

        Raises:
            ValueError: options that exclude each other.
        """
        if self.invariances and self.no_invariances:
            raise ValueError("--invariances and --no-invariances exclude each other. Omit one.")
        invariances = True if self.invariances else None
        return Options().change(
            seed=self.seed,
            device=self.device,
            groups=self.groups,
            epochs=self.epochs,
            starts=self.starts,
            invariances=False if self.no_invariances else invariances,
            positions=self.positions,
            progress=False if self.quiet else None,
            **({} if self.minutes is None else {"minutes": self.minutes}),
        )

    def owner(self, options: Options) -> Owner:
        """Return the mark of the run folder: the command, with all that its result depends on."""
        names = ("minutes", "epochs", "starts", "seed", "device", "invariances", "positions")
        chosen: dict[str, Any] = {name: getattr(options, name) for name in names}
        chosen |= {"groups": groups_as_json(options.groups), "kind": self.kind, "task": self.task}
        chosen["data"] = None if self.data is None else str(self.data.absolute())
        return Owner("discover", chosen)


def discover(arguments: Annotated[Arguments, tyro.conf.arg(name="")]) -> None:
    """Find the structure of a data set, and train a network that has it.

    Example: symrazor discover data.npz --minutes 5

    Prints a verdict and writes a run folder with a report and a plain PyTorch network. After Ctrl-C
    the same command resumes the run.
    """
    options = arguments.options()
    owner = arguments.owner(options)
    out = choose_folder(arguments.out, owner, arguments.overwrite)
    options = options.change(out=out)
    check_writable_file(arguments.report)
    check_writable_file(arguments.json_file)
    terminal = console(arguments.quiet)

    def tell(text: str) -> None:
        terminal.print(escape(printable(text)), highlight=False)

    def show_answer(answer: Answer) -> None:
        terminal.print(_table(answer))
        print_verdict(console(), answer.headline, answer.details)

    with _one_line_warnings(), owned_folder(out, owner, arguments.overwrite):
        try:
            if arguments.data is None:
                discovery = discover_digits(options, tell, show_answer)
            else:
                kind, task = arguments.kind, arguments.task
                discovery = run_discovery(
                    arguments.data, kind=kind, task=task, options=options, tell=tell
                )
                for result in discovery.results:
                    show_answer(result.answer)
            if discovery.dynamics is not None:
                print_verdict(console(), discovery.verdict, "")
            discovery.save(out)
        except KeyboardInterrupt as stop:
            text = str(stop) or f"finished parts are in {out}; run the same command to resume"
            raise KeyboardInterrupt(text) from stop
    if arguments.report is not None:
        discovery.report(arguments.report)
    if arguments.json_file is not None:
        write_atomically(arguments.json_file, (out / DOCUMENT).read_bytes())
    tell(f"\nRun folder: {out} ({', '.join(sorted(p.name for p in out.iterdir()))})")


@contextmanager
def _one_line_warnings() -> Iterator[None]:
    """Print warnings in one line, and hide log messages on Ctrl-C, which the command explains."""

    def warn(message: Warning | str, *_: object) -> None:
        console().print(
            f"warning: {escape(printable(str(message)))}", style="yellow", soft_wrap=True
        )

    log = logging.getLogger("symrazor")
    level, showwarning = log.level, warnings.showwarning
    log.setLevel(logging.ERROR)
    warnings.showwarning = warn  # type: ignore[assignment]
    try:
        yield
    finally:
        warnings.showwarning = showwarning
        log.setLevel(level)


def _table(answer: Answer) -> Table:
    """Return a table of the candidates, best evidence first."""
    keys = list(dict.fromkeys(key for c in answer.candidates for key in c.fit.reading.test))
    has_left_out = any(len(c.left_out) for c in answer.candidates)
    table = Table("network", "log evidence", "log likelihood", "complexity", "effective parameters")
    if has_left_out:
        table.add_column("left-out log likelihood")
    for key in keys:
        table.add_column(f"held-out {key}")
    trained = [*answer.candidates, *([] if answer.final is None else [answer.final])]
    for candidate in trained:
        epochs = f", {len(candidate.fit.history)} epochs" if candidate is answer.final else ""
        evidence, test = candidate.fit.evidence, candidate.fit.reading.test
        table.add_row(
            escape(printable(candidate.name) + epochs),
            f"{float(evidence.log_evidence):z,.0f}",
            f"{float(evidence.log_likelihood):z,.0f}",
            f"{float(evidence.complexity):,.0f}",
            f"{sum(evidence.effective_parameters.values()):,.0f}",
            *([_left_out(candidate)] if has_left_out else []),
            *(_score(key, test.get(key)) for key in keys),
        )
    return table


def _left_out(candidate: Candidate) -> str:
    return f"{float(candidate.left_out.sum()):z,.0f}"


def _score(key: str, value: Any) -> str:
    if value is None:
        return ""
    return f"{100 * value:.1f} %" if key == "accuracy" else f"{value:.3f}"
