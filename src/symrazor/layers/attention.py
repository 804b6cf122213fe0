r"""Self-attention on a grid whose dependence on position the evidence can switch off.

Attention without positions is equivariant to every permutation of its tokens. `PositionAttention`
adds two paths, each with prior groups of its own:

| path | weights | symmetry that is left |
|---|---|---|
| relative | one table of scores per head, by the difference of two positions | translations |
| absolute | one vector per position, added to the tokens | none |

$$ y = \mathrm{softmax}\big( q k^\top / \sqrt{d} + r_h[s - t] \big)\, v , \qquad
   q, k, v = W (x + a[t] - \bar a) . $$

The mean of the absolute positions is subtracted: it would be a bias, which depends on no position.
The evidence learns a precision for each table; a path whose effective parameters vanish is not
needed.
"""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class PositionAttention(nn.Module):
    """Multi-head self-attention of tokens on a grid, with relative and absolute positions.

    Args:
        width: features of a token, a multiple of the number of heads.
        heads: number of heads.
        size: size of the grid; tokens are in row-major order.
        relative: whether there are tables of relative positions.
        absolute: whether there are absolute positions.
        circular: whether the grid has no border: differences count modulo its size. With a border,
            the differences that occur tell where a token is.
    """

    index: Tensor

    def __init__(
        self,
        width: int,
        heads: int,
        size: Sequence[int],
        relative: bool = True,
        absolute: bool = True,
        circular: bool = False,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width must be a multiple of heads, got {width} and {heads}.")
        self.heads, self.size = heads, tuple(size)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        index = _differences(self.size, circular)
        count = int(index.max()) + 1
        tables = (nn.Parameter(0.02 * torch.randn(count)) for _ in range(heads * relative))
        self.relative = nn.ParameterList(tables)
        tokens = math.prod(size)
        self.absolute = nn.Parameter(0.02 * torch.randn(tokens, width)) if absolute else None
        self.register_buffer("index", index, persistent=False)

    def forward(self, x: Float[Tensor, "n t w"]) -> Float[Tensor, "n t w"]:
        """Attend from every token to every token."""
        n, t, _ = x.shape
        if t != math.prod(self.size):
            raise ValueError(f"Expected {math.prod(self.size)} tokens, got {t}.")
        moved = x
        if self.absolute is not None:
            moved = x + (self.absolute - self.absolute.mean(0))
        q, k, v = self.qkv(moved).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mask = None
        if len(self.relative):
            mask = torch.stack([table[self.index] for table in self.relative])
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        y: Tensor = self.out(attended.transpose(1, 2).reshape(n, t, -1))
        return y

    def extra_repr(self) -> str:
        """Return the grid and the paths."""
        paths = ["relative"] * bool(len(self.relative)) + ["absolute"] * (self.absolute is not None)
        return f"{self.heads} heads on {self.size}, positions: {', '.join(paths) or 'none'}"


def _differences(size: tuple[int, ...], circular: bool) -> Tensor:
    """Return the number of the difference between every two positions, [t, t]."""
    axes = [torch.arange(s) for s in size]
    positions = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flatten(0, -2)
    shifts = positions.unsqueeze(1) - positions.unsqueeze(0)
    number = torch.zeros(shifts.shape[:2], dtype=torch.long)
    for d, s in enumerate(size):
        values = s if circular else 2 * s - 1
        number = number * values + (shifts[..., d] + s - 1) % values
    return number


def position_parameters(
    model: nn.Module, effective: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """Return the effective parameters of positions, by layer: "absolute", and "head h" of each.

    Args:
        model: a network with `PositionAttention` layers.
        effective: effective parameters by tensor, as in `Evidence.effective_parameters`.
    """
    result: dict[str, dict[str, float]] = {}
    for name, module in model.named_modules():
        if isinstance(module, PositionAttention):
            prefix = f"{name}." if name else ""
            of_layer = {"absolute": effective.get(f"{prefix}absolute", 0.0)}
            for head in range(len(module.relative)):
                of_layer[f"head {head}"] = effective.get(f"{prefix}relative.{head}", 0.0)
            result[name] = of_layer
    return result
