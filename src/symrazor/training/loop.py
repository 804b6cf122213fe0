"""The loop: epochs of maximum a posteriori steps, evidence steps in between, checkpoints of it all.

A run that is stopped between any two training steps goes on bit for bit (`state`): on the same
machine with the same number of threads, for a machine with other instructions rounds otherwise.

Several processes read the same batches and share each out (`stepper`); the data of an evidence step
are dealt out batch by batch. The first process alone writes checkpoints, shows progress and calls
callbacks; all read the checkpoints, so that their directory has to be one that every machine sees.
"""

import json
import logging
import time
from collections.abc import Callable, Sequence
from itertools import islice

import torch
from torch import Tensor, nn

from symrazor.accelerate.devices import tf32
from symrazor.accelerate.processes import (
    ShardedLoader,
    all_reduce_,
    any_process,
    broadcast_,
    check_same,
    is_distributed,
    world,
)
from symrazor.core.errors import CurvatureError, DivergenceError
from symrazor.core.evidence import Evidence
from symrazor.core.likelihood import scores
from symrazor.core.parameters import hyperparameters
from symrazor.core.progress import Record, epoch_bar
from symrazor.data import TensorLoader, Tensors
from symrazor.inference.razor import Razor
from symrazor.training import state as states
from symrazor.training.burn_in import BurnIn
from symrazor.training.checkpoint import Checkpoints, State, fingerprint
from symrazor.training.events import record_of
from symrazor.training.interrupt import Interruption
from symrazor.training.options import FitConfig
from symrazor.training.stepper import Stepper
from symrazor.training.trials import Trials

log = logging.getLogger("symrazor")

Callback = Callable[[Record], object]
EVALUATION_BATCH = 500
CURVATURE_BATCH = 250  # data, at least: in an evidence step they take no more than in training
CURVATURE_NUMBERS = 400_000  # in its inputs, at most, unless fewer than 16 data have so many
GPU_BATCH = 250  # there batches are replayed: few data cost no more than many, and less memory
EVIDENCE_SUBSET = 5000  # data per evidence step, at most, unless told otherwise
AGREE_EVERY = 8  # steps after which several processes ask each other whether to stop


@torch.no_grad()
def outputs(model: nn.Module, x: Tensor) -> Tensor:
    """Model outputs [n, k] in batches."""
    device = next(model.parameters()).device
    return torch.cat([model(part.to(device)) for part in x.split(EVALUATION_BATCH)])


@torch.no_grad()
def shared_outputs(model: nn.Module, x: Tensor) -> Tensor:
    """The same, by all processes together."""
    if not is_distributed():
        return outputs(model, x)
    part = world().shard(len(x))
    own = outputs(model, x[part] if part.start < part.stop else x[:1])
    found = own.new_zeros(len(x), own.shape[1])
    found[part] = own[: part.stop - part.start]
    all_reduce_([found])
    return found


def check_callbacks(callbacks: object) -> None:
    """Refuse what could not be called after an epoch, before there was one."""
    if not isinstance(callbacks, Sequence) or not all(callable(one) for one in callbacks):
        raise ValueError(
            f"expected callbacks as a list of functions of a record, got {callbacks!r}; do "
            "callbacks=[function]"
        )


