"""`symrazor discover`: from a data file to a verdict, a page and a plain network."""

import logging
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.markup import escape
from rich.table import Table

from symrazor.cli.terminal import JsonFile, console
from symrazor.core.files import check_writable_file, check_writable_folder
from symrazor.data.datasets import Kind, Task
from symrazor.discovery.answer import Answer, Candidate
from symrazor.discovery.api import discover as find
from symrazor.discovery.api import discover_digits
from symrazor.discovery.folder import DOCUMENT
from symrazor.discovery.question import Options


@dataclass(frozen=True)
class Arguments:
    """What the command can be told.

    Args:
        data: a .npz, .npy, .csv, IDX or CIFAR file, a folder of images per class, ...; without it,
            the embedded digits, asked two questions.
        report: write the page to this file too.
        json_file: write all numbers to this file too.
        out: run folder: numbers, page, picture, network.
        minutes: for the training of all networks together; 2 by default, the digits take what they
            need.
        seed: of splits, initial weights and shuffling.
        device: auto, cpu or cuda.
        groups: symmetries to relax, by name (translation, p4, p4m, O, permutation, cyclic, ...)
            or as files that end with .json; by default those of the kind.
        kind: what the inputs are, instead of what is recognised.
        task: what the labels are, instead of what is recognised.
        epochs: passes over the data, instead of a time.
        invariances: learn which transformations of pictures leave their label alone, also with a
            number of epochs; with a time that is the default.
        no_invariances: do not learn that.
        positions: trajectories are positions only; velocities by finite differences stand for
            momenta.
        quiet: print only the verdicts.
    """

    data: tyro.conf.Positional[Path | None] = None
    report: Path | None = None
    json_file: JsonFile = None
    out: Path = Path("run")
    minutes: float | None = None
    seed: int = 0
    device: str = "auto"
    groups: tuple[str, ...] | None = None
    kind: Kind | None = None
    task: Task | None = None
    epochs: int | None = None
    invariances: tyro.conf.FlagCreatePairsOff[bool] = False
    no_invariances: tyro.conf.FlagCreatePairsOff[bool] = False
    positions: tyro.conf.FlagCreatePairsOff[bool] = False
    quiet: bool = False

    def options(self) -> Options:
        """The part that `discover` takes as options.

        Raises:
            ValueError: options that exclude each other.
        """
        if self.invariances and self.no_invariances:
            raise ValueError("expected --invariances or --no-invariances, got both; do: drop one")
        learned = True if self.invariances else None
        return Options().change(
            seed=self.seed,
            device=self.device,
            groups=self.groups,
            epochs=self.epochs,
            invariances=False if self.no_invariances else learned,
            positions=self.positions,
            out=self.out,
            progress=False if self.quiet else None,
            **({} if self.minutes is None else {"minutes": self.minutes}),
        )


def discover(given: Annotated[Arguments, tyro.conf.arg(name="")]) -> None:
    """Find out which structure the data ask for: verdict, page and a plain network.

    Ctrl-C keeps what is finished; the same command then goes on.
    """
    options, out = given.options(), given.out
    check_writable_folder(out)
    check_writable_file(given.report)
    check_writable_file(given.json_file)
    show = console(given.quiet)

    def tell(text: str) -> None:
        show.print(escape(text), highlight=False)

    def answered(found: Answer) -> None:
        show.print(_table(found))
        console().print(escape(found.verdict), style="bold green", soft_wrap=True)

    def warn(message: Warning | str, *_: object) -> None:
        console().print(f"warning: {escape(str(message))}", style="yellow", soft_wrap=True)

    log = logging.getLogger("symrazor")
    level, shown = log.level, warnings.showwarning
    log.setLevel(logging.ERROR)  # Ctrl-C is explained by the command
    warnings.showwarning = warn  # type: ignore[assignment]  # in one line
    try:
        if given.data is None:
            found = discover_digits(options, tell, answered)
        else:
            found = find(given.data, kind=given.kind, task=given.task, options=options, tell=tell)
            for one in found.found:
                answered(one.answer)
        if not found.found:
            console().print(escape(found.verdict), style="bold green", soft_wrap=True)
        found.save(out)
    except KeyboardInterrupt as stop:
        said = str(stop) or f"what is finished is in {out}; the same command goes on"
        raise KeyboardInterrupt(said) from stop
    finally:
        warnings.showwarning = shown
        log.setLevel(level)
    if given.report is not None:
        found.report(given.report)
    if given.json_file is not None:
        shutil.copyfile(out / DOCUMENT, given.json_file)
    tell(f"\nRun folder: {out} ({', '.join(sorted(p.name for p in out.iterdir()))})")


def _table(found: Answer) -> Table:
    figures = list(dict.fromkeys(key for c in found.candidates for key in c.fit.reading.test))
    table = Table("network", "log evidence", "fit", "complexity", "effective")
    left_out = any(c.unseen is not None for c in found.candidates)
    if left_out:
        table.add_column("nats of data left out")
    for key in figures:
        table.add_column(f"test {key}")
    trained = found.candidates if found.final is None else [*found.candidates, found.final]
    for candidate in trained:
        longer = f", {len(candidate.fit.history)} epochs" if candidate is found.final else ""
        value, test = candidate.fit.evidence, candidate.fit.reading.test
        table.add_row(
            candidate.name + longer,
            f"{float(value.log_evidence):,.0f}",
            f"{float(value.log_likelihood):,.0f}",
            f"{float(value.complexity):,.0f}",
            f"{sum(value.effective_parameters.values()):,.0f}",
            *([] if not left_out else [_nats(candidate)]),
            *(_figure(key, test.get(key)) for key in figures),
        )
    return table


def _nats(candidate: Candidate) -> str:
    """Log likelihood of the training data that it had not seen."""
    return "" if candidate.unseen is None else f"{float(candidate.unseen.sum()):,.0f}"


def _figure(key: str, value: Any) -> str:
    if value is None:
        return ""
    return f"{100 * value:.1f} %" if key == "accuracy" else f"{value:.3f}"
