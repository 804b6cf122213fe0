r"""Points in the cube $[-1, 1]^k$ at which an average over transformations is taken.

An average over $T = \exp(\sum_i \epsilon_i \eta_i G_i)$ with $\epsilon$ uniform is a sum over
`Nodes`. Random ones are unbiased; grids are the same every time.

| scheme | points |
|---|---|
| `stochastic` | independent uniform numbers (Learning Invariant Weights, eq. 3) |
| `antithetic` | the same in pairs e, -e |
| `sobol` | scrambled Sobol points |
| `shifted` | Sobol points moved by one random shift, modulo the cube; for k = 1 a shifted grid |
| `mirrored` | half as many of those and their mirror images, so that odd terms cancel |
| `grid` | n points in each direction, evenly spaced |
| `gauss` | Gauss-Legendre nodes, n in each direction |

At small widths the odd terms are most of the noise in the gradient of an average, which is even in
every width: with several generators prefer `mirrored`, on a whole circle `shifted`.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

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
