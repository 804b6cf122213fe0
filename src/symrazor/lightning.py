r"""The evidence step inside a LightningModule's own training (`pip install symrazor[lightning]`).

    evidence = EvidenceCallback("categorical", every=5, network=lambda module: module.net)
    Trainer(max_epochs=60, callbacks=[evidence]).fit(module, loader)
    print(evidence.reading(x))

The module's `training_step` returns the mean negative log likelihood, as it would without
symrazor; the callback brings in the prior, and every few epochs moves the hyperparameters.

How the prior reaches the weights decides where training ends. With g the gradient of the mean
negative log likelihood, $\Delta$ the precisions and N data, the posterior mode is where
$g = -\Delta\theta/N$. `prior=`

- "shrink": after each optimiser step $\theta \leftarrow \theta / (1 + s \Delta / N)$, stable for
  any precision. With SGD, s = lr (1 - dampening) / (1 - momentum): the mode. With Adam and its kin,
  s = lr, decoupled weight decay: *not* the mode but $g = -(\sqrt v + \epsilon)\,\Delta\theta/N$, v
  the mean squared gradient; without gradient noise the best fit in the box
  $|\theta_i| \le N/\delta_i$.
- "gradient": before each step, and before gradients are clipped, $\Delta\theta/N$ is added to the
  gradients: the mode, with any optimiser.
- "loss": `training_step` adds `callback.penalty()` to its loss: the mode, with any optimiser.
- "auto": "shrink" with SGD, "gradient" otherwise.

Lightning divides accumulated gradients by the number of batches, so one shrink or one prior
gradient per optimiser step has the right weight. Clipping acts on g alone with "shrink" (while it
bites, the prior weighs more), and on the gradient of the log posterior otherwise.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from symrazor.core.evidence import Evidence
from symrazor.core.likelihood import Likelihood
from symrazor.core.parameters import eval_mode, hyperparameters, weights
from symrazor.core.validation import matches_type
from symrazor.curvature.tape import Input, map_tensors
from symrazor.inference.loading import loader_sizes
from symrazor.inference.razor import Razor
from symrazor.symmetry.reading import Reading, read
from symrazor.training.events import record_of, scalars
from symrazor.training.optimisers import check_optimiser, step_sizes

try:
    import lightning.pytorch as pl
except ImportError:
    try:
        import pytorch_lightning as pl  # type: ignore[no-redef]
    except ImportError as error:
        raise ModuleNotFoundError(
            "expected the package lightning (or pytorch_lightning), got none; do: "
            "pip install symrazor[lightning]"
        ) from error

How = Literal["auto", "shrink", "gradient", "loss"]


class EvidenceCallback(pl.Callback):
    """Learns the prior and all hyperparameters of a LightningModule by the evidence, as it trains.

    Args:
        likelihood: a Likelihood or its name; its negative logarithm, averaged over the batch, is
            the loss of the module's `training_step`.
        every: epochs between evidence steps; the last epoch has one too, by `max_epochs`,
            `max_steps` or `max_time`.
        loader: (x, y) batches for the evidence, by default the training loader. Give one of your
            own if training data are augmented or batches are not pairs (x, y). Its batches pass
            the module's transfer hooks, as in training.
        network: module -> the submodule that maps x to the outputs; by default the module itself.
        prior: how the prior reaches the weights: "auto", "shrink", "gradient" or "loss", see above.
        subset: data per evidence step, scaled up; by default all.
        **razor_options: of `RazorConfig`, as in `estimator="mc"`; `burn_in` is by default a fifth
            of all training steps, where their number is known.

    Attributes:
        razor: the `Razor`, from the start of training on.
        history: one record per evidence step, as `symrazor.training.events` writes them.

    Raises:
        ValueError: manual optimisation, more than one process, an optimiser with a weight decay
            or without some of the network's weights, options that make no sense.
    """

    def __init__(
        self,
        likelihood: str | Likelihood = "categorical",
        every: int = 5,
        loader: Iterable[Any] | None = None,
        network: Callable[[Any], nn.Module] | None = None,
        prior: How = "auto",
        subset: int | None = None,
        **razor_options: Any,
    ) -> None:
        """Note the options; see the class."""
        super().__init__()
        for name, value in (("every", every), ("subset", 1 if subset is None else subset)):
            if not matches_type(value, int) or value < 1:
                raise ValueError(f"expected {name} as a whole number from 1 on, got {value!r}")
        if isinstance(network, nn.Module) or not (network is None or callable(network)):
            raise ValueError(
                f"expected network as a function of the LightningModule, got "
                f"{type(network).__name__}; do network=lambda module: module.net"
            )
        if prior not in ("auto", "shrink", "gradient", "loss"):
            raise ValueError(
                f"expected prior 'auto', 'shrink', 'gradient' or 'loss', got {prior!r}"
            )
        self.likelihood, self.every, self.loader, self.network = likelihood, every, loader, network
        self.prior, self.subset, self.razor_options = prior, subset, razor_options
        self.razor: Razor | None = None
        self.history: list[dict[str, Any]] = []
        self._data: _Batches | None = None
        self._part: int | None = None
        self._pending: dict[str, Any] | None = None
        self._undo: Callable[[], None] = _nothing

    # What a user calls.

    def penalty(self) -> Tensor:
        r"""$-\log p(\theta) / N$, for the loss of `training_step`, with `prior="loss"`.

        Raises:
            ValueError: with any other `prior`, where it would count twice; or before training.
        """
        if self.prior != "loss":
            raise ValueError(
                f"expected prior='loss' where penalty() is part of the loss, got {self.prior!r}: "
                "the prior would count twice; do EvidenceCallback(..., prior='loss')"
            )
        return self._started().penalty()

    def evidence(self) -> Evidence:
        """The evidence of the network as it is now, measured anew on the evidence's data."""
        razor = self._started()
        assert self._data is not None
        device = next(razor.model.parameters()).device  # Lightning takes modules off the GPU
        razor.prior.to(device), razor.likelihood.to(device)
        with eval_mode(razor.model):
            return razor.evidence(self._data, self._part)

    def reading(self, x: Input | None = None) -> Reading:
        """What was learned, about the network as it is now.

        Args:
            x: some inputs [n, c, *size], to measure the equivariance of relaxed layers on.
        """
        evidence = self.evidence()
        razor = self._started()
        device = next(razor.model.parameters()).device
        inputs = None if x is None else map_tensors(x, lambda part: part.to(device))
        with eval_mode(razor.model):
            return read(razor, evidence, {"n": razor.n_data}, x=inputs)

    def restore_best(self) -> Evidence:
        """Put network, prior and likelihood back to where the evidence was highest."""
        return self._started().restore_best()

    def _started(self) -> Razor:
        if self.razor is None:
            raise ValueError("expected a training that has begun, got none; do Trainer.fit first")
        return self.razor

    # What Lightning calls.

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse what is not supported, before anything is trained."""
        if stage != "fit":
            return
        if not pl_module.automatic_optimization:
            raise ValueError(
                "expected automatic optimization, got manual; do call Razor in your training_step "
                "yourself, see docs/how-to/your-own-loop.md"
            )
        if trainer.world_size > 1:
            raise ValueError(
                f"expected one process, got world_size {trainer.world_size}; do Trainer(devices=1)"
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make the Razor, or take it up where it was left, and watch the optimiser."""
        network = pl_module if self.network is None else self.network(pl_module)
        if self.razor is not None and self.razor.model is network and self._pending is None:
            self._pending = self.razor.state_dict()  # a second fit goes on, on this one's device
        loader = self._loader(trainer)
        self._data = _Batches(loader, trainer, pl_module, network)
        n_data, once = loader_sizes(loader)
        once = min(once, self.subset or once)
        self._part = None if once == n_data else once
        options = {"burn_in": self._burn_in(trainer), **self.razor_options}
        self.razor = Razor(network, self.likelihood, n_data, **options)
        if self._pending is not None:
            self.razor.load_state_dict(self._pending)
            self._pending = None
        (optimiser,) = trainer.optimizers
        check_optimiser(optimiser, weights(network), prior_in_loss=self.prior == "loss")
        if self._prior_for(optimiser) == "shrink":
            self._undo = optimiser.register_step_post_hook(self._shrink).remove

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Hyperparameters do not follow the loss; weights follow the prior too ("gradient")."""
        razor = self._started()
        for parameter in hyperparameters(razor.model).values():
            parameter.grad = None
        theta = list(weights(razor.model).values())
        if self._prior_for(optimizer) != "gradient" or all(w.grad is None for w in theta):
            return
        with torch.enable_grad():
            slopes = torch.autograd.grad(razor.penalty(), theta)
        for weight, slope in zip(theta, slopes, strict=True):
            weight.grad = slope if weight.grad is None else weight.grad.add_(slope)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Every few epochs: the evidence, and a move of the hyperparameters."""
        epoch = trainer.current_epoch + 1
        spent = 0 <= trainer.max_steps <= trainer.global_step
        last = epoch == trainer.max_epochs or spent or trainer.should_stop
        if epoch % self.every and not last:
            return
        razor = self._started()
        assert self._data is not None
        if self.prior == "loss" and razor.training_steps == 0:
            raise ValueError(
                "expected callback.penalty() in the loss of training_step (prior='loss'), got no "
                "call of it; do add it, or leave prior='auto'"
            )
        with eval_mode(razor.model):
            found = razor.step(self._data, self._part)
        record = {"epoch": epoch, **record_of(razor, found)}
        self.history.append(record)
        pl_module.log_dict(scalars(record))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let go of the optimiser."""
        self._undo()
        self._undo = _nothing

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Let go of the optimiser."""
        self.on_train_end(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """For Lightning's checkpoints: tensors, numbers and strings, safe with weights_only."""
        razor = self._pending if self.razor is None else self.razor.state_dict()
        return {} if razor is None else {"razor": razor, "history": list(self.history)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From a checkpoint; the Razor takes it up when training starts."""
        if state_dict:
            self._pending = state_dict["razor"]
            self.history = list(state_dict["history"])

    # How it is done.

    def _prior_for(self, optimiser: torch.optim.Optimizer) -> How:
        if self.prior != "auto":
            return self.prior
        return "shrink" if isinstance(optimiser, torch.optim.SGD) else "gradient"

    def _shrink(self, optimiser: torch.optim.Optimizer, *_: Any) -> None:
        """After an optimiser step: the prior's part of it, at the step size that was just used."""
        razor = self._started()
        theta = weights(razor.model)
        if any(weight.grad is not None for weight in theta.values()):  # else: a skipped batch
            razor.shrink_(step_sizes(optimiser, theta))

    def _loader(self, trainer: pl.Trainer) -> Iterable[Any]:
        if self.loader is not None:
            return self.loader
        loader = trainer.train_dataloader
        if isinstance(loader, torch.utils.data.DataLoader):
            return loader
        raise ValueError(
            f"expected one training DataLoader of (x, y), got {type(loader).__name__}; do "
            "EvidenceCallback(loader=...)"
        )

    def _burn_in(self, trainer: pl.Trainer) -> int:
        """A fifth of all training steps."""
        total = trainer.estimated_stepping_batches
        if total == float("inf") or total < 0:  # data without a length: -1
            return 0
        calls = trainer.accumulate_grad_batches if self.prior == "loss" else 1
        return int(total) * calls // 5


class _Batches:
    """A loader read as Lightning reads it: through the module's hooks, on the network's device."""

    def __init__(
        self,
        loader: Iterable[Any],
        trainer: pl.Trainer,
        module: pl.LightningModule,
        network: nn.Module,
    ) -> None:
        self.loader, self.trainer, self.module, self.network = loader, trainer, module, network

    def __iter__(self) -> Iterator[Any]:
        device = next(self.network.parameters()).device
        for batch in self.loader:
            ready = self.trainer.precision_plugin.convert_input(batch)
            ready = self.module._on_before_batch_transfer(ready, dataloader_idx=0)
            yield self.trainer.strategy.batch_to_device(ready, device, dataloader_idx=0)


def _nothing() -> None:
    """What there is to undo before anything was done."""
