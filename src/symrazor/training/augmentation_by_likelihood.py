r"""Widths learned by the training loss, for comparison: maximum likelihood, and Augerino.

$$ \min_{\theta, \eta} \; -\frac1N \sum_n \log p(y_n \mid f(x_n; \theta, \eta))
   - \lambda \sum_i \eta_i^2 $$

With $\lambda = 0$ the widths shrink, because symmetry never lowers a training loss; Augerino pushes
against that with a $\lambda$ that has to be chosen by hand. A choice whose probabilities are a
softmax has no width; $1 - \sum_e p_e^2$, largest for the whole group, stands in its place.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from symrazor.core.likelihood import Likelihood, as_likelihood, check_compatible
from symrazor.core.parameters import Hyper, eval_mode, hyperparameters, real, weights
from symrazor.core.progress import epoch_bar
from symrazor.core.validation import check_types
from symrazor.data import TensorLoader, Tensors, check_batch
from symrazor.invariance.copies import Augment
from symrazor.invariance.transformation import Choice
from symrazor.training.stepper import learning_rate


@dataclass(frozen=True)
class LikelihoodConfig:
    """How `fit_by_likelihood` trains.

    Args:
        strength: lambda of the regulariser; 0 for plain maximum likelihood.
        epochs: passes over the data.
        batch_size: data per step.
        lr: peak learning rate of the weights (AdamW on a cosine).
        width_lr: of the widths (Adam).
        decay: weight decay of AdamW.
        seed: of the shuffling.
        progress: show a bar; None for "if this is a terminal".
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
        """Check kinds and ranges."""
        check_types(self)
        for name in ("epochs", "batch_size", "lr"):
            if not getattr(self, name) > 0:
                raise ValueError(f"expected {name} above 0, got {getattr(self, name)}")
        for name in ("strength", "width_lr", "decay"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"expected {name} of at least 0, got {getattr(self, name)}")


def fit_by_likelihood(
    model: nn.Module,
    data: Tensors,
    likelihood: str | Likelihood = "categorical",
    config: LikelihoodConfig | None = None,
) -> list[float]:
    """Train weights and widths together on the training loss; the model ends in eval mode.

    Args:
        model: an `Augmented` network, trained in place.
        data: inputs and labels, on the model's device.
        likelihood: a Likelihood or its name.
        config: see `LikelihoodConfig`.

    Returns:
        The mean negative log likelihood of every epoch.

    Raises:
        ValueError: bad data, labels that the outputs cannot explain, or another config.
    """
    options = config or LikelihoodConfig()
    given: object = options
    if not isinstance(given, LikelihoodConfig):
        raise ValueError(f"expected config as a LikelihoodConfig, got {type(given).__name__}")
    eta, theta = list(hyperparameters(model).values()), list(weights(model).values())
    rule = as_likelihood(likelihood).to(theta[0].device)
    check_compatible(model, rule)
    _check(model, rule, data)
    groups = [
        {"params": theta, "lr": options.lr, "weight_decay": options.decay},
        {"params": eta, "lr": options.width_lr, "weight_decay": 0.0},
    ]
    optimiser = torch.optim.AdamW([group for group in groups if group["params"]])
    generator = torch.Generator().manual_seed(options.seed)
    loader = TensorLoader(*data, options.batch_size, shuffle=True, generator=generator)
    total, done, history = options.epochs * len(loader), 0, []
    model.train()
    with epoch_bar(options.epochs, options.progress) as show:
        for _ in range(options.epochs):
            summed = 0.0
            for x, y in loader:
                optimiser.param_groups[0]["lr"] = options.lr * learning_rate(done, total, 0.05)
                nll = rule.nll(model(x), y).mean()
                optimiser.zero_grad()
                (nll - options.strength * _squared_widths(model)).backward()
                optimiser.step()
                summed, done = summed + float(nll.detach()) * len(y), done + 1
            history.append(summed / len(data[1]))
            show([{"nll": value} for value in history])
    model.eval()
    return history


def _check(model: nn.Module, rule: Likelihood, data: Tensors) -> None:
    """Refuse data that are not finite, and labels that do not belong to the outputs."""
    x, y = data
    check_batch(x, y, "the training data")
    with eval_mode(model), torch.no_grad():
        f = model(x[:1])
    rule.check(f.expand(len(y), *f.shape[1:]), y)


def _squared_widths(model: nn.Module) -> Tensor:
    """Squares of all widths of augmentations; how even the probabilities of a softmax are."""
    terms = [torch.zeros(())]
    parts = [p for m in model.modules() if isinstance(m, Augment) for p in (*m.moves, *m.choices)]
    for part in parts:
        own = [m for m in part.modules() if isinstance(m, Hyper) and m.transform is not real]
        terms += [width.value.square().sum() for width in own]
        if isinstance(part, Choice) and not own:
            terms.append(1 - part.probabilities.square().sum())
    return torch.stack([term.to(terms[-1]) for term in terms]).sum()
