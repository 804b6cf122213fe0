r"""The training loop we ship: maximum a posteriori steps on the weights, evidence steps in between.

Weights: one of the optimisers of `stepper`, on a warm-up and a cosine. Hyperparameters:
`Razor.step` every few epochs after a burn-in (`burn_in`). The state with the highest
evidence is what comes out. `training` is the loop itself, `checkpoint` its files.
"""

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from symrazor.accelerate.processes import (
    ShardedLoader,
    check_not_sharded,
    single_process,
    started_by_torchrun,
    unwrap,
    world,
)
from symrazor.core.evidence import Evidence
from symrazor.core.likelihood import Likelihood, as_likelihood, scores
from symrazor.core.parameters import eval_mode
from symrazor.core.progress import Record
from symrazor.curvature.coverage import check_output_precision
from symrazor.data import TensorLoader, Tensors, check_batch
from symrazor.inference.posterior import How, Posterior, Prediction
from symrazor.inference.razor import Razor
from symrazor.inference.razor_config import RazorConfig
from symrazor.invariance.averaged_network import Augmented
from symrazor.invariance.copies import Augment
from symrazor.invariance.poses import MAX_POSE_DATA, find_reach_
from symrazor.layers.path import is_symrazor_module
from symrazor.layers.relaxed import FREE_PATH_PRECISION, spatial_layers, start_near_
from symrazor.symmetry.collapse import collapse, path_shares
from symrazor.symmetry.reading import Reading, read
from symrazor.training.checkpoint import Checkpoints
from symrazor.training.loop import (
    EVALUATION_BATCH,
    Callback,
    Training,
    check_callbacks,
    most_data,
    outputs,
    shared_outputs,
)
from symrazor.training.options import FitConfig

log = logging.getLogger("symrazor")

__all__ = ["Fit", "FitConfig", "fit"]

MEASURED = 128  # training inputs on which the equivariance of relaxed layers is measured


@dataclass
class Fit:
    """What `fit` returns.

    Args:
        model: the network, trained in place, in eval mode.
        razor: its prior, likelihood and evidence.
        evidence: of the returned state, on all data, by the estimator of the razor.
        reading: precisions, effective parameters, measured equivariance, test figures; `print` it.
        history: one dictionary per epoch.
        data: the training loader.
    """

    model: nn.Module
    razor: Razor
    evidence: Evidence
    reading: Reading
    history: list[Record]
    data: TensorLoader

    def posterior(self) -> Posterior:
        """The Laplace posterior over the weights; of several processes each makes its own."""
        with single_process():
            return self.razor.posterior(self.data)

    def predict(self, x: Tensor, how: How | Literal["map"] = "map") -> Prediction:
        """Predictive mean at x: by the weights as they are ("map"), or see `Posterior.predict`.

        Raises:
            ValueError: x that the model does not take.
        """
        if not isinstance(x, Tensor):
            got = type(x).__name__
            raise ValueError(f"expected x as a tensor, got {got}; do torch.as_tensor(x)")
        _tried(self.model, x.to(self.data.x.device), "x")
        if how != "map":
            return self.posterior().predict(x, how)
        f = outputs(self.model, x)
        return Prediction(self.razor.likelihood.mean(f))

    def collapse(
        self,
        threshold: float | Literal["evidence"] = "evidence",
        example_input: Tensor | None = None,
    ) -> nn.Module:
        """The network without the paths that were switched off, as plain torch modules.

        See `symrazor.collapse`, which does it, for what comes out and for its report. Of an
        `Augmented` model it is the network inside, for one pass over a datum as it is.

        Args:
            threshold: drop paths with a smaller share of their layer's effective parameters;
                "evidence" for the threshold after which the evidence is highest (of an
                `Augmented` model: for the default of `collapse`).
            example_input: what the report is measured on; by default the first 32 training data.
        """
        shares = path_shares(self.model, self.evidence.effective_parameters)
        x = self.data.x[:32] if example_input is None else example_input
        if isinstance(self.model, Augmented):
            inner = {k.removeprefix("network."): share for k, share in shares.items()}
            number = None if threshold == "evidence" else threshold
            if not any(is_symrazor_module(module) for module in self.model.network.modules()):
                return copy.deepcopy(self.model.network).eval()
            return collapse(self.model.network, x, shares=inner, threshold=number)
        with single_process():
            return collapse(
                self.model,
                x,
                shares=shares,
                threshold=threshold,
                razor=self.razor,
                loader=self.data,
            )

    def report(self, file: str | Path, **about: Any) -> Path:
        """Write the page of this fit: one HTML file that needs nothing else.

        Args:
            file: where to.
            **about: options of `symrazor.training.fit_document.document_of`: `question`, `name`,
                held-out data as `test` for the calibration, names of the `classes`, the `command`.

        Returns:
            The file.
        """
        from symrazor.report.page import write_page
        from symrazor.training.fit_document import document_of

        return write_page(document_of(self, **about), file)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from symrazor.symmetry.reading import fit_html

        return fit_html(self.reading, self.history)

    @property
    def json(self) -> str:
        """The reading as a JSON document."""
        return self.reading.to_json()


