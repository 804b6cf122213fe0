r"""GCONV: a convolution over translations and rotations, and with p4m also reflections.

Maps are of a regular representation: |G| images for each field, one for each element, channels
ordered (element, field); see `symrazor.layers.point_group` for how the group acts on them. All
elements share the coordinates of the image. So a translation moves all channels alike, a path to
`Conv` or `FFC` sees an ordinary map of C |G| channels, and one adaptive subsampling for all
elements of a sample is exact under translations and rotations together.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.accelerate.torch_internals import conv_padding
from symrazor.groups import Group
from symrazor.layers.basis import basis_of, prior_groups
from symrazor.layers.conv import (
    CONVOLUTIONS,
    AnyConv,
    Conv,
    Filtered,
    Padding,
    check_kernel,
    is_strict,
)
from symrazor.layers.group_filter import Fields, GroupFilter
from symrazor.layers.path import Map, Path, is_integer, is_symbolic
from symrazor.layers.point_group import PointGroup, interpolation_error, point_group
from symrazor.layers.subsampling import Reduction, Subsample

Kind = Literal["full", "lift", "pointwise", "separable", "depthwise-separable"]
"""Which connections a group convolution has.

"full": every element to every other (Cohen and Welling 2016). "lift": of an image, to every
element. "pointwise": every element to itself alone. "separable": a filter for each field on every
element alone, then fields and elements at one place. "depthwise-separable": that filter, then
elements field by field, then fields.
"""


def filters(kind: Kind, fields: Fields, kernel: int, padding: Padding) -> nn.Module:
    """The filters of a kind, one after the other; the last one has the bias."""
    c, d, group = fields.inputs, fields.outputs, fields.group
    alone = Fields(c, c, group, "pointwise", depthwise=True)
    match kind:
        case "full" | "lift" | "pointwise":
            return GroupFilter(Fields(c, d, group, kind), kernel, padding)
        case "separable":
            spatial = GroupFilter(alone, kernel, padding, bias=False)
            return nn.Sequential(spatial, GroupFilter(Fields(c, d, group), 1, padding))
        case "depthwise-separable":
            return nn.Sequential(
                GroupFilter(alone, kernel, padding, bias=False),
                GroupFilter(Fields(c, c, group, depthwise=True), 1, padding, bias=False),
                GroupFilter(Fields(c, d, group, "pointwise"), 1, padding),
            )


class GConv(Filtered):
    r"""One filter for all elements of a group, turned for each; one bias per field.

    $$ y[g, o](t) = \sum_{h, c, \delta} \psi[o, g^{-1} h, c, R_g^{-1} \delta]\, x[h, c](t + \delta)
       + b[o] $$

    With circular padding and adaptive subsampling it is exactly equivariant to translations and to
    its rotations and reflections where those map the grid to itself: p2, p4, pm, p2m, p4m. Other
    angles interpolate filters; `interpolation_error` says how well, and `strict` is False. On maps
    in 3 dimensions the rotations of a cube are exact: "O", 24 of them, and "Oh", 48 with
    reflections.

    The first four arguments are those of `Path`, channels counted as in the map: |G| times the
    number of fields.

    Args:
        group: "p4" (quarter turns), "p4m" (with reflections), "p2", "pm", as in "C8" and "D8", in
            space "O" and "Oh"; or a finite group of 2 x 2 or 3 x 3 matrices.
        kind: see `Kind`; for "lift" the input is an image of any number of channels.
        kernel: size of the filter in every dimension; odd.
        padding: "circular" or "zeros".
        reduction: how a stride shrinks the map, see `symrazor.layers.subsampling`.

    Raises:
        ValueError: channels that |G| does not divide, or a map that is not square (or a cube).
    """

    conv: nn.Module

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        in_shape: Sequence[int],
        stride: int = 1,
        *,
        group: str | Group = "p4",
        kind: Kind = "full",
        kernel: int = 3,
        padding: Padding = "circular",
        reduction: Reduction = "l2",
    ) -> None:
        """Draw the filters."""
        super().__init__(in_channels, out_channels, in_shape, stride)
        check_kernel(kernel, self.in_shape, padding)
        if kind not in get_args(Kind):
            raise ValueError(f"expected kind in {get_args(Kind)}, got {kind!r}")
        self.point_group, self.kind = point_group(group), kind
        self.point_group.check_map(self.in_shape)
        self.group = self.point_group.name
        self.strict = self.point_group.exact and is_strict(padding, stride, reduction, kernel)
        self.kernel = kernel
        self.conv = filters(kind, self._fields(), kernel, padding)
        self.shrink = Subsample(stride, reduction)

    @classmethod
    @torch.no_grad()
    def split_off(
        cls, conv: AnyConv, in_shape: Sequence[int], group: str | Group, lift: bool
    ) -> "GConv":
        """The part of a convolution that is equivariant to a group, which loses it.

        The two are orthogonal and add up to what the convolution was. A frozen convolution stays
        as it is, and the path starts at zero.

        Args:
            conv: with an odd square filter, padded to the same size, no dilation or groups; its
                channels are taken as (element, field).
            in_shape: of its input.
            group: see the class; of the grid.
            lift: whether its input is an image.

        Raises:
            ValueError: another convolution, or channels or maps that do not fit the group.
        """
        around = [k // 2 for k in conv.kernel_size for _ in range(2)]
        alike = len(set(conv.kernel_size)) == 1 and len(set(conv.stride)) == 1
        same = list(conv_padding(conv)) == around
        if not alike or not same or set(conv.dilation) | {conv.groups} != {1}:
            raise ValueError(f"expected a convolution padded to the same size, got {conv}")
        path = cls(
            conv.in_channels,
            conv.out_channels,
            in_shape,
            conv.stride[0],
            group=group,
            kind="lift" if lift else "full",
            kernel=conv.kernel_size[0],
            padding=conv.padding_mode,  # type: ignore[arg-type]
            reduction="first",
        ).to(conv.weight)
        if not path.point_group.exact:
            raise ValueError(f"expected a group of the grid, got {path.group}")
        (stage,) = path.stages
        if not conv.weight.requires_grad:
            path.scale_(0.0)
            return path
        stage.project_(conv.weight, conv.bias)
        own = stage.convolution()
        conv.weight.sub_(own.weight)
        if conv.bias is not None and own.bias is not None:
            conv.bias.sub_(own.bias)
        return path

    def _fields(self) -> Fields:
        order = self.point_group.order
        wanted = [("out", self.out_channels)]
        if self.kind != "lift":
            wanted.append(("in", self.in_channels))
        for side, channels in wanted:
            if channels % order:
                raise ValueError(
                    f"expected a number of channels {side} that the {order} elements of "
                    f"{self.group} divide, got {channels}"
                )
        inputs = self.in_channels if self.kind == "lift" else self.in_channels // order
        return Fields(inputs, self.out_channels // order, self.point_group)

    def is_equivariant_under(self, other: Path) -> bool:
        """Whether its group, which has all translations, contains that of another path.

        And moves channels as that does: p4m and pm are not of one mind about that.
        """
        if not isinstance(other, GConv):
            return other.group in ("translation", self.group)
        return self.point_group.contains(other.point_group)

    @property
    def label(self) -> str:
        """With its group: a layer may have one for several."""
        return f"{type(self).__name__} {self.group}"

    @property
    def stages(self) -> list[GroupFilter]:
        """Its filters in order."""
        found = list(self.conv) if isinstance(self.conv, nn.Sequential) else [self.conv]
        return [stage for stage in found if isinstance(stage, GroupFilter)]

    @property
    def interpolation_error(self) -> float:
        """Relative error of a smooth filter at the worst angle; 0 for groups of the grid."""
        exact = self.point_group.exact
        return 0.0 if exact else interpolation_error(self.point_group, self.kernel)

    def extra_repr(self) -> str:
        """Spaces and group, and how well filters are turned, for `print(model)`."""
        error = self.interpolation_error
        return super().extra_repr() + (f", interpolation error {error:.2g}" if error else "")

    @property
    def output_weights(self) -> list[nn.Parameter]:
        """The last filter and its bias."""
        return list(self.stages[-1].parameters())

    @property
    def balanced(self) -> tuple[nn.Parameter, ...]:
        """The filters of separable kinds: of each input field only their product matters."""
        return tuple(stage.weight for stage in self.stages) if len(self.stages) > 1 else ()

    @torch.no_grad()
    def balance_(self) -> None:
        """Give all filters that a field goes through the same norm; the map stays what it is."""
        if not self.balanced:
            return
        *own, last = self.balanced  # own[c, ...] and last[d, h, c, 1]
        parts = [*own, last.transpose(0, 2)]
        norms = torch.stack([part.flatten(1).norm(dim=1) for part in parts])
        alive = (norms > 0).all(0)
        wanted = norms.clamp_min(torch.finfo(norms.dtype).tiny).log().mean(0).exp()
        scales = torch.where(alive, wanted / norms, 1.0)
        for weight, scale in zip(own, scales, strict=False):
            weight.mul_(scale.reshape(-1, 1, 1, 1))
        last.mul_(scales[-1].reshape(1, 1, -1, 1))

    def transformations(self) -> list[tuple[Map, Map]]:
        """What each element but the identity does to inputs and to outputs."""
        group: PointGroup = self.point_group
        lifts = self.kind == "lift"
        return [
            (partial(group.act, g, regular=not lifts), partial(group.act, g))
            for g in range(1, group.order)
        ]

    @torch.no_grad()
    def dense(self) -> "Conv | GConv":
        """The same map as `Conv`, with all turned filters written out, where none are apart."""
        if self.kind not in ("full", "lift"):
            return self
        path = Conv.wrap(self.stages[0].convolution(), self.in_shape)
        path.shrink, path.out_shape, path.stride = self.shrink, self.out_shape, self.stride
        return path

    @torch.no_grad()
    def unshrunk(self) -> nn.Module:
        """The filters alone, as convolutions of torch."""
        first, *others = self.stages
        if not others:
            return first.convolution()
        # elements and fields at one place: one filter of one pixel, whatever it is made of
        mixed: Tensor = others[0].weight
        if self.kind == "depthwise-separable":
            mixed = others[1].weight * others[0].weight.transpose(0, 2)
        whole = GroupFilter(self._fields(), 1, first.padding).to(mixed)
        whole.weight.copy_(mixed)
        assert whole.bias is not None
        whole.bias.copy_(self.stages[-1].bias)  # type: ignore[arg-type]
        return nn.Sequential(first.convolution(), whole.convolution())


class GroupPool(nn.Module):
    """One image for each field from one for each element: their maximum or their mean.

    Rotations then act on the output as on any image; on maps of one pixel they do nothing.

    Args:
        elements: of the group, |G|; or any finite group, or the name of one of the grid.
        how: "max" or "mean".
    """

    def __init__(self, elements: int | str | Group, how: Literal["max", "mean"] = "max") -> None:
        """Keep the options."""
        super().__init__()
        if how not in ("max", "mean"):
            raise ValueError(f"expected how as 'max' or 'mean', got {how!r}")
        given: object = elements
        order: object = given
        if isinstance(given, str | Group):
            order = given.finite().order if isinstance(given, Group) else point_group(given).order
        if not isinstance(order, int) or not is_integer(order):
            raise ValueError(f"expected a group or its number of elements, got {given!r}")
        self.elements = order
        self.how = how

    def forward(self, x: Float[Tensor, "n c *size"]) -> Float[Tensor, "n d *size"]:
        """Pool over elements."""
        if not is_symbolic(x) and x.shape[1] % self.elements:
            raise ValueError(
                f"expected channels that {self.elements} elements divide, got {x.shape[1]}"
            )
        split = x.unflatten(1, (self.elements, -1))
        y: Tensor = split.amax(1) if self.how == "max" else split.mean(1)
        return y

    def extra_repr(self) -> str:
        """Options, for `print(model)`."""
        return f"elements={self.elements}, how={self.how!r}"


class SGConv(GConv):
    """`GConv` with P anchors in place of a full filter, for any number of rotations.

    The arguments are those of `GConv`, and:

    Args:
        anchors: how many, or as a float which fraction of the filter's entries; or their places.
        kind: "full", "lift" or "pointwise".
        **basis: options of `symrazor.layers.basis.Basis`: omega, form, learn_omega, learn_anchors.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        in_shape: Sequence[int],
        stride: int = 1,
        *,
        group: str | Group = "p4",
        kind: Kind = "full",
        anchors: Any = 0.5,
        kernel: int = 3,
        padding: Padding = "circular",
        reduction: Reduction = "l2",
        **basis: Any,
    ) -> None:
        """Place the anchors and draw their values."""
        if kind not in ("full", "lift", "pointwise"):
            raise ValueError(f"expected kind 'full', 'lift' or 'pointwise', got {kind!r}")
        super().__init__(
            in_channels,
            out_channels,
            in_shape,
            stride,
            group=group,
            kind=kind,
            kernel=kernel,
            padding=padding,
            reduction=reduction,
        )
        R = self.point_group.matrices
        if not bool(((R @ R.mT - R[0]).abs() < 1e-9).all()):
            raise ValueError(f"expected rotations and reflections, got {self.group}")
        fields = self._fields()
        made = basis_of((kernel,) * self.point_group.dims, anchors, **basis)
        fields = Fields(fields.inputs, fields.outputs, fields.group, kind)
        self.conv = GroupFilter(fields, kernel, padding, basis=made)

    @property
    def interpolation_error(self) -> float:
        """0: filters are functions of place, turned exactly."""
        return 0.0

    @property
    def output_weights(self) -> list[nn.Parameter]:
        """Anchor values and bias."""
        (stage,) = self.stages
        return [stage.weight, *([] if stage.bias is None else [stage.bias])]

    def prior_groups(self) -> dict[str, list[str]]:
        """Anchor values and bias, lengthscale, places of the anchors."""
        return prior_groups(self)


