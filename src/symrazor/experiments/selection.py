r"""Choose among several symmetries of one layer, for images and for volumes.

One relaxed layer with GCONV(p4m), GCONV(p4), CONV and F-FC, each with its own prior, then tanh and
a mean over everything. The images are noise. The targets are made by a filter K in these ways:

| row | target: the mean over positions p of | largest group of the target |
|---|---|---|
| p4m | $\sum_g \tanh(2\,gK * x)(p)$ over quarter turns and reflections g | p4m |
| p4 | the same over quarter turns | p4 |
| translation | $\tanh(2\,K * x)(p)$ | translations |
| none | the same, with a weight for each position, 1 on average | none |
| volumes/O | the first in three dimensions, over the 24 rotations of a cube | O |
| volumes/translation, volumes/none | as above | translations; none |

With start "near", `fit` starts every path except that of the largest group small and with a
precision of 30. With start "loose", paths with a group start with a precision of 0.1, and
precisions change only from the middle of the training on. With `--starts near loose` a network is
trained from both, and the one with the higher evidence counts.

A row is correct if the reading says that this group is the largest that the layer supports: the
measured equivariance error under it is below 5 %.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import symrazor as sr
from symrazor.data import Tensors
from symrazor.experiments.options import OfTable
from symrazor.experiments.results import Run, run_rows, table
from symrazor.groups import OnGrid, cyclic, dihedral, octahedral
from symrazor.layers import FFC, Conv, GConv, GroupPool, Relaxed, path_groups
from symrazor.layers.relaxed import FREE_PATH_PRECISION, start_near_

NAME = "selection"
NOISE = 0.1
CONFIG = sr.FitConfig(epochs=60, batch_size=64, lr=2e-2, every=3, evidence_structure=None)
LOOSE = 0.1
"""Precision of the paths of smaller groups until the first evidence step, with start "loose"."""
Start = Literal["near", "loose"]
STARTS: tuple[Start, ...] = ("near", "loose")
ROWS = ("p4m", "p4", "translation", "none", "volumes/O", "volumes/translation", "volumes/none")


@dataclass(frozen=True)
class Space:
    """Inputs of a layer and the groups to choose from.

    Args:
        dims: 2 for images, 3 for volumes.
        size: Length of each dimension.
        fields: Fields of the largest group.
        groups: Groups with rotations, the largest first.
    """

    dims: int
    size: int
    fields: int
    groups: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one channel."""
        return (self.size,) * self.dims


PLANE, CUBE = Space(2, 6, 4, ("p4m", "p4")), Space(3, 4, 2, ("O",))


def space_of(row: str) -> Space:
    """Return the space of a row: images or volumes."""
    return CUBE if row.startswith("volumes/") else PLANE


@dataclass(frozen=True)
class Options(OfTable):
    """Options of the experiment.

    Args:
        small: Use half of the images and of the training.
        rows: Patterns of rows, see the module.
        starts: How the paths of smaller groups start, see the module. Of several, the one with
            the highest evidence counts.
    """

    seed: tuple[int, ...] = (0, 1, 2, 3, 4)
    starts: tuple[Start, ...] = STARTS[:1]

    def __post_init__(self) -> None:
        if not self.starts or set(self.starts) - {*STARTS}:
            raise ValueError(f"Unknown starts {self.starts}. Choose from {STARTS}.")


def target(x: Tensor, row: str, generator: torch.Generator) -> Tensor:
    """Apply a filter to images as a row requires; standardised to mean 0 and variance 1."""
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
    responses = torch.tanh(size * convolve(around, torch.cat(filters))).sum(1)
    if name == "none":
        responses = responses * (1 + torch.randn(responses.shape[1:], generator=generator))
    y = responses.flatten(1).mean(1)
    return (y - y.mean()) / y.std()


