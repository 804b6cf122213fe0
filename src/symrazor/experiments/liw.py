"""What the experiments of Learning Invariant Weights have in common: data, options, results."""

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch.nn.functional as F
from torch import Tensor

from symrazor.data import (
    Tensors,
    cifar10,
    digits,
    mnist,
    normalised,
    resized,
    rotated,
    scaled,
    translated,
)
from symrazor.data.transforms import MAX_SHIFT_PIXELS
from symrazor.experiments.command import ROWS, Arguments, command
from symrazor.experiments.options import OfTable
from symrazor.experiments.results import Run, add_runs
from symrazor.invariance import Data, History, InvariantWeights
from symrazor.invariance.invariant_weights import Average

SMALL_SIZE, SMALL_TRAIN, SMALL_TEST = 14, 1000, 500
KEPT, LEARNED = 3.0, 10.0
"""The outputs' scale where it is kept, and where it starts if it is learned."""

SIGMA, SMALL_SIGMA = 0.3, 0.6
"""The frequencies' deviation, and the same with `--small`, where pictures have fewer pixels."""


@dataclass(frozen=True)
class Options(OfTable):
    """What an experiment can be told.

    Args:
        small: pictures of 14 x 14 and a small network, in a minute or two on two cores; the
            embedded digits if there is no folder with data.
        data: folder with the official files.
        device: "auto" for a GPU if there is one.
        seed: one or more, of features, batches and transformations.
        json: file to merge the results into; of figures, also where pictures go.
        rows: patterns of rows to run.
        steps: in place of the experiment's own number.
        batch: in place of the experiment's own number.
        samples: transformations in a step, in place of the experiment's own number.
        average: of "logits", or of "probs" (probabilities) as in the paper, at several times the
            cost.
        kept_scale: where Table 1 and Figure 2 keep the outputs' scale, in place of their own
            number. Both keep it, and the frequencies' deviation as it starts, as the paper does.
        sigma: the frequencies' deviation in Table 1 and the figures, in place of their own number.
        learn_scales: learn both instead.
    """

    steps: int | None = None
    batch: int | None = None
    samples: int | None = None
    average: Average = "logits"
    kept_scale: float | None = None
    sigma: float | None = None
    learn_scales: bool = False

    def __post_init__(self) -> None:
        """Check the scales."""
        for name, value in (("kept scale", self.kept_scale), ("sigma", self.sigma)):
            if value is not None and not value > 0:
                raise ValueError(f"expected a {name} above 0, got {value}")
        if self.kept_scale is not None and self.learn_scales:
            raise ValueError("expected one of --kept-scale and --learn-scales, got both")

    @property
    def scale(self) -> float:
        """Where the outputs' scale starts, or is kept."""
        if self.learn_scales:
            return LEARNED
        return KEPT if self.kept_scale is None else self.kept_scale

    @property
    def frequency(self) -> float:
        """Where the frequencies' deviation starts, or is kept."""
        own = SMALL_SIGMA if self.small else SIGMA
        return own if self.sigma is None else self.sigma

    def named(self, row: str) -> str:
        """The name of a row in files, where different models may meet."""
        told: list[str] = [self.average] if self.average != "logits" else []
        told += ["learned scales"] if self.learn_scales else []
        told += [] if self.kept_scale is None else [f"kept scale {self.kept_scale:g}"]
        told += [] if self.sigma is None else [f"sigma {self.sigma:g}"]
        return f"{row} ({', '.join(told)})" if told else row


VERSIONS: dict[str, Callable[[Tensor, int, float], Tensor]] = {
    "fully rotated": lambda x, seed, shift: rotated(x, 180, seed),
    "partially rotated": lambda x, seed, shift: rotated(x, 90, seed),
    "translated": lambda x, seed, shift: translated(x, shift, seed),
    "scaled": lambda x, seed, shift: scaled(x, 2.0, seed),
    "regular": lambda x, seed, shift: x,
}
"""Version of a data set -> (pictures, seed, largest shift) -> pictures."""


