# Over 400 lines: one method, from its network to the ranges that are read from it.
r"""Measure over which range of a transformation the inputs of a class are spread.

Move each input by a random amount e and train a network to predict e from the moved input and its
label. If the inputs of a class occur in poses that are uniform on $[-v, v]$, the moved input shows
the sum of its pose and e, and nothing can predict e better than a uniform density on an interval of
length 2v. The cross-entropy of held-out predictions therefore bounds the range,

$$ -\mathrm{E} \log p(e \mid T_e x, y) \ge \log 2v , $$

with equality for a perfect network and inputs whose pose can be seen. Inputs that look similar in
several poses (a zero, a frog) say nothing about v; the range is read from the inputs of which the
network is most certain (`CERTAIN_SHARE`, selected by the predicted entropy, not by the loss). On a
circle, the predicted angles give a better estimate (`symrazor.invariance.window`).

The same predictions answer two questions:

- **Are the inputs spread by T, or aligned?** Without labels. If x and T x have the same
  distribution, e is independent of $T_e x$: a classifier two-sample test with an exact null
  distribution, given the network of the other fold.
- **Are labels unchanged by T?** With labels. Over the range on which the inputs of one class are
  spread, a movement changes the input but not its label. If inputs are spread but those of each
  class are aligned, the label depends on the transformation.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import NormalDist
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from symrazor.accelerate.workers import Workers
from symrazor.invariance.flows import Flow, per_input
from symrazor.invariance.pose_network import PoseNetwork
from symrazor.invariance.window import (
    WINDOW_SHARE,
    Window,
    fit_line,
    fit_window,
    positions,
    predicted_angles,
)

CERTAIN_SHARE, MIN_CERTAIN = 0.1, 40
"""Share, and number, of the inputs from which the range is read."""
STEPS, TEST_STEPS, BATCH = 4000, 600, 64
"""Training steps of each fold and inputs of each step."""
EVALUATIONS, VALIDATION_SHARE, VALIDATION_DRAWS = 8, 0.15, 4
MAX_VALIDATION, MAX_READ = 800, 3000
"""Largest number of validation inputs, and of held-out inputs of a fold that are predicted."""
READ_DRAWS = 8
"""Movements of each held-out input; on a line, two in every cell."""
MIN_INFORMATION = 0.1
"""Nats by which predictions on a line must be better than guesses to show poses."""
LEARNING_RATE, WEIGHT_DECAY = 3e-3, 1e-3
MIN_PEAK_UNIFORMITY, MAX_PEAK_WIDTH = 0.9, 0.6
"""The elements of a cyclic group are separate peaks if all inputs find them about equally probable,
and certain inputs place them within this share of the period."""


@dataclass(frozen=True)
class Spread:
    """The spread of inputs over one transformation.

    Args:
        flow: the transformation.
        cross_entropy: of the amount, for certain inputs, in nats; at most that of a guess.
        standard_error: of the cross-entropy.
        p_value: of the hypothesis that the inputs are distributed evenly over all amounts.
        order: number of equally probable discrete elements; 1 for a continuous range.
        window: range from predicted amounts; None to use the cross-entropy.
    """

    flow: Flow = field(repr=False)
    cross_entropy: float
    standard_error: float
    p_value: float
    order: int = 1
    window: Window | None = None

    @property
    def range(self) -> float:
        """Return the range in either direction, at most what was tested, in the flow's unit."""
        if self.window is not None:
            end = self.flow.end if self.flow.kind == "line" else math.pi
            return self.flow.reported(min(self.window.range, end))
        return self._range(self.cross_entropy)

    @property
    def interval(self) -> tuple[float, float]:
        """Return the range at two standard errors of its estimate to both sides."""
        if self.window is not None:
            return self.flow.reported(self.window.low), self.flow.reported(self.window.high)
        error = 2 * self.standard_error
        return self._range(self.cross_entropy - error), self._range(self.cross_entropy + error)

    @property
    def bounds(self) -> tuple[float, float]:
        """Return the interval, with its lower end moved by the error of an imperfect network."""
        if self.window is not None:
            return self.interval
        bias = 0.0 if self.flow.kind == "choice" else math.log(MAX_EXCESS)
        low = self.cross_entropy - 2 * self.standard_error - bias
        return self._range(low), self.interval[1]

    @property
    def is_open(self) -> bool:
        """Return whether the inputs are spread by more than natural variation."""
        return self.range >= self.flow.min_range or self.order > 1

    @property
    def is_whole(self) -> bool:
        """Return whether the inputs fill the whole range that was tested."""
        flow = self.flow
        if flow.kind == "line" and self.window is not None:
            return self.window.low >= flow.end
        share = {"choice": WHOLE_CHOICE, "circle": WHOLE_CIRCLE, "line": 1.0}[flow.kind]
        end = 0.5 if flow.kind == "choice" else flow.reported(flow.end)
        return self.order == 1 and self.range >= share * end

    @property
    def amount(self) -> float:
        """Return the range in the amounts of the flow."""
        flow, value = self.flow, self.range
        if flow.kind == "choice":
            return value
        return math.log(value) if flow.unit == "factor" else value / flow.display

    def _range(self, cross_entropy: float) -> float:
        flow = self.flow
        if flow.kind == "choice":
            return _inverse_binary_entropy(cross_entropy)
        if flow.kind == "circle":
            share = min(1.0, math.exp(cross_entropy) / (flow.bins * self.order))
            return flow.reported(math.pi * share)
        half_width = min(1.0, half_width_on_line(cross_entropy, flow.bins))
        return flow.reported(half_width * flow.end)


