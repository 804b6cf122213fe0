r"""Move the weights towards the posterior mode: AdamW, SGD or Muon, on the learning-rate schedule.

With the mean negative log likelihood $L(\theta)$ of a batch, prior precisions $\Delta$ and N data,
the weights minimise $L(\theta) + \theta^\top \Delta \theta / 2N$.

| optimizer | gradient | prior |
|---|---|---|
| "sgd" | $\nabla L(\theta)$, momentum 0.9 | implicit step, stable for any precision |
| "adamw" | $\nabla [L(\theta) + \theta^\top \Delta \theta / 2N]$ | in the loss, no weight decay |
| "muon" | $\nabla L(\theta)$, momentum 0.95 | added before the polar factor (`Muon`) |

The stationary point of all three is the posterior mode, at which the Laplace approximation expands.

**Sharpness-aware steps.** With a radius $\rho$, $\nabla L(\theta)$ is replaced by
$\nabla L(\theta + \rho\, \nabla L / \lVert \nabla L \rVert)$, with the norm over all weights
(sharpness-aware minimisation, SAM). The prior is equally sharp everywhere and keeps its gradient at
$\theta$. A sharpness-aware step costs two gradients. Its stationary point lies at a distance of
order $\rho$ from the mode, so the Laplace evidence neglects a linear term there. The first fraction
`sam_from` of all steps is plain: the last steps decide where a run ends.

**Several processes.** Each process works on its part of every batch and the gradients are summed:
the same batches and, up to rounding, the same weights as with one process. The sum is not taken by
DistributedDataParallel because that averages the means of the processes (their parts may differ in
size by one), hooks every forward pass of the curvature, and cannot step without its hooks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import sqrt

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Optimizer

from symrazor.accelerate.cuda_graphs import CUDAGraphStep
from symrazor.accelerate.devices import run_on_streams
from symrazor.accelerate.processes import all_reduce_, is_distributed, world
from symrazor.accelerate.torch_internals import (
    foreach_add_,
    foreach_copy_,
    foreach_div,
    foreach_lerp,
    foreach_lerp_,
    foreach_mul,
    foreach_norm,
)
from symrazor.core.parameters import copy_state, weights
from symrazor.curvature.weight_sharing import registered_type, sharing
from symrazor.data.batches import call
from symrazor.inference.razor import Razor
from symrazor.linalg.polar import polar_factors
from symrazor.training.options import DEFAULT_LR, FitConfig, Schedule

SGD_MOMENTUM = 0.9
MUON_MOMENTUM = 0.95
MUON_BIAS_STEP = 0.1
"""Root mean square of Muon's step for a bias at learning rate 1."""
SNAPSHOT_INTERVAL = 50
"""Steps between copies of a model whose loss is finite."""


