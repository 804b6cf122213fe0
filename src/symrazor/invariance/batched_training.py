r"""Many invariant networks trained at once: one batched step for all of them, on one device.

Models that differ in their data, starting widths, masks and method share every kernel call. The
posterior of the outputs moves by natural gradients (`natural.py`), widths $\eta$, the outputs'
scale and learned filters by Adam.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from symrazor.accelerate.devices import tf32
from symrazor.core.evidence import Evidence
from symrazor.core.parameters import hyperparameters, weights
from symrazor.invariance import mixture
from symrazor.invariance.invariant_weights import InvariantWeights, Sampling, check_labels
from symrazor.invariance.lie_distributions import Nodes, Random
from symrazor.invariance.natural_gradient import NaturalSteps

Method = Literal["vi", "map", "ml"]

_ML_DAMPING = 1e-2


@dataclass(frozen=True)
class Member:
    """One of the models.

    Args:
        data: which of the data sets.
        learn: whether its widths are learned, or stay.
        method: "vi", the lower bound; "map", a point estimate with the prior; "ml", without.
    """

    data: int = 0
    learn: bool = True
    method: Method = "vi"


@dataclass(frozen=True)
class Schedule:
    """A training run.

    Args:
        steps: number of batches.
        batch: data in each.
        samples: transformations in each step.
        scheme: how they are drawn.
        settle: share of the steps, at the end, in which everything comes to rest.
        width_rate: Adam's learning rate of raw widths; at the end to 0 on a cosine.
        hold: share of the steps before widths and filters move, and again before they do at full
            rate: while the posterior is still as wide as the prior, whatever makes outputs smaller
            looks good.
        scale_rate: the same for the outputs' scale and for hyperparameters of the features.
        weight_rate: the same for learned filters, on a cosine from the start.
        rates: of the natural gradient: the first, and at the end geometric to the second. Widths
            move no faster than the posterior follows.
        every: steps between two factorisations of the posterior.
        note_every: steps between two notes of the widths.
        seed: of batches, transformations and draws.
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
        """Check ranges."""
        for name in ("steps", "batch", "samples", "every", "note_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} of at least 1, got {getattr(self, name)}")
        if not all(0 < rate <= 1 for rate in self.rates):
            raise ValueError(f"expected rates above 0 and up to 1, got {self.rates}")

    def settling(self, step: int) -> float:
        """From 0 to 1 over the last part of the steps."""
        begin = 1 - self.settle
        return max(0.0, (step / self.steps - begin) / max(self.settle, 1e-9))