MAX_EXCESS = 1.5
"""Factor by which an imperfect network makes ranges too wide: at most 1.45 in development, for
CIFAR-10 turned by 45 degrees and MNIST by 20."""
WHOLE_CIRCLE, WHOLE_CHOICE = 0.92, 0.8
"""Shares of the circle, and of the probability 1/2, from which inputs count as evenly spread."""
MAX_HALF_WIDTH = 4.0
"""Largest range on a line that is distinguished, in tested ranges."""


def half_width_on_line(cross_entropy: float, bins: int) -> float:
    r"""Return the half-width v of uniform poses, in units of the largest amount a = 1.

    With e uniform on $[-1, 1]$ and the pose on $[-v, v]$, the entropy of e given their sum is
    $\log 2v - v / 2$ for $v \le 1$ and $\log 2 - 1 / (2v)$ beyond.
    """
    entropy = cross_entropy + math.log(2 / bins)  # of the amount, not of its cell
    low, high = 1e-6, MAX_HALF_WIDTH
    for _ in range(60):
        v = 0.5 * (low + high)
        value = math.log(2 * v) - v / 2 if v <= 1 else math.log(2) - 1 / (2 * v)
        low, high = (v, high) if value < entropy else (low, v)
    return 0.5 * (low + high)


def _inverse_binary_entropy(cross_entropy: float) -> float:
    """Return the smaller probability of two elements with this entropy."""
    low, high = 0.0, 0.5
    for _ in range(50):
        p = 0.5 * (low + high)
        value = -p * math.log(p) - (1 - p) * math.log(1 - p) if 0 < p < 1 else 0.0
        low, high = (p, high) if value < cross_entropy else (low, p)
    return 0.5 * (low + high)


@dataclass(frozen=True)
class Spreads:
    """Spreads of the inputs of a class, and of all inputs, by name of the flow."""

    of_class: dict[str, Spread]
    of_all: dict[str, Spread]


def measure_spread(
    x: Float[Tensor, "n ..."],
    y: Tensor | None,
    flows: Sequence[Flow],
    seed: int = 0,
    steps: int = STEPS,
    workers: int = 1,
    is_cloud: bool = False,
) -> Spreads:
    """Measure the spread of inputs over several transformations, by two-fold cross-fitting.

    Args:
        x: inputs as the flows expect them.
        y: classes; None if there are none.
        flows: the transformations.
        seed: of folds, movements and weights.
        steps: training steps of each fold.
        workers: 2 to train both folds at the same time, in processes.
        is_cloud: whether inputs [n, points, d] are point clouds; else they are series [n, c, t].
    """
    n = len(x)
    if n < 2 * MIN_CERTAIN:
        raise ValueError(f"measure_spread needs at least {2 * MIN_CERTAIN} inputs, got {n}.")
    labels = torch.zeros(n, dtype=torch.long) if y is None else y
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    shared = (x, labels, tuple(flows), order, steps, seed, is_cloud)
    with Workers(workers, shared) as pool:
        predictions = [result for _, result in sorted(pool.run(_run_fold, (0, 1)))]
    merged = [
        [
            [torch.cat(parts) for parts in zip(*pair, strict=True)]
            for pair in zip(*runs, strict=True)
        ]
        for runs in zip(*predictions, strict=True)
    ]
    of_class, of_all = (
        {flow.name: _spread(flow, *merged[j][network]) for j, flow in enumerate(flows)}
        for network in (0, 1)
    )
    return Spreads(of_class, of_all)


