r"""Any network with Gaussian posteriors over its weights, and its evidence lower bound.

    vi = Variational(model, "categorical", n_data=len(train))
    optimiser = torch.optim.Adam(vi.parameters(), lr=1e-3)
    for x, y in loader:
        loss = -vi.bound(x, y).per_datum                 # stochastic, unbiased
        ...
    vi.evidence(loader)                                  # the bound, of all data
    vi.predict(x)                                        # the posterior predictive

The weights of the model are the means of the posteriors: the model itself, as it is, predicts with
the mean. Hyperparameters (`Hyper`) in the model and the noise follow the gradient of the bound.
Prior precisions do, too, or sit at their optimum in closed form,

$$ \delta_g^{-1} = v^*_g = \frac{\sum_{l \in g} \mathrm{tr}\,\Sigma_l + m_l^\top m_l}
   {\sum_{l \in g} D_l} , $$

where the bound is that of the collapsed divergence, and has its gradient, for it is stationary in
$v$ there.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.core.evidence import Evidence
from symrazor.core.likelihood import Gaussian, Likelihood, as_likelihood
from symrazor.core.parameters import Hyper, hyperparameters, weights
from symrazor.core.prior import Groups, Prior
from symrazor.curvature.tape import Input, map_tensors
from symrazor.inference.loading import batches
from symrazor.inference.posterior import Prediction, mixture_prediction
from symrazor.inference.variational.assignment import assign
from symrazor.inference.variational.bound import variational_evidence
from symrazor.inference.variational.config import VariationalConfig
from symrazor.inference.variational.gaussian import GaussianPosterior, Point
from symrazor.inference.variational.local_reparameterisation import RowNoise, local_layers, run
from symrazor.inference.variational.permutations import hidden_units, permutation_gain
from symrazor.layers.relaxed import path_groups


class WeightLayer(NamedTuple):
    """A module and the names of its weight tensors."""

    name: str
    tensors: list[str]


class Variational(nn.Module):
    """A network with posteriors over its weights; see the module's text.

    Args:
        model: any module; its weights become the means, and are trained in place.
        likelihood: a Likelihood or its name.
        n_data: size of the training set.
        config: all options; single ones can be given by name, as in
            `Variational(model, "gaussian", 100, posterior={"head.*": "full", "*": "point"})`.
        **changes: those single options.

    Attributes:
        prior: the precisions, `vi.prior.precisions`; None if all weights are point estimates.
        likelihood: with its noise if it has one.
        at_bound: prior groups whose precision touches a bound.

    Raises:
        ValueError: options that fit no parameter, or sizes that make no sense.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood,
        n_data: int,
        config: VariationalConfig | None = None,
        **changes: Any,
    ) -> None:
        """Give every weight its posterior and its prior; see the class."""
        super().__init__()
        if n_data < 1 or n_data != int(n_data):
            raise ValueError(f"expected a whole n_data of at least 1, got {n_data}")
        self.config = (config or VariationalConfig()).change(**changes)
        theta = weights(model)
        if not theta:
            raise ValueError("expected at least one trainable weight, got a model without any")
        self.model, self.n_data = model, n_data
        self.names = list(theta)
        found = assign(theta, self.config.posterior, self.config.scale)
        self._posteriors = nn.ModuleList(found.values())
        self.likelihood = as_likelihood(likelihood).to(self.device)
        self.prior = self._make_prior()
        self._share_the_work()
        self.generator = torch.Generator(self.device).manual_seed(self.config.seed)
        self.at_bound: list[str] = []
        self.steps = 0
        self._local: list[str] | None = None if self.config.local else []

    def _make_prior(self) -> Prior:
        own = {n: q.mean for n, q in self.posteriors.items() if not isinstance(q, Point)}
        groups: Groups = self.config.prior_groups
        if groups == "path":
            members = path_groups(self.model)
            kept = {g: [n for n in names if n in own] for g, names in members.items()}
            groups = {g: names for g, names in kept.items() if names}
        if not own:  # nothing to integrate: a prior that nobody pays
            own, groups = {n: q.mean for n, q in self.posteriors.items()}, "tensor"
        return Prior(own, self.config.prior_precision, groups)

    def _share_the_work(self) -> None:
        """Only what moves by its gradient is a parameter to an optimiser."""
        self.prior.requires_grad_(self.config.prior_update == "gradient")
        if isinstance(self.likelihood, Gaussian):
            self.likelihood.requires_grad_(self.config.noise_update == "gradient")

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self._posteriors.parameters()).device

    @property
    def posteriors(self) -> dict[str, GaussianPosterior]:
        """Tensor name -> its posterior."""
        pairs = zip(self.names, self._posteriors, strict=True)
        return {name: q for name, q in pairs if isinstance(q, GaussianPosterior)}

    @property
    def eta(self) -> dict[str, nn.Parameter]:
        """Hyperparameters of the network and the likelihood that follow the gradient."""
        own = {f"likelihood:{k}": v for k, v in hyperparameters(self.likelihood).items()}
        return {**hyperparameters(self.model), **own}

    @property
    def layers(self) -> list[WeightLayer]:
        """Modules with weights of their own, in order."""
        found: dict[str, list[str]] = {}
        for name in self.names:
            found.setdefault(name.rpartition(".")[0], []).append(name)
        return [WeightLayer(owner, tensors) for owner, tensors in found.items()]

    def groups(self, lr: float, hyper_lr: float) -> list[dict[str, Any]]:
        """Parameter groups of an optimiser: weights and covariances, and all hyperparameters."""
        eta = [*self.eta.values(), *self.prior.parameters()]
        eta = [parameter for parameter in eta if parameter.requires_grad]
        slow = {id(parameter) for parameter in eta}
        rest = [p for p in self.parameters() if p.requires_grad and id(p) not in slow]
        found: list[dict[str, Any]] = [{"params": rest, "lr": lr}]
        return [*found, {"params": eta, "lr": hyper_lr}] if eta else found

    # Draws.

    def forward(self, x: Tensor) -> Tensor:
        """Outputs at the mean of the posterior."""
        output: Tensor = self.model(x)
        return output

    def outputs(self, x: Input, draws: int = 1, antithetic: bool = False) -> Float[Tensor, "s n k"]:
        """Outputs of the network under draws of its weights, differentiable.

        Args:
            x: inputs.
            draws: how many.
            antithetic: in pairs of opposite deviation.

        Raises:
            ValueError: no draws.
        """
        if draws < 1:
            raise ValueError(f"expected at least 1 draw, got {draws}")
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
        if not drawn:  # all draws in one pass
            noise = RowNoise(self.generator, like, draws, antithetic)
            again = map_tensors(x, lambda part: part.repeat(draws, *[1] * (part.dim() - 1)))
            f = run(self.model, again, {}, local, noise)
            return f.reshape(draws, -1, *f.shape[1:])
        fresh = -(-draws // 2) if antithetic else draws
        sources = [RowNoise(self.generator, like) for _ in range(fresh)]
        found = []
        for s in range(draws):
            draw = sources[s] if s < fresh else sources[s - fresh].mirrored()
            own = {name: value[s] for name, value in drawn.items()}
            found.append(run(self.model, x, own, local, draw))
        return torch.stack(found)

    @property
    def local(self) -> list[str]:
        """Layers with local reparameterisation; known after the first draw."""
        return list(self._local or [])

    @torch.no_grad()
    def predict(self, x: Input, draws: int = 32) -> Prediction:
        """The posterior predictive: the likelihood's mean, averaged over draws of the weights."""
        f = self.outputs(x, draws, antithetic=draws > 1)
        means = self.likelihood.mean(f.flatten(0, 1)).unflatten(0, (draws, -1))
        return mixture_prediction(self.likelihood, means)

    # The bound.

    def bound(self, x: Input, y: Tensor) -> Evidence:
        """One stochastic estimate of the bound from a mini-batch, scaled to all data.

        Unbiased, differentiable in everything. Precisions and noise that move in closed form do so
        here, before the bound is taken; `evidence` moves nothing.

        Raises:
            ValueError: labels that do not fit the likelihood.
        """
        f = self.outputs(x, self.config.draws, self.config.antithetic and self.config.draws > 1)
        self.likelihood.check(f[0], y)
        self.steps += 1
        self._move_prior()
        self._move_noise(f, y)
        fit = -self._nll(f, y).mean() * self.n_data
        return variational_evidence(fit, self.posteriors, self.prior, self.n_data, effective=False)

    def evidence(
        self,
        loader: Iterable[Any],
        draws: int = 16,
        differentiable: bool = False,
        hidden: Sequence[tuple[str, str]] = (),
    ) -> Evidence:
        """The bound of all data, with nothing moved.

        Args:
            loader: (x, y) batches of the training data.
            draws: of the weights for each batch, in pairs.
            differentiable: keep the graph of all batches.
            hidden: pairs of linear layers between which the units may be permuted: the bound of
                the posterior that covers all their orders (see `permutations`).

        Raises:
            ValueError: a loader with another number of data, or layers without a posterior.
        """
        with torch.set_grad_enabled(differentiable):
            parts, seen = [], 0
            for x, y in batches(loader, self.device):
                f = self.outputs(x, draws, antithetic=draws > 1)
                self.likelihood.check(f[0], y)
                parts.append(-self._nll(f, y).mean(0).sum())
                seen += len(y)
            if seen != self.n_data:
                raise ValueError(f"expected {self.n_data} data from the loader, got {seen}")
            fit = torch.stack(parts).sum()
            found = variational_evidence(fit, self.posteriors, self.prior, self.n_data)
        if hidden:
            found = replace(found, log_det=found.log_det - 2 * self._orders(hidden))
        if not math.isfinite(float(found.log_evidence.detach())):
            raise ValueError(f"expected a finite bound, got {found}; have the weights diverged?")
        return found

    def _orders(self, hidden: Sequence[tuple[str, str]]) -> Tensor:
        """Nats gained by covering all orders of the units of some hidden layers."""
        if self.prior.diagonal:
            raise ValueError(
                "expected a prior that does not tell hidden units apart, got prior_groups="
                "'diagonal'; do: hidden=() or other groups"
            )
        parts = [hidden_units(self.posteriors, *pair) for pair in hidden]
        gains = [permutation_gain(part, generator=self.generator) for part in parts]
        return torch.stack(gains).sum()

    def _nll(self, f: Float[Tensor, "s n k"], y: Tensor) -> Float[Tensor, "s n"]:
        return torch.stack([self.likelihood.nll(one, y).double() for one in f])

    # Closed forms.

    @torch.no_grad()
    def _move_prior(self) -> None:
        rate = {"collapsed": 1.0, "closed-form": self.config.damping}.get(self.config.prior_update)
        if rate is not None and self.steps > self.config.burn_in:
            for group, best in best_variances(self.prior, self.posteriors).items():
                log_delta = self.prior.log_precision[self.prior.names.index(group)]
                log_delta.lerp_(-best.log(), rate)
        self.at_bound = self.prior.clamp_()

    @torch.no_grad()
    def _move_noise(self, f: Float[Tensor, "s n k"], y: Tensor) -> None:
        if not isinstance(self.likelihood, Gaussian) or self.config.noise_update != "closed-form":
            return
        noise: Hyper = self.likelihood.noise
        squares = (f - y.reshape(f.shape[1:])).double().square().mean((0, 1))
        squares = squares if noise.value.dim() else squares.mean()
        tiny = torch.finfo(torch.float64).tiny
        noise.value = noise.value.square().lerp(squares, self.config.damping).clamp_min(tiny).sqrt()


def best_variances(prior: Prior, posteriors: dict[str, GaussianPosterior]) -> dict[str, Tensor]:
    r"""Prior group -> $v^* = \sum_l (\mathrm{tr}\,\Sigma_l + m_l^\top m_l) / \sum_l D_l$.

    For `groups="diagonal"` the second moment of every single weight.
    """
    found = {}
    for group in prior.names:
        members = [posteriors[name] for name in prior.members(group)]
        if all(isinstance(q, Point) for q in members):
            continue
        if prior.diagonal:
            found[group] = (members[0].variance() + members[0].mean.square()).double()
        else:
            total = torch.stack([q.second_moment() for q in members]).sum()
            found[group] = total / sum(q.size for q in members)
    return found
