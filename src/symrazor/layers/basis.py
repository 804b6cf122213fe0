r"""Filters from few anchors: an exponential basis on a grid of positions (ELLA Eq. 6).

Anchors $z_j$ with values $u_j$ make a smooth function of position, $s(t) = \sum_j u_j \Phi[j, t]$.
Two forms of the basis:

- "sum", the paper's: $\Phi[j, t] = \exp(-\omega^2 |t - z_j|^2)$;
- "interpolate": $\Phi = (K_{zz} + \epsilon^2 I)^{-1} K_{zt}$ with the same kernel, so that $u_j$ is
  (nearly) the value of the function at its anchor, whatever the number of anchors.

Positions are in pixels, with the origin in the middle of the grid. The inverse lengthscale $\omega$
says how fast the function may change with position: at $\omega = 0$ it is constant, and a layer of
such functions cannot tell positions apart.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.core.parameters import Hyper, positive, real
from symrazor.layers.path import is_integer, is_real

Form = Literal["sum", "interpolate"]
Role = Literal["fixed", "weight", "hyper"]
"""What omega or the anchors' places are.

"fixed": a constant. "weight": a random variable with a Gaussian prior and curvature of its own,
integrated out. "hyper": a hyperparameter that follows the gradient of the evidence.
"""

NOISE = 1e-2
"""epsilon of the interpolating form: how far values may be from the function at their anchors."""


def grid(shape: Sequence[int]) -> Float[Tensor, "s dims"]:
    """Positions of the pixels of a map in row-major order, origin in the middle."""
    axes = [_axis(size) for size in shape]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(shape))


def _axis(size: int, device: torch.device | None = None) -> Float[Tensor, " size"]:
    return torch.arange(size, dtype=torch.float64, device=device) - (size - 1) / 2


def spread(count: int, shape: Sequence[int]) -> Float[Tensor, "p dims"]:
    r"""So many anchors, evenly over a map: on its pixels if there is one for each.

    Else the points $\{ \tfrac12 + j\, \phi^{-i} \}$ of an additive recurrence, where $\phi$ solves
    $\phi^{d+1} = \phi + 1$: deterministic, and without the clusters and holes of random points.
    """
    if count == math.prod(shape):
        return grid(shape)
    dims = len(shape)
    phi = 2.0
    for _ in range(40):
        phi = (1 + phi) ** (1 / (dims + 1))
    steps = torch.tensor([phi ** -(i + 1) for i in range(dims)], dtype=torch.float64)
    unit = (0.5 + torch.arange(count, dtype=torch.float64).unsqueeze(1) * steps) % 1
    return (unit - 0.5) * (torch.tensor(shape, dtype=torch.float64) - 1)


def anchor_count(anchors: int | float, pixels: int) -> int:
    """A number of anchors, or (for a float) a fraction of the pixels, at least one.

    Raises:
        ValueError: more anchors than pixels, or none.
    """
    count = 0
    if is_real(anchors) and anchors > 0:
        count = int(anchors) if is_integer(anchors) else max(round(float(anchors) * pixels), 1)
    if not 1 <= count <= pixels:
        raise ValueError(
            f"expected between 1 and {pixels} anchors (or a fraction of the pixels, as a float), "
            f"got {anchors!r}"
        )
    return count


def _among(z: Float[Tensor, "p dims"], omega: Float[Tensor, ""]) -> Float[Tensor, "p p"]:
    r"""$\exp(-\omega^2 |z_i - z_j|^2)$ between anchors."""
    apart = z.new_zeros(())
    for along in z.unbind(1):  # a last axis of 2 or 3 would be slow to sum over
        apart = apart + (along.unsqueeze(1) - along).square()
    return torch.exp(-omega.square() * apart)


def _to_grid(
    z: Float[Tensor, "p dims"], shape: Sequence[int], omega: Float[Tensor, ""]
) -> Float[Tensor, "p s"]:
    r"""$\exp(-\omega^2 |z_i - t|^2)$ at the pixels t of a grid: a product over its axes."""
    total = z.new_ones(len(z), 1)
    for d, size in enumerate(shape):
        apart = z[:, d : d + 1] - _axis(size, z.device).to(z)
        along = torch.exp(-(omega * apart).square())
        total = (total.unsqueeze(2) * along.unsqueeze(1)).flatten(1)
    return total


KEPT = 16
"""Matrices that are remembered."""

_known: OrderedDict[tuple[object, ...], Tensor] = OrderedDict()


class Basis(nn.Module):
    r"""The matrix $\Phi[p, s]$ and what it is made of.

    Args:
        shape: the grid of positions s.
        anchors: how many, see `anchor_count`; or their places, in pixels from the middle.
        omega: the inverse lengthscale, per pixel.
        form: "sum" or "interpolate".
        learn_omega: role of omega.
        learn_anchors: role of the anchors' offsets from where they start (2P numbers on an image).
    """

    start: Tensor
    fixed: Tensor | None

    def __init__(
        self,
        shape: Sequence[int],
        anchors: float | Float[Tensor, "p dims"],
        omega: float = 1.0,
        form: Form = "interpolate",
        learn_omega: Role = "fixed",
        learn_anchors: Role = "fixed",
    ) -> None:
        """Place the anchors."""
        super().__init__()
        for name, value, allowed in (
            ("form", form, get_args(Form)),
            ("learn_omega", learn_omega, get_args(Role)),
            ("learn_anchors", learn_anchors, get_args(Role)),
        ):
            if value not in allowed:
                raise ValueError(f"expected {name} in {allowed}, got {value!r}")
        if not is_real(omega) or omega < 0:
            raise ValueError(f"expected an omega of at least 0, got {omega!r}")
        self.shape, self.form = tuple(shape), form
        self.learn_omega, self.learn_anchors = learn_omega, learn_anchors
        dtype = anchors.dtype if isinstance(anchors, Tensor) else torch.get_default_dtype()
        if not isinstance(anchors, Tensor):
            anchors = spread(anchor_count(anchors, math.prod(shape)), shape)
        elif anchors.dim() != 2 or anchors.shape[1] != len(shape):
            raise ValueError(
                f"expected anchors [p, {len(shape)}] on a grid of shape {self.shape}, "
                f"got {list(anchors.shape)}"
            )
        elif not dtype.is_floating_point or not bool(anchors.isfinite().all()):
            got = "nan or infinity" if dtype.is_floating_point else dtype
            raise ValueError(f"expected finite floating-point places of anchors, got {got}")
        self.register_buffer("start", anchors.detach().to(dtype).clone())
        self._hold("omega", torch.tensor(omega, dtype=dtype), learn_omega)
        self._hold("offsets", torch.zeros_like(self.start), learn_anchors)
        known = learn_omega == learn_anchors == "fixed"
        self.register_buffer("fixed", self._remembered() if known else None)

    def _hold(self, name: str, value: Tensor, role: Role) -> None:
        match role:
            case "fixed":
                self.register_buffer(name, value)
            case "weight":
                self.register_parameter(name, nn.Parameter(value))
            case _:
                self.add_module(name, Hyper(value, positive if name == "omega" else real))

    @property
    def count(self) -> int:
        """Number of anchors."""
        return len(self.start)

    def value(self, name: Literal["omega", "offsets"]) -> Tensor:
        """Omega or the offsets, whatever their role."""
        held = getattr(self, name)
        value: Tensor = held.value if isinstance(held, Hyper) else held
        return value

    @property
    def shaping(self) -> tuple[str, ...]:
        """Names of the parameters that are weights with a prior of their own."""
        roles = {"omega": self.learn_omega, "offsets": self.learn_anchors}
        return tuple(name for name, role in roles.items() if role == "weight")

    @property
    def options(self) -> dict[str, Any]:
        """What it was made with, omega as it is now."""
        return {
            "omega": abs(float(self.value("omega").detach())),
            "form": self.form,
            "learn_omega": self.learn_omega,
            "learn_anchors": self.learn_anchors,
        }

    def stretched(self, shape: Sequence[int], ratio: float) -> "Basis":
        """The same functions of place on a grid that is `ratio` times as fine."""
        options = {**self.options, "omega": self.options["omega"] / ratio}
        return Basis(shape, self.anchors.detach() * ratio, **options)

    @property
    def anchors(self) -> Float[Tensor, "p dims"]:
        """Where the anchors are."""
        return self.start + self.value("offsets")

    def _remembered(self) -> Float[Tensor, "p s"]:
        """Phi of places that nothing moves: solved once for all layers of a kind."""
        if self.start.device.type != "cpu":
            return self._matrix()
        places, options = self.start.double().numpy().tobytes(), str(self.options)
        key = places, str(self.start.dtype), options, self.shape
        if key not in _known:
            _known[key] = self._matrix()
            if len(_known) > KEPT:
                _known.popitem(last=False)
        return _known[key].clone()

    def _matrix(self) -> Float[Tensor, "p s"]:
        return evaluate(self.anchors, self.shape, self.value("omega"), self.form)

    def matrix(self) -> Float[Tensor, "p s"]:
        """Phi, differentiable in whatever is learned."""
        return self._matrix() if self.fixed is None else self.fixed

    def extra_repr(self) -> str:
        """Sizes and form, for `print(model)`."""
        return f"{self.count} anchors -> {self.shape}, form={self.form!r}"


OPTIONS = ("omega", "form", "learn_omega", "learn_anchors")


def basis_of(shape: Sequence[int], anchors: Any, **options: Any) -> Basis:
    """A basis of no more anchors than pixels, with options by name.

    Raises:
        ValueError: an unknown option, too many anchors, or what `Basis` refuses.
    """
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise ValueError(f"expected options among {list(OPTIONS)}, got {unknown}")
    pixels = math.prod(shape)
    if isinstance(anchors, Tensor) and anchors.dim() == 2 and not 1 <= len(anchors) <= pixels:
        raise ValueError(f"expected between 1 and {pixels} anchors, got {len(anchors)}")
    return Basis(shape, anchors, **options)


def evaluate(
    anchors: Float[Tensor, "p dims"],
    shape: Sequence[int],
    omega: Float[Tensor, ""],
    form: Form,
) -> Float[Tensor, "p s"]:
    """Phi on a grid, in the precision of the anchors; solved in float64."""
    if form == "sum":
        return _to_grid(anchors, shape, omega)
    z, w = anchors.double(), omega.double()
    noisy = _among(z, w) + NOISE**2 * torch.eye(len(z), dtype=z.dtype, device=z.device)
    # by Cholesky: derivatives of forward-mode ones of linalg.solve are wrong (pytorch 192540)
    root = torch.linalg.cholesky_ex(noisy)[0]
    return torch.cholesky_solve(_to_grid(z, shape, w), root).to(anchors.dtype)


def deviation(phi: Float[Tensor, "p s"], variance: float) -> float:
    """Standard deviation of u for which u Phi has this variance, averaged over positions."""
    return math.sqrt(variance / float(phi.square().sum(0).mean()))


def nearest(phi: Float[Tensor, "p s"], dense: Float[Tensor, "... s"]) -> Float[Tensor, "... p"]:
    """The u for which u Phi is nearest to the dense values, by least squares."""
    flat = dense.detach().double().reshape(-1, dense.shape[-1])
    found: Tensor = torch.linalg.lstsq(phi.detach().double().T, flat.T, driver="gelsd").solution
    return found.T.reshape(*dense.shape[:-1], -1).to(dense)


def prior_groups(path: nn.Module) -> dict[str, list[str]]:
    """Names of the parameters of a path with bases, by the prior they belong to.

    Anchor values and channel biases together, named ""; lengthscales "omega"; anchors' offsets
    "anchors". Where lengthscales are random, pixel biases are with them: then both are what breaks
    the symmetry, and the values alone cannot.
    """
    groups: dict[str, list[str]] = {}
    names = [name for name, _ in path.named_parameters()]
    random = any(name.endswith("basis.omega") for name in names)
    for name in names:
        if name.endswith("basis.offsets"):
            group = "anchors"
        elif random and (name.endswith("basis.omega") or name.startswith("offset.")):
            group = "omega"
        else:
            group = ""
        groups.setdefault(group, []).append(name)
    return groups