def make_task(row: str, seed: int, n: int) -> Tensors:
    """Generate images and noisy targets."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 1, *space_of(row).shape, generator=generator)
    y = target(x, row, generator) + NOISE * torch.randn(n, generator=generator)
    return x, y.unsqueeze(1)


def network(space: Space = PLANE) -> nn.Sequential:
    """Return a layer with several paths, and a head that is invariant to all groups."""
    pool = GroupPool(space.groups[0], "mean")
    sizes = (1, pool.elements * space.fields, space.shape)
    turned = [GConv(*sizes, group=group, kind="lift") for group in space.groups]
    average = nn.AdaptiveAvgPool2d(1) if space.dims == 2 else nn.AdaptiveAvgPool3d(1)
    return nn.Sequential(
        *(Relaxed([*turned, Conv(*sizes), FFC(*sizes)]), nn.Tanh(), pool),
        *(average, nn.Flatten(), nn.Linear(space.fields, 1)),
    )


def loosened(model: nn.Sequential, data: Tensors, config: sr.FitConfig) -> sr.FitConfig:
    """Scale the paths as `fit` does; return options with a wide prior for paths with a group."""
    layer = model[0]
    assert isinstance(layer, Relaxed)
    start_near_(model, data[0][: config.batch_size])
    precisions = dict.fromkeys(path_groups(model), 1.0)
    for i in layer.removable_paths():
        precisions[f"0.paths.{i}"] = FREE_PATH_PRECISION if layer.path(i).group is None else LOOSE
    half = config.epochs // 2 * math.ceil(len(data[1]) / config.batch_size)
    return config.change(start="given", prior_precision=precisions, burn_in=half)


def train(row: str, seed: int, start: Start, options: Options) -> sr.Reading:
    """Train one network from one start."""
    data = make_task(row, seed, 600 if options.small else 1200)
    epochs = CONFIG.epochs // 2 if options.small else CONFIG.epochs
    torch.manual_seed(seed)
    config = CONFIG.change(seed=seed, device=options.resolved_device, epochs=epochs, progress=False)
    model = network(space_of(row))
    if start == "loose":
        config = loosened(model, data, config)
    return sr.fit(model, data, "gaussian", config=config).reading


def run_row(row: str, seed: int, options: Options) -> Run:
    """Train one network, or one from each start, and return what its layer supports."""
    readings = {start: train(row, seed, start, options) for start in options.starts}
    evidences = {start: reading.evidence["per_datum"] for start, reading in readings.items()}
    best = max(evidences, key=lambda start: evidences[start])
    layer = readings[best].layers[0]
    largest = [symmetry.group for symmetry in layer.symmetry if symmetry.largest]
    group = largest[0] if len(largest) == 1 else "none"
    return {
        "row": row if options.starts == STARTS[:1] else f"{row}, {' or '.join(options.starts)}",
        "start": best,
        "evidences": {start: -value for start, value in evidences.items()},
        "found": group,
        "right": group == row.rpartition("/")[2],
        "errors": layer.equivariance_error,
        "shares": [path.share for path in layer.paths],
        "evidence": -evidences[best],
        "seconds": sum(reading.train["seconds"] for reading in readings.values()),
    }


def run(options: Options) -> str:
    """Choose among four symmetries of one layer on images.

    Raises:
        ValueError: No row matches the patterns.
    """
    return markdown(run_rows(NAME, options, ROWS, run_row))


def markdown(runs: Sequence[Run]) -> str:
    """Return a table of images and one of volumes."""
    by_space = {
        space: [run for run in runs if space_of(run["row"]) is space] for space in (PLANE, CUBE)
    }
    return "\n\n".join(_table(part, space) for space, part in by_space.items() if part)


def _table(runs: Sequence[Run], space: Space) -> str:
    """Return one line per row: number of correct results, errors by group, shares by path."""
    groups = (*space.groups, "translation")
    head = ["largest group of the data", "found", *(f"error under {group} %" for group in groups)]
    head += [f"share of GCONV {' / '.join((*space.groups, 'CONV', 'F-FC'))} %", "-log ev/N"]
    names = {run["row"]: run["row"].partition(", ") for run in runs}
    lines = []
    for row in sorted(names, key=lambda row: (names[row][2], ROWS.index(names[row][0]))):
        row_runs = [run for run in runs if run["row"] == row]
        right = f"{sum(run['right'] for run in row_runs)} of {len(row_runs)}"
        cells = [row.rpartition("/")[2], right]
        for group in groups:
            errors = [100 * run["errors"][group] for run in row_runs]
            cells.append(f"{min(errors):.1f} to {max(errors):.1f}")
        shares = zip(*(run["shares"] for run in row_runs), strict=True)
        cells.append(" / ".join(f"{100 * mean(path):.0f}" for path in shares))
        lines.append([*cells, f"{mean(run['evidence'] for run in row_runs):.3f}"])
    return table(head, lines)
