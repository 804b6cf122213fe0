"""Test whether the rotation path grows when the data are rotated, and only then.

The same network, CONV + GCONV(p4) in every layer, is trained on upright digits and on digits
rotated by random quarter turns. The share of the rotation path in the effective parameters,
averaged over layers, should be higher on the rotated digits for every seed. Images are rotated
once, with seeds 1 (training) and 0 (test).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import symrazor as sr
from symrazor.data import normalised, resized
from symrazor.experiments.images import Images, embedded, official, transformed
from symrazor.experiments.options import OfOfficialData, OfSeeds
from symrazor.experiments.results import table, write_json
from symrazor.layers import Conv, GConv, GroupPool, Relaxed


@dataclass(frozen=True)
class Options(OfOfficialData, OfSeeds):
    """Options of the experiment.

    Args:
        small: Use the embedded digits of 8 x 8; otherwise MNIST at 16 x 16.
        json: File for the rows.
        epochs: Number of epochs, if not the experiment's default.
        images: Number of training images and of test images; by default all.
    """

    seed: tuple[int, ...] = (0, 1, 2, 3, 4)
    epochs: int | None = None
    images: int | None = None

    @property
    def width(self) -> int:
        """Fields of the first layer."""
        return 2 if self.small else 4

    @property
    def config(self) -> sr.FitConfig:
        """Training options; small batches for few images."""
        base = sr.FitConfig(epochs=20, batch_size=256, lr=4e-3, every=2)
        if self.small:
            base = sr.FitConfig(epochs=24, batch_size=64, lr=6e-3, every=3)
        elif self.images is not None and self.images < 10_000:
            base = sr.FitConfig(epochs=40, batch_size=64, lr=6e-3, every=4)
        return base.change(epochs=self.epochs or base.epochs, estimator="mc")


def turned(x: Tensor, seed: int) -> Tensor:
    """Rotate each image by 0, 90, 180 or 270 degrees."""
    turns = torch.randint(0, 4, (len(x),), generator=torch.Generator().manual_seed(seed))
    rotations = torch.stack([torch.rot90(x, k, (2, 3)) for k in range(4)])
    return rotations[turns, torch.arange(len(x))]


def network(size: int, width: int) -> nn.Sequential:
    """Return relaxed layers of p4 and translations down to one pixel, then two dense layers."""
    channels = 4 * width
    lift = (1, channels, (size, size))
    blocks: list[nn.Module] = [Relaxed([GConv(*lift, kind="lift"), Conv(*lift)]), nn.ReLU()]
    while size > 1:
        wider = min(2 * channels, 16 * width)
        sizes = (channels, wider, (size, size), 2)
        blocks += [Relaxed([GConv(*sizes), Conv(*sizes)]), nn.ReLU()]
        channels, size = wider, size // 2
    features = channels // 4
    head = [GroupPool("p4"), nn.Flatten(), nn.Linear(features, 32), nn.ReLU(), nn.Linear(32, 10)]
    return nn.Sequential(*blocks, *head)


def data(options: Options) -> Images:
    """Return upright training and test images."""
    if options.small:
        return embedded()
    train, test = (
        (x[: options.images], y[: options.images]) for x, y in official("mnist", options)
    )
    return transformed((train, test), lambda x, _: resized(normalised(x, "mnist"), 16))


def row(options: Options, seed: int, turn: bool, sets: Images) -> dict[str, Any]:
    """Train one network and return the share of the rotation path."""
    (x, y), test = transformed(sets, turned) if turn else sets
    config = options.config.change(
        seed=seed, device=options.resolved_device, evidence_structure=None
    )
    torch.manual_seed(seed)
    model = network(x.shape[-1], options.width)
    reading = sr.fit(model, (x, y), test=test, config=config).reading
    return {
        "seed": seed,
        "data": "turned" if turn else "upright",
        "share": 100 * reading.relative_effective_parameters()["GConv p4"].mean,
        "by_layer": [100 * layer.paths[0].share for layer in reading.layers if layer.relaxed],
        "error": 100 * reading.equivariance_error["p4"],
        "accuracy": 100 * reading.test["accuracy"],
        "evidence": -reading.evidence["per_datum"],
        "seconds": reading.train["seconds"],
    }


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table of both data sets, and for how many seeds the share is higher."""
    higher, lines = 0, []
    seeds = list(dict.fromkeys(row["seed"] for row in rows))
    for seed in seeds:
        by_data = {row["data"]: row for row in rows if row["seed"] == seed}
        compared = by_data["upright"], by_data["turned"]
        lines.append(
            [seed, *(f"{r[k]:.1f}" for k in ("share", "error", "accuracy") for r in compared)]
        )
        higher += by_data["turned"]["share"] > by_data["upright"]["share"]
    head = ["seed", "share of p4 %, upright", "turned", "error under p4 %, upright", "turned"]
    text = table([*head, "accuracy %, upright", "turned"], lines)
    return f"{text}\n\nThe share is higher on rotated data in {higher} of {len(seeds)} seeds."


def run(options: Options) -> str:
    """Compare the share of the rotation path on upright and rotated digits."""
    sets = data(options)
    rows: list[dict[str, Any]] = []
    for seed in options.seed:
        rows += [row(options, seed, turn, sets) for turn in (False, True)]
        write_json(options.json, rows)
    return markdown(rows)
