r"""One convolution of maps of a regular representation, its filter turned for every element.

$$ y[g, o](t) = b[o] + \sum_{h', c, \delta} \psi_g[o, h', c, \delta]\, x[g h', c](t + \delta) ,
   \qquad \psi_g[\delta] = \psi(R_g^{-1} \delta) , $$

with the values of $\psi$ as weights (turned.py). All turned filters make one bank, and the bank
one call of conv2d. The sum over h' runs over the group ("full"), over the identity alone
("pointwise"), or is absent where x is an image ("lift"). Depthwise, an output channel sees its own
input channel only.

In the weight-sharing format an element is one more use of the weight, on an input that is turned
back: $a[n, (g, t), (h', c, p)] = \sum_\delta T_g[p, \delta]\, x[n, g h', c, t + \delta]$. The input
factor is then a sum of that of a plain convolution, its rows and columns permuted for every
element.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.curvature.geometry import Geometry, all_patches
from symrazor.curvature.patch_factor import input_factor
from symrazor.curvature.sharing import Sharing, sharing
from symrazor.layers.basis import Basis
from symrazor.layers.conv import Padding
from symrazor.layers.point_group import PointGroup
from symrazor.layers.trace import new_parameter
from symrazor.layers.turned import Turns, turned_basis, turns

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
        """Groups of the convolution of torch: parts of the channels that are not mixed."""
        elements = self.group.order if self.mixing == "pointwise" else 1
        return elements * (self.inputs if self.depthwise else 1)


class GroupFilter(nn.Module):
    """The convolution; see the module.

    Args:
        fields: what it connects.
        kernel: size of the filter; odd.
        padding: "circular" or "zeros".
        bias: one for each output field.
        basis: filters from anchors, turned with their anchors; by default a filter is its values.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    index: Tensor | None
    matrices: Tensor | None
    relative: Tensor

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
        turned = turns(fields.group, kernel)
        if basis is not None:
            turned = Turns(matrices=turned_basis(fields.group, basis).detach())
        matrices = turned.matrices
        learned = basis is not None and basis.fixed is None
        self.basis = basis if learned else None
        self.register_buffer("index", turned.index, persistent=False)
        # in float64, and cast where used; not there if it changes with the basis
        self.register_buffer("matrices", None if learned else matrices, persistent=False)
        self.register_buffer("relative", fields.group.relative, persistent=False)
        values = kernel**2 if matrices is None else matrices.shape[1]
        shape = (fields.outputs, fields.relatives, fields.seen, values)
        fan_in = fields.relatives * fields.seen * kernel**2
        spread = 1.0 if matrices is None else float(matrices[0].square().sum(0).mean())
        bound = math.sqrt(6 / (fan_in * max(spread, 1e-6)))
        self.weight = nn.Parameter(torch.empty(shape).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(fields.outputs)) if bias else None
        around = (kernel // 2,) * 4
        self.geometry = Geometry((kernel, kernel), (1, 1), (1, 1), padding, around)

    def spatial(self) -> Float[Tensor, "g p s"] | None:
        """T_g of every element, where it is not a permutation; differentiable in its basis."""
        if self.basis is not None:
            return turned_basis(self.fields.group, self.basis)
        return self.matrices

    def bank(self) -> Float[Tensor, "g o h c s"]:
        """The filters psi_g of every element g, on the elements h and fields c of the input."""
        turned, matrices = [], self.spatial()
        for g in range(self.fields.group.order):
            if self.index is not None:
                filters = self.weight.index_select(3, self.index[g])
            else:
                assert matrices is not None
                filters = self.weight @ matrices[g].to(self.weight.dtype)
            if self.fields.mixing == "full":
                filters = filters.index_select(1, self.relative[g])
            turned.append(filters)
        return torch.stack(turned)

    def kernels(self) -> Float[Tensor, "d c k k"]:
        """The bank as conv2d wants it; field by field where those are apart."""
        bank = self.bank().transpose(0, 1) if self._by_field else self.bank()
        return bank.reshape(-1, bank[0, 0, :, :, 0].numel(), self.kernel, self.kernel)

    @property
    def _by_field(self) -> bool:
        """Whether the channels of an element must be apart: groups of conv2d are fields."""
        return self.fields.depthwise and self.fields.mixing == "full"

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n d h w"]:
        """Convolve with the bank."""
        order = self.fields.group.order
        bias = None if self.bias is None else self.bias.repeat(order)
        if self._by_field:
            x = swap(x, order)
        amounts: int | tuple[int, int] = self.kernel // 2
        if self.padding == "circular" and self.kernel > 1:
            x, amounts = F.pad(x, self.geometry.amounts, mode="circular"), 0
        weight, groups = self.kernels(), self.fields.blocks
        if not self._by_field:
            return F.conv2d(x, weight, bias, padding=amounts, groups=groups)
        y = swap(F.conv2d(x, weight, padding=amounts, groups=groups), self.fields.outputs)
        return y if bias is None else y + bias.reshape(-1, 1, 1)

    @torch.no_grad()
    def project_(self, kernels: Float[Tensor, "d c k k"], bias: Float[Tensor, " d"] | None) -> None:
        r"""Take the values whose bank is nearest to a filter of ordinary channels, and its bias.

        $\psi[o, h', c, \delta'] = \frac1{|G|} \sum_g K[g, o, g h', c, R_g \delta']$: the mean of
        what every element sees, turned back. For groups of the grid, full or lifting.
        """
        order = self.fields.group.order
        split = kernels.reshape(order, self.fields.outputs, -1, self.fields.inputs, self.kernel**2)
        self.weight.copy_(torch.stack([self.back(g, split[g]) for g in range(order)]).mean(0))
        if self.bias is not None and bias is not None:
            self.bias.copy_(bias.reshape(order, -1).mean(0))

    def back(self, g: int, patches: Float[Tensor, "*n h c s"]) -> Float[Tensor, "*n r c p"]:
        """Patches as element g sees them: on its relatives first to last, turned back."""
        if self.fields.mixing == "full":
            patches = patches.index_select(-3, self.fields.group.table[g].to(patches.device))
        elif self.fields.mixing == "pointwise":
            patches = patches.narrow(-3, g, 1)
        if self.index is not None:
            return patches.index_select(-1, self.index[g].argsort())
        matrices = self.spatial()
        assert matrices is not None
        return patches @ matrices[g].to(patches.dtype).T

    @torch.no_grad()
    def convolution(self) -> nn.Conv2d:
        """The same map as one convolution of torch."""
        fields, order = self.fields, self.fields.group.order
        bank, groups = self.bank(), fields.blocks
        if self._by_field:  # every element with every other, fields apart: zeros between them
            eye = torch.eye(fields.inputs).to(bank).reshape(1, fields.inputs, 1, -1, 1)
            bank, groups = bank * eye, 1
        weight = bank.reshape(order * fields.outputs, -1, self.kernel, self.kernel)
        around = self.kernel // 2
        conv = nn.Conv2d(
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


def swap(x: Float[Tensor, "n ab h w"], a: int) -> Float[Tensor, "n ba h w"]:
    """Channels (a, b) as channels (b, a)."""
    y: Tensor = x.unflatten(1, (a, -1)).transpose(1, 2).flatten(1, 2)
    return y


@sharing.register
def _group_filter(module: GroupFilter) -> Sharing:
    fields = module.fields
    order, shape = fields.group.order, module.weight.shape

    def inputs(x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n s k i"]:
        patches = all_patches(x, module.geometry)
        patches = patches.reshape(*patches.shape[:2], -1, fields.inputs, module.kernel**2)
        a = torch.stack([module.back(g, patches) for g in range(order)], 1).flatten(1, 2)
        if fields.depthwise:
            return a.transpose(2, 3).flatten(3)
        return a.flatten(2).unsqueeze(2)

    def outputs(y: Float[Tensor, "n d h w"]) -> Float[Tensor, "n s k o"]:
        split: Tensor = y.unflatten(1, (order, fields.outputs)).flatten(3)
        split = split.transpose(2, 3).flatten(1, 2)
        return split.unsqueeze(3 if fields.depthwise else 2)

    def factor(x: Float[Tensor, "n c h w"]) -> Float[Tensor, "1 i i"]:
        width = (fields.inputs, module.kernel**2)
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
