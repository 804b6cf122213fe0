r"""A trained model: its likelihood, evidence bound and predictions, and a simulator.

The Gaussian likelihoods of trajectories under a Hamiltonian are:

- rollout: the state after each of H steps from an initial state,
  $N(y_h \mid \hat x_h, \sigma^2 I)$; H = 1 is the one-step likelihood of Noether's razor.
- derivative: the velocity, $N(\dot x \mid J\nabla H(x), \sigma^2 I)$.

Time steps may be irregular, and missing states are left out.
"""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.core.validation import check_choice
from symrazor.dynamics.config import NoiseKind, TrainConfig
from symrazor.dynamics.conserved import AffineFlows, Flows, Quadratic
from symrazor.dynamics.hamiltonian import Energy, Hamiltonian, SymmetrisedNetwork
from symrazor.dynamics.mechanics import INTEGRATORS, Field, Integrator, Scalar, advance
from symrazor.dynamics.observables import IntegratedFlows
from symrazor.dynamics.trajectories import Transitions
from symrazor.inference.variational.gaussian import collapsed_kl

Record = dict[str, float]
TARGET_BOUND_EVALUATIONS = 1 << 19
"""States x flows x draws from which `evidence_bound` estimates a bound."""
MAX_CHUNK_EVALUATIONS = 1 << 17
"""States x flows x draws that `predictions` evaluates at once, to limit memory."""


class Noise(nn.Module):
    r"""Observation noise with one variance $\sigma^2$ for all entries of a state.

    Args:
        variance: initial variance.
        kind: "fixed", "learned" by gradient, or "closed": a running mean of the squared residuals,
            $\sigma^2 \leftarrow (1 - r)\sigma^2 + r \overline{|y - \hat x|^2}$.
        rate: r.
        floor: smallest variance.
    """

    rate: Tensor

    def __init__(
        self,
        variance: float = 1e-3,
        kind: NoiseKind = "fixed",
        rate: float = 0.05,
        floor: float = 1e-9,
    ) -> None:
        super().__init__()
        check_choice("kind", kind, NoiseKind)
        if not variance > 0:
            raise ValueError(f"The noise variance must be positive, got {variance}.")
        self.kind, self.closed_form_rate, self.floor = kind, rate, floor
        self.register_buffer("rate", torch.tensor(rate), persistent=False)
        self.log_variance = nn.Parameter(torch.tensor(math.log(variance)), kind == "learned")

    @property
    def variance(self) -> Tensor:
        r"""The variance $\sigma^2$."""
        return self.log_variance.exp().clamp_min(self.floor)

    def hold(self, frozen: bool) -> None:
        """Freeze a closed-form variance, or let it move again."""
        if self.kind == "closed":  # the rate is a tensor because CUDA graphs replay its value
            self.rate.fill_(0.0 if frozen else self.closed_form_rate)

    def nll(self, predicted: Float[Tensor, "r n h d"], data: Transitions) -> Float[Tensor, "r n"]:
        """Return the negative log-likelihood of each datum, with all constants."""
        error = (predicted - data.y).square().sum(-1)
        constant = predicted.shape[-1] * torch.log(2 * math.pi * self.variance)
        per_state = 0.5 * (error / self.variance + constant)
        return (per_state * data.observed).sum(-1)

    @torch.no_grad()
    def observe(self, predicted: Float[Tensor, "r n h d"], data: Transitions) -> None:
        """Update a closed-form variance with the residuals of a batch."""
        if self.kind == "closed":
            error = (predicted - data.y).square().mean(-1) * data.observed
            mean = error.sum((1, 2)).mean() / data.observed.sum()
            new = (1 - self.rate) * self.variance + self.rate * torch.nan_to_num(mean, 0.0, 0.0)
            moved = new.clamp_min(self.floor).log()
            self.log_variance.copy_(torch.where(self.rate > 0, moved, self.log_variance))


def rollout(
    field: Field, data: Transitions, draws: int, integrator: Integrator, substeps: int = 1
) -> Float[Tensor, "r n h d"]:
    """Predict the state at every step of every window, for each of R draws of the weights."""
    x = data.x.expand(draws, *data.x.shape)
    states = []
    for gap in data.gaps.unbind(dim=1):
        x = advance(integrator, field, x, gap[:, None], substeps)
        states.append(x)
    return torch.stack(states, dim=2)


def predict(
    field: Field, data: Transitions, draws: int, config: TrainConfig
) -> Float[Tensor, "r n h d"]:
    """Predict the target of the data, states or velocities, for each draw of the weights."""
    if config.target == "derivative":
        return field(data.x.expand(draws, *data.x.shape)).unsqueeze(2)
    return rollout(field, data, draws, INTEGRATORS[config.integrator], config.substeps)


