r"""Which symmetry does a layer of images have? Several on offer, one beside the other.

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

A row is right if the reading says that this group is the largest that the layer supports: the
measured equivariance error under it is below 5 %.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import symrazor as sr
from symrazor.data import Tensors
from symrazor.experiments.command import ROWS as PATTERNS
from symrazor.experiments.command import Arguments, command
from symrazor.experiments.options import OfTable
from symrazor.experiments.results import Run, gather
from symrazor.layers import FFC, Conv, GConv, GroupPool, Relaxed

NAME = "selection"
SIZE, FIELDS, NOISE = 6, 4, 0.1
CONFIG = sr.FitConfig(epochs=60, batch_size=64, lr=2e-2, every=3)
ROWS = ("p4m", "p4", "translation", "none")


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
    """

    seed: tuple[int, ...] = (0, 1, 2, 3, 4)


def target(x: Tensor, row: str, generator: torch.Generator) -> Tensor:
    """What a filter makes of images, used in one of four ways; mean 0, variance 1."""
    K = torch.randn(1, 1, 3, 3, generator=generator)
    filters = [K]
    if row in ("p4", "p4m"):
        filters = [torch.rot90(K, k, (2, 3)) for k in range(4)]
    if row == "p4m":
        filters += [one.flip(3) for one in filters]
    around = F.pad(x, (1, 1, 1, 1), mode="circular")
    found = torch.tanh(2 * F.conv2d(around, torch.cat(filters))).sum(1)
    if row == "none":
        found = found * (1 + torch.randn(found.shape[1:], generator=generator))
    y = found.mean((1, 2))
    return (y - y.mean()) / y.std()


def make_task(row: str, seed: int, n: int) -> Tensors:
    """Draw images and noisy targets."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 1, SIZE, SIZE, generator=generator)
    y = target(x, row, generator) + NOISE * torch.randn(n, generator=generator)
    return x, y.unsqueeze(1)


def network() -> nn.Sequential:
    """A layer that may choose, and a head that no group changes."""
    sizes = (1, 8 * FIELDS, (SIZE, SIZE))
    choice = Relaxed(
        [
            GConv(*sizes, group="p4m", kind="lift"),
            GConv(*sizes, group="p4", kind="lift"),
            Conv(*sizes),
            FFC(*sizes),
        ]
    )
    head = [GroupPool("p4m", "mean"), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(FIELDS, 1)]
    return nn.Sequential(choice, nn.Tanh(), *head)


def run_row(row: str, seed: int, options: Options) -> Run:
    """Train one network and note what its layer supports."""
    data = make_task(row, seed, 600 if options.small else 1200)
    epochs = CONFIG.epochs // 2 if options.small else CONFIG.epochs
    torch.manual_seed(seed)
    config = CONFIG.change(seed=seed, device=options.place, epochs=epochs, progress=False)
    reading = sr.fit(network(), data, "gaussian", config=config).reading
    layer = reading.layers[0]
    largest = [one.group for one in layer.symmetry if one.largest]
    found = largest[0] if len(largest) == 1 else "none"
    return {
        "row": row,
        "seed": seed,
        "small": options.small,
        "found": found,
        "right": found == row,
        "errors": layer.equivariance_error,
        "shares": [path.share for path in layer.paths],
        "evidence": -reading.evidence["per_datum"],
        "seconds": reading.train["seconds"],
    }


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
    """One line per row: how often it was right, errors by group, shares by path."""
    names = ROWS[:3]
    head = ["largest group of the data", "found", *(f"error under {name} %" for name in names)]
    head += ["share of GCONV p4m / p4 / CONV / F-FC %", "-log ev/N"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in ROWS:
        of_row = [one for one in runs if one["row"] == row]
        if not of_row:
            continue
        cells = [row, f"{sum(one['right'] for one in of_row)} of {len(of_row)}"]
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
    }
    command(NAME, lambda **told: run(Options(**told)), own, arguments)


if __name__ == "__main__":
    main()
