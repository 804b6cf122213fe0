"""Share data, options and results among the experiments of Learning Invariant Weights."""

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from symrazor.core.validation import json_ready
from symrazor.data import normalised, rotated, scaled, translated
from symrazor.data.transforms import MAX_SHIFT_PIXELS
from symrazor.experiments.images import Images, data_seeds, embedded, official
from symrazor.experiments.options import OfOfficialData, OfTable
from symrazor.experiments.results import Run, add_runs
from symrazor.invariance import InvariantWeights
from symrazor.invariance.invariant_weights import Average
from symrazor.training.batched_training import Data, History

SMALL_SIZE, SMALL_TRAIN, SMALL_TEST = 14, 1000, 500
KEPT, LEARNED = 3.0, 10.0
"""Scale of the outputs where it is fixed, and its start where it is learned."""

SIGMA, SMALL_SIGMA = 0.3, 0.6
"""Standard deviation of the frequencies, and the same with `--small`, where images are smaller."""


@dataclass(frozen=True)
class Options(OfOfficialData, OfTable):
    """Options of an experiment.

    Args:
        small: Use images of 14 x 14 and a small network, a minute or two on two cores; the embedded
            digits if there is no data folder.
        json: File to merge the results into; figures are saved next to it.
        steps: Number of steps, if not the experiment's default.
        batch: Batch size, if not the experiment's default.
        samples: Transformations in a step, if not the experiment's default.
        average: Average over "logits", or over "probs" (probabilities) as in the paper, which costs
            several times as much.
        kept_scale: Fixed scale of the outputs in Table 1 and Figure 2, if not the default. Both
            keep it and the standard deviation of the frequencies fixed, as the paper does.
        sigma: Standard deviation of the frequencies in Table 1 and the figures.
        learn_scales: Learn both scales instead.
    """

    steps: int | None = None
    batch: int | None = None
    samples: int | None = None
    average: Average = "logits"
    kept_scale: float | None = None
    sigma: float | None = None
    learn_scales: bool = False

    def __post_init__(self) -> None:
        for name, value in (("kept scale", self.kept_scale), ("sigma", self.sigma)):
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, got {value}.")
        if self.kept_scale is not None and self.learn_scales:
            raise ValueError("--kept-scale and --learn-scales exclude each other.")

    @property
    def scale(self) -> float:
        """Scale of the outputs, at the start or fixed."""
        if self.learn_scales:
            return LEARNED
        return KEPT if self.kept_scale is None else self.kept_scale

    @property
    def frequency(self) -> float:
        """Standard deviation of the frequencies, at the start or fixed."""
        default = SMALL_SIGMA if self.small else SIGMA
        return default if self.sigma is None else self.sigma

    def named(self, row: str) -> str:
        """Return the name of a row in result files, which distinguishes models."""
        options: list[str] = [self.average] if self.average != "logits" else []
        options += ["learned scales"] if self.learn_scales else []
        options += [] if self.kept_scale is None else [f"kept scale {self.kept_scale:g}"]
        options += [] if self.sigma is None else [f"sigma {self.sigma:g}"]
        return f"{row} ({', '.join(options)})" if options else row


VERSIONS: dict[str, Callable[[Tensor, int, float], Tensor]] = {
    "fully rotated": lambda x, seed, shift: rotated(x, 180, seed),
    "partially rotated": lambda x, seed, shift: rotated(x, 90, seed),
    "translated": lambda x, seed, shift: translated(x, shift, seed),
    "scaled": lambda x, seed, shift: scaled(x, 2.0, seed),
    "regular": lambda x, seed, shift: x,
}
"""Version of a data set -> function of (images, seed, largest shift) that transforms them."""


def load(name: str, versions: Sequence[str], options: Options, seed: int = 0) -> tuple[Data, Data]:
    """Return training and test data in several versions, on the device.

    Every image is transformed once; every seed draws other transformations.
    """
    device = options.resolved_device
    parts = []
    for (x, y), drawn in zip(_images(name, options), data_seeds(seed), strict=True):
        shift = MAX_SHIFT_PIXELS[name] * x.shape[-1] / (32 if name == "cifar-10" else 28)
        sets = [VERSIONS[version](x.to(device), drawn, shift) for version in versions]
        if name == "cifar-10":
            sets = [normalised(images, name) for images in sets]
        parts.append(Data.of([(images, y) for images in sets], device))
    return parts[0], parts[1]


def _images(name: str, options: Options) -> Images:
    if options.small and options.data is None:
        return embedded(SMALL_SIZE)
    (x, y), (x_test, y_test) = official(name, options)
    if not options.small:
        return (x, y), (x_test, y_test)
    x, x_test = (
        F.adaptive_avg_pool2d(images, SMALL_SIZE)
        for images in (x[:SMALL_TRAIN], x_test[:SMALL_TEST])
    )
    return (x, y[:SMALL_TRAIN]), (x_test, y_test[:SMALL_TEST])


class Progress:
    """Print step, seconds, fit and ranges of some models to standard error from time to time."""

    def __init__(self, name: str, steps: int, show: Sequence[int], lines: int = 10) -> None:
        self.name, self.steps, self.start = name, steps, time.perf_counter()
        self.show = list(show)
        self.gap, self.next = max(1, steps // lines), 0

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.start

    def __call__(self, step: int, model: InvariantWeights, history: History) -> None:
        """Print a line if one is due."""
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
    """Check rows and result file before the work, not after it."""
    if not options.rows:
        raise ValueError("No rows given. For example: --rows 'regular/*'")
    save(experiment, options, [])


def save(experiment: str, options: Options, runs: Sequence[Run]) -> None:
    """Merge runs into the file, if there is one; figures that are not finite become null."""
    if options.json is not None:
        add_runs(experiment, options.json, json_ready(runs))


def widths_of(model: InvariantWeights, index: int, pixels: float) -> dict[str, float]:
    """Return the ranges of one model by name, with units."""
    return {k: round(v[index].item(), 4) for k, v in model.distribution.describe(pixels).items()}


def degrees(history: History, index: int) -> list[float]:
    """Return the rotation range of one model over training."""
    return [round(math.degrees(w[index, 0].item()), 2) for w in history.widths]
