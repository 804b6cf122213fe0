"""Share data, networks and methods among the experiments on learned invariances."""

import copy
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import symrazor as sr
from symrazor.data import Tensors, normalised, resized
from symrazor.experiments.images import Images, embedded, official, on_device, transformed
from symrazor.experiments.options import OfOfficialData, OfTable
from symrazor.experiments.results import Run
from symrazor.groups.lie import affine2
from symrazor.invariance import Augment, Augmented, Average, Flips, affine
from symrazor.invariance.averaged_network import UNMEASURED
from symrazor.invariance.lie_distributions import Widths
from symrazor.training.augmentation_baselines import (
    LikelihoodConfig,
    ValidationConfig,
    fit_by_likelihood,
    fit_by_validation,
)
from symrazor.training.evidence_training import outputs

SAMPLES = 10
NARROW = {"rotation": 0.3}
"""Narrow starting width where it is not 0.1, in radians."""
FLIPPED = "affine and flips"
WIDE: dict[str, Widths] = {
    "rotation": 2.5,
    "translation": 0.5,
    "scale": 0.6,
    "affine": {name: 2.5 if name == "rotation" else 0.3 for name in affine2().names},
    FLIPPED: 0.3,
}
"""Wide starting widths: radians, half-widths, log factors."""
STRENGTH = 0.01
"""Weight of Augerino's regulariser, as in its paper."""
GRID: dict[str, tuple[float, ...]] = {
    "rotation": (0.1, 0.4, 0.8, 1.6, 3.1),
    "flip": (0.05, 0.25, 0.45),
}
"""Widths that are tried on held-out data."""
DEFAULT_GRID = (0.05, 0.15, 0.4)


@dataclass(frozen=True)
class Options(OfOfficialData, OfTable):
    """Options of an experiment.

    Args:
        small: Use few images of 14 x 14 (the embedded digits without data), minutes on two cores.
        epochs: Number of epochs, if not the experiment's default.
        n: Number of training images, if not the experiment's default.
        average: Average over "outputs", "probabilities" or "joint"; None for "joint".
    """

    epochs: int | None = None
    n: int | None = None
    average: Average | None = None


def pictures(name: str, options: Options, n: int, seed: int) -> Images:
    """Return a random subset of the training data, and the test data, on the device."""
    if options.data is None and options.small and name == "mnist":
        train, test = embedded()
    else:
        train, test = official(name, options)
    chosen = torch.randperm(len(train[1]), generator=torch.Generator().manual_seed(seed))[:n]
    sets = (train[0][chosen], train[1][chosen]), test
    if name == "cifar-10":
        sets = transformed(sets, lambda x, _: normalised(x, name))
    if options.small:
        sets = transformed((sets[0], (test[0][:500], test[1][:500])), lambda x, _: _small(x))
    return on_device(sets, options.resolved_device)


def _small(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 2) if x.shape[-1] == 28 else resized(x, 14)


