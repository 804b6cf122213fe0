r"""Train many `InvariantWeights` models at once, one batched step for all of them on one device.

Models that differ in their data, starting widths, masks and method share every kernel call. The
posterior of the output layer follows natural gradients (`symrazor.invariance.natural_gradient`).
Transformation widths, the output scale and learned filters follow Adam.

`batched_starts.choose_starts` selects the starting widths before the training.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from symrazor.accelerate.devices import tf32
from symrazor.core.parameters import hyperparameters, weights
from symrazor.core.validation import check_at_least, check_choice
from symrazor.data.batches import check_lengths
from symrazor.inference.evidence import Evidence
from symrazor.invariance import mixture
from symrazor.invariance.invariant_weights import InvariantWeights, Sampling, check_labels
from symrazor.invariance.lie_distributions import Nodes, Random
from symrazor.invariance.natural_gradient import NaturalSteps
from symrazor.training.loop import Loop, Task
from symrazor.training.options import Schedule

Method = Literal["vi", "map", "ml"]

ML_PRECISION = 1e-2
"""Prior precision of maximum likelihood: not zero, so that natural-gradient steps stay defined."""
POINT_LOG_SCALE = -30.0
"""Log standard deviation that stands for a point estimate."""
N_EVALUATION_NODES = 64
"""Transformations at which models are evaluated."""
N_EVALUATION_DRAWS = 8
"""Draws of the output weights at which models are evaluated."""
MIN_HOLD = 1e-9
"""A `hold` of zero still skips the very first step, in which the posterior equals the prior."""


@dataclass(frozen=True)
class Member:
    """One of the models.

    Args:
        data: index of its data set.
        learn: whether its widths are learned or fixed.
        method: "vi", the evidence lower bound; "map", a point estimate with the prior; "ml",
            maximum likelihood.
    """

    data: int = 0
    learn: bool = True
    method: Method = "vi"


@dataclass(frozen=True)
class BatchedConfig:
    """Options of `train`. Fractions are fractions of `steps`.

    Args:
        steps: number of training steps.
        batch: examples per step.
        samples: transformations per step.
        scheme: how transformations are drawn, see `symrazor.invariance.draw`.
        settle: fraction, at the end, in which all learning rates decay.
        width_rate: peak learning rate of the raw widths (Adam).
        hold: fraction before widths and filters move; they reach their full rate after another
            such fraction. While the posterior is still as wide as the prior, anything that makes
            the outputs smaller raises the bound.
        scale_rate: peak learning rate of the output scale and of hyperparameters of the features.
        weight_rate: peak learning rate of learned filters, on a cosine from the start.
        rates: rate of the natural gradient before and at the end of `settle`, with a geometric
            decay in between. Widths move no faster than the posterior follows.
        every: steps between factorisations of the posterior precision.
        note_every: steps between entries of the history.
        seed: seed of batches, transformations and draws.
    """

    steps: int = 2000
    batch: int = 512
    samples: int = 32
    scheme: Random = "shifted"
    settle: float = 0.35
    width_rate: float = 0.02
    hold: float = 0.05
    scale_rate: float = 0.02
    weight_rate: float = 1e-3
    rates: tuple[float, float] = (0.05, 0.002)
    every: int = 20
    note_every: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(self, 1, "steps", "batch", "samples", "every", "note_every")
        if not all(0 < rate <= 1 for rate in self.rates):
            raise ValueError(f"rates must be above 0 and at most 1, got {self.rates}.")

    def schedules(self) -> tuple[Schedule, Schedule, Schedule]:
        """Return the schedules of widths, output scale and filters, over training fractions."""
        hold = max(self.hold, MIN_HOLD)
        widths = Schedule(hold=hold, rise=hold, decay_from=1 - self.settle)
        return widths, Schedule(decay_from=1 - self.settle), replace(widths, decay_from=0.0)

    def posterior_rate(self, progress: float) -> float:
        """Return the rate of the natural gradient at a fraction of the training."""
        start, end = self.rates
        return float(start * (end / start) ** Schedule(decay_from=1 - self.settle).decay(progress))


@dataclass
class History:
    """Steps, widths [entries, models, k] and mean log likelihoods [entries, models]."""

    steps: list[int] = field(default_factory=list)
    widths: list[Tensor] = field(default_factory=list)
    fit: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Data:
    """Data sets of equal shape, stacked: x [sets, n, ...], y [sets, n]."""

    x: Tensor
    y: Int64[Tensor, "sets n"]

    @classmethod
    def of(cls, sets: Sequence[tuple[Tensor, Tensor]], device: str = "cpu") -> "Data":
        """Stack pairs (x, y) on a device."""
        if not sets:
            raise ValueError("No data sets: pass at least one pair (x, y).")
        for number, (x, y) in enumerate(sets):
            check_lengths(x, y, f"data set {number}")
        shapes = {(x.shape, y.shape) for x, y in sets}
        if len(shapes) != 1:
            raise ValueError(
                f"All data sets must have the same shape, got {sorted(map(str, shapes))}."
            )
        x = torch.stack([x.to(device) for x, _ in sets])
        return cls(x, torch.stack([y.to(device) for _, y in sets]))

    @property
    def size(self) -> int:
        """Number of examples in each set."""
        return self.y.shape[1]

    def take(self, sets: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same rows of the data set of every model: [models, n, ...], [models, n]."""
        return self.x[sets[:, None], index], self.y[sets[:, None], index]