class Stepper:
    """Take optimiser steps on the weights of a Razor's model: `done` of `total` so far.

    The options `optimizer`, `lr`, `warmup`, `sam_radius` and `sam_from` are used.
    """

    def __init__(self, razor: Razor, options: FitConfig, total: int) -> None:
        self.razor, self.options, self.total, self.done = razor, options, total, 0
        self.peak = options.lr or DEFAULT_LR[options.optimizer]
        self.schedule = Schedule.with_warmup(total, options.warmup)
        self.theta, self.eta = list(weights(razor.model).values()), list(razor.eta.values())
        self.run: Callable[[Tensor, Tensor], Tensor] = self._run
        self.lr: Tensor | float = self.peak
        device = self.theta[0].device
        self.on_cpu = device.type == "cpu"
        if not self.on_cpu:  # a recorded CUDA graph reads the current rate from a tensor
            self.lr = torch.tensor(self.peak, device=device)
            if not is_distributed():  # messages to other processes cannot be recorded
                self.run = CUDAGraphStep(self._run)
        self.optimiser = self._make_optimiser()
        self.radius: float | None = None
        self.last_good = self._snapshot()

    def _make_optimiser(self) -> Optimizer:
        theta, lr, fused = self.theta, self.lr, not self.on_cpu
        match self.options.optimizer:
            case "muon":
                return Muon(theta, matrix_forms(self.razor.model), self.razor.weight_decays, lr)
            case "adamw":
                return torch.optim.AdamW(theta, lr, weight_decay=0.0, capturable=fused, fused=fused)
            case "sgd":
                return torch.optim.SGD(theta, lr, momentum=SGD_MOMENTUM, fused=fused)

    def step(self, x: Tensor, y: Tensor) -> Float[Tensor, ""]:
        """Train on one batch and return its mean negative log likelihood.

        If that is not finite, the model is restored and FloatingPointError raised. On a GPU it is
        checked every `SNAPSHOT_INTERVAL` steps only, because a check waits for the device.
        """
        self._set_lr(self.peak * self.schedule(self.done))
        sharpness_aware = self.done >= self.options.sam_from * self.total
        radius = self.options.sam_radius if sharpness_aware else None
        if radius != self.radius:
            self.radius = radius
            self.discard_recording()
        check = self.done % SNAPSHOT_INTERVAL == 0
        snapshot = self._snapshot() if check else self.last_good
        training_steps = self.razor.training_steps
        nll = self.run(x, y)
        self.razor.training_steps = training_steps + 1
        if self.on_cpu or check:
            self._check(nll)
        self.last_good = snapshot
        self.done += 1
        return nll

    def check_finite(self, nll: Tensor) -> None:
        """Restore the model and raise FloatingPointError if a weight or this loss is not finite."""
        finite = torch.stack([torch.isfinite(theta).all() for theta in self.theta]).all()
        self._check(torch.where(finite, nll, torch.nan))

    def discard_recording(self) -> None:
        """Record the CUDA graph anew in the next step, because the computation has changed."""
        if isinstance(self.run, CUDAGraphStep):
            self.run = CUDAGraphStep(self._run)

    def restore_last_good_(self) -> None:
        """Restore the last model whose loss was checked and finite."""
        self.razor.model.load_state_dict(self.last_good)

    def _set_lr(self, lr: float) -> None:
        if isinstance(self.lr, Tensor):
            self.lr.fill_(lr)
            return
        self.lr = lr
        for group in self.optimiser.param_groups:
            group["lr"] = lr

    def _run(self, x: Tensor, y: Tensor) -> Tensor:
        """Take one step without reading any value on the host."""
        nll = self._differentiate(x, y)
        if self.radius is not None:
            self._differentiate_uphill(x, y, self.radius)
        if self.options.optimizer == "adamw":
            self.razor.add_penalty_gradient_()
        for parameter in self.eta:
            parameter.grad = None  # hyperparameters follow the evidence, not the training loss
        self.optimiser.step()
        if self.options.optimizer == "sgd":
            self.razor.shrink_(self.lr / (1 - SGD_MOMENTUM))
        return nll

    def _differentiate(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute gradients of the mean negative log likelihood of a batch, and return its value.

        Both are summed over processes.
        """
        self.optimiser.zero_grad()
        nll = self._nll(x, y)
        nll.backward()
        total = nll.detach()
        all_reduce_([total, *(theta.grad for theta in self.theta if theta.grad is not None)])
        return total

    def _nll(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the contribution of this process to the mean negative log likelihood."""
        n, part = len(y), world().shard(len(y))
        if part.start == part.stop:  # fewer examples than processes
            return 0.0 * self.razor.likelihood.nll(call(self.razor.model, x[:1]), y[:1]).sum()
        return self.razor.likelihood.nll(call(self.razor.model, x[part]), y[part]).sum() / n

    def _differentiate_uphill(self, x: Tensor, y: Tensor, radius: float) -> None:
        """Replace the gradient by the gradient at a distance `radius` uphill."""
        values = [theta.detach() for theta in self.theta if theta.grad is not None]
        gradients = [theta.grad for theta in self.theta if theta.grad is not None]
        before = foreach_mul(values, 1.0)
        norm = torch.stack(list(foreach_norm(gradients))).norm()
        foreach_add_(values, foreach_mul(gradients, radius / norm.clamp_min(1e-12)))
        try:
            nll_uphill = self._differentiate(x, y)
        finally:
            foreach_copy_(values, before)
        if self.on_cpu:
            self._check(nll_uphill)

    def _snapshot(self) -> dict[str, Tensor]:
        return copy_state(self.razor.model.state_dict())

    def _check(self, loss: Tensor) -> None:
        if not bool(torch.isfinite(loss)):
            self.restore_last_good_()
            radius = "" if self.radius is None else f" or the radius (sam_radius={self.radius:g})"
            raise FloatingPointError(
                f"The training loss is {float(loss.detach())} at step {self.done} of {self.total}; "
                "the model has been restored to its last finite state. Lower the learning rate "
                f"(lr={self.peak:g}){radius}."
            )

    def state_dict(self) -> dict[str, object]:
        """Return the number of steps taken and the optimiser state of each weight."""
        return {"done": self.done, "state": self.optimiser.state_dict()["state"]}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Continue from `state_dict()`; load the model first."""
        assert isinstance(state["state"], dict)
        optimiser_state = {
            number: {k: _with_strides_of(self.theta[number], v) for k, v in values.items()}
            for number, values in state["state"].items()
        }
        rates = [group["lr"] for group in self.optimiser.param_groups]
        groups = self.optimiser.state_dict()["param_groups"]
        self.optimiser.load_state_dict({"state": optimiser_state, "param_groups": groups})
        for group, rate in zip(self.optimiser.param_groups, rates, strict=True):
            group["lr"] = rate  # the same object: a rate that is a tensor is written in place
        self.done = int(str(state["done"]))
        self.last_good = self._snapshot()


def _with_strides_of(theta: Tensor, value: object) -> object:
    """Return a tensor of a weight's shape with the weight's strides.

    Other strides would change the order of the arithmetic, and with it the last bits.
    """
    if isinstance(value, Tensor) and value.shape == theta.shape and theta.dim():
        return torch.empty_like(theta).copy_(value)
    return value


@dataclass(frozen=True)
class MatrixForm:
    """Convert a weight to matrices [k, o, i] and back.

    `step_size` is the spectral norm of Muon's step at learning rate 1.
    """

    to_blocks: Callable[[Tensor], Tensor]
    from_blocks: Callable[[Tensor], Tensor]
    step_size: float


def matrix_forms(model: nn.Module) -> list[MatrixForm]:
    """Return the matrix form of every trainable weight, in the order of `symrazor.weights`."""
    known: dict[int, MatrixForm] = {}
    for module in model.modules():
        if registered_type(type(module)) is not None:
            form = sharing(module)
            if form.weight is not None and not form.dense:
                weight = getattr(module, form.weight)
                _, o, i = form.to_blocks(weight.detach()).shape
                step_size = sqrt(max(1, o / i))
                known[id(weight)] = MatrixForm(form.to_blocks, form.from_blocks, step_size)
    return [known.get(id(theta)) or _row_form(theta) for theta in weights(model).values()]


def _row_form(theta: Tensor) -> MatrixForm:
    shape, step_size = theta.shape, MUON_BIAS_STEP * sqrt(theta.numel())
    return MatrixForm(lambda t: t.reshape(1, 1, -1), lambda row: row.reshape(shape), step_size)


class Muon(Optimizer):
    r"""Muon for weights with a Gaussian prior: steps along polar factors, to the posterior mode.

    The gradient of a weight matrix has few large singular values, so a gradient step changes few
    directions. Muon steps along the polar factor of the gradient, which has the same singular
    vectors and all singular values equal to 1. With the smoothed gradient M of the mean negative
    log likelihood, precisions $\delta$ and N data,

    $$ D = M + \delta \theta / N, \qquad P = \mathrm{polar}(D), \qquad
       \theta \leftarrow \theta - \frac{r P}{1 + s\, \delta / N}, \qquad
       r = \text{lr} \sqrt{\max(1, o / i)} $$

    for matrices with o rows and i columns. The step r is about lr times the largest singular value
    of a weight at initialisation, for any width, so all layers share one learning rate. The
    stationary point is D = 0, the posterior mode, whatever the denominator. The denominator makes
    the prior implicit: a step along D of the same length has the size $s = r |P| / |D|$, so a
    weight that only the prior acts on goes to zero without overshooting, for any precision. The
    prior is not noisy and is not smoothed.

    The matrices are the blocks W[k, o, i] of the weight-sharing format
    (`symrazor.curvature.weight_sharing`): one matrix of channels by patches for a convolution, one
    per block for a factor of F-FC. Biases and other tensors count as one row, whose polar factor is
    the normalised vector; the root mean square of their step is lr / 10.

    Args:
        theta: the weights.
        forms: the matrix form of each weight.
        decay: returns delta / N for each weight, as one number or one per entry.
        lr: a number, or a tensor that is written in place.
    """

    def __init__(
        self,
        theta: list[nn.Parameter],
        forms: list[MatrixForm],
        decay: Callable[[], list[Tensor]],
        lr: float | Tensor,
    ) -> None:
        super().__init__(theta, {"lr": lr})
        self.forms, self.decay = forms, decay
        blocks = [form.to_blocks(t.detach()) for form, t in zip(forms, theta, strict=True)]
        polar_norms = [sqrt(len(block) * min(block.shape[1:])) for block in blocks]  # |P|
        self.step_sizes = [theta[0].new_tensor(form.step_size) for form in forms]
        self.step_norms = [n * r for n, r in zip(polar_norms, self.step_sizes, strict=True)]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move every weight; weights without a gradient follow their prior alone."""
        group, decay = self.param_groups[0], self.decay()
        lr, theta = group["lr"], group["params"]
        with_gradient = [number for number, t in enumerate(theta) if t.grad is not None]
        for number in set(range(len(theta))) - set(with_gradient):
            theta[number].div_(1 + lr * decay[number])
        moved = [theta[number] for number in with_gradient]
        prior = [decay[number] for number in with_gradient]
        directions = self._directions(moved, prior)
        step_norms = lr * torch.stack([self.step_norms[number] for number in with_gradient])
        denominators = foreach_mul(prior, (step_norms / _norms(directions)).unbind())
        foreach_add_(denominators, 1.0)
        sizes = lr * torch.stack([self.step_sizes[number] for number in with_gradient])
        lengths = foreach_div(sizes.unbind(), denominators)
        forms = [self.forms[number] for number in with_gradient]
        pairs = zip(forms, directions, strict=True)
        factors = polar_factors([form.to_blocks(direction) for form, direction in pairs])
        moves = [
            partial(_move, *parts) for parts in zip(moved, forms, factors, lengths, strict=True)
        ]
        run_on_streams(moves, [*factors, *lengths])

    def _directions(self, theta: list[nn.Parameter], prior: list[Tensor]) -> list[Tensor]:
        """Return D: Nesterov's smoothed gradients plus the gradient of the prior."""
        for t in theta:
            if "momentum" not in self.state[t]:
                self.state[t]["momentum"] = torch.zeros_like(t)
        gradients = [t.grad for t in theta if t.grad is not None]
        momenta = [self.state[t]["momentum"] for t in theta]
        foreach_lerp_(momenta, gradients, 1 - MUON_MOMENTUM)
        smoothed = foreach_lerp(momenta, gradients, 1 - MUON_MOMENTUM)
        sums = [
            partial(direction.addcmul_, t, delta)
            for direction, t, delta in zip(smoothed, theta, prior, strict=True)
        ]
        return run_on_streams(sums, [*smoothed, *prior])


def _move(theta: nn.Parameter, form: MatrixForm, factor: Tensor, length: Tensor) -> None:
    theta.addcmul_(form.from_blocks(factor), length, value=-1.0)


def _norms(tensors: list[Tensor]) -> Float[Tensor, "_"]:
    """Return norms, at least the smallest positive number so that quotients stay finite."""
    norms = torch.stack(list(foreach_norm(tensors)))
    return norms.clamp_min(torch.finfo(norms.dtype).tiny)


def step_sizes(optimiser: Optimizer, theta: Mapping[str, nn.Parameter]) -> dict[str, float]:
    r"""Return the step size s of each weight with which `Razor.shrink_` matches an optimiser step.

    SGD with momentum m and dampening d moves a weight under a constant gradient g by
    $-\text{lr}\, g (1 - d) / (1 - m)$, with or without Nesterov's form. With
    $s = \text{lr} (1 - d) / (1 - m)$ the stationary point of both steps is the posterior mode. Any
    other optimiser has $s = \text{lr}$ (decoupled weight decay), whose stationary point differs
    from the mode, see `symrazor.lightning`. The learning rates are those that the step has used.
    """
    sizes: dict[int, float] = {}
    for group in optimiser.param_groups:
        size = float(group["lr"])
        if isinstance(optimiser, torch.optim.SGD) and group["momentum"]:
            size *= (1 - group["dampening"]) / (1 - group["momentum"])
        sizes |= {id(parameter): size for parameter in group["params"]}
    return {name: sizes[id(weight)] for name, weight in theta.items()}


def check_optimiser(
    optimiser: Optimizer, theta: Mapping[str, nn.Parameter], prior_in_loss: bool = False
) -> None:
    """Raise ValueError unless an optimiser moves the weights towards their posterior mode.

    It does not if it has a weight decay, which would be a second prior; if it lacks some weights;
    or if it is LBFGS, whose line search requires the prior in the loss.
    """
    names = {id(weight): name for name, weight in theta.items()}
    for group in optimiser.param_groups:
        known = [names.pop(id(p)) for p in group["params"] if id(p) in names]
        if known and group.get("weight_decay", 0):
            raise ValueError(
                f"The optimiser has weight_decay={group['weight_decay']} for {known}, which would "
                f"add to the prior. Use {type(optimiser).__name__}(..., weight_decay=0.0)."
            )
    if names:
        raise ValueError(
            f"The optimiser lacks the trainable weights {sorted(names.values())}. Pass them to the "
            "optimiser, or set requires_grad=False."
        )
    if isinstance(optimiser, torch.optim.LBFGS) and not prior_in_loss:
        raise ValueError("LBFGS needs the prior in the loss, because its line search evaluates it.")
