r"""Convolve maps of a regular representation, with the filter rotated for every group element.

$$ y[g, o](t) = b[o] + \sum_{h', c, \delta} \psi_g[o, h', c, \delta]\, x[g h', c](t + \delta) ,
   \qquad \psi_g[\delta] = \psi(R_g^{-1} \delta) , $$

in two or three dimensions; `symrazor.layers.point_group` computes $\psi_g$ from the weights. All
rotated filters form one bank, which is applied as one convolution. The sum over h' runs over the
group ("full"), over the identity only ("pointwise"), or is absent if x is an image ("lift").
Depthwise, an output field depends on the input field of the same index only.

In the weight-sharing format, an element is one more use of the weight, on an input that is rotated
back: $a[n, (g, t), (h', c, p)] = \sum_\delta T_g[p, \delta]\, x[n, g h', c, t + \delta]$. The input
factor is then a sum over elements of the factor of a plain convolution with its rows and columns
permuted.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from symrazor.curvature.convolution import all_patches, input_factor
from symrazor.curvature.weight_sharing import Sharing, sharing
from symrazor.layers.basis import Basis
from symrazor.layers.conv import AnyConv, ComputedFilter, Filter, Padding
from symrazor.layers.point_group import PointGroup, interpolation, rotated_basis

Mixing = Literal["full", "lift", "pointwise"]


@dataclass(frozen=True)
class Fields:
    """Fields and group elements that a filter connects.

    Args:
        inputs: number of input fields, each with one image per element (or one, for "lift").
        outputs: number of output fields, each with one image per element.
        group: rotations and reflections.
        mixing: "lift", "full" or "pointwise".
        depthwise: whether output field o depends on input field o only.
    """

    inputs: int
    outputs: int
    group: PointGroup
    mixing: Mixing = "full"
    depthwise: bool = False

    @property
    def relatives(self) -> int:
        """Number of relative elements h' in the filter."""
        return self.group.order if self.mixing == "full" else 1

    @property
    def inputs_per_output(self) -> int:
        """Number of input fields that an output field depends on."""
        return 1 if self.depthwise else self.inputs

    @property
    def blocks(self) -> int:
        """Number of channel groups that are not mixed: `groups` of torch convolutions."""
        elements = self.group.order if self.mixing == "pointwise" else 1
        return elements * (self.inputs if self.depthwise else 1)


