r"""One convolution of maps of a regular representation, its filter turned for every element.

$$ y[g, o](t) = b[o] + \sum_{h', c, \delta} \psi_g[o, h', c, \delta]\, x[g h', c](t + \delta) ,
   \qquad \psi_g[\delta] = \psi(R_g^{-1} \delta) , $$

with the values of $\psi$ as weights (turned.py), in the plane or in space. All turned filters make
one bank, and the bank one convolution. The sum over h' runs over the group ("full"), over the
identity alone ("pointwise"), or is absent where x is an image ("lift"). Depthwise, an output
channel sees its own input channel only.

In the weight-sharing format an element is one more use of the weight, on an input that is turned
back: $a[n, (g, t), (h', c, p)] = \sum_\delta T_g[p, \delta]\, x[n, g h', c, t + \delta]$. The input
factor is then a sum of that of a plain convolution, its rows and columns permuted for every
element.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from symrazor.curvature.convolution import Geometry, all_patches, input_factor
from symrazor.curvature.weight_sharing import Sharing, sharing
from symrazor.layers.basis import Basis
from symrazor.layers.conv import CONVOLUTIONS, AnyConv, Filter, Padding
from symrazor.layers.path import new_parameter
from symrazor.layers.point_group import PointGroup, Turns, turned_basis, turns

Mixing = Literal["lift", "full", "pointwise"]


@dataclass(frozen=True)
class Fields:
    """What a filter connects: numbers of fields, and which elements of the group.

    Args:
        inputs: fields in, each an image for every element (or an image, for "lift").
        outputs: fields out, each an image for every element.
        group: of rotations and reflections.
        mixing: "lift", "full" or "pointwise".
        depthwise: field o sees field o only.
    """

    inputs: int
    outputs: int
    group: PointGroup
    mixing: Mixing = "full"
    depthwise: bool = False

    @property
    def relatives(self) -> int:
        """Elements h' in the filter."""
        return self.group.order if self.mixing == "full" else 1

    @property
    def seen(self) -> int:
        """Input fields of one output field."""
        return 1 if self.depthwise else self.inputs

    @property
    def blocks(self) -> int:
        """Parts of the channels that are not mixed: `groups` of torch's convolutions."""
        elements = self.group.order if self.mixing == "pointwise" else 1
        return elements * (self.inputs if self.depthwise else 1)


