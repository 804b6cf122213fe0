r"""One maximum a posteriori step at a time: AdamW, SGD or Muon, on a warm-up and a cosine.

With the mean negative log likelihood $L(\theta)$ of a batch and N data in all, the weights minimise
$L(\theta) + \theta^\top \Delta \theta / 2N$.

| optimizer | gradient | prior |
|---|---|---|
| "sgd" | $\nabla L(\theta)$, momentum 0.9 | implicit step, stable for any precision |
| "adamw" | $\nabla [L(\theta) + \theta^\top \Delta \theta / 2N]$ | in the loss, no other decay |
| "muon" | $\nabla L(\theta)$, momentum 0.95 | in the polar factor that is stepped along (`muon`) |

All three rest at the posterior mode, where Laplace's method belongs.

With a radius $\rho$ each of them is sharpness-aware (SAM): in place of $\nabla L(\theta)$ it is
given the gradient $\nabla L(\theta + \rho\, \nabla L / \lVert \nabla L \rVert)$, a distance $\rho$
up the slope, with the norm over all weights. The prior, which is as sharp everywhere, keeps its
gradient at $\theta$. Such a step costs two gradients and rests a distance of order $\rho$ from the
mode, on its flat side; the evidence is then that of an expansion whose linear term is left out.
With a fraction f (`sam_from`) of all T steps, $\rho = 0$ for the steps $t < f T$, counted from 0:
they are the plain ones, at their cost. Where a run ends is up to its last steps.

Of several processes each works on its part of every batch, and the gradients are added up: the same
batches and, up to rounding, the same weights as in one process. The sum is taken here and not by
DistributedDataParallel, which takes the mean of the processes' means (parts may differ by one
datum), would see every forward pass of the curvature, and has no step without its hooks.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.accelerate.cuda_graphs import CUDAGraphStep
from symrazor.accelerate.processes import all_reduce_, is_distributed, world
from symrazor.accelerate.torch_internals import (
    foreach_add_,
    foreach_copy_,
    foreach_mul,
    foreach_norm,
)
from symrazor.core.parameters import weights
from symrazor.inference.razor import Razor
from symrazor.inference.razor_state import copy_state
from symrazor.training.muon import Muon, matrix_forms
from symrazor.training.options import DEFAULT_LR, FitConfig

MOMENTUM = 0.9
SNAPSHOT_EVERY = 50  # steps between copies of a model that is still finite


def learning_rate(step: int, total: int, warmup: float = 0.0) -> float:
    r"""The learning rate of one step as a fraction of its peak.

    With $W = \lfloor \text{warmup} \cdot T \rfloor$ steps of warm-up, $(t + 1) / (W + 1)$ for
    $t < W$, then $\tfrac12 (1 + \cos \pi \tfrac{t - W}{T - W})$.
    """
    rise = int(warmup * total)
    if step < rise:
        return (step + 1) / (rise + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / (total - rise)))


class Stepper:
    """Moves the weights of a Razor's model.

    Args:
        razor: model, likelihood and prior.
        options: optimizer, lr, warmup, sam_radius and sam_from are used.
        total: steps of the whole run, for the schedule.

    Attributes:
        done: steps taken.
    """

    def __init__(self, razor: Razor, options: FitConfig, total: int) -> None:
        """Make the optimiser; see the class."""
        self.razor, self.options, self.total, self.done = razor, options, total, 0
        self.peak = options.lr or DEFAULT_LR[options.optimizer]
        self.theta, self.eta = list(weights(razor.model).values()), list(razor.eta.values())
        self.run: Callable[[Tensor, Tensor], Tensor] = self._run
        self.lr: Tensor | float = self.peak
        device = self.theta[0].device
        self.on_host = device.type == "cpu"
        if not self.on_host:  # the rate as a tensor: a recorded step reads it anew each time
            self.lr = torch.tensor(self.peak, device=device)
            if not is_distributed():  # messages to other processes are not recorded
                self.run = CUDAGraphStep(self._run)
        self.optimiser = self._optimiser()
        self.radius: float | None = None
        self.last_good = self._snapshot()

    def _optimiser(self) -> torch.optim.Optimizer:
        name, fused = self.options.optimizer, not self.on_host
        if name == "muon":
            forms = matrix_forms(self.razor.model)
            return Muon(self.theta, forms, self.razor.penalty_precisions, self.lr)
        if name == "adamw":
            return torch.optim.AdamW(
                self.theta, lr=self.lr, weight_decay=0.0, capturable=fused, fused=fused
            )
        return torch.optim.SGD(self.theta, lr=self.lr, momentum=MOMENTUM, fused=fused)

    def step(self, x: Tensor, y: Tensor) -> Float[Tensor, ""]:
        """Train on one batch; returns its mean negative log likelihood.

        Raises:
            FloatingPointError: a loss that is not finite; the model is put back. On a GPU the loss
                is looked at now and then only, because looking means waiting for it.
        """
        self._set_lr(self.peak * learning_rate(self.done, self.total, self.options.warmup))
        self._set_radius()
        look = self.done % SNAPSHOT_EVERY == 0
        if look:
            keep = self._snapshot()
        steps = self.razor.training_steps
        nll = self.run(x, y)
        self.razor.training_steps = steps + 1
        if self.on_host or look:
            self._check(nll)
        if look:
            self.last_good = keep
        self.done += 1
        return nll

    def check(self, nll: Tensor) -> None:
        """After an epoch: a loss of all its steps, and weights, that are finite.

        Raises:
            FloatingPointError: as `step` does, which may not have looked since.
        """
        finite = torch.stack([torch.isfinite(theta).all() for theta in self.theta]).all()
        self._check(torch.where(finite, nll, torch.nan))

    def record_anew(self) -> None:
        """The model computes other things than before: a recorded step is of no use any more."""
        if isinstance(self.run, CUDAGraphStep):
            self.run = CUDAGraphStep(self._run)

    def _set_radius(self) -> None:
        """That of this step; where it changes, the step has to be recorded anew."""
        late = self.done >= self.options.sam_from * self.total
        radius = self.options.sam_radius if late else None
        if radius != self.radius:
            self.radius = radius
            self.record_anew()

    def _set_lr(self, lr: float) -> None:
        if isinstance(self.lr, Tensor):
            self.lr.fill_(lr)
            return
        self.lr = lr
        for group in self.optimiser.param_groups:
            group["lr"] = lr

    def _run(self, x: Tensor, y: Tensor) -> Tensor:
        """One step, without a look at any value."""
        nll = self._differentiate(x, y)
        if self.radius is not None:
            self._differentiate_uphill(x, y, self.radius)
        if self.options.optimizer == "adamw":
            self.razor.add_penalty_gradient_()
        for parameter in self.eta:
            parameter.grad = None  # eta follows the evidence, not the training loss
        self.optimiser.step()
        if self.options.optimizer == "sgd":
            self.razor.shrink_(self.lr / (1 - MOMENTUM))
        return nll

    def _differentiate(self, x: Tensor, y: Tensor) -> Tensor:
        """Gradients of the batch's mean negative log likelihood, which is returned."""
        self.optimiser.zero_grad()
        nll = self._nll(x, y)
        nll.backward()
        total = nll.detach()
        all_reduce_([total, *(theta.grad for theta in self.theta if theta.grad is not None)])
        return total

    def _nll(self, x: Tensor, y: Tensor) -> Tensor:
        """Of the batch's mean negative log likelihood, what this process's part adds to it."""
        n, part = len(y), world().shard(len(y))
        if part.start == part.stop:  # fewer data than processes
            return 0.0 * self.razor.likelihood.nll(self.razor.model(x[:1]), y[:1]).sum()
        return self.razor.likelihood.nll(self.razor.model(x[part]), y[part]).sum() / n

    def _differentiate_uphill(self, x: Tensor, y: Tensor, radius: float) -> None:
        """Replace the gradient by the one a distance `radius` up the slope."""
        moved = [theta.detach() for theta in self.theta if theta.grad is not None]
        slopes = [theta.grad for theta in self.theta if theta.grad is not None]
        before = foreach_mul(moved, 1.0)
        norm = torch.stack(list(foreach_norm(slopes))).norm()
        foreach_add_(moved, foreach_mul(slopes, radius / norm.clamp_min(1e-12)))
        try:
            uphill = self._differentiate(x, y)
        finally:
            foreach_copy_(moved, before)
        if self.on_host:
            self._check(uphill)

    def _snapshot(self) -> dict[str, Tensor]:
        return copy_state(self.razor.model.state_dict())

    def put_back_(self) -> None:
        """The last state of the model that was looked at and found finite."""
        self.razor.model.load_state_dict(self.last_good)

    def _check(self, loss: Tensor) -> None:
        if not bool(torch.isfinite(loss)):
            self.put_back_()
            radius = "" if self.radius is None else f" or the radius (sam_radius={self.radius:g})"
            raise FloatingPointError(
                f"expected a finite training loss, got {float(loss.detach())} at step {self.done} "
                f"of {self.total}; the model is back at its last good state. Lower the learning "
                f"rate (lr={self.peak:g}){radius}"
            )

    def state_dict(self) -> dict[str, object]:
        """Steps taken and what the optimiser remembers of each weight."""
        return {"done": self.done, "state": self.optimiser.state_dict()["state"]}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Continue from `state_dict()`; call it after the model has been loaded."""
        assert isinstance(state["state"], dict)
        remembered = {
            number: {k: _laid_out_as(self.theta[number], v) for k, v in values.items()}
            for number, values in state["state"].items()
        }
        rates = [group["lr"] for group in self.optimiser.param_groups]
        groups = self.optimiser.state_dict()["param_groups"]
        self.optimiser.load_state_dict({"state": remembered, "param_groups": groups})
        for group, rate in zip(self.optimiser.param_groups, rates, strict=True):
            group["lr"] = rate  # itself, not the copy: a rate that is a tensor is set in place
        self.done = int(str(state["done"]))
        self.last_good = self._snapshot()


def _laid_out_as(theta: Tensor, value: object) -> object:
    """A tensor of a weight's shape, with its strides: the same arithmetic as before."""
    if isinstance(value, Tensor) and value.shape == theta.shape and theta.dim():
        return torch.empty_like(theta).copy_(value)
    return value
