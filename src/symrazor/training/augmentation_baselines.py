r"""Baselines for learned augmentation: widths from the training loss, and from held-out data.

**Training loss** (`fit_by_likelihood`): maximum likelihood and Augerino,

$$ \min_{\theta, \eta} \; -\frac1N \sum_n \log p(y_n \mid f(x_n; \theta, \eta))
   - \lambda \sum_i \eta_i^2. $$

With $\lambda = 0$ the widths shrink, because a symmetry never lowers the training loss. Augerino
counteracts this with a $\lambda$ that must be chosen by hand. A discrete choice with softmax
probabilities has no width; $1 - \sum_e p_e^2$, which is largest for the whole group, replaces it.

**Held-out data** (`fit_by_validation`): a cross-validated grid search, then a fit on all data,

$$ \hat\eta = \arg\min_{\eta \in \text{grid}} \sum_k
   \sum_{n \in D_k} -\log p(y_n \mid f(x_n; \hat\theta_{-k}(\eta), \eta)). $$

It trains one network per grid entry and fold, and a grid over several widths grows exponentially
with their number. The gradient of the evidence avoids both costs.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from symrazor.core.likelihood import Likelihood, as_likelihood, check_compatible
from symrazor.core.parameters import Hyper, eval_mode, hyperparameters, real, weights
from symrazor.core.validation import check_at_least, check_types
from symrazor.data import TensorLoader, Tensors, check_batch
from symrazor.invariance.averaged_network import Augment, Augmented
from symrazor.invariance.transformation import Choice, QuarterTurns
from symrazor.training.evidence_training import outputs
from symrazor.training.loop import Loop, Task
from symrazor.training.options import DEFAULT_WARMUP, Schedule

Entry = float | Mapping[str, float]
"""One value for all widths, or the name of a `Hyper` of the augmentation -> its value.

