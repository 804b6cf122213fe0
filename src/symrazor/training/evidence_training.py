"""Train a Razor's model: epochs of optimiser steps on the weights, with evidence steps in between.

A run that is stopped between any two training steps continues bit for bit, on the same machine with
the same number of threads (another instruction set rounds differently). Its state is the model, the
optimiser, the Razor (precisions, hyperparameters, best state, probes), four random generators and a
few counters. The order of the data is not stored: the generator that shuffles is, as it was when
the epoch began, with the number of batches done since. So a run can continue within an epoch.

Several processes read the same batches and share the work on each (`optimisers`); the data of an
evidence step are distributed batch by batch. Only the first process writes checkpoints, shows
progress and calls callbacks. All processes read the checkpoints, so their directory must be visible
to every machine.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn

from symrazor.accelerate.devices import tf32
from symrazor.accelerate.processes import (
    ShardedLoader,
    all_reduce_,
    broadcast_,
    check_same,
    is_distributed,
    world,
)
from symrazor.core.errors import CurvatureError, DivergenceError, OtherRunError
from symrazor.core.files import reading
from symrazor.core.parameters import copy_state, hyperparameters
from symrazor.data import TensorLoader, Tensors
from symrazor.data.batches import call
from symrazor.inference.evidence import Evidence, record_of
from symrazor.inference.razor import Razor
from symrazor.training.checkpoint import (
    Checkpoints,
    State,
    check_identity,
    fingerprint,
    run_identity,
)
from symrazor.training.loop import Callback, Loop, Record, Task
from symrazor.training.optimisers import Stepper
from symrazor.training.options import BurnIn, FitConfig
from symrazor.training.trials import Trials

log = logging.getLogger("symrazor")

EVALUATION_BATCH = 500
"""Examples per forward pass without gradients."""
MIN_CURVATURE_BATCH = 250
"""Examples per batch of an evidence step on a CPU, at least, and exactly on a GPU.

