r"""One convolution with a bank of filters that a basis makes of few values, in the sharing format.

$$ y[g, o](t) = \sum_{h, c, \delta} \psi_g[o, h, c](\delta)\, x[h, c](t + \delta) + b[o] ,\qquad
   \psi_g[o, h, c](\delta) = \sum_p u[o, c, p]\, B[g, p, h, \delta] . $$

In the weight-sharing format an element g is one more use of u, on
$a[n, (g, t), (c, p)] = \sum_{h, \delta} B[g, p, h, \delta]\, x[n, h, c](t + \delta)$.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.curvature.convolution import Geometry, all_patches, input_factor
from symrazor.curvature.weight_sharing import Sharing, sharing
from symrazor.layers.filtered import Filter, Padding
from symrazor.layers.trace import new_parameter


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
