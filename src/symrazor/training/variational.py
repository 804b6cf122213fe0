"""Train a variational network: Adam on the evidence lower bound."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from symrazor.core.likelihood import Likelihood
from symrazor.core.validation import check_at_least, replace_nested
from symrazor.data import TensorLoader, Tensors, check_batch
from symrazor.inference.evidence import Evidence
from symrazor.inference.posterior import Prediction
from symrazor.inference.variational.config import VariationalConfig
from symrazor.inference.variational.network import Variational
from symrazor.symmetry.reading import Reading, read
from symrazor.training.evidence_training import EVALUATION_BATCH
from symrazor.training.loop import Callback, Loop, Record, Task
from symrazor.training.options import Schedule


@dataclass(frozen=True)
class VariationalFitConfig:
    """Options of `fit_variational`.

    Args:
        epochs: passes over the training data; default 100.
        batch_size: examples per step; default 128.
        lr: peak learning rate of posterior means and covariances (Adam); default 0.01.
        hyper_lr: peak learning rate of hyperparameters without a closed form; default 0.01.
        warmup: fraction of all steps with a rising learning rate, then a cosine; default 0.02.
        burn_in: steps before precisions are updated in closed form; default a third of all steps.
        clip: maximum norm of the gradient; default infinity.
        every: epochs between records with the bound on all data and test figures; default 10.
        draws: draws of the weights for these records; default 16.
        seed: seed of shuffling and draws; default 0.
        device: "auto" (default, the device of the model), "cpu", "cuda", ...
        progress: whether to show a progress bar; default None, if standard error is a terminal.
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
        check_at_least(self, 1, "epochs", "batch_size", "every", "draws")
        for name in ("lr", "hyper_lr", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}.")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup must be in [0, 1), got {self.warmup}.")

    def change(self, **changes: Any) -> "VariationalFitConfig":
        """Return a copy with changed fields, of this config or of its `variational`.

        `draws`, `burn_in` and `seed` belong to this config; the draws of a training step are
        `variational.draws`.
        """
        return replace_nested(self, "variational", changes)


@dataclass
class VariationalFit:
    """Result of `fit_variational`.

    Args:
        variational: the network with its posteriors, trained in place.
        evidence: evidence lower bound on all training data.
        reading: precisions, effective parameters, test figures; `print` it.
        history: one record (a dictionary of numbers) per epoch.
    """

    variational: Variational
    evidence: Evidence
    reading: Reading
    history: list[Record]

    @property
    def model(self) -> nn.Module:
        """The network, with the posterior means as weights."""
        return self.variational.model

    def predict(self, x: Tensor, draws: int = 32) -> Prediction:
        """Return the posterior predictive at x."""
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
    """Train the posteriors and hyperparameters of a model by the evidence lower bound.

    Args:
        model: any module; its weights become the posterior means.
        data: training inputs and labels.
        likelihood: a `Likelihood` or its name.
        test: held-out data, used for the report only.
        config: all options as one `VariationalFitConfig`.
        callbacks: functions called with the record of every epoch. An exception in a callback is
            logged and does not end the run.
        **changes: single options of `VariationalFitConfig` or `VariationalConfig`, as in
            `fit_variational(model, data, posterior="diagonal")`.

    Raises:
        ValueError: invalid data or options.
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
    task = _VariationalTask(vi, (x, y), options, test)
    history = Loop(task, callbacks, n_rounds=options.epochs, show_progress=options.progress).run()
    model.eval()
    evidence = vi.evidence(task.unshuffled, options.draws)
    about = {"n": len(y), "epochs": len(history), "seconds": history[-1]["seconds"]}
    reading = read(vi, evidence, about, task.test_scores())
    return VariationalFit(vi, evidence, reading, history)


class _VariationalTask(Task):
    """Epochs of Adam steps on the bound."""

    def __init__(
        self, vi: Variational, data: Tensors, options: VariationalFitConfig, test: Tensors | None
    ) -> None:
        super().__init__()
        self.vi, self.options, self.test = vi, options, test
        x, y = data
        generator = torch.Generator().manual_seed(options.seed)
        self.loader = TensorLoader(x, y, options.batch_size, shuffle=True, generator=generator)
        self.unshuffled = TensorLoader(x, y, min(len(y), EVALUATION_BATCH))
        groups = vi.groups(options.lr, options.hyper_lr)
        self.parameters = [parameter for group in groups for parameter in group["params"]]
        self.optimiser = torch.optim.Adam(groups)
        self.peaks = [group["lr"] for group in self.optimiser.param_groups]
        total = options.epochs * len(self.loader)
        self.schedule = Schedule.with_warmup(total, options.warmup)
        self.done = 0
        self.nll = torch.zeros((), dtype=torch.float64, device=vi.device)

    def finished(self) -> bool:
        return len(self.history) == self.options.epochs

    def batches(self) -> TensorLoader:
        self.vi.model.train()
        self.nll.zero_()
        return self.loader

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        x, y = batch
        for group, peak in zip(self.optimiser.param_groups, self.peaks, strict=True):
            group["lr"] = peak * self.schedule(self.done)
        self.optimiser.zero_grad()
        bound = self.vi.bound(x, y)
        (-bound.per_datum).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.options.clip)
        if not bool(norm.isfinite()):
            raise FloatingPointError(
                f"The norm of the gradient is {float(norm)} in epoch {len(self.history) + 1} "
                f"({bound}). Lower lr, or set clip=1."
            )
        self.optimiser.step()
        self.nll -= bound.log_likelihood.detach() * (len(y) / self.vi.n_data)
        self.done += 1

    def evaluate(self) -> None:
        epoch, options = len(self.history) + 1, self.options
        record: Record = {"epoch": epoch, "nll": float(self.nll) / self.vi.n_data}
        if epoch % options.every == 0 or epoch == options.epochs:
            self.vi.model.eval()
            record |= self.vi.evidence(self.unshuffled, options.draws).to_dict()
            record |= {f"test_{name}": value for name, value in self.test_scores().items()}
        record["seconds"] = self.update_clock()
        self.history.append(record)

    @torch.no_grad()
    def test_scores(self) -> dict[str, float]:
        """Return the test figures of the posterior predictive."""
        if self.test is None:
            return {}
        draws = self.options.draws
        outputs = [
            self.vi.outputs(part, draws, antithetic=draws > 1)
            for part in self.test[0].split(EVALUATION_BATCH)
        ]
        return self.vi.likelihood.scores(torch.cat(outputs, 1), self.test[1])
