r"""Take evidence steps while Lightning trains a module (`pip install symrazor[lightning]`).

    evidence = EvidenceCallback("categorical", every=5, network=lambda module: module.net)
    Trainer(max_epochs=60, callbacks=[evidence]).fit(module, loader)
    print(evidence.reading(x))

The module's `training_step` returns the mean negative log likelihood, as it would without symrazor.
The callback adds the prior, and updates the hyperparameters every few epochs.

How the prior acts on the weights decides where training converges. With g the gradient of the mean
negative log likelihood, $\Delta$ the precisions and N data, the posterior mode satisfies
$g = -\Delta\theta/N$. The option `prior` is one of

- "shrink": after each optimiser step $\theta \leftarrow \theta / (1 + s \Delta / N)$, stable for
  any precision. With SGD, s = lr (1 - dampening) / (1 - momentum), and training converges to the
  mode. With Adam and similar optimisers, s = lr (decoupled weight decay), and training converges
  *not* to the mode but to $g = -(\sqrt v + \epsilon)\,\Delta\theta/N$, with v the mean squared
  gradient; without gradient noise this is the best fit in the box $|\theta_i| \le N/\delta_i$.
- "gradient": before each step, and before gradients are clipped, $\Delta\theta/N$ is added to the
  gradients. Training converges to the mode with any optimiser.
- "loss": `training_step` adds `callback.penalty()` to its loss. Training converges to the mode with
  any optimiser.
- "auto": "shrink" with SGD, "gradient" otherwise.

Lightning divides accumulated gradients by the number of batches, so one shrink step or one prior
gradient per optimiser step has the right weight. With "shrink", clipping acts on g alone, so the
prior has more weight while gradients are clipped; otherwise clipping acts on the gradient of the
log posterior.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from symrazor.core.likelihood import Likelihood
from symrazor.core.parameters import eval_mode, hyperparameters, weights
from symrazor.core.validation import matches_type
from symrazor.data.batches import Input, loader_sizes, map_tensors
from symrazor.inference.evidence import Evidence, record_of
from symrazor.inference.razor import Razor
from symrazor.symmetry.reading import Reading, read
from symrazor.training.events import scalars
from symrazor.training.optimisers import check_optimiser, step_sizes
from symrazor.training.options import BURN_IN_FRACTION

try:
    import lightning.pytorch as pl
except ImportError:
    try:
        import pytorch_lightning as pl  # type: ignore[no-redef]
    except ImportError as error:
        raise ModuleNotFoundError(
            "Lightning is not installed. Run pip install symrazor[lightning]."
        ) from error

PriorMode = Literal["auto", "shrink", "gradient", "loss"]


class EvidenceCallback(pl.Callback):
    """Learn the prior and all hyperparameters of a LightningModule by the evidence.

    Args:
        likelihood: a `Likelihood` or its name; the loss of `training_step` is its negative
            logarithm, averaged over the batch.
        every: epochs between evidence steps. The last epoch (by `max_epochs`, `max_steps` or
            `max_time`) always has one.
        loader: (x, y) batches for the evidence; by default the training loader. Pass a separate
            loader if training data are augmented or batches are not pairs (x, y). Batches pass
            through the module's transfer hooks, as in training.
        network: function module -> submodule that maps x to the outputs; by default the module.
        prior: how the prior acts on the weights, see the module docstring.
        subset: examples per evidence step, scaled up to all; by default all.
        **razor_options: options of `RazorConfig`, as in `estimator="mc"`. `burn_in` is by default a
            fifth of all training steps, if their number is known.

    Attributes:
        razor: the `Razor`, from the start of training on.
        history: one record per evidence step, see `symrazor.training.events`.

    Raises:
        ValueError: manual optimisation, more than one process, an optimiser with a weight decay or
            without some of the network's weights, or invalid options.
    """

    def __init__(
        self,
        likelihood: str | Likelihood = "categorical",
        every: int = 5,
        loader: Iterable[Any] | None = None,
        network: Callable[[Any], nn.Module] | None = None,
        prior: PriorMode = "auto",
        subset: int | None = None,
        **razor_options: Any,
    ) -> None:
        """Check and store the options."""
        super().__init__()
        for name, value in (("every", every), ("subset", 1 if subset is None else subset)):
            if not matches_type(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}.")
        if isinstance(network, nn.Module) or not (network is None or callable(network)):
            raise ValueError(
                f"network must be a function of the LightningModule, got {type(network).__name__}. "
                "Use network=lambda module: module.net."
            )
        if prior not in ("auto", "shrink", "gradient", "loss"):
            raise ValueError(
                f"prior must be 'auto', 'shrink', 'gradient' or 'loss', got {prior!r}."
            )
        self.likelihood, self.every, self.loader, self.network = likelihood, every, loader, network
        self.prior, self.subset, self.razor_options = prior, subset, razor_options
        self.razor: Razor | None = None
        self.history: list[dict[str, Any]] = []
        self._data: _LightningBatches | None = None
        self._evidence_subset: int | None = None
        self._state_to_load: dict[str, Any] | None = None
        self._remove_hook: Callable[[], None] = _do_nothing

    # Methods for users.

    def penalty(self) -> Tensor:
        r"""Return $-\log p(\theta) / N$, to be added to the loss with `prior="loss"`.

        Raises:
            ValueError: `prior` is not "loss", so the prior would count twice; or training has not
                started.
        """
        if self.prior != "loss":
            raise ValueError(
                f"penalty() with prior={self.prior!r} would count the prior twice. Use "
                "EvidenceCallback(..., prior='loss')."
            )
        return self._started_razor().penalty()

    def evidence(self) -> Evidence:
        """Compute the evidence of the current network."""
        razor = self._started_razor()
        assert self._data is not None
        device = next(razor.model.parameters()).device  # Lightning moves modules off the GPU
        razor.prior.to(device), razor.likelihood.to(device)
        with eval_mode(razor.model):
            return razor.evidence(self._data, self._evidence_subset)

    def reading(self, x: Input | None = None) -> Reading:
        """Return the reading of the current network.

        Args:
            x: inputs [n, c, *size] on which the equivariance of relaxed layers is measured.
        """
        evidence = self.evidence()
        razor = self._started_razor()
        device = next(razor.model.parameters()).device
        inputs = None if x is None else map_tensors(x, lambda part: part.to(device))
        with eval_mode(razor.model):
            return read(razor, evidence, {"n": razor.n_data}, x=inputs)

    def restore_best(self) -> Evidence:
        """Restore network, prior and likelihood to the state with the highest evidence."""
        return self._started_razor().restore_best()

    def _started_razor(self) -> Razor:
        if self.razor is None:
            raise ValueError("Training has not started. Call Trainer.fit first.")
        return self.razor

    # Hooks for Lightning.

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check that the training is supported, before it starts."""
        if stage != "fit":
            return
        if not pl_module.automatic_optimization:
            raise ValueError(
                "Manual optimization is not supported. Call Razor in training_step yourself, see "
                "docs/how-to/your-own-loop.md."
            )
        if trainer.world_size > 1:
            raise ValueError(
                f"Only one process is supported, got world_size {trainer.world_size}. Use "
                "Trainer(devices=1)."
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Create or continue the Razor, and hook into the optimiser."""
        network = pl_module if self.network is None else self.network(pl_module)
        if self.razor is not None and self.razor.model is network and self._state_to_load is None:
            # A second fit continues the first, possibly on another device.
            self._state_to_load = self.razor.state_dict()
        loader = self._evidence_loader(trainer)
        self._data = _LightningBatches(loader, trainer, pl_module, network)
        n_data, n_available = loader_sizes(loader)
        n_used = min(n_available, self.subset or n_available)
        self._evidence_subset = None if n_used == n_data else n_used
        options = {"burn_in": self._burn_in(trainer), **self.razor_options}
        self.razor = Razor(network, self.likelihood, n_data, **options)
        if self._state_to_load is not None:
            self.razor.load_state_dict(self._state_to_load)
            self._state_to_load = None
        (optimiser,) = trainer.optimizers
        check_optimiser(optimiser, weights(network), prior_in_loss=self.prior == "loss")
        if self._prior_mode(optimiser) == "shrink":
            self._remove_hook = optimiser.register_step_post_hook(self._shrink).remove

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Remove gradients of hyperparameters; add the gradient of the prior ("gradient")."""
        razor = self._started_razor()
        for parameter in hyperparameters(razor.model).values():
            parameter.grad = None
        theta = list(weights(razor.model).values())
        if self._prior_mode(optimizer) != "gradient" or all(w.grad is None for w in theta):
            return
        with torch.enable_grad():
            gradients = torch.autograd.grad(razor.penalty(), theta)
        for weight, gradient in zip(theta, gradients, strict=True):
            weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take an evidence step if it is due."""
        epoch = trainer.current_epoch + 1
        steps_used_up = 0 <= trainer.max_steps <= trainer.global_step
        last = epoch == trainer.max_epochs or steps_used_up or trainer.should_stop
        if epoch % self.every and not last:
            return
        razor = self._started_razor()
        assert self._data is not None
        if self.prior == "loss" and razor.training_steps == 0:
            raise ValueError(
                "training_step never called callback.penalty(). Add it to the loss, or use "
                "prior='auto'."
            )
        with eval_mode(razor.model):
            evidence = razor.step(self._data, self._evidence_subset)
        record = {"epoch": epoch, **record_of(razor, evidence)}
        self.history.append(record)
        pl_module.log_dict(scalars(record))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Remove the hook of the optimiser."""
        self._remove_hook()
        self._remove_hook = _do_nothing

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Remove the hook of the optimiser."""
        self.on_train_end(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """Return tensors, numbers and strings for Lightning's checkpoints."""
        razor = self._state_to_load if self.razor is None else self.razor.state_dict()
        return {} if razor is None else {"razor": razor, "history": list(self.history)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint; the Razor continues from it when training starts."""
        if state_dict:
            self._state_to_load = state_dict["razor"]
            self.history = list(state_dict["history"])

    def _prior_mode(self, optimiser: torch.optim.Optimizer) -> PriorMode:
        if self.prior != "auto":
            return self.prior
        return "shrink" if isinstance(optimiser, torch.optim.SGD) else "gradient"

    def _shrink(self, optimiser: torch.optim.Optimizer, *_: Any) -> None:
        """Shrink the weights after an optimiser step, with the step sizes just used."""
        razor = self._started_razor()
        theta = weights(razor.model)
        if any(weight.grad is not None for weight in theta.values()):  # else: a skipped batch
            razor.shrink_(step_sizes(optimiser, theta))

    def _evidence_loader(self, trainer: pl.Trainer) -> Iterable[Any]:
        if self.loader is not None:
            return self.loader
        loader = trainer.train_dataloader
        if isinstance(loader, torch.utils.data.DataLoader):
            return loader
        raise ValueError(
            f"The training loader must be one DataLoader of (x, y), got {type(loader).__name__}. "
            "Pass EvidenceCallback(loader=...)."
        )

    def _burn_in(self, trainer: pl.Trainer) -> int:
        """Return the default burn-in, counted in calls of `penalty` or optimiser steps."""
        total = trainer.estimated_stepping_batches
        if total == float("inf") or total < 0:  # -1: data without a length
            return 0
        calls_per_step = trainer.accumulate_grad_batches if self.prior == "loss" else 1
        return int(int(total) * calls_per_step * BURN_IN_FRACTION)


class _LightningBatches:
    """Iterate over a loader as Lightning does: module hooks, and the device of the network."""

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


def _do_nothing() -> None:
    pass
