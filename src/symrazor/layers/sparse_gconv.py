r"""S-GCONV: group convolutions whose filters are continuous functions from a few anchors.

A filter is $\psi(\delta) = \sum_p u[p]\, \phi(|\delta - z_p|)$ (basis.py). Turned by any angle it
is the same sum with turned anchors,
$\psi(R_g^{-1} \delta) = \sum_p u[p]\, \phi(|\delta - R_g z_p|)$: nothing is interpolated. With n
rotations it samples SO(2), with translations SE(2), as finely as one likes, and what is left of the
equivariance error comes from the pixels alone.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from symrazor.groups import Group
from symrazor.layers.basis import basis_of, prior_groups
from symrazor.layers.filtered import Padding
from symrazor.layers.gconv import GConv, Kind
from symrazor.layers.group_filter import Fields, GroupFilter
from symrazor.layers.subsampling import Reduction


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