class Training:
    """One run of the loop, from its start or from a checkpoint to its end.

    Args:
        razor: of the model that is trained, in place.
        data: shuffled batches of the training data, on the model's device.
        options: of `fit`.
        test: held-out data for the records.
        callbacks: each is called with a copy of an epoch's record; what they raise is logged.
        checkpoints: where to save, and what to continue from; None to do neither.

    Raises:
        ValueError: a checkpoint that is damaged, or of another model, other data or options.
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
        """Start afresh, or load the newest checkpoint; see the class."""
        self.razor, self.data, self.options, self.test = razor, data, options, test
        many = options.evidence_batch or evidence_batch(razor, data)
        self.curvature_data = TensorLoader(data.x, data.y, many, True, data.generator)
        self.callbacks, self.checkpoints = callbacks, checkpoints
        total = options.epochs * len(data)
        self.stepper = Stepper(razor, options, total)
        self.burn_in = BurnIn(*options.burn_in_steps(total), total, data.x.device)
        self.history: list[Record] = []
        self.trials = Trials(self) if options.switch_off else None
        self.augmenting = states.augmenting(options.seed, data.x.device)
        self.epoch_start = data.generator.get_state()
        self.batches_done, self.stale, self.taken, self.told, self.seconds = 0, 0, 0, 0, 0.0
        self.summed_nll = torch.zeros((), dtype=torch.float64, device=data.x.device)
        several = is_distributed()
        self.belongs_to = states.belongs_to(self) if checkpoints or several else {}
        saved = checkpoints.load() if checkpoints else None
        if several:  # nobody writes before all have read
            check_same("patience, keep and wish to save", states.course(options))
            for name, part in self.belongs_to.items():
                check_same(name, json.dumps(part, sort_keys=True))
            check_same("test data", fingerprint(*(test or ())))
            check_same("checkpoint", str(saved and saved["step"]))
            state = razor.model.state_dict().values()
            broadcast_(part for part in state if isinstance(part, Tensor))
        if saved is not None:
            states.load_(self, saved)
            self.told = self._sure()
        elif (
            checkpoints is not None and world().is_main
        ):  # at once: a bad place must not cost a run
            checkpoints.save(states.state_of(self), 0, 0)

    def finished(self) -> bool:
        """All epochs done, or no better evidence for as long as the patience lasts; no trial."""
        patience = self.options.patience
        if self.trials is not None and self.trials.trial is not None:
            return False
        return len(self.history) >= self.options.epochs or (
            patience is not None and self.stale >= patience
        )

    def _sure(self) -> int:
        """Epochs whose records will not be replaced by those of a branch on trial."""
        trial = None if self.trials is None else self.trials.trial
        return len(self.history) if trial is None else trial.begun

    def run(self) -> list[Record]:
        """Do what is left to do; returns one record per epoch.

        Raises:
            FloatingPointError: training diverged; the model is put back to its last good state.
            KeyboardInterrupt: SIGINT, after a checkpoint.
            SystemExit: SIGTERM, after a checkpoint.
        """
        try:
            return self._run(time.perf_counter() - self.seconds)
        finally:
            if self.trials is not None:
                self.trials.finish()

    def _run(self, started: float) -> list[Record]:
        with (
            Interruption(self.checkpoints is not None) as stop,
            epoch_bar(
                self.options.epochs, self.options.progress if world().is_main else False
            ) as show,
        ):
            while not self.finished():
                try:
                    self._train(stop, started)
                    self._measure(started)
                except (FloatingPointError, CurvatureError):
                    if self.trials is None or not self.trials.give_up():
                        raise
                show(self.history)
                self._tell()
                if self.finished() or len(self.history) % self.options.save_every == 0:
                    self._save()
                self._leave_if_asked(stop)
        self._leave_if_asked(stop)
        return self.history

    def _train(self, stop: Interruption, started: float) -> None:
        """The batches of one epoch that are not done yet."""
        self.razor.model.train()
        self.epoch_start = self.data.generator.get_state()
        with tf32(True):
            for x, y in islice(self.data, self.batches_done, None):
                nll = self.stepper.step(self._augmented(x), y).double()
                self.summed_nll += nll * len(y)
                self.burn_in.add(nll, self.stepper.done - 1)
                if self.trials is not None:
                    self.trials.hold_()
                self.batches_done += 1
                self.taken += 1
                self.seconds = time.perf_counter() - started
                if not is_distributed() or self.stepper.done % AGREE_EVERY == 0:
                    self._leave_if_asked(stop)

    def _augmented(self, x: Tensor) -> Tensor:
        if self.options.augment is None:
            return x
        changed: object = self.options.augment(x, self.augmenting)
        if not isinstance(changed, Tensor) or len(changed) != len(x):
            got = list(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
            raise ValueError(f"expected a tensor of {len(x)} data from augment, got {got}")
        other = x.is_floating_point() and changed.dtype != x.dtype
        if other or changed.device != x.device:
            raise ValueError(
                f"expected {x.dtype} on {x.device} from augment, as it was given, got "
                f"{changed.dtype} on {changed.device}; do: end it with .to(x)"
            )
        return changed

    def _measure(self, started: float) -> None:
        """Close an epoch: evidence step, test figures, record."""
        self.stepper.check(self.summed_nll)
        self.razor.model.eval()
        epoch, n = len(self.history) + 1, self.razor.n_data
        record: Record = {"epoch": epoch, "nll": float(self.summed_nll) / n}
        measured = epoch % self.options.every == 0 or epoch == self.options.epochs
        broadcast_(self.razor.model.buffers())  # running statistics of a batch norm
        if measured:
            subset = min(n, self.options.subset or EVIDENCE_SUBSET)
            estimate = self._estimate(None if subset == n else subset)
            record |= record_of(self.razor, estimate)
            if self.razor.best is not None:
                self.stale = 0 if self.razor.best is estimate else self.stale + 1
            if self.trials is not None:
                record["off"] = self.trials.off
        if self.test is not None and measured:
            f = shared_outputs(self.razor.model, self.test[0])
            found = scores(self.razor.likelihood, f, self.test[1])
            record |= {f"test_{k}": v for k, v in found.items()}
        self.seconds = record["seconds"] = time.perf_counter() - started
        self.history.append(record)
        self.batches_done = 0
        self.summed_nll.zero_()
        self.epoch_start = self.data.generator.get_state()
        if self.trials is not None and measured:
            left = -(-(self.options.epochs - epoch) // self.options.every)
            self.trials.look(estimate, epoch / self.options.epochs, left)
            if self.trials.trial is None:
                self.history[-1]["seconds"] = self.seconds  # of both branches

    def _estimate(self, subset: int | None) -> Evidence:
        """One evidence step, which moves nothing during the burn-in.

        A training may turn out here to have diverged.
        """
        over = self.burn_in.over(self.stepper.done)
        look = self.razor.step if over else self.razor.evidence
        try:
            return look(ShardedLoader(self.curvature_data), subset)
        except (DivergenceError, CurvatureError):
            self.stepper.put_back_()
            raise

    # What a trial needs.

    def branch(self) -> State:
        """A copy of all that further training depends on."""
        return states.branch_of(self)

    def load_branch_(self, state: State) -> None:
        """Go on from `branch()`."""
        states.load_branch_(self, state)

    def nll(self) -> float:
        """Mean negative log likelihood of some training data, always the same ones."""
        x, y = self.data.x[:EVIDENCE_SUBSET], self.data.y[:EVIDENCE_SUBSET]
        f = shared_outputs(self.razor.model, x).double()
        return float(self.razor.likelihood.nll(f, y).mean())

    def _tell(self) -> None:
        """Each epoch once: those of a trial when it is settled which branch goes on."""
        for record in self.history[self.told : self._sure()]:
            for callback in self.callbacks if world().is_main else ():
                try:
                    callback(dict(record))
                except Exception:
                    log.exception("a callback of fit failed in epoch %d", record["epoch"])
        self.told = self._sure()

    def _save(self) -> None:
        """Write a checkpoint; a full disk costs the checkpoint and not the run."""
        if self.checkpoints is None or not world().is_main:
            return
        try:
            self.checkpoints.save(states.state_of(self), self.taken, len(self.history))
        except OSError:
            log.exception("no checkpoint of step %d could be written", self.stepper.done)

    def _leave_if_asked(self, stop: Interruption) -> None:
        if self.checkpoints is None or not any_process(stop.received is not None):
            return
        self._save()
        if world().is_main:
            log.warning(
                "stopped by %s after step %d of %d; to go on: fit(..., resume=%r)",
                "another process" if stop.received is None else stop.received.name,
                self.stepper.done,
                self.stepper.total,
                str(self.checkpoints.directory),
            )
        stop.leave()


def evidence_batch(razor: Razor, data: TensorLoader) -> int:
    """Large where no step waits for a gradient; with one in the network, the memory counts."""
    if hyperparameters(razor.model):
        return data.batch_size
    if data.x.is_cuda:
        return GPU_BATCH
    return min(max(data.batch_size, CURVATURE_BATCH), most_data(data.x))


def most_data(x: Tensor) -> int:
    """Data of one batch of a curvature on a CPU: more take more memory, and no less time."""
    return max(16, CURVATURE_NUMBERS // x[0].numel())
