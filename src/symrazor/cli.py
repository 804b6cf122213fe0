"""The command `symrazor`; no logic here, only arguments in and tables out."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import tyro
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from symrazor import __version__
from symrazor.bench import evidence as evidence_bench
from symrazor.bench import layers as layers_bench
from symrazor.commands.completion import completion
from symrazor.commands.data import data
from symrazor.commands.discover import discover
from symrazor.commands.run_folder import export, predict, report
from symrazor.commands.terminal import console
from symrazor.experiments import ella_table1, ella_table2, fashion, tables


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


def fashion_mnist(options: Annotated[fashion.Options, tyro.conf.arg(name="")]) -> str:
    """Discover on real images, beside a plain CNN trained for the same time."""
    return fashion.run(options)


EXPERIMENTS: dict[str, Callable[..., str]] = {
    "ella-table1": ella_table_1,
    "ella-table2": ella_table_2,
    "fashion": fashion_mnist,
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
    console().print(table)


def version() -> None:
    """Print the version."""
    Console().print(__version__)


COMMANDS: dict[str, Callable[..., Any]] = {
    "discover": discover,
    "report": report,
    "export": export,
    "predict": predict,
    "data": data,
    "bench": bench,
    "experiment": experiment,
    "completion": completion,
    "version": version,
}


def run(arguments: Sequence[str] | None = None) -> None:
    """Parse the arguments, by default those of the process, and run a verb."""
    tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="symrazor",
        args=arguments,
        config=(tyro.conf.OmitSubcommandPrefixes, tyro.conf.OmitArgPrefixes),
    )


def main() -> None:
    """Entry point: exit code 2 for what the user can mend, with one line that says how."""
    try:
        run()
    except (ValueError, OSError, FloatingPointError, ModuleNotFoundError) as error:
        shown = escape(str(error))
        Console(stderr=True).print(f"[red]symrazor:[/red] {shown}", soft_wrap=True, highlight=False)
        sys.exit(2)
    except KeyboardInterrupt as stop:
        Console(stderr=True).print(f"\nsymrazor: stopped{f'; {stop}' if str(stop) else ''}")
        sys.exit(130)


if __name__ == "__main__":
    main()
