r"""Define the sparse convolution S-CONV, whose filter comes from a few anchors (ELLA Eq. 6).

The filter $u \Phi$ (see `symrazor.layers.basis`) is computed before use. In the weight-sharing
format the anchor values u receive the patches of a dense filter, projected by $\Phi$; their input
factor is $(I \otimes \Phi)\, A\, (I \otimes \Phi)^\top$.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.curvature.convolution import all_patches, channels_to_features, input_factor
from symrazor.curvature.weight_sharing import Sharing, sharing
from symrazor.layers.basis import Basis, fit_values, make_basis, value_deviation
from symrazor.layers.conv import (
    ComputedFilter,
    Conv,
    Filter,
    FilterPath,
    Padding,
    check_kernel,
    is_padded_to_same_size,
)
from symrazor.layers.path import checked_shape
from symrazor.layers.subsampling import Reduction


class SparseFilter(ComputedFilter):
    r"""Convolve with the filter $K[o, c, \delta] = \sum_p u[o, c, p]\, \Phi[p, \delta]$.

    The values u are drawn such that the filter has the variance of He's initialisation.
    """

    values: nn.Parameter
    bias: nn.Parameter

    def __init__(self, in_channels: int, out_channels: int, basis: Basis, padding: Padding) -> None:
        super().__init__(basis.shape, padding)
        fan_in = in_channels * math.prod(basis.shape)
        with torch.no_grad():
            bound = math.sqrt(3) * value_deviation(basis.matrix(), 2 / fan_in)
        values = torch.empty(out_channels, in_channels, basis.count).uniform_(-bound, bound)
        self.values = nn.Parameter(values)
        self.bias = nn.Parameter(torch.zeros(out_channels))
        self.basis = basis

    def as_filter(self) -> Filter:
        """Return the dense filter with its bias and padding."""
        flat = self.values @ self.basis.matrix()
        weight = flat.reshape(*self.values.shape[:2], *self.basis.shape)
        return Filter(weight, self.bias, self.padding)

    def extra_repr(self) -> str:
        """Return the sizes."""
        outputs, inputs, _ = self.values.shape
        return f"{inputs} -> {outputs}, kernel={self.basis.shape}, padding={self.padding!r}"


@sharing.register
def _sparse_filter(module: SparseFilter) -> Sharing:
    channels = module.values.shape[1]

    def projected_patches(x: Float[Tensor, "n c *size"]) -> Float[Tensor, "n t 1 i"]:
        a = all_patches(x, module.geometry)
        split = a.reshape(*a.shape[:3], channels, -1)
        return (split @ module.basis.matrix().T).flatten(3)

    def factor(x: Float[Tensor, "n c *size"]) -> Float[Tensor, "1 i i"]:
        A = input_factor(x, module.geometry)[0]
        phi = module.basis.matrix().to(A)
        blocks = A.reshape(channels, phi.shape[1], channels, phi.shape[1])
        projected = torch.einsum("ps,csdt,qt->cpdq", phi, blocks, phi)
        return projected.reshape(1, channels * len(phi), channels * len(phi))

    shape = module.values.shape
    return Sharing(
        weight="values",
        inputs=projected_patches,
        outputs=lambda g: channels_to_features(1, g),
        to_blocks=lambda values: values.flatten(1).unsqueeze(0),
        from_blocks=lambda blocks: blocks.reshape(shape),
        input_factor=factor,
        shaping=tuple(f"basis.{name}" for name in module.basis.shaping),
    )


class SConv(FilterPath):
    """Sparse convolution (S-CONV, ELLA Eq. 6): P anchors per filter, DCP + D parameters.

    The first four arguments are those of `Path`.

    Args:
        anchors: their number, or as a float their fraction of the filter's entries; or a `Basis`.
        kernel: size of the filter in every dimension; odd.
        padding: "circular" or "zeros".
        reduction: how a stride shrinks the map, see `symrazor.layers.subsampling.Reduction`.
        **basis: options of `symrazor.layers.basis.Basis`: omega, form, learn_omega, learn_anchors.
    """

    conv: SparseFilter

    def _build(
        self,
        *,
        anchors: float | Basis = 0.5,
        kernel: int = 3,
        padding: Padding = "circular",
        reduction: Reduction = "l2",
        **basis: Any,
    ) -> None:
        self._set_filter(kernel, padding, reduction)
        filter_basis = make_basis((kernel,) * len(self.in_shape), anchors, **basis)
        self.conv = SparseFilter(self.in_channels, self.out_channels, filter_basis, padding)

    @staticmethod
    def can_fit(conv: Conv) -> bool:
        """Return whether a sparse filter can replace the filter of a convolution."""
        inner = conv.conv
        return (
            is_padded_to_same_size(inner)
            and {*inner.stride, inner.groups} == {1}
            and len(set(inner.kernel_size)) == 1
            and inner.padding_mode in ("circular", "zeros")
        )

    @classmethod
    @torch.no_grad()
    def from_conv(cls, conv: Conv, anchors: float = 0.5, **basis: Any) -> "SConv":
        """Return the sparse path nearest to a convolution, by least squares.

        Raises:
            ValueError: a convolution that a sparse filter cannot replace, see `can_fit`.
        """
        if not isinstance(conv, Conv):
            raise ValueError(
                f"conv must be a Conv, got {type(conv).__name__}. For a torch.nn convolution, use "
                "Conv.wrap(convolution, in_shape)."
            )
        inner = conv.conv
        if not cls.can_fit(conv):
            raise ValueError(
                "The convolution must have an odd square kernel, circular or zero padding to the "
                f"same size, and stride, dilation and groups of 1, got {inner}."
            )
        path = cls(
            conv.in_channels,
            conv.out_channels,
            conv.in_shape,
            conv.stride,
            anchors=anchors,
            kernel=inner.kernel_size[0],
            padding=inner.padding_mode,
            reduction=conv.subsampling.reduction,
            **basis,
        ).to(inner.weight)
        path.conv.values.copy_(fit_values(path.conv.basis.matrix(), inner.weight.flatten(2)))
        if inner.bias is not None:
            path.conv.bias.copy_(inner.bias)
        return path

    def reduce(self, anchors: float) -> "SConv":
        """Return the nearest map with another number of anchors, spread evenly."""
        dense = Conv.from_filters(self, self.conv.convolution())
        return SConv.from_conv(dense, anchors, **self.conv.basis.options)

    @torch.no_grad()
    def resample(self, in_shape: Sequence[int], kernel: int | None = None) -> "SConv":
        """Return the same filter, as a function of position, for maps of another resolution.

        Anchors are multiplied by the ratio r of the shapes and omega by 1/r. Values are divided by
        the ratio of the areas, so that sums over pixels are preserved.

        Args:
            in_shape: r times the shape of this path, with the same r in every dimension.
            kernel: odd, and at most 1 away from r times the kernel of this path; by default the
                nearest odd number, the larger of two.

        Raises:
            ValueError: the shapes have no common ratio, or the kernel does not fit the ratio.
        """
        basis, dims = self.conv.basis, len(self.in_shape)
        shape = checked_shape(in_shape)
        ratios = {Fraction(a, b) for a, b in zip(shape, self.in_shape, strict=False)}
        if len(shape) != dims or len(ratios) > 1:
            raise ValueError(
                f"in_shape must have the same ratio to {self.in_shape} in all {dims} dimensions, "
                f"got {shape}."
            )
        target = ratios.pop() * basis.shape[0]
        kernel = 2 * math.floor(target / 2) + 1 if kernel is None else kernel
        check_kernel(kernel, shape, self.conv.padding)
        if abs(kernel - target) > 1:
            raise ValueError(
                f"kernel must be within 1 of {float(target):g}, for the ratio of {shape} to "
                f"{self.in_shape}, got {kernel}."
            )
        ratio = float(target / basis.shape[0])
        path = SConv(
            self.in_channels,
            self.out_channels,
            in_shape,
            self.stride,
            anchors=basis.stretched((kernel,) * dims, ratio),
            kernel=kernel,
            padding=self.conv.padding,
            reduction=self.subsampling.reduction,
        ).to(self.conv.values)
        path.conv.values.copy_(self.conv.values / ratio**dims)
        path.conv.bias.copy_(self.conv.bias)
        return path
