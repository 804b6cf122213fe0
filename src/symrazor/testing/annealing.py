r"""Estimate the exact evidence of a tiny network by annealed importance sampling.

Chains start at draws from the prior and follow the geometric path

$$ p_\beta(\theta) \propto p(\theta)\, p(D \mid \theta)^\beta , \qquad 0 = \beta_0 < \dots
   < \beta_T = 1 , $$

with Hamiltonian Monte Carlo transitions that leave $p_{\beta_t}$ invariant. The weight
$w = \prod_t p(D \mid \theta_{t-1})^{\beta_t - \beta_{t-1}}$ of a chain has expectation $p(D)$,
however short the path is (Neal 2001). Chains run in independent groups of eight. A group whose
weights have become unequal is resampled, which leaves the expectation as it is (Del Moral et al.
2006). The prior reaches all modes of the posterior, so that equivalent modes (permuted hidden
units, flipped signs) are counted, unlike in a Laplace approximation.

The reverse path, from approximate posterior draws to the prior, estimates $1 / p(D)$ (Grosse et al.
2015). In expectation the forward estimate of the log evidence is too low, and the reverse one too
high if its draws are exact: a gap between the two says that the path is too short.

Weights are whitened, $z = \Delta^{1/2} \theta \sim N(0, I)$. Costs grow with chains x temperatures
x data, which suits up to about 100 weights and 100 data.
"""

import copy
import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from symrazor.core.likelihood import Likelihood, as_likelihood
from symrazor.core.parameters import weights
from symrazor.core.prior import GaussianPrior

Chains = Float[Tensor, "chains p"]
PerChain = Float[Tensor, " chains"]

GROUP_SIZE = 8
"""Chains in a group. Groups are independent of each other, so they give the standard error."""
MIN_EFFECTIVE_FRACTION = 0.5
"""A group is resampled when a smaller fraction of its chains is effective."""
PILOT_EFFECTIVE_FRACTION = 0.8
"""The pilot raises beta until this fraction of its chains is effective."""
PILOT_MOVES = 6
MAX_PILOT_TEMPERATURES = 1000
TARGET_ACCEPTANCE = 0.85
MAX_STEP_SIZE = 1.5
"""In standard deviations of the prior; leapfrog steps are unstable from 2 on."""


@dataclass(frozen=True)
class AnnealedEvidence:
    """Estimate of the log evidence, in nats.

    Args:
        log_evidence: estimate of the forward path, with the bias of the logarithm removed by the
            jackknife.
        standard_error: its jackknife standard error over groups of chains.
        reverse_log_evidence: estimate of the reverse path.
        acceptance: mean acceptance probability of the transitions.
        samples: approximate posterior draws of all weights, one row per chain.
    """

    log_evidence: float
    standard_error: float
    reverse_log_evidence: float
    acceptance: float
    samples: Chains


