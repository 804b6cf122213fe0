r"""Distributions over the elements of a Lie group, with widths that can be learned.

$$ T = \exp\Big(\sum_i \epsilon_i \eta_i G_i\Big), \qquad \epsilon \sim U[-1, 1]^k $$

(Learning Invariant Weights, eq. 3). A width $\eta_i = 0$ is no invariance to the i-th generator; a
rotation of width $\pi$ is all rotations, evenly.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.core.parameters import Hyper, Transform
from symrazor.groups.lie import HALF_WIDTHS, LOG_FACTOR, RADIANS, LieAlgebra, affine2
from symrazor.linalg.matrix_functions import exponential

Random = Literal["stochastic", "antithetic", "sobol", "shifted", "mirrored"]
Fixed = Literal["grid", "gauss"]


class Nodes(NamedTuple):
    """Points of the cube and their weights, which add up to 1 (over the last dimension)."""

    points: Float[Tensor, "*lead n k"]
    weights: Float[Tensor, "n"]

    def to(self, like: Tensor) -> "Nodes":
        """With the device and the type of a tensor."""
        return Nodes(self.points.to(like), self.weights.to(like))


def draw(
    n: int,
    k: int,
    scheme: Random = "stochastic",
    generator: torch.Generator | None = None,
    lead: Sequence[int] = (),
) -> Nodes:
    """Random nodes; every point is uniform on the cube.

    Args:
        n: number of points.
        k: dimension of the cube.
        scheme: see the module.
        generator: of the random numbers; the points are on its device.
        lead: leading dimensions, as many independent sets of n points (one per datum, say).

    Raises:
        ValueError: no points, no dimension, an unknown scheme.
    """
    _check(n, k, scheme, get_args(Random))
    lead = tuple(lead)
    device = torch.device("cpu") if generator is None else generator.device
    if scheme == "sobol":
        points = _scrambled(n, k, lead, generator).to(device)
    elif scheme in ("shifted", "mirrored"):
        count = n if scheme == "shifted" else -(-n // 2)
        shift = torch.rand(*lead, 1, k, generator=generator, device=device)
        points = 2 * (_sobol(count, k).to(device) + shift).frac() - 1
        if scheme == "mirrored":
            points = torch.cat([points, -points], -2)[..., :n, :]
    elif scheme == "antithetic":
        half = 2 * torch.rand(*lead, -(-n // 2), k, generator=generator, device=device) - 1
        points = torch.cat([half, -half], -2)[..., :n, :]
    else:
        points = 2 * torch.rand(*lead, n, k, generator=generator, device=device) - 1
    return Nodes(points, torch.full((n,), 1 / n, device=device))


def fixed(n: int, k: int, scheme: Fixed = "grid", periodic: Sequence[bool] | None = None) -> Nodes:
    r"""Deterministic nodes, $n^k$ of them, in float64.

    Directions that are periodic (a rotation, whose -1 and 1 meet at a width of $\pi$) never hold
    both ends: the spacing is 2/n whether n is even or odd. The others are midpoints of n cells.

    Args:
        n: points in each direction.
        k: dimension; more than 100,000 points are refused.
        scheme: "grid" or "gauss".
        periodic: which directions are; none by default. A Gauss-Legendre rule has no end points.
    """
    _check(n, k, scheme, get_args(Fixed))
    if n**k > 100_000:
        raise ValueError(
            f"expected at most 100,000 nodes, got {n} ** {k}; do draw random ones (scheme='sobol')"
        )
    flags = [False] * k if periodic is None else list(periodic)
    if len(flags) != k:
        raise ValueError(f"expected {k} flags in periodic, got {len(flags)}")
    if scheme == "gauss":
        places, masses = (torch.from_numpy(v) for v in np.polynomial.legendre.leggauss(n))
        lines, shares = [places] * k, [masses / 2] * k
    else:
        lines = [periodic_line(n) if flag else midpoints(n) for flag in flags]
        shares = [torch.full((n,), 1 / n, dtype=torch.float64)] * k
    points = torch.cartesian_prod(*lines).reshape(-1, k)
    weights = torch.cartesian_prod(*shares).reshape(-1, k).prod(-1)
    return Nodes(points, weights)


def midpoints(n: int) -> Float[Tensor, "n"]:
    """The middles of n equal cells of [-1, 1]."""
    return (2 * torch.arange(n, dtype=torch.float64) + 1) / n - 1


def periodic_line(n: int) -> Float[Tensor, "n"]:
    """Points with spacing 2/n on a circle [-1, 1): middles for odd n; for even n 0 and 1 too."""
    return midpoints(n) if n % 2 else midpoints(n) + 1 / n


def _scrambled(n: int, k: int, lead: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    seed = int(torch.randint(2**31, (), generator=generator, device=_device(generator)))
    engine = torch.quasirandom.SobolEngine(k, scramble=True, seed=seed)
    count = n * int(np.prod(lead, dtype=int))
    return 2 * engine.draw(count).reshape(*lead, n, k) - 1


@lru_cache(maxsize=32)
def _sobol(n: int, k: int) -> Tensor:
    """Sobol points; in one dimension an even grid for every n."""
    if k == 1:
        return torch.arange(n, dtype=torch.float32).unsqueeze(1) / n
    return torch.quasirandom.SobolEngine(k).draw(n)


def _device(generator: torch.Generator | None) -> torch.device:
    return torch.device("cpu") if generator is None else generator.device


def _check(n: int, k: int, scheme: str, known: tuple[str, ...]) -> None:
    if n < 1:
        raise ValueError(f"expected at least 1 transformation to average over, got S = {n}")
    if k < 1:
        raise ValueError(f"expected at least 1 generator, got {k}")
    if scheme not in known:
        raise ValueError(f"expected a scheme in {', '.join(known)}, got {scheme!r}")


Widths = float | Mapping[str, float] | Tensor
Group = Literal["rotation", "translation", "scale", "affine"]
Form = Literal["sharp", "softplus", "tanh"]

AFFINE_SUBGROUPS: dict[str, tuple[str, ...]] = {
    "rotation": ("rotation",),
    "translation": ("x-translation", "y-translation"),
    "scale": ("x-scale", "y-scale"),
    "affine": affine2().names,
}
"""Subgroup of the affine maps of the plane -> its generators."""


LARGEST = 16.0
"""Norm of generators times coefficients up to which exponentials are exact to rounding."""


class LieDistribution(nn.Module):
    r"""$T = \exp(\sum_i \epsilon_i \eta_i G_i)$ for any Lie algebra.

    Args:
        algebra: names, units and generators; or generators alone, [k, d, d].
        widths: where $\eta$ starts: one number, generator name -> number, or a tensor [*lead, k],
            whose leading dimensions are those of many distributions side by side. In the units of
            the algebra (radians, half-widths of the picture, log factors).
        mask: [k] or [*lead, k], 0 where a width is and stays zero.
        cap: largest width of generators in radians; $\pi$ is the whole circle.
        form: how a width follows from its raw parameter, see `capped`: "sharp", nearly linear up to
            the cap; "tanh", a slow approach to it; "softplus", positive and without a cap.

    Raises:
        ValueError: a width that is not positive or at the cap, an unknown generator or form.
    """

    generators: Tensor
    mask: Tensor

    def __init__(
        self,
        algebra: LieAlgebra | Tensor,
        widths: Widths = 0.1,
        mask: Tensor | None = None,
        cap: float = math.pi,
        form: Form = "sharp",
    ) -> None:
        """Start at some widths; see the class."""
        super().__init__()
        if form not in get_args(Form):
            raise ValueError(f"expected a form in {', '.join(get_args(Form))}, got {form!r}")
        algebra = LieAlgebra.of(algebra) if isinstance(algebra, Tensor) else algebra
        self.algebra = algebra
        start = _widths(algebra, widths)
        ends = form != "softplus"
        caps = torch.tensor([cap if ends and u == RADIANS else math.inf for u in algebra.units])
        if not bool(((start > 0) & (start < caps)).all()):
            below = f" and below {cap:.4g} for generators in radians" if ends else ""
            do = "use a mask for a width of 0" if bool((start <= 0).any()) else "use radians"
            raise ValueError(f"expected widths above 0{below}, got {start.tolist()}; do {do}")
        self.width = Hyper(start, capped(caps, form))
        mask = torch.ones(algebra.dim) if mask is None else mask
        if mask.shape not in (start.shape, start.shape[-1:]):
            raise ValueError(f"expected a mask {list(start.shape)}, got {list(mask.shape)}")
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise ValueError(f"expected a mask of zeros and ones, got {mask.tolist()}")
        self.register_buffer("mask", mask.to(start.dtype))
        self.register_buffer("generators", algebra.generators.to(start.dtype))

    @property
    def dim(self) -> int:
        """Number k of generators."""
        return self.algebra.dim

    @property
    def periodic(self) -> list[bool]:
        """Which generators turn: at the cap their two ends meet."""
        return [unit == RADIANS for unit in self.algebra.units]

    @property
    def widths(self) -> Float[Tensor, "*lead k"]:
        r"""$\eta$, differentiable; exactly 0 where masked."""
        return self.width.value * self.mask

    def matrices(self, points: Float[Tensor, "*#lead n k"]) -> Float[Tensor, "*#lead n d d"]:
        """The transformations at some points of the cube."""
        if points.shape[-1] != self.dim:
            raise ValueError(
                f"expected points of {self.dim} numbers, one for each of "
                f"{', '.join(self.algebra.names)}, got {points.shape[-1]}"
            )
        widths = self.widths
        coefficients = points.to(widths) * widths.unsqueeze(-2)
        combined = torch.einsum("...k,kij->...ij", coefficients, self.generators)
        return exponential(combined, LARGEST).to(combined.dtype)

    def draw(
        self,
        n: int,
        scheme: Random = "stochastic",
        generator: torch.Generator | None = None,
        lead: Sequence[int] = (),
    ) -> tuple[Float[Tensor, "*lead n d d"], Float[Tensor, "n"]]:
        """Random transformations and their weights; see `draw`."""
        return self.at(draw(n, self.dim, scheme, generator, lead))

    def at(self, nodes: Nodes) -> tuple[Float[Tensor, "*lead n d d"], Float[Tensor, "n"]]:
        """Transformations and weights at given nodes."""
        points, weights = nodes.to(self.mask)
        return self.matrices(points), weights

    def nodes(self, n: int, scheme: Fixed = "grid") -> Nodes:
        """About n fixed nodes: a grid for at most two generators, else n Sobol points."""
        if self.dim <= 2:
            side = n if self.dim == 1 else max(1, round(math.sqrt(n)))
            return fixed(side, self.dim, scheme, self.periodic)
        return draw(n, self.dim, "sobol", torch.Generator().manual_seed(0))

    def describe(self, pixels: float | None = None) -> dict[str, Tensor]:
        """Widths by name in units a person thinks in, [*lead] each.

        Angles in degrees, log factors as factors, translations in pixels if told how many a
        half-width is (half the width of the picture), else in half-widths.
        """
        widths = self.widths.detach().unbind(-1)
        units = zip(self.algebra.names, self.algebra.units, widths, strict=True)
        return {_named(name, unit, pixels): _converted(v, unit, pixels) for name, unit, v in units}

    def extra_repr(self) -> str:
        """Generators, for `print(model)`."""
        return ", ".join(self.algebra.names)


class AffineLie(LieDistribution):
    """Affine maps of the plane, or a subgroup: rotation, translation, scale, affine.

    Args:
        group: which; or the names of some of the six generators.
        widths: see `LieDistribution`.
        mask: see `LieDistribution`.
        cap: largest rotation, in radians.
        form: see `LieDistribution`.
    """

    def __init__(
        self,
        group: Group | Sequence[str] = "affine",
        widths: Widths = 0.1,
        mask: Tensor | None = None,
        cap: float = math.pi,
        form: Form = "sharp",
    ) -> None:
        """Start at some widths; see the class."""
        if isinstance(group, str) and group not in AFFINE_SUBGROUPS:
            raise ValueError(f"expected a group in {', '.join(AFFINE_SUBGROUPS)}, got {group!r}")
        names = AFFINE_SUBGROUPS[group] if isinstance(group, str) else tuple(group)
        super().__init__(affine2().masked(names), widths, mask, cap, form)


SHARPNESS = 10.0
"""Inverse of the distance from 0 and from a cap within which a width begins to saturate."""


def capped(caps: Float[Tensor, "k"], form: Form = "sharp") -> Transform:
    r"""Positive numbers below a cap c; inf for none.

    With the softplus $s_\beta(r) = \log(1 + e^{\beta r}) / \beta$:

    - "sharp": $c - s_\beta(c - s_\beta(r))$ with a large $\beta$, nearly r itself between the ends:
      an optimiser crosses the whole circle at an even pace, and can leave a cap again;
    - "softplus": $s_1(r)$, for widths without a cap;
    - "tanh": $c \tanh(s_1(r) / c)$, and $s_1(r)$ where there is no cap.
    """
    limits = caps.tolist()  # numbers, not a tensor: nothing to copy to a device
    text = f"positive (below {limits})"
    beta = SHARPNESS if form == "sharp" else 1.0
    bend, straighten = (_tanh, _untanh) if form == "tanh" else (_fold, _unfold)
    return Transform(
        partial(_cap, limits=limits, beta=beta, bend=bend),
        partial(_uncap, limits=limits, beta=beta, straighten=straighten),
        text,
    )


Bend = Callable[[Tensor, float, float], Tensor]


def _cap(raw: Tensor, limits: Sequence[float], beta: float, bend: Bend) -> Tensor:
    values = F.softplus(raw, beta).unbind(-1)
    capped = [
        value if math.isinf(limit) else bend(value, limit, beta)
        for value, limit in zip(values, limits, strict=True)
    ]
    return torch.stack(capped, -1)


def _uncap(value: Tensor, limits: Sequence[float], beta: float, straighten: Bend) -> Tensor:
    exact = value.double()  # a small width is less than the rounding of a cap in single precision
    raw = [
        _unsoftplus(part if math.isinf(limit) else straighten(part, limit, beta), beta)
        for part, limit in zip(exact.unbind(-1), limits, strict=True)
    ]
    return torch.stack(raw, -1).to(value)


def _fold(value: Tensor, limit: float, beta: float) -> Tensor:
    return limit - F.softplus(limit - value, beta)


def _unfold(value: Tensor, limit: float, beta: float) -> Tensor:
    return limit - _unsoftplus(limit - value, beta)


def _tanh(value: Tensor, limit: float, beta: float) -> Tensor:
    return limit * (value / limit).tanh()


def _untanh(value: Tensor, limit: float, beta: float) -> Tensor:
    return limit * (value / limit).atanh()


def _unsoftplus(value: Tensor, beta: float) -> Tensor:
    return value + torch.log(-torch.expm1(-beta * value)) / beta


def _widths(algebra: LieAlgebra, widths: Widths) -> Tensor:
    if isinstance(widths, Mapping):
        if set(widths) != set(algebra.names):
            raise ValueError(f"expected a width for each of {algebra.names}, got {list(widths)}")
        return torch.tensor([widths[name] for name in algebra.names])
    if isinstance(widths, str):
        raise ValueError(f"expected widths as numbers, got {widths!r}; do: widths=0.1, say")
    start = torch.as_tensor(widths, dtype=None if isinstance(widths, Tensor) else torch.float32)
    if start.dim() and start.shape[-1] != algebra.dim:
        raise ValueError(
            f"expected {algebra.dim} widths, one for each of {', '.join(algebra.names)}, got shape "
            f"{list(start.shape)}"
        )
    return start if start.dim() else start.expand(algebra.dim).clone()


def _named(name: str, unit: str, pixels: float | None) -> str:
    short = {
        RADIANS: "degrees",
        LOG_FACTOR: "factor",
        HALF_WIDTHS: "half-widths" if pixels is None else "px",
    }
    return f"{name} ({short.get(unit, unit)})" if short.get(unit, unit) else name


def _converted(value: Tensor, unit: str, pixels: float | None) -> Tensor:
    if unit == RADIANS:
        return value.rad2deg()
    if unit == LOG_FACTOR:
        return value.exp()
    return value * pixels if unit == HALF_WIDTHS and pixels is not None else value
