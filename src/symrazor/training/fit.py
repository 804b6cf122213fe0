# Over 400 lines: the public function `fit`, its steps, and its result `Fit`.
r"""Train a network and learn its hyperparameters by the evidence.

`fit` alternates optimiser steps on the weights (`optimisers`, on the learning rate of `Schedule`)
with evidence steps on prior precisions and other hyperparameters (`Razor.step`, every few epochs
after a burn-in), and returns the state with the highest evidence. `evidence_training` is the
training itself.
"""

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from symrazor.accelerate.devices import move_model
from symrazor.accelerate.processes import (
    ShardedLoader,
    check_not_sharded,
    is_distributed,
    single_process,
    started_by_torchrun,
    unwrap,
    world,
)
from symrazor.core.likelihood import Likelihood, Weighted, as_likelihood, with_weights
from symrazor.core.parameters import copy_state, eval_mode
from symrazor.core.validation import counted
from symrazor.curvature.coverage import check_output_precision
from symrazor.curvature.estimate import AUTO
from symrazor.data import TensorLoader, Tensors, check_batch
from symrazor.data.batches import as_tensor
from symrazor.data.streams import Column, as_samples
from symrazor.inference.evidence import Evidence, remember_razor
from symrazor.inference.posterior import How, Posterior, Prediction
from symrazor.inference.razor import Razor
from symrazor.invariance.averaged_network import Augment, Augmented
from symrazor.invariance.poses import MAX_POSE_DATA, find_reach_
from symrazor.layers.path import is_symrazor_module
from symrazor.layers.relaxed import spatial_layers, start_near_
from symrazor.report.page import write_page
from symrazor.symmetry.collapse import collapse, path_shares
from symrazor.symmetry.reading import Reading, read
from symrazor.symmetry.tables import fit_html
from symrazor.training.checkpoint import Checkpoints, open_checkpoints
from symrazor.training.evidence_training import (
    EVALUATION_BATCH,
    Training,
    max_curvature_batch,
    outputs,
    shared_outputs,
)
from symrazor.training.fit_document import document_of
from symrazor.training.loop import Callback, Record, check_callbacks
from symrazor.training.options import AFFORDABLE, FitConfig
from symrazor.training.refinement import refine_

log = logging.getLogger("symrazor")

__all__ = ["Fit", "FitConfig", "fit"]

EQUIVARIANCE_SAMPLES = 128
"""Training inputs on which the equivariance of relaxed layers is measured."""
MAX_PRUNING_SAMPLES = 2000
"""Training samples on which a network is compared with a guess."""
COLLAPSE_SAMPLES = 32
"""Training inputs on which the report of `Fit.collapse` is measured."""
MAX_PRUNED_GAIN = 3.0
"""Largest gain in nats over a constant prediction of a pruned network."""
MIN_PRUNING_STEPS = 5
"""Fewer evidence steps do not prune a network."""
MIN_RISE = 2.0
"""Smallest factor by which the precision of a pruned group has risen."""
PRUNED = (
    "The network predicts the same for every input: the evidence has removed all weights that "
    "depend on the input."
)


