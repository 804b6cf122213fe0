r"""Train a Hamiltonian network by the evidence lower bound.

$$ \mathrm{ELBO}/N = E_q[\log p(y \mid x, H_{\theta,\eta})]
   - \tfrac1N \sum_l \mathrm{KL}(q_l \,\|\, N(0, v_l^*)) $$

with the optimal prior variance $v_l^*$ of every layer in closed form (the collapsed divergence).
The posterior q and the conserved quantities eta maximise the same bound: a symmetry of the data
costs no fit and leaves less to learn for the posterior.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import torch
from torch import Tensor

from symrazor.accelerate.cuda_graphs import CUDAGraphCall
from symrazor.accelerate.processes import single_process
from symrazor.core.files import reading
from symrazor.dynamics.config import TrainConfig
from symrazor.dynamics.hamiltonian import Hamiltonian, SymmetrisedNetwork
from symrazor.dynamics.journal import Journal
from symrazor.dynamics.trained import (
    Noise,
    Record,
    Trained,
    evidence_bound,
    kl_per_datum,
    predict,
)
from symrazor.dynamics.trajectories import Transitions
from symrazor.training.checkpoint import State
from symrazor.training.loop import Loop, Task, clock
from symrazor.training.options import Schedule

Progress = Callable[[Record], None]

MAX_SKIPPED_STEPS = 50
"""Consecutive steps without a finite gradient after which training gives up."""
LATE_FLOWS_FROM = 0.75
"""Fraction of the training after which `late_flows` applies."""
LOG_SCALES = ("log_diagonal", "log_scale")
"""Names of parameters that are logarithms of posterior scales."""
COUNTERS = ("nll", "n_skipped", "n_skipped_in_a_row", "n_capped")
"""Counters of a task that are tensors, so that steps need not wait for a device."""


def train(
    model: SymmetrisedNetwork,
    data: Transitions,
    config: TrainConfig | None = None,
    progress: Progress | None = None,
    journal: Journal | None = None,
) -> Trained:
    """Maximise the bound (or the likelihood) by Adam on a cosine schedule.

    A step whose flows or gradients overflow is skipped and counted.

    Args:
        model: trained in place.
        data: transitions, see `transitions`.
        config: options.
        progress: called with each record.
        journal: stores checkpoints. A training that it contains continues from its last checkpoint,
            or returns its result at once.

    Raises:
        ValueError: the data do not suit the model or the target.
        FloatingPointError: too many consecutive steps were skipped.
        KeyboardInterrupt: on SIGINT; with a journal after a checkpoint.
        SystemExit: on SIGTERM with a journal, after a checkpoint.
    """
    config = config or TrainConfig()
    _check(model, data, config)
    task = DynamicsTask(model, data, config)
    entry = None if journal is None else journal.next(model, data, config, task.state_dict)
    if entry is not None:
        if entry.state is not None:
            with reading(entry.directory):
                task.load_state_dict(entry.state)
        if entry.result is not None:
            if "error" in entry.result:
                raise FloatingPointError(entry.result["error"])
            trained = task.result()
            trained.bound = entry.result["bound"]
            return trained
    # Each process of a distributed run trains by itself.
    with closing(task), single_process():
        try:
            Loop(task, () if progress is None else (progress,), entry).run()
        except FloatingPointError as error:
            if entry is not None:
                entry.finish({"error": str(error)})
            raise
    trained = task.result()
    trained.bound = evidence_bound(trained, data)
    if entry is not None:
        entry.finish({"bound": trained.bound})
    return trained


def _check(model: SymmetrisedNetwork, data: Transitions, config: TrainConfig) -> None:
    expected, got = model.network.phase, data.x.shape[1]
    if expected != got:
        raise ValueError(f"The network takes states of {expected} entries, the data have {got}.")
    horizon = data.y.shape[1]
    if config.target == "derivative" and horizon != 1:
        raise ValueError(
            f"target='derivative' needs velocities, got windows of {horizon} steps. Create the "
            "data with velocities(trajectories)."
        )


def seconds_per_step(
    model: SymmetrisedNetwork, data: Transitions, config: TrainConfig, steps: int = 8
) -> float:
    """Measure the duration of a training step: `steps` are timed, after as many that are not."""
    started = 0.0
    with closing(DynamicsTask(copy.deepcopy(model), data, config)) as task:
        for step in range(2 * steps):
            if step == steps:
                task.synchronise()
                started = clock.now()
            task.step_at(0.0)
        task.synchronise()
        return (clock.now() - started) / steps


class DynamicsTask(Task):
    """Model, optimiser and counters of a training; a round ends with a record.

    Attributes:
        done: steps taken.
        n_since_record: steps since the last record.
    """

    def __init__(self, model: SymmetrisedNetwork, data: Transitions, config: TrainConfig) -> None:
        super().__init__()
        self.model, self.config = model.to(config.device), config
        dtype = model.network.posteriors[0].mean.dtype
        self.data = data.to(config.device, dtype)
        self.noise = Noise(config.noise, config.noise_kind).to(config.device)
        self.generator = torch.Generator(config.device).manual_seed(config.seed)
        groups = [group for group in self._parameter_groups() if group["params"]]
        self.peaks: list[float] = [group["lr"] for group in groups]
        self.schedules = [Schedule(hold=group.pop("hold")) for group in groups]
        self.parameters: list[Tensor] = [p for group in groups for p in group["params"]]
        on_gpu = self.generator.device.type == "cuda"
        if on_gpu:  # a recorded CUDA graph reads the current rates from tensors
            groups = [g | {"lr": torch.tensor(g["lr"], device=config.device)} for g in groups]
        self.optimiser = torch.optim.Adam(groups, capturable=on_gpu)
        self.graphs: dict[int, CUDAGraphCall] = {}
        self.counters = {name: torch.zeros((), device=config.device) for name in COUNTERS}
        self.done = self.n_since_record = 0

    def _parameter_groups(self) -> list[dict[str, Any]]:
        """Return weights, posterior scales and conserved quantities with rate and hold."""
        model, config = self.model, self.config
        named = [(k, p) for k, p in model.network.named_parameters() if p.requires_grad]
        scales = [p for k, p in named if k.rsplit(".")[-1] in LOG_SCALES]
        others = [p for k, p in named if k.rsplit(".")[-1] not in LOG_SCALES]
        others += [p for p in self.noise.parameters() if p.requires_grad]
        conserved = [] if model.conserved is None else list(model.conserved.parameters())
        conserved = [p for p in conserved if p.requires_grad]
        return [
            {"params": others, "lr": config.lr, "hold": 0.0},
            {"params": scales, "lr": config.spread_lr * config.lr, "hold": 0.0},
            {"params": conserved, "lr": config.conserved_lr, "hold": config.burn_in},
        ]

    @property
    def share(self) -> float:
        """Fraction of the training that is done, by steps or time, whichever is larger."""
        share = self.done / self.config.steps
        if self.config.minutes is not None:
            share = max(share, self.seconds / (60 * self.config.minutes))
        return share

    def finished(self) -> bool:
        """Return whether steps or time are used up and the last record is written."""
        return self.share >= 1 and self.n_since_record == 0

    def batches(self) -> Iterator[None]:
        """Yield once per step until a record is due; steps draw their own batches."""
        while self.n_since_record == 0 or (self.done % self.config.record and self.share < 1):
            yield None

    def step(self, batch: None) -> None:
        """Take the next step."""
        self.step_at(self.share)
        self.done += 1

    def step_at(self, share: float) -> None:
        """Take one step of Adam at a fraction of the training; on a GPU as a recorded graph."""
        config = self.config
        for number, group in enumerate(self.optimiser.param_groups):
            rate = self.peaks[number] * self.schedules[number](min(share, 1.0))
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self.noise.hold(share < config.noise_hold)
        flows = config.flows * (config.late_flows if share >= LATE_FLOWS_FROM else 1)
        if self.generator.device.type != "cuda":
            self._step(flows)
        else:
            if flows not in self.graphs:
                self.graphs = {flows: CUDAGraphCall(partial(self._step, flows), [self.generator])}
            self.graphs[flows]()
        self.n_since_record += 1

    def _step(self, flows: int) -> None:
        """Take one step without reading any value on the host."""
        batch = self._draw_batch()
        energy = self.model.draw(self.config.draws, flows, self.generator)
        predicted = predict(energy.field, batch, self.config.draws, self.config)
        nll = self.noise.nll(predicted, batch).mean()
        loss = nll + kl_per_datum(self.model, self.config, len(self.data))
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward(inputs=self.parameters)  # not to the states where flows start
        finite = torch.isfinite(loss.detach())
        for group in self.optimiser.param_groups:
            finite = finite & self._clip(group["params"])
        self.optimiser.step()
        self.noise.observe(predicted.detach(), batch)
        self._count(finite, nll.detach(), energy)

    def _draw_batch(self) -> Transitions:
        size = self.config.batch_size
        if size is None or size >= len(self.data):
            return self.data
        index = torch.randint(
            len(self.data), (size,), generator=self.generator, device=self.config.device
        )
        return self.data.at(index)

    def _clip(self, parameters: list[Tensor]) -> Tensor:
        """Clip gradients, zero non-finite ones, and return whether all were finite."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        finite = torch.isfinite(norm)
        factor = (self.config.clip / norm.clamp_min(1e-12)).clamp(max=1.0)
        factor = torch.where(finite, factor, 0.0)
        for gradient in gradients:
            gradient.nan_to_num_(0.0, 0.0, 0.0).mul_(factor)
        return finite

    def _count(self, finite: Tensor, nll: Tensor, energy: Hamiltonian) -> None:
        counters = self.counters
        counters["n_skipped"].add_((~finite).to(nll))
        in_a_row = counters["n_skipped_in_a_row"]
        in_a_row.copy_(torch.where(finite, 0.0, in_a_row + 1))
        counters["nll"].add_(torch.where(finite, nll, 0.0))
        if energy.flows is not None and energy.flows.capped is not None:
            counters["n_capped"].add_(energy.flows.capped)

    @torch.no_grad()
    def evaluate(self) -> None:
        """Append a record; raise FloatingPointError if too many steps in a row were skipped."""
        counters = {name: float(value) for name, value in self.counters.items()}
        if counters["n_skipped_in_a_row"] >= min(MAX_SKIPPED_STEPS, self.config.record):
            raise FloatingPointError(
                f"The last {counters['n_skipped_in_a_row']:.0f} steps had no finite gradients. "
                "Lower lr or conserved_lr, or scale the states to about 1."
            )
        nll = counters["nll"] / self.n_since_record
        kl = float(kl_per_datum(self.model, self.config, len(self.data)))
        record = {"step": self.done, "share": min(self.share, 1.0), "seconds": self.seconds}
        record |= {"nll": nll, "kl": kl, "neg_elbo": nll + kl, "noise": float(self.noise.variance)}
        record |= {"skipped": counters["n_skipped"], "capped": counters["n_capped"]}
        self.history.append(record)
        self.counters["nll"].zero_()
        self.n_since_record = 0

    def position(self) -> str:
        """Describe the current step."""
        return f"step {self.done} of {self.config.steps}"

    def result(self) -> Trained:
        """Return the trained model, without its final bound."""
        return Trained(
            self.model, self.noise, self.config, self.history, self.seconds, self.synchronise()
        )

    def synchronise(self) -> int:
        """Wait until the device has finished all steps; return how many were skipped."""
        return int(self.counters["n_skipped"])

    def close(self) -> None:
        """Free recorded graphs now, not while another task records its own."""
        self.synchronise()
        self.graphs.clear()

    def state_dict(self) -> State:
        """Return everything that the rest of the training depends on."""
        return {
            "model": self.model.state_dict(),
            "noise": self.noise.state_dict(),
            "optimiser": self.optimiser.state_dict()["state"],
            f"generator_{self.generator.device.type}": self.generator.get_state(),
            "counters": self.counters,
            **{name: getattr(self, name) for name in ("n_since_record", "done", "seconds")},
            "history": [dict(record) for record in self.history],
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict()`; bit for bit on the same device."""
        self.model.load_state_dict(state["model"])
        self.noise.load_state_dict(state["noise"])
        if "optimiser" in state:
            current = self.optimiser.state_dict()
            self.optimiser.load_state_dict(current | {"state": state["optimiser"]})
        generator = state.get(f"generator_{self.generator.device.type}")
        if generator is not None:  # generators of other device types draw other numbers
            self.generator.set_state(generator)
        for name, value in state["counters"].items():
            self.counters[name].copy_(value)
        for name in ("n_since_record", "done", "seconds"):
            setattr(self, name, state[name])
        self.history = [dict(record) for record in state["history"]]