def two_sample_test(
    x: Float[Tensor, "n ..."],
    transform: Callable[[Tensor], Tensor],
    seed: int = 0,
    steps: int = TEST_STEPS,
) -> float:
    """Return the p-value of the hypothesis that x and its transformed copy are distributed alike.

    A network learns to tell them apart on one half of the inputs, and is tested on the other half,
    for both halves. A transformation may be random, drawn anew in each call.

    Args:
        x: inputs [n, d], series [n, c, t] or images [n, c, h, w]; at least 80.
        transform: function of a batch of inputs.
        seed: of halves and weights.
        steps: training steps of each half.
    """
    move = partial(_move_some, transform, x.mean(), x.std().clamp(min=1e-12))
    flow = Flow("transformation", "choice", 2, 1, "probability", move)
    return measure_spread(x, None, [flow], seed, steps).of_all[flow.name].p_value


def _move_some(
    transform: Callable[[Tensor], Tensor],
    mean: Tensor,
    deviation: Tensor,
    x: Tensor,
    amount: Tensor,
) -> Tensor:
    """Transform the inputs with amount 1, and standardise all."""
    moved = torch.where(per_input(amount, x) > 0, transform(x), x)
    return (moved - mean) / deviation


Predictions = list[list[tuple[Tensor, Tensor]]]


def _run_fold(shared: tuple[Any, ...], fold: int) -> Predictions:
    """Train on one half of the inputs, and predict the other."""
    x, y, flows, order, steps, seed, is_cloud = shared
    with torch.random.fork_rng([]):
        torch.manual_seed(seed + fold)
        network = PoseNetwork(x[:1], flows, int(y.max()) + 1, is_cloud)
        training = _Training(network, x, y, flows, order[1 - fold :: 2], seed + fold)
        training.run(steps)
        return training.predict(order[fold::2][:MAX_READ])


class _Training:
    """One fold: a network that is trained on some inputs and predicts the others."""

    def __init__(
        self,
        network: PoseNetwork,
        x: Tensor,
        y: Tensor,
        flows: Sequence[Flow],
        train: Tensor,
        seed: int,
    ) -> None:
        self.network, self.x, self.y, self.flows = network, x, y, flows
        count = max(MIN_CERTAIN // 2, min(MAX_VALIDATION, int(VALIDATION_SHARE * len(train))))
        self.validation, self.train = train[:count], train[count:]
        self.generator = torch.Generator().manual_seed(seed)
        self.states = [dict(self.network.state_dict())] * len(flows)

    def run(self, steps: int) -> None:
        """Train, and keep for each flow the state with the best validation loss."""
        optimiser = torch.optim.AdamW(
            self.network.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY
        )
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, LEARNING_RATE, steps)
        best = [math.inf] * len(self.flows)
        for step in range(steps):
            pick = torch.randint(len(self.train), (BATCH,), generator=self.generator)
            loss = self._loss(self.train[pick], step % len(self.flows), self.generator).sum()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            if (step + 1) * EVALUATIONS // steps > step * EVALUATIONS // steps:
                self._keep_best(best)

    def _loss(self, index: Tensor, flow: int, generator: torch.Generator) -> Tensor:
        """Return the cross-entropies with labels and without."""
        cell, amount = self.flows[flow].draw(len(index), generator)
        moved = self.flows[flow].move(self.x[index], amount)
        outputs = self.network(moved, self.y[index], flow)
        return torch.stack([F.nll_loss(f, cell) for f in outputs])

    @torch.no_grad()
    def _keep_best(self, best: list[float]) -> None:
        self.network.eval()
        index = self.validation.repeat(VALIDATION_DRAWS)
        generator = torch.Generator().manual_seed(0)
        for j in range(len(self.flows)):
            loss = float(self._loss(index, j, generator).sum())
            if loss < best[j]:
                best[j] = loss
                self.states[j] = {k: v.clone() for k, v in self.network.state_dict().items()}
        self.network.train()

    @torch.no_grad()
    def predict(self, index: Tensor) -> Predictions:
        """Return log probabilities and true cells for each flow, with labels and without.

        For a circle, the predictions of several movements of an input are turned back and averaged;
        the true cell is then 0.
        """
        self.network.eval()
        generator, results = torch.Generator().manual_seed(1), []
        for j, flow in enumerate(self.flows):
            self.network.load_state_dict(self.states[j])
            draws, cells = [], []
            count = 2 * flow.bins if flow.kind == "line" else READ_DRAWS
            first = torch.randint(flow.bins, (len(index),), generator=generator)
            for draw in range(count):
                cell, amount = flow.draw(len(index), generator)
                if flow.kind == "line":  # every cell twice
                    cell = (first + draw) % flow.bins
                    amount = flow.amounts(cell, torch.rand(len(index), generator=generator))
                moved = flow.move(self.x[index], amount)
                outputs = torch.stack(self.network(moved, self.y[index], j))
                if flow.is_cyclic:
                    places = (torch.arange(flow.bins) + cell.unsqueeze(1)) % flow.bins
                    outputs = outputs.gather(2, places.expand(2, -1, -1))
                    cell = torch.zeros_like(cell)
                draws.append(outputs)
                cells.append(cell)
            stacked, true = torch.stack(draws), torch.stack(cells)
            if flow.is_cyclic:
                stacked, true = stacked.mean(0, keepdim=True).log_softmax(-1), true[:1]
            results.append([(stacked[:, network].transpose(0, 1), true.T) for network in (0, 1)])
        return results


