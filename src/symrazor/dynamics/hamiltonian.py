r"""A network $F_\theta: R^{2n} \to R$ with an analytic gradient in its input.

$F(x) = w^\top \phi(W_{L-1} \cdots \phi(W_1 x + b_1) \cdots + b_{L-1})$. Its gradient is one sweep
back, $g \leftarrow W_l^\top(\phi'(a_l) \odot g)$, written out in ordinary operations: training then
needs one reverse pass and no double backward. Everything is batched over R draws of the weights.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from symrazor.dynamics.phase import freedom
from symrazor.inference.variational.posteriors import GaussianPosterior, MatrixNormal, Point

Activation = Literal["softplus", "tanh", "elu", "elu2", "silu", "sin"]
Slope = tuple[Tensor, Tensor]
"""An activation and its derivative."""


def _softplus(a: Tensor) -> Slope:
    return F.softplus(a), torch.sigmoid(a)


def _tanh(a: Tensor) -> Slope:
    value = torch.tanh(a)
    return value, 1 - value.square()


def _elu(a: Tensor, alpha: float = 1.0) -> Slope:
    value = F.elu(a, alpha)
    return value, torch.where(a > 0, 1.0, value + alpha)


def _elu2(a: Tensor) -> Slope:
    return _elu(a, 2.0)


def _silu(a: Tensor) -> Slope:
    gate = torch.sigmoid(a)
    value = a * gate
    return value, gate + value * (1 - gate)


def _sin(a: Tensor) -> Slope:
    return torch.sin(a), torch.cos(a)


ACTIVATIONS: dict[Activation, Callable[[Tensor], Slope]] = {
    "softplus": _softplus,
    "tanh": _tanh,
    "elu": _elu,
    "elu2": _elu2,
    "silu": _silu,
    "sin": _sin,
}

Weights = Sequence[Float[Tensor, "r _ _"]]
"""A draw of every weight matrix of the network, [outputs, inputs], R times."""


class Energy:
    r"""$F$ for R draws of the weights: `energy(x)` and `energy.gradient(x)`.

    Args:
        weights: one [R, out, in] for each layer; the last has one output.
        biases: one [out] for each layer but the last.
        activation: by name.
    """

    def __init__(
        self, weights: Weights, biases: Sequence[Tensor], activation: Activation = "softplus"
    ) -> None:
        """Hold the draw."""
        self.weights, self.biases = list(weights), list(biases)
        self.activation = ACTIVATIONS[activation]

    def __call__(self, x: Float[Tensor, "r m d"]) -> Float[Tensor, "r m"]:
        """Values at m states for each draw (or the same states for all draws, r = 1)."""
        for W, b in zip(self.weights[:-1], self.biases, strict=True):
            x = self.activation(x @ W.mT + b)[0]
        return (x @ self.weights[-1].mT).squeeze(-1)

    def gradient(self, x: Float[Tensor, "r m d"]) -> Float[Tensor, "r m d"]:
        """Gradients in the state, in closed form."""
        slopes = []
        for W, b in zip(self.weights[:-1], self.biases, strict=True):
            x, slope = self.activation(x @ W.mT + b)
            slopes.append(slope)
        g = self.weights[-1]
        for W, slope in zip(reversed(self.weights[:-1]), reversed(slopes), strict=True):
            g = (slope * g) @ W
        return g


def matrix_normal(mean: Tensor, std: float) -> GaussianPosterior:
    """The talk's posterior."""
    return MatrixNormal(mean.shape, std, mean)


def point(mean: Tensor, std: float) -> GaussianPosterior:
    """No posterior: maximum likelihood."""
    return Point(mean.shape, std, mean)


class HamiltonianNetwork(nn.Module):
    """A multilayer perceptron with a posterior over every weight matrix.

    Biases are point estimates, as in the paper; a bias of the last layer would not change the
    dynamics and is left out.

    Args:
        phase: entries of a state.
        posterior: (mean, std) -> posterior over a matrix; matrix normal by default, see
            `symrazor.inference.variational`.
        width: hidden units of every layer.
        hidden: hidden layers.
        activation: smooth ones ("softplus", "tanh", "silu", "sin") have smooth dynamics; "elu" and
            "elu2" are the published ones.
        std: posterior standard deviation at the start, relative to the prior's of that layer.
        generator: of the initial weights.
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
        """Draw the initial means."""
        super().__init__()
        freedom(phase)
        if activation not in ACTIVATIONS:
            names = ", ".join(ACTIVATIONS)
            raise ValueError(f"expected an activation among {names}, got {activation!r}")
        self.phase, self.activation = phase, activation
        sizes = [phase, *[width] * hidden, 1]
        scales = [1.0] + [1 / fan_in**0.5 for fan_in in sizes[1:-1]]
        layers, biases = [], []
        for fan_in, fan_out, scale in zip(sizes, sizes[1:], scales, strict=False):
            mean = scale * torch.randn(fan_out, fan_in, generator=generator)
            layers.append((posterior or matrix_normal)(mean, std * scale))
            biases.append(torch.randn(fan_out, generator=generator))
        self.layers = nn.ModuleList(layers)
        self.biases = nn.ParameterList([nn.Parameter(b) for b in biases[:-1]])

    @property
    def posteriors(self) -> list[GaussianPosterior]:
        """Of the weight matrices, first layer first."""
        return [layer for layer in self.layers if isinstance(layer, GaussianPosterior)]

    def draw(self, count: int, generator: torch.Generator | None = None) -> Energy:
        """R draws from the posterior, in pairs of opposite deviation."""
        weights = [q.sample(count, generator, antithetic=count > 1) for q in self.posteriors]
        return Energy(weights, list(self.biases), self.activation)

    def mean(self) -> Energy:
        """The network with mean weights, R = 1."""
        weights = [q.mean[None] for q in self.posteriors]
        return Energy(weights, list(self.biases), self.activation)
