"""The training loop for variational networks: Adam on the bound, on a warm-up and a cosine."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from symrazor.core.evidence import Evidence
from symrazor.core.likelihood import Likelihood, scores
from symrazor.core.progress import Record, epoch_bar
from symrazor.data import TensorLoader, Tensors, check_batch
from symrazor.inference.posterior import Prediction
from symrazor.inference.variational.config import VariationalConfig
from symrazor.inference.variational.network import Variational
from symrazor.symmetry.reading import Reading, read
from symrazor.training.loop import EVALUATION_BATCH
from symrazor.training.stepper import learning_rate

Callback = Callable[[Record], object]


@dataclass(frozen=True)
class VariationalFitConfig:
    """Everything `fit_variational` can be told.

    Args:
        epochs: passes over the data.
        batch_size: data per step.
        lr: peak learning rate of means and covariances (Adam).
        hyper_lr: peak learning rate of hyperparameters that follow the gradient.
        warmup: fraction of all steps in which the learning rate rises linearly; a cosine follows.
        burn_in: steps before precisions move in closed form; None for a third of all steps.
        clip: largest norm of the gradient.
        every: epochs between records with the bound of all data and test figures.
        draws: of the weights for these.
        seed: of shuffling and draws.
        device: "auto" (where the model is), "cpu", "cuda", ...
        progress: show a progress bar; None for "if this is a terminal".
        variational: options of the posteriors.
    """

    epochs: int = 100
    batch_size: int = 128
    lr: float = 1e-2
    hyper_lr: float = 1e-2
    warmup: float = 0.02
    burn_in: int | None = None
    clip: float = float("inf")
    every: int = 10
    draws: int = 16
    seed: int = 0
    device: str = "auto"
    progress: bool | None = None
    variational: VariationalConfig = field(default_factory=VariationalConfig)

    def __post_init__(self) -> None:
        """Check ranges."""
        for name in ("epochs", "batch_size", "every", "draws"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} of at least 1, got {getattr(self, name)}")
        for name in ("lr", "hyper_lr", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"expected a positive {name}, got {getattr(self, name)}")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"expected warmup as a fraction in [0, 1), got {self.warmup}")

    def change(self, **changes: Any) -> "VariationalFitConfig":
        """A copy with some fields of this config or of its `variational` replaced.

        `draws`, `burn_in` and `seed` are those of this config; the draws of a training step are
        `variational.draws`.

        Raises:
            ValueError: a field that neither has.
        """
        mine = {f.name for f in fields(self)}
        inner = {key: changes.pop(key) for key in list(changes) if key not in mine}
        known = mine | {f.name for f in fields(VariationalConfig)}
        if not set(inner) <= known:
            unknown = sorted(set(inner) - known)
            raise ValueError(f"expected options among {sorted(known)}, got {unknown}")
        base = changes.pop("variational", self.variational)
        return replace(self, variational=base.change(**inner), **changes)


@dataclass
class VariationalFit:
    """What `fit_variational` returns.

    Args:
        variational: the network with its posteriors, trained in place.
        evidence: its bound, of all data.
        reading: precisions, effective parameters, test figures; `print` it.
        history: one dictionary per epoch.
    """

    variational: Variational
    evidence: Evidence
    reading: Reading
    history: list[Record]

    @property
    def model(self) -> nn.Module:
        """The network, with the means of the posteriors as weights."""
        return self.variational.model

    def predict(self, x: Tensor, draws: int = 32) -> Prediction:
        """The posterior predictive at x."""
        return self.variational.predict(x.to(self.variational.device), draws)


def fit_variational(
    model: nn.Module,
    data: Tensors,
    likelihood: str | Likelihood = "categorical",
    *,
    test: Tensors | None = None,
    config: VariationalFitConfig | None = None,
    callbacks: Sequence[Callback] = (),
    **changes: Any,
) -> VariationalFit:
    """Train posteriors and hyperparameters of a model by the evidence lower bound.

    Args:
        model: any module; its weights become the means of the posteriors.
        data: training inputs and labels.
        likelihood: a Likelihood or its name.
        test: held-out data, only ever looked at for the report.
        config: all options; single ones can be given by name, of `VariationalFitConfig` and
            `VariationalConfig` alike, as in `fit_variational(model, data, posterior="diagonal")`.
        callbacks: each is called after every epoch with the epoch's record.
        **changes: those single options.

    Raises:
        ValueError: bad data or options.
        FloatingPointError: training diverged.
    """
    options = (config or VariationalFitConfig()).change(**changes)
    if options.device != "auto":
        model.to(torch.device(options.device))
    steps = options.epochs * -(-len(data[1]) // options.batch_size)
    burn_in = steps // 3 if options.burn_in is None else options.burn_in
    inner = options.variational.change(seed=options.seed, burn_in=burn_in)
    vi = Variational(model, likelihood, len(data[1]), inner)
    x, y = (part.to(vi.device) for part in data)
    check_batch(x, y, "the training data")
    if test is not None:
        test = (test[0].to(vi.device), test[1].to(vi.device))
        check_batch(*test, "the test data")
    shuffling = torch.Generator().manual_seed(options.seed)
    loader = TensorLoader(x, y, options.batch_size, shuffle=True, generator=shuffling)
    fixed = TensorLoader(x, y, min(len(y), EVALUATION_BATCH))
    history = _train(vi, loader, fixed, options, test, callbacks)
    model.eval()
    evidence = vi.evidence(fixed, options.draws)
    train = {"n": len(y), "epochs": len(history), "seconds": history[-1]["seconds"]}
    found = read(vi, evidence, train, _scores(vi, test, options.draws))
    return VariationalFit(vi, evidence, found, history)


def _train(
    vi: Variational,
    loader: TensorLoader,
    fixed: TensorLoader,
    options: VariationalFitConfig,
    test: Tensors | None,
    callbacks: Sequence[Callback],
) -> list[Record]:
    groups = vi.groups(options.lr, options.hyper_lr)
    optimiser = torch.optim.Adam(groups)
    total = options.epochs * len(loader)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: learning_rate(min(step, total - 1), total, options.warmup)
    )
    moved = [parameter for group in groups for parameter in group["params"]]
    history: list[Record] = []
    started = time.perf_counter()
    with epoch_bar(options.epochs, options.progress) as show:
        for epoch in range(1, options.epochs + 1):
            vi.model.train()
            nll = torch.zeros((), dtype=torch.float64, device=vi.device)
            for x, y in loader:
                optimiser.zero_grad()
                now = vi.bound(x, y)
                (-now.per_datum).backward()
                norm = torch.nn.utils.clip_grad_norm_(moved, options.clip)
                if not bool(norm.isfinite()):
                    raise FloatingPointError(
                        f"expected finite gradients, got {float(norm)} in epoch {epoch}: {now}; "
                        "do: a smaller lr, or clip=1"
                    )
                optimiser.step()
                schedule.step()
                nll -= now.log_likelihood.detach() * (len(y) / vi.n_data)
            record: Record = {"epoch": epoch, "nll": float(nll) / vi.n_data}
            if epoch % options.every == 0 or epoch == options.epochs:
                vi.model.eval()
                record |= vi.evidence(fixed, options.draws).to_dict()
                figures = _scores(vi, test, options.draws)
                record |= {f"test_{name}": value for name, value in figures.items()}
            record["seconds"] = time.perf_counter() - started
            history.append(record)
            show(history)
            for callback in callbacks:
                callback(dict(record))
    return history


@torch.no_grad()
def _scores(vi: Variational, test: Tensors | None, draws: int) -> dict[str, float]:
    """Test figures of the posterior predictive."""
    if test is None:
        return {}
    outputs = [
        vi.outputs(part, draws, antithetic=draws > 1) for part in test[0].split(EVALUATION_BATCH)
    ]
    return scores(vi.likelihood, torch.cat(outputs, 1), test[1])
