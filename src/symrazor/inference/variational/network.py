r"""Train any network with Gaussian posteriors over its weights, by the evidence lower bound.

    vi = Variational(model, "categorical", n_data=len(train))
    optimiser = torch.optim.Adam(vi.parameters(), lr=1e-3)
    for x, y in loader:
        loss = -vi.bound(x, y).per_datum                 # stochastic, unbiased
        ...
    vi.evidence(loader)                                  # the bound, of all data
    vi.predict(x)                                        # the posterior predictive

The weights of the model are the means of the posteriors, so the model itself predicts with the
mean. Hyperparameters (`Hyper`) in the model and the noise follow the gradient of the bound. Prior
precisions do, too, or are set to their optimum in closed form,

$$ \delta_g^{-1} = v^*_g = \frac{\sum_{l \in g} \mathrm{tr}\,\Sigma_l + m_l^\top m_l}
   {\sum_{l \in g} D_l} , $$

where the bound and its gradient are those of the collapsed divergence, because the bound is
stationary in $v$ there.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.core.likelihood import Gaussian, Likelihood, as_likelihood
from symrazor.core.parameters import Hyper, hyperparameters_of, weights
from symrazor.core.prior import GaussianPrior, PriorGroups
from symrazor.data.batches import Input, batches, check_data_count, map_tensors
from symrazor.inference.evidence import Evidence
from symrazor.inference.posterior import Prediction, mixture_prediction
from symrazor.inference.variational.bound import variational_evidence
from symrazor.inference.variational.config import VariationalConfig, assign_posteriors
from symrazor.inference.variational.gaussian import GaussianPosterior, Point
from symrazor.inference.variational.local_reparameterisation import (
    RowNoise,
    local_layers,
    run_with_noise,
)
from symrazor.inference.variational.permutations import hidden_units, permutation_gain
from symrazor.layers.relaxed import path_groups


class WeightLayer(NamedTuple):
    """A module and the names of its weight tensors."""

    name: str
    tensors: list[str]


class Variational(nn.Module):
    """A network with Gaussian posteriors over its weights.

    Args:
        model: any module; its weights become the means and are trained in place.
        likelihood: a Likelihood or its name.
        n_data: size of the training set.
        config: all options; single options can be given by name, as in
            `Variational(model, "gaussian", 100, posterior={"head.*": "full", "*": "point"})`.
        **changes: single options.

    Attributes:
        prior: the prior; `vi.prior.precisions` are its precisions.
        likelihood: the likelihood, with its noise if it has one.
        at_bound: prior groups whose precision is at a bound.

    Raises:
        ValueError: an option matches no parameter, or a size is invalid.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood,
        n_data: int,
        config: VariationalConfig | None = None,
        **changes: Any,
    ) -> None:
        super().__init__()
        if n_data < 1 or n_data != int(n_data):
            raise ValueError(f"n_data must be a positive integer, got {n_data}.")
        self.config = (config or VariationalConfig()).change(**changes)
        theta = weights(model)
        if not theta:
            raise ValueError("The model has no trainable weights.")
        self.model, self.n_data = model, n_data
        self.names = list(theta)
        self._posteriors = nn.ModuleList(assign_posteriors(theta, self.config).values())
        self.likelihood = as_likelihood(likelihood).to(self.device)
        self.prior = self._make_prior()
        self.prior.requires_grad_(self.config.prior_update == "gradient")
        if isinstance(self.likelihood, Gaussian):
            self.likelihood.requires_grad_(self.config.noise_update == "gradient")
        self.generator = torch.Generator(self.device).manual_seed(self.config.seed)
        self.at_bound: list[str] = []
        self.steps = 0
        self._local: list[str] | None = None if self.config.local else []

    def _make_prior(self) -> GaussianPrior:
        theta = {n: q.mean for n, q in self.posteriors.items() if not isinstance(q, Point)}
        groups: PriorGroups = self.config.prior_groups
        if groups == "path":
            paths = path_groups(self.model).items()
            members = {group: [n for n in names if n in theta] for group, names in paths}
            groups = {group: names for group, names in members.items() if names}
        if not theta:  # nothing to integrate: the prior does not enter the bound
            theta, groups = {n: q.mean for n, q in self.posteriors.items()}, "tensor"
        return GaussianPrior(theta, self.config.prior_precision, groups)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self._posteriors.parameters()).device

    @property
    def posteriors(self) -> dict[str, GaussianPosterior]:
        """Tensor name -> posterior."""
        pairs = zip(self.names, self._posteriors, strict=True)
        return {name: q for name, q in pairs if isinstance(q, GaussianPosterior)}

    @property
    def eta(self) -> dict[str, nn.Parameter]:
        """Hyperparameters of the network and the likelihood that follow the gradient."""
        return hyperparameters_of(self.model, self.likelihood)

    @property
    def layers(self) -> list[WeightLayer]:
        """Modules with weights, in order."""
        tensors_of: dict[str, list[str]] = {}
        for name in self.names:
            tensors_of.setdefault(name.rpartition(".")[0], []).append(name)
        return [WeightLayer(module, tensors) for module, tensors in tensors_of.items()]

    def groups(self, lr: float, hyper_lr: float) -> list[dict[str, Any]]:
        """Return optimiser parameter groups: weights and covariances, and all hyperparameters."""
        eta = [*self.eta.values(), *self.prior.parameters()]
        eta = [parameter for parameter in eta if parameter.requires_grad]
        in_eta = {id(parameter) for parameter in eta}
        posterior = [p for p in self.parameters() if p.requires_grad and id(p) not in in_eta]
        groups: list[dict[str, Any]] = [{"params": posterior, "lr": lr}]
        return [*groups, {"params": eta, "lr": hyper_lr}] if eta else groups

    # Draws.

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs at the mean of the posterior."""
        output: Tensor = self.model(x)
        return output

    def outputs(self, x: Input, draws: int = 1, antithetic: bool = False) -> Float[Tensor, "s n k"]:
        """Return outputs under samples of the weights, in pairs if antithetic; differentiable."""
        if draws < 1:
            raise ValueError(f"draws must be at least 1, got {draws}.")
        if self._local is None:
            self._local = local_layers(self.model, x, self.posteriors)
        owners = set(self._local)
        local, drawn = {}, {}
        for name, q in self.posteriors.items():
            if isinstance(q, Point):
                continue
            if name.rpartition(".")[0] in owners:
                local[name] = q
            else:
                drawn[name] = q.sample(draws, self.generator, antithetic)
        like = self.posteriors[self.names[0]].mean
        if not drawn:  # all samples in one pass
            noise = RowNoise(self.generator, like, draws, antithetic)
            repeated = map_tensors(x, lambda part: part.repeat(draws, *[1] * (part.dim() - 1)))
            f = run_with_noise(self.model, repeated, {}, local, noise)
            return f.reshape(draws, -1, *f.shape[1:])
        fresh = -(-draws // 2) if antithetic else draws
        sources = [RowNoise(self.generator, like) for _ in range(fresh)]
        outputs = []
        for s in range(draws):
            draw = sources[s] if s < fresh else sources[s - fresh].mirrored()
            sample = {name: value[s] for name, value in drawn.items()}
            outputs.append(run_with_noise(self.model, x, sample, local, draw))
        return torch.stack(outputs)

    @property
    def local(self) -> list[str]:
        """Layers with local reparameterisation; known after the first sample."""
        return list(self._local or [])

    @torch.no_grad()
    def predict(self, x: Input, draws: int = 32) -> Prediction:
        """Return the posterior predictive: the likelihood's mean, averaged over weight samples."""
        f = self.outputs(x, draws, antithetic=draws > 1)
        means = self.likelihood.mean(f.flatten(0, 1)).unflatten(0, (draws, -1))
        return mixture_prediction(self.likelihood, means)

    # The bound.

    def bound(self, x: Input, y: Tensor) -> Evidence:
        """Return an unbiased estimate of the bound from a mini-batch, differentiable.

        The estimate is scaled to all data. Precisions and noise with closed-form updates are
        updated first; `evidence` updates nothing.
        """
        f = self.outputs(x, self.config.draws, self.config.antithetic and self.config.draws > 1)
        self.likelihood.check(f[0], y)
        self.steps += 1
        self._update_prior()
        self._update_noise(f, y)
        fit = -self._nll(f, y).mean() * self.n_data
        return variational_evidence(fit, self.posteriors, self.prior, self.n_data, effective=False)

    def evidence(
        self,
        loader: Iterable[Any],
        draws: int = 16,
        differentiable: bool = False,
        hidden: Sequence[tuple[str, str]] = (),
    ) -> Evidence:
        """Return the bound of all data, without any update.

        Args:
            loader: (x, y) batches of the training data.
            draws: weight samples for each batch, in pairs.
            differentiable: keep the graph of all batches.
            hidden: pairs of linear layers between which the units may be permuted, for the bound of
                the posterior that covers all permutations (see `permutations`).

        Raises:
            ValueError: the loader has another number of data, or a layer has no posterior.
        """
        with torch.set_grad_enabled(differentiable):
            terms, n_read = [], 0
            for x, y in batches(loader, self.device):
                f = self.outputs(x, draws, antithetic=draws > 1)
                self.likelihood.check(f[0], y)
                terms.append(-self._nll(f, y).mean(0).sum())
                n_read += len(y)
            check_data_count(n_read, self.n_data)
            fit = torch.stack(terms).sum()
            evidence = variational_evidence(fit, self.posteriors, self.prior, self.n_data)
        if hidden:
            gain = self._permutation_gain(hidden)
            evidence = replace(evidence, log_det=evidence.log_det - 2 * gain)
        if not math.isfinite(float(evidence.log_evidence.detach())):
            raise ValueError(
                f"The bound is not finite ({evidence}). The weights may have diverged: lower the "
                "learning rate."
            )
        return evidence

    def _permutation_gain(self, hidden: Sequence[tuple[str, str]]) -> Tensor:
        """Return the nats gained by covering all permutations of the units of hidden layers."""
        if self.prior.diagonal:
            raise ValueError(
                "hidden=... needs a prior that is the same for all hidden units, which "
                "prior_groups='diagonal' is not. Use hidden=() or other groups."
            )
        units = [hidden_units(self.posteriors, *pair) for pair in hidden]
        gains = [permutation_gain(part, generator=self.generator) for part in units]
        return torch.stack(gains).sum()

    def _nll(self, f: Float[Tensor, "s n k"], y: Tensor) -> Float[Tensor, "s n"]:
        return torch.stack([self.likelihood.nll(outputs, y).double() for outputs in f])

    # Closed-form updates.

    @torch.no_grad()
    def _update_prior(self) -> None:
        rate = {"collapsed": 1.0, "closed-form": self.config.damping}.get(self.config.prior_update)
        if rate is not None and self.steps > self.config.burn_in:
            for group, best in best_variances(self.prior, self.posteriors).items():
                log_delta = self.prior.log_precision[self.prior.names.index(group)]
                log_delta.lerp_(-best.log(), rate)
        self.at_bound = self.prior.clamp_()

    @torch.no_grad()
    def _update_noise(self, f: Float[Tensor, "s n k"], y: Tensor) -> None:
        if not isinstance(self.likelihood, Gaussian) or self.config.noise_update != "closed-form":
            return
        noise: Hyper = self.likelihood.noise
        squares = (f - y.reshape(f.shape[1:])).double().square().mean((0, 1))
        squares = squares if noise.value.dim() else squares.mean()
        tiny = torch.finfo(torch.float64).tiny
        noise.value = noise.value.square().lerp(squares, self.config.damping).clamp_min(tiny).sqrt()


def best_variances(
    prior: GaussianPrior, posteriors: dict[str, GaussianPosterior]
) -> dict[str, Tensor]:
    r"""Return prior group -> $v^* = \sum_l (\mathrm{tr}\,\Sigma_l + m_l^\top m_l) / \sum_l D_l$.

    For `groups="diagonal"` the second moment of every single weight.
    """
    variances = {}
    for group in prior.names:
        members = [posteriors[name] for name in prior.members(group)]
        if all(isinstance(q, Point) for q in members):
            continue
        if prior.diagonal:
            variances[group] = (members[0].variance() + members[0].mean.square()).double()
        else:
            total = torch.stack([q.second_moment() for q in members]).sum()
            variances[group] = total / sum(q.size for q in members)
    return variances