@dataclass
class Trained:
    """A trained model and its training history.

    Args:
        model: the (symmetrised) network.
        noise: observation noise.
        config: options of the training.
        history: a record every `config.record` steps.
        seconds: training time.
        skipped: steps without a finite gradient.
        bound: "nll", "kl" and "neg_elbo" per datum on the training data, and the standard "error"
            of their estimate; see `evidence_bound`.
        trials: candidate models of `train_and_select`, with their cost in nats.
        plain: where `train_and_select` returns a trial: the trial without conserved quantities.
    """

    model: SymmetrisedNetwork
    noise: Noise
    config: TrainConfig
    history: list[Record] = field(default_factory=list)
    seconds: float = 0.0
    skipped: int = 0
    bound: dict[str, float] = field(default_factory=dict)
    trials: list[Record] = field(default_factory=list)
    plain: "Trained | None" = None


def kl_per_datum(model: SymmetrisedNetwork, config: TrainConfig, n_data: int) -> Tensor:
    r"""Return $\frac1N \sum_l \min_v \mathrm{KL}(q_l \,\|\, N(0, v))$; 0 for maximum likelihood."""
    if config.objective == "likelihood":
        return torch.zeros((), dtype=torch.float64)
    return torch.stack([collapsed_kl(q) for q in model.network.posteriors]).sum() / n_data


