r"""Compute hidden features averaged over transformations.

$$ \bar\phi(x) = \sum_s c_s\, \phi(W_1 T_s x + b) $$

(Learning Invariant Weights, eqs. 1, 2, 6). The maps act on the rows of $W_1$, as filter banks
shared by all inputs of a batch, or on the inputs; up to interpolation both are equal. All functions
accept leading dimensions for many models side by side.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.core.parameters import Hyper, eval_mode
from symrazor.core.validation import check_choice
from symrazor.invariance.transformation import act, adjoint_resample, resample

Where = Literal["weights", "input"]


class Averaged(nn.Module):
    """Base class of features under every map, and of their average.

    Subclasses define the `raw` features, their number (`width`), the shape of models side by side
    (`lead`), and a tensor (`like`) whose dtype and device the outputs have.
    """

    lead: tuple[int, ...] = ()
    width: int
    like: Tensor

    @property
    def scale(self) -> float:
        """Return the factor of every feature, so that their squares sum to about 1."""
        return 1 / math.sqrt(self.width)

    def raw(self, x: Tensor, maps: Tensor) -> Float[Tensor, "*lead n s width"]:
        """Return the features before scaling."""
        raise NotImplementedError

    def forward(
        self,
        x: Tensor,
        maps: Float[Tensor, "*lead s d d"],
        weights: Float[Tensor, "s"] | None = None,
    ) -> Float[Tensor, "*lead n width"]:
        """Return averaged features: images or vectors [*lead, n, ...] -> [*lead, n, width].

        Args:
            x: inputs.
            maps: transformations.
            weights: weights of the transformations with sum 1; equal by default.
        """
        per_map = self.raw(x, maps)
        if weights is None:
            return self.scale * per_map.mean(-2)
        return self.scale * (per_map * weights.unsqueeze(-1)).sum(-2)

    def per_map(
        self, x: Tensor, maps: Float[Tensor, "*lead s d d"]
    ) -> Float[Tensor, "*lead n s width"]:
        """Return the features under every map."""
        return self.scale * self.raw(x, maps)


class Features(Averaged):
    """A hidden layer on images [n, c, h, w] or vectors [n, d] under transformations.

    Args:
        weight: [*lead, width, *shape], a filter for each feature.
        bias: [*lead, width].
        where: whether the maps act on the "weights" or on the "input".
        blur: see `symrazor.invariance.transformation.resample`.
    """

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(
        self, weight: Tensor, bias: Tensor, where: Where = "weights", blur: float = 0.0
    ) -> None:
        super().__init__()
        check_choice("where", where, Where)
        self.lead = tuple(bias.shape[:-1])
        self.shape = weight.shape[bias.dim() :]
        if weight.shape[: bias.dim()] != bias.shape or len(self.shape) not in (1, 3):
            raise ValueError(
                "weight must have shape [..., features, channels, height, width] or "
                f"[..., features, d], with a bias [..., features], got {list(weight.shape)} "
                f"and {list(bias.shape)}."
            )
        if not bias.numel():
            raise ValueError(f"There must be at least 1 feature, got weights {list(weight.shape)}.")
        self.where, self.blur = where, blur
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)
        self.width = bias.shape[-1]

    @property
    def like(self) -> Tensor:  # type: ignore[override]
        """Return the weights."""
        return self.weight

    def frequency(self) -> Tensor | None:
        """Return the factor of the linear part, one per model; None for 1."""
        return None

    def activation(self, z: Tensor) -> Tensor:
        """Apply the activation function, without the scale."""
        raise NotImplementedError

    def raw(self, x: Tensor, maps: Tensor) -> Float[Tensor, "*lead n s width"]:
        r"""Return the activations $\phi(W_1 T_s x + b)$ for every input and map."""
        dims = len(self.lead)
        if x.shape[dims + 1 :] != self.shape or tuple(x.shape[:dims]) != self.lead:
            raise ValueError(
                f"Inputs must have shape {[*self.lead, 'n', *self.shape]}, got {list(x.shape)}."
            )
        factor, weight = self.frequency(), torch.as_tensor(self.weight)
        if factor is not None:  # scale the smaller one: images, or the weights of vectors
            factor = factor.reshape(*self.lead, *[1] * (1 + len(self.shape)))
            x, weight = (x, weight * factor) if len(self.shape) == 1 else (x * factor, weight)
        product = self._by_input if self.where == "input" else self._by_weights
        linear = product(x, weight, maps)
        return self.activation(linear.add_(self.bias[..., None, None, :]))

    def filters(self, maps: Float[Tensor, "*lead s d d"]) -> Float[Tensor, "*lead s width c h w"]:
        r"""Return the filter banks $W_1 \circ T_s$ of images."""
        return adjoint_resample(self.weight, maps, self.blur).transpose(-5, -4)

    def _by_weights(self, x: Tensor, weight: Tensor, maps: Tensor) -> Tensor:
        """Multiply all inputs with one filter bank per map, [*lead, width * s, pixels]."""
        if len(self.shape) == 1:
            return self._vectors(x, weight, maps)
        bank = adjoint_resample(weight, maps, self.blur)
        s = bank.shape[-4]
        flat = bank.reshape(*self.lead, self.width * s, -1)
        products: Tensor = x.flatten(-3) @ flat.mT
        return products.reshape(*products.shape[:-1], self.width, s).mT

    def _by_input(self, x: Tensor, weight: Tensor, maps: Tensor) -> Tensor:
        vectors = len(self.shape) == 1
        transformed = act(x, maps) if vectors else resample(x, maps, self.blur).flatten(-3)
        # One matrix product, without a repeated batch.
        products: Tensor = transformed.flatten(-3, -2) @ weight.flatten(len(self.lead) + 1).mT
        return products.reshape(*transformed.shape[:-1], self.width)

    def _vectors(self, x: Tensor, weight: Tensor, maps: Tensor) -> Tensor:
        """Return W T x + W t, the linear and the constant part of an affine map."""
        d = self.shape[0]
        act(x[..., :1, :], maps)  # only checks the sizes
        banks = torch.einsum("...wi,...sij->...swj", weight, maps[..., :d, :].to(x.dtype))
        products = torch.einsum("...swj,...nj->...nsw", banks[..., :d], x)
        return products if banks.shape[-1] == d else products + banks[..., d].unsqueeze(-3)


class RandomFourier(Features):
    r"""Random Fourier features $\phi = \sqrt{2 / D} \cos(\sigma W x + b)$ of a Gaussian kernel.

    W and b are drawn once.

    Args:
        shape: shape of one input, [c, h, w] or [d].
        width: number D of features.
        sigma: standard deviation of the frequencies, the inverse lengthscale of the kernel; a
            hyperparameter.
        lead: leading dimensions; all models start with the same draw.
        generator: random generator of the draw.
        where, blur: see `Features`.
    """

    def __init__(
        self,
        shape: Sequence[int],
        width: int = 1024,
        sigma: float = 0.3,
        lead: Sequence[int] = (),
        generator: torch.Generator | None = None,
        where: Where = "weights",
        blur: float = 0.0,
    ) -> None:
        weight = torch.randn(width, *shape, generator=generator)
        phase = 2 * math.pi * torch.rand(width, generator=generator)
        super().__init__(*_repeated(weight, phase, lead), where, blur)
        self.weight.requires_grad_(False)
        self.bias.requires_grad_(False)
        self.sigma = Hyper(torch.full(tuple(lead), sigma))

    def frequency(self) -> Tensor:
        r"""Return $\sigma$."""
        return self.sigma.value

    @property
    def scale(self) -> float:
        r"""Return $\sqrt{2 / D}$."""
        return math.sqrt(2 / self.width)

    def activation(self, z: Tensor) -> Tensor:
        """Apply the cosine."""
        return z.cos()


class Rectified(Features):
    r"""Features $\phi = D^{-1/2} \max(0, W x + b)$ with learned W and b (Xavier).

    Args:
        shape: shape of one input, [c, h, w] or [d].
        width: number D of features.
        lead: leading dimensions; all models start with the same draw.
        generator: random generator of the draw.
        where, blur: see `Features`.
    """

    def __init__(
        self,
        shape: Sequence[int],
        width: int = 1024,
        lead: Sequence[int] = (),
        generator: torch.Generator | None = None,
        where: Where = "weights",
        blur: float = 0.0,
    ) -> None:
        bound = math.sqrt(6 / (math.prod(shape) + width))
        weight = bound * (2 * torch.rand(width, *shape, generator=generator) - 1)
        super().__init__(*_repeated(weight, torch.zeros(width), lead), where, blur)

    def activation(self, z: Tensor) -> Tensor:
        """Apply the rectifier."""
        return z.relu()


def _repeated(weight: Tensor, bias: Tensor, lead: Sequence[int]) -> tuple[Tensor, Tensor]:
    return weight.expand(*lead, *weight.shape).clone(), bias.expand(*lead, *bias.shape).clone()


def _check_floating(x: Tensor) -> None:
    if not x.is_floating_point():
        raise ValueError(f"Inputs must be floating-point numbers, got {x.dtype}. Use x.float().")


class NetworkFeatures(Averaged):
    """Features of any network under transformations of its input.

    Args:
        network: images [n, c, h, w] or vectors [n, d] -> features [n, width], which are vectors.
        example: a few inputs, to determine the features' shape.
    """

    def __init__(self, network: nn.Module, example: Tensor) -> None:
        super().__init__()
        _check_floating(example)
        with torch.no_grad(), eval_mode(network):  # BatchNorm keeps its statistics
            output = network(example)
        if output.dim() != 2 or len(output) != len(example):
            raise ValueError(
                f"The network must return features [{len(example)}, width], got "
                f"{list(output.shape)}. Add nn.Flatten()."
            )
        if example.dim() not in (2, 4):
            raise ValueError(
                f"Inputs must be images [n, c, h, w] or vectors [n, d], got {list(example.shape)}."
            )
        self.network, self.width, self.dim = network, output.shape[1], example.dim()
        self.like = output

    def raw(self, x: Tensor, maps: Tensor) -> Float[Tensor, "n s width"]:
        """Pass each input under each map through the network, as one large batch."""
        if x.dim() != self.dim:
            raise ValueError(f"Inputs must have {self.dim} dimensions, got {list(x.shape)}.")
        _check_floating(x)
        transformed = act(x, maps) if self.dim == 2 else resample(x, maps)
        features: Tensor = self.network(transformed.flatten(0, 1))
        return features.reshape(*transformed.shape[:2], self.width)
