r"""Widths chosen on held-out data, for comparison: a grid, cross-validated, then a refit on all.

$$ \hat\eta = \arg\min_{\eta \in \text{grid}} \sum_k
   \sum_{n \in D_k} -\log p(y_n \mid f(x_n; \hat\theta_{-k}(\eta), \eta)) $$

It needs a network for every entry of the grid and every fold, and a grid over several widths grows
with their number: the price that a gradient of the evidence does not pay.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from symrazor.core.likelihood import Likelihood, as_likelihood
from symrazor.core.parameters import Hyper, real
from symrazor.core.validation import check_types
from symrazor.data import Tensors, check_batch
from symrazor.invariance.averaged_network import Augmented
from symrazor.invariance.transformation import QuarterTurns
from symrazor.training.augmentation_by_likelihood import LikelihoodConfig, fit_by_likelihood

Entry = float | Mapping[str, float]
"""One value for all widths, or the name of a `Hyper` of the augmentation -> its value.

Quarter turns take the probability of all turns together; shares of a mixture stay as they are."""
EVALUATION_BATCH = 500


@dataclass(frozen=True)
class ValidationConfig:
    """How `fit_by_validation` chooses.

    Args:
        grid: what to try, in the units of the transformations (radians, half-widths, log factors,
            probabilities): a number for all widths, or numbers by name of the `Hyper`.
        folds: 2 or more for cross-validation; 1 for a single hold-out of `held_out`.
        held_out: fraction of the data that is held out when there is one fold.
        training: of every network; its `strength` is not used, since widths are fixed.
    """

    grid: Sequence[Entry] = (0.05, 0.1, 0.2, 0.4)
    folds: int = 1
    held_out: float = 0.2
    training: LikelihoodConfig = field(default_factory=LikelihoodConfig)

    def __post_init__(self) -> None:
        """Check kinds and ranges."""
        check_types(self)
        if not self.grid:
            raise ValueError("expected a grid of one or more widths, got none")
        for entry in self.grid:
            numbers = entry.values() if isinstance(entry, Mapping) else [entry]
            if not all(isinstance(number, int | float) for number in numbers):
                raise ValueError(
                    f"expected numbers, or numbers by name, in the grid, got {entry!r}"
                )
        if self.folds < 1:
            raise ValueError(f"expected at least 1 fold, got {self.folds}")
        if not 0 < self.held_out < 1:
            raise ValueError(f"expected held_out as a fraction in (0, 1), got {self.held_out}")


@dataclass(frozen=True)
class Validated:
    """What was chosen.

    Args:
        chosen: the entry of the grid with the lowest score.
        scores: mean negative log likelihood of the held-out data, by entry.
        history: the mean negative log likelihood of every epoch of the refit.
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
        model: with an `Augmented` network; trained in place, ends in eval mode, widths frozen.
        data: inputs and labels, on the model's device.
        likelihood: a Likelihood or its name.
        config: see `ValidationConfig`.

    Raises:
        ValueError: no widths in the model, unknown names, fewer data than folds, or no entry with
            a finite score.
    """
    options = config or ValidationConfig()
    check_batch(*data, "the training data")
    rule = as_likelihood(likelihood).to(data[1].device)
    for entry in options.grid:  # before any work
        set_widths_(copy.deepcopy(model), entry)
    splits = list(_splits(data[1], options))
    scores = [_score(model, data, rule, entry, splits, options.training) for entry in options.grid]
    if not math.isfinite(min(scores)):
        raise ValueError(f"expected a finite score for one entry, got {scores}; do: a smaller lr")
    chosen = options.grid[min(range(len(scores)), key=scores.__getitem__)]
    set_widths_(model, chosen)
    history = fit_by_likelihood(model, data, rule, replace(options.training, strength=0.0))
    return Validated(chosen, scores, history)


def set_widths_(model: nn.Module, entry: Entry) -> None:
    """Set the widths of every augmentation in a model, and freeze them.

    Raises:
        ValueError: no such width.
    """
    parts = {
        name: part
        for module in model.modules()
        if isinstance(module, Augmented)
        for name, part in module.augment.named_modules()
    }
    hypers = {name: part for name, part in parts.items() if isinstance(part, Hyper)}
    turns = {f"{name}.logits": p for name, p in parts.items() if isinstance(p, QuarterTurns)}
    found = {n: part for n, part in hypers.items() if n in turns or part.transform is not real}
    chosen = entry if isinstance(entry, Mapping) else dict.fromkeys(found, entry)
    if not found or not set(chosen) <= set(found):
        raise ValueError(
            f"expected widths among {sorted(found)}, got {sorted(chosen)}; do wrap the network in "
            "an Augmented, and name its widths as `named_modules` of the augmentation does"
        )
    for name, value in chosen.items():
        try:
            if name in turns:
                turns[name].set_probability_(value)
            else:
                found[name].value = torch.full_like(found[name].raw, value)
        except ValueError as error:
            raise ValueError(f"width {name} of the grid: {error}") from error
    for part in hypers.values():
        part.raw.requires_grad_(False)


def _splits(y: Tensor, options: ValidationConfig) -> Iterator[tuple[Tensor, Tensor]]:
    """Indices to train on and to hold out."""
    n, generator = len(y), torch.Generator().manual_seed(options.training.seed)
    order = torch.randperm(n, generator=generator).to(y.device)
    parts = order.tensor_split(options.folds)
    if options.folds == 1:
        parts = (order[: max(1, round(options.held_out * n))],)
    if n < 2 or not all(0 < len(part) < n for part in parts):
        raise ValueError(f"expected more data than folds, got {n} for {options.folds}")
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
    """Mean negative log likelihood of the data that were held out, over all folds."""
    summed = 0.0
    for kept, held in splits:
        trial = copy.deepcopy(model)
        set_widths_(trial, entry)
        own = (data[0][kept], data[1][kept])
        fit_by_likelihood(trial, own, rule, replace(training, strength=0.0))
        with torch.no_grad():
            for part in held.split(EVALUATION_BATCH):
                summed += float(rule.nll(trial(data[0][part]), data[1][part]).sum())
    value = summed / sum(len(held) for _, held in splits)
    return value if math.isfinite(value) else math.inf
