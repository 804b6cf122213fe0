"""The command `symrazor`; no logic here, only arguments in and tables out."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import tyro
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from symrazor import __version__
from symrazor.bench import evidence as evidence_bench
from symrazor.bench import layers as layers_bench
from symrazor.discover import CANDIDATES, DEFAULTS, QUESTIONS, Answer, answer, rank
from symrazor.experiments import ella_table1, ella_table2, tables
from symrazor.experiments import noether as noether_options
from symrazor.experiments import noether_controls as controls
from symrazor.experiments import noether_n_oscillators as n_oscillators
from symrazor.experiments import noether_nbody as bodies
from symrazor.experiments import noether_oscillator as oscillator
from symrazor.report import evidence_figure, write_atomically


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


Noether = Annotated[noether_options.Options, tyro.conf.arg(name="")]


def noether_oscillator(options: Noether) -> str:
    """Noether's razor: the rotation of an oscillator's phase space from 28 transitions."""
    return oscillator.run(options)


def noether_n_oscillators(options: Noether, n: tuple[int, ...] = ()) -> str:
    """Noether's razor: all n^2 conserved quantities of n equal oscillators.

    Args:
        options: of the experiment.
        n: how many oscillators, one table each; 3, or 2 where small.
    """
    return n_oscillators.run(options, n)


def noether_nbody(options: Noether, noise: float = bodies.NOISE) -> str:
    """Noether's razor: momentum, angular momentum and what follows, of three bodies.

    Args:
        options: of the experiment.
        noise: variance of the noise on the targets.
    """
    return bodies.run(options, noise)


def noether_controls(options: Noether, rows: tuple[str, ...] = controls.ROWS) -> str:
    """Noether's razor: nothing invented, nothing learned by likelihood, not only quadratic.

    Args:
        options: of the experiment; its models are not used.
        rows: which controls.
    """
    return controls.run(options, rows)


EXPERIMENTS: dict[str, Callable[..., str]] = {
    "noether-oscillator": noether_oscillator,
    "noether-n-oscillators": noether_n_oscillators,
    "noether-nbody": noether_nbody,
    "noether-controls": noether_controls,
    "ella-table1": ella_table_1,
    "ella-table2": ella_table_2,
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
        "bench": bench,
        "experiment": experiment,
        "version": version,
    }
    try:
        tyro.extras.subcommand_cli_from_dict(
            commands,
            prog="symrazor",
            config=(tyro.conf.OmitSubcommandPrefixes, tyro.conf.OmitArgPrefixes),
        )
    except (ValueError, OSError, FloatingPointError) as error:
        Console(stderr=True).print(f"[red]symrazor:[/red] {error}", soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        Console(stderr=True).print("\nsymrazor: stopped")
        sys.exit(130)


if __name__ == "__main__":
    main()
