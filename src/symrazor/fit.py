r"""The training loop we ship: maximum a posteriori steps on the weights, evidence steps in between.

Weights: SGD with momentum and an implicit prior step (stable for any precision), or AdamW with the
prior in the loss; both on a cosine schedule, both with the posterior mode as stationary point.
Hyperparameters: `Razor.step` every few epochs after a burn-in counted in training steps. The state
with the highest evidence is what comes out.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from symrazor.collapse import collapse
from symrazor.data import TensorLoader, Tensors, check_batch
from symrazor.evidence.value import Evidence
from symrazor.hyper import hyperparameters, weights
from symrazor.layers.relaxed import spatial_layers
from symrazor.learner import Razor, RazorConfig
from symrazor.likelihood import Likelihood, as_likelihood
from symrazor.posterior import How, Posterior, Prediction
from symrazor.pruning import path_shares
from symrazor.reading import Reading, read, scores

DEFAULT_LR = {"sgd": 0.03, "adamw": 2e-3}
EVALUATION_BATCH = 500
MEASURED = 128  # training inputs on which the equivariance of relaxed layers is measured


@dataclass(frozen=True)
class FitConfig:
    """Everything `fit` can be told.

    Args:
        epochs: passes over the data.
        batch_size: data per training step.
        optimizer: "adamw", or "sgd" with momentum 0.9.
        lr: peak learning rate of the cosine schedule; by default 0.002 (adamw) or 0.03 (sgd).
        every: epochs between evidence steps.
        burn_in: training steps before the first update; None for a fifth of all steps.
        subset: data per evidence step, scaled up; None for all of them, at most 5,000.
        keep: return the state with the "best" evidence or the "last" one.
        seed: of the shuffling and of the probes.
        device: "auto" (where the model is), "cpu", "cuda", ...
        progress: show a progress bar; None for "if this is a terminal".
        razor: options of the evidence step.
    """

    epochs: int = 60
    batch_size: int = 128
    optimizer: Literal["adamw", "sgd"] = "adamw"
    lr: float | None = None
    every: int = 5
    burn_in: int | None = None
    subset: int | None = None
    keep: Literal["best", "last"] = "best"
    seed: int = 0
    device: str = "auto"
    progress: bool | None = None
    razor: RazorConfig = field(default_factory=RazorConfig)

    def __post_init__(self) -> None:
        """Check ranges."""
        for name in ("epochs", "batch_size", "every"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} of at least 1, got {getattr(self, name)}")
        if self.optimizer not in DEFAULT_LR:
            raise ValueError(f"expected optimizer in {sorted(DEFAULT_LR)}, got {self.optimizer!r}")
        if self.keep not in ("best", "last"):
            raise ValueError(f"expected keep 'best' or 'last', got {self.keep!r}")
        if self.lr is not None and not self.lr > 0:
            raise ValueError(f"expected a positive lr, got {self.lr}")

    def change(self, **changes: Any) -> "FitConfig":
        """A copy with some fields of this config or of its `razor` replaced.

        Raises:
            ValueError: a field that neither has.
        """
        mine = {f.name for f in fields(self)}
        theirs = {f.name for f in fields(self.razor)} - mine
        unknown = set(changes) - mine - theirs
        if unknown:
            raise ValueError(
                f"expected options among {sorted(mine | theirs)}, got {sorted(unknown)}"
            )
        razor = replace(
            changes.pop("razor", self.razor),
            **{k: changes.pop(k) for k in list(changes) if k in theirs},
        )
        return replace(self, razor=razor, **changes)


@dataclass
class Fit:
    """What `fit` returns.

    Args:
        model: the network, trained in place, in eval mode.
        razor: its prior, likelihood and evidence.
        evidence: of the returned state, exact, on all data.
        reading: precisions, effective parameters, measured equivariance, test figures; `print` it.
        history: one dictionary per epoch.
        data: the training loader.
    """

    model: nn.Module
    razor: Razor
    evidence: Evidence
    reading: Reading
    history: list[dict[str, float]]
    data: TensorLoader

    def posterior(self) -> Posterior:
        """The Laplace posterior over the weights."""
        return self.razor.posterior(self.data)

    def predict(self, x: Tensor, how: How | Literal["map"] = "map") -> Prediction:
        """Predictive mean at x: by the weights as they are ("map"), or see `Posterior.predict`."""
        if how != "map":
            return self.posterior().predict(x, how)
        f = _outputs(self.model, x)
        return Prediction(self.razor.likelihood.mean(f))

    def collapse(
        self,
        threshold: float | Literal["evidence"] = "evidence",
        example_input: Tensor | None = None,
    ) -> nn.Module:
        """The network without the paths that were switched off, as plain torch modules.

        See `symrazor.collapse`, which does it, for what comes out and for its report.

        Args:
            threshold: drop paths with a smaller share of their layer's effective parameters;
                "evidence" for the threshold after which the evidence is highest.
            example_input: what the report is measured on; by default the first 32 training data.
        """
        shares = path_shares(self.model, self.evidence.effective_parameters)
        x = self.data.x[:32] if example_input is None else example_input
        return collapse(
            self.model,
            x,
            shares=shares,
            threshold=threshold,
            razor=self.razor,
            loader=self.data,
        )

    @property
    def json(self) -> str:
        """The reading as a JSON document."""
        return self.reading.to_json()


def fit(
    model: nn.Module,
    data: Tensors,
    likelihood: str | Likelihood = "categorical",
    *,
    test: Tensors | None = None,
    config: FitConfig | None = None,
    **changes: Any,
) -> Fit:
    """Train a model and learn its hyperparameters by the evidence, from training data alone.

    Args:
        model: any module whose trainable weights sit in registered layers; trained in place.
        data: training inputs and labels.
        likelihood: a Likelihood or its name.
        test: held-out data, only ever looked at for the report.
        config: all options; single ones can be given by name, of `FitConfig` and `RazorConfig`
            alike, as in `fit(model, (x, y), epochs=30, estimator="mc", seed=1)`.
        **changes: those single options.

    Raises:
        ValueError: bad data or options; the model is then untouched.
        UnsupportedParameterError: weights without curvature.
        FloatingPointError: training diverged; the model is put back to its last good state.
    """
    options = (config or FitConfig()).change(**changes)
    device = _device(model, options.device)
    if not all(isinstance(part, Tensor) for part in (*data, *(test or ()))):
        raise ValueError("expected data and test as pairs of tensors (x, y), got something else")
    x, y = (part.to(device) for part in data)
    check_batch(x, y, "the training data")
    generator = torch.Generator().manual_seed(options.seed)
    loader = TensorLoader(x, y, options.batch_size, shuffle=True, generator=generator)
    fixed = TensorLoader(x, y, min(len(y), EVALUATION_BATCH))
    likelihood = as_likelihood(likelihood)
    likelihood.check(_outputs(model, x[:1]).expand(len(y), -1), y)
    total = options.epochs * len(loader)
    burn_in = total // 5 if options.burn_in is None else options.burn_in
    razor_options = replace(options.razor, burn_in=burn_in, seed=options.seed)
    razor = Razor(model, likelihood, len(y), razor_options)
    if test is not None:
        test = (test[0].to(device), test[1].to(device))
        check_batch(*test, "the test data")
        likelihood.check(_outputs(model, x[:1]).expand(len(test[1]), -1), test[1])
    history = _train(razor, loader, options, test)
    if options.keep == "best" and razor.best is not None:
        razor.restore_best()
    model.eval()
    evidence = razor.evidence(fixed)
    figures = scores(razor.likelihood, _outputs(model, test[0]), test[1]) if test else {}
    train = {"n": len(y), "epochs": options.epochs, "seconds": history[-1]["seconds"]}
    choice = torch.Generator().manual_seed(options.seed)
    some = torch.randperm(len(x), generator=choice)[:MEASURED].to(device)
    inputs = x[some] if spatial_layers(model) else None
    found = read(razor, evidence, train, figures, inputs)
    return Fit(model, razor, evidence, found, history, fixed)


def _device(model: nn.Module, wanted: str) -> torch.device:
    """Move the model where it is wanted."""
    if next(model.parameters(), None) is None:
        raise ValueError("expected a model with parameters, got one without any")
    if wanted != "auto":
        if wanted.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError(f"expected a device that is there, got {wanted!r} without CUDA")
        model.to(torch.device(wanted))
    return next(model.parameters()).device


def _train(
    razor: Razor, loader: TensorLoader, options: FitConfig, test: Tensors | None
) -> list[dict[str, float]]:
    """Run all epochs; returns one record per epoch."""
    stepper = _Stepper(razor, options, options.epochs * len(loader))
    subset = min(razor.n_data, options.subset or 5000)
    history: list[dict[str, float]] = []
    start = time.perf_counter()
    with _progress(options) as show:
        for epoch in range(1, options.epochs + 1):
            razor.model.train()
            nll = sum(stepper.step(x, y) * len(y) for x, y in loader) / razor.n_data
            razor.model.eval()
            record = {"epoch": epoch, "nll": nll}
            if epoch % options.every == 0 or epoch == options.epochs:
                estimate = razor.step(loader, None if subset == razor.n_data else subset)
                record |= estimate.to_dict()
            if test is not None:
                record |= {f"test_{k}": v for k, v in _evaluate(razor, test).items()}
            record["seconds"] = time.perf_counter() - start
            history.append(record)
            show(history)
    return history


class _Stepper:
    """One maximum a posteriori step at a time, on a cosine schedule."""

    def __init__(self, razor: Razor, options: FitConfig, total: int) -> None:
        self.razor, self.options, self.total, self.done = razor, options, total, 0
        self.peak = options.lr or DEFAULT_LR[options.optimizer]
        theta = list(weights(razor.model).values())
        self.optimiser: torch.optim.Optimizer
        if options.optimizer == "sgd":
            self.optimiser = torch.optim.SGD(theta, lr=self.peak, momentum=0.9)
        else:
            self.optimiser = torch.optim.AdamW(theta, lr=self.peak, weight_decay=0.0)
        self.last_good = self._snapshot()

    def step(self, x: Tensor, y: Tensor) -> float:
        """Train on one batch; returns its mean negative log likelihood."""
        lr = 0.5 * self.peak * (1 + math.cos(math.pi * self.done / self.total))
        for group in self.optimiser.param_groups:
            group["lr"] = lr
        implicit = self.options.optimizer == "sgd"
        nll = self.razor.likelihood.nll(self.razor.model(x), y).mean()
        loss = nll if implicit else nll + self.razor.penalty()
        if not bool(torch.isfinite(loss)):
            self._give_up(float(loss.detach()))
        if self.done % 50 == 0:
            self.last_good = self._snapshot()
        self.optimiser.zero_grad()
        loss.backward()
        for parameter in hyperparameters(self.razor.model).values():
            parameter.grad = None  # eta follows the evidence, not the training loss
        self.optimiser.step()
        if implicit:
            self.razor.shrink_(lr / (1 - 0.9))
        self.done += 1
        return float(nll.detach())

    def _snapshot(self) -> dict[str, Tensor]:
        state = self.razor.model.state_dict()
        return {name: value.detach().clone() for name, value in state.items()}

    def _give_up(self, loss: float) -> None:
        self.razor.model.load_state_dict(self.last_good)
        raise FloatingPointError(
            f"expected a finite training loss, got {loss} at step {self.done} of {self.total}; the "
            f"model is back at its last good state. Lower the learning rate (lr={self.peak:g})"
        )


@torch.no_grad()
def _outputs(model: nn.Module, x: Tensor) -> Tensor:
    """Model outputs in batches."""
    device = next(model.parameters()).device
    return torch.cat([model(part.to(device)) for part in x.split(EVALUATION_BATCH)])


def _evaluate(razor: Razor, test: Tensors) -> dict[str, float]:
    return scores(razor.likelihood, _outputs(razor.model, test[0]), test[1])


Show = Callable[[list[dict[str, float]]], None]


@contextmanager
def _progress(options: FitConfig) -> Iterator[Show]:
    """A progress bar with epoch, nll, evidence, test figure and time left; or silence."""
    wanted = sys.stderr.isatty() if options.progress is None else options.progress
    if not wanted:
        yield lambda history: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("epoch {task.completed}/{task.total}"),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=options.epochs)

        def show(history: list[dict[str, float]]) -> None:
            bar.update(task, advance=1, description=_describe(history))

        yield show


def _describe(history: list[dict[str, float]]) -> str:
    """The latest figures in one line."""
    parts = [f"nll {history[-1]['nll']:.3f}"]
    measured = [record["per_datum"] for record in history if "per_datum" in record]
    if measured:
        parts.append(f"evidence/n {measured[-1]:.3f}")
    for key in ("test_accuracy", "test_mse"):
        if key in history[-1]:
            parts.append(f"{key.replace('_', ' ')} {history[-1][key]:.4f}")
    return "  ".join(parts)
