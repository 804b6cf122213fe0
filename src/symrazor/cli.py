"""The command `symrazor`; no logic here, only arguments in and tables out."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import tyro
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from symrazor import __version__, distributed, runs
from symrazor.bench import evidence as evidence_bench
from symrazor.bench import layers as layers_bench
from symrazor.discover import CANDIDATES, DEFAULTS, QUESTIONS, Answer, answer, rank
from symrazor.experiments import (
    ella_table1,
    ella_table2,
    liw,
    liw_figures,
    liw_table1,
    liw_table2,
    liw_table3,
    starts,
    tables,
)
from symrazor.report import evidence_figure, write_atomically
from symrazor.run_config import RunConfig, read_config


def _console(quiet: bool = False) -> Console:
    """Standard output; wide enough for our tables where it is not a terminal."""
    return Console(quiet=quiet, width=None if sys.stdout.isatty() else 140)


def discover(
    epochs: int = DEFAULTS.epochs,
    seed: int = 0,
    out: Path = Path("run"),
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
    quiet: bool = False,
) -> None:
    """Let the evidence choose a structure for the embedded digits, on two tasks.

    Args:
        epochs: passes over the data for each candidate.
        seed: of data placement, initial weights and shuffling.
        out: folder for the picture and the readings.
        json_file: also write all numbers to this file.
        quiet: print only the verdicts.
    """
    out.mkdir(parents=True, exist_ok=True)  # before the work: a run must not be lost to a bad path
    console = _console(quiet)
    config = replace(DEFAULTS, epochs=epochs, seed=seed, progress=False if quiet else None)
    answers: list[Answer] = []
    for task, question in QUESTIONS.items():
        console.print(f"\n[bold]{question}[/bold]  (1,437 digits on a 16 x 16 canvas)")
        found = []
        for number, candidate in enumerate(answer(task, config), 1):
            found.append(candidate)
            console.print(f"  {number} of {len(CANDIDATES)}: {candidate.name} done")
        answers.append(rank(task, found))
        console.print(_table(answers[-1]))
        _console().print(answers[-1].verdict, style="bold green", soft_wrap=True)
    text = json.dumps([a.to_dict() for a in answers], indent=1, default=str) + "\n"
    for path in (out / "discover.json", json_file):
        if path is not None:
            write_atomically(path, text.encode())
    picture = evidence_figure(answers, out / "evidence.png")
    console.print(f"\nPicture: {picture}   Numbers: {out / 'discover.json'}")


def _table(found: Answer) -> Table:
    table = Table(
        "network", "log evidence", "fit", "complexity", "effective", "test accuracy", "ECE"
    )
    for candidate in found.candidates:
        value, test = candidate.fit.evidence, candidate.fit.reading.test
        table.add_row(
            candidate.name,
            f"{float(value.log_evidence):,.0f}",
            f"{float(value.log_likelihood):,.0f}",
            f"{float(value.complexity):,.0f}",
            f"{sum(value.effective_parameters.values()):,.0f}",
            f"{100 * test['accuracy']:.1f} %",
            f"{test['ece']:.3f}",
        )
    return table


def _fit_command(default: RunConfig) -> Callable[..., None]:
    """The command fit, whose options start from a configuration."""

    def fit(
        file: tyro.conf.Positional[Path | None] = None,
        config: Annotated[RunConfig, tyro.conf.arg(name="")] = default,
        out: Path = Path("run"),
        resume: bool = False,
        quiet: bool = False,
    ) -> None:
        """Train a network as a TOML file says, and leave a folder with all that was learned.

        With several processes: torchrun --nproc-per-node 4 -m symrazor fit FILE --out RUN.

        Args:
            file: the configuration, NAME.toml; without one, the options below.
            config: every entry of the file, to be given here instead.
            out: folder of the run.
            resume: go on with the run in that folder, if there is one; its own configuration
                counts where no file is given.
            quiet: no progress bar and no table.
        """
        if quiet:
            config = replace(config, fit=replace(config.fit, progress=False))
        try:
            found = runs.run(config, out, resume)
        except (KeyboardInterrupt, SystemExit):
            if distributed.speaks():
                text = f"symrazor: to go on: symrazor fit --out {out} --resume"
                Console(stderr=True).print(text, soft_wrap=True)
            raise
        if distributed.speaks() and not quiet:
            sys.stdout.write(f"{found.reading}\n")

    return fit


def _given_config(arguments: Sequence[str]) -> RunConfig:
    """What the options of fit start from: the file, or the configuration of a run to resume."""
    file = next((Path(a) for a in arguments if a.endswith(".toml")), None)
    if file is None and "--resume" in arguments:
        values = [v for k, v in pairwise(arguments) if k == "--out"]
        there = Path(*values[:1] or ["run"]) / runs.CONFIG
        file = there if there.exists() else None
    return RunConfig() if file is None else read_config(file)


def bench(
    name: tyro.conf.Positional[Literal["evidence", "layers"]],
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
    rounds: int = 5,
    alphas: tuple[int, ...] = (10, 4),
    paddings: tuple[evidence_bench.Padding, ...] = ("zeros", "circular"),
    growth: bool = False,
    probes: bool = False,
) -> None:
    """Measure what an evidence estimate costs in epochs of plain SGD, or what the paths cost.

    Args:
        name: which benchmark; the last four options belong to `evidence`.
        json_file: write the rows to this file.
        rounds: interleaved repeats; medians are reported.
        alphas: widths of the eight-convolution net.
        paddings: padding modes of its convolutions.
        growth: also the cost against the number of data and of outputs.
        probes: also the errors of the Monte Carlo estimators.
    """
    if name == "layers":
        _show("Paths and relaxed networks", lambda: layers_bench.main(rounds, json_file))
        return
    options = evidence_bench.Options(alphas, paddings, rounds, json=json_file)
    _show(f"One {name} estimate, in epochs of plain SGD", lambda: evidence_bench.main(options))
    if growth:
        _show("Growth of the cost", lambda: evidence_bench.growth(rounds=rounds))
    if probes:
        _show("Relative error against the exact estimate", evidence_bench.probes)


Tables = Annotated[tables.Options, tyro.conf.arg(name="")]


def ella_table_1(options: Tables) -> str:
    """ELLA's table 1: is position read where it must be?"""
    return tables.run(ella_table1.EXPERIMENT, options)


