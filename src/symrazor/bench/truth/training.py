"""Train a fixed architecture well: Adam, a normal prior, and a length chosen on held-out data."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.bench.truth.networks import Architecture, Augment
from symrazor.bench.truth.task import Normal, Prediction, Problem
from symrazor.data import Tensors

BATCH_SIZE = 50
STEPS = 800
"""Steps of the cosine schedule."""
CHECKS = 20
"""Largest number of predictions of the held-out data."""
LEARNING_RATE = 4e-3
PRECISION = 1.0
"""Prior precision of all weights, for inputs and targets of unit deviation."""
HELD_OUT = 0.2
MIN_DEVIATION = 1e-3
"""Smallest deviation of predictions, relative to that of the targets."""
Penalty = Callable[[nn.Module], Tensor]


@dataclass(frozen=True)
class Trained:
    """A trained network with the scaling of its data.

    Args:
        model: the network, in eval mode.
        mean: of the inputs, over samples and positions.
        scale: standard deviation of the inputs.
        target: mean and deviation of the targets; None for classes.
        deviation: of the errors on held-out data, in units of the targets' deviation.
    """

    model: nn.Module
    mean: Tensor
    scale: Tensor
    target: tuple[float, float] | None = None
    deviation: float = 1.0

    @torch.no_grad()
    def predict(self, x: Tensor) -> Prediction:
        """Return the predictions for inputs."""
        outputs = torch.cat([self.model((b - self.mean) / self.scale) for b in x.split(500)])
        if self.target is None:
            return outputs.log_softmax(1)
        mean, scale = self.target
        return Normal(outputs[:, 0] * scale + mean, torch.tensor(self.deviation * scale))


def negative_log_likelihood(prediction: Prediction, y: Tensor) -> Tensor:
    """Return the negative log likelihood of every label."""
    if isinstance(prediction, Normal):
        z = (y - prediction.mean) / prediction.deviation
        return 0.5 * z.square() + prediction.deviation.log() + 0.5 * math.log(2 * math.pi)
    return F.nll_loss(prediction, y, reduction="none")


def accuracy(prediction: Prediction, y: Tensor) -> float:
    """Return the share of right classes, or the share of explained variance."""
    if isinstance(prediction, Normal):
        return float(1 - (y - prediction.mean).square().mean() / y.var(correction=0))
    return float((prediction.argmax(1) == y).float().mean())


def normal_prior(model: nn.Module) -> Tensor:
    """Return the negative log density of the weights, up to a constant."""
    squares = [p.square().sum() for p in model.parameters() if p.requires_grad]
    return PRECISION / 2 * torch.stack(squares).sum()


def train(
    architecture: Architecture, data: Tensors, seed: int, penalty: Penalty = normal_prior
) -> Trained:
    """Train on four fifths to choose the number of steps, then on all data for this number."""
    (kept, held_out), *_ = folds(data, round(1 / HELD_OUT), seed)
    losses, deviations = validation_losses(architecture, kept, held_out, seed, penalty)
    best = int(losses.mean(1).argmin())
    final = _Training(architecture, data, seed, penalty)
    final.run((best + 1) * STEPS // CHECKS)
    return final.result(deviations[best])


def folds(data: Tensors, count: int, seed: int) -> list[tuple[Tensors, Tensors]]:
    """Return pairs of kept and held-out data; every sample is held out once."""
    x, y = data
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    pairs = []
    for part in order.tensor_split(count):
        is_kept = torch.ones(len(y), dtype=torch.bool)
        is_kept[part] = False
        pairs.append(((x[is_kept], y[is_kept]), (x[part], y[part])))
    return pairs


def train_and_predict(architecture: Architecture, problem: Problem) -> Prediction:
    """Train on the training data and predict the test inputs."""
    return train(architecture, problem.labelled, problem.seed).predict(problem.test_x)


def validation_losses(
    architecture: Architecture,
    kept: Tensors,
    held_out: Tensors,
    seed: int,
    penalty: Penalty = normal_prior,
) -> tuple[Float[Tensor, "checks n"], list[float]]:
    """Return the losses of held-out samples during training, and the deviations of errors."""
    training = _Training(architecture, kept, seed, penalty)
    losses, deviations = [], []
    for _ in range(CHECKS):
        training.run(STEPS // CHECKS)
        trained = training.result(1.0)
        prediction = trained.predict(held_out[0])
        deviation = 1.0
        if isinstance(prediction, Normal) and trained.target is not None:
            error = float((prediction.mean - held_out[1]).square().mean().sqrt())
            deviation = max(MIN_DEVIATION, error / trained.target[1])
            prediction = Normal(prediction.mean, torch.tensor(deviation * trained.target[1]))
        losses.append(negative_log_likelihood(prediction, held_out[1]))
        deviations.append(deviation)
    return torch.stack(losses), deviations


class _Training:
    """Adam on batches drawn without replacement, with a cosine schedule over `STEPS`."""

    def __init__(
        self, architecture: Architecture, data: Tensors, seed: int, penalty: Penalty
    ) -> None:
        x, y = data
        # One scale for all features: a scale for each of them would break hidden symmetries.
        self.mean, self.scale = x.mean(), x.std()
        self.x, self.y, self.target = x, y, None
        if y.is_floating_point():
            self.target = (float(y.mean()), float(y.std()))
            self.y = (y - self.target[0]) / self.target[1]
        self.augment: Augment | None = architecture.augment
        self.penalty, self.done = penalty, 0
        self.generator = torch.Generator().manual_seed(seed + 1)
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            self.model = architecture.make()
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimiser = torch.optim.Adam(parameters, LEARNING_RATE)
        self.order = torch.empty(0, dtype=torch.long)

    def run(self, steps: int) -> None:
        """Make some more steps."""
        self.model.train()
        for _ in range(steps):
            if len(self.order) < min(BATCH_SIZE, len(self.y)):
                self.order = torch.randperm(len(self.y), generator=self.generator)
            batch, self.order = self.order[:BATCH_SIZE], self.order[BATCH_SIZE:]
            x = self.x[batch]
            if self.augment is not None:
                x = self.augment(x, self.generator)
            self._step((x - self.mean) / self.scale, self.y[batch])

    def _step(self, x: Tensor, y: Tensor) -> None:
        f = self.model(x)
        loss = F.mse_loss(f[:, 0], y) / 2 if self.target else F.cross_entropy(f, y)
        loss = loss + self.penalty(self.model) / len(self.y)
        rate = 0.5 * (1 + math.cos(math.pi * self.done / STEPS))
        self.optimiser.param_groups[0]["lr"] = LEARNING_RATE * rate
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()
        self.done += 1

    def result(self, deviation: float) -> Trained:
        """Return a copy of the network as it is now."""
        model = copy.deepcopy(self.model).eval()
        return Trained(model, self.mean, self.scale, self.target, deviation)