def load(name: str, versions: Sequence[str], options: Options) -> tuple[Data, Data]:
    """Training and test data in several versions, on the device.

    Every picture is transformed once: training data with seed 1, test data with seed 0.
    """
    parts = []
    for split, seed in (("train", 1), ("test", 0)):
        x, y = _pictures(name, split, options)
        shift = MAX_SHIFT_PIXELS[name] * x.shape[-1] / (32 if name == "cifar-10" else 28)
        sets: list[Tensors] = []
        for version in versions:
            moved = VERSIONS[version](x.to(options.place), seed, shift)
            moved = normalised(moved, name) if name == "cifar-10" else moved
            sets.append((moved, y))
        parts.append(Data.of(sets, options.place))
    return parts[0], parts[1]


def _pictures(name: str, split: Any, options: Options) -> Tensors:
    if options.data is None and not options.small:
        raise ValueError("expected --data DIR with the official files, or --small, got neither")
    if options.data is None:
        x, y = digits(split)
        return resized(x, SMALL_SIZE), y
    x, y = (cifar10 if name == "cifar-10" else mnist)(options.data, split)
    if options.small:
        n = SMALL_TRAIN if split == "train" else SMALL_TEST
        x, y = F.adaptive_avg_pool2d(x[:n], SMALL_SIZE), y[:n]
    return x, y


class Progress:
    """A line on standard error now and then: step, seconds, fit and widths of some models."""

    def __init__(self, name: str, steps: int, show: Sequence[int], lines: int = 10) -> None:
        """Begin counting seconds."""
        self.name, self.steps, self.start = name, steps, time.perf_counter()
        self.show = list(show)
        self.gap, self.next = max(1, steps // lines), 0

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.perf_counter() - self.start

    def __call__(self, step: int, model: InvariantWeights, history: History) -> None:
        """Write a line if one is due."""
        if step < self.next and step < self.steps - 1:
            return
        self.next = step + self.gap
        rows = history.widths[-1][self.show].tolist()
        widths = "; ".join(" ".join(f"{value:.3g}" for value in row) for row in rows)
        fit = " ".join(f"{value:.3f}" for value in history.fit[-1][self.show].tolist())
        sys.stderr.write(
            f"{self.name} step {step}/{self.steps} {self.seconds:.0f} s fit {fit} widths {widths}\n"
        )
        sys.stderr.flush()


def check(experiment: str, options: Options) -> None:
    """Refuse a file of something else before the work, not after it."""
    if options.json is not None:
        add_runs(experiment, options.json, [])


def save(experiment: str, options: Options, runs: Sequence[Run]) -> None:
    """Merge runs into the file, if there is one; figures that are not finite become null."""
    if options.json is not None:
        add_runs(experiment, options.json, [_finite(run) for run in runs])


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def widths_of(model: InvariantWeights, place: int, pixels: float) -> dict[str, float]:
    """Widths of one model by name, in units."""
    return {k: round(v[place].item(), 4) for k, v in model.distribution.describe(pixels).items()}


def degrees(history: History, place: int) -> list[float]:
    """The rotation's width of one model over training."""
    return [round(math.degrees(w[place, 0].item()), 2) for w in history.widths]


def main(name: str, run: Callable[[Options], str], arguments: Sequence[str] | None = None) -> None:
    """An experiment as a command of its own, without further packages."""
    own: Arguments = {
        **ROWS,
        "--small": {"help": "14 x 14 pictures, in a minute or two"},
        "--steps": {"type": int},
        "--batch": {"type": int},
        "--samples": {"type": int, "help": "transformations in a step"},
        "--average": {"choices": get_args(Average), "default": "logits"},
        "--kept-scale": {"type": float, "help": "of the outputs, in place of Table 1's own"},
        "--sigma": {"type": float, "help": "deviation of the frequencies"},
        "--learn-scales": {"action": "store_true", "help": "of outputs and frequencies"},
    }
    command(name, lambda **told: run(Options(**told)), own, arguments)
