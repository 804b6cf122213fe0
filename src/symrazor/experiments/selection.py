r"""Which symmetry does a layer of images or volumes have? Several on offer, side by side.

    python -m symrazor.experiments.selection [--seed 0 1 2 3 4] [--json FILE]

One relaxed layer with GCONV(p4m), GCONV(p4), CONV and F-FC, each with a prior of its own, then tanh
and a mean over everything. Its images are noise, and its targets are made by a filter K that is
used in one of four ways:

| row | target: the mean over places p of | the largest group that fits |
|---|---|---|
| p4m | $\sum_g \tanh(2\,gK * x)(p)$ over quarter turns and reflections g | p4m |
| p4 | the same over quarter turns | p4 |
| translation | $\tanh(2\,K * x)(p)$ | translations |
| none | the same, every place with a weight of its own, 1 on average | none |
| volumes/O | the first in three dimensions, over the 24 rotations of a cube | O |
| volumes/translation, volumes/none | as above | translations; none |

`fit` starts every path but that of the largest group small and under a precision of 30 ("near").
Started "loose", those with a group have a precision of 0.1, and precisions move from the middle of
the training on only: smaller groups may then learn more, also what the largest one could. With
`--starts near loose` a network is trained from both, and the one with more evidence counts.

A row is right if the reading says that this group is the largest that the layer supports: the
measured equivariance error under it is below 5 %.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import symrazor as sr
from symrazor.data import Tensors
from symrazor.experiments.command import ROWS as PATTERNS
from symrazor.experiments.command import Arguments, command
from symrazor.experiments.options import OfTable
from symrazor.experiments.results import Run, gather
from symrazor.groups import OnGrid, cyclic, dihedral, octahedral
from symrazor.layers import FFC, Conv, GConv, GroupPool, Relaxed, path_groups
from symrazor.layers.relaxed import FREE_PATH_PRECISION, start_near_

NAME = "selection"
NOISE = 0.1
CONFIG = sr.FitConfig(epochs=60, batch_size=64, lr=2e-2, every=3)
LOOSE = 0.1
"""Precision of paths of smaller groups until the first evidence step, if they are loose."""
Start = Literal["near", "loose"]
STARTS: tuple[Start, ...] = ("near", "loose")
ROWS = ("p4m", "p4", "translation", "none", "volumes/O", "volumes/translation", "volumes/none")


@dataclass(frozen=True)
class Space:
    """What a layer maps, and what it may choose from.

    Args:
        dims: 2 for images, 3 for volumes.
        size: in every dimension.
        fields: of the largest group.
        groups: with rotations, the largest first.
    """

    dims: int
    size: int
    fields: int
    groups: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one channel."""
        return (self.size,) * self.dims


PLANE, CUBE = Space(2, 6, 4, ("p4m", "p4")), Space(3, 4, 2, ("O",))


def space_of(row: str) -> Space:
    """Whether a row is about images or about volumes."""
    return CUBE if row.startswith("volumes/") else PLANE


@dataclass(frozen=True)
class Options(OfTable):
    """What the experiment can be told.

    Args:
        small: half of the images and of the training.
        data: not used; the images are drawn.
        device: "auto" for a GPU if there is one.
        seed: one or more, of images, filter and network.
        json: file to merge the results into, run by run.
        rows: patterns of rows, see the module.
        starts: how smaller groups start, see the module; of several the one with most evidence.
    """

    seed: tuple[int, ...] = (0, 1, 2, 3, 4)
    starts: tuple[Start, ...] = STARTS[:1]

    def __post_init__(self) -> None:
        """Check the names of starts."""
        if not self.starts or set(self.starts) - {*STARTS}:
            raise ValueError(f"expected starts among {STARTS}, got {self.starts}")


def target(x: Tensor, row: str, generator: torch.Generator) -> Tensor:
    """What a filter makes of images, used in one of four ways; mean 0, variance 1."""
    dims, name = space_of(row).dims, row.rpartition("/")[2]
    K = torch.randn(1, 1, *(3,) * dims, generator=generator)
    turns = {"p4m": dihedral(4), "p4": cyclic(4), "O": octahedral()}
    filters = [K]
    if name in turns:
        action = OnGrid(turns[name], K.shape[2:])
        filters = [action.act(K, g) for g in range(turns[name].finite().order)]
    around = F.pad(x, (1, 1) * dims, mode="circular")
    convolve = F.conv2d if dims == 2 else F.conv3d
    size = 2 / 3 ** (dims / 2 - 1)  # of sums over a filter: the same in all dimensions
    found = torch.tanh(size * convolve(around, torch.cat(filters))).sum(1)
    if name == "none":
        found = found * (1 + torch.randn(found.shape[1:], generator=generator))
    y = found.flatten(1).mean(1)
    return (y - y.mean()) / y.std()


