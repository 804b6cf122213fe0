# Over 400 lines: the compared methods, one after the other.
"""The methods of the gallery: from a `Problem` to log probabilities of the test inputs.

- `discover`: `symrazor.discover`.
- `tuned`: what people do by hand. Networks, learning rates, weight decays and augmentation are
  searched on a fifth of the training data, the best setting is trained for longer, and again on all
  training data for the number of steps that was best.
- `selected`: three-fold cross-validation chooses among the networks that `discover` compares.
- `augerino`: a CNN with learned ranges of augmentation.
- `laplace`: the tuned network with the posterior of laplace-torch (package laplace-torch).
- `nearest`: the class of the nearest training sample; also over all cyclic shifts of series.

Those that train networks have the same CPU time, one thread, and the same standardised inputs.
Logits of `tuned` and `selected` are divided by a temperature that is fitted to left-out samples.
"""

import itertools
import math
import random
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import symrazor as sr
from symrazor.bench.truth.baselines import (
    AUGERINO_COPIES,
    AUGERINO_STRENGTH,
    AUGERINO_WIDTHS,
)
from symrazor.data import Tensors, dataset
from symrazor.data.arrays import prepare
from symrazor.discovery.families import candidates_for
from symrazor.invariance.averaged_network import Augment, Augmented
from symrazor.invariance.transformation import Flips, affine
from symrazor.layers.plain import convolutional, fully_connected, ordinary_convolutional, perceptron
from symrazor.training.augmentation_baselines import LikelihoodConfig, fit_by_likelihood
from symrazor.training.loop import clock

BATCH_SIZE = 64
CHECKS = tuple((number / 12) ** 2 for number in range(1, 12))
"""Shares of the time after which left-out data are predicted; small data overfit early."""
RATES, DECAYS = (1e-3, 3e-3, 1e-2), (1e-2, 1.0)
SETTINGS = 6
"""Settings that the search tries."""
FOLDS = 3
TEMPERATURES = torch.logspace(0, 1, 41, dtype=torch.float64)
"""Left-out samples can be few and all right: logits are not made larger."""
Make = Callable[[], nn.Module]


@dataclass(frozen=True, eq=False)
class Problem:
    """A data set of the gallery as tensors, its kind, the groups to ask about, and a seed."""

    train: Tensors
    test: Tensors
    classes: int
    kind: str
    groups: tuple[str, ...]
    seconds: float
    seed: int


@dataclass(frozen=True)
class Result:
    """What a method says.

    Args:
        log_probabilities: of the classes, for the test inputs.
        network: the network that it chose, in words.
        verdict: the first sentence of its answer, if it gives one.
        claims: name, answer (None if undecided) and probability of each symmetry.
    """

    log_probabilities: Tensor
    network: str = ""
    verdict: str = ""
    claims: tuple[tuple[str, bool | None, float], ...] = ()


def discover(problem: Problem) -> Result:
    """Run `symrazor.discover` on the training data; it does not use the test data for decisions."""
    with clock.cpu_time():
        found = sr.discover(
            *problem.train,
            test=problem.test,
            kind=problem.kind,
            task="classification",
            groups=problem.groups or None,
            minutes=problem.seconds / 60,
            seed=problem.seed,
            device="cpu",
            progress=False,
        )
    answer = found.results[0].answer
    p = torch.cat([found.predict(x).mean for x in problem.test[0].split(500)])
    claims = tuple((claim.name, claim.holds, claim.probability) for claim in answer.claims)
    network = answer.family.label(answer.delivered.name)
    return Result(p.double().clamp(min=1e-12).log(), network, answer.headline, claims)


@dataclass(frozen=True)
class Setting:
    """A setting of the search."""

    network: str
    make: Make
    rate: float
    decay: float
    augment: bool = False

    @property
    def text(self) -> str:
        """Name network, rate, decay and augmentation."""
        augmented = ", augmented" if self.augment else ""
        return f"{self.network} (rate {self.rate:g}, decay {self.decay:g}{augmented})"