A GPU replays recorded batches, so small batches cost no more time there, and less memory."""
MAX_CURVATURE_NUMBERS = 400_000
"""Input numbers per batch of an evidence step on a CPU, at most, unless 16 examples exceed it."""
EVIDENCE_SUBSET = 5000
"""Examples per evidence step, at most, by default."""
AUGMENTATION_SEED_OFFSET = 1_000_003
"""Added to the seed, so that augmentation does not repeat the random numbers of shuffling."""


@torch.no_grad()
def outputs(model: nn.Module, x: Tensor) -> Tensor:
    """Return model outputs [n, k], computed in batches."""
    device = next(model.parameters()).device
    return torch.cat([call(model, part.to(device)) for part in x.split(EVALUATION_BATCH)])


@torch.no_grad()
def shared_outputs(model: nn.Module, x: Tensor) -> Tensor:
    """Return model outputs [n, k], with the work divided among all processes."""
    if not is_distributed():
        return outputs(model, x)
    part = world().shard(len(x))
    local = outputs(model, x[part] if part.start < part.stop else x[:1])
    combined = local.new_zeros(len(x), *local.shape[1:])
    combined[part] = local[: part.stop - part.start]
    all_reduce_([combined])
    return combined


class Training(Task):
    """One run of `fit`, from its start or from a checkpoint to its end.

    Args:
        razor: Razor of the model, which is trained in place.
        data: shuffled batches of the training data, on the model's device.
        options: options of `fit`.
        test: held-out data for the records.
        callbacks: each is called with a copy of an epoch's record; exceptions are logged.
        checkpoints: where to save and what to continue from, which must belong to this run.
    """

    def __init__(
        self,
        razor: Razor,
        data: TensorLoader,
        options: FitConfig,
        test: Tensors | None = None,
        callbacks: Sequence[Callback] = (),
        checkpoints: Checkpoints | None = None,
    ) -> None:
        super().__init__()
        self.razor, self.data, self.options, self.test = razor, data, options, test
        self.callbacks, self.checkpoints = callbacks, checkpoints
        batch_size = options.evidence_batch or evidence_batch(razor, data)
        self.curvature_data = TensorLoader(data.x, data.y, batch_size, True, data.generator)
        total = options.epochs * len(data)
        self.stepper = Stepper(razor, options, total)
        self.burn_in = BurnIn(*options.burn_in_steps(total), total, data.x.device)
        self.trials = Trials(self) if options.switch_off else None
        self.augmentation_rng = torch.Generator(data.x.device)
        self.augmentation_rng.manual_seed(options.seed + AUGMENTATION_SEED_OFFSET)
        self.epoch_start = data.generator.get_state()
        self.batches_done = 0
        self.stale = 0  # evidence steps in a row without a new best evidence
        self.taken = 0  # steps of all branches; `stepper.done` counts the current one only
        self.summed_nll = torch.zeros((), dtype=torch.float64, device=data.x.device)
        needs_identity = checkpoints is not None or is_distributed()
        self.belongs_to = run_identity(razor, data, options) if needs_identity else {}
        saved = checkpoints.load() if checkpoints else None
        if is_distributed():  # before the first process writes anything, all must have read
            self._check_same_in_all_processes(saved)
        if checkpoints is not None and saved is not None:
            with reading(checkpoints.directory):
                self._load(saved)
        else:  # at once: a directory that cannot be written to must not cost a run
            self.save()

    def _check_same_in_all_processes(self, saved: State | None) -> None:
        """Check that all processes run the same training, then copy the first one's weights.

        Processes that end at different epochs would wait for each other forever. So would processes
        of which only some check whether to stop.
        """
        options = self.options
        saves = options.save is not None or options.resume is not None
        course = f"patience={options.patience}, keep={options.keep!r}, saves={saves}"
        check_same("patience, keep and checkpoints", course)
        for name, part in self.belongs_to.items():
            check_same(name, json.dumps(part, sort_keys=True))
        check_same("test data", fingerprint(*(self.test or ())))
        check_same("checkpoint", str(saved and saved["step"]))
        state = self.razor.model.state_dict().values()
        broadcast_(part for part in state if isinstance(part, Tensor))

    def run(self) -> list[Record]:
        """Train the remaining epochs and return one record per epoch; raises what `fit` raises."""
        is_main, saver = world().is_main, None if self.checkpoints is None else self
        callbacks = self.callbacks if is_main else ()
        progress = self.options.progress if is_main else False
        try:
            return Loop(self, callbacks, saver, self.options.epochs, progress).run()
        finally:
            if self.trials is not None:
                self.trials.finish()

    # The interface of a task.

    def finished(self) -> bool:
        """Return whether all epochs are done, or the patience is exhausted, with no open trial."""
        if self.trials is not None and self.trials.trial is not None:
            return False
        patience = self.options.patience
        out_of_patience = patience is not None and self.stale >= patience
        return len(self.history) >= self.options.epochs or out_of_patience

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the remaining batches of the current epoch."""
        self.razor.model.train()
        self.epoch_start = self.data.generator.get_state()
        return islice(iter(self.data), self.batches_done, None)

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        """Take one optimiser step."""
        x, y = batch
        with tf32(True):
            nll = self.stepper.step(self._augment(x), y).double()
        self.summed_nll += nll * len(y)
        self.burn_in.add(nll, self.stepper.done - 1)
        if self.trials is not None:
            self.trials.hold_()
        self.batches_done += 1
        self.taken += 1

    def evaluate(self) -> None:
        """Close an epoch: evidence step and test figures if due, record, trial of free paths."""
        self.stepper.check_finite(self.summed_nll)
        self.razor.model.eval()
        epoch, n = len(self.history) + 1, self.razor.n_data
        record: Record = {"epoch": epoch, "nll": float(self.summed_nll) / n}
        measured = epoch % self.options.every == 0 or epoch == self.options.epochs
        broadcast_(self.razor.model.buffers())  # running statistics of a batch norm
        if measured:
            estimate = self._evidence_step()
            record |= record_of(self.razor, estimate)
            if self.razor.best is not None:
                self.stale = 0 if self.razor.best is estimate else self.stale + 1
            if self.trials is not None:
                record["off"] = self.trials.off
        if self.test is not None and measured:
            f = shared_outputs(self.razor.model, self.test[0])
            figures = self.razor.likelihood.scores(f, self.test[1])
            record |= {f"test_{name}": value for name, value in figures.items()}
        record["seconds"] = self.update_clock()
        self.history.append(record)
        self.batches_done = 0
        self.summed_nll.zero_()
        self.epoch_start = self.data.generator.get_state()
        if self.trials is not None and measured:
            steps_left = -(-(self.options.epochs - epoch) // self.options.every)
            self.trials.update(estimate, epoch / self.options.epochs, steps_left)
            if self.trials.trial is None:
                self.history[-1]["seconds"] = self.seconds  # time of both branches

    def recover(self) -> bool:
        """Give up the diverged branch of a trial."""
        return self.trials is not None and self.trials.give_up()

    def n_confirmed(self) -> int:
        """Return the number of epochs that no branch of a trial can replace."""
        trial = None if self.trials is None else self.trials.trial
        return len(self.history) if trial is None else trial.begun

    def position(self) -> str:
        """Describe the current step."""
        return f"step {self.stepper.done} of {self.stepper.total}"

    def _augment(self, x: Tensor) -> Tensor:
        if self.options.augment is None:
            return x
        changed: object = self.options.augment(x, self.augmentation_rng)
        if not isinstance(changed, Tensor) or len(changed) != len(x):
            got = list(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
            raise ValueError(f"augment must return a tensor of {len(x)} examples, got {got}.")
        other_dtype = x.is_floating_point() and changed.dtype != x.dtype
        if other_dtype or changed.device != x.device:
            raise ValueError(
                f"augment must return {x.dtype} on {x.device} like its input, got {changed.dtype} "
                f"on {changed.device}. End it with .to(x)."
            )
        return changed

    def _evidence_step(self) -> Evidence:
        """Take an evidence step, or only estimate the evidence during the burn-in."""
        n = self.razor.n_data
        subset = min(n, self.options.subset or EVIDENCE_SUBSET)
        burn_in_over = self.burn_in.over(self.stepper.done)
        estimate = self.razor.step if burn_in_over else self.razor.evidence
        try:
            return estimate(ShardedLoader(self.curvature_data), None if subset == n else subset)
        except (DivergenceError, CurvatureError):  # training may have diverged unnoticed
            self.stepper.restore_last_good_()
            raise

    # The interface of trials.

    def nll(self) -> float:
        """Return the mean negative log likelihood of a fixed subset of the training data."""
        x, y = self.data.x[:EVIDENCE_SUBSET], self.data.y[:EVIDENCE_SUBSET]
        f = shared_outputs(self.razor.model, x).double()
        return float(self.razor.likelihood.nll(f, y).mean())

    def branch(self) -> State:
        """Copy everything that further training depends on.

        That is the whole state except the total number of steps, the time and the trials.
        """
        rng = {"shuffle": self.epoch_start, "torch": torch.get_rng_state()}
        device = self.data.x.device
        if device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(device)
        if self.options.augment is not None:
            rng[f"augment_{device.type}"] = self.augmentation_rng.get_state()
        return {
            "batches_done": self.batches_done,
            "summed_nll": float(self.summed_nll),
            "stale": self.stale,
            "burn_in": self.burn_in.state_dict(),
            "history": list(self.history),
            "at_bound": list(self.razor.at_bound),
            "model": copy_state(self.razor.model.state_dict()),
            "optimiser": deepcopy(self.stepper.state_dict()),
            "razor": self.razor.state_dict(),
            "rng": rng,
        }

    def load_branch_(self, state: State) -> None:
        """Continue from `branch()`, on any device; bit for bit on the same one."""
        self.razor.load_state_dict(state["razor"])
        self.razor.at_bound = list(state["at_bound"])
        # A change of the mode may draw random numbers, so set it before the generators.
        self.razor.model.train(state["batches_done"] > 0)
        self.razor.model.load_state_dict(state["model"])
        self.stepper.load_state_dict(state["optimiser"])
        self.stepper.discard_recording()  # the optimiser state is in other memory now
        self.burn_in.load_state_dict(state["burn_in"])
        self._load_generators(state["rng"])
        self.batches_done = state["batches_done"]
        self.summed_nll.fill_(state["summed_nll"])
        self.stale, self.history = int(state["stale"]), list(state["history"])
        if not all({"epoch", "nll", "seconds"} <= set(record) for record in self.history):
            raise ValueError("its history is damaged")

    # Checkpoints.

    @property
    def directory(self) -> Path:
        """Directory of the checkpoints."""
        assert self.checkpoints is not None
        return self.checkpoints.directory

    def due(self, round_ended: bool) -> bool:
        """Return whether to save: every `save_every` epochs and at the end."""
        return round_ended and (self.finished() or len(self.history) % self.options.save_every == 0)

    def save(self) -> None:
        """Write a checkpoint, in the first process only."""
        if world().is_main and self.checkpoints is not None:
            self.checkpoints.save(self.state_dict(), self.taken, len(self.history))

    def state_dict(self) -> State:
        """Return the whole state of the run, for a checkpoint."""
        return {
            "belongs_to": self.belongs_to,
            "step": self.taken,
            "epoch": len(self.history),
            "seconds": self.seconds,
            "trials": None if self.trials is None else self.trials.state_dict(),
            **self.branch(),
        }

    def _load(self, state: State) -> None:
        """Continue from `state_dict()`; nothing changes for another model, data or options."""
        missing = sorted(set(self.state_dict()) - set(state))
        if missing:
            raise OtherRunError(
                f"The checkpoint lacks {missing}, so it was not written by this version of fit. "
                "Continue with the version that wrote it, or save to a new directory."
            )
        check_identity(state["belongs_to"], self.belongs_to)
        saved_by = state["versions"].get("torch")
        if saved_by != str(torch.__version__):
            log.warning(
                "The checkpoint was saved by torch %s and continues with torch %s: results are "
                "equal up to rounding only.",
                saved_by,
                torch.__version__,
            )
        self.load_branch_(state)
        self.taken, self.seconds = state["step"], state["seconds"]
        if self.trials is not None:
            self.trials.load_state_dict(state["trials"])

    def _load_generators(self, rng: dict[str, Tensor]) -> None:
        self.epoch_start = rng["shuffle"]
        self.data.generator.set_state(rng["shuffle"])
        torch.set_rng_state(rng["torch"])
        device = self.data.x.device
        if device.type == "cuda" and "cuda" in rng:
            torch.cuda.set_rng_state(rng["cuda"], device)
        if self.options.augment is None:
            return
        if f"augment_{device.type}" in rng:
            self.augmentation_rng.set_state(rng[f"augment_{device.type}"])
        else:  # generators of different device types draw different numbers
            seed = self.options.seed + AUGMENTATION_SEED_OFFSET + self.stepper.done
            self.augmentation_rng.manual_seed(seed)
            log.warning("The run continues with other random augmentations on %s.", device.type)


def evidence_batch(razor: Razor, data: TensorLoader) -> int:
    """Return the default batch size of evidence steps."""
    if hyperparameters(razor.model):  # their gradients need memory
        return data.batch_size
    if data.x.is_cuda:
        return MIN_CURVATURE_BATCH
    return min(max(data.batch_size, MIN_CURVATURE_BATCH), max_curvature_batch(data.x))


def max_curvature_batch(x: Tensor) -> int:
    """Return the batch size of curvatures on a CPU beyond which batches are not faster."""
    return max(16, MAX_CURVATURE_NUMBERS // x[0].numel())
