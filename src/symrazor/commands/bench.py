"""`symrazor bench`: measurements with a goal."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from symrazor.bench import augment as augment_bench
from symrazor.bench import evidence as evidence_bench
from symrazor.bench import fit as fit_bench
from symrazor.bench import layers as layers_bench
from symrazor.commands.terminal import JsonFile, console


def bench(
    name: tyro.conf.Positional[Literal["evidence", "layers", "fit", "augment"]],
    json_file: JsonFile = None,
    rounds: int = 5,
    alphas: tuple[int, ...] = (10, 4),
    paddings: tuple[evidence_bench.Padding, ...] = ("zeros", "circular"),
    growth: bool = False,
    probes: bool = False,
    device: str = "cpu",
    quiet: bool = False,
) -> None:
    """Measure what an evidence estimate costs, what the paths, what fit, what learned widths.

    Args:
        name: which benchmark; the next four options but rounds belong to `evidence`.
        json_file: write the rows to this file.
        rounds: interleaved repeats; medians are reported.
        alphas: widths of the eight-convolution net.
        paddings: padding modes of its convolutions.
        growth: also the cost against the number of data and of outputs.
        probes: also the errors of the Monte Carlo estimators.
        device: "cpu" or "cuda", for `fit`.
        quiet: print nothing; give a JSON file then.
    """
    show = partial(_show, quiet=quiet)
    if name == "layers":
        show("Paths and relaxed networks", lambda: layers_bench.main(rounds, json_file))
        return
    if name == "fit":
        sizes = fit_bench.Options.on(device, rounds=rounds, json=json_file)
        show("fit against plain training", lambda: fit_bench.main(sizes))
        return
    if name == "augment":
        show("Learned widths, in epochs of SGD", lambda: augment_bench.main(rounds, json_file))
        return
    options = evidence_bench.Options(alphas, paddings, rounds, json=json_file)
    show(f"One {name} estimate, in epochs of plain SGD", lambda: evidence_bench.main(options))
    if growth:
        show("Growth of the cost", lambda: evidence_bench.growth(rounds=rounds))
    if probes:
        show("Relative error against the exact estimate", evidence_bench.probes)


def _show(title: str, measure: Callable[[], Sequence[Any]], quiet: bool) -> None:
    """Measure, with a clock running, and print the dataclass rows as a table."""
    columns = (SpinnerColumn(), TextColumn(title), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True, quiet=quiet), transient=True) as clock:
        clock.add_task("")
        rows = measure()
    values = [asdict(row) for row in rows]
    table = Table(*values[0], title=title)
    for row in values:
        table.add_row(*map(_cell, row.values()))
    console(quiet).print(table)


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.4g}" if isinstance(value, float) else str(value or "")