class Training:
    """AdamW with a linear decay of the learning rate over a number of CPU seconds."""

    def __init__(self, data: Tensors, setting: Setting, seed: int) -> None:
        torch.manual_seed(seed)
        self.data, self.setting, self.n_steps = data, setting, 0
        self.model = setting.make()
        parameters = self.model.parameters()
        self.optimiser = torch.optim.AdamW(parameters, setting.rate, weight_decay=setting.decay)
        self.generator = torch.Generator().manual_seed(seed)
        self.order = torch.empty(0, dtype=torch.long)

    def step(self, used: float) -> None:
        """Make a step at a share of the schedule."""
        x, y = self.data
        if not len(self.order):
            self.order = torch.randperm(len(y), generator=self.generator)
        batch, self.order = self.order[:BATCH_SIZE], self.order[BATCH_SIZE:]
        inputs = augmented(x[batch], self.generator) if self.setting.augment else x[batch]
        self.optimiser.param_groups[0]["lr"] = self.setting.rate * (1 - used)
        loss = F.cross_entropy(self.model(inputs), y[batch])
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()
        self.n_steps += 1

    def run_seconds(self, seconds: float, left_out: Tensors) -> list[tuple[float, int, Tensor]]:
        """Train for some CPU seconds; return loss, steps and logits of left-out data at checks."""
        started, checks = time.process_time(), list[tuple[float, int, Tensor]]()
        while (used := (time.process_time() - started) / seconds) < 1:
            self.step(used)
            if len(checks) < len(CHECKS) and used >= CHECKS[len(checks)]:
                checks.append(self._check(left_out))
        return [*checks, self._check(left_out)]

    def run_steps(self, schedule: int, steps: int) -> nn.Module:
        """Make the first steps of a schedule with a given number of steps."""
        for number in range(steps):
            self.step(number / schedule)
        return self.model.eval()

    def _check(self, left_out: Tensors) -> tuple[float, int, Tensor]:
        f = logits(self.model, left_out[0])
        return float(F.cross_entropy(f, left_out[1])), self.n_steps, f


@torch.no_grad()
def logits(model: nn.Module, x: Tensor) -> Tensor:
    """Return the outputs of a network in eval mode."""
    model.eval()
    outputs = torch.cat([model(part) for part in x.split(500)]).double()
    model.train()
    return outputs


def temperature(f: Tensor, y: Tensor) -> float:
    """Return the temperature at which logits predict labels best."""
    losses = [float(F.cross_entropy(f / t, y)) for t in TEMPERATURES]
    return float(TEMPERATURES[losses.index(min(losses))])


