r"""The Hamiltonian network and its average over the flows of conserved quantities.

The network is a perceptron $F_\theta: R^{2n} \to R$,
$F(x) = w^\top \phi(W_{L-1} \cdots \phi(W_1 x + b_1) \cdots + b_{L-1})$. Its gradient in x is one
backward sweep, $g \leftarrow W_l^\top(\phi'(a_l) \odot g)$, written out in ordinary operations, so
that training needs a single reverse pass and no double backward. Everything is batched over R draws
of the weights.

The symmetrised Hamiltonian of Noether's razor is

$$ H(x) = \int F_\theta(\Phi^\tau_C(x))\, d\mu(\tau), $$

with the flow $\Phi^\tau_C$ of $\sum_k \tau_k C_k$. Averaged over the group that the flows generate,
H is invariant under them, so by Noether's theorem its dynamics conserve every $C_k$. `FlowTimes`
draws $\tau \sim \mu$ with variance reduction. All measures are symmetric under $\tau \to -\tau$, so
antithetic pairs are unbiased.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from symrazor.core.validation import check_choice
from symrazor.dynamics.conserved import ConservedQuantities, Flows
from symrazor.dynamics.mechanics import apply_symplectic_form, degrees_of_freedom
from symrazor.inference.variational import GaussianPosterior, MatrixNormal, Point

Activation = Literal["softplus", "tanh", "elu", "elu2", "silu", "sin"]
ValueAndSlope = tuple[Tensor, Tensor]
"""An activation and its derivative."""


def _tanh(a: Tensor) -> ValueAndSlope:
    value = torch.tanh(a)
    return value, 1 - value.square()


def _elu(a: Tensor, alpha: float = 1.0) -> ValueAndSlope:
    value = F.elu(a, alpha)
    return value, torch.where(a > 0, 1.0, value + alpha)


def _silu(a: Tensor) -> ValueAndSlope:
    gate = torch.sigmoid(a)
    value = a * gate
    return value, gate + value * (1 - gate)


ACTIVATIONS: dict[Activation, Callable[[Tensor], ValueAndSlope]] = {
    "softplus": lambda a: (F.softplus(a), torch.sigmoid(a)),
    "tanh": _tanh,
    "elu": _elu,
    "elu2": lambda a: _elu(a, 2.0),
    "silu": _silu,
    "sin": lambda a: (torch.sin(a), torch.cos(a)),
}

Measure = Literal["cube", "ball", "1-ball", "one-hot", "gaussian"]
Draws = Literal["independent", "antithetic", "quasi"]
Weights = Sequence[Float[Tensor, "r _ _"]]
"""R draws of every weight matrix [outputs, inputs] of a network."""


class Energy:
    r"""The network $F$ for R draws of its weights.

    Args:
        weights: one [R, out, in] for each layer; the last has one output.
        biases: one [out] for each layer but the last.
        activation: by name.
    """

    def __init__(
        self, weights: Weights, biases: Iterable[Tensor], activation: Activation = "softplus"
    ) -> None:
        self.weights, self.biases = list(weights), list(biases)
        self.activation = ACTIVATIONS[activation]

    def __call__(self, x: Float[Tensor, "r m d"]) -> Float[Tensor, "r m"]:
        """Return F at m states for each draw (r = 1 for the same states in all draws)."""
        for W, b in zip(self.weights[:-1], self.biases, strict=True):
            x = self.activation(x @ W.mT + b)[0]
        return (x @ self.weights[-1].mT).squeeze(-1)

    def gradient(self, x: Float[Tensor, "r m d"]) -> Float[Tensor, "r m d"]:
        r"""Return $\nabla F$ in closed form."""
        slopes = []
        for W, b in zip(self.weights[:-1], self.biases, strict=True):
            x, slope = self.activation(x @ W.mT + b)
            slopes.append(slope)
        g = self.weights[-1]
        for W, slope in zip(reversed(self.weights[:-1]), reversed(slopes), strict=True):
            g = (slope * g) @ W
        return g


def point_posterior(mean: Tensor, std: float) -> GaussianPosterior:
    """Return a point estimate, for maximum likelihood."""
    return Point(mean.shape, std, mean)


class HamiltonianNetwork(nn.Module):
    """A multilayer perceptron with a posterior over every weight matrix.

    Biases are point estimates, as in the paper. The last layer has no bias: a constant does not
    change the dynamics.

    Args:
        phase: number of entries of a state.
        posterior: (mean, std) -> posterior over a matrix; matrix normal by default, see
            `symrazor.inference.variational`.
        width: hidden units per layer.
        hidden: number of hidden layers.
        activation: "softplus", "tanh", "silu" and "sin" have smooth dynamics; "elu" and "elu2" are
            used in the paper.
        std: initial posterior standard deviation, relative to the prior of the layer.
        generator: for the initial weights.
    """

    def __init__(
        self,
        phase: int,
        posterior: Callable[[Tensor, float], GaussianPosterior] | None = None,
        width: int = 64,
        hidden: int = 2,
        activation: Activation = "softplus",
        std: float = 0.1,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        degrees_of_freedom(phase)
        check_choice("activation", activation, Activation)
        self.phase, self.activation = phase, activation
        sizes = [phase, *[width] * hidden, 1]
        scales = [1.0] + [1 / fan_in**0.5 for fan_in in sizes[1:-1]]
        make = posterior or (lambda mean, std: MatrixNormal(mean.shape, std, mean))
        layers, biases = [], []
        for fan_in, fan_out, scale in zip(sizes, sizes[1:], scales, strict=False):
            mean = scale * torch.randn(fan_out, fan_in, generator=generator)
            layers.append(make(mean, std * scale))
            biases.append(torch.randn(fan_out, generator=generator))
        self.layers = nn.ModuleList(layers)
        self.biases = nn.ParameterList([nn.Parameter(b) for b in biases[:-1]])

    @property
    def posteriors(self) -> list[GaussianPosterior]:
        """Posteriors of the weight matrices, first layer first."""
        return [layer for layer in self.layers if isinstance(layer, GaussianPosterior)]

    def draw(self, count: int, generator: torch.Generator | None = None) -> Energy:
        """Draw R networks from the posterior, in pairs of opposite deviation from the mean."""
        weights = [q.sample(count, generator, antithetic=count > 1) for q in self.posteriors]
        return Energy(weights, self.biases, self.activation)

    def mean(self) -> Energy:
        """Return the network with mean weights, R = 1."""
        return Energy([q.mean[None] for q in self.posteriors], self.biases, self.activation)


class Hamiltonian:
    """A symmetrised Hamiltonian for R draws of the weights, at states [r, n, 2n].

    It averages the network F over S flows for each draw, or is F itself if `flows` is None.
    """

    def __init__(self, energy: Energy, flows: Flows | None = None) -> None:
        self.energy, self.flows = energy, flows

    def value(self, x: Float[Tensor, "r n d"]) -> Float[Tensor, "r n"]:
        r"""Return $H(x) = \frac1S\sum_s F(\Phi_s x)$."""
        if self.flows is None:
            return self.energy(x)
        moved, _ = self.flows.transport(x)
        values = self.energy(moved.flatten(1, 2))
        return values.reshape(moved.shape[:3]).mean(dim=1)

    def gradient(self, x: Float[Tensor, "r n d"]) -> Float[Tensor, "r n d"]:
        r"""Return $\frac1S\sum_s (\partial\Phi_s/\partial x)^\top \nabla F(\Phi_s x)$."""
        if self.flows is None:
            return self.energy.gradient(x)
        moved, pull_back = self.flows.transport(x)
        g = self.energy.gradient(moved.flatten(1, 2))
        return pull_back(g.reshape(moved.shape))

    def field(self, x: Float[Tensor, "r n d"]) -> Float[Tensor, "r n d"]:
        r"""Return the vector field $J\nabla H$."""
        return apply_symplectic_form(self.gradient(x))


class FlowTimes:
    r"""Sampler of flow times $\tau \sim \mu$ on $R^K$.

    - cube: uniform on $[-1, 1]^K$
    - ball: uniform in the unit ball
    - 1-ball: uniform in $\sum_k |\tau_k| \le 1$
    - one-hot: one coordinate uniform on $[-1, 1]$, the others 0
    - gaussian: normal with variance 1/3, the variance of the cube

    Args:
        dimension: K.
        measure: by name, as above.
        draws: "quasi" for randomly shifted low-discrepancy points (an equidistant grid for K = 1, a
            Sobol sequence in antithetic pairs otherwise), "antithetic" for pairs $\pm\tau$, or
            "independent".
    """

    def __init__(
        self, dimension: int, measure: Measure = "cube", draws: Draws = "antithetic"
    ) -> None:
        check_choice("measure", measure, Measure)
        check_choice("draws", draws, Draws)
        if dimension < 1:
            raise ValueError(f"dimension must be at least 1 flow, got {dimension}.")
        self.dimension, self.measure, self.draws = dimension, measure, draws

    def with_dimension(self, dimension: int) -> "FlowTimes":
        """Return the measure in another dimension; a grid for a single flow."""
        if dimension == 1:
            return FlowTimes(1, "cube", "quasi")
        return FlowTimes(dimension, self.measure, self.draws)

    @property
    def variance(self) -> float:
        """Variance of each coordinate."""
        K = self.dimension
        return {
            "cube": 1 / 3,
            "ball": 1 / (K + 2),
            "1-ball": 2 / ((K + 1) * (K + 2)),
            "one-hot": 1 / (3 * K),
            "gaussian": 1 / 3,
        }[self.measure]

    def __call__(
        self, sets: int, count: int, generator: torch.Generator | None = None
    ) -> Float[Tensor, "sets count k"]:
        """Draw `sets` independent sets of `count` flow times, on the generator's device.

        Antithetic pairs are adjacent: entry 2i + 1 is minus entry 2i.
        """
        if self.draws == "quasi" and self.dimension == 1 and self.measure != "gaussian":
            # A randomly shifted grid on [-1, 1) is accurate for periodic integrands.
            device = "cpu" if generator is None else generator.device
            shift = torch.rand(sets, 1, 1, generator=generator, device=device)
            grid = torch.arange(count, device=device).view(1, -1, 1)
            return 2 * (grid + shift) / count - 1
        if self.draws == "independent":
            return self._draw(sets, count, generator)
        half = self._draw(sets, -(-count // 2), generator)
        return torch.stack([half, -half], dim=2).flatten(1, 2)[:, :count]

    def _draw(self, sets: int, count: int, generator: torch.Generator | None) -> Tensor:
        K = self.dimension
        extra = 0 if self.measure in ("cube", "gaussian") else 1
        device = "cpu" if generator is None else generator.device
        if self.draws == "quasi":
            # A random shift makes each point of the Sobol sequence uniform.
            points = torch.quasirandom.SobolEngine(K + extra).draw(count).to(device)
            shift = torch.rand(sets, 1, K + extra, generator=generator, device=device)
            u = (points + shift) % 1.0
        else:
            u = torch.rand(sets, count, K + extra, generator=generator, device=device)
        tiny = torch.finfo(u.dtype).eps
        u = u.clamp(tiny, 1 - tiny)
        if self.measure == "cube":
            return 2 * u - 1
        if self.measure == "one-hot":
            chosen = (u[..., -1] * K).long().clamp(max=K - 1)
            return torch.nn.functional.one_hot(chosen, K) * (2 * u[..., :1] - 1)
        if self.measure == "1-ball":
            side = 2 * u[..., :K] - 1
            size = -torch.log1p(-side.abs())
            slack = -torch.log(u[..., K:])
            return side.sign() * size / (size.sum(-1, keepdim=True) + slack)
        normal = math.sqrt(2) * torch.erfinv(2 * u[..., :K] - 1)
        if self.measure == "gaussian":
            return normal / math.sqrt(3)
        radius = u[..., K:] ** (1 / K)
        direction: Tensor = normal / normal.norm(dim=-1, keepdim=True)
        return radius * direction


class SymmetrisedNetwork(nn.Module):
    """A Hamiltonian network, averaged over the flows of conserved quantities.

    Args:
        network: F.
        conserved: the quantities, learned or fixed; None for a plain Hamiltonian network.
        times: measure over flow times; by default the cube with quasi-Monte-Carlo draws.
    """

    def __init__(
        self,
        network: HamiltonianNetwork,
        conserved: ConservedQuantities | None = None,
        times: FlowTimes | None = None,
    ) -> None:
        super().__init__()
        self.network, self.conserved = network, conserved
        if conserved is not None:
            times = times or FlowTimes(conserved.flow_count, "cube", "quasi")
            if times.dimension != conserved.flow_count:
                raise ValueError(
                    f"The conserved quantities have {conserved.flow_count} flows, but the flow "
                    f"times have dimension {times.dimension}."
                )
        self.times = times

    def draw(self, draws: int, flows: int, generator: torch.Generator | None = None) -> Hamiltonian:
        """Draw R sets of weights from the posterior, and S flows for each."""
        energy = self.network.draw(draws, generator)
        return Hamiltonian(energy, self._draw_flows(draws, flows, generator))

    def mean(self, flows: int, generator: torch.Generator | None = None) -> Hamiltonian:
        """Return the Hamiltonian with mean weights and one set of S flows."""
        return Hamiltonian(self.network.mean(), self._draw_flows(1, flows, generator))

    def _draw_flows(
        self, draws: int, flows: int, generator: torch.Generator | None
    ) -> Flows | None:
        if self.conserved is None or self.times is None:
            return None
        return self.conserved.flows(self.times(draws, flows, generator))