@dataclass
class History:
    """What was noted: steps, widths [notes, models, k], mean log likelihood [notes, models]."""

    steps: list[int] = field(default_factory=list)
    widths: list[Tensor] = field(default_factory=list)
    fit: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Data:
    """Data sets of the same shape, side by side: x [sets, n, ...], y [sets, n]."""

    x: Tensor
    y: Int64[Tensor, "sets n"]

    @classmethod
    def of(cls, sets: Sequence[tuple[Tensor, Tensor]], device: str = "cpu") -> "Data":
        """Stack pairs (x, y) on a device."""
        shapes = {(x.shape, y.shape) for x, y in sets}
        if not sets:
            raise ValueError("expected at least one data set, a pair (x, y), got none")
        for x, y in sets:
            if len(x) != len(y):
                raise ValueError(f"expected as many x as y, got {len(x)} and {len(y)}")
        if len(shapes) != 1:
            raise ValueError(
                f"expected data sets of the same shape, got {sorted(map(str, shapes))}"
            )
        x = torch.stack([x.to(device) for x, _ in sets])
        return cls(x, torch.stack([y.to(device) for _, y in sets]))

    @property
    def size(self) -> int:
        """Number of data in each set."""
        return self.y.shape[1]

    def take(self, sets: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """The same data of the sets of all models: [models, n, ...] and [models, n]."""
        return self.x[sets[:, None], index], self.y[sets[:, None], index]


Note = Callable[[int, InvariantWeights, History], None]


def train(
    model: InvariantWeights,
    data: Data,
    members: Sequence[Member],
    schedule: Schedule | None = None,
    note: Note | None = None,
) -> History:
    """Train all members of a batched model.

    Args:
        model: with one leading dimension, a place for each member.
        data: on the model's device.
        members: what each model is.
        schedule: of the training.
        note: called after every note, with step, model and history.

    Raises:
        ValueError: a model without the leading dimension, or of another number.
    """
    plan = Schedule() if schedule is None else schedule
    state = _State(model, data, members, plan)
    history = History()
    with tf32(allowed=True):
        for number, index in enumerate(_batches(data, plan)):
            fit = state.step(number, *data.take(state.sets, index))
            if number % plan.note_every == 0 or number == plan.steps - 1:
                history.steps.append(number)
                history.widths.append(model.distribution.widths.detach().cpu())
                history.fit.append(fit.cpu())
                if note is not None:
                    note(number, model, history)
    state.finish()
    return history


class _State:
    """Optimisers and masks of a run."""

    def __init__(
        self, model: InvariantWeights, data: Data, members: Sequence[Member], plan: Schedule
    ) -> None:
        if model.lead != (len(members),):
            raise ValueError(
                f"expected a model with the leading dimension {len(members)}, one place for each "
                f"member, got {list(model.lead)}; do give its features lead=({len(members)},)"
            )
        _check(model, data, members)
        like = model.posterior.mean
        self.model, self.plan, self.n_data = model, plan, data.size
        self.sets = torch.tensor([m.data for m in members], device=like.device)
        self.learn = torch.tensor([m.learn for m in members]).to(like).unsqueeze(1)
        self.noise = torch.tensor([m.method == "vi" for m in members]).to(like)[:, None, None]
        prior = torch.tensor([_ML_DAMPING if m.method == "ml" else 1.0 for m in members])
        model.posterior.requires_grad_(False)
        self.natural = NaturalSteps(model.posterior, prior, plan.every)
        generator = torch.Generator(like.device).manual_seed(plan.seed)
        self.how = Sampling(plan.samples, 2, plan.scheme, generator)
        shapes = list(hyperparameters(model.features).values())
        groups = [
            {"params": [model.distribution.width.raw], "rate": plan.width_rate},
            {"params": [model.scale.raw, *shapes], "rate": plan.scale_rate},
        ]
        learned = list(weights(model.features).values())
        if learned:
            groups.append({"params": learned, "rate": plan.weight_rate})
        self.adam = torch.optim.Adam(groups, lr=plan.width_rate, betas=(0.9, 0.99))

    def step(self, number: int, x: Tensor, y: Tensor) -> Float[Tensor, " models"]:
        """One batch; returns the mean log likelihood of each model."""
        plan = self.plan
        start, end = plan.rates
        rate = start * (end / start) ** plan.settling(number)
        by = self._features if self.model.average == "logits" else self._probabilities
        return by(number, x, y, rate)

    def _features(self, number: int, x: Tensor, y: Tensor, rate: float) -> Tensor:
        """Features are averaged: outputs are drawn with their exact distribution."""
        model, how = self.model, self.how
        h = model.averaged(x, how)
        mean = h @ model.posterior.mean.mT
        spread = model.posterior.linear_deviation(h, how.draws, how.generator, antithetic=True)
        log_p = (mean + self.noise * spread).log_softmax(-1)
        fit = self._raise(number, log_p, y)
        p = log_p.detach().exp()
        residual = torch.nn.functional.one_hot(y, p.shape[-1]).to(p) - p.mean(0)
        self.natural.step(h.detach(), residual, (p * (1 - p)).mean(0), self.n_data, rate)
        return fit

    def _probabilities(self, number: int, x: Tensor, y: Tensor, rate: float) -> Tensor:
        """Probabilities are averaged, see `mixture.py`; the curvature is that of one draw."""
        h, shares = self.model.features_per_map(x, self.how)
        f = mixture.outputs(self.model.posterior, h, self.how.draws, self.how.generator, self.noise)
        log_p, joint = mixture.log_mixture(f, shares)
        fit = self._raise(number, log_p, y)
        with torch.no_grad():
            scale = self.n_data / y.shape[-1]
            seen = h.flatten(-3, -2)
            factor = mixture.score(joint, log_p, y, shares).flatten(-3, -2)
            found = mixture.information(joint[0], log_p[0], shares, h)
            self.natural.follow(scale * found, scale * factor.mT @ seen, seen, rate)
        return fit

    def _raise(self, number: int, log_p: Tensor, y: Tensor) -> Float[Tensor, " models"]:
        """A step of Adam; the mean log likelihood before it."""
        fit = log_p.gather(-1, y.expand(log_p.shape[:-1]).unsqueeze(-1)).mean((0, 2, 3))
        self.adam.zero_grad(set_to_none=True)
        (-fit.sum()).backward()
        self._adam(number)
        return fit.detach()

    def _adam(self, number: int) -> None:
        done = number / self.plan.steps
        hold = max(self.plan.hold, 1e-9)
        ramp = min(1.0, max(0.0, done / hold - 1))
        tail = 0.5 * (1 + math.cos(math.pi * self.plan.settling(number)))
        late = ramp * tail
        even = ramp * 0.5 * (1 + math.cos(math.pi * done))
        for place, group in enumerate(self.adam.param_groups):
            group["lr"] = group["rate"] * (late if place == 0 else tail if place == 1 else even)
        raw = self.model.distribution.width.raw
        if raw.grad is not None:
            raw.grad.mul_(self.learn)
        self.adam.step()

    def finish(self) -> None:
        """Leave the posterior as it was learned; a point estimate gets no spread worth naming."""
        self.natural.renew()
        with torch.no_grad():
            root = self.model.posterior.root
            points = self.noise == 0
            root.log_diagonal.masked_fill_(points, -30.0)
            root.lower.masked_fill_(points.unsqueeze(-1), 0.0)
        self.model.posterior.requires_grad_(True)


def _check(model: InvariantWeights, data: Data, members: Sequence[Member]) -> None:
    """Members with data and a method, labels that are classes, a width for each member."""
    for member in members:
        if not 0 <= member.data < len(data.y):
            raise ValueError(
                f"expected a data set between 0 and {len(data.y) - 1}, got data={member.data}"
            )
        if member.method not in get_args(Method):
            raise ValueError(f"expected method in {get_args(Method)}, got {member.method!r}")
    check_labels(data.y, model.posterior.shape[0], tuple(data.x.shape[:2]))
    widths = model.distribution.width.value
    if widths.dim() != 2 or len(widths) != len(members):
        raise ValueError(
            f"expected widths [{len(members)}, {model.distribution.dim}], a row for each member, "
            f"got {list(widths.shape)}; do pass torch.full((members, generators), start)"
        )


def _batches(data: Data, plan: Schedule) -> Iterator[Tensor]:
    """Indices of whole batches, a new order in every pass."""
    device = data.y.device
    generator = torch.Generator(device).manual_seed(plan.seed + 1)
    size, left = min(plan.batch, data.size), plan.steps
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
    """The lower bound and the accuracy of every model on its data, at fixed transformations.

    Args:
        model: with a leading dimension.
        data: training data for the bound; test data for the accuracy.
        members: what each model is.
        nodes: of the transformations; about 64 by default.
        batch: data at a time.
    """
    device = data.y.device
    sets = torch.tensor([m.data for m in members], device=device)
    nodes = model.distribution.nodes(64) if nodes is None else nodes
    maps, shares = model.distribution.at(nodes)
    generator = torch.Generator(device).manual_seed(0)
    fit = torch.zeros(len(members), dtype=torch.float64, device=device)
    right = torch.zeros(len(members), device=device)
    for index in torch.arange(data.size, device=device).split(batch):
        x, y = data.take(sets, index)
        log_p = model.log_probabilities(x, (maps, shares), 8, generator)
        picked = log_p.gather(-1, y.expand(log_p.shape[:-1]).unsqueeze(-1))
        fit += picked.mean(0).sum((1, 2))
        right += (log_p.exp().mean(0).argmax(-1) == y).sum(1)
    return model.bound(fit, data.size), right / data.size