class GReadout(Path):
    """The mean over the elements of a group, then a convolution of one pixel.

    Beside a `Conv` with a kernel of one pixel it says whether the answer needs the orientation.

    Args:
        in_channels: fields times |G|.
        out_channels: of the images that come out.
        in_shape: spatial shape.
        group: as for `GConv`.
    """

    conv: AnyConv

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        in_shape: Sequence[int],
        group: str | Group = "p4",
    ) -> None:
        """Draw the weights."""
        super().__init__(in_channels, out_channels, in_shape)
        self.point_group = point_group(group)
        self.point_group.check_map(self.in_shape)
        self.group, order = self.point_group.name, self.point_group.order
        self.strict = self.point_group.exact
        if in_channels % order:
            raise ValueError(
                f"expected a number of channels in that the {order} elements of {self.group} "
                f"divide, got {in_channels}"
            )
        self.pool = GroupPool(order, "mean")
        self.conv = CONVOLUTIONS[len(self.in_shape)](in_channels // order, out_channels, 1)
        with torch.no_grad():
            assert self.conv.bias is not None
            self.conv.bias.zero_()

    def forward(self, x: Float[Tensor, "n c *size"]) -> Float[Tensor, "n d *size"]:
        """Average, then mix the fields."""
        self.check(x)
        y: Tensor = self.conv(self.pool(x))
        return y

    @property
    def affine(self) -> bool:
        """True."""
        return True

    def transformations(self) -> list[tuple[Map, Map]]:
        """What each element but the identity does to inputs and to outputs."""
        act = self.point_group.act
        return [
            (partial(act, g), partial(act, g, regular=False))
            for g in range(1, self.point_group.order)
        ]

    def is_equivariant_under(self, other: Path) -> bool:
        """Whether its group, which has all translations, contains that of another path."""
        if not isinstance(other, GReadout):
            return other.group in ("translation", self.group)
        return self.point_group.contains(other.point_group)
