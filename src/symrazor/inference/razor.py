# Over 400 lines: the one class of the user's own training loop.
r"""Estimate the evidence of a model and update its hyperparameters, in any training loop.

    razor = Razor(model, "categorical", n_data=len(train))
    for epoch in range(60):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y) + razor.penalty()    # maximum a posteriori
            ...
        razor.step(loader)                                           # evidence, then update

Weights follow the gradient of the log posterior. Hyperparameters follow the evidence, by one of two
updates:

- "mackay" (default): `inner_steps` damped fixed-point updates of the prior precisions, with the
  eigenvalues kept, and one of the noise of a Gaussian likelihood.
- "adam": gradient ascent in the log precisions (`inner_steps` steps) and in all other
  hyperparameters (one step).

Hyperparameters inside the network have no fixed point and always move by Adam.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from symrazor.accelerate.devices import tf32
from symrazor.accelerate.processes import broadcast_, max_over_processes, unwrap
from symrazor.core.likelihood import Likelihood, as_likelihood, check_compatible
from symrazor.core.parameters import copy_state, hyperparameters, hyperparameters_of, weights
from symrazor.core.prior import Prior
from symrazor.core.validation import check_positive_integer, replace_options
from symrazor.curvature.coverage import check_mode, layers, verify
from symrazor.curvature.estimate import AUTO, Curvature, Method, collect_curvature
from symrazor.curvature.task import STRUCTURES, CurvatureTask
from symrazor.curvature.weight_sharing import Layer
from symrazor.data.batches import (
    Input,
    Loader,
    LoaderRNGState,
    RepeatedBatches,
    ReplayableBatches,
    batches,
    call,
    check_data_count,
    map_tensors,
)
from symrazor.inference.evidence import (
    MAX_READING_PRODUCTS,
    Evidence,
    RazorConfig,
    check_no_kronecker,
    exact_products,
    laplace_evidence,
    log_curvatures,
    remember_razor,
    resolve,
    starting_prior,
    tightest,
)
from symrazor.inference.hyper_updates import hyper_gradient, update_hyperparameters_
from symrazor.inference.posterior import Posterior
from symrazor.inference.razor_state import State, load_razor_state, razor_state
from symrazor.layers.relaxed import balance_


class Razor:
    """Prior, evidence and hyperparameter updates of one model.

    Args:
        model: a module whose trainable weights sit in registered layers; DistributedDataParallel is
            unwrapped.
        likelihood: a Likelihood or its name.
        n_data: size of the training set, over all processes.
        config: all options; single options can be given by name, as in
            `Razor(model, "categorical", 1000, estimator="mc", prior_precision=10.0)`.
        prior: a prior of another family, in place of the Gaussian one that `prior_precision`,
            `free_precision` and `prior_groups` define.
        **changes: single options.

    Attributes:
        prior: the prior; `razor.prior.precisions` are its precisions.
        likelihood: the likelihood, with its noise if it has one.
        best: the highest evidence that `step` has found after its first update, or None.
        best_state: model, prior and likelihood at the highest evidence, or None.
        is_updated: whether `step` has updated the hyperparameters.
        latest: the latest result of `evidence` or `step`, or None.
        at_bound: prior groups whose precision is at a bound.

    Raises:
        UnsupportedParameterError: some weights have no curvature.
        ValueError: an option or a size is invalid.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood,
        n_data: int,
        config: RazorConfig | None = None,
        prior: Prior | None = None,
        **changes: Any,
    ) -> None:
        self.n_data = check_positive_integer("n_data", n_data)
        ignored = {"prior_precision", "free_precision", "prior_groups"} & set(changes)
        if prior is not None and ignored:
            names = ", ".join(sorted(ignored))
            raise ValueError(f"{names} has no effect together with prior=. Pass one or the other.")
        self.config = replace_options(config or RazorConfig(), changes)
        self.model = model = unwrap(model)
        self.layers: list[Layer] = layers(model)
        device = next(iter(weights(model).values())).device
        self.likelihood = as_likelihood(likelihood).to(device)
        check_compatible(model, self.likelihood)
        self.prior = starting_prior(model, self.config) if prior is None else prior.to(device)
        self.method = self.config.method
        self.generator = torch.Generator().manual_seed(self.config.seed)
        self.training_steps = 0
        self.is_updated = False
        self.best: Evidence | None = None
        self.latest: Evidence | None = None
        self.at_bound: list[str] = []
        self.best_state: State | None = None
        self._n_outputs: int | None = None  # None until the model has been verified
        self._n_columns = 1
        self.precision_optimiser = torch.optim.Adam(self.prior.parameters(), lr=self.config.lr)
        eta = list(self.eta.values())
        self.eta_optimiser = torch.optim.Adam(eta, lr=self.config.lr) if eta else None
        remember_razor(model, self)

    def __repr__(self) -> str:
        evidence = "" if self.latest is None else f",\n      {self.latest!r}"
        names = f"{type(self.model).__name__}, {type(self.likelihood).__name__}"
        return f"Razor({names}, n_data={self.n_data}, {self.prior!r}{evidence})"

    @property
    def eta(self) -> dict[str, nn.Parameter]:
        """Hyperparameters of the network and the likelihood, without those of `prior`."""
        return hyperparameters_of(self.model, self.likelihood)

    # The prior in the training of the weights.

    @property
    def _penalty_scale(self) -> float:
        return self.config.temperature / self.n_data

    def penalty(self) -> Tensor:
        r"""Return $-\log p(\theta) / N$ up to a constant, to add to the mean nll."""
        self.training_steps += 1
        return self.prior.penalty(weights(self.model)) * self._penalty_scale

    def add_penalty_gradient_(self) -> None:
        r"""Add the gradient of `penalty`, $\Delta \theta / N$, to each `.grad`."""
        self.training_steps += 1
        self.prior.add_penalty_gradient_(weights(self.model), self._penalty_scale)

    def weight_decays(self) -> list[Tensor]:
        r"""Return $T \delta / N$ of every tensor: the gradient of `penalty` over the weight."""
        return self.prior.weight_decays(weights(self.model), self._penalty_scale)

    def shrink_(self, lr: float | Tensor | Mapping[str, float]) -> None:
        r"""Apply the prior by an implicit gradient step, which is stable for any precision.

        $\theta \leftarrow \theta / (1 + \text{lr}\, \delta / N)$ for a Gaussian prior. Call it in
        place of `penalty`, after the optimiser's step. With heavy-ball momentum m pass lr / (1 - m)
        for the same stationary point.

        Args:
            lr: learning rate, or weight name -> learning rate for optimisers with several.
        """
        self.training_steps += 1
        theta = weights(self.model)
        step_sizes = lr if isinstance(lr, Mapping) else dict.fromkeys(theta, lr)
        self.prior.shrink_(theta, self._penalty_scale, step_sizes)

    # The evidence.

    @torch.enable_grad()
    def evidence(
        self,
        loader: Loader,
        subset: int | None = None,
        differentiable: bool = False,
        structure: str | None = None,
    ) -> Evidence:
        """Return the log evidence of the current hyperparameters.

        Args:
            loader: (x, y) batches of the training data.
            subset: read only this number of samples and scale by n_data / subset.
            differentiable: keep the graph, so that `torch.autograd.grad` of `log_evidence` reaches
                the prior and every hyperparameter; holds all batches in memory.
            structure: structure of the curvature for this estimate; by default that of the options.
        """
        curvature = self._curvature(loader, subset, differentiable, structure)
        theta = weights(self.model) if differentiable else self._theta()
        evidence = laplace_evidence(curvature.prepare(), self.prior, theta)
        evidence.check_finite()
        self.latest = evidence.detach()
        return evidence if differentiable else self.latest

    @torch.enable_grad()
    def step(self, loader: Loader, subset: int | None = None) -> Evidence:
        """Estimate the evidence, then update the hyperparameters (after the burn-in).

        The factors of `FFC` and `SFC` paths are balanced first. This changes their prior density,
        but not their product.

        Returns:
            The evidence of the hyperparameters before the update.

        Raises:
            ValueError: bad data, a model in the wrong mode, or an evidence that is not finite;
                model and hyperparameters are then unchanged.
        """
        if self.eta and iter(loader) is loader:
            raise ValueError(
                "The loader is a generator, which can be read only once. The gradient of the "
                "hyperparameters needs a second pass: pass a list of batches or a DataLoader."
            )
        if self.eta and subset is not None:  # the second pass must read the same data
            loader = ReplayableBatches(self._batches(loader, subset))
        probe_state, loader_state = self.generator.get_state(), LoaderRNGState(loader)
        past_burn_in = self.training_steps >= self.config.burn_in
        if past_burn_in:
            balance_(self.model, self.prior.group_of)
        curvature = self._curvature(loader, subset).prepare()
        evidence = laplace_evidence(curvature, self.prior, self._theta()).detach()
        evidence.check_finite()
        self.latest = evidence
        if not past_burn_in:
            return evidence
        if self.is_updated:  # initial precisions are not a result
            self._keep_if_best(evidence)
        gradient = {}
        if self.eta:
            self.generator.set_state(probe_state)
            loader_state.restore()
            gradient = self.hyper_gradient(loader, curvature, subset)
        self._update_prior(curvature)
        if gradient:
            update_hyperparameters_(self, gradient, self._n_outputs or 1)
        self.is_updated = True
        # Processes on different machines may round differently.
        broadcast_([*self.prior.parameters(), *self.eta.values()])
        self.at_bound = self.prior.clamp_()
        return evidence

    def hyper_gradient(
        self, loader: Loader, curvature: Curvature, subset: int | None = None
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Return derivatives of fit and -log_det/2 in `eta`, at the memory of one batch."""
        log_curvature = log_curvatures(self.prior, curvature, self._theta())
        data = self._batches(loader, subset)
        with tf32(self.config.tf32):
            task = self._task(curvature.method)
            return hyper_gradient(task, curvature, log_curvature, data, self.eta)

    def posterior(self, loader: Loader, subset: int | None = None) -> Posterior:
        """Return the Laplace posterior at the current weights."""
        curvature = self._curvature(loader, subset)
        return Posterior(self.model, self.likelihood, self.layers, curvature, self.prior)

    def _theta(self) -> dict[str, Tensor]:
        return {name: value.detach() for name, value in weights(self.model).items()}

    def _task(self, method: Method | None = None) -> CurvatureTask:
        # A gradient in hyperparameters of the network differentiates a backward pass, which takes
        # more memory than a training step: process a batch in pieces.
        pieces = self.config.pieces if hyperparameters(self.model) else 1
        method = method or self.method
        arguments = (self.model, self.layers, self.likelihood, method, self.generator, pieces)
        return CurvatureTask(*arguments, memory=self.config.memory)

    def _curvature(
        self,
        loader: Loader,
        subset: int | None,
        keep_graph: bool = False,
        structure: str | None = None,
    ) -> Curvature:
        """Return the curvature; for "auto", the exact one or the tighter of two lower bounds."""
        self._refresh_layers()
        method = self.method if structure is None else replace(self.method, structure=structure)
        methods = [method]
        if method.structure == AUTO:
            if iter(loader) is loader:  # may be read several times
                loader = ReplayableBatches(self._batches(loader, subset))
            methods = self._automatic(method, loader, subset)
        estimates = [self._estimate(m, loader, subset, keep_graph) for m in methods]
        return tightest(estimates, self.prior, self._theta())

    def is_exact_affordable(self) -> bool:
        """Return whether "auto" stands for the exact curvature, at a cost of a few seconds."""
        n_weights = sum(value.numel() for value in weights(self.model).values())
        n_rows = self.n_data * max_over_processes(self._n_columns)
        return exact_products(self.method, n_weights, n_rows) <= MAX_READING_PRODUCTS

    def _automatic(self, method: Method, loader: Loader, subset: int | None) -> list[Method]:
        """Return the methods that "auto" stands for."""
        if self._n_outputs is None:
            next(iter(self._batches(loader, subset)), None)  # runs the model once
        n_weights = sum(value.numel() for value in weights(self.model).values())
        n_columns = max_over_processes(self._n_columns)
        return resolve(method, n_weights, self._n_read(subset), n_columns)

    def _estimate(
        self, method: Method, loader: Loader, subset: int | None, keep_graph: bool
    ) -> Curvature:
        data: Loader = self._batches(loader, subset)
        if STRUCTURES[method.structure].passes > 1 and iter(loader) is not loader:
            data = RepeatedBatches(partial(self._batches, loader, subset))
        expected = self._n_read(subset)
        with tf32(self.config.tf32):
            curvature = collect_curvature(
                self._task(method),
                data,
                n_data=self.n_data,
                temperature=self.config.temperature,
                keep_graph=keep_graph,
                expected=expected,
            )
        check_data_count(curvature.n_seen, expected)
        # A process without data has not seen any outputs.
        self._n_outputs = max_over_processes(self._n_outputs or 0)
        return curvature

    def _n_read(self, subset: int | None) -> int:
        return self.n_data if subset is None else min(subset, self.n_data)

    def _refresh_layers(self) -> None:
        """Check the model again: modes, modules and frozen weights may have changed."""
        present = layers(self.model)
        check_mode(self.model)
        changed = set(weights(self.model)) ^ set(self.prior.group_of)
        if changed:
            raise ValueError(
                f"The trainable weights have changed since this Razor was made: "
                f"{', '.join(sorted(changed))}. Make a new Razor."
            )
        same = [a.module is b.module for a, b in zip(present, self.layers, strict=False)]
        if len(present) != len(self.layers) or not all(same):
            self._n_outputs = None  # verify again
        self.layers = present

    def _batches(self, loader: Loader, subset: int | None) -> Iterator[tuple[Input, Tensor]]:
        """Yield batches on the model's device; verify the model with the first batch."""
        weight = next(iter(weights(self.model).values()))
        for x, y in batches(loader, weight.device, subset, weight.dtype):
            if self._n_outputs is None:
                self.verify(x)
            yield x, y

    def verify(self, x: Input) -> None:
        """Check on the first two inputs, in eval mode, that the layers explain every gradient.

        Called once automatically. Raises UnsupportedParameterError for weights that are not
        explained, and ValueError if outputs are random or depend on other data, or if the structure
        has no determinant for this prior.
        """
        check_mode(self.model)
        structure = STRUCTURES.get(self.config.structure)  # None for "auto"
        if structure and self.prior.diagonal and not structure.supports_weight_precisions:
            check_no_kronecker(self.layers)
        with tf32(False):
            verify(self.model, x)
        with torch.no_grad():
            f = call(self.model, map_tensors(x, lambda part: part[:1]))
        self._n_outputs, self._n_columns = f.numel(), self.likelihood.n_columns(f)

    # Updates.

    def _update_prior(self, curvature: Curvature) -> None:
        theta, log_det = self._theta(), curvature.stacked.logdet
        steps, damping = self.config.inner_steps, self.config.damping
        if self.config.update == "mackay":
            self.prior.fixed_point_(log_det, theta, steps, damping)
            return
        for _ in range(steps):
            self.precision_optimiser.zero_grad()
            value = log_det(self.prior.log_curvature(theta))
            (0.5 * value - self.prior.evidence_term(theta)).backward()
            self.precision_optimiser.step()
            self.prior.clamp_()

    # State.

    def _keep_if_best(self, evidence: Evidence) -> None:
        if self.best is None or evidence.log_evidence > self.best.log_evidence:
            names = ("model", "prior", "likelihood")
            self.best = evidence
            self.best_state = {name: copy_state(getattr(self, name).state_dict()) for name in names}

    def restore_best(self) -> Evidence:
        """Restore model, prior and likelihood of the highest evidence that `step` has found."""
        if self.best is None or self.best_state is None:
            raise ValueError("There is no best state yet: call step() twice after the burn-in.")
        for name, state in self.best_state.items():
            getattr(self, name).load_state_dict(state)
        self.latest = self.best
        return self.best

    def state_dict(self) -> State:
        """Return all state but the model's: tensors, numbers and nested dicts."""
        return razor_state(self)

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict()` of the same model and data set."""
        load_razor_state(self, state)
