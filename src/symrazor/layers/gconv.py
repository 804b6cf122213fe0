r"""Define group convolutions: over translations and rotations, and with p4m also reflections.

Maps are of a regular representation: every field has |G| images, one per element, with channels
ordered (element, field); `symrazor.layers.point_group` defines how the group acts on them. All
elements share the coordinates of the image. Therefore a translation moves all channels in the same
way, `Conv` and `FFC` treat the map as an ordinary map of C |G| channels, and one adaptive
subsampling for all elements of a sample is equivariant to translations and rotations.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.core.validation import check_choice
from symrazor.groups import Group
from symrazor.layers.basis import make_basis
from symrazor.layers.conv import CONVOLUTIONS, AnyConv, FilterPath, Padding, is_padded_to_same_size
from symrazor.layers.group_filter import Fields, GroupFilter
from symrazor.layers.path import Map, Path
from symrazor.layers.point_group import interpolation_error, point_group
from symrazor.layers.subsampling import GroupPool, Reduction

Kind = Literal["full", "lift", "pointwise", "separable", "depthwise-separable"]
"""Connections of a group convolution.

"full": every element to every other (Cohen and Welling 2016). "lift": from an image to every
element. "pointwise": every element to itself only. "separable": a filter per field on every element
separately, then a mixing of fields and elements at each position. "depthwise-separable": the same
filter, then a mixing of elements per field, then a mixing of fields.
"""


def filters_of_kind(kind: Kind, fields: Fields, kernel: int, padding: Padding) -> nn.Module:
    """Return the filters of a kind in sequence; only the last has a bias."""
    c, d, group = fields.inputs, fields.outputs, fields.group
    per_field = Fields(c, c, group, "pointwise", depthwise=True)
    match kind:
        case "full" | "lift" | "pointwise":
            return GroupFilter(Fields(c, d, group, kind), kernel, padding)
        case "separable":
            spatial = GroupFilter(per_field, kernel, padding, bias=False)
            return nn.Sequential(spatial, GroupFilter(Fields(c, d, group), 1, padding))
        case "depthwise-separable":
            return nn.Sequential(
                GroupFilter(per_field, kernel, padding, bias=False),
                GroupFilter(Fields(c, c, group, depthwise=True), 1, padding, bias=False),
                GroupFilter(Fields(c, d, group, "pointwise"), 1, padding),
            )


class GConv(FilterPath):
    r"""Group convolution (GCONV): one filter, rotated for every group element; one bias per field.

    $$ y[g, o](t) = \sum_{h, c, \delta} \psi[o, g^{-1} h, c, R_g^{-1} \delta]\, x[h, c](t + \delta)
       + b[o] $$

    With circular padding and adaptive subsampling the path is exactly equivariant to translations
    and to rotations and reflections that map the grid to itself: p2, p4, pm, p2m, p4m. Other angles
    interpolate the filters: `interpolation_error` is the error, and `strict` is False. In three
    dimensions the rotations of a cube are exact: "O" with 24 elements, and "Oh" with reflections,
    48.

    The first four arguments are those of `Path`, with channels counted as in the map: |G| times the
    number of fields.

    Args:
        group: "p4" (quarter turns), "p4m" (with reflections), "p2", "pm", "C8", "D8" and so on, in
            three dimensions "O" and "Oh"; or a finite group of 2 x 2 or 3 x 3 matrices.
        kind: see `Kind`; for "lift" the input is an image with any number of channels.
        kernel: size of the filter in every dimension; odd.
        padding: "circular" or "zeros".
        reduction: how a stride shrinks the map, see `symrazor.layers.subsampling.Reduction`.

    Raises:
        ValueError: |G| does not divide the channels, or the map is not square (or cubic).
    """

    interpolates: ClassVar[bool] = True

    def _build(
        self,
        *,
        group: str | Group = "p4",
        kind: Kind = "full",
        kernel: int = 3,
        padding: Padding = "circular",
        reduction: Reduction = "l2",
    ) -> None:
        self._set_filter(kernel, padding, reduction)
        check_choice("kind", kind, Kind)
        self.point_group, self.kind = point_group(group), kind
        self.point_group.check_map(self.in_shape)
        self.group, self.kernel = self.point_group.name, kernel
        self.strict = self.strict and self.point_group.exact
        self.conv = filters_of_kind(kind, self._fields(), kernel, padding)

    @classmethod
    @torch.no_grad()
    def split_off(
        cls, conv: AnyConv, in_shape: Sequence[int], group: str | Group, lift: bool
    ) -> "GConv":
        """Subtract the equivariant part from a convolution and return it as a path.

        The two parts are orthogonal, and their sum is the original convolution. A frozen
        convolution is not changed, and the path starts at zero.

        Args:
            conv: a convolution with an odd square filter, padded to the same size, without dilation
                and groups; its channels are interpreted as (element, field).
            in_shape: spatial shape of its input.
            group: a group that maps the grid to itself, see the class.
            lift: whether its input is an image.

        Raises:
            ValueError: another convolution, or channels or maps that do not fit the group.
        """
        square = len(set(conv.kernel_size)) == len(set(conv.stride)) == 1
        if not square or conv.groups != 1 or not is_padded_to_same_size(conv):
            raise ValueError(f"The convolution must be padded to the same size, got {conv}.")
        path = cls(
            conv.in_channels,
            conv.out_channels,
            in_shape,
            conv.stride[0],
            group=group,
            kind="lift" if lift else "full",
            kernel=conv.kernel_size[0],
            padding=conv.padding_mode,
            reduction="first",
        ).to(conv.weight)
        if not path.point_group.exact:
            raise ValueError(f"The group {path.group} does not map the grid to itself.")
        if conv.weight.requires_grad:
            path.take_from_(conv)
        else:
            path.scale_(0.0)
        return path

    @torch.no_grad()
    def take_from_(self, conv: AnyConv) -> None:
        """Move the equivariant part of a convolution into this path, which loses its weights."""
        (stage,) = self.stages
        stage.project_(conv.weight, conv.bias)
        equivariant_part = stage.convolution()
        conv.weight.sub_(equivariant_part.weight)
        if conv.bias is not None and equivariant_part.bias is not None:
            conv.bias.sub_(equivariant_part.bias)

    def _fields(self) -> Fields:
        outputs = self.point_group.fields("out_channels", self.out_channels)
        inputs = self.in_channels
        if self.kind != "lift":
            inputs = self.point_group.fields("in_channels", inputs)
        return Fields(inputs, outputs, self.point_group)

    def is_equivariant_under(self, other: Path) -> bool:
        """Return whether its group, translations included, contains the group of another path.

        The two groups must also permute channels in the same way, which p4m and pm do not.
        """
        if not isinstance(other, GConv):
            return other.group in ("translation", self.group)
        return self.point_group.contains(other.point_group)

    @property
    def label(self) -> str:
        """Class and group, because a layer may have paths of several groups."""
        return f"{type(self).__name__} {self.group}"

    @property
    def stages(self) -> list[GroupFilter]:
        """Filters in the order of application."""
        modules = list(self.conv) if isinstance(self.conv, nn.Sequential) else [self.conv]
        return [module for module in modules if isinstance(module, GroupFilter)]

    @property
    def interpolation_error(self) -> float:
        """Relative error of a smooth filter at the worst angle; 0 if filters rotate exactly."""
        exact = self.point_group.exact or not self.interpolates
        return 0.0 if exact else interpolation_error(self.point_group, self.kernel)

    def extra_repr(self) -> str:
        """Return the spaces, the group, and the interpolation error if there is one."""
        error = self.interpolation_error
        return super().extra_repr() + (f", interpolation error {error:.2g}" if error else "")

    @property
    def output_weights(self) -> list[nn.Parameter]:
        """The last filter and its bias, without the parameters of a basis."""
        last = self.conv[-1] if isinstance(self.conv, nn.Sequential) else self.conv
        return [p for name, p in last.named_parameters() if not name.startswith("basis.")]

    @property
    def balanced_parameters(self) -> tuple[nn.Parameter, ...]:
        """Filters of separable kinds: only their product matters for each input field."""
        return tuple(stage.weight for stage in self.stages) if len(self.stages) > 1 else ()

    @torch.no_grad()
    def balance_(self) -> None:
        """Give all filters that a field passes through the same norm, without changing the map."""
        if not self.balanced_parameters:
            return
        *first, last = self.balanced_parameters  # first[c, ...] and last[d, h, c, 1]
        per_field = [*first, last.transpose(0, 2)]
        norms = torch.stack([weight.flatten(1).norm(dim=1) for weight in per_field])
        nonzero = (norms > 0).all(0)
        geometric_mean = norms.clamp_min(torch.finfo(norms.dtype).tiny).log().mean(0).exp()
        scales = torch.where(nonzero, geometric_mean / norms, 1.0)
        for weight, scale in zip(first, scales, strict=False):
            weight.mul_(scale.reshape(-1, 1, 1, 1))
        last.mul_(scales[-1].reshape(1, 1, -1, 1))

    def transformations(self) -> list[tuple[Map, Map]]:
        """Return how each element but the identity acts on inputs and on outputs."""
        return self.point_group.transformations(regular_in=self.kind != "lift")

    def dense(self) -> FilterPath:
        """Return the same map as a `Conv` with all rotated filters, if it mixes all channels."""
        return super().dense() if self.kind in ("full", "lift") else self

    @torch.no_grad()
    def without_subsampling(self) -> nn.Module:
        """Return the filters alone, as torch convolutions."""
        if not isinstance(self.conv, nn.Sequential):
            return super().without_subsampling()
        first, *further_stages = self.stages
        # All later stages act at one position: together they are one filter of one pixel.
        mixed: Tensor = further_stages[0].weight
        if self.kind == "depthwise-separable":
            mixed = further_stages[1].weight * further_stages[0].weight.transpose(0, 2)
        full_filter = GroupFilter(self._fields(), 1, first.padding).to(mixed)
        full_filter.weight.copy_(mixed)
        assert full_filter.bias is not None
        full_filter.bias.copy_(self.stages[-1].bias)  # type: ignore[arg-type]
        return nn.Sequential(first.convolution(), full_filter.convolution())


class SGConv(GConv):
    r"""Sparse group convolution (S-GCONV): `GConv` with P anchors per filter, at any angle.

    A filter is $\psi(\delta) = \sum_p u[p]\, \phi(|\delta - z_p|)$, see `symrazor.layers.basis`.
    Its rotation by any angle is the same sum with rotated anchors,
    $\psi(R_g^{-1} \delta) = \sum_p u[p]\, \phi(|\delta - R_g z_p|)$, without interpolation. With n
    rotations the path samples SO(2), and with translations SE(2), arbitrarily finely; the remaining
    equivariance error comes from the pixel grid alone.

    The arguments are those of `GConv`, and:

    Args:
        anchors: their number, or as a float their fraction of the filter's entries; or positions.
        kind: "full", "lift" or "pointwise".
        **basis: options of `symrazor.layers.basis.Basis`: omega, form, learn_omega, learn_anchors.
    """

    interpolates = False  # filters are functions of position

    def _build(
        self,
        *,
        group: str | Group = "p4",
        kind: Kind = "full",
        anchors: Any = 0.5,
        kernel: int = 3,
        padding: Padding = "circular",
        reduction: Reduction = "l2",
        **basis: Any,
    ) -> None:
        if kind not in ("full", "lift", "pointwise"):
            raise ValueError(f"kind must be 'full', 'lift' or 'pointwise', got {kind!r}.")
        super()._build(group=group, kind=kind, kernel=kernel, padding=padding, reduction=reduction)
        R = self.point_group.matrices
        if not bool(((R @ R.mT - R[0]).abs() < 1e-9).all()):
            raise ValueError(f"SGConv needs rotations and reflections, got {self.group}.")
        filter_basis = make_basis((kernel,) * self.point_group.dims, anchors, **basis)
        fields = replace(self._fields(), mixing=kind)
        self.conv = GroupFilter(fields, kernel, padding, basis=filter_basis)


class GReadout(Path):
    r"""Group read-out: the mean over group elements, then a convolution of one pixel.

    $$ y[o](t) = b[o] + \sum_c W[o, c]\, \frac1{|G|} \sum_g x[g, c](t) $$

    is the only linear map of one pixel from a regular representation to images that commutes with
    the group. A dense head must have this form if the output is not to depend on orientation.
    Beside a `Conv` with a kernel of one pixel, it tests whether the output needs the orientation.

    Args:
        in_channels: number of fields times |G|.
        out_channels: number of output channels.
        in_shape: spatial shape.
        group: as for `GConv`.
    """

    affine = True
    conv: AnyConv

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        in_shape: Sequence[int],
        group: str | Group = "p4",
    ) -> None:
        super().__init__(in_channels, out_channels, in_shape, group=group)

    def _build(self, *, group: str | Group) -> None:
        self.point_group = point_group(group)
        self.point_group.check_map(self.in_shape)
        self.group, self.strict = self.point_group.name, self.point_group.exact
        fields = self.point_group.fields("in_channels", self.in_channels)
        self.pool = GroupPool(self.point_group.order, "mean")
        self.conv = CONVOLUTIONS[len(self.in_shape)](fields, self.out_channels, 1)
        assert self.conv.bias is not None
        nn.init.zeros_(self.conv.bias)

    def forward(self, x: Float[Tensor, "n c *size"]) -> Float[Tensor, "n d *size"]:
        """Average over the elements, then mix the fields."""
        self.check(x)
        y: Tensor = self.conv(self.pool(x))
        return y

    def transformations(self) -> list[tuple[Map, Map]]:
        """Return how each element but the identity acts on inputs and on outputs."""
        return self.point_group.transformations(regular_out=False)

    def is_equivariant_under(self, other: Path) -> bool:
        """Return whether its group, translations included, contains the group of another path."""
        if not isinstance(other, GReadout):
            return other.group in ("translation", self.group)
        return self.point_group.contains(other.point_group)