class GroupFilter(ComputedFilter):
    """Apply one convolution with the filters of all group elements; see the module.

    Weights are drawn such that the filter has the variance of He's initialisation.

    Args:
        fields: fields and elements it connects.
        kernel: size of the filter in every dimension; odd.
        padding: "circular" or "zeros".
        bias: add one bias per output field.
        basis: compute filters from anchors, which are rotated; by default from filter entries.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    index_back: Tensor | None
    matrices: Tensor | None
    rotations: Tensor | None
    sources: Tensor
    table: Tensor

    def __init__(
        self,
        fields: Fields,
        kernel: int,
        padding: Padding,
        bias: bool = True,
        basis: Basis | None = None,
    ) -> None:
        super().__init__((kernel,) * fields.group.dims, padding)
        self.fields, self.kernel = fields, kernel
        index: Tensor | None = None
        matrices: Tensor | None = None
        if basis is not None:
            matrices = rotated_basis(fields.group.matrices, basis).detach()
        else:
            with torch.device("cpu"):
                matrices = interpolation(fields.group, kernel)
            if fields.group.exact:  # the maps T_g are permutations: psi_g = v[index_g]
                index, matrices = matrices.argmax(1), None
        learned = basis is not None and basis.fixed is None
        self.basis = basis if learned else None
        self.filter_entries: int = kernel**fields.group.dims
        values = self.filter_entries if matrices is None else matrices.shape[1]
        shape = (fields.outputs, fields.relatives, fields.inputs_per_output, values)
        fan_in = fields.relatives * fields.inputs_per_output * self.filter_entries
        basis_power = 1.0 if matrices is None else float(matrices[0].square().sum(0).mean())
        bound = math.sqrt(6 / (fan_in * max(basis_power, 1e-6)))
        self.weight = nn.Parameter(torch.empty(shape).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(fields.outputs)) if bias else None
        constants = {
            "index_back": None if index is None else index.argsort(1),
            "matrices": None if learned else matrices,  # in float64, and cast where used
            "rotations": fields.group.matrices if learned else None,
            "sources": self._bank_sources(index),
            "table": fields.group.table,
        }
        for name, value in constants.items():
            on_device = None if value is None else value.to(self.weight.device)
            self.register_buffer(name, on_device, persistent=False)

    def _bank_sources(self, index: Tensor | None) -> Int[Tensor, " f"]:
        """Return for every entry (g, h, offset) of the bank the index of its value.

        Values are indexed (relative, entry). If rotations are not permutations, return for every
        (g, h) the index of the rotated filter (g, relative).
        """
        order, relatives = self.fields.group.order, self.fields.relatives
        relative = torch.zeros(order, 1, dtype=torch.long, device="cpu")
        if self.fields.mixing == "full":
            relative = self.fields.group.relative
        if index is None:
            first = relatives * torch.arange(order, device="cpu")
            return (relative + first.unsqueeze(1)).flatten()
        return (self.filter_entries * relative.unsqueeze(2) + index.unsqueeze(1)).flatten()

    def rotation_matrices(self) -> Float[Tensor, "g p s"] | None:
        """Return T_g, differentiable in its basis, or None if they are permutations."""
        if self.basis is not None and self.rotations is not None:
            return rotated_basis(self.rotations, self.basis)
        return self.matrices

    def bank(self) -> Float[Tensor, "g o h c s"]:
        """Return the filters psi_g of every element g, on elements h and fields c of the input."""
        split, matrices = (self.fields.group.order, self.fields.relatives), self.rotation_matrices()
        if matrices is None:
            values = self.weight.transpose(1, 2).flatten(2)
            picked: Tensor = values.index_select(2, self.sources).unflatten(2, (*split, -1))
            return picked.permute(2, 0, 3, 1, 4)
        rotated = torch.einsum("orcp,gps->grocs", self.weight, matrices.to(self.weight.dtype))
        selected: Tensor = rotated.flatten(0, 1).index_select(0, self.sources)
        picked = selected.unflatten(0, split)
        return picked.transpose(1, 2)

    def kernels(self) -> Float[Tensor, "d c *k"]:
        """Return the bank in the layout of torch convolutions, fields first if depthwise."""
        bank = self.bank().transpose(0, 1) if self._fields_first else self.bank()
        return bank.reshape(-1, bank.shape[2] * bank.shape[3], *self.geometry.kernel_size)

    @property
    def _fields_first(self) -> bool:
        """Whether channel groups are fields, so that elements of a field must be adjacent."""
        return self.fields.depthwise and self.fields.mixing == "full"

    def as_filter(self) -> Filter | None:
        """Return the bank as one filter, or None if the channels must be reordered."""
        if self._fields_first:
            return None
        bias = None if self.bias is None else self.bias.repeat(self.fields.group.order)
        return Filter(self.kernels(), bias, self.padding, self.fields.blocks)

    def forward(self, x: Float[Tensor, "n c *size"]) -> Float[Tensor, "n d *size"]:
        """Convolve with the bank."""
        as_filter, order = self.as_filter(), self.fields.group.order
        if as_filter is not None:
            return as_filter(x)
        per_field = Filter(self.kernels(), None, self.padding, self.fields.blocks)
        y = swap_channels(per_field(swap_channels(x, order)), self.fields.outputs)
        if self.bias is None:
            return y
        return y + self.bias.repeat(order).reshape(-1, *(1,) * self.fields.group.dims)

    @torch.no_grad()
    def project_(self, kernels: Float[Tensor, "d c *k"], bias: Float[Tensor, " d"] | None) -> None:
        r"""Set the weights whose bank is nearest to a filter of ordinary channels, and the bias.

        $\psi[o, h', c, \delta'] = \frac1{|G|} \sum_g K[g, o, g h', c, R_g \delta']$: the mean over
        elements of the filter rotated back. For exact groups, "full" or "lift".
        """
        order = self.fields.group.order
        split = kernels.reshape(
            order, self.fields.outputs, -1, self.fields.inputs, self.filter_entries
        )
        rotated = [self.rotate_back(g, split[g]) for g in range(order)]
        self.weight.copy_(torch.stack(rotated).mean(0))
        if self.bias is not None and bias is not None:
            self.bias.copy_(bias.reshape(order, -1).mean(0))

    def rotate_back(self, g: int, patches: Float[Tensor, "*n h c s"]) -> Float[Tensor, "*n r c p"]:
        """Return patches in the frame of element g: indexed by relative element, rotated back."""
        if self.fields.mixing == "full":
            patches = patches.index_select(-3, self.table[g])
        elif self.fields.mixing == "pointwise":
            patches = patches.narrow(-3, g, 1)
        if self.index_back is not None:
            return patches.index_select(-1, self.index_back[g])
        matrices = self.rotation_matrices()
        assert matrices is not None
        return patches @ matrices[g].to(patches.dtype).T

    @torch.no_grad()
    def convolution(self) -> AnyConv:
        """Return the same map as one torch convolution."""
        if not self._fields_first:
            return super().convolution()
        # All elements are mixed, fields are not: zeros between fields.
        fields, order, bank = self.fields, self.fields.group.order, self.bank()
        bank = bank * torch.eye(fields.inputs).to(bank).reshape(1, fields.inputs, 1, -1, 1)
        weight = bank.reshape(order * fields.outputs, -1, *self.geometry.kernel_size)
        bias = None if self.bias is None else self.bias.repeat(order)
        return Filter(weight, bias, self.padding).as_convolution(self.weight)

    def extra_repr(self) -> str:
        """Return the sizes."""
        f = self.fields
        depth = ", depthwise" if f.depthwise else ""
        return (
            f"{f.inputs} -> {f.outputs} fields of {f.group.name}, {f.mixing}{depth}, "
            f"kernel={self.kernel}, padding={self.padding!r}"
        )


def swap_channels(x: Float[Tensor, "n ab *size"], a: int) -> Float[Tensor, "n ba *size"]:
    """Reorder channels (a, b) as (b, a)."""
    y: Tensor = x.unflatten(1, (a, -1)).transpose(1, 2).flatten(1, 2)
    return y


@sharing.register
def _group_filter(module: GroupFilter) -> Sharing:
    fields = module.fields
    order, shape = fields.group.order, module.weight.shape

    def inputs(x: Float[Tensor, "n c *size"]) -> Float[Tensor, "n s k i"]:
        patches = all_patches(x, module.geometry)
        patches = patches.reshape(*patches.shape[:2], -1, fields.inputs, module.filter_entries)
        a = torch.stack([module.rotate_back(g, patches) for g in range(order)], 1).flatten(1, 2)
        if fields.depthwise:
            return a.transpose(2, 3).flatten(3)
        return a.flatten(2).unsqueeze(2)

    def outputs(y: Float[Tensor, "n d *size"]) -> Float[Tensor, "n s k o"]:
        split: Tensor = y.unflatten(1, (order, fields.outputs)).flatten(3)
        split = split.transpose(2, 3).flatten(1, 2)
        return split.unsqueeze(3 if fields.depthwise else 2)

    def factor(x: Float[Tensor, "n c *size"]) -> Float[Tensor, "1 i i"]:
        def rotated_rows(g: int, A: Float[Tensor, "i j"]) -> Float[Tensor, "i k"]:
            rows = A.reshape(len(A), -1, fields.inputs, module.filter_entries)
            if fields.mixing == "pointwise":
                rows = rows.expand(-1, order, -1, -1)
            return module.rotate_back(g, rows).flatten(1)

        if fields.mixing == "pointwise":
            parts = x.unflatten(1, (order, -1)).unbind(1)
            factors = [input_factor(part, module.geometry)[0] for part in parts]
        else:
            factors = [input_factor(x, module.geometry)[0]] * order
        terms = [rotated_rows(g, rotated_rows(g, A).T) for g, A in enumerate(factors)]
        return sum(terms[1:], terms[0]).unsqueeze(0)

    shaping = () if module.basis is None else module.basis.shaping
    features = math.prod(shape[1:])
    blocks = (len(module.weight), 1, features) if fields.depthwise else (1, shape[0], features)
    return Sharing(
        inputs=inputs,
        outputs=outputs,
        bias=None if module.bias is None else "bias",
        to_blocks=lambda weight: weight.reshape(blocks),
        from_blocks=lambda values: values.reshape(shape),
        input_factor=None if fields.depthwise else factor,
        shaping=tuple(f"basis.{name}" for name in shaping),
    )
