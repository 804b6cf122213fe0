r"""Distributions over the elements of a Lie group with learned widths, and their sampling.

$$ T = \exp\Big(\sum_i \epsilon_i \eta_i G_i\Big), \qquad \epsilon \sim U[-1, 1]^k $$

(Learning Invariant Weights, eq. 3). A width $\eta_i = 0$ means no invariance to generator i; a
rotation of width $\pi$ is the uniform distribution over all rotations. An average over T is a
weighted sum over `Nodes` in the cube $[-1, 1]^k$:

| scheme | points |
|---|---|
| `stochastic` | independent uniform numbers |
| `antithetic` | the same in pairs e, -e |
| `sobol` | scrambled Sobol points |
| `shifted` | Sobol points with one random shift, modulo the cube; for k = 1 a shifted grid |
| `mirrored` | half as many shifted points and their mirror images, so that odd terms cancel |
| `grid` | n points in each direction, evenly spaced |
| `gauss` | Gauss-Legendre nodes, n in each direction |

An average is even in every width, so at small widths odd terms are most of the noise in its
gradient. Use `mirrored` for several generators and `shifted` on a whole circle.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.core.parameters import Hyper, Transform
from symrazor.core.validation import check_choice
from symrazor.groups.lie import HALF_WIDTHS, LOG_FACTOR, RADIANS, LieAlgebra, affine2, exponential

Random = Literal["stochastic", "antithetic", "sobol", "shifted", "mirrored"]
Fixed = Literal["grid", "gauss"]


class Nodes(NamedTuple):
    """Points of the cube and their weights, which sum to 1."""

    points: Float[Tensor, "*lead n k"]
    weights: Float[Tensor, "n"]

    def to(self, like: Tensor) -> "Nodes":
        """Return the nodes with the device and dtype of a tensor."""
        return Nodes(self.points.to(like), self.weights.to(like))


def draw(
    n: int,
    k: int,
    scheme: Random = "stochastic",
    generator: torch.Generator | None = None,
    lead: Sequence[int] = (),
) -> Nodes:
    """Draw random nodes; every point is uniform on the cube.

    Args:
        n: number of points, at least 1.
        k: dimension of the cube, at least 1.
        scheme: sampling scheme, see the module docstring.
        generator: random generator; the points are on its device.
        lead: leading dimensions for independent sets of n points, such as one per input.
    """
    _check(n, k, scheme, Random)
    lead = tuple(lead)
    device = torch.device("cpu") if generator is None else generator.device
    in_pairs = scheme in ("antithetic", "mirrored")
    count = (n + 1) // 2 if in_pairs else n
    if scheme == "sobol":
        seed = int(torch.randint(2**31, (), generator=generator, device=device))
        engine = torch.quasirandom.SobolEngine(k, scramble=True, seed=seed)
        drawn = engine.draw(n * math.prod(lead)).reshape(*lead, n, k)
        points = (2 * drawn - 1).to(device)
    elif scheme in ("shifted", "mirrored"):
        shift = torch.rand(*lead, 1, k, generator=generator, device=device)
        points = 2 * (_sobol(count, k).to(device) + shift).frac() - 1
    else:
        points = 2 * torch.rand(*lead, count, k, generator=generator, device=device) - 1
    if in_pairs:
        points = torch.cat([points, -points], -2)[..., :n, :]
    return Nodes(points, torch.full((n,), 1 / n, device=device))


def fixed(n: int, k: int, scheme: Fixed = "grid", periodic: Sequence[bool] | None = None) -> Nodes:
    r"""Return $n^k$ deterministic nodes in float64.

    Periodic directions (a rotation, for which -1 and 1 coincide at a width of $\pi$) never contain
    both ends: the spacing is 2/n for even and odd n. The other directions use the midpoints of n
    cells.

    Args:
        n: points in each direction.
        k: dimension; at most 100,000 points in total.
        scheme: "grid" or "gauss".
        periodic: which directions are periodic; none by default. Gauss-Legendre has no end points.
    """
    _check(n, k, scheme, Fixed)
    if n**k > 100_000:
        raise ValueError(
            f"A fixed rule can have at most 100,000 nodes, got {n} ** {k}. Draw random nodes with "
            "scheme='sobol'."
        )
    flags = [False] * k if periodic is None else list(periodic)
    if len(flags) != k:
        raise ValueError(f"periodic must have {k} entries, got {len(flags)}.")
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
    """Return the midpoints of n equal cells of [-1, 1]."""
    return (2 * torch.arange(n, dtype=torch.float64) + 1) / n - 1


def periodic_line(n: int) -> Float[Tensor, "n"]:
    """Return points with spacing 2/n on the circle [-1, 1): never both ends."""
    return midpoints(n) if n % 2 else midpoints(n) + 1 / n


@lru_cache(maxsize=32)
def _sobol(n: int, k: int) -> Tensor:
    """Return Sobol points; in one dimension an even grid for every n."""
    if k == 1:
        return torch.arange(n, dtype=torch.float32).unsqueeze(1) / n
    return torch.quasirandom.SobolEngine(k).draw(n)


def _check(n: int, k: int, scheme: str, schemes: object) -> None:
    if n < 1:
        raise ValueError(f"An average needs at least 1 transformation, got {n}.")
    if k < 1:
        raise ValueError(f"There must be at least 1 generator, got {k}.")
    check_choice("scheme", scheme, schemes)


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


MAX_EXPONENT_NORM = 16.0
"""Norm of a generator combination up to which its exponential is exact to rounding."""


class LieDistribution(nn.Module):
    r"""The distribution of $T = \exp(\sum_i \epsilon_i \eta_i G_i)$ for any Lie algebra.

    Args:
        algebra: names, units and generators; or only generators, [k, d, d].
        widths: initial $\eta$: a number, generator name -> number, or a tensor [*lead, k], whose
            leading dimensions are many distributions side by side. In the units of the algebra
            (radians, half-widths of the image, log factors).
        mask: [k] or [*lead, k], 0 where a width is fixed at zero.
        cap: maximal width of generators in radians; $\pi$ is the whole circle.
        form: parametrisation of a width, see `capped`: "sharp", nearly linear up to the cap;
            "tanh", a slow approach to the cap; "softplus", positive without a cap.

    Raises:
        ValueError: if a width is not positive or reaches the cap, or a generator or form is
            unknown.
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
        super().__init__()
        check_choice("form", form, Form)
        algebra = LieAlgebra.of(algebra) if isinstance(algebra, Tensor) else algebra
        self.algebra = algebra
        start = _widths(algebra, widths)
        has_cap = form != "softplus"
        caps = torch.tensor([cap if has_cap and u == RADIANS else math.inf for u in algebra.units])
        if not bool(((start > 0) & (start < caps)).all()):
            below = f" and below {cap:.4g} for generators in radians" if has_cap else ""
            too_small = bool((start <= 0).any())
            advice = "Use a mask for a width of 0." if too_small else "Give widths in radians."
            raise ValueError(f"Widths must be above 0{below}, got {start.tolist()}. {advice}")
        self.width = Hyper(start, capped(caps, form))
        mask = torch.ones(algebra.dim) if mask is None else mask
        if mask.shape not in (start.shape, start.shape[-1:]):
            raise ValueError(f"mask must have shape {list(start.shape)}, got {list(mask.shape)}.")
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise ValueError(f"mask must hold zeros and ones, got {mask.tolist()}.")
        self.register_buffer("mask", mask.to(start.dtype))
        self.register_buffer("generators", algebra.generators.to(start.dtype))

    @property
    def dim(self) -> int:
        """Return the number k of generators."""
        return self.algebra.dim

    @property
    def periodic(self) -> list[bool]:
        """Return which generators are rotations, whose two ends meet at the cap."""
        return [unit == RADIANS for unit in self.algebra.units]

    @property
    def widths(self) -> Float[Tensor, "*lead k"]:
        r"""Return $\eta$, differentiably; exactly 0 where masked."""
        return self.width.value * self.mask

    def matrices(self, points: Float[Tensor, "*#lead n k"]) -> Float[Tensor, "*#lead n d d"]:
        """Return the transformations at points of the cube."""
        if points.shape[-1] != self.dim:
            raise ValueError(
                f"Points must have {self.dim} numbers, one for each of "
                f"{', '.join(self.algebra.names)}, got {points.shape[-1]}."
            )
        widths = self.widths
        coefficients = points.to(widths) * widths.unsqueeze(-2)
        combined = torch.einsum("...k,kij->...ij", coefficients, self.generators)
        return exponential(combined, MAX_EXPONENT_NORM).to(combined.dtype)

    def draw(
        self,
        n: int,
        scheme: Random = "stochastic",
        generator: torch.Generator | None = None,
        lead: Sequence[int] = (),
    ) -> tuple[Float[Tensor, "*lead n d d"], Float[Tensor, "n"]]:
        """Return random transformations and their weights; see `draw`."""
        return self.at(draw(n, self.dim, scheme, generator, lead))

    def at(self, nodes: Nodes) -> tuple[Float[Tensor, "*lead n d d"], Float[Tensor, "n"]]:
        """Return the transformations and weights at given nodes."""
        points, weights = nodes.to(self.mask)
        return self.matrices(points), weights

    def nodes(self, n: int, scheme: Fixed = "grid") -> Nodes:
        """Return about n fixed nodes: a grid for at most two generators, else n Sobol points."""
        if self.dim <= 2:
            side = n if self.dim == 1 else max(1, round(math.sqrt(n)))
            return fixed(side, self.dim, scheme, self.periodic)
        return draw(n, self.dim, "sobol", torch.Generator().manual_seed(0))

    def describe(self, pixels: float | None = None) -> dict[str, Tensor]:
        """Return the widths by name in common units, [*lead] each.

        Angles are in degrees and log factors become factors. Translations are in pixels if `pixels`
        per half-width are given (half the width of the image), else in half-widths.
        """
        widths = self.widths.detach().unbind(-1)
        description: dict[str, Tensor] = {}
        for name, unit, width in zip(self.algebra.names, self.algebra.units, widths, strict=True):
            printed_unit, value = unit, width
            if unit == RADIANS:
                printed_unit, value = "degrees", width.rad2deg()
            elif unit == LOG_FACTOR:
                printed_unit, value = "factor", width.exp()
            elif unit == HALF_WIDTHS and pixels is not None:
                printed_unit, value = "px", width * pixels
            description[f"{name} ({printed_unit})" if printed_unit else name] = value
        return description

    def extra_repr(self) -> str:
        """Return the generators, for `print(model)`."""
        return ", ".join(self.algebra.names)