@dataclass
class Fit:
    """Result of `fit`.

    Args:
        model: the trained network, in eval mode; the same object that was passed to `fit`.
        razor: its prior, likelihood and evidence.
        evidence: evidence of the returned state on all training data.
        reading: precisions, effective parameters, measured equivariance, test figures; `print` it.
        history: one record (a dictionary of numbers) per epoch.
        data: loader of the training data.
        is_pruned: whether the network predicts the same for every input, because the evidence
            removed all weights that depend on the input. Do not use such a network.
    """

    model: nn.Module
    razor: Razor
    evidence: Evidence
    reading: Reading
    history: list[Record]
    data: TensorLoader
    is_pruned: bool = False

    def __repr__(self) -> str:
        return f"Fit({counted(len(self.history), 'epoch')}, {self.evidence!r}, {self.reading!r})"

    def posterior(self) -> Posterior:
        """Compute the Laplace posterior over the weights, in each process by itself."""
        with single_process():
            return self.razor.posterior(self.data)

    def predict(self, x: Any, how: How | Literal["map"] = "map") -> Prediction:
        """Return the predictive mean at x.

        Args:
            x: inputs as a tensor, an array or a frame.
            how: "map" uses the trained weights; for other values see `Posterior.predict`.

        Raises:
            ValueError: the model cannot process x.
        """
        x = as_tensor(x, weight_type(self.model))
        if not isinstance(x, Tensor):
            raise ValueError(f"x must be a tensor, got {type(x).__name__}. Use torch.as_tensor(x).")
        _forward_first(self.model, x.to(self.data.x.device), "x")
        if how != "map":
            return self.posterior().predict(x, how)
        f = outputs(self.model, x)
        return Prediction(self.razor.likelihood.mean(f))

    def collapse(
        self,
        threshold: float | Literal["evidence"] = "evidence",
        example_input: Tensor | None = None,
    ) -> nn.Module:
        """Return the network without its unused paths, as plain torch modules.

        See `symrazor.collapse`. For an `Augmented` model this is the network inside, which takes
        one pass over an input without averaging.

        Args:
            threshold: remove paths with a smaller share of their layer's effective parameters;
                "evidence" selects the threshold with the highest evidence (for an `Augmented`
                model: the default of `collapse`).
            example_input: inputs for the report; by default the first 32 training inputs.
        """
        shares = path_shares(self.model, self.evidence.effective_parameters)
        x = self.data.x[:COLLAPSE_SAMPLES] if example_input is None else example_input
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
                structure=AUTO if self.evidence.is_exact else None,
            )

    def report(self, file: str | Path, **about: Any) -> Path:
        """Write a self-contained HTML report.

        Args:
            file: path of the report.
            **about: options of `symrazor.training.fit_document.document_of`: `question`, `name`,
                `test` (held-out data for the calibration), `classes` (their names), `command`.

        Returns:
            The path of the report.
        """
        return write_page(document_of(self, **about), file)

    def _repr_html_(self) -> str:
        return fit_html(self.reading, self.history)

    @property
    def json(self) -> str:
        """The reading as a JSON document."""
        return self.reading.to_json()


@torch.enable_grad()
def fit(
    model: nn.Module,
    data: Any,
    likelihood: str | Likelihood = "categorical",
    *,
    test: Any = None,
    sample_weights: Any = None,
    config: FitConfig | None = None,
    callbacks: Sequence[Callback] = (),
    **changes: Any,
) -> Fit:
    """Train a model and learn its hyperparameters by the evidence, from training data alone.

    Example:
        `fit(model, (x, y), epochs=30, estimator="mc", seed=1)`

    Args:
        model: a module whose trainable weights are in registered layers; trained in place.
        data: training inputs and labels: a pair of tensors or NumPy arrays; or a DataLoader, a data
            set with a length (Hugging Face ones too) or a pair of memory-mapped arrays, which are
            read batch by batch. Options of `fit` set the size and order of batches.
        likelihood: a `Likelihood` or its name; default "categorical".
        test: held-out inputs and labels in any of these forms, used for the report only.
        sample_weights: a positive number for each training sample, for data in memory. A sample of
            weight 2 counts as two samples.
        config: all options as one `FitConfig`; default `FitConfig()`.
        callbacks: functions called with the record of every epoch (a dictionary of numbers). An
            exception in a callback is logged and does not end the run.
        **changes: single options of `FitConfig` or `RazorConfig`, which override `config`.

    Raises:
        ValueError: invalid data or options, or a checkpoint that does not belong to them; the
            model is unchanged.
        UnsupportedParameterError: the model has weights without curvature.
        DivergenceError: training diverged; the model is restored to its last good state.
        KeyboardInterrupt: on SIGINT; with `save` or `resume` after a checkpoint.
        SystemExit: on SIGTERM with `save` or `resume`, after a checkpoint.
    """
    model = unwrap(model)
    check_not_sharded(model)
    if not isinstance(config, FitConfig | None):
        raise ValueError(f"config must be a FitConfig, got {type(config).__name__}.")
    options = (config or FitConfig()).change(**changes)
    check_callbacks(callbacks)
    if started_by_torchrun() and world().size == 1:
        log.warning(
            "torchrun started several processes, but each trains by itself. To train together, "
            "call symrazor.accelerate.processes.start() before fit."
        )
    is_saved = options.save is not None or options.resume is not None
    checkpoints = open_checkpoints(options.save, options.resume) if is_saved else None
    if options.refine and (is_distributed() or isinstance(model, Augmented)):
        raise ValueError(
            f"refine={options.refine} needs one process and a network without random "
            "transformations. Omit it."
        )
    device = move_model(model, options.device)
    x, y = _to_device(data, "the training data", model)
    likelihood = as_likelihood(likelihood)
    if test is not None:
        test = _to_device(test, "the test data", model)
        test = test[0][:], test[1][:]  # held-out data are read into memory
    if sample_weights is not None:
        likelihood = Weighted(likelihood)
        y = with_weights(y[:], torch.as_tensor(as_tensor(sample_weights), device=device))
        test = test and (test[0], with_weights(test[1], torch.ones(len(test[1]), device=device)))
    _check_outputs(model, likelihood, (x, y), "the training data")
    if test is not None:
        _check_outputs(model, likelihood, test, "the test data")
    initial = [copy_state(module.state_dict()) for module in (model, likelihood)]
    first = _train(model, likelihood, (x, y), test, options, callbacks, checkpoints)
    if not (options.restart and first.is_pruned):
        return first
    log.warning(
        "The evidence has pruned the network: it predicts the same for every input. It is trained "
        "once more with a weaker prior and a longer burn-in."
    )
    pruned = [copy_state(module.state_dict()) for module in (model, likelihood)]
    _load(model, likelihood, initial)
    options = options.gentler(options.epochs * len(first.data))
    second = _train(model, likelihood, (x, y), test, options, callbacks, None)
    if second.evidence.log_evidence > first.evidence.log_evidence:
        return second
    _load(model, likelihood, pruned)
    remember_razor(model, first.razor)
    return first