def augmented(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return images or series changed by one random operation of random strength each.

    As TrivialAugment (Mueller and Hutter 2021), with shifts, turns, shears, scales, contrast and
    brightness for images, and shifts, stretches, scales and noise for series.
    """
    n = len(x)
    kind = torch.randint(7, (n,), generator=generator)
    strength = 2 * torch.rand(n, generator=generator) - 1
    if x.ndim == 3:
        x = x.unsqueeze(2)

    def of(number: int, size: float) -> Tensor:
        return torch.where(kind == number, size * strength, 0.0)

    maps, angle = torch.zeros(n, 2, 3), of(1, 0.5 if x.shape[2] > 1 else 0.0)
    scale = 1 + of(2, 0.3)
    maps[:, 0, 0], maps[:, 1, 1] = scale * angle.cos(), scale * angle.cos()
    maps[:, 0, 1], maps[:, 1, 0] = of(3, 0.3) - angle.sin(), angle.sin()
    maps[:, 0, 2], maps[:, 1, 2] = of(4, 0.3), of(0, 0.3)
    if x.shape[2] == 1:
        maps[:, 1], maps[:, 0, 1] = torch.tensor([0.0, 1.0, 0.0]), 0.0
    grid = F.affine_grid(maps, list(x.shape), align_corners=False)
    moved = F.grid_sample(x, grid, padding_mode="border", align_corners=False)
    moved = moved * (1 + of(5, 0.5)).view(-1, 1, 1, 1) + of(6, 0.5).view(-1, 1, 1, 1)
    return moved if grid.shape[1] > 1 else moved.squeeze(2)


def tuned(problem: Problem) -> Result:
    """Search settings on a fifth of the data, then train the best one."""
    model, best, (_, test), heat = _tuned(problem)
    return Result((logits(model, test[0]) / heat).log_softmax(1), best.text)


@lru_cache(1)  # `tuned` and `laplace` share one network
def _tuned(problem: Problem) -> tuple[nn.Module, Setting, tuple[Tensors, Tensors], float]:
    """Return the network, its setting, standardised training and test data, and temperature."""
    train, test = standardised(problem)
    shape, random_state = tuple(train[0].shape[1:]), random.Random(problem.seed)
    settings = _settings(shape, problem.classes)
    random_state.shuffle(settings)
    names = dict.fromkeys(setting.network for setting in settings)
    tried = [next(s for s in settings if s.network == name) for name in names]
    tried += [setting for setting in settings if setting not in tried][: SETTINGS - len(tried)]
    kept, left_out = folds(train, 5, problem.seed)[0]
    unit = problem.seconds / (len(tried) + 6)
    losses = []
    for setting in tried:
        checks = Training(kept, setting, problem.seed).run_seconds(unit, left_out)
        losses.append(min(checks, key=lambda check: check[0])[0])
    best = tried[losses.index(min(losses))]
    checks = Training(kept, best, problem.seed).run_seconds(2.5 * unit, left_out)
    _, steps, f = min(checks, key=lambda check: check[0])
    model = Training(train, best, problem.seed).run_steps(checks[-1][1], steps)
    return model, best, (train, test), temperature(f, left_out[1])


def _settings(shape: Sequence[int], classes: int) -> list[Setting]:
    """Return all settings: networks, learning rates, weight decays, and augmentation."""
    if len(shape) == 1:
        networks: dict[str, Make] = {
            f"MLP with {hidden} hidden layers": partial(perceptron, shape[0], classes, hidden)
            for hidden in (0, 1, 2)
        }
        return [
            Setting(name, make, rate, decay)
            for (name, make), rate, decay in itertools.product(networks.items(), RATES, DECAYS)
        ]
    networks = {
        "CNN": partial(ordinary_convolutional, shape, classes),
        "CNN with a global pool": partial(convolutional, shape, classes),
        "MLP": partial(fully_connected, shape, classes, 256),
    }
    return [
        Setting(name, make, rate, decay, augment)
        for (name, make), rate, decay, augment in itertools.product(
            networks.items(), RATES, DECAYS, (False, True)
        )
    ]


def selected(problem: Problem) -> Result:
    """Choose among the networks of `discover` by cross-validation, then train on all data."""
    train, test = standardised(problem)
    data = dataset(*problem.train, kind=problem.kind, task="classification")
    family = candidates_for(data, problem.groups or None)
    unit = problem.seconds / (FOLDS * len(family.structures) + 1)
    results = {}
    for structure in family.structures:
        setting = Setting(structure.name, structure.make, RATES[1], 1e-1)
        curves, parts = [], folds(train, FOLDS, problem.seed)
        for kept, left_out in parts:
            curves.append(Training(kept, setting, problem.seed).run_seconds(unit, left_out))
        length = min(map(len, curves))
        sums = [sum(curve[i][0] for curve in curves) for i in range(length)]
        best = sums.index(min(sums))
        checks = [curve[best] for curve in curves]
        f, y = torch.cat([c[2] for c in checks]), torch.cat([part[1][1] for part in parts])
        steps = [round(sum(values) / FOLDS) for values in zip(*_steps(checks, curves), strict=True)]
        results[structure.name] = (min(sums), setting, steps, temperature(f, y))
    name = min(results, key=lambda key: results[key][0])
    _, setting, (steps_made, schedule), heat = results[name]
    model = Training(train, setting, problem.seed).run_steps(schedule, steps_made)
    return Result((logits(model, test[0]) / heat).log_softmax(1), family.label(name))


def _steps(
    checks: Sequence[tuple[float, int, Tensor]],
    curves: Sequence[Sequence[tuple[float, int, Tensor]]],
) -> list[tuple[int, int]]:
    return [(check[1], curve[-1][1]) for check, curve in zip(checks, curves, strict=True)]


def nearest(problem: Problem, shifted: bool = False) -> Result:
    """Predict the class of the nearest sample.

    It has the probability with which the nearest other sample has the right class in the training
    data; the other classes share the rest.
    """
    (x, y), (test, _) = standardised(problem)
    x, test = x.double(), test.double()
    own = distances(x, x, shifted)
    own.fill_diagonal_(math.inf)
    right = int((y[own.argmin(1)] == y).sum())
    share = (right + 1) / (len(y) + 2)
    p = torch.full((len(test), problem.classes), (1 - share) / (problem.classes - 1)).double()
    p.scatter_(1, y[distances(test, x, shifted).argmin(1)].unsqueeze(1), share)
    return Result(p.log(), "nearest neighbour" + (" over all shifts" if shifted else ""))


def nearest_shifted(problem: Problem) -> Result:
    """Predict the class of the nearest sample over all cyclic shifts."""
    return nearest(problem, shifted=True)


def distances(a: Tensor, b: Tensor, shifted: bool) -> Tensor:
    """Return squared distances between samples; the least one over all shifts of series."""
    norms = a.flatten(1).square().sum(1)[:, None] + b.flatten(1).square().sum(1)
    if not shifted:
        return norms - 2 * a.flatten(1) @ b.flatten(1).T
    spectra = torch.fft.rfft(b)
    rows = []
    for sample in a:
        products = torch.fft.irfft((torch.fft.rfft(sample) * spectra.conj()).sum(1), a.shape[-1])
        rows.append(products.amax(1))
    return norms - 2 * torch.stack(rows)


def standardised(problem: Problem) -> tuple[Tensors, Tensors]:
    """Return training and test data as `discover` gives them to its networks."""
    data = dataset(*problem.train, kind=problem.kind, task="classification", test=problem.test)
    assert data.test is not None
    preparation = prepare(data, bool(problem.groups))
    return preparation.data(data.labelled), preparation.data(data.test)


def folds(data: Tensors, count: int, seed: int) -> list[tuple[Tensors, Tensors]]:
    """Return pairs of kept and left-out data; every sample is left out once."""
    x, y = data
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    parts = list(order.tensor_split(count))
    pairs = []
    for number, part in enumerate(parts):
        kept = torch.cat([*parts[:number], *parts[number + 1 :]])
        pairs.append(((x[kept], y[kept]), (x[part], y[part])))
    return pairs


def augerino(problem: Problem) -> Result:
    """Train a CNN with ranges of transformations that the training loss learns, and average.

    Benton et al. 2020: shifts, rotations, scales and flips, with a fixed regulariser.
    """
    train, test = standardised(problem)
    shape = tuple(train[0].shape[1:])

    def run(epochs: int) -> nn.Module:
        torch.manual_seed(problem.seed)
        moves = affine(tuple(AUGERINO_WIDTHS), AUGERINO_WIDTHS)
        augment = Augment([moves, Flips((-1,), 0.1)], AUGERINO_COPIES, problem.seed)
        model = Augmented(ordinary_convolutional(shape, problem.classes), augment)
        config = LikelihoodConfig(
            AUGERINO_STRENGTH, epochs, BATCH_SIZE, seed=problem.seed, progress=False
        )
        fit_by_likelihood(model, train, config=config)
        return model

    started = time.process_time()
    run(1)
    epoch = time.process_time() - started
    model = run(max(1, math.floor((problem.seconds - epoch) / epoch)))
    return Result(logits(model, test[0]).log_softmax(1), "CNN with learned augmentation")


def laplace(problem: Problem) -> Result:
    """Predict with the last-layer Laplace approximation of laplace-torch of the tuned network.

    Its prior precision maximises the evidence. The network has no temperature.
    """
    from laplace import Laplace

    model, best, (train, test) = _tuned(problem)[:3]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        approximation = Laplace(model, "classification", "last_layer", "kron")
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*train), BATCH_SIZE)
        approximation.fit(loader)
        approximation.optimize_prior_precision(method="marglik")
        p = torch.cat([approximation(x).detach() for x in test[0].split(500)])
    return Result(p.double().clamp(min=1e-12).log(), best.text)


@dataclass(frozen=True)
class Method:
    """A method.

    Args:
        title: its name in tables.
        run: returns its predictions.
        choices: what a person has to choose to use it.
        kinds: kinds of data that it takes.
        after: method whose network it uses, and whose time counts.
    """

    title: str
    run: Callable[[Problem], Result]
    choices: tuple[str, ...]
    kinds: tuple[str, ...] = ("series", "image", "vector")
    after: str = ""


BY_HAND = ("networks", "learning rates", "weight decays", "augmentations")
METHODS = {
    "discover": Method("symrazor discover", discover, ()),
    "tuned": Method("tuned CNN or MLP", tuned, BY_HAND),
    "laplace": Method("tuned, with laplace-torch", laplace, (*BY_HAND, "posterior"), after="tuned"),
    "selected": Method(
        "cross-validated choice, same networks",
        selected,
        ("networks", "learning rate", "weight decay"),
    ),
    "augerino": Method(
        "Augerino",
        augerino,
        ("network", "transformations", "regulariser", "learning rate", "weight decay"),
        ("image",),
    ),
    "nearest": Method("1-NN", nearest, ("distance",)),
    "nearest-shifted": Method(
        "1-NN over all shifts", nearest_shifted, ("distance", "shifts"), ("series",)
    ),
}
"""Name -> method."""