class GroupFilter(nn.Module):
    """The convolution; see the module.

    Args:
        fields: what it connects.
        kernel: size of the filter in every dimension; odd.
        padding: "circular" or "zeros".
        bias: one for each output field.
        basis: filters from anchors, turned with their anchors; by default a filter is its values.
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
        """Draw the values so that the filter has the variance of He's initialisation."""
        super().__init__()
        self.fields, self.kernel, self.padding = fields, kernel, padding
        with torch.device("cpu"):
            turned = turns(fields.group, kernel)
        if basis is not None:
            turned = Turns(matrices=turned_basis(fields.group.matrices, basis).detach())
        matrices = turned.matrices
        learned = basis is not None and basis.fixed is None
        self.basis = basis if learned else None
        self.places: int = kernel**fields.group.dims
        values = self.places if matrices is None else matrices.shape[1]
        shape = (fields.outputs, fields.relatives, fields.seen, values)
        fan_in = fields.relatives * fields.seen * self.places
        spread = 1.0 if matrices is None else float(matrices[0].square().sum(0).mean())
        bound = math.sqrt(6 / (fan_in * max(spread, 1e-6)))
        self.weight = nn.Parameter(torch.empty(shape).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(fields.outputs)) if bias else None
        constants = {
            "index_back": None if turned.index is None else turned.index.argsort(1),
            "matrices": None if learned else matrices,  # in float64, and cast where used
            "rotations": fields.group.matrices if learned else None,
            "sources": self._sources(turned.index),
            "table": fields.group.table,
        }
        for name, value in constants.items():
            here = None if value is None else value.to(self.weight.device)
            self.register_buffer(name, here, persistent=False)
        ones, around = (1,) * fields.group.dims, (kernel // 2,) * (2 * fields.group.dims)
        self.geometry = Geometry((kernel,) * len(ones), ones, ones, padding, around)

    def _sources(self, index: Tensor | None) -> Int[Tensor, " f"]:
        """For every entry (g, h, offset) of the bank, the value (relative, place) that it is.

        Where filters are no permutations, for every (g, h) the turned filter (g, relative).
        """
        order, relatives = self.fields.group.order, self.fields.relatives
        found = torch.zeros(order, 1, dtype=torch.long, device="cpu")
        if self.fields.mixing == "full":
            found = self.fields.group.relative
        if index is None:
            first = relatives * torch.arange(order, device="cpu")
            return (found + first.unsqueeze(1)).flatten()
        return (self.places * found.unsqueeze(2) + index.unsqueeze(1)).flatten()

    def spatial(self) -> Float[Tensor, "g p s"] | None:
        """T_g of every element, where it is not a permutation; differentiable in its basis."""
        if self.basis is not None and self.rotations is not None:
            return turned_basis(self.rotations, self.basis)
        return self.matrices

    def bank(self) -> Float[Tensor, "g o h c s"]:
        """The filters psi_g of every element g, on the elements h and fields c of the input."""
        split, matrices = (self.fields.group.order, self.fields.relatives), self.spatial()
        if matrices is None:
            values = self.weight.transpose(1, 2).flatten(2)
            picked: Tensor = values.index_select(2, self.sources).unflatten(2, (*split, -1))
            return picked.permute(2, 0, 3, 1, 4)
        turned = torch.einsum("orcp,gps->grocs", self.weight, matrices.to(self.weight.dtype))
        every: Tensor = turned.flatten(0, 1).index_select(0, self.sources)
        picked = every.unflatten(0, split)
        return picked.transpose(1, 2)

    def kernels(self) -> Float[Tensor, "d c *k"]:
        """The bank as torch's convolutions want it; field by field where those are apart."""
        bank = self.bank().transpose(0, 1) if self._by_field else self.bank()
        size = (self.kernel,) * self.fields.group.dims
        return bank.reshape(-1, bank.shape[2] * bank.shape[3], *size)

    @property
    def _by_field(self) -> bool:
        """Whether the channels of an element must be apart: parts that are not mixed are fields."""
        return self.fields.depthwise and self.fields.mixing == "full"

    def as_filter(self) -> Filter | None:
        """The bank as one filter, where it takes the channels as they come."""
        if self._by_field:
            return None
        bias = None if self.bias is None else self.bias.repeat(self.fields.group.order)
        return Filter(self.kernels(), bias, self.padding, self.fields.blocks)

    def forward(self, x: Float[Tensor, "n c *size"]) -> Float[Tensor, "n d *size"]:
        """Convolve with the bank."""
        whole, order = self.as_filter(), self.fields.group.order
        if whole is not None:
            return whole(x)
        apart = Filter(self.kernels(), None, self.padding, self.fields.blocks)
        y = swap(apart(swap(x, order)), self.fields.outputs)
        if self.bias is None:
            return y
        return y + self.bias.repeat(order).reshape(-1, *(1,) * self.fields.group.dims)

    @torch.no_grad()
    def project_(self, kernels: Float[Tensor, "d c *k"], bias: Float[Tensor, " d"] | None) -> None:
        r"""Take the values whose bank is nearest to a filter of ordinary channels, and its bias.

        $\psi[o, h', c, \delta'] = \frac1{|G|} \sum_g K[g, o, g h', c, R_g \delta']$: the mean of
        what every element sees, turned back. For groups of the grid, full or lifting.
        """
        order = self.fields.group.order
        split = kernels.reshape(order, self.fields.outputs, -1, self.fields.inputs, self.places)
        self.weight.copy_(torch.stack([self.back(g, split[g]) for g in range(order)]).mean(0))
        if self.bias is not None and bias is not None:
            self.bias.copy_(bias.reshape(order, -1).mean(0))

    def back(self, g: int, patches: Float[Tensor, "*n h c s"]) -> Float[Tensor, "*n r c p"]:
        """Patches as element g sees them: on its relatives first to last, turned back."""
        if self.fields.mixing == "full":
            patches = patches.index_select(-3, self.table[g])
        elif self.fields.mixing == "pointwise":
            patches = patches.narrow(-3, g, 1)
        if self.index_back is not None:
            return patches.index_select(-1, self.index_back[g])
        matrices = self.spatial()
        assert matrices is not None
        return patches @ matrices[g].to(patches.dtype).T

    @torch.no_grad()
    def convolution(self) -> AnyConv:
        """The same map as one convolution of torch."""
        fields, order = self.fields, self.fields.group.order
        bank, groups = self.bank(), fields.blocks
        if self._by_field:  # every element with every other, fields apart: zeros between them
            eye = torch.eye(fields.inputs).to(bank).reshape(1, fields.inputs, 1, -1, 1)
            bank, groups = bank * eye, 1
        size, around = (self.kernel,) * fields.group.dims, self.kernel // 2
        weight = bank.reshape(order * fields.outputs, -1, *size)
        conv = CONVOLUTIONS[len(size)](
            weight.shape[1] * groups,
            len(weight),
            self.kernel,
            padding=around,
            padding_mode=self.padding if around else "zeros",
            groups=groups,
            bias=self.bias is not None,
            device="meta",
        )
        conv.weight = new_parameter(weight, self.weight)
        if self.bias is not None:
            conv.bias = new_parameter(self.bias.repeat(order), self.bias)
        return conv

    def extra_repr(self) -> str:
        """Sizes, for `print(model)`."""
        f = self.fields
        depth = ", depthwise" if f.depthwise else ""
        return (
            f"{f.inputs} -> {f.outputs} fields of {f.group.name}, {f.mixing}{depth}, "
            f"kernel={self.kernel}, padding={self.padding!r}"
        )


def swap(x: Float[Tensor, "n ab *size"], a: int) -> Float[Tensor, "n ba *size"]:
    """Channels (a, b) as channels (b, a)."""
    y: Tensor = x.unflatten(1, (a, -1)).transpose(1, 2).flatten(1, 2)
    return y


@sharing.register
def _group_filter(module: GroupFilter) -> Sharing:
    fields = module.fields
    order, shape = fields.group.order, module.weight.shape

    def inputs(x: Float[Tensor, "n c *size"]) -> Float[Tensor, "n s k i"]:
        patches = all_patches(x, module.geometry)
        patches = patches.reshape(*patches.shape[:2], -1, fields.inputs, module.places)
        a = torch.stack([module.back(g, patches) for g in range(order)], 1).flatten(1, 2)
        if fields.depthwise:
            return a.transpose(2, 3).flatten(3)
        return a.flatten(2).unsqueeze(2)

    def outputs(y: Float[Tensor, "n d *size"]) -> Float[Tensor, "n s k o"]:
        split: Tensor = y.unflatten(1, (order, fields.outputs)).flatten(3)
        split = split.transpose(2, 3).flatten(1, 2)
        return split.unsqueeze(3 if fields.depthwise else 2)

    def factor(x: Float[Tensor, "n c *size"]) -> Float[Tensor, "1 i i"]:
        width = (fields.inputs, module.places)
        if fields.mixing == "pointwise":
            parts = x.unflatten(1, (order, -1)).unbind(1)
            every = [input_factor(part, module.geometry)[0] for part in parts]
        else:
            every = [input_factor(x, module.geometry)[0]] * order
        total: Tensor | None = None
        for g, A in enumerate(every):
            rows = A.reshape(len(A), -1, *width)
            if fields.mixing == "pointwise":
                rows = rows.expand(-1, order, -1, -1)
            half = module.back(g, rows).flatten(1).T
            columns = half.reshape(len(half), -1, *width)
            if fields.mixing == "pointwise":
                columns = columns.expand(-1, order, -1, -1)
            found = module.back(g, columns).flatten(1)
            total = found if total is None else total + found
        assert total is not None
        return total.unsqueeze(0)

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