def _load(model: nn.Module, likelihood: Likelihood, states: Sequence[dict[str, Any]]) -> None:
    for module, state in zip((model, likelihood), states, strict=True):
        module.load_state_dict(state)


def _train(
    model: nn.Module,
    likelihood: Likelihood,
    data: Tensors,
    test: Tensors | None,
    options: FitConfig,
    callbacks: Sequence[Callback],
    checkpoints: Checkpoints | None,
) -> Fit:
    """Train a model once; data and options have been checked."""
    x, y = data
    generator = torch.Generator().manual_seed(options.seed)
    loader = TensorLoader(x, y, options.batch_size, shuffle=True, generator=generator)
    burn_in, _ = options.burn_in_steps(options.epochs * len(loader))
    razor_options = replace(options.starting_razor(len(y)), burn_in=burn_in, seed=options.seed)
    razor = Razor(model, likelihood, len(y), razor_options)
    with eval_mode(model):
        razor.verify(x[:2])  # now, not after the first epochs
    training = Training(razor, loader, options, test, callbacks, checkpoints)
    if options.start == "near" and training.stepper.done == 0:
        start_near_(model, x[:EVALUATION_BATCH])
    history = training.run()
    if options.keep == "best" and razor.best is not None:
        razor.restore_best()
    if options.refine:
        refine_(razor, _in_order(training), options.refine)
    model.eval()
    return _summarise(training, history)


def _in_order(training: Training) -> TensorLoader:
    """Return all training data in batches of the size of evidence steps, unshuffled."""
    x, y = training.data.x, training.data.y
    # A GPU has already recorded batches of the size of evidence steps.
    on_cpu = min(EVALUATION_BATCH, max_curvature_batch(x))
    batch_size = training.curvature_data.batch_size if x.is_cuda else on_cpu
    return TensorLoader(x, y, min(len(y), batch_size))


def _summarise(training: Training, history: list[Record]) -> Fit:
    """Evaluate the final state on all data and read it."""
    razor, test, seed = training.razor, training.test, training.options.seed
    model, x, y = razor.model, training.data.x, training.data.y
    unshuffled = _in_order(training)
    structure = _reading_structure(training)
    samples = training.options.evidence_samples
    is_part = samples is not None and samples < len(y)
    loader = training.curvature_data if is_part else unshuffled  # the first of shuffled samples
    evidence = razor.evidence(
        ShardedLoader(loader), samples if is_part else None, structure=structure
    )
    figures = razor.likelihood.scores(shared_outputs(model, test[0]), test[1]) if test else {}
    about = {"n": len(y), "epochs": len(history), "seconds": history[-1]["seconds"]}
    inputs = equivariance_inputs(model, x, seed) if training.options.equivariance else None
    if isinstance(model, Augmented) and model.average == "joint":
        index = _subsample(x, MAX_POSE_DATA, seed)
        if isinstance(model.augment, Augment) and not y.is_floating_point():  # a classifier
            find_reach_(model, (x[index], y[index]))
    reading = read(razor, evidence, about, figures, inputs, x.shape[1:])
    index = _subsample(x, MAX_PRUNING_SAMPLES, seed)
    pruned = _is_pruned(history, razor.likelihood, shared_outputs(model, x[index]), y[index])
    if pruned:
        reading = replace(reading, verdict=f"{PRUNED} {reading.verdict}")
    return Fit(model, razor, evidence, reading, history, unshuffled, pruned)