def make_task(row: str, seed: int, n: int) -> Tensors:
    """Draw images and noisy targets."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 1, *space_of(row).shape, generator=generator)
    y = target(x, row, generator) + NOISE * torch.randn(n, generator=generator)
    return x, y.unsqueeze(1)


def network(space: Space = PLANE) -> nn.Sequential:
    """A layer that may choose, and a head that no group changes."""
    pool = GroupPool(space.groups[0], "mean")
    sizes = (1, pool.elements * space.fields, space.shape)
    turned = [GConv(*sizes, group=group, kind="lift") for group in space.groups]
    average = nn.AdaptiveAvgPool2d(1) if space.dims == 2 else nn.AdaptiveAvgPool3d(1)
    return nn.Sequential(
        *(Relaxed([*turned, Conv(*sizes), FFC(*sizes)]), nn.Tanh(), pool),
        *(average, nn.Flatten(), nn.Linear(space.fields, 1)),
    )


def loosened(model: nn.Sequential, data: Tensors, config: sr.FitConfig) -> sr.FitConfig:
    """Small paths as `fit` makes them, and options that leave those with a group loose."""
    layer = model[0]
    assert isinstance(layer, Relaxed)
    start_near_(model, data[0][: config.batch_size])
    precisions = dict.fromkeys(path_groups(model), 1.0)
    for i in layer.removable_paths():
        precisions[f"0.paths.{i}"] = FREE_PATH_PRECISION if layer.path(i).group is None else LOOSE
    half = config.epochs // 2 * math.ceil(len(data[1]) / config.batch_size)
    return config.change(start="given", prior_precision=precisions, burn_in=half)


def train(row: str, seed: int, start: Start, options: Options) -> sr.Reading:
    """One network from one start."""
    data = make_task(row, seed, 600 if options.small else 1200)
    epochs = CONFIG.epochs // 2 if options.small else CONFIG.epochs
    torch.manual_seed(seed)
    config = CONFIG.change(seed=seed, device=options.place, epochs=epochs, progress=False)
    model = network(space_of(row))
    if start == "loose":
        config = loosened(model, data, config)
    return sr.fit(model, data, "gaussian", config=config).reading


def run_row(row: str, seed: int, options: Options) -> Run:
    """Train one network, or one from each start, and note what its layer supports."""
    readings = {start: train(row, seed, start, options) for start in options.starts}
    evidences = {start: one.evidence["per_datum"] for start, one in readings.items()}
    best = max(evidences, key=lambda start: evidences[start])
    layer = readings[best].layers[0]
    largest = [one.group for one in layer.symmetry if one.largest]
    found = largest[0] if len(largest) == 1 else "none"
    return {
        "row": _named(row, options.starts),
        "seed": seed,
        "small": options.small,
        "start": best,
        "evidences": {start: -value for start, value in evidences.items()},
        "found": found,
        "right": found == row.rpartition("/")[2],
        "errors": layer.equivariance_error,
        "shares": [path.share for path in layer.paths],
        "evidence": -evidences[best],
        "seconds": sum(one.train["seconds"] for one in readings.values()),
    }


def _named(row: str, starts: Sequence[Start]) -> str:
    """A row, with its starts unless they are the usual ones."""
    return row if tuple(starts) == STARTS[:1] else f"{row}, {' or '.join(starts)}"


def run(options: Options) -> str:
    """All rows and seeds; returns a table as markdown.

    Raises:
        ValueError: patterns that fit no row.
    """
    rows = [row for row in ROWS if options.wants(row)]
    if options.rows and not rows:
        raise ValueError(f"expected rows among {', '.join(ROWS)}, got {' '.join(options.rows)}")
    jobs = [partial(run_row, row, seed, options) for row in rows for seed in options.seed]
    runs = gather(NAME, options.json, jobs)
    return markdown([one for one in runs if one["small"] == options.small])


def markdown(runs: Sequence[Run]) -> str:
    """A table of images and one of volumes."""
    tables = [
        _table([one for one in runs if space_of(one["row"]) is space], space)
        for space in (PLANE, CUBE)
        if any(space_of(one["row"]) is space for one in runs)
    ]
    return "\n\n".join(tables)


def _table(runs: Sequence[Run], space: Space) -> str:
    """One line per row: how often it was right, errors by group, shares by path."""
    names = (*space.groups, "translation")
    head = ["largest group of the data", "found", *(f"error under {name} %" for name in names)]
    head += [f"share of GCONV {' / '.join((*space.groups, 'CONV', 'F-FC'))} %", "-log ev/N"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    order = {row: number for number, row in enumerate(ROWS)}
    rows = {one["row"]: order[one["row"].partition(", ")[0]] for one in runs}
    for row in sorted(rows, key=lambda row: (row.partition(", ")[2], rows[row])):
        of_row = [one for one in runs if one["row"] == row]
        cells = [row.rpartition("/")[2], f"{sum(one['right'] for one in of_row)} of {len(of_row)}"]
        for name in names:
            errors = [100 * one["errors"][name] for one in of_row]
            cells.append(f"{min(errors):.1f} to {max(errors):.1f}")
        shares = zip(*(one["shares"] for one in of_row), strict=True)
        cells.append(" / ".join(f"{100 * mean(path):.0f}" for path in shares))
        cells.append(f"{mean(one['evidence'] for one in of_row):.3f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """The experiment as a command of its own."""
    own: Arguments = {
        **PATTERNS,
        "--small": {"help": "half of the images and of the training"},
        "--data": {"help": "not used"},
        "--seed": {"default": list(Options.seed)},
        "--starts": {"nargs": "+", "default": list(Options.starts), "choices": list(STARTS)},
    }
    command(NAME, lambda **told: run(Options(**told)), own, arguments)


if __name__ == "__main__":
    main()
