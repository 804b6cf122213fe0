r"""Hidden layers whose features are averaged over transformations.

$$ \bar\phi(x) = \sum_s c_s\, \phi(W_1 T_s x + b) $$

(Learning Invariant Weights, eqs. 1, 2, 6). The maps act on the rows of $W_1$, as filter banks that
all data of a batch share, or on the inputs; up to interpolation both are the same. Everything takes
leading dimensions: many models side by side.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.core.parameters import Hyper, eval_mode
from symrazor.core.resampling import act, adjoint_resample, resample

Where = Literal["weights", "input"]


class Averaged(nn.Module):
    """Features under every map, and their average.

    Subclasses say what `raw` features are, how many (`width`), for how many models side by side
    (`lead`), and name one of their tensors (`like`), whose type and device the outputs follow.
    """

    lead: tuple[int, ...] = ()
    width: int
    like: Tensor

    @property
    def scale(self) -> float:
        """Factor of every feature, so that their squares add up to about 1."""
        return 1 / math.sqrt(self.width)

    def raw(self, x: Tensor, maps: Tensor) -> Float[Tensor, "*lead n s width"]:
        """Features before the scale."""
        raise NotImplementedError

    def forward(
        self,
        x: Tensor,
        maps: Float[Tensor, "*lead s d d"],
        weights: Float[Tensor, "s"] | None = None,
    ) -> Float[Tensor, "*lead n width"]:
        """Averaged features: pictures or vectors [*lead, n, ...] -> [*lead, n, width].

        Args:
            x: the inputs.
            maps: the transformations.
            weights: of the transformations, with sum 1; all the same by default.
        """
        every = self.raw(x, maps)
        if weights is None:
            return self.scale * every.mean(-2)
        return self.scale * (every * weights.unsqueeze(-1)).sum(-2)

    def every(
        self, x: Tensor, maps: Float[Tensor, "*lead s d d"]
    ) -> Float[Tensor, "*lead n s width"]:
        """The features under every map."""
        return self.scale * self.raw(x, maps)


class Features(Averaged):
    """A hidden layer on pictures [n, c, h, w] or vectors [n, d], seen through transformations.

    Args:
        weight: [*lead, width, *shape], a filter for each feature.
        bias: [*lead, width].
        where: whether the maps act on the "weights" or on the "input".
        blur: see `symrazor.core.resampling.resample`.
    """

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(
        self, weight: Tensor, bias: Tensor, where: Where = "weights", blur: float = 0.0
    ) -> None:
        """Keep the parameters; see the class."""
        super().__init__()
        if where not in ("weights", "input"):
            raise ValueError(f"expected where='weights' or 'input', got {where!r}")
        self.lead = tuple(bias.shape[:-1])
        self.shape = weight.shape[bias.dim() :]
        if weight.shape[: bias.dim()] != bias.shape or len(self.shape) not in (1, 3):
            raise ValueError(
                f"expected weights [..., width, channels, height, width] or [..., width, d] and a "
                f"bias for each, got {list(weight.shape)} and {list(bias.shape)}"
            )
        if not bias.numel():
            raise ValueError(f"expected at least 1 feature, got weights {list(weight.shape)}")
        self.where, self.blur = where, blur
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)
        self.width = bias.shape[-1]

    @property
    def like(self) -> Tensor:  # type: ignore[override]
        """The weights."""
        return self.weight

    def frequency(self) -> Tensor | None:
        """Factor of the linear part, one per model; None for 1."""
        return None

    def activation(self, z: Tensor) -> Tensor:
        """What is applied to each pre-activation, but for the scale."""
        raise NotImplementedError

    def raw(self, x: Tensor, maps: Tensor) -> Float[Tensor, "*lead n s width"]:
        """Activations."""
        return self.activation(self.preactivations(x, maps))

    def preactivations(
        self, x: Tensor, maps: Float[Tensor, "*lead s d d"]
    ) -> Float[Tensor, "*lead n s width"]:
        r"""$W_1 T_s x + b$ for every datum and map."""
        if (
            x.shape[len(self.lead) + 1 :] != self.shape
            or tuple(x.shape[: len(self.lead)]) != self.lead
        ):
            raise ValueError(
                f"expected inputs {[*self.lead, 'n', *self.shape]}, got {list(x.shape)}"
            )
        factor, weight = self.frequency(), torch.as_tensor(self.weight)
        if factor is not None:  # the smaller of the two: pictures, or the weights of vectors
            factor = factor.reshape(*self.lead, *[1] * (1 + len(self.shape)))
            x, weight = (x, weight * factor) if len(self.shape) == 1 else (x * factor, weight)
        by = self._by_input if self.where == "input" else self._by_weights
        found = by(x, weight, maps)
        return found.add_(self.bias[..., None, None, :])

    def filters(self, maps: Float[Tensor, "*lead s d d"]) -> Float[Tensor, "*lead s width c h w"]:
        r"""The filter banks $W_1 \circ T_s$ of pictures."""
        bank = adjoint_resample(self.weight, maps, self.blur)
        return bank.transpose(-5, -4)

    def _by_weights(self, x: Tensor, weight: Tensor, maps: Tensor) -> Tensor:
        """One filter bank per map, [*lead, width * s, pixels], and one product with all data."""
        if len(self.shape) == 1:
            return self._vectors(x, weight, maps)
        bank = adjoint_resample(weight, maps, self.blur)
        s = bank.shape[-4]
        flat = bank.reshape(*self.lead, self.width * s, -1)
        seen: Tensor = x.flatten(-3) @ flat.mT
        return seen.reshape(*seen.shape[:-1], self.width, s).mT

    def _by_input(self, x: Tensor, weight: Tensor, maps: Tensor) -> Tensor:
        moved = act(x, maps) if len(self.shape) == 1 else resample(x, maps, self.blur).flatten(-3)
        flat = weight.flatten(len(self.lead) + 1)
        seen: Tensor = moved.flatten(-3, -2) @ flat.mT  # no batch dimension to be repeated for
        return seen.reshape(*moved.shape[:-1], self.width)

    def _vectors(self, x: Tensor, weight: Tensor, maps: Tensor) -> Tensor:
        """W T x + W t, the linear and the constant part of an affine map."""
        d = self.shape[0]
        act(x[..., :1, :], maps)  # checks the sizes
        banks = torch.einsum("...wi,...sij->...swj", weight, maps[..., :d, :].to(x.dtype))
        seen = torch.einsum("...swj,...nj->...nsw", banks[..., :d], x)
        return seen if banks.shape[-1] == d else seen + banks[..., d].unsqueeze(-3)


class RandomFourier(Features):
    r"""$\phi = \sqrt{2 / D} \cos(\sigma W x + b)$ with W and b drawn once: a Gaussian kernel.

    Args:
        shape: of one input, [c, h, w] or [d].
        width: number D of features.
        sigma: deviation of the frequencies, the inverse of the kernel's lengthscale; a
            hyperparameter.
        lead: leading dimensions; all models start with the same draw.
        generator: of the draw.
        where: see `Features`.
        blur: see `Features`.
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
        """Draw frequencies and phases; see the class."""
        weight = torch.randn(width, *shape, generator=generator)
        phase = 2 * math.pi * torch.rand(width, generator=generator)
        super().__init__(*_repeated(weight, phase, lead), where, blur)
        self.weight.requires_grad_(False)
        self.bias.requires_grad_(False)
        self.sigma = Hyper(torch.full(tuple(lead), sigma))

    def frequency(self) -> Tensor:
        r"""$\sigma$."""
        return self.sigma.value

    @property
    def scale(self) -> float:
        r"""$\sqrt{2 / D}$."""
        return math.sqrt(2 / self.width)

    def activation(self, z: Tensor) -> Tensor:
        """The cosine."""
        return z.cos()


