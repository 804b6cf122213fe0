"""Does the evidence keep absolute positions where labels depend on them, and only there?

Every network is trained with and without absolute positions, and both are compared by their
evidence. Attention of a small vision transformer has relative positions besides, with a prior
precision for each kind (`PositionAttention`). A digit stands in one of four quadrants; the label is
the digit, or digit and quadrant. A convolutional network that labels every pixel has a table of
positions beside its first layer; the label is the shape that the pixel belongs to, or shape and
half of the picture.

    python benchmarks/positions.py --seeds 1 2 3 4 5 --json FILE
"""

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import symrazor as sr
from symrazor.core.likelihood import PerPosition
from symrazor.layers.attention import PositionAttention

DIGITS, SAMPLES, TEST_SAMPLES = 5, 1000, 500
WIDTH, HEADS, GRID, PATCH = 24, 2, (4, 4), 4
SIZE, CHANNELS, SHAPES = 16, 8, 3
MIN_SHARE = 0.01
"""Effective parameters of absolute positions, as a share of their number, from which they count as
kept if they also raise the evidence; chosen with seed 0."""
TRANSFORMER: dict[str, Any] = {"likelihood": "categorical", "epochs": 60, "burn_in": 10}
SEGMENTATION: dict[str, Any] = {
    "likelihood": PerPosition("categorical"),
    "epochs": 30,
    "burn_in": 10,
}
COLUMNS = [
    *("label", "seeds", "positions matter", "right", "log evidence gained by positions, nats"),
    *("effective (%)", "accuracy without (%)", "accuracy with (%)"),
]
Row = tuple[str, int, float, float, float, float]
"""Label, seed, gain of log evidence, share of effective positions, accuracy without and with."""
Split = tuple[Tensor, Tensor]


