"""The loop of a training: one step at a time, its counters, and its state."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from symrazor.accelerate.cuda_graphs import CUDAGraphCall
from symrazor.dynamics.config import TrainConfig
from symrazor.dynamics.hamiltonian import Hamiltonian, SymmetrisedNetwork
from symrazor.dynamics.likelihoods import Noise, predict
from symrazor.dynamics.mechanics import integrator_by_name
from symrazor.dynamics.trained import Record, Trained, kl_divergence
from symrazor.dynamics.trajectories import Transitions
from symrazor.training.checkpoint import State

PATIENCE = 50
"""Steps in a row without a finite gradient after which there is no point in going on."""
SPREADS = ("log_diagonal", "log_scale")
"""Names of parameters that are logarithms of posterior scales."""
SUMS = ("nll", "bad", "row", "capped")
"""Counters of a loop that are tensors."""


class Loop:
    """Model, optimiser and the counters of a run."""

    def __init__(self, model: SymmetrisedNetwork, data: Transitions, config: TrainConfig) -> None:
        self.model, self.config = model.to(config.device), config
        dtype = model.network.posteriors[0].mean.dtype
        self.data = data.to(config.device, dtype)
        self.noise = Noise(config.noise, config.noise_kind).to(config.device)
        self.generator = torch.Generator(config.device).manual_seed(config.seed)
        groups = [group for group in self._groups() if group["params"]]
        self.rates: list[float] = [group["lr"] for group in groups]
        self.moving: list[Tensor] = [p for group in groups for p in group["params"]]
        on_gpu = self.generator.device.type == "cuda"
        if on_gpu:  # a recorded step reads its rates from tensors
            groups = [g | {"lr": torch.tensor(g["lr"], device=config.device)} for g in groups]
        self.optimiser = torch.optim.Adam(groups, capturable=on_gpu)
        self.graphed: dict[int, CUDAGraphCall] = {}
        zero = torch.zeros((), device=config.device)
        self.nll, self.count, self.bad, self.row = zero.clone(), 0, zero.clone(), zero.clone()
        self.capped = zero.clone()
        self.done, self.share, self.seconds = 0, 0.0, 0.0
        self.history: list[Record] = []

    def result(self) -> Trained:
        """What has been trained; its bound is not known yet."""
        return Trained(
            self.model, self.noise, self.config, self.history, self.seconds, self.skipped()
        )

    def tick(self, seconds: float) -> None:
        """One more step is done, so many seconds after the start."""
        config = self.config
        self.done, self.seconds = self.done + 1, seconds
        self.share = self.done / config.steps
        if config.minutes is not None:
            self.share = max(self.share, seconds / (60 * config.minutes))

    def state_dict(self) -> State:
        """All that the rest of the training depends on."""
        return {
            "model": self.model.state_dict(),
            "noise": self.noise.state_dict(),
            "optimiser": self.optimiser.state_dict()["state"],
            f"generator_{self.generator.device.type}": self.generator.get_state(),
            "sums": {name: getattr(self, name) for name in SUMS},
            **{name: getattr(self, name) for name in ("count", "done", "share", "seconds")},
            "history": self.history,
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict()`; bit for bit on the same device."""
        self.model.load_state_dict(state["model"])
        self.noise.load_state_dict(state["noise"])
        if "optimiser" in state:
            there = self.optimiser.state_dict()
            self.optimiser.load_state_dict(there | {"state": state["optimiser"]})
        generator = state.get(f"generator_{self.generator.device.type}")
        if generator is not None:  # no two kinds of devices draw the same numbers
            self.generator.set_state(generator)
        for name, value in state["sums"].items():
            getattr(self, name).copy_(value)
        for name in ("count", "done", "share", "seconds"):
            setattr(self, name, state[name])
        self.history = [dict(record) for record in state["history"]]

    def _groups(self) -> list[dict[str, Any]]:
        """Weights, posterior scales, and the quantities, each with its rate and its beginning."""
        model, config = self.model, self.config
        named = [(k, p) for k, p in model.network.named_parameters() if p.requires_grad]
        spreads = [p for k, p in named if k.rsplit(".")[-1] in SPREADS]
        rest = [p for k, p in named if k.rsplit(".")[-1] not in SPREADS]
        rest += [p for p in self.noise.parameters() if p.requires_grad]
        learned = [] if model.conserved is None else list(model.conserved.parameters())
        learned = [p for p in learned if p.requires_grad]
        return [
            {"params": rest, "lr": config.lr, "begin": 0.0},
            {"params": spreads, "lr": config.spread_lr * config.lr, "begin": 0.0},
            {"params": learned, "lr": config.conserved_lr, "begin": config.burn_in},
        ]

    def step(self, share: float) -> None:
        """One step of Adam at this share of the training; on a GPU replayed as a graph."""
        config = self.config
        for number, group in enumerate(self.optimiser.param_groups):
            rate = 0.5 * self.rates[number] * (1 + math.cos(math.pi * min(share, 1.0)))
            rate = rate if share >= group["begin"] else 0.0
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self.noise.hold(share < config.noise_hold)
        flows = config.flows * (config.late_flows if share >= 0.75 else 1)
        if self.generator.device.type != "cuda":
            self._step(flows)
        else:
            if flows not in self.graphed:
                self.graphed = {flows: CUDAGraphCall(partial(self._step, flows), [self.generator])}
            self.graphed[flows]()
        self.count += 1

    def _step(self, flows: int) -> None:
        """One step without a look at any value."""
        batch = self._batch()
        energy = self.model.draw(self.config.draws, flows, self.generator)
        loss, nll, predicted = self._loss(energy, batch)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward(inputs=self.moving)  # not in the states where flows begin
        ok = torch.isfinite(loss.detach())
        for group in self.optimiser.param_groups:
            ok = ok & self._clip(group["params"])
        self.optimiser.step()
        self.noise.observe(predicted, batch)
        self._count(ok, nll.detach(), energy)

    def _batch(self) -> Transitions:
        size = self.config.batch_size
        if size is None or size >= len(self.data):
            return self.data
        index = torch.randint(
            len(self.data), (size,), generator=self.generator, device=self.config.device
        )
        return self.data.at(index)

    def _loss(self, energy: Hamiltonian, batch: Transitions) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        predicted = predict(
            energy.field,
            batch,
            config.draws,
            integrator_by_name(config.integrator),
            config.substeps,
            config.target,
        )
        nll = self.noise.nll(predicted, batch).mean()
        if config.objective == "likelihood":
            return nll, nll, predicted.detach()
        return nll + kl_divergence(self.model) / len(self.data), nll, predicted.detach()

    def _clip(self, parameters: list[Tensor]) -> Tensor:
        """Shorten a long gradient; put zero in place of one that is not finite."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        ok = torch.isfinite(norm)
        factor = torch.where(ok, (self.config.clip / norm.clamp_min(1e-12)).clamp(max=1.0), 0.0)
        for g in gradients:
            g.nan_to_num_(0.0, 0.0, 0.0).mul_(factor)
        return ok

    def _count(self, ok: Tensor, nll: Tensor, energy: Hamiltonian) -> None:
        self.bad.add_((~ok).to(self.bad))
        self.row.copy_(torch.where(ok, 0.0, self.row + 1))
        self.nll.add_(torch.where(ok, nll, 0.0).to(self.nll))
        if energy.flows is not None and energy.flows.capped is not None:
            self.capped.add_(energy.flows.capped)

    def close(self) -> None:
        """Free recorded steps here and now: not while those of another loop are recorded."""
        self.skipped()  # waits for a device
        self.graphed.clear()

    def skipped(self) -> int:
        """Steps without a finite gradient."""
        return int(self.bad)

    @torch.no_grad()
    def read(self) -> Record:
        """A record: averages since the last one.

        Raises:
            FloatingPointError: no finite gradient for a long time.
        """
        if self.row >= min(PATIENCE, self.config.record):
            raise FloatingPointError(
                f"expected finite gradients, got none in the last {int(self.row)} steps; do lower "
                "lr or conserved_lr, or scale the states to about 1"
            )
        nll = float(self.nll) / self.count
        kl = 0.0 if self.config.objective == "likelihood" else float(kl_divergence(self.model))
        kl /= len(self.data)
        record = {"step": self.done, "share": min(self.share, 1.0), "seconds": self.seconds}
        record |= {"nll": nll, "kl": kl, "neg_elbo": nll + kl, "noise": float(self.noise.variance)}
        record |= {"skipped": float(self.bad), "capped": float(self.capped)}
        self.nll.zero_()
        self.count = 0
        return record