class AffineLie(LieDistribution):
    """A distribution over affine maps of the plane or a subgroup of them.

    Args:
        group: name of the subgroup, or names of some of the six generators.
        widths, mask, cap, form: see `LieDistribution`.
    """

    def __init__(
        self,
        group: Group | Sequence[str] = "affine",
        widths: Widths = 0.1,
        mask: Tensor | None = None,
        cap: float = math.pi,
        form: Form = "sharp",
    ) -> None:
        if isinstance(group, str) and group not in AFFINE_SUBGROUPS:
            raise ValueError(f"group must be one of {', '.join(AFFINE_SUBGROUPS)}, got {group!r}.")
        names = AFFINE_SUBGROUPS[group] if isinstance(group, str) else tuple(group)
        super().__init__(affine2().masked(names), widths, mask, cap, form)


SHARPNESS = 10.0
"""Inverse of the distance from 0 and from the cap at which a width starts to saturate."""


def capped(caps: Float[Tensor, "k"], form: Form = "sharp") -> Transform:
    r"""Return a transform to positive numbers below a cap c; inf for no cap.

    With the softplus $s_\beta(r) = \log(1 + e^{\beta r}) / \beta$:

    - "sharp": $c - s_\beta(c - s_\beta(r))$ with a large $\beta$, nearly r itself between the ends:
      an optimiser crosses the whole circle at an even pace, and can leave the cap again;
    - "softplus": $s_1(r)$, for widths without a cap;
    - "tanh": $c \tanh(s_1(r) / c)$, and $s_1(r)$ without a cap.
    """
    limits = caps.tolist()  # Python numbers need no copy to a device
    beta = SHARPNESS if form == "sharp" else 1.0
    by_tanh = form == "tanh"
    return Transform(
        partial(_cap, limits=limits, beta=beta, by_tanh=by_tanh),
        partial(_uncap, limits=limits, beta=beta, by_tanh=by_tanh),
        f"positive (below {limits})",
    )