class Rectified(Features):
    r"""$\phi = D^{-1/2} \max(0, W x + b)$ with W and b learned as point estimates (Xavier).

    Args:
        shape: of one input, [c, h, w] or [d].
        width: number D of features.
        lead: leading dimensions; all models start with the same draw.
        generator: of the draw.
        where: see `Features`.
        blur: see `Features`.
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
        """Draw the weights; see the class."""
        bound = math.sqrt(6 / (math.prod(shape) + width))
        weight = bound * (2 * torch.rand(width, *shape, generator=generator) - 1)
        super().__init__(*_repeated(weight, torch.zeros(width), lead), where, blur)

    def activation(self, z: Tensor) -> Tensor:
        """The positive part."""
        return z.relu()


def _repeated(weight: Tensor, bias: Tensor, lead: Sequence[int]) -> tuple[Tensor, Tensor]:
    return weight.expand(*lead, *weight.shape).clone(), bias.expand(*lead, *bias.shape).clone()


class NetworkFeatures(Averaged):
    """Features of a network under transformations of its input.

    Args:
        network: pictures [n, c, h, w] or vectors [n, d] -> features [n, width].
        example: a few inputs, to see what comes out.

    Raises:
        ValueError: outputs that are not vectors.
    """

    def __init__(self, network: nn.Module, example: Tensor) -> None:
        """Look at the features of an example; see the class."""
        super().__init__()
        if not example.is_floating_point():
            raise ValueError(f"expected inputs of real numbers, got {example.dtype}; do x.float()")
        with torch.no_grad(), eval_mode(network):  # batch norms keep their averages
            found = network(example)
        if found.dim() != 2 or len(found) != len(example):
            raise ValueError(
                f"expected features [{len(example)}, width] from the network, got "
                f"{list(found.shape)}; do add nn.Flatten()"
            )
        if example.dim() not in (2, 4):
            raise ValueError(
                f"expected pictures [n, c, h, w] or vectors [n, d], got {list(example.shape)}"
            )
        self.network, self.width, self.dim = network, found.shape[1], example.dim()
        self.like = found

    def raw(self, x: Tensor, maps: Tensor) -> Float[Tensor, "n s width"]:
        """Each datum under each map through the network, as one large batch."""
        if x.dim() != self.dim:
            raise ValueError(f"expected inputs with {self.dim} dimensions, got {list(x.shape)}")
        if not x.is_floating_point():
            raise ValueError(f"expected inputs of real numbers, got {x.dtype}; do x.float()")
        moved = act(x, maps) if self.dim == 2 else resample(x, maps)
        found: Tensor = self.network(moved.flatten(0, 1))
        return found.reshape(*moved.shape[:2], self.width)