Note = Callable[[int, InvariantWeights, History], None]


def train(
    model: InvariantWeights,
    data: Data,
    members: Sequence[Member],
    config: BatchedConfig | None = None,
    note: Note | None = None,
) -> History:
    """Train all members of a batched model in place.

    Args:
        model: a model with one leading dimension, one entry per member.
        data: data sets on the model's device.
        members: data set, method and learned widths of each model.
        config: options of the training.
        note: called after every entry of the history, with step, model and history.
    """
    task = _BatchedTask(model, data, members, config or BatchedConfig(), note)
    with tf32(allowed=True):
        Loop(task).run()
    task.close()
    return task.entries


class _BatchedTask(Task):
    """Optimisers and masks of a batched training; a round ends with an entry of the history."""

    def __init__(
        self,
        model: InvariantWeights,
        data: Data,
        members: Sequence[Member],
        config: BatchedConfig,
        note: Note | None,
    ) -> None:
        super().__init__()
        _check(model, data, members)
        self.model, self.data, self.config, self.note = model, data, config, note
        self.done, self.entries = 0, History()
        self._index_batches = _index_batches(data, config)
        like = model.posterior.mean
        self.sets = torch.tensor([m.data for m in members], device=like.device)
        self.learn = torch.tensor([m.learn for m in members]).to(like).unsqueeze(1)
        self.noise = torch.tensor([m.method == "vi" for m in members]).to(like)[:, None, None]
        prior = torch.tensor([ML_PRECISION if m.method == "ml" else 1.0 for m in members])
        model.posterior.requires_grad_(False)
        self.natural = NaturalSteps(model.posterior, prior, config.every)
        generator = torch.Generator(like.device).manual_seed(config.seed)
        self.sampling = Sampling(config.samples, 2, config.scheme, generator)
        features = list(hyperparameters(model.features).values())
        groups = [
            {"params": [model.distribution.width.raw], "peak": config.width_rate},
            {"params": [model.scale.raw, *features], "peak": config.scale_rate},
        ]
        filters = list(weights(model.features).values())
        if filters:
            groups.append({"params": filters, "peak": config.weight_rate})
        self.adam = torch.optim.Adam(groups, lr=config.width_rate, betas=(0.9, 0.99))
        self.schedules = config.schedules()

    def finished(self) -> bool:
        return self.done == self.config.steps

    def batches(self) -> Iterator[Tensor]:
        for index in self._index_batches:
            yield index
            if (self.done - 1) % self.config.note_every == 0 or self.finished():
                return

    def step(self, index: Tensor) -> None:
        x, y = self.data.take(self.sets, index)
        average_logits = self.model.average == "logits"
        update = self._step_logits if average_logits else self._step_probabilities
        self.log_likelihood = update(x, y, self.config.posterior_rate(self.progress))
        self.done += 1

    def evaluate(self) -> None:
        self.entries.steps.append(self.done - 1)
        self.entries.widths.append(self.model.distribution.widths.detach().cpu())
        self.entries.fit.append(self.log_likelihood.cpu())
        if self.note is not None:
            self.note(self.done - 1, self.model, self.entries)

    @property
    def progress(self) -> float:
        return self.done / self.config.steps

    def _step_logits(self, x: Tensor, y: Tensor, rate: float) -> Float[Tensor, " models"]:
        """Average features; the outputs are drawn from their exact distribution."""
        model, sampling = self.model, self.sampling
        h = model.averaged(x, sampling)
        mean = h @ model.posterior.mean.mT
        draws, generator = sampling.draws, sampling.generator
        spread = model.posterior.linear_deviation(h, draws, generator, antithetic=True)
        log_p = (mean + self.noise * spread).log_softmax(-1)
        log_likelihood = self._step_adam(log_p, y)
        p = log_p.detach().exp()
        residual = torch.nn.functional.one_hot(y, p.shape[-1]).to(p) - p.mean(0)
        self.natural.step(h.detach(), residual, (p * (1 - p)).mean(0), self.data.size, rate)
        return log_likelihood

    def _step_probabilities(self, x: Tensor, y: Tensor, rate: float) -> Float[Tensor, " models"]:
        """Average probabilities (`mixture`), with the curvature of the first draw."""
        sampling = self.sampling
        h, shares = self.model.features_per_map(x, sampling)
        f = mixture.outputs(self.model.posterior, h, sampling.draws, sampling.generator, self.noise)
        log_p, joint = mixture.log_mixture(f, shares)
        log_likelihood = self._step_adam(log_p, y)
        with torch.no_grad():
            scale = self.data.size / y.shape[-1]
            inputs = h.flatten(-3, -2)
            score = mixture.score(joint, log_p, y, shares).flatten(-3, -2)
            information = mixture.information(joint[0], log_p[0], shares, h)
            self.natural.follow(scale * information, scale * score.mT @ inputs, inputs, rate)
        return log_likelihood

    def _step_adam(self, log_p: Tensor, y: Tensor) -> Float[Tensor, " models"]:
        """Step widths, scale and filters; return the mean log likelihood before the step."""
        log_likelihood = log_p.gather(-1, y.expand(log_p.shape[:-1]).unsqueeze(-1)).mean((0, 2, 3))
        self.adam.zero_grad(set_to_none=True)
        (-log_likelihood.sum()).backward()
        for group, schedule in zip(self.adam.param_groups, self.schedules, strict=False):
            group["lr"] = group["peak"] * schedule(self.progress)
        raw = self.model.distribution.width.raw
        if raw.grad is not None:
            raw.grad.mul_(self.learn)
        self.adam.step()
        return log_likelihood.detach()

    def close(self) -> None:
        """Factorise the final posterior, and collapse the posterior of point estimates."""
        self.natural.renew()
        with torch.no_grad():
            root = self.model.posterior.root
            points = self.noise == 0
            root.log_diagonal.masked_fill_(points, POINT_LOG_SCALE)
            root.lower.masked_fill_(points.unsqueeze(-1), 0.0)
        self.model.posterior.requires_grad_(True)


