r"""S-CONV: a convolution whose filter comes from a few anchors (ELLA Eq. 6).

The filter $u \Phi$ (basis.py) is written out before use. In the weight-sharing format the anchor
values u see the patches that a dense filter does, projected by $\Phi$: their input factor is
$(I \otimes \Phi)\, A\, (I \otimes \Phi)^\top$.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.accelerate.torch_internals import conv_padding
from symrazor.curvature.convolution import Geometry, all_patches, channels_to_features, input_factor
from symrazor.curvature.weight_sharing import Sharing, sharing
from symrazor.layers.basis import Basis, basis_of, deviation, nearest, prior_groups
from symrazor.layers.conv import Conv, Filter, Filtered, Padding, check_kernel, is_strict
from symrazor.layers.path import checked_shape
from symrazor.layers.subsampling import Reduction, Subsample


class SparseFilter(nn.Module):
    r"""A convolution whose filter is $K[o, c, \delta] = \sum_p u[o, c, p]\, \Phi[p, \delta]$."""

    values: nn.Parameter
    bias: nn.Parameter

    def __init__(self, in_channels: int, out_channels: int, basis: Basis, padding: Padding) -> None:
        """Draw u so that the filter has the variance of He's initialisation."""
        super().__init__()
        fan_in = in_channels * math.prod(basis.shape)
        with torch.no_grad():
            bound = math.sqrt(3) * deviation(basis.matrix(), 2 / fan_in)
        values = torch.empty(out_channels, in_channels, basis.count).uniform_(-bound, bound)
        self.values = nn.Parameter(values)
        self.bias = nn.Parameter(torch.zeros(out_channels))
        self.basis, self.padding = basis, padding
        around = [k // 2 for k in reversed(basis.shape) for _ in range(2)]
        ones = (1,) * len(basis.shape)
        self.geometry = Geometry(basis.shape, ones, ones, padding, tuple(around))

    def filter(self) -> Float[Tensor, "o c *kernel"]:
        """The dense filter."""
        flat = self.values @ self.basis.matrix()
        return flat.reshape(*self.values.shape[:2], *self.basis.shape)

    def as_filter(self) -> Filter:
        """The dense filter, its bias and padding."""
        return Filter(self.filter(), self.bias, self.padding)

    def forward(self, x: Float[Tensor, "n c *size"]) -> Float[Tensor, "n o *size"]:
        """Convolve with the dense filter."""
        return self.as_filter()(x)

    def extra_repr(self) -> str:
        """Sizes, for `print(model)`."""
        outputs, inputs, _ = self.values.shape
        return f"{inputs} -> {outputs}, kernel={self.basis.shape}, padding={self.padding!r}"


@sharing.register
def _sparse_filter(module: SparseFilter) -> Sharing:
    channels = module.values.shape[1]

    def projected(x: Float[Tensor, "n c *size"]) -> Float[Tensor, "n t 1 i"]:
        a = all_patches(x, module.geometry)
        split = a.reshape(*a.shape[:3], channels, -1)
        return (split @ module.basis.matrix().T).flatten(3)

    def factor(x: Float[Tensor, "n c *size"]) -> Float[Tensor, "1 i i"]:
        A = input_factor(x, module.geometry)[0]
        phi = module.basis.matrix().to(A)
        blocks = A.reshape(channels, phi.shape[1], channels, phi.shape[1])
        found = torch.einsum("ps,csdt,qt->cpdq", phi, blocks, phi)
        return found.reshape(1, channels * len(phi), channels * len(phi))

    shape = module.values.shape
    return Sharing(
        weight="values",
        inputs=projected,
        outputs=lambda g: channels_to_features(1, g),
        to_blocks=lambda values: values.flatten(1).unsqueeze(0),
        from_blocks=lambda blocks: blocks.reshape(shape),
        input_factor=factor,
        shaping=tuple(f"basis.{name}" for name in module.basis.shaping),
    )


class SConv(Filtered):
    """S-CONV: a convolution with P anchors in place of a full filter, DCP + D parameters.

    The first four arguments are those of `Path`.

    Args:
        anchors: how many, or as a float which fraction of the filter's entries.
        kernel: size of the filter in every dimension; odd.
        padding: "circular" or "zeros".
        reduction: how a stride shrinks the map, see `symrazor.layers.subsampling`.
        **basis: options of `symrazor.layers.basis.Basis`: omega, form, learn_omega, learn_anchors.
    """

    conv: SparseFilter

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        in_shape: Sequence[int],
        stride: int = 1,
        *,
        anchors: float = 0.5,
        kernel: int = 3,
        padding: Padding = "circular",
        reduction: Reduction = "l2",
        **basis: Any,
    ) -> None:
        """Place the anchors and draw their values."""
        super().__init__(in_channels, out_channels, in_shape, stride)
        check_kernel(kernel, self.in_shape, padding)
        self.strict = is_strict(padding, stride, reduction, kernel)
        made = basis_of((kernel,) * len(self.in_shape), anchors, **basis)
        self.conv = SparseFilter(in_channels, out_channels, made, padding)
        self.shrink = Subsample(stride, reduction)

    @staticmethod
    def can_fit(conv: Conv) -> bool:
        """Whether a convolution is one that a sparse filter can stand in for."""
        inner = conv.conv
        kernel = inner.kernel_size[0]
        around = [kernel // 2] * (2 * len(inner.kernel_size))
        return (
            set(inner.stride) | set(inner.dilation) | {inner.groups} == {1}
            and set(inner.kernel_size) == {kernel}
            and kernel % 2 == 1
            and inner.padding_mode in ("circular", "zeros")
            and list(conv_padding(inner)) == around
        )

    @classmethod
    @torch.no_grad()
    def from_conv(cls, conv: Conv, anchors: float = 0.5, **basis: Any) -> "SConv":
        """Anchors fitted to a dense filter by least squares.

        Raises:
            ValueError: a convolution that is not like this path, see `can_fit`.
        """
        if not isinstance(conv, Conv):
            raise ValueError(
                f"expected a Conv, got {type(conv).__name__}; make one of a torch.nn convolution: "
                "Conv.wrap(convolution, in_shape)"
            )
        inner = conv.conv
        if not cls.can_fit(conv):
            raise ValueError(
                "expected a convolution with an odd square kernel, circular or zero padding to the "
                f"same size, and no stride, dilation or groups of its own, got {inner}"
            )
        path = cls(
            conv.in_channels,
            conv.out_channels,
            conv.in_shape,
            conv.stride,
            anchors=anchors,
            kernel=inner.kernel_size[0],
            padding=inner.padding_mode,  # type: ignore[arg-type]
            reduction=conv.shrink.reduction,
            **basis,
        ).to(inner.weight)
        path.conv.values.copy_(nearest(path.conv.basis.matrix(), inner.weight.flatten(2)))
        if inner.bias is not None:
            path.conv.bias.copy_(inner.bias)
        return path

    @torch.no_grad()
    def dense(self) -> Conv:
        """The same map as `Conv`, with the filter written out."""
        path = Conv(
            self.in_channels,
            self.out_channels,
            self.in_shape,
            self.stride,
            kernel=self.conv.basis.shape[0],
            padding=self.conv.padding,
            reduction=self.shrink.reduction,
        ).to(self.conv.values)
        path.conv.weight.copy_(self.conv.filter())
        assert path.conv.bias is not None
        path.conv.bias.copy_(self.conv.bias)
        return path

    def reduce(self, anchors: float) -> "SConv":
        """The nearest map with another number of anchors, spread anew."""
        return SConv.from_conv(self.dense(), anchors, **self.conv.basis.options)

    @torch.no_grad()
    def resample(self, in_shape: Sequence[int], kernel: int | None = None) -> "SConv":
        """The same filter as a function of place, for maps of another resolution.

        Anchors are stretched by the ratio r of the shapes, omega by 1/r, and values are divided by
        the ratio of the areas, so that sums over pixels stay what they were.

        Args:
            in_shape: r times that of this path, with the same r in every dimension.
            kernel: odd, and no more than 1 away from r times that of this path; by default the
                nearest odd number, of two the larger.

        Raises:
            ValueError: another number of dimensions, a ratio that is not one, or such a kernel.
        """
        basis, dims = self.conv.basis, len(self.in_shape)
        shape = checked_shape(in_shape)
        ratios = {Fraction(a, b) for a, b in zip(shape, self.in_shape, strict=False)}
        if len(shape) != dims or len(ratios) > 1:
            raise ValueError(
                f"expected an in_shape with one ratio to {self.in_shape} in all {dims} dimensions, "
                f"got {shape}"
            )
        target = ratios.pop() * basis.shape[0]
        kernel = 2 * math.floor(target / 2) + 1 if kernel is None else kernel
        check_kernel(kernel, shape, self.conv.padding)
        if abs(kernel - target) > 1:
            raise ValueError(
                f"expected a kernel within 1 of {float(target):g}, for the ratio of {shape} to "
                f"{self.in_shape}, got {kernel}"
            )
        ratio = float(target / basis.shape[0])
        path = SConv(
            self.in_channels,
            self.out_channels,
            in_shape,
            self.stride,
            anchors=1,
            kernel=kernel,
            padding=self.conv.padding,
            reduction=self.shrink.reduction,
        )
        finer = basis.stretched((kernel,) * dims, ratio)
        path.conv = SparseFilter(self.in_channels, self.out_channels, finer, self.conv.padding)
        path.to(self.conv.values)
        path.conv.values.copy_(self.conv.values / ratio**dims)
        path.conv.bias.copy_(self.conv.bias)
        return path

    @property
    def output_weights(self) -> list[nn.Parameter]:
        """Anchor values and bias."""
        return [self.conv.values, self.conv.bias]

    def prior_groups(self) -> dict[str, list[str]]:
        """Anchor values and bias, lengthscale, places of the anchors."""
        return prior_groups(self)
