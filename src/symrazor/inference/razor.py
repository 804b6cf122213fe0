r"""The evidence step, for anybody's training loop.

    razor = Razor(model, "categorical", n_data=len(train))
    for epoch in range(60):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y) + razor.penalty()    # maximum a posteriori
            ...
        razor.step(loader)                                           # evidence, then update eta

Weights follow the gradient of the log posterior; hyperparameters follow the evidence, by one of two
updates.

MacKay's fixed point (default, see updates.py): `inner_steps` damped moves of the log precisions
with the eigenvalues kept, and one of the noise of a Gaussian likelihood.

Adam. Gradient ascent in all log precisions (`inner_steps` steps) and hyperparameters (one step).

Hyperparameters inside the network have no fixed point and always move by Adam.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from symrazor.accelerate.devices import tf32
from symrazor.accelerate.processes import broadcast_, max_over_processes, unwrap
from symrazor.core.errors import DivergenceError
from symrazor.core.evidence import Evidence
from symrazor.core.likelihood import Gaussian, Likelihood, as_likelihood, check_compatible
from symrazor.core.parameters import hyperparameters, weights
from symrazor.curvature.coverage import check_mode, layers, verify
from symrazor.curvature.estimate import Curvature, Loader, collect_curvature
from symrazor.curvature.structures import STRUCTURES
from symrazor.curvature.tape import Input, call, map_tensors
from symrazor.curvature.task import CurvatureTask
from symrazor.curvature.weight_sharing import Layer
from symrazor.inference import updates
from symrazor.inference.laplace import hyper_gradient, laplace_evidence, log_precisions
from symrazor.inference.loading import LoaderRNGState, ReplayableBatches, batches, check_data_count
from symrazor.inference.posterior import Posterior
from symrazor.inference.razor_config import RazorConfig, check_prior_groups, starting_prior
from symrazor.inference.razor_state import (
    State,
    copy_state,
    load_razor_state,
    razor_state,
    remember_razor,
)
from symrazor.layers.relaxed import balance_


class Razor:
    """Prior, evidence and hyperparameter updates of one model.

    Args:
        model: any module whose trainable weights sit in registered layers; the module inside of
            DistributedDataParallel is taken out.
        likelihood: a Likelihood or its name.
        n_data: size of the training set, that of all processes together.
        config: all options; single ones can be given by name, as in
            `Razor(model, "categorical", 1000, estimator="mc", prior_precision=10.0)`.
        **changes: those single options.

    Attributes:
        prior: the precisions, `razor.prior.precisions`.
        likelihood: the likelihood, with its noise if it has one.
        best: the highest evidence seen by `step`, or None.
        best_state: model, prior and likelihood as they were then, or None.
        latest: what `evidence` or `step` found last, or None.
        at_bound: prior groups whose precision touches a bound.

    Raises:
        UnsupportedParameterError: weights without curvature, by name.
        ValueError: options or sizes that make no sense.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood,
        n_data: int,
        config: RazorConfig | None = None,
        **changes: Any,
    ) -> None:
        """Check the model and set up its prior; see the class."""
        if n_data < 1 or n_data != int(n_data):
            raise ValueError(f"expected a whole n_data of at least 1, got {n_data}")
        try:
            self.config = replace(config or RazorConfig(), **changes)
        except TypeError as error:
            known = sorted(RazorConfig.__dataclass_fields__)
            raise ValueError(f"expected options among {known}, got {sorted(changes)}") from error
        self.model = model = unwrap(model)
        self.n_data = n_data
        self.layers: list[Layer] = layers(model)
        first = next(iter(weights(model).values()))
        self.likelihood = as_likelihood(likelihood).to(first.device)
        check_compatible(model, self.likelihood)
        self.prior = starting_prior(model, self.config)
        self.method = self.config.method
        self.generator = torch.Generator().manual_seed(self.config.seed)
        self.training_steps = 0
        self.best: Evidence | None = None
        self.latest: Evidence | None = None
        self.at_bound: list[str] = []
        self.best_state: State | None = None
        self._outputs: int | None = None
        moved = list(self.prior.parameters())
        self.precision_optimiser = torch.optim.Adam(moved, lr=self.config.lr)
        eta = list(self.eta.values())
        self.eta_optimiser = torch.optim.Adam(eta, lr=self.config.lr) if eta else None
        remember_razor(model, self)

    @property
    def eta(self) -> dict[str, nn.Parameter]:
        """Hyperparameters of the network and the likelihood (the precisions are in `prior`)."""
        own = {f"likelihood:{k}": v for k, v in hyperparameters(self.likelihood).items()}
        return {**hyperparameters(self.model), **own}

    # The weights' side of the bargain.

    def penalty(self) -> Tensor:
        r"""$-\log p(\theta) / N$ up to a constant: add it to the mean negative log likelihood."""
        self.training_steps += 1
        terms = [
            (delta.to(theta.dtype) * theta.square()).sum() for theta, delta in self._weighted()
        ]
        return torch.stack(terms).sum() * (0.5 * self.config.temperature / self.n_data)

    @torch.no_grad()
    def add_penalty_gradient_(self) -> None:
        r"""Add $\Delta \theta / N$, the gradient of `penalty`, to each `.grad`; one kernel each."""
        self.training_steps += 1
        named = weights(self.model)
        for theta, delta in zip(named.values(), self.penalty_precisions(), strict=True):
            if theta.grad is None:
                theta.grad = delta * theta
            else:
                theta.grad.addcmul_(theta, delta)

    @torch.no_grad()
    def penalty_precisions(self) -> list[Tensor]:
        r"""Of every weight $T \delta / N$: the gradient of `penalty` divided by the weight."""
        return self.prior.precisions_of(weights(self.model), self.config.temperature / self.n_data)

    @torch.no_grad()
    def shrink_(self, lr: float | Tensor | Mapping[str, float]) -> None:
        r"""The prior's part of a gradient step, taken implicitly: stable for any precision.

        $\theta \leftarrow \theta / (1 + \text{lr}\, \delta / N)$, in place of `penalty`, after the
        optimiser's step. With heavy-ball momentum m pass lr / (1 - m): the same stationary point.
        A mapping weight name -> lr is for optimisers with several (`optimisers.step_sizes`).
        """
        self.training_steps += 1
        named = weights(self.model)
        for (name, theta), delta in zip(named.items(), self.penalty_precisions(), strict=True):
            theta.div_(1 + (lr[name] if isinstance(lr, Mapping) else lr) * delta)

    def _weighted(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        for name, theta in weights(self.model).items():
            yield theta, self.prior.precision_of(name).detach()

    # The evidence.

    @torch.enable_grad()
    def evidence(
        self, loader: Loader, subset: int | None = None, differentiable: bool = False
    ) -> Evidence:
        """The log evidence of the hyperparameters as they are.

        Args:
            loader: (x, y) batches of the training data.
            subset: read only so many data and scale by n_data / subset.
            differentiable: keep the graph, so that `torch.autograd.grad` of `log_evidence` reaches
                the prior precisions and every hyperparameter; holds all batches in memory.
        """
        found = self._collect(loader, subset, keep_graph=differentiable)
        theta = weights(self.model) if differentiable else self._theta()
        now = laplace_evidence(found.prepare(), self.prior, theta)
        _check_finite(now)
        self.latest = now.detach()
        return now if differentiable else self.latest

    @torch.enable_grad()
    def step(self, loader: Loader, subset: int | None = None) -> Evidence:
        """Estimate the evidence, then update the hyperparameters (after the burn-in).

        Factors of which only the product matters (`FFC`, `SFC`) are balanced before, which changes
        nothing but their prior density.

        Returns:
            The estimate, for the hyperparameters as they were before the update.

        Raises:
            ValueError: bad data, a model in the wrong mode, an evidence that is not finite; model
                and hyperparameters are then as they were.
        """
        if self.eta and iter(loader) is loader:
            raise ValueError(
                "expected a loader that can be read twice (the gradient of the hyperparameters "
                "needs a second pass), got a generator; pass a list of batches or a DataLoader"
            )
        if self.eta and subset is not None:  # the second pass must see the same data
            loader = ReplayableBatches(self._batches(loader, subset))
        start, order = self.generator.get_state(), LoaderRNGState(loader)
        if self.training_steps >= self.config.burn_in:
            balance_(self.model, self.prior.group_of)
        found = self._collect(loader, subset).prepare()
        now = laplace_evidence(found, self.prior, self._theta()).detach()
        _check_finite(now)
        self.latest = now
        if self.training_steps < self.config.burn_in:
            return now
        self._keep_if_best(now)
        gradient = {}
        if self.eta:
            self.generator.set_state(start)
            order.restore()
            gradient = self.hyper_gradient(loader, found, subset)
        self._update_precisions(found)
        self._update_hyperparameters(gradient)
        broadcast_([*self.prior.parameters(), *self.eta.values()])  # machines may round otherwise
        self.at_bound = self.prior.clamp_()
        return now

    def hyper_gradient(
        self, loader: Loader, found: Curvature, subset: int | None = None
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Derivatives of fit and of -log_det/2 in `eta`, at the memory of one batch."""
        again = self._batches(loader, subset)
        with tf32(False):
            return hyper_gradient(self._source(), found, self.prior, again, self.eta)

    def posterior(self, loader: Loader, subset: int | None = None) -> Posterior:
        """The Laplace posterior at the present weights."""
        found = self._collect(loader, subset)
        return Posterior(self.model, self.likelihood, self.layers, found, self.prior)

    def _theta(self) -> dict[str, Tensor]:
        return {name: value.detach() for name, value in weights(self.model).items()}

    def _source(self) -> CurvatureTask:
        """In pieces where the network has hyperparameters: their gradient keeps a graph's graph."""
        pieces = self.config.pieces if hyperparameters(self.model) else 1
        return CurvatureTask(
            self.model, self.layers, self.likelihood, self.method, self.generator, pieces
        )

    def _collect(self, loader: Loader, subset: int | None, keep_graph: bool = False) -> Curvature:
        self._look_again()
        expected = self.n_data if subset is None else min(subset, self.n_data)
        with tf32(False):
            found = collect_curvature(
                self._source(),
                self._batches(loader, subset),
                n_data=self.n_data,
                temperature=self.config.temperature,
                keep_graph=keep_graph,
                expected=expected,
            )
        check_data_count(found.n_seen, expected)
        self._outputs = max_over_processes(
            self._outputs or 0
        )  # a process without data has not seen any
        return found

    def _look_again(self) -> None:
        """The model may have changed since the last look: modes, modules, frozen weights."""
        found = layers(self.model)
        check_mode(self.model)
        missing = set(weights(self.model)) ^ set(self.prior.group_of)
        if missing:
            raise ValueError(
                f"expected the trainable weights that this Razor was made with, got a change in "
                f"{sorted(missing)}; make a new Razor"
            )
        same = [a.module is b.module for a, b in zip(found, self.layers, strict=False)]
        if len(found) != len(self.layers) or not all(same):
            self._outputs = None  # verify anew
        self.layers = found

    def _batches(self, loader: Loader, subset: int | None) -> Iterator[tuple[Input, Tensor]]:
        """Batches on the model's device; the very first one is used to verify the model."""
        device = next(iter(weights(self.model).values())).device
        for x, y in batches(loader, device, subset):
            if self._outputs is None:
                self.verify(x)
            yield x, y

    def verify(self, x: Input) -> None:
        """See, on two data, that the layers explain every gradient; done once by itself.

        Args:
            x: inputs, of which the first two are taken, for a model in eval mode.

        Raises:
            UnsupportedParameterError: weights whose gradient is not explained, by name.
            ValueError: outputs that are random or depend on other data; a prior that the structure
                has no determinant for.
        """
        check_mode(self.model)
        if self.prior.diagonal and not STRUCTURES[self.config.structure].supports_weight_precisions:
            check_prior_groups(self.layers)
        with tf32(False):
            verify(self.model, x)
        with torch.no_grad():
            self._outputs = call(self.model, map_tensors(x, lambda part: part[:1])).shape[-1]

    # Updates.

    def _update_precisions(self, found: Curvature) -> None:
        theta = self._theta()
        sizes = updates.squares(self.prior, theta)
        for _ in range(self.config.inner_steps):
            self.precision_optimiser.zero_grad()
            value = found.stacked.logdet(log_precisions(self.prior, found))
            if self.config.update == "adam":
                (0.5 * value + 0.5 * self.prior.scatter(theta)).backward()
                self.precision_optimiser.step()
                self.prior.clamp_()
            else:
                value.backward()
                updates.precisions_(self.prior, sizes, self.config.damping)

    def _update_hyperparameters(self, gradient: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        if self.eta_optimiser is None or not gradient:
            return
        noise = self.likelihood.noise.raw if isinstance(self.likelihood, Gaussian) else None
        temperature, damping = self.config.temperature, self.config.damping
        self.eta_optimiser.zero_grad()
        for name, parameter in self.eta.items():
            fit, occam = gradient[name]
            if parameter is noise and self.config.update == "mackay":
                targets = self.n_data * (self._outputs or 1) / parameter.numel()
                updates.noise_(parameter, fit, occam, targets, temperature, damping)
            else:
                parameter.grad = -(fit + occam).to(parameter)
        self.eta_optimiser.step()
        self.eta_optimiser.zero_grad()

    # State.

    def _keep_if_best(self, now: Evidence) -> None:
        if self.best is None or now.log_evidence > self.best.log_evidence:
            self.best = now
            self.best_state = {
                "model": copy_state(self.model.state_dict()),
                "prior": copy_state(self.prior.state_dict()),
                "likelihood": copy_state(self.likelihood.state_dict()),
            }

    def restore_best(self) -> Evidence:
        """Put model, prior and likelihood back to where the evidence was highest.

        Raises:
            ValueError: if `step` has not been past the burn-in yet.
        """
        if self.best is None or self.best_state is None:
            raise ValueError("expected at least one step() after the burn-in, got none")
        self.model.load_state_dict(self.best_state["model"])
        self.prior.load_state_dict(self.best_state["prior"])
        self.likelihood.load_state_dict(self.best_state["likelihood"])
        self.latest = self.best
        return self.best

    def state_dict(self) -> State:
        """All that is needed to go on, apart from the model: tensors, numbers, nested dicts."""
        return razor_state(self)

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict()`.

        Raises:
            ValueError: a state of another data set or another model; nothing is changed then.
        """
        load_razor_state(self, state)


def _check_finite(now: Evidence) -> None:
    if not math.isfinite(float(now.log_evidence.detach())):
        raise DivergenceError(f"expected a finite evidence, got {now}; have the weights diverged?")