def _check(model: InvariantWeights, data: Data, members: Sequence[Member]) -> None:
    count = len(members)
    if model.lead != (count,):
        raise ValueError(
            f"The model must have the leading dimension {count}, one entry per member, got "
            f"{list(model.lead)}. Create its features with lead=({count},)."
        )
    for number, member in enumerate(members):
        if not 0 <= member.data < len(data.y):
            raise ValueError(
                f"Member {number}: data must be between 0 and {len(data.y) - 1}, got {member.data}."
            )
        check_choice(f"The method of member {number}", member.method, Method)
    check_labels(data.y, model.posterior.shape[0], tuple(data.x.shape[:2]))
    widths = model.distribution.width.value
    if widths.dim() != 2 or len(widths) != count:
        raise ValueError(
            f"The starting widths must have the shape [{count}, {model.distribution.dim}], one row "
            f"per member, got {list(widths.shape)}. Use torch.full((members, generators), start)."
        )


def _index_batches(data: Data, config: BatchedConfig) -> Iterator[Tensor]:
    """Yield the indices of full batches, in a new order for every epoch."""
    device = data.y.device
    # Not the seed of the transformations, so that the two streams differ.
    generator = torch.Generator(device).manual_seed(config.seed + 1)
    size, left = min(config.batch, data.size), config.steps
    while left > 0:
        order = torch.randperm(data.size, generator=generator, device=device)
        for index in order.split(size)[: min(left, data.size // size)]:
            yield index
            left -= 1


@torch.no_grad()
def evaluate(
    model: InvariantWeights,
    data: Data,
    members: Sequence[Member],
    nodes: Nodes | None = None,
    batch: int = 500,
) -> tuple[Evidence, Float[Tensor, " models"]]:
    """Return the evidence lower bound and the accuracy of every model at fixed transformations.

    Use training data for the bound, test data for the accuracy. By default there are about 64
    transformations.
    """
    device = data.y.device
    sets = torch.tensor([m.data for m in members], device=device)
    nodes = model.distribution.nodes(N_EVALUATION_NODES) if nodes is None else nodes
    maps, shares = model.distribution.at(nodes)
    generator = torch.Generator(device).manual_seed(0)
    log_likelihood = torch.zeros(len(members), dtype=torch.float64, device=device)
    n_correct = torch.zeros(len(members), device=device)
    for index in torch.arange(data.size, device=device).split(batch):
        x, y = data.take(sets, index)
        log_p = model.log_probabilities(x, (maps, shares), N_EVALUATION_DRAWS, generator)
        of_labels = log_p.gather(-1, y.expand(log_p.shape[:-1]).unsqueeze(-1))
        log_likelihood += of_labels.mean(0).sum((1, 2))
        n_correct += (log_p.exp().mean(0).argmax(-1) == y).sum(1)
    return model.bound(log_likelihood, data.size), n_correct / data.size