@torch.enable_grad()
def fit(
    model: nn.Module,
    data: Tensors,
    likelihood: str | Likelihood = "categorical",
    *,
    test: Tensors | None = None,
    config: FitConfig | None = None,
    callbacks: Sequence[Callback] = (),
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
        callbacks: each is called after every epoch with the epoch's record, a dictionary of
            numbers; what it raises is logged and does not end the run.
        **changes: those single options.

    Raises:
        ValueError: bad data or options, or a checkpoint that does not belong to them; the model is
            then untouched.
        UnsupportedParameterError: weights without curvature.
        FloatingPointError: training diverged; the model is put back to its last good state.
        KeyboardInterrupt: SIGINT, and with `save` or `resume` a checkpoint was written.
        SystemExit: SIGTERM, with `save` or `resume`, and a checkpoint was written.
    """
    model = unwrap(model)
    check_not_sharded(model)
    if not isinstance(config, FitConfig | None):
        raise ValueError(f"expected config as a FitConfig, got {type(config).__name__}")
    options = (config or FitConfig()).change(**changes)
    check_callbacks(callbacks)
    if started_by_torchrun() and world().size == 1:
        log.warning(
            "one of several processes trains by itself; to train together: "
            "symrazor.accelerate.processes.start() before fit"
        )
    checkpoints = _checkpoints(options)
    device = _device(model, options.device)
    x, y = _pair(data, "the training data", device)
    if test is not None:
        test = _pair(test, "the test data", device)
    generator = torch.Generator().manual_seed(options.seed)
    loader = TensorLoader(x, y, options.batch_size, shuffle=True, generator=generator)
    likelihood = as_likelihood(likelihood)
    _check_outputs(model, likelihood, (x, y), "the training data")
    if test is not None:
        _check_outputs(model, likelihood, test, "the test data")
    burn_in, _ = options.burn_in_steps(options.epochs * len(loader))
    razor_options = replace(_with_start(options, len(y)), burn_in=burn_in, seed=options.seed)
    razor = Razor(model, likelihood, len(y), razor_options)
    with eval_mode(model):
        razor.verify(x[:2])  # not after the first epochs
    training = Training(razor, loader, options, test, callbacks, checkpoints)
    steps = training.curvature_data.batch_size  # a GPU has recorded such batches
    many = steps if x.is_cuda else min(EVALUATION_BATCH, most_data(x))
    fixed = TensorLoader(x, y, min(len(y), many))
    if options.start == "near" and training.stepper.done == 0:
        start_near_(model, x[:EVALUATION_BATCH])
    history = training.run()
    if options.keep == "best" and razor.best is not None:
        razor.restore_best()
    model.eval()
    evidence = razor.evidence(ShardedLoader(fixed))
    figures = scores(razor.likelihood, shared_outputs(model, test[0]), test[1]) if test else {}
    train = {"n": len(y), "epochs": len(history), "seconds": history[-1]["seconds"]}
    choice = torch.Generator().manual_seed(options.seed)
    some = torch.randperm(len(x), generator=choice)[:MEASURED].to(device)
    inputs = x[some] if spatial_layers(model) else None
    if isinstance(model, Augmented) and model.average == "joint":
        _find_poses(model, x, y, options.seed)
    found = read(razor, evidence, train, figures, inputs, x.shape[1:])
    return Fit(model, razor, evidence, found, history, fixed)


def _pair(data: Any, where: str, device: torch.device) -> Tensors:
    """Inputs and labels on a device, checked."""
    pair = isinstance(data, tuple | list) and len(data) == 2
    if not pair or not all(isinstance(part, Tensor) for part in data):
        got = f"({', '.join(type(p).__name__ for p in data)})" if pair else type(data).__name__
        raise ValueError(
            f"expected {where} as a pair of tensors (x, y), got {got}; do torch.as_tensor(...), "
            "or use Razor with a loader of your own"
        )
    x, y = (part.to(device) for part in data)
    check_batch(x, y, where)
    return x, y


def _check_outputs(model: nn.Module, likelihood: Likelihood, data: Tensors, where: str) -> None:
    """Refuse inputs that the model cannot take, and labels that its outputs cannot explain."""
    x, y = data
    f = _tried(model, x, f"x of {where}")
    shape = list(f.shape) if isinstance(f, Tensor) else type(f).__name__
    if not isinstance(f, Tensor) or f.dim() != 2 or len(f) != 1:
        raise ValueError(
            f"expected outputs [1, k] of the model for one datum, got {shape}; do: let its forward "
            "return one such tensor"
        )
    check_output_precision(f)
    likelihood.check(f.expand(len(y), -1), y)


def _tried(model: nn.Module, x: Tensor, what: str) -> object:
    """What the model makes of the first datum.

    Raises:
        ValueError: it cannot take it.
    """
    try:
        with eval_mode(model), torch.no_grad():
            f: object = model(x[:1])
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        kind = f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}"
        own = str(next(model.parameters()).dtype).removeprefix("torch.")
        raise ValueError(
            f"expected {what} as the model takes them, got {kind} for weights in {own}: "
            f"{error}; do: look at shape and dtype"
        ) from error
    return f


def _find_poses(model: Augmented, x: Tensor, y: Tensor, seed: int) -> None:
    """How far the training data are moved, if the network is of a kind that can tell."""
    generator = torch.Generator().manual_seed(seed)
    some = torch.randperm(len(x), generator=generator)[:MAX_POSE_DATA].to(x.device)
    if isinstance(model.augment, Augment) and not y.is_floating_point():
        find_reach_(model, (x[some], y[some]))


def _with_start(options: FitConfig, n_data: int) -> RazorConfig:
    """Return the options of the razor, with the prior precision of `start="near"` if none is given.

    A prior that outweighs every fifteenth datum keeps a free path from learning, so the precision
    is `FREE_PATH_PRECISION` or less.
    """
    razor = options.razor
    if options.start == "given" or razor.free_precision is not None or not razor.has_free_precision:
        return razor
    return replace(razor, free_precision=min(FREE_PATH_PRECISION, n_data / 15))


def _device(model: nn.Module, wanted: str) -> torch.device:
    """Move the model where it is wanted."""
    if next(model.parameters(), None) is None:
        raise ValueError("expected a model with parameters, got one without any")
    if wanted != "auto":
        try:
            device = torch.device(wanted)
        except RuntimeError as error:
            raise ValueError(f"expected a device as torch names them, got {wanted!r}") from error
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(
                f"expected a device that is there, got {wanted!r} on a machine with "
                f"{torch.cuda.device_count()} CUDA devices; do device='auto'"
            )
        try:
            model.to(device)
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"expected a device that is there, got {wanted!r}: {error}") from error
    return next(model.parameters()).device


def _checkpoints(options: FitConfig) -> Checkpoints | None:
    """Where to save and what to continue from."""
    if options.resume is not None:
        return Checkpoints(options.resume)
    if options.save is None:
        return None
    found = Checkpoints(options.save)
    if found.found():
        raise ValueError(
            f"expected a new directory to save to, got {options.save} with the checkpoints of "
            f"another run; do: resume={str(options.save)!r} to continue it, or remove it"
        )
    return found
