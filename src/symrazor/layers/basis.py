r"""Build smooth functions of position from a few anchors: an exponential basis (ELLA Eq. 6).

Anchors $z_j$ with values $u_j$ define $s(t) = \sum_j u_j \Phi[j, t]$. The basis has two forms:

- "sum", as in the paper: $\Phi[j, t] = \exp(-\omega^2 |t - z_j|^2)$;
- "interpolate": $\Phi = (K_{zz} + \epsilon^2 I)^{-1} K_{zt}$ with the same kernel, so that $u_j$ is
  nearly the value of the function at its anchor, for any number of anchors.

Positions are in pixels, with the origin in the middle of the grid. The inverse lengthscale $\omega$
limits how fast the function changes with position. At $\omega = 0$ it is constant, and a layer of
such functions does not distinguish positions.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.core.parameters import Hyper, positive, real
from symrazor.core.validation import check_choice, check_known
from symrazor.groups.action import grid_positions
from symrazor.groups.lie import recurrence_steps
from symrazor.layers.path import is_integer, is_real

Form = Literal["sum", "interpolate"]
Role = Literal["fixed", "weight", "hyper"]
"""Role of omega or of the anchor positions.

"fixed": a constant. "weight": a random variable with its own Gaussian prior and curvature, which is
integrated out. "hyper": a hyperparameter that follows the gradient of the evidence.
"""

INTERPOLATION_NOISE = 1e-2
"""epsilon of the interpolating form: distance allowed between values and function at anchors."""

CACHE_SIZE = 16
"""Number of basis matrices that are cached."""

BASIS_OPTIONS = ("omega", "form", "learn_omega", "learn_anchors")

_cache: OrderedDict[tuple[object, ...], Tensor] = OrderedDict()


def spread_anchors(count: int, shape: Sequence[int]) -> Float[Tensor, "p dims"]:
    r"""Return `count` anchors spread evenly over a map; the pixels themselves if there is one each.

    Otherwise anchor j is $\{ \tfrac12 + j\, s \}$ with the steps s of `recurrence_steps`.
    """
    if count == math.prod(shape):
        return grid_positions(shape)
    steps = recurrence_steps(len(shape))
    unit = (0.5 + torch.arange(count, dtype=torch.float64).unsqueeze(1) * steps) % 1
    return (unit - 0.5) * (torch.tensor(shape, dtype=torch.float64) - 1)


def anchor_count(anchors: int | float, pixels: int) -> int:
    """Return a number of anchors, given as an int or, as a float, as a fraction of the pixels."""
    count = 0
    if is_real(anchors) and anchors > 0:
        count = int(anchors) if is_integer(anchors) else max(round(float(anchors) * pixels), 1)
    if not 1 <= count <= pixels:
        raise ValueError(
            f"anchors must be an int from 1 to {pixels}, or a float: a fraction of the pixels; "
            f"got {anchors!r}."
        )
    return count


def _kernel_between_anchors(
    z: Float[Tensor, "p dims"], omega: Float[Tensor, ""]
) -> Float[Tensor, "p p"]:
    squared = z.new_zeros(())
    for coordinate in z.unbind(1):  # summing over a last axis of size 2 or 3 would be slow
        squared = squared + (coordinate.unsqueeze(1) - coordinate).square()
    return torch.exp(-omega.square() * squared)


def _kernel_to_grid(
    z: Float[Tensor, "p dims"], shape: Sequence[int], omega: Float[Tensor, ""]
) -> Float[Tensor, "p s"]:
    """Evaluate the kernel at the pixels of a grid, as a product over its axes."""
    total = z.new_ones(len(z), 1)
    for d, size in enumerate(shape):
        axis = torch.arange(size, dtype=torch.float64, device=z.device) - (size - 1) / 2
        difference = z[:, d : d + 1] - axis.to(z)
        along_axis = torch.exp(-(omega * difference).square())
        total = (total.unsqueeze(2) * along_axis.unsqueeze(1)).flatten(1)
    return total


def evaluate_basis(
    anchors: Float[Tensor, "p dims"], shape: Sequence[int], omega: Float[Tensor, ""], form: Form
) -> Float[Tensor, "p s"]:
    """Return Phi on a grid in the dtype of the anchors; linear systems are solved in float64."""
    if form == "sum":
        return _kernel_to_grid(anchors, shape, omega)
    z, w = anchors.double(), omega.double()
    noise = INTERPOLATION_NOISE**2 * torch.eye(len(z), dtype=z.dtype, device=z.device)
    # Cholesky, because derivatives of forward-mode derivatives of linalg.solve are wrong
    # (pytorch issue 192540).
    root = torch.linalg.cholesky_ex(_kernel_between_anchors(z, w) + noise)[0]
    return torch.cholesky_solve(_kernel_to_grid(z, shape, w), root).to(anchors.dtype)


class Basis(nn.Module):
    r"""The matrix $\Phi[p, s]$ of p anchors on a grid of s positions.

    Args:
        shape: shape of the grid.
        anchors: their number, see `anchor_count`; or their positions, in pixels from the middle.
        omega: inverse lengthscale, per pixel.
        form: "sum" or "interpolate".
        learn_omega: role of omega.
        learn_anchors: role of the anchors' offsets from their start (2P numbers on an image).
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
        super().__init__()
        check_choice("form", form, Form)
        check_choice("learn_omega", learn_omega, Role)
        check_choice("learn_anchors", learn_anchors, Role)
        if not is_real(omega) or omega < 0:
            raise ValueError(f"omega must be at least 0, got {omega!r}.")
        self.shape, self.form = tuple(shape), form
        self.learn_omega, self.learn_anchors = learn_omega, learn_anchors
        dtype = anchors.dtype if isinstance(anchors, Tensor) else torch.get_default_dtype()
        if not isinstance(anchors, Tensor):
            anchors = spread_anchors(anchor_count(anchors, math.prod(shape)), shape)
        elif anchors.dim() != 2 or anchors.shape[1] != len(shape):
            raise ValueError(
                f"anchors must be [p, {len(shape)}] on a grid of shape {self.shape}, "
                f"got {list(anchors.shape)}."
            )
        elif not dtype.is_floating_point or not bool(anchors.isfinite().all()):
            got = "nan or infinity" if dtype.is_floating_point else dtype
            raise ValueError(f"Anchor positions must be finite floating-point numbers, got {got}.")
        self.register_buffer("start", anchors.detach().to(dtype).clone())
        self._register("omega", torch.tensor(omega, dtype=dtype), learn_omega)
        self._register("offsets", torch.zeros_like(self.start), learn_anchors)
        constant = learn_omega == learn_anchors == "fixed"
        self.register_buffer("fixed", self._cached_matrix() if constant else None)

    def _register(self, name: str, value: Tensor, role: Role) -> None:
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
        """Return omega or the offsets, whatever their role."""
        holder = getattr(self, name)
        value: Tensor = holder.value if isinstance(holder, Hyper) else holder
        return value

    @property
    def shaping(self) -> tuple[str, ...]:
        """Names of the parameters that are weights with their own prior."""
        roles = {"omega": self.learn_omega, "offsets": self.learn_anchors}
        return tuple(name for name, role in roles.items() if role == "weight")

    @property
    def options(self) -> dict[str, Any]:
        """Options to construct an equal basis, with the current value of omega."""
        return {
            "omega": abs(float(self.value("omega").detach())),
            "form": self.form,
            "learn_omega": self.learn_omega,
            "learn_anchors": self.learn_anchors,
        }

    def stretched(self, shape: Sequence[int], ratio: float) -> "Basis":
        """Return the same functions of position on a grid that is `ratio` times as fine."""
        options = {**self.options, "omega": self.options["omega"] / ratio}
        return Basis(shape, self.anchors.detach() * ratio, **options)

    @property
    def anchors(self) -> Float[Tensor, "p dims"]:
        """Current positions of the anchors."""
        return self.start + self.value("offsets")

    def _cached_matrix(self) -> Float[Tensor, "p s"]:
        """Return a constant Phi; layers of the same kind share the computation."""
        if self.start.device.type != "cpu":
            return self._matrix()
        positions = self.start.double().numpy().tobytes()
        key = positions, str(self.start.dtype), str(self.options), self.shape
        if key not in _cache:
            _cache[key] = self._matrix()
            if len(_cache) > CACHE_SIZE:
                _cache.popitem(last=False)
        return _cache[key].clone()

    def _matrix(self) -> Float[Tensor, "p s"]:
        return evaluate_basis(self.anchors, self.shape, self.value("omega"), self.form)

    def matrix(self) -> Float[Tensor, "p s"]:
        """Return Phi, differentiable in omega and the anchors if these are learned."""
        return self._matrix() if self.fixed is None else self.fixed

    def extra_repr(self) -> str:
        """Return the sizes and the form."""
        return f"{self.count} anchors -> {self.shape}, form={self.form!r}"


