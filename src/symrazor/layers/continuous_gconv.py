r"""Define group convolutions with basis functions of position and angle, or position and scale.

A filter of a group convolution is a function $\psi(\delta, \theta)$ of an offset and of the element
of an input field relative to that of the output. Here it is a sum over P anchors $(z_p, \tau_p)$ on
the continuous group, sampled at the n elements that the channels represent:

| group | $\psi(\delta, \cdot)$ | at the element g |
|---|---|---|
| SE(2) | $\sum_p u_p\, e^{-\omega^2 |\delta - z_p|^2}\, e^{\kappa (\cos(\theta - \tau_p) - 1)}$ |
  $\psi(R_g^{-1} \delta,\; \theta_h - \theta_g)$: anchors at $R_g z_p$, $\tau_p + \theta_g$ |
| scale | $\sum_p u_p\, e^{-\omega^2 |\delta - z_p|^2}\, e^{-(\lambda - \tau_p)^2 / 2\sigma^2}$ |
  $s_g^{-2}\, \psi(\delta / s_g,\; \ln s_h - \ln s_g)$: at $s_g z_p$, of widths $s_g / \omega$ |

Nothing is interpolated, the number of weights DCP does not grow with n, and the same anchors serve
any n (ELLA App. B, "continuous kernels"). The products of both functions at every element form the
basis B of a bank of filters,

$$ y[g, o](t) = \sum_{h, c, \delta} \psi_g[o, h, c](\delta)\, x[h, c](t + \delta) + b[o] ,\qquad
   \psi_g[o, h, c](\delta) = \sum_p u[o, c, p]\, B[g, p, h, \delta] . $$

In the weight-sharing format an element g is one more use of u, on
$a[n, (g, t), (c, p)] = \sum_{h, \delta} B[g, p, h, \delta]\, x[n, h, c](t + \delta)$.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.core.validation import check_choice
from symrazor.curvature.convolution import all_patches, input_factor
from symrazor.curvature.weight_sharing import Sharing, sharing
from symrazor.layers.basis import anchor_count, evaluate_basis, spread_anchors
from symrazor.layers.conv import ComputedFilter, Filter, FilterPath, Padding
from symrazor.layers.gconv import GConv
from symrazor.layers.path import is_integer, is_real

Lifting = Literal["full", "lift"]
MAX_ANGLES = 999


class BankFilter(ComputedFilter):
    """Convolve with the bank of filters u B; see the module.

    The values u are drawn such that the filters have the variance of He's initialisation.

    Args:
        inputs: number of input fields.
        outputs: number of output fields.
        basis: B, for g output elements, p anchors, h input elements (1 for an image), s offsets.
        padding: "circular" or "zeros".
    """

    weight: nn.Parameter
    bias: nn.Parameter
    basis: Tensor

    def __init__(
        self, inputs: int, outputs: int, basis: Float[Tensor, "g p h s"], padding: Padding
    ) -> None:
        elements, anchors, relatives, offsets = basis.shape
        kernel = math.isqrt(offsets)
        super().__init__((kernel, kernel), padding)
        basis_power = float(basis.square().sum(1).mean())
        bound = math.sqrt(6 / (inputs * relatives * offsets * max(basis_power, 1e-12)))
        values = torch.empty(outputs, inputs, anchors).uniform_(-bound, bound)
        self.weight, self.bias = nn.Parameter(values), nn.Parameter(torch.zeros(outputs))
        # In float64, and cast where used.
        self.register_buffer("basis", basis.to(values.device), persistent=False)
        self.kernel, self.inputs = kernel, inputs
        self.elements, self.relatives = elements, relatives

    def as_filter(self) -> Filter:
        """Return the bank as one filter, with channels (element, field)."""
        bank = torch.einsum("ocp,gphs->gohcs", self.weight, self.basis.to(self.weight))
        weight = bank.reshape(-1, self.relatives * self.inputs, self.kernel, self.kernel)
        return Filter(weight, self.bias.repeat(self.elements), self.padding)

    def extra_repr(self) -> str:
        """Return the sizes."""
        outputs, inputs, anchors = self.weight.shape
        return (
            f"{inputs} x {self.relatives} -> {outputs} x {self.elements}, {anchors} anchors, "
            f"kernel={self.kernel}, padding={self.padding!r}"
        )


@sharing.register
def _bank_filter(module: BankFilter) -> Sharing:
    shape, split = module.weight.shape, (module.relatives, module.inputs, module.kernel**2)

    def inputs(x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n s 1 i"]:
        patches = all_patches(x, module.geometry)
        patches = patches.reshape(*patches.shape[:2], *split)
        a = torch.einsum("gphs,nthcs->ngtcp", module.basis.to(x), patches)
        return a.flatten(3).flatten(1, 2).unsqueeze(2)

    def outputs(y: Float[Tensor, "n d h w"]) -> Float[Tensor, "n s 1 o"]:
        fields: Tensor = y.unflatten(1, (module.elements, -1)).flatten(3).transpose(2, 3)
        return fields.flatten(1, 2).unsqueeze(2)

    def factor(x: Float[Tensor, "n c h w"]) -> Float[Tensor, "1 i i"]:
        A = input_factor(x, module.geometry)[0]
        rows = torch.einsum("gphs,hcsj->gcpj", module.basis.to(A), A.reshape(*split, -1))
        columns = rows.reshape(*rows.shape[:3], *split)
        projected = torch.einsum("gqit,gcpidt->cpdq", module.basis.to(A), columns)
        return projected.reshape(1, shape[1] * shape[2], -1)

    return Sharing(
        inputs=inputs,
        outputs=outputs,
        to_blocks=lambda weight: weight.flatten(1).unsqueeze(0),
        from_blocks=lambda blocks: blocks.reshape(shape),
        input_factor=factor,
    )


def _group_anchors(
    anchors: float, kernel: int, elements: int, reach: float, disc: bool
) -> tuple[Float[Tensor, "p 2"], Float[Tensor, " p"]]:
    """Return positions up to `reach` pixels from the middle, and coordinates from 0 to n - 1."""
    shape = (kernel, kernel, elements)
    spread = spread_anchors(anchor_count(anchors, math.prod(shape)), shape)
    z = spread[:, :2] * (2 * reach / max(1, kernel - 1))
    if disc:  # map squares around the middle to circles
        z = z * (z.abs().amax(1) / z.norm(dim=1).clamp_min(1e-12)).unsqueeze(1)
    return z, spread[:, 2] + (elements - 1) / 2


def _reach(half: float, omega: float) -> float:
    """Return how far anchors may be from the middle of a filter that must hold their functions."""
    return max(half - 1 / omega, half / 2)


def _checked_widths(widths: Sequence[float]) -> tuple[float, float]:
    values = tuple(widths) if isinstance(widths, list | tuple) else ()
    if len(values) != 2 or not all(is_real(width) and width > 0 for width in values):
        raise ValueError(
            "widths must be two positive numbers, for position and for angle or scale, "
            f"got {widths!r}."
        )
    return values[0], values[1]


class SE2Conv(GConv):
    r"""Group convolution on SE(2) with anchors in position and angle, at n angles.

    With four angles the path is exactly equivariant to p4; with more, up to the pixel grid.

    The first four arguments are those of `Path`, with channels counted as in the map:
    (angle, field).

    Args:
        angles: number n of directions, the elements of C_n.
        kind: "full", or "lift" for an image.
        anchors: their number, or as a float their fraction of the filter's entries.
        kernel: size of the filter; odd.
        padding: "circular" or "zeros".
        widths: omega, the inverse width in space, per pixel; kappa, the concentration in angle.

    Attributes:
        anchors: z_p, in pixels, and tau_p, in steps of angle. If rotations do not map the grid to
            itself, the z_p are in a disc, so that the filter holds every rotation of its functions.
    """

    interpolates = False  # filters are functions of position and angle

    def _build(  # type: ignore[override]
        self,
        *,
        angles: int = 8,
        kind: Lifting = "full",
        anchors: float = 0.25,
        kernel: int = 5,
        padding: Padding = "circular",
        widths: tuple[float, float] = (0.8, 2.0),
    ) -> None:
        check_choice("kind", kind, Lifting)
        if not is_integer(angles) or angles > MAX_ANGLES:
            raise ValueError(f"angles must be an integer from 1 to {MAX_ANGLES}, got {angles!r}.")
        omega, kappa = _checked_widths(widths)
        super()._build(group=f"C{angles}", kind=kind, kernel=kernel, padding=padding)
        relatives = angles if kind == "full" else 1
        with torch.device("cpu"):
            half, exact = (kernel - 1) / 2, self.point_group.exact
            reach = half if exact else _reach(half, omega)
            self.anchors = _group_anchors(anchors, kernel, relatives, reach, not exact)
            basis = self._basis(relatives, omega, kappa)
        fields = self._fields()
        self.conv = BankFilter(fields.inputs, fields.outputs, basis, padding)

    def _basis(self, relatives: int, omega: float, kappa: float) -> Float[Tensor, "g p h s"]:
        z, tau = self.anchors
        width, size = torch.tensor(omega, dtype=torch.float64), (self.kernel, self.kernel)
        rotated = torch.einsum("gij,pj->gpi", self.point_group.matrices, z)
        space = torch.stack([evaluate_basis(anchors, size, width, "sum") for anchors in rotated])
        steps = torch.arange(relatives, dtype=torch.float64)
        angle = 2 * math.pi / relatives * (steps - tau.unsqueeze(1))
        angular = torch.exp(kappa * (angle.cos() - 1))  # [p, h']
        order = self.point_group.order
        relative = self.point_group.relative if relatives > 1 else torch.zeros(order, 1).int()
        return angular[:, relative.long()].transpose(0, 1).unsqueeze(3) * space.unsqueeze(2)


class ScaleConv(FilterPath):
    r"""Convolution over translations and scales, with anchors in position and log-scale.

    Channels are ordered (scale, field). An image magnified by $s_{g+1} / s_g$ moves the map of
    scale g to scale g + 1 and magnifies it. This holds up to the pixel grid, and except for maps
    that enter at the ends of the scales. Equivariance to translations is exact.

    The first four arguments are those of `Path`, with channels counted as in the map.

    Args:
        scales: s_g, increasing from 1 by equal factors: (1, 1.5, 2.25).
        kind: "full", or "lift" for an image.
        anchors: their number, or as a float their fraction of the entries of the smallest filter.
        kernel: size of the filter at the largest scale; odd.
        padding: "circular" or "zeros".
        widths: omega, the inverse width in space, per pixel at scale 1; sigma, the width in
            log-scale, in steps.

    Attributes:
        anchors: z_p, in pixels at scale 1, and tau_p, in steps of log-scale.
    """

    conv: BankFilter

    def _build(
        self,
        *,
        scales: Sequence[float] = (1.0, 1.5, 2.25),
        kind: Lifting = "full",
        anchors: float = 0.5,
        kernel: int = 9,
        padding: Padding = "circular",
        widths: tuple[float, float] = (1.2, 0.7),
    ) -> None:
        self._set_filter(kernel, padding)
        check_choice("kind", kind, Lifting)
        if len(self.in_shape) != 2:
            raise ValueError(f"ScaleConv needs maps in 2 dimensions, got {self.in_shape}.")
        omega, sigma = _checked_widths(widths)
        s = _checked_scales(scales)
        count, relatives = len(s), len(s) if kind == "full" else 1
        if self.in_channels % relatives or self.out_channels % count:
            raise ValueError(
                f"The {count} scales must divide the number of channels, got "
                f"{self.in_channels} in and {self.out_channels} out."
            )
        self.scales, self.kind, self.kernel = s, kind, kernel
        with torch.device("cpu"):
            reach = _reach((kernel - 1) / 2 / s[-1], omega)
            smallest = 2 * math.ceil(reach) + 1
            z, tau = _group_anchors(anchors, smallest, 2 * relatives - 1, reach, disc=False)
            self.anchors = z, tau - (relatives - 1)
            basis = self._basis(relatives, omega, sigma)
        inputs, outputs = self.in_channels // relatives, self.out_channels // count
        self.conv = BankFilter(inputs, outputs, basis, padding)

    def _basis(self, relatives: int, omega: float, sigma: float) -> Float[Tensor, "g p h s"]:
        (z, tau), size = self.anchors, (self.kernel, self.kernel)
        width = torch.tensor(omega, dtype=torch.float64)
        steps = torch.arange(relatives, dtype=torch.float64)
        per_scale = []
        for g, scale in enumerate(self.scales):
            space = evaluate_basis(scale * z, size, width / scale, "sum") / scale**2
            difference = steps - (g if relatives > 1 else 0) - tau.unsqueeze(1)
            along_scale = torch.exp(-difference.square() / (2 * sigma**2))
            per_scale.append(along_scale.unsqueeze(2) * space.unsqueeze(1))
        return torch.stack(per_scale)


def _checked_scales(scales: Sequence[float]) -> tuple[float, ...]:
    s = tuple(scales) if isinstance(scales, list | tuple) else ()
    grows = bool(s) and all(map(is_real, s)) and s[0] == 1 and (len(s) < 2 or s[1] > 1)
    if not grows or any(abs(b / a - s[1]) > 1e-6 * s[1] for a, b in pairwise(s)):
        raise ValueError(
            f"scales must increase from 1 by equal factors, as in (1, 1.5, 2.25), got {scales!r}."
        )
    return s