def _cap(raw: Tensor, limits: Sequence[float], beta: float, by_tanh: bool) -> Tensor:
    def below(value: Tensor, limit: float) -> Tensor:
        if math.isinf(limit):
            return value
        if by_tanh:
            return limit * (value / limit).tanh()
        return limit - F.softplus(limit - value, beta)

    values = F.softplus(raw, beta).unbind(-1)
    return torch.stack([below(v, limit) for v, limit in zip(values, limits, strict=True)], -1)


def _uncap(value: Tensor, limits: Sequence[float], beta: float, by_tanh: bool) -> Tensor:
    def uncapped(width: Tensor, limit: float) -> Tensor:
        if math.isinf(limit):
            return width
        if by_tanh:
            return limit * (width / limit).atanh()
        return limit - _unsoftplus(limit - width, beta)

    exact = value.double().unbind(-1)  # in float32 a small width vanishes beside the cap
    raw = [_unsoftplus(uncapped(w, limit), beta) for w, limit in zip(exact, limits, strict=True)]
    return torch.stack(raw, -1).to(value)


def _unsoftplus(value: Tensor, beta: float) -> Tensor:
    return value + torch.log(-torch.expm1(-beta * value)) / beta


def _widths(algebra: LieAlgebra, widths: Widths) -> Tensor:
    if isinstance(widths, Mapping):
        if set(widths) != set(algebra.names):
            raise ValueError(
                f"widths must have an entry for each of {algebra.names}, got {list(widths)}."
            )
        return torch.tensor([widths[name] for name in algebra.names])
    if isinstance(widths, str):
        raise ValueError(f"widths must be numbers such as 0.1, got {widths!r}.")
    start = torch.as_tensor(widths, dtype=None if isinstance(widths, Tensor) else torch.float32)
    if start.dim() and start.shape[-1] != algebra.dim:
        raise ValueError(
            f"widths must have {algebra.dim} entries, one for each of "
            f"{', '.join(algebra.names)}, got shape {list(start.shape)}."
        )
    return start if start.dim() else start.expand(algebra.dim).clone()