def make_basis(shape: Sequence[int], anchors: Any, **options: Any) -> Basis:
    """Return a basis with no more anchors than pixels, or `anchors` itself if it is a `Basis`."""
    if isinstance(anchors, Basis):
        if options or anchors.shape != tuple(shape):
            raise ValueError(
                f"Pass a basis of shape {tuple(shape)} without further options, got the shape "
                f"{anchors.shape} and the options {sorted(options)}."
            )
        return anchors
    check_known(options, BASIS_OPTIONS)
    pixels = math.prod(shape)
    if isinstance(anchors, Tensor) and anchors.dim() == 2 and not 1 <= len(anchors) <= pixels:
        raise ValueError(f"The number of anchors must be 1 to {pixels}, got {len(anchors)}.")
    return Basis(shape, anchors, **options)


def value_deviation(phi: Float[Tensor, "p s"], variance: float) -> float:
    """Return the standard deviation of u that gives u Phi this variance, averaged over s."""
    return math.sqrt(variance / float(phi.square().sum(0).mean()))


def fit_values(phi: Float[Tensor, "p s"], dense: Float[Tensor, "... s"]) -> Float[Tensor, "... p"]:
    """Return the values u whose function u Phi is nearest to `dense`, by least squares."""
    flat = dense.detach().double().reshape(-1, dense.shape[-1])
    values: Tensor = torch.linalg.lstsq(phi.detach().double().T, flat.T, driver="gelsd").solution
    return values.T.reshape(*dense.shape[:-1], -1).to(dense)