Quarter turns take the total probability of all turns; the shares of a mixture are unchanged."""


@dataclass(frozen=True)
class LikelihoodConfig:
    """Options of `fit_by_likelihood`.

    Args:
        strength: lambda of the regulariser; default 0, plain maximum likelihood.
        epochs: passes over the training data; default 60.
        batch_size: examples per step; default 128.
        lr: peak learning rate of the weights (AdamW, warm-up and cosine); default 0.002.
        width_lr: learning rate of the widths (AdamW without decay); default 0.01.
        decay: weight decay of the weights; default 0.0001.
        seed: seed of the shuffling; default 0.
        progress: whether to show a progress bar; default None, if standard error is a terminal.
    """

    strength: float = 0.0
    epochs: int = 60
    batch_size: int = 128
    lr: float = 2e-3
    width_lr: float = 1e-2
    decay: float = 1e-4
    seed: int = 0
    progress: bool | None = None

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("epochs", "batch_size", "lr"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}.")
        check_at_least(self, 0, "strength", "width_lr", "decay")


def fit_by_likelihood(
    model: nn.Module,
    data: Tensors,
    likelihood: str | Likelihood = "categorical",
    config: LikelihoodConfig | None = None,
) -> list[float]:
    """Train weights and widths together; return the mean negative log likelihood of every epoch.

    Args:
        model: an `Augmented` network, trained in place; it ends in eval mode.
        data: inputs and labels, on the model's device.
        likelihood: a `Likelihood` or its name.
        config: options.
    """
    options: object = config or LikelihoodConfig()
    if not isinstance(options, LikelihoodConfig):
        raise ValueError(f"config must be a LikelihoodConfig, got {type(options).__name__}.")
    rule = as_likelihood(likelihood).to(next(iter(weights(model).values())).device)
    check_compatible(model, rule)
    x, y = data
    check_batch(x, y, "the training data")
    with eval_mode(model), torch.no_grad():
        f = model(x[:1])
    rule.check(f.expand(len(y), *f.shape[1:]), y)
    model.train()
    task = _LikelihoodTask(model, data, rule, options)
    history = Loop(task, n_rounds=options.epochs, show_progress=options.progress).run()
    model.eval()
    return [record["nll"] for record in history]


class _LikelihoodTask(Task):
    """Epochs of AdamW steps on weights and widths."""

    def __init__(
        self, model: nn.Module, data: Tensors, rule: Likelihood, options: LikelihoodConfig
    ) -> None:
        super().__init__()
        self.model, self.rule, self.options = model, rule, options
        generator = torch.Generator().manual_seed(options.seed)
        self.loader = TensorLoader(*data, options.batch_size, shuffle=True, generator=generator)
        theta, eta = list(weights(model).values()), list(hyperparameters(model).values())
        groups = [
            {"params": theta, "lr": options.lr, "weight_decay": options.decay},
            {"params": eta, "lr": options.width_lr, "weight_decay": 0.0},
        ]
        self.optimiser = torch.optim.AdamW([group for group in groups if group["params"]])
        self.schedule = Schedule.with_warmup(options.epochs * len(self.loader), DEFAULT_WARMUP)
        self.done, self.summed_nll = 0, 0.0

    def finished(self) -> bool:
        return len(self.history) == self.options.epochs

    def batches(self) -> TensorLoader:
        self.summed_nll = 0.0
        return self.loader

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        x, y = batch
        self.optimiser.param_groups[0]["lr"] = self.options.lr * self.schedule(self.done)
        nll = self.rule.nll(self.model(x), y).mean()
        self.optimiser.zero_grad()
        (nll - self.options.strength * _squared_widths(self.model)).backward()
        self.optimiser.step()
        self.summed_nll += float(nll.detach()) * len(y)
        self.done += 1

    def evaluate(self) -> None:
        self.history.append({"nll": self.summed_nll / len(self.loader.y)})


def _squared_widths(model: nn.Module) -> Tensor:
    """Return the sum of squared widths, and of 1 - sum p^2 for choices without a width."""
    terms = [torch.zeros(())]
    parts = [p for m in model.modules() if isinstance(m, Augment) for p in (*m.moves, *m.choices)]
    for part in parts:
        widths = [m for m in part.modules() if isinstance(m, Hyper) and m.transform is not real]
        terms += [width.value.square().sum() for width in widths]
        if isinstance(part, Choice) and not widths:
            terms.append(1 - part.probabilities.square().sum())
    return torch.stack([term.to(terms[-1]) for term in terms]).sum()


@dataclass(frozen=True)
class ValidationConfig:
    """Options of `fit_by_validation`.

    Args:
        grid: candidate widths in the units of the transformations (radians, half-widths, log
            factors, probabilities): a number for all widths, or numbers by name of the `Hyper`.
        folds: 2 or more for cross-validation; default 1, a single split with `held_out`.
        held_out: fraction of the data that is held out if there is one fold; default 0.2.
        training: options of every training; `strength` has no effect, since widths are fixed.
    """

    grid: Sequence[Entry] = (0.05, 0.1, 0.2, 0.4)
    folds: int = 1
    held_out: float = 0.2
    training: LikelihoodConfig = field(default_factory=LikelihoodConfig)

    def __post_init__(self) -> None:
        check_types(self)
        if not self.grid:
            raise ValueError("grid must have at least one entry.")
        for entry in self.grid:
            numbers = entry.values() if isinstance(entry, Mapping) else [entry]
            if not all(isinstance(number, int | float) for number in numbers):
                raise ValueError(f"grid must have numbers, or numbers by name, got {entry!r}.")
        check_at_least(self, 1, "folds")
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out must be in (0, 1), got {self.held_out}.")


@dataclass(frozen=True)
class Validated:
    """Grid entry with the lowest score, scores of all entries, and the final training's history.

    Scores and history are mean negative log likelihoods, of held-out data and of every epoch.
    """

    chosen: Entry
    scores: list[float]
    history: list[float]


def fit_by_validation(
    model: nn.Module,
    data: Tensors,
    likelihood: str | Likelihood = "categorical",
    config: ValidationConfig | None = None,
) -> Validated:
    """Choose widths on held-out parts of the training data, then train on all of them.

    Args:
        model: contains an `Augmented` network; trained in place, ends in eval mode, widths frozen.
        data: inputs and labels, on the model's device.
        likelihood: a `Likelihood` or its name.
        config: options.
    """
    options = config or ValidationConfig()
    check_batch(*data, "the training data")
    rule = as_likelihood(likelihood).to(data[1].device)
    for entry in options.grid:  # fail before any training
        set_widths_(copy.deepcopy(model), entry)
    splits = list(_splits(data[1], options))
    scores = [_score(model, data, rule, entry, splits, options.training) for entry in options.grid]
    if not math.isfinite(min(scores)):
        raise ValueError(f"No grid entry has a finite score ({scores}). Lower lr.")
    chosen = options.grid[min(range(len(scores)), key=scores.__getitem__)]
    set_widths_(model, chosen)
    history = fit_by_likelihood(model, data, rule, replace(options.training, strength=0.0))
    return Validated(chosen, scores, history)


def set_widths_(model: nn.Module, entry: Entry) -> None:
    """Set and freeze the widths of every augmentation in a model."""
    parts = {
        name: part
        for module in model.modules()
        if isinstance(module, Augmented)
        for name, part in module.augment.named_modules()
    }
    hypers = {name: part for name, part in parts.items() if isinstance(part, Hyper)}
    turns = {f"{name}.logits": p for name, p in parts.items() if isinstance(p, QuarterTurns)}
    widths = {n: part for n, part in hypers.items() if n in turns or part.transform is not real}
    chosen = entry if isinstance(entry, Mapping) else dict.fromkeys(widths, entry)
    if not widths or not set(chosen) <= set(widths):
        raise ValueError(
            f"Unknown widths {sorted(chosen)}; the model has {sorted(widths)}. Wrap the network in "
            "Augmented, and name widths as in augmentation.named_modules()."
        )
    for name, value in chosen.items():
        try:
            if name in turns:
                turns[name].set_probability_(value)
            else:
                widths[name].value = torch.full_like(widths[name].raw, value)
        except ValueError as error:
            raise ValueError(f"Grid value of width {name}: {error}") from error
    for part in hypers.values():
        part.raw.requires_grad_(False)


def _splits(y: Tensor, options: ValidationConfig) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield indices to train on and to hold out."""
    n, generator = len(y), torch.Generator().manual_seed(options.training.seed)
    order = torch.randperm(n, generator=generator).to(y.device)
    parts = order.tensor_split(options.folds)
    if options.folds == 1:
        parts = (order[: max(1, round(options.held_out * n))],)
    if n < 2 or not all(0 < len(part) < n for part in parts):
        raise ValueError(f"There must be more examples than folds, got {n} for {options.folds}.")
    for part in parts:
        kept = torch.ones(n, dtype=torch.bool, device=y.device)
        kept[part] = False
        yield order[kept[order]], part


def _score(
    model: nn.Module,
    data: Tensors,
    rule: Likelihood,
    entry: Entry,
    splits: Sequence[tuple[Tensor, Tensor]],
    training: LikelihoodConfig,
) -> float:
    """Return the mean negative log likelihood of the held-out data over all folds."""
    x, y = data
    summed_nll = 0.0
    for kept, held_out in splits:
        candidate = copy.deepcopy(model)
        set_widths_(candidate, entry)
        fit_by_likelihood(candidate, (x[kept], y[kept]), rule, replace(training, strength=0.0))
        with torch.no_grad():
            f = outputs(candidate, x[held_out])
            summed_nll += float(rule.nll(f, y[held_out]).sum())
    score = summed_nll / sum(len(held_out) for _, held_out in splits)
    return score if math.isfinite(score) else math.inf
