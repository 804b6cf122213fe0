r"""S-GCONV with basis functions on the group itself: position and angle, position and scale.

A filter of a group convolution is a function $\psi(\delta, \theta)$ of a place and of the element
that an input field is at, relative to that of the output. Here it is a sum over P anchors
$(z_p, \tau_p)$ on the continuous group, sampled at those n elements that the channels hold:

| group | $\psi(\delta, \cdot)$ | at the element g |
|---|---|---|
| SE(2) | $\sum_p u_p\, e^{-\omega^2 |\delta - z_p|^2}\, e^{\kappa (\cos(\theta - \tau_p) - 1)}$ |
  $\psi(R_g^{-1} \delta,\; \theta_h - \theta_g)$: anchors at $R_g z_p$, $\tau_p + \theta_g$ |
| scale | $\sum_p u_p\, e^{-\omega^2 |\delta - z_p|^2}\, e^{-(\lambda - \tau_p)^2 / 2\sigma^2}$ |
  $s_g^{-2}\, \psi(\delta / s_g,\; \ln s_h - \ln s_g)$: at $s_g z_p$, of widths $s_g / \omega$ |

Nothing is interpolated, the number of weights DCP does not grow with n, and the same anchors serve
any n (ELLA App. B, "continuous kernels"). The product of the two functions, at every element, is
the basis B of a `BankFilter`.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.curvature.convolution import Geometry, all_patches, input_factor
from symrazor.curvature.weight_sharing import Sharing, sharing
from symrazor.layers.basis import anchor_count, evaluate, spread
from symrazor.layers.conv import Conv, Filter, Filtered, Padding, check_kernel, is_strict
from symrazor.layers.gconv import GConv
from symrazor.layers.path import is_integer, is_real, new_parameter
from symrazor.layers.subsampling import Subsample


class BankFilter(nn.Module):
    """A convolution with the bank of filters u B; see the module.

    Args:
        inputs: fields in.
        outputs: fields out.
        basis: B, of g output elements, p anchors, h input elements (1 for an image), s offsets.
        padding: "circular" or "zeros".
    """

    weight: nn.Parameter
    bias: nn.Parameter
    basis: Tensor

    def __init__(
        self, inputs: int, outputs: int, basis: Float[Tensor, "g p h s"], padding: Padding
    ) -> None:
        """Draw u so that filters have the variance of He's initialisation."""
        super().__init__()
        elements, anchors, relatives, places = basis.shape
        size = float(basis.square().sum(1).mean())
        bound = math.sqrt(6 / (inputs * relatives * places * max(size, 1e-12)))
        values = torch.empty(outputs, inputs, anchors).uniform_(-bound, bound)
        self.weight, self.bias = nn.Parameter(values), nn.Parameter(torch.zeros(outputs))
        here = basis.to(values.device)  # in float64, and cast where used
        self.register_buffer("basis", here, persistent=False)
        self.elements, self.relatives, self.inputs = elements, relatives, inputs
        self.kernel, self.padding = math.isqrt(places), padding
        around = (self.kernel // 2,) * 4
        self.geometry = Geometry((self.kernel,) * 2, (1, 1), (1, 1), padding, around)

    def kernels(self) -> Float[Tensor, "d c k k"]:
        """The bank as conv2d wants it, channels (element, field)."""
        bank = torch.einsum("ocp,gphs->gohcs", self.weight, self.basis.to(self.weight))
        channels = self.relatives * self.inputs
        return bank.reshape(-1, channels, self.kernel, self.kernel)

    def as_filter(self) -> Filter:
        """The bank as one filter."""
        return Filter(self.kernels(), self.bias.repeat(self.elements), self.padding)

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n d h w"]:
        """Convolve with the bank."""
        return self.as_filter()(x)

    @torch.no_grad()
    def convolution(self) -> nn.Conv2d:
        """The same map as one convolution of torch."""
        weight, around = self.kernels(), self.kernel // 2
        conv = nn.Conv2d(
            weight.shape[1],
            len(weight),
            self.kernel,
            padding=around,
            padding_mode=self.padding if around else "zeros",
            device="meta",
        )
        conv.weight = new_parameter(weight, self.weight)
        conv.bias = new_parameter(self.bias.repeat(self.elements), self.bias)
        return conv

    def extra_repr(self) -> str:
        """Sizes, for `print(model)`."""
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
        found = torch.einsum("gqit,gcpidt->cpdq", module.basis.to(A), columns)
        return found.reshape(1, shape[1] * shape[2], -1)

    return Sharing(
        inputs=inputs,
        outputs=outputs,
        to_blocks=lambda weight: weight.flatten(1).unsqueeze(0),
        from_blocks=lambda blocks: blocks.reshape(shape),
        input_factor=factor,
    )


Lifting = Literal["full", "lift"]
MOST_ANGLES = 999


def _anchors(
    anchors: float, kernel: int, elements: int, reach: float, disc: bool
) -> tuple[Float[Tensor, "p 2"], Float[Tensor, " p"]]:
    """Places up to `reach` pixels from the middle, and along the elements from 0 to n - 1."""
    shape = (kernel, kernel, elements)
    found = spread(anchor_count(anchors, math.prod(shape)), shape)
    z = found[:, :2] * (2 * reach / max(1, kernel - 1))
    if disc:  # squares around the middle become circles
        z = z * (z.abs().amax(1) / z.norm(dim=1).clamp_min(1e-12)).unsqueeze(1)
    return z, found[:, 2] + (elements - 1) / 2


def _reach(half: float, omega: float) -> float:
    """How far out anchors may be so that a filter of this half-width holds their functions."""
    return max(half - 1 / omega, half / 2)


def _both_widths(widths: Sequence[float]) -> tuple[float, float]:
    given = tuple(widths) if isinstance(widths, list | tuple) else ()
    if len(given) != 2 or not all(is_real(one) and one > 0 for one in given):
        raise ValueError(f"expected two positive widths, in space and beyond, got {widths!r}")
    return given[0], given[1]


def _written_out(path: Filtered, conv: nn.Module) -> Conv:
    """A path with a bank of filters as `Conv`."""
    assert isinstance(conv, BankFilter)
    found = Conv.wrap(conv.convolution(), path.in_shape)
    found.shrink, found.out_shape, found.stride = path.shrink, path.out_shape, path.stride
    return found


class SE2Conv(GConv):
    r"""A group convolution with anchors in position and angle, on n directions.

    With four angles it is exactly equivariant to p4; with more, up to what pixels can hold.

    The first four arguments are those of `Path`, channels counted as in the map: (angle, field).

    Args:
        angles: n directions, the elements of C_n.
        kind: "full", or "lift" for an image.
        anchors: how many, or as a float which fraction of the filter's entries.
        kernel: size of the filter; odd.
        padding: "circular" or "zeros".
        widths: omega, the inverse width in space, per pixel; kappa, the concentration in angle.

    Attributes:
        anchors: z_p, in pixels, and tau_p, in steps of angle. Where turns do not map the grid to
            itself, they are in a disc, in whose filters every turn of their functions fits.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        in_shape: Sequence[int],
        stride: int = 1,
        *,
        angles: int = 8,
        kind: Lifting = "full",
        anchors: float = 0.25,
        kernel: int = 5,
        padding: Padding = "circular",
        widths: tuple[float, float] = (0.8, 2.0),
    ) -> None:
        """Place the anchors and draw their values."""
        if kind not in get_args(Lifting):
            raise ValueError(f"expected kind in {get_args(Lifting)}, got {kind!r}")
        if not is_integer(angles) or angles > MOST_ANGLES:
            raise ValueError(
                f"expected a whole number of angles, 1 to {MOST_ANGLES}, got {angles!r}"
            )
        omega, kappa = _both_widths(widths)
        shapes = in_channels, out_channels, in_shape, stride
        super().__init__(*shapes, group=f"C{angles}", kind=kind, kernel=kernel, padding=padding)
        relatives = angles if kind == "full" else 1
        with torch.device("cpu"):
            half, exact = (kernel - 1) / 2, self.point_group.exact
            reach = half if exact else _reach(half, omega)
            self.anchors = z, at = _anchors(anchors, kernel, relatives, reach, not exact)
            width = torch.tensor(omega, dtype=torch.float64)
            moved = torch.einsum("gij,pj->gpi", self.point_group.matrices, z)
            space = torch.stack([evaluate(one, (kernel, kernel), width, "sum") for one in moved])
            steps = torch.arange(relatives, dtype=torch.float64)
            turn = 2 * math.pi / relatives * (steps - at.unsqueeze(1))
            along = torch.exp(kappa * (turn.cos() - 1))  # [p, h']
            relative = self.point_group.relative if kind == "full" else torch.zeros(angles, 1).int()
            basis = along[:, relative.long()].transpose(0, 1).unsqueeze(3) * space.unsqueeze(2)
        fields = self._fields()
        self.conv = BankFilter(fields.inputs, fields.outputs, basis, padding)

    @property
    def interpolation_error(self) -> float:
        """0: filters are functions of place and angle, turned exactly."""
        return 0.0

    @property
    def output_weights(self) -> list[nn.Parameter]:
        """Anchor values and bias."""
        return list(self.conv.parameters())

    def dense(self) -> Conv:
        """The same map as `Conv`."""
        return _written_out(self, self.conv)

    def unshrunk(self) -> nn.Module:
        """The bank alone, as a convolution of torch."""
        assert isinstance(self.conv, BankFilter)
        return self.conv.convolution()


class ScaleConv(Filtered):
    r"""A convolution over translations and scales, with anchors in position and log-scale.

    Channels are ordered (scale, field). A picture magnified by $s_{g+1} / s_g$ moves the map of
    scale g to scale g + 1, and magnifies it: as far as pixels can hold the filters, and but for
    maps that enter at the ends of the scales. To translations it is exactly equivariant.

    The first four arguments are those of `Path`, channels counted as in the map.

    Args:
        scales: s_g, growing, by equal factors, from 1: (1, 1.5, 2.25).
        kind: "full", or "lift" for an image.
        anchors: how many, or as a float which fraction of the entries of the smallest filter.
        kernel: size of the filter at the largest scale; odd.
        padding: "circular" or "zeros".
        widths: omega, the inverse width in space, per pixel at scale 1; sigma, the width in
            log-scale, in steps.

    Attributes:
        anchors: z_p, in pixels at scale 1, and tau_p, in steps of log-scale.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        in_shape: Sequence[int],
        stride: int = 1,
        *,
        scales: Sequence[float] = (1.0, 1.5, 2.25),
        kind: Lifting = "full",
        anchors: float = 0.5,
        kernel: int = 9,
        padding: Padding = "circular",
        widths: tuple[float, float] = (1.2, 0.7),
    ) -> None:
        """Place the anchors and draw their values."""
        super().__init__(in_channels, out_channels, in_shape, stride)
        check_kernel(kernel, self.in_shape, padding)
        if kind not in get_args(Lifting):
            raise ValueError(f"expected kind in {get_args(Lifting)}, got {kind!r}")
        if len(self.in_shape) != 2:
            raise ValueError(f"expected maps in 2 dimensions, got {self.in_shape}")
        omega, sigma = _both_widths(widths)
        s = _checked_scales(scales)
        count = len(s)
        wrong = [c for c, on in ((in_channels, kind == "full"), (out_channels, True)) if on]
        if any(c % count for c in wrong):
            raise ValueError(f"expected channels that {count} scales divide, got {wrong}")
        self.scales, self.kind, self.kernel = s, kind, kernel
        self.strict = is_strict(padding, stride, "l2", kernel)
        relatives = count if kind == "full" else 1
        inputs = in_channels // relatives
        with torch.device("cpu"):
            reach = _reach((kernel - 1) / 2 / s[-1], omega)
            least = 2 * math.ceil(reach) + 1
            z, at = _anchors(anchors, least, 2 * relatives - 1, reach, disc=False)
            self.anchors = z, at - (relatives - 1)
            basis = _scaled_basis(s, self.anchors, relatives, kernel, (omega, sigma))
        self.conv = BankFilter(inputs, out_channels // count, basis, padding)
        self.shrink = Subsample(stride, "l2")

    def dense(self) -> Conv:
        """The same map as `Conv`."""
        return _written_out(self, self.conv)


def _checked_scales(scales: Sequence[float]) -> tuple[float, ...]:
    """Scales from 1 that grow by one factor."""
    s = tuple(scales) if isinstance(scales, list | tuple) else ()
    grows = bool(s) and all(map(is_real, s)) and s[0] == 1 and (len(s) < 2 or s[1] > 1)
    if not grows or any(abs(b / a - s[1]) > 1e-6 * s[1] for a, b in pairwise(s)):
        raise ValueError(
            f"expected scales from 1 that grow by one factor, as in (1, 1.5, 2.25), got {scales!r}"
        )
    return s


def _scaled_basis(
    scales: Sequence[float],
    anchors: tuple[Float[Tensor, "p 2"], Float[Tensor, " p"]],
    relatives: int,
    kernel: int,
    widths: tuple[float, float],
) -> Float[Tensor, "g p h s"]:
    """B of `ScaleConv`."""
    (z, at), (omega, sigma) = anchors, (torch.tensor(w, dtype=torch.float64) for w in widths)
    places = torch.arange(len(scales), dtype=torch.float64)
    found = []
    for g, scale in enumerate(scales):
        space = evaluate(scale * z, (kernel, kernel), omega / scale, "sum") / scale**2
        apart = places[:relatives] - (g if relatives > 1 else 0) - at.unsqueeze(1)
        along = torch.exp(-apart.square() / (2 * sigma**2))
        found.append(along.unsqueeze(2) * space.unsqueeze(1))
    return torch.stack(found)