@torch.no_grad()
def evidence_bound(
    trained: Trained, data: Transitions, draws: int | None = None
) -> dict[str, float]:
    """Estimate the evidence lower bound per datum of the training data.

    By default 16 to 256 sets of weights are drawn, fewer for more data, and an eighth of that (at
    least 4) for flows that are integrated numerically.

    Returns:
        "nll", "kl", their sum "neg_elbo", and its standard "error".
    """
    if draws is None:
        flows = 1 if trained.model.conserved is None else 2 * trained.config.flows
        draws = max(16, min(256, TARGET_BOUND_EVALUATIONS // (len(data) * flows)))
        if not isinstance(trained.model.conserved, Quadratic | None):
            draws = max(4, draws // 8)
    total = torch.zeros(draws, dtype=torch.float64)
    for chunk, predicted in predictions(trained, data, draws=draws, seed=trained.config.seed + 1):
        total += trained.noise.nll(predicted, chunk).sum(1, dtype=torch.float64).cpu()
    per_draw = total / len(data)
    # Draws come in antithetic pairs, which are not independent: average each pair first.
    independent = per_draw[: draws // 2 * 2].view(-1, 2).mean(1) if draws > 3 else per_draw
    nll = float(per_draw.mean())
    error = float(independent.std(correction=0)) / len(independent) ** 0.5
    kl = float(kl_per_datum(trained.model, trained.config, len(data)))
    return {"nll": nll, "kl": kl, "neg_elbo": nll + kl, "error": error}


@torch.no_grad()
def predictions(
    trained: Trained,
    data: Transitions,
    draws: int = 64,
    seed: int = 0,
    mean_weights: bool = False,
    flows: int | None = None,
) -> Iterator[tuple[Transitions, Tensor]]:
    """Yield chunks of the data with predicted states [R, N, H, 2n], all from the same draws.

    With `mean_weights`, predict once with the mean weights instead of R = `draws` of the posterior.
    By default twice as many flows are drawn as in training.
    """
    model, config = trained.model, trained.config
    mean = model.network.posteriors[0].mean
    data = data.to(mean.device, mean.dtype)
    flows = flows or 2 * config.flows
    draws = 1 if mean_weights else draws
    generator = torch.Generator(mean.device).manual_seed(seed)
    energy = model.mean(flows, generator) if mean_weights else model.draw(draws, flows, generator)
    per_state = draws * flows if model.conserved is not None else draws
    chunk_size = max(1, MAX_CHUNK_EVALUATIONS // per_state)
    for index in torch.arange(len(data), device=mean.device).split(chunk_size):
        chunk = data.at(index)
        yield chunk, predict(energy.field, chunk, draws, config)


@torch.no_grad()
def mean_squared_error(
    trained: Trained,
    data: Transitions,
    draws: int = 32,
    mean_weights: bool = False,
    flows: int | None = None,
) -> float:
    """Return the mean squared error of the posterior-mean prediction on noise-free data.

    For the arguments see `predictions`.
    """
    total, count = 0.0, 0.0
    for chunk, states in predictions(trained, data, draws, 0, mean_weights, flows):
        error = (states.double().mean(0) - chunk.y).square().mean(-1) * chunk.observed
        total += float(error.sum())
        count += float(chunk.observed.sum())
    return total / count


@torch.no_grad()
def relative_drift(
    energy: Scalar, states: Float[Tensor, "b t d"]
) -> tuple[float, Float[Tensor, "b"]]:
    """Return the largest change of a quantity, over all trajectories and for each.

    Changes are relative to the spread of the quantity.
    """
    values = energy(states.double())
    change = (values - values[:, :1]).abs().amax(1)
    spread = values.std().clamp_min(1e-12)
    return float(change.max() / spread), change / spread


@torch.no_grad()
def long_rollout(
    trained: Trained,
    start: Float[Tensor, "b d"],
    dt: float,
    steps: int,
    draws: int = 16,
    mean_weights: bool = False,
) -> Float[Tensor, "b t d"]:
    """Predict long trajectories, including the initial state.

    Args:
        trained: the model.
        start: initial states.
        dt: time between two states.
        steps: number of steps, at least 1.
        draws: posterior draws whose trajectories are averaged. The average drifts even if every
            draw conserves the energy, because their phases separate.
        mean_weights: predict one trajectory with the mean weights instead.
    """
    if start.ndim != 2 or steps < 1:
        raise ValueError(
            f"long_rollout needs initial states [b, 2n] and steps >= 1, got shape "
            f"{list(start.shape)} and {steps} steps."
        )
    x = start.to(trained.model.network.posteriors[0].mean)
    gaps = torch.full((len(x), steps), dt, dtype=x.dtype, device=x.device)
    data = Transitions(x, x[:, None].expand(-1, steps, -1), gaps, torch.ones_like(gaps))
    of_states = replace(trained, config=trained.config.change(target="rollout"))
    chunks = predictions(of_states, data, draws, trained.config.seed, mean_weights)
    states = torch.cat([predicted.mean(0) for _, predicted in chunks])
    return torch.cat([x[:, None], states], dim=1)


class Simulator(nn.Module):
    """The dynamics of a trained model, with mean weights and flows that are drawn once.

    All numbers are frozen parameters, so `to`, `state_dict` and `torch.save` include them.

    Args:
        trained: the model; copied.
        flows: number of flows of the average.
        max_step: longest integrator step.
        seed: of the flows.
    """

    weight0: Tensor
    linear: Tensor
    shift: Tensor
    tau: Tensor

    def __init__(
        self, trained: Trained, flows: int = 64, max_step: float = 0.1, seed: int = 0
    ) -> None:
        super().__init__()
        if not max_step > 0:
            raise ValueError(f"max_step must be positive, got {max_step}.")
        model = trained.model
        device = model.network.posteriors[0].mean.device
        with torch.no_grad():
            drawn = model.mean(flows, torch.Generator(device).manual_seed(seed))
        self.activation = model.network.activation
        self.hidden = len(drawn.energy.biases)
        register_frozen(self, {f"weight{k}": w for k, w in enumerate(drawn.energy.weights)})
        register_frozen(self, {f"bias{k}": b for k, b in enumerate(drawn.energy.biases)})
        if isinstance(drawn.flows, AffineFlows):
            register_frozen(self, {"linear": drawn.flows.linear, "shift": drawn.flows.shift})
        elif isinstance(drawn.flows, IntegratedFlows):
            self.observable = copy.deepcopy(drawn.flows.observable).requires_grad_(False)
            register_frozen(self, {"tau": drawn.flows.tau})
        self.integrator: Integrator = INTEGRATORS[trained.config.integrator]
        self.max_step = max_step

    @property
    def hamiltonian(self) -> Hamiltonian:
        """The learned Hamiltonian, averaged over the flows."""
        weights = [getattr(self, f"weight{k}") for k in range(self.hidden + 1)]
        biases = [getattr(self, f"bias{k}") for k in range(self.hidden)]
        flows: Flows | None = None
        if hasattr(self, "linear"):
            flows = AffineFlows(self.linear, self.shift)
        elif hasattr(self, "tau"):
            flows = IntegratedFlows(self.observable, self.tau)
        return Hamiltonian(Energy(weights, biases, self.activation), flows)

    @torch.no_grad()
    def forward(self, state: Float[Tensor, "*b d"], t: float) -> Float[Tensor, "*b d"]:
        """Return the states after a time t, which may be negative but must be finite."""
        t = float(t)
        if not math.isfinite(t):
            raise ValueError(f"The time must be finite, got {t}.")
        steps = max(1, round(abs(t) / self.max_step + 0.5))
        x = advance(self.integrator, self.hamiltonian.field, self._flatten(state), t, steps)
        return cast_like(x.reshape(state.shape), state)

    @torch.no_grad()
    def energy(self, state: Float[Tensor, "*b d"]) -> Float[Tensor, "*b"]:
        """Return the learned energy."""
        values = self.hamiltonian.value(self._flatten(state))
        return cast_like(values.reshape(state.shape[:-1]), state)

    def _flatten(self, state: Tensor) -> Float[Tensor, "one m d"]:
        phase = self.weight0.shape[-1]
        if state.ndim < 1 or state.shape[-1] != phase:
            raise ValueError(f"States must have shape [..., {phase}], got {list(state.shape)}.")
        return state.reshape(1, -1, state.shape[-1]).to(self.weight0)


def cast_like(values: Tensor, like: Tensor) -> Tensor:
    """Return values with dtype and device of `like`, but never as integers."""
    return values.to(like) if like.is_floating_point() else values.to(like.device)


def register_frozen(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Register copies of tensors as parameters without gradients."""
    for name, value in tensors.items():
        parameter = nn.Parameter(value.detach().clone(), requires_grad=False)
        module.register_parameter(name, parameter)