def ella_table_2(options: Tables) -> str:
    """ELLA's table 2: eleven networks on CIFAR-10."""
    return tables.run(ella_table2.EXPERIMENT, options)


Invariant = Annotated[liw.Options, tyro.conf.arg(name="")]


def liw_table_1(options: Invariant) -> str:
    """Learning Invariant Weights, table 1: the bound knows how much MNIST was rotated."""
    return liw_table1.run(options)


def liw_table_2(options: Invariant) -> str:
    """Learning Invariant Weights, table 2: the transformations that four versions of MNIST need."""
    return liw_table2.run(options)


def liw_table_3(options: Invariant) -> str:
    """Learning Invariant Weights, table 3: the same for CIFAR-10."""
    return liw_table3.run(options)


def liw_pictures(options: Invariant) -> str:
    """Learning Invariant Weights, figures 2, 3 and 5: rotations learned over training."""
    return liw_figures.run(options)


def starts_(options: Annotated[starts.Options, tyro.conf.arg(name="")]) -> str:
    """Does what is learned depend on where free paths start?"""
    return starts.run(options)


EXPERIMENTS: dict[str, Callable[..., str]] = {
    "ella-table1": ella_table_1,
    "ella-table2": ella_table_2,
    "liw-table1": liw_table_1,
    "liw-table2": liw_table_2,
    "liw-table3": liw_table_3,
    "liw-figures": liw_pictures,
    "starts": starts_,
}
"""Name -> what runs it and returns markdown; its arguments are those of the command."""


_Experiment: Any = Union[  # noqa: UP007  (of a tuple)
    tuple(
        Annotated[str, tyro.conf.subcommand(name, constructor=run)]
        for name, run in EXPERIMENTS.items()
    )
]


def experiment(result: _Experiment) -> None:
    """Make a table or a figure of a paper, with its numbers beside ours."""
    sys.stdout.write(f"{result}\n")


def _show(title: str, measure: Callable[[], Sequence[Any]]) -> None:
    """Measure, with a clock running, and print the dataclass rows as a table."""
    columns = (SpinnerColumn(), TextColumn(title), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as clock:
        clock.add_task("")
        rows = measure()
    values = [asdict(row) for row in rows]
    table = Table(*values[0], title=title)
    for row in values:
        cells = (f"{v:.4g}" if isinstance(v, float) else str(v or "") for v in row.values())
        table.add_row(*cells)
    _console().print(table)


def version() -> None:
    """Print the version."""
    Console().print(__version__)


def main() -> None:
    """Entry point: exit code 2 for what the user can mend, with one line that says how."""
    commands: dict[str, Callable[..., Any]] = {
        "discover": discover,
        "fit": _fit_command(RunConfig()),
        "bench": bench,
        "experiment": experiment,
        "version": version,
    }
    try:
        config: tuple[Any, ...] = (tyro.conf.OmitSubcommandPrefixes, tyro.conf.OmitArgPrefixes)
        if sys.argv[1:2] == ["fit"]:  # its sections share names: --fit.lr, --fit.razor.lr
            config = (tyro.conf.OmitSubcommandPrefixes,)
            commands["fit"] = _fit_command(_given_config(sys.argv[2:]))
        tyro.extras.subcommand_cli_from_dict(commands, prog="symrazor", config=config)
    except (ValueError, OSError, FloatingPointError) as error:
        Console(stderr=True).print(f"[red]symrazor:[/red] {error}", soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        Console(stderr=True).print("\nsymrazor: stopped")
        sys.exit(130)


if __name__ == "__main__":
    main()