class BatchedLikelihood:
    """Log likelihood of many whitened weight vectors at once, in float64.

    Args:
        model: a network without random layers; it is copied.
        likelihood: a Likelihood or its name.
        data: inputs and labels.
        prior: prior of all trainable weights.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood,
        data: tuple[Tensor, Tensor],
        prior: GaussianPrior,
    ) -> None:
        self.network = copy.deepcopy(model).double().eval().requires_grad_(False)
        self.shapes = {name: value.shape for name, value in weights(model).items()}
        self.likelihood = copy.deepcopy(as_likelihood(likelihood)).requires_grad_(False)
        x, y = data
        self.x, self.y = (x.double() if x.is_floating_point() else x), y
        with torch.no_grad():
            scales = [prior.precision_of(k).rsqrt().expand(s) for k, s in self.shapes.items()]
        self.scale = torch.cat([value.reshape(-1) for value in scales]).double()
        self.size = len(self.scale)
        self._values = vmap(self._log_likelihood)
        self._gradients = vmap(grad_and_value(self._log_likelihood))

    def unflatten(self, z: Float[Tensor, "*lead p"]) -> dict[str, Tensor]:
        """Return whitened vectors as weights by name."""
        parts = (z * self.scale).split([shape.numel() for shape in self.shapes.values()], -1)
        lead = z.shape[:-1]
        named = zip(self.shapes.items(), parts, strict=True)
        return {name: part.reshape(*lead, *shape) for (name, shape), part in named}

    def flatten(self, theta: dict[str, Tensor]) -> Float[Tensor, " p"]:
        """Return weights by name as a whitened vector."""
        parts = [theta[name].detach().double().reshape(-1) for name in self.shapes]
        return torch.cat(parts) / self.scale

    def _log_likelihood(self, z: Float[Tensor, " p"]) -> Tensor:
        f: Tensor = functional_call(self.network, self.unflatten(z), (self.x,))
        return -self.likelihood.nll(f, self.y).sum()

    def __call__(self, z: Chains) -> PerChain:
        """Return the log likelihood of every row, differentiable."""
        values: Tensor = self._values(z)
        return values

    def gradient(self, z: Chains) -> tuple[PerChain, Chains]:
        """Return the log likelihood of every row and its gradient."""
        gradient, value = self._gradients(z)
        return value, gradient


@dataclass
class _State:
    """Chains with log likelihoods and their gradients."""

    z: Chains
    value: PerChain
    gradient: Chains

    def select(self, index: Tensor) -> "_State":
        return _State(self.z[index], self.value[index], self.gradient[index])


@dataclass
class _Sampler:
    """Hamiltonian Monte Carlo on the geometric path."""

    target: BatchedLikelihood
    leapfrog_steps: int
    generator: torch.Generator

    def start(self, chains: int) -> _State:
        """Draw chains from the prior."""
        return self.state(self._normal(chains, self.target.size))

    def state(self, z: Chains) -> _State:
        return _State(z, *self.target.gradient(z))

    def move(self, state: _State, beta: float, step: float) -> tuple[_State, float]:
        """Return the chains after one transition, and its mean acceptance probability."""
        momentum = self._normal(*state.z.shape)
        # Random step sizes avoid trajectories that return to their start.
        step_size = step * (0.8 + 0.4 * self._uniform(len(state.z)).unsqueeze(1))
        energy = self._energy(state, momentum, beta)
        end = state
        momentum = momentum + 0.5 * step_size * (beta * end.gradient - end.z)
        for number in range(1, self.leapfrog_steps + 1):
            end = self.state(end.z + step_size * momentum)
            fraction = 1.0 if number < self.leapfrog_steps else 0.5
            momentum = momentum + fraction * step_size * (beta * end.gradient - end.z)
        ratio = (energy - self._energy(end, momentum, beta)).nan_to_num(-math.inf, -math.inf)
        probability = ratio.clamp(max=0).exp()
        accept = self._uniform(len(probability)) < probability
        moved = _State(
            torch.where(accept.unsqueeze(1), end.z, state.z),
            torch.where(accept, end.value, state.value),
            torch.where(accept.unsqueeze(1), end.gradient, state.gradient),
        )
        return moved, float(probability.mean())

    def resample(self, state: _State, log_weights: Float[Tensor, "groups size"]) -> _State:
        """Draw the chains of each group in proportion to their weights (systematic resampling)."""
        n_groups, size = log_weights.shape
        places = (torch.arange(size) + self._uniform(n_groups).unsqueeze(1)) / size
        index = torch.searchsorted(log_weights.softmax(1).cumsum(1), places).clamp(max=size - 1)
        return state.select((index + size * torch.arange(n_groups).unsqueeze(1)).reshape(-1))

    def pilot(self, chains: int) -> tuple[list[float], list[float]]:
        """Return temperatures at equal distances and step sizes that suit them.

        A sequential Monte Carlo run. The annealing itself uses these values unchanged, which keeps
        its weights unbiased.
        """
        state, beta, step = self.start(chains), 0.0, 0.5
        betas, steps = [0.0], []
        while True:
            for _ in range(PILOT_MOVES):
                state, acceptance = self.move(state, beta, step)
                step = min(step * math.exp(acceptance - TARGET_ACCEPTANCE), MAX_STEP_SIZE)
            steps.append(step)
            if beta == 1:
                return betas, steps
            if len(betas) > MAX_PILOT_TEMPERATURES:
                raise ValueError(
                    f"The pilot run has not reached the posterior after {len(betas)} temperatures "
                    f"(beta = {beta:.2g}). The likelihood is too sharp for annealing: use fewer "
                    "data or a larger noise."
                )
            increment = _next_increment(state.value, 1 - beta)
            state = self.resample(state, increment * state.value.unsqueeze(0))
            beta = 1.0 if increment == 1 - beta else beta + increment
            betas.append(beta)

    def anneal(
        self, state: _State, betas: list[float], steps: list[float]
    ) -> tuple[_State, PerChain, float]:
        """Return chains at the last temperature, their log weights, and the mean acceptance.

        Resampling a group replaces its weights by their mean and keeps the estimate unbiased.
        """
        log_weights, total = torch.zeros_like(state.value), 0.0
        for before, beta, step in zip(betas[:-1], betas[1:], steps[1:], strict=True):
            log_weights = log_weights + (beta - before) * state.value
            state, log_weights = self._balance(state, log_weights)
            state, acceptance = self.move(state, beta, step)
            total += acceptance
        return state, log_weights, total / (len(betas) - 1)

    def _balance(self, state: _State, log_weights: PerChain) -> tuple[_State, PerChain]:
        """Resample the groups with few effective chains."""
        groups = log_weights.reshape(-1, GROUP_SIZE)
        uneven = _effective_fraction(groups) < MIN_EFFECTIVE_FRACTION
        if not bool(uneven.any()):
            return state, log_weights
        # Resampling equal weights leaves a group as it is.
        masked = torch.where(uneven.unsqueeze(1), groups, torch.zeros_like(groups))
        means = (groups.logsumexp(1, keepdim=True) - math.log(GROUP_SIZE)).expand_as(groups)
        balanced = torch.where(uneven.unsqueeze(1), means, groups)
        return self.resample(state, masked), balanced.reshape(-1)

    def _energy(self, state: _State, momentum: Chains, beta: float) -> PerChain:
        squares = (state.z.square() + momentum.square()).sum(1)
        return 0.5 * squares - beta * state.value

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def _uniform(self, n: int) -> Tensor:
        return torch.rand(n, generator=self.generator, dtype=torch.float64)


def annealed_log_evidence(
    model: nn.Module,
    likelihood: str | Likelihood,
    data: tuple[Tensor, Tensor],
    prior: GaussianPrior,
    *,
    chains: int = 128,
    temperatures: int = 200,
    leapfrog_steps: int = 4,
    seed: int = 0,
) -> AnnealedEvidence:
    """Return the log evidence of a tiny network with its weights integrated out.

    The result depends on the weights of the model only through their shapes.

    Args:
        model: a network without random layers.
        likelihood: a Likelihood or its name.
        data: inputs and labels.
        prior: Gaussian prior of all trainable weights.
        chains: number of chains, a multiple of 8; they run side by side.
        temperatures: number of steps from the prior to the posterior.
        leapfrog_steps: gradients for each transition.
        seed: seed of all random numbers.
    """
    if chains < 2 * GROUP_SIZE or chains % GROUP_SIZE:
        raise ValueError(
            f"chains must be a multiple of {GROUP_SIZE}, at least {2 * GROUP_SIZE}, got {chains}."
        )
    if temperatures < 2 or leapfrog_steps < 1:
        raise ValueError(
            "temperatures must be at least 2 and leapfrog_steps at least 1, got "
            f"{temperatures} and {leapfrog_steps}."
        )
    target = BatchedLikelihood(model, likelihood, data, prior)
    sampler = _Sampler(target, leapfrog_steps, torch.Generator().manual_seed(seed))
    betas, steps = _refine(*sampler.pilot(chains), temperatures)
    state, log_weights, acceptance = sampler.anneal(sampler.start(chains), betas, steps)
    estimate, error = _log_mean(log_weights)
    state = sampler.resample(state, log_weights.unsqueeze(0))
    for _ in range(PILOT_MOVES):  # separate the copies of a chain
        state, _ = sampler.move(state, 1.0, steps[-1])
    _, reverse_weights, _ = sampler.anneal(state, betas[::-1], steps[::-1])
    reverse = -_log_mean(reverse_weights)[0]
    samples = state.z * target.scale
    return AnnealedEvidence(estimate, error, reverse, acceptance, samples)


def _next_increment(value: PerChain, largest: float) -> float:
    """Return the increment of beta that leaves the wanted fraction of chains effective."""

    def too_far(increment: float) -> bool:
        return bool(_effective_fraction(increment * value) < PILOT_EFFECTIVE_FRACTION)

    if not too_far(largest):
        return largest
    low, high = 0.0, largest
    for _ in range(50):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if too_far(middle) else (middle, high)
    return high


def _effective_fraction(log_weights: Float[Tensor, "*groups size"]) -> Float[Tensor, "*groups"]:
    """Return the effective sample size of importance weights, as a fraction of their number."""
    shares = log_weights.softmax(-1)
    return 1 / (shares.square().sum(-1) * shares.shape[-1])


def _refine(
    betas: list[float], steps: list[float], temperatures: int
) -> tuple[list[float], list[float]]:
    """Interpolate temperatures and log step sizes of the pilot, at equal distances in its index."""
    fine_betas, fine_steps = [], []
    for number in range(temperatures + 1):
        place = number * (len(betas) - 1) / temperatures
        index = min(int(place), len(betas) - 2)
        t = place - index
        fine_betas.append((1 - t) * betas[index] + t * betas[index + 1])
        log_step = (1 - t) * math.log(steps[index]) + t * math.log(steps[index + 1])
        fine_steps.append(math.exp(log_step))
    fine_betas[-1] = 1.0
    return fine_betas, fine_steps


def _log_mean(log_weights: PerChain) -> tuple[float, float]:
    """Return the jackknife estimate over groups of the log mean weight, and its standard error."""
    groups = log_weights.reshape(-1, GROUP_SIZE).logsumexp(1) - math.log(GROUP_SIZE)
    n = len(groups)
    shares = groups.softmax(0)
    log_mean = groups.logsumexp(0) - math.log(n)
    # Log mean without one group. A share of 1 up to rounding would give log 0.
    left_out = log_mean + torch.log1p(-shares.clamp(max=1 - 1e-15)) + math.log(n / (n - 1))
    estimate = n * log_mean - (n - 1) * left_out.mean()
    error = ((n - 1) / n * (left_out - left_out.mean()).square().sum()).sqrt()
    return float(estimate), float(error)
