r"""Run a model on a batch and read, for every layer, its inputs and its output cotangents.

No module or parameter is changed: forward hooks note what each layer saw, and gradient edges (the
places in the autograd graph, which in-place activations cannot move) say where to read

$$ g_c = \left(\frac{\partial f}{\partial y}\right)^{\!\top} r_c $$

for any vectors $r_c$ at the output. Only gradients of layer outputs are computed, never of weights.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from symrazor.curvature.coverage import Layer

Input = Tensor | Sequence[Tensor] | Mapping[str, Tensor]


@dataclass
class Use:
    """One call of one layer."""

    layer: Layer
    x: Tensor
    edge: GradientEdge
    version: int
    y_shape: torch.Size

    @property
    def rows(self) -> int:
        """Number of (n, s) pairs: how often the weight was used in this call."""
        formed = self.layer.form.outputs(torch.empty(self.y_shape, device="meta"))
        return formed.shape[0] * formed.shape[1]

    @property
    def seen(self) -> Tensor:
        """The input, provided nobody has overwritten it since."""
        if self.x._version != self.version:
            raise ValueError(
                f"expected the input of layer {self.layer.name!r} to stay as it was, got an "
                "in-place change after the layer was called; use the out-of-place operation"
            )
        return self.x


@dataclass
class Tape:
    """What one forward pass left behind: the outputs f and every use of every layer."""

    f: Float[Tensor, "n k"]
    uses: list[Use]

    def cotangents(
        self, root: Float[Tensor, "n k"], create_graph: bool = False
    ) -> list[Tensor | None]:
        """Gradient of sum(f * root) with respect to the output of each use, in order."""
        edges = [use.edge for use in self.uses]
        found = torch.autograd.grad(
            self.f, edges, root, retain_graph=True, create_graph=create_graph, allow_unused=True
        )
        return list(found)


def call(model: nn.Module, x: Input) -> Tensor:
    """model(x), spreading tuples and dictionaries over its arguments."""
    if isinstance(x, Tensor):
        f = model(x)
    elif isinstance(x, Mapping):
        f = model(**x)
    else:
        f = model(*x)
    if not isinstance(f, Tensor):
        raise ValueError(f"expected a tensor of outputs [n, k], got {type(f).__name__}")
    return f


def record(model: nn.Module, layers: Sequence[Layer], x: Input) -> Tape:
    """Run the model on one batch and note every use of its layers."""
    uses: list[Use] = []
    with _listening(layers, uses), torch.enable_grad():
        f = call(model, x)
    if not f.requires_grad:
        raise ValueError(
            "expected outputs that depend on the trainable weights, got outputs without a gradient; "
            "does the model run under torch.no_grad() or detach?"
        )
    return Tape(f, uses)


@contextmanager
def _listening(layers: Sequence[Layer], uses: list[Use]) -> Iterator[None]:
    by_module = {id(layer.module): layer for layer in layers}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Any) -> None:
        layer = by_module[id(module)]
        x = args[0] if args else next(iter(kwargs.values()))
        if not isinstance(y, Tensor) or not isinstance(x, Tensor):
            raise ValueError(f"expected layer {layer.name!r} to map a tensor to a tensor")
        if not y.requires_grad:
            raise ValueError(
                f"expected layer {layer.name!r} to be recorded by autograd, got an output without "
                "a gradient; is it called under torch.no_grad()?"
            )
        uses.append(Use(layer, x, get_gradient_edge(y), x._version, y.shape))

    handles = [layer.module.register_forward_hook(note, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class FastPadding(TorchFunctionMode):
    """While active, circular padding in any model has a backward pass that adds edges only.

    Autograd's own sends the gradient through a chain of slice copies, which costs more than the
    convolution that follows (see bench/evidence.py).
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Replace F.pad(..., mode="circular")."""
        kwargs = kwargs or {}
        if func in (F.pad, torch._C._nn.pad):
            x, amounts = args[:2] if len(args) > 1 else (args[0], kwargs["pad"])
            mode = args[2] if len(args) > 2 else kwargs.get("mode", "constant")
            if mode == "circular" and all(p >= 0 for p in amounts):
                return _CircularPad.apply(x, tuple(amounts))  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)


class _CircularPad(torch.autograd.Function):
    """F.pad(mode="circular"); its backward folds the padded border back onto the other side."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, amounts: tuple[int, ...]) -> Tensor:  # type: ignore[override]
        ctx.amounts = amounts
        return F.pad(x, amounts, mode="circular")

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        for axis in range(len(ctx.amounts) // 2):
            low, high = ctx.amounts[2 * axis : 2 * axis + 2]
            dim = g.dim() - 1 - axis
            size = g.shape[dim] - low - high
            inner = g.narrow(dim, low, size)
            if low or high:
                inner = inner.clone(memory_format=torch.preserve_format)
            if high:
                inner.narrow(dim, 0, high).add_(g.narrow(dim, low + size, high))
            if low:
                inner.narrow(dim, size - low, low).add_(g.narrow(dim, 0, low))
            g = inner
        return g, None