class Block(nn.Module):
    """Attention and a dense layer, each added to its input."""

    def __init__(self, absolute: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = PositionAttention(WIDTH, HEADS, GRID, absolute=absolute, circular=True)
        self.dense = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens."""
        x = x + self.attention(self.norms[0](x))
        tokens: Tensor = x + self.dense(self.norms[1](x))
        return tokens


class Transformer(nn.Module):
    """A vision transformer of two blocks."""

    def __init__(self, classes: int, absolute: bool) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, PATCH, PATCH)
        self.blocks = nn.Sequential(Block(absolute), Block(absolute))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        tokens = self.patches(x).flatten(2).mT
        logits: Tensor = self.head(self.norm(self.blocks(tokens)).mean(1))
        return logits


class Segmentation(nn.Module):
    """Three circular convolutions; a table of positions is added to the first features."""

    def __init__(self, classes: int, absolute: bool) -> None:
        super().__init__()
        channels = (1, CHANNELS, CHANNELS, classes)
        self.layers = nn.ModuleList(
            nn.Conv2d(a, b, 3, padding=1, padding_mode="circular") for a, b in pairwise(channels)
        )
        table = 0.02 * torch.randn(CHANNELS, SIZE, SIZE)
        self.absolute = nn.Parameter(table) if absolute else None

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of every pixel."""
        first, second, last = self.layers
        h = first(x)
        if self.absolute is not None:
            h = h + self.absolute - self.absolute.mean((1, 2), keepdim=True)
        logits: Tensor = last(F.relu(second(F.relu(h))))
        return logits


def digits(with_quadrant: bool, split: Any, count: int, seed: int) -> Split:
    """Return digits in random quadrants, and their labels."""
    x, y = sr.data.digits(split)
    x, y = x[y < DIGITS], y[y < DIGITS]
    generator = torch.Generator().manual_seed(seed)
    which = torch.randint(len(x), (count,), generator=generator)
    quadrant = torch.randint(4, (count,), generator=generator)
    canvas = torch.zeros(count, 1, 2, 8, 2, 8)
    canvas[torch.arange(count), :, quadrant // 2, :, quadrant % 2] = x[which].view(-1, 1, 8, 8)
    label = y[which]
    return canvas.reshape(count, 1, 16, 16), 4 * label + quadrant if with_quadrant else label


def shapes(with_half: bool, split: Any, count: int, seed: int) -> Split:
    """Return pictures with two full and two hollow squares, and the label of every pixel.

    Background has label 0. With halves, hollow squares count as full in the right half.
    """
    del split
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.zeros(count, SIZE, SIZE), torch.zeros(count, SIZE, SIZE, dtype=torch.long)
    for i in range(count):
        for kind in (1, 2, 1, 2):
            row, column = torch.randint(SIZE, (2,), generator=generator).tolist()
            rows, columns = ((torch.arange(3) + start) % SIZE for start in (row, column))
            x[i, rows[:, None], columns] = 1.0
            y[i, rows[:, None], columns] = kind
            if kind == 2:
                x[i, rows[1], columns[1]] = 0.0
    if with_half:
        right = y[:, :, SIZE // 2 :]
        y[:, :, SIZE // 2 :] = right.clamp(max=1)
    x = x + 0.1 * torch.randn(x.shape, generator=generator)
    return x.unsqueeze(1), y


PROBLEMS: dict[str, tuple[bool, Any, Any, int, dict[str, Any]]] = {
    "digit": (False, partial(digits, False), Transformer, DIGITS, TRANSFORMER),
    "digit and quadrant": (True, partial(digits, True), Transformer, 4 * DIGITS, TRANSFORMER),
    "shape of each pixel": (False, partial(shapes, False), Segmentation, SHAPES, SEGMENTATION),
    "shape and half, of each pixel": (
        *(True, partial(shapes, True), Segmentation, SHAPES, SEGMENTATION),
    ),
}
"""Label -> whether positions matter, data, network, classes, options of fit."""


def measure(job: tuple[str, int]) -> Row:
    """Fit a network with and without positions, and return what the data support."""
    torch.set_num_threads(1)
    label, seed = job
    _, data, network, classes, options = PROBLEMS[label]
    train, test = data("train", SAMPLES, 2 * seed), data("test", TEST_SAMPLES, 2 * seed + 1)
    evidences, accuracies, share = [], [], 0.0
    for absolute in (False, True):
        torch.manual_seed(seed)
        model = network(classes, absolute)
        fit = sr.fit(
            model, train, lr=3e-3, batch_size=50, every=2, estimator="mc", seed=seed, **options
        )
        evidences.append(float(fit.evidence.log_evidence))
        effective = fit.evidence.effective_parameters
        names = [name for name, _ in model.named_parameters() if name.endswith("absolute")]
        if names:
            count = sum(model.get_parameter(name).numel() for name in names)
            share = sum(effective[name] for name in names) / count
        with torch.no_grad():
            right = model.eval()(test[0]).argmax(1) == test[1]
        accuracies.append(float(right.float().mean()))
    return label, seed, evidences[1] - evidences[0], share, accuracies[0], accuracies[1]


def document(rows: list[Row], seeds: list[int]) -> dict[str, Any]:
    """Return the content of the result file."""
    table = []
    for label, (matters, *_) in PROBLEMS.items():
        own = [row for row in rows if row[0] == label]
        if own:
            right = sum((row[2] > 0 and row[3] >= MIN_SHARE) == matters for row in own)
            ranges = [_range([row[2] for row in own], 0)]
            columns = list(zip(*[row[3:] for row in own], strict=True))
            ranges += [_range([100 * value for value in column], 1) for column in columns]
            table.append([label, len(own), "yes" if matters else "no", right, *ranges])
    return {
        "title": "Absolute positions in a vision transformer and in segmentation",
        "question": "Are they kept where labels depend on them, and only there?",
        "command": [
            f"python benchmarks/positions.py --seeds {' '.join(map(str, seeds))} --json FILE"
        ],
        "machine": "one CPU thread",
        "columns": COLUMNS,
        "rows": table,
        "notes": [
            "Least and greatest values over seeds. effective: effective parameters of absolute "
            "positions, as a share of their number, in the network that has them. From "
            f"{100 * MIN_SHARE:.0f} % on, positions that raise the evidence count as kept. The "
            "limit and options were chosen with seed 0.",
        ],
    }


def _range(values: list[float], digits: int) -> str:
    """Return the least and the greatest value in words."""
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def main() -> None:
    """Measure all problems for all seeds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--labels", nargs="+", choices=[*PROBLEMS], default=[*PROBLEMS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    jobs = [(label, seed) for seed in options.seeds for label in options.labels]
    rows: list[Row] = []
    with ProcessPoolExecutor(options.workers) as pool:
        for row in pool.map(measure, jobs):
            rows.append(row)
            print(*row, flush=True)
            if options.json:
                text = json.dumps(document(rows, options.seeds), indent=1) + "\n"
                options.json.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