def _reading_structure(training: Training) -> str | None:
    """Return the structure of the evidence of the returned state, None for that of the steps."""
    structure, razor = training.options.evidence_structure, training.razor
    if structure != AFFORDABLE:
        return structure
    if training.options.refine:
        return AUTO
    has_factors = razor.method.structure == "kron" and razor.method.estimator != "empirical"
    if has_factors and not razor.prior.diagonal and razor.is_exact_affordable():
        return AUTO
    return None


def _is_pruned(history: Sequence[Record], likelihood: Likelihood, f: Tensor, y: Tensor) -> bool:
    """Return whether the evidence has pruned a network to a constant.

    If an evidence step raises the precisions before the weights have learned anything, the weights
    shrink, and the precisions rise further: the network ends with the same prediction for every
    input, often a local maximum of the evidence only. Such a network hardly predicts better than
    its mean output. A precision has risen in several evidence steps: the cause is not a short
    training, or a prior that was fixed. `fit` trains it once more (`FitConfig.gentler`).

    Args:
        history: records of its training.
        likelihood: its likelihood.
        f: its outputs on the training data.
        y: their labels.
    """
    steps = [record["precisions"] for record in history if "precisions" in record]
    if len(steps) < MIN_PRUNING_STEPS:
        return False
    has_risen = any(steps[-1][group] > MIN_RISE * value for group, value in steps[0].items())
    return has_risen and likelihood.gain_over_constant(f, y) <= MAX_PRUNED_GAIN


def equivariance_inputs(model: nn.Module, x: Tensor, seed: int) -> Tensor | None:
    """Return inputs on which to measure equivariance errors; None if no layer has positions."""
    return x[_subsample(x, EQUIVARIANCE_SAMPLES, seed)] if spatial_layers(model) else None


def _subsample(x: Tensor, count: int, seed: int) -> Tensor:
    """Return at most `count` random indices."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(len(x), generator=generator)[:count].to(x.device)


def _to_device(data: Any, name: str, model: nn.Module) -> Tensors:
    """Check a pair (x, y) and move it to the model's device; its arrays get the type of weights."""
    device = next(model.parameters()).device
    is_pair = isinstance(data, tuple | list) and len(data) == 2
    if not is_pair or isinstance(data[0], np.memmap):
        samples = as_samples(data, device)
        if samples is not None:
            return cast(Tensors, (Column(samples, 0), Column(samples, 1)))
    if is_pair:
        data = [as_tensor(part, weight_type(model)) for part in data]
    if not is_pair or not all(isinstance(part, Tensor) for part in data):
        got = f"({', '.join(type(p).__name__ for p in data)})" if is_pair else type(data).__name__
        hint = " Use torch.as_tensor(...)." if is_pair else ""
        raise ValueError(
            f"{name.capitalize()} must be a pair of tensors or NumPy arrays (x, y), a DataLoader "
            f"or a data set, got {got}.{hint}"
        )
    x, y = (part.to(device) for part in data)
    check_batch(x, y, name)
    return x, y


def weight_type(model: nn.Module) -> torch.dtype:
    """Return the type of the first weight."""
    return next(model.parameters()).dtype


def _check_outputs(model: nn.Module, likelihood: Likelihood, data: Tensors, name: str) -> None:
    """Check that the model accepts the inputs and that its outputs suit the labels."""
    x, y = data
    f = _forward_first(model, x, f"x of {name}")
    shape = list(f.shape) if isinstance(f, Tensor) else type(f).__name__
    if not isinstance(f, Tensor) or f.dim() < 2 or len(f) != 1:
        raise ValueError(
            f"The model must return a tensor [1, k] or [1, k, *positions] for one example, got "
            f"{shape}. Change its forward method."
        )
    check_output_precision(f)
    labels = y[:EVALUATION_BATCH] if isinstance(y, Column) else y
    likelihood.check(f.expand(len(labels), *f.shape[1:]), labels)


def _forward_first(model: nn.Module, x: Tensor, name: str) -> object:
    """Return the model output for the first example, or raise ValueError."""
    try:
        with eval_mode(model), torch.no_grad():
            f: object = model(x[:1])
            f = getattr(f, "logits", f)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        x_dtype = str(x.dtype).removeprefix("torch.")
        weight_dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        raise ValueError(
            f"The model cannot process {name}, of shape {list(x.shape)} and dtype {x_dtype} (its "
            f"weights are {weight_dtype}): {error}. Check shape and dtype."
        ) from error
    return f
