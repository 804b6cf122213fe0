"""Define `symrazor bench`: measure run time, memory and found quantities against their goals."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from symrazor.bench import augment as augment_bench
from symrazor.bench import conserved as conserved_bench
from symrazor.bench import evidence as evidence_bench
from symrazor.bench import fit as fit_bench
from symrazor.bench import layers as layers_bench
from symrazor.bench.truth import main as truth_bench
from symrazor.bench.truth.methods import MethodName
from symrazor.bench.truth.runner import Time
from symrazor.cli.terminal import Flag, JsonFile, OptionalFolder, console


@dataclass(frozen=True)
class Arguments:
    """Arguments of the command.

    Args:
        name: name of the benchmark.
        json_file: write the rows to this file.
        rounds: number of repetitions; medians are reported.
        alphas: widths of the network with eight convolutions (evidence only).
        paddings: padding modes of these convolutions (evidence only).
        structures: measure EKFAC and the kernel form instead of the estimators (evidence only).
        growth: also measure how the cost grows with samples and outputs (evidence only).
        probes: also measure the errors of the Monte Carlo estimators (evidence only).
        device: cpu or cuda (fit and truth).
        noise: noise levels, relative to the spread of each coordinate (conserved only).
        seeds: seeds of the data (conserved and truth).
        half: what to run: "develop" may be used to adjust the method, "report" must not influence
            it (conserved and truth).
        methods: methods to run (truth only).
        tasks: names of tasks; by default all of the half (truth only).
        minutes: time of `discover` for each task (truth only).
        time: clock of `minutes`: CPU time of one thread, or wall time (truth only).
        jobs: number of processes with one thread each (conserved and truth).
        small: run few tasks with little time (truth only).
        data: folder with mnist, fashion-mnist and cifar-10, which some tasks need (truth only).
        resume: continue the JSON file: skip the runs that it contains (conserved and truth).
        quiet: print nothing; use with --json.
    """

    name: tyro.conf.Positional[
        Literal["evidence", "layers", "fit", "augment", "conserved", "truth"]
    ]
    json_file: JsonFile = None
    rounds: int = 5
    alphas: tuple[int, ...] = (10, 4)
    paddings: tuple[evidence_bench.Padding, ...] = ("zeros", "circular")
    structures: Flag = False
    growth: Flag = False
    probes: Flag = False
    device: str = "cpu"
    noise: tuple[float, ...] = conserved_bench.NOISE_LEVELS
    seeds: tuple[int, ...] = (0,)
    half: conserved_bench.Half = "develop"
    methods: tuple[MethodName, ...] = ("discover",)
    tasks: tuple[str, ...] = ()
    minutes: float = truth_bench.Options.minutes
    time: Time = truth_bench.Options.time
    jobs: int = 1
    small: Flag = False
    data: OptionalFolder = None
    resume: Flag = False
    quiet: Flag = False


def bench(arguments: Annotated[Arguments, tyro.conf.arg(name="")]) -> None:
    """Measure the cost of evidence estimates, layers, fit or learned augmentation.

    `conserved` counts the conserved quantities that are found in systems with known ones. `truth`
    compares the answers of `discover` and of other methods with known answers.
    """
    rounds, file = arguments.rounds, arguments.json_file
    show = partial(_show, quiet=arguments.quiet)
    match arguments.name:
        case "layers":
            show("Layers and relaxed networks", lambda: layers_bench.main(rounds, file))
        case "fit":
            sizes = fit_bench.Options.on(arguments.device, rounds=rounds, json=file)
            show("fit against plain training", lambda: fit_bench.main(sizes))
        case "augment":
            show("Learned augmentation, in epochs of SGD", lambda: augment_bench.main(rounds, file))
        case "conserved":
            _conserved(arguments, show)
        case "truth":
            _truth(arguments)
        case "evidence":
            _evidence(arguments, show)


def _evidence(arguments: Arguments, show: Callable[..., None]) -> None:
    """Run the benchmark of evidence estimates and its optional parts."""
    options = evidence_bench.Options(
        arguments.alphas,
        arguments.paddings,
        arguments.rounds,
        structures=arguments.structures,
        json=arguments.json_file,
    )
    show("One evidence estimate, in epochs of plain SGD", lambda: evidence_bench.main(options))
    if arguments.growth:
        show("Growth of the cost", lambda: evidence_bench.growth(rounds=arguments.rounds))
    if arguments.probes:
        show("Relative error against the exact estimate", evidence_bench.probes)


def _conserved(arguments: Arguments, show: Callable[..., None]) -> None:
    """Run the benchmark of conserved quantities; print all runs, then a summary."""
    rows: list[conserved_bench.Row] = []

    def run() -> list[conserved_bench.Row]:
        rows.extend(
            conserved_bench.main(
                arguments.seeds,
                arguments.noise,
                arguments.half,
                arguments.json_file,
                jobs=arguments.jobs,
                resume=arguments.resume,
            )
        )
        return rows

    show(f"Conserved quantities, {arguments.half} half", run)
    show("Summary", lambda: conserved_bench.summarise(rows))


def _truth(arguments: Arguments) -> None:
    """Run the benchmark of known answers; tasks and rows are printed as they come."""
    options = truth_bench.Options(
        arguments.half,
        arguments.methods,
        arguments.tasks,
        arguments.seeds,
        arguments.minutes,
        arguments.jobs,
        arguments.small,
        arguments.data,
        arguments.json_file,
        arguments.resume,
        device=arguments.device,
        time=arguments.time,
    )
    truth_bench.main(options, show=partial(_print_table, quiet=arguments.quiet))


def _show(title: str, measure: Callable[[], Sequence[Any]], quiet: bool) -> None:
    """Measure while showing a clock, and print the rows as a table."""
    columns = (SpinnerColumn(), TextColumn(title), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True, quiet=quiet), transient=True) as clock:
        clock.add_task("")
        rows = measure()
    _print_table(title, rows, quiet)


def _print_table(title: str, rows: Sequence[Any], quiet: bool) -> None:
    """Print dataclass rows as a table."""
    values = [asdict(row) for row in rows]
    table = Table(*values[0], title=title)
    for row in values:
        table.add_row(*map(_cell, row.values()))
    console(quiet).print(table)


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