def _spread(flow: Flow, log_p: Float[Tensor, "n draws bins"], cell: Tensor) -> Spread:
    """Return the spread from held-out predictions."""
    log_p = log_p.double()
    scores = log_p.gather(2, cell.unsqueeze(2)).squeeze(2)
    entropy = -(log_p.exp() * log_p).sum(2).mean(1)
    count = min(len(entropy), max(MIN_CERTAIN, int(CERTAIN_SHARE * len(entropy))))
    certain = entropy.argsort()[:count]
    # On a line, the entropy depends on the pose, and must not select inputs.
    losses = -(scores if flow.kind == "line" else scores[certain]).mean(1)
    error = float(losses.std()) / math.sqrt(len(losses))
    loss, order, window = float(losses.mean()), 1, None
    if flow.kind == "circle":
        order = _peaks(log_p[:, 0], certain)
        if order == 1:
            count = max(MIN_CERTAIN, int(WINDOW_SHARE * len(entropy)))
            window = fit_window(predicted_angles(log_p[entropy.argsort()[:count], 0]))
    elif flow.kind == "line" and loss < math.log(flow.bins) - MIN_INFORMATION:
        window = _window_on_line(flow, log_p)
    loss = min(loss, math.log(flow.bins))
    return Spread(flow, loss, error, _p_value(log_p[:, 0], scores[:, 0]), order, window)


def _window_on_line(flow: Flow, log_p: Float[Tensor, "n draws bins"]) -> Window:
    """Return the range on a line from the inputs that are predicted best in their usual pose."""
    amount = flow.amounts(torch.arange(flow.bins), torch.tensor(0.5)).double()
    p = log_p.exp()
    central = (p @ amount).abs().argmin(1)
    entropy = -(p * log_p).sum(2).gather(1, central.unsqueeze(1))[:, 0]
    count = max(MIN_CERTAIN, int(WINDOW_SHARE * len(entropy)))
    window = fit_line(positions(log_p[entropy.argsort()[:count]]))
    return Window(*(flow.end * value for value in (window.range, window.low, window.high)))


def _peaks(log_p: Float[Tensor, "n bins"], certain: Tensor) -> int:
    """Return the number of equally probable, separate peaks of densities on a circle."""
    bins, best = log_p.shape[1], 1
    for n in range(2, bins // 3 + 1):
        if bins % n:
            continue
        folded = log_p.unflatten(1, (n, bins // n)).logsumexp(1)[:, 0]
        inside, coset = float(-folded[certain].mean()), float((folded - log_p[:, 0]).mean())
        is_uniform = coset >= MIN_PEAK_UNIFORMITY * math.log(n)
        if is_uniform and inside <= math.log(MAX_PEAK_WIDTH * bins / n):
            best = n
    return best


def _p_value(log_p: Float[Tensor, "n bins"], score: Float[Tensor, " n"]) -> float:
    """Return the p-value of scores that are, by hypothesis, those of random cells."""
    mean, variance = log_p.mean(1), log_p.var(1, unbiased=False)
    z = float((score - mean).sum() / variance.sum().sqrt().clamp(min=1e-12))
    return NormalDist().cdf(-z)