def convolutional(x: Tensor) -> nn.Module:
    """Return convolutions with max pooling down to at most 3 x 3 pixels, then one dense layer."""
    blocks: list[nn.Module] = []
    channels, size, out = x.shape[1], x.shape[-1], 8
    while size > 3:
        blocks += [nn.Conv2d(channels, out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        channels, size, out = out, size // 2, 2 * out
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(channels * size**2, 10))


def augmentation(kind: str, wide: bool, samples: int = SAMPLES) -> Augment:
    """Return the augmentation to learn, with narrow or wide starting ranges."""
    narrow = 0.05 if kind == "flip" else 0.25
    flips = Flips((-1,), 0.4 if wide else narrow)
    if kind == "flip":
        return Augment(flips, 1)
    chosen = "affine" if kind == FLIPPED else kind
    moves = affine(chosen, WIDE[kind] if wide else NARROW.get(kind, 0.1))
    return Augment([moves, flips] if kind == FLIPPED else moves, samples)


def fit_config(options: Options, epochs: int, every: int, lr: float, batch: int) -> sr.FitConfig:
    """Return training options with evidence estimates by Monte Carlo in large batches."""
    base = sr.FitConfig(epochs=epochs, batch_size=batch, lr=lr, every=every)
    base = base.change(evidence_batch=500, pieces=1, device=options.resolved_device)
    return base.change(estimator="mc", subset=1000, progress=False)


@dataclass(frozen=True)
class Job:
    """One network to train.

    Args:
        kind: Kind of augmentation.
        method: "learned", "likelihood", "augerino", "grid" or "none".
        train: Training data, on the device.
        test: Test data, on the device.
        seed: Seed of weights and shuffling.
        config: Options of `fit`; the baselines use its epochs, batch size and learning rate.
        samples: Copies of each image.
        average: What is averaged over the copies.
        starts: Starts of a learned width; True for a wide one.
    """

    kind: str
    method: str
    train: Tensors
    test: Tensors
    seed: int
    config: sr.FitConfig
    samples: int = SAMPLES
    average: Average = "joint"
    starts: tuple[bool, ...] = (False, True)


def train(job: Job) -> Run:
    """Train a network; with several starts, return the one with the highest evidence."""
    began = time.perf_counter()
    if job.method == "none":
        result = _by_evidence(job, _network(job))
    elif job.method == "learned":
        fits = [_by_evidence(job, _augmented(job, wide)) for wide in job.starts]
        keys = ("log_evidence", "nll", "widths", "averaged")
        result = max(fits, key=lambda fit: float(fit["log_evidence"]))
        result = result | {"starts": [{key: fit[key] for key in keys} for fit in fits]}
    else:
        result = _by_likelihood(job, _augmented(job, wide=False))
    return result | {"seconds": time.perf_counter() - began}


def _network(job: Job) -> nn.Module:
    torch.manual_seed(job.seed)
    return convolutional(job.train[0]).to(job.train[0].device)


def _augmented(job: Job, wide: bool) -> Augmented:
    augment = augmentation(job.kind, wide, job.samples)
    model = Augmented(_network(job), augment, average=job.average)
    return model.to(job.train[0].device)


def _by_evidence(job: Job, model: nn.Module) -> Run:
    fit = sr.fit(model, job.train, config=job.config.change(seed=job.seed, evidence_structure=None))
    shape = tuple(job.train[0].shape[1:])
    return {
        "log_evidence": float(fit.evidence.log_evidence),
        "evidence": -float(fit.evidence.per_datum),
        **tested(model, job.test),
        "widths": model.invariances(shape) if isinstance(model, Augmented) else {},
        "averaged": of_copies(model, shape),
    }


def _by_likelihood(job: Job, model: Augmented) -> Run:
    config = LikelihoodConfig(
        strength=STRENGTH if job.method == "augerino" else 0.0,
        epochs=job.config.epochs,
        batch_size=job.config.batch_size,
        lr=job.config.lr or 2e-3,
        seed=job.seed,
        progress=job.config.progress,
    )
    if job.method == "grid":
        grid = GRID.get(job.kind, DEFAULT_GRID)
        fit_by_validation(model, job.train, config=ValidationConfig(grid, training=config))
    else:
        fit_by_likelihood(model, job.train, config=config)
    widths = model.invariances(tuple(job.train[0].shape[1:]))
    return tested(model, job.test) | {"widths": widths}


def tested(model: nn.Module, test: Tensors) -> dict[str, float]:
    """Return test figures, computed once at the end."""
    scores = sr.Categorical().scores(outputs(model, test[0]), test[1])
    return {"accuracy": 100 * scores["accuracy"], "nll": scores["nll"]}


def of_copies(model: nn.Module, shape: tuple[int, ...]) -> dict[str, float]:
    """Return the ranges of the copies, without the range of poses within them."""
    if not isinstance(model, Augmented):
        return {}
    full_range = copy.deepcopy(model.augment)
    if isinstance(full_range, Augment):
        full_range.reach.fill_(1)
        full_range.shares.fill_(UNMEASURED)
    return full_range.describe(shape)
