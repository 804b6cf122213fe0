r"""Run a model on a batch and read, for every layer, its inputs and its output cotangents.

No module or parameter is changed: forward hooks note what each layer saw, and gradient edges (the
places in the autograd graph, which in-place activations cannot move) say where to read

$$ g_c = \left(\frac{\partial f}{\partial y}\right)^{\!\top} r_c $$

for any vectors $r_c$ at the output. Only gradients of layer outputs are computed, never of weights.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.overrides import TorchFunctionMode

from symrazor.curvature.coverage import Layer
from symrazor.curvature.geometry import CircularPad
from symrazor.curvature.tangents import shaped, tangents

Input = Tensor | Sequence[Tensor] | Mapping[str, Tensor]


@dataclass
class Use:
    r"""One call of one layer, in the weight-sharing format.

    A model may show a layer several copies of each datum, one after the other in the first
    dimension: transformed images, frames of a film. They are further uses of the weight by the same
    datum, so that [(n copies), s, k, f] is read as [n, (copies s), k, f].

    If the model averages over copies and says so (`announce_copies`), Kronecker factors may be
    reduced over them: the gradient of one datum $\sum_c g_c a_c^\top$, with input $a_c$, cotangent
    $g_c$ and weight $w_c$ of copy c, is taken for $(\sum_c g_c)(\sum_c w_c a_c)^\top$. So the
    curvature falls as the copies grow apart, which tells the evidence how far they may. Weights are
    those of the average, or differ from datum to datum: a copy that has no say has no weight.
    """

    layer: Layer
    x: Tensor
    edge: GradientEdge
    version: int
    y_shape: torch.Size
    copies: int = 1
    copy_weights: Tensor | None = None

    @property
    def rows(self) -> int:
        """Number of (n, s) pairs: how often the weight was used in this call."""
        formed = self.layer.form.outputs(torch.empty(self.y_shape, device="meta"))
        return formed.shape[0] * formed.shape[1]

    def inputs(self, x: Tensor) -> Float[Tensor, "n s k i"]:
        """What the layer was called with, by datum."""
        return self._fold(self.layer.form.inputs(x))

    def outputs(self, y: Tensor) -> Float[Tensor, "n s k o"]:
        """A tensor of the shape of the layer's output, by datum."""
        return self._fold(self.layer.form.outputs(y))

    @property
    def averaged(self) -> bool:
        """Whether the model averages over these copies."""
        weights = self.copy_weights
        return self.copies > 1 and weights is not None and weights.shape[-1] == self.copies

    def mean_input(self, x: Tensor) -> Tensor:
        """What the layer was called with, averaged over the copies of each datum."""
        if not self.averaged or self.copy_weights is None:
            return x
        split: Tensor = x.unflatten(0, (-1, self.copies))
        weights = self.copy_weights.to(x).expand(len(split), self.copies)
        return torch.einsum("nc...,nc->n...", split, weights)

    def summed_output(self, y: Tensor) -> Float[Tensor, "n s k o"]:
        """A cotangent of the layer's output, summed over the copies of each datum."""
        if not self.averaged:
            return self.outputs(y)
        split: Tensor = self.layer.form.outputs(y).unflatten(0, (-1, self.copies))
        return split.sum(1)

    def shaped(self, name: str, g: Tensor) -> Float[Tensor, "n p"]:
        """Gradients of a parameter that shapes the weight, by datum."""
        found = shaped(self.tangents[name], g)
        return found if self.copies == 1 else found.unflatten(0, (-1, self.copies)).sum(1)

    def _fold(self, formed: Tensor) -> Tensor:
        split: Tensor = formed.unflatten(0, (-1, self.copies))
        return formed if self.copies == 1 else split.flatten(1, 2)

    @property
    def seen(self) -> Tensor:
        """The input, provided nobody has overwritten it since."""
        if self.x._version != self.version:
            raise ValueError(
                f"expected the input of layer {self.layer.name!r} to stay as it was, got an "
                "in-place change after the layer was called; use the out-of-place operation"
            )
        return self.x

    def let_go(self) -> None:
        """Forget the input: it has been seen for the last time."""
        self.x = self.x.new_empty(0)
        self.version = self.x._version

    @cached_property
    def tangents(self) -> dict[str, Tensor]:
        """Derivatives of the output in the parameters that shape the layer's weight."""
        return tangents(self.layer, self.seen)


@dataclass
class Tape:
    """What one forward pass left behind: the outputs f and every use of every layer."""

    f: Float[Tensor, "n k"]
    uses: list[Use]

    def cotangents(
        self, root: Float[Tensor, "n k"], create_graph: bool = False, retain_graph: bool = True
    ) -> list[Tensor | None]:
        """Gradient of sum(f * root) with respect to the output of each use, in order.

        Without `retain_graph` it is the last time.
        """
        edges = [use.edge for use in self.uses]
        if not edges:
            return []
        found = torch.autograd.grad(
            self.f,
            edges,
            root,
            retain_graph=retain_graph,
            create_graph=create_graph,
            allow_unused=True,
        )
        return list(found)


def each(x: Input, change: Callable[[Tensor], Any]) -> Any:
    """Apply a function to every tensor of an input, keeping its form."""
    if isinstance(x, Tensor):
        return change(x)
    if isinstance(x, Mapping):
        return {key: change(value) for key, value in x.items()}
    return [change(part) for part in x]


def call(model: Callable[..., Any], x: Input) -> Tensor:
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


def record(model: Callable[..., Any], layers: Sequence[Layer], x: Input) -> Tape:
    """Run the model on one batch and note every use of its layers that acts on the outputs."""
    uses: list[Use] = []
    _copies.weights, _copies.recording = None, True
    try:
        with _listening(layers, uses), torch.enable_grad():
            f = call(model, x)
    finally:
        weights, _copies.weights, _copies.recording = _copies.weights, None, False
    if not f.requires_grad:
        raise ValueError(
            "expected outputs that depend on the trainable weights, got outputs without a "
            "gradient; does the model run under torch.no_grad() or detach?"
        )
    acting = _ancestors(f)
    uses = [use for use in uses if use.edge.node in acting]
    for use in uses:
        copies, rest = divmod(use.y_shape[0], len(f))
        use.copies = copies if copies and not rest else 1  # else `verify` says what is wrong
        use.copy_weights = weights
    return Tape(f, uses)


_copies = threading.local()


def announce_copies(weights: Float[Tensor, " c"] | Float[Tensor, "n c"]) -> None:
    """For a model that averages over copies of each datum: with which weights it does.

    The same for all data, or of each datum; these add up to 1. Kept while a pass is recorded, else
    nobody would let go of the graph behind them.
    """
    if getattr(_copies, "recording", False):
        _copies.weights = weights


def _ancestors(f: Tensor) -> set[Node]:
    """All nodes of the autograd graph that f depends on."""
    assert f.grad_fn is not None
    found: set[Node] = {f.grad_fn}
    waiting = [f.grad_fn]
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in found:
                found.add(node)
                waiting.append(node)
    return found


@contextmanager
def _listening(layers: Sequence[Layer], uses: list[Use]) -> Iterator[None]:
    by_module = {id(layer.module): layer for layer in layers}
    thread = threading.get_ident()

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Any) -> None:
        if threading.get_ident() != thread:  # somebody else runs the same model
            return
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


class FastBackward(TorchFunctionMode):
    """While active, some operations in any model get a faster backward pass to their input.

    Circular padding: autograd sends the gradient through a chain of slice copies, which costs more
    than the convolution that follows. Strided convolutions of few channels, and those with one
    output position: see `_Conv`. Their weights, if leaves, get no gradient: nobody asks for one.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Replace F.pad(..., mode="circular") and F.conv2d where it pays."""
        kwargs = kwargs or {}
        if func in (F.pad, torch._C._nn.pad):
            x, amounts = args[:2] if len(args) > 1 else (args[0], kwargs["pad"])
            mode = args[2] if len(args) > 2 else kwargs.get("mode", "constant")
            if mode == "circular" and all(p >= 0 for p in amounts):
                return CircularPad.apply(x, tuple(amounts))  # type: ignore[no-untyped-call]
        elif func is F.conv2d and not kwargs and len(args) == 7 and _gains(*args):
            return _Conv.apply(*args[:5])  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)


def _gains(
    x: Tensor, w: Tensor, b: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int
) -> bool:
    """Whether `_Conv` can and should stand in for a convolution."""
    if x.device.type != "cpu" or x.dim() != 4 or not x.requires_grad:
        return False
    if not isinstance(stride, tuple) or not isinstance(padding, tuple):
        return False
    if groups != 1 or dilation != (1, 1) or not w.is_leaf or not (b is None or b.is_leaf):
        return False
    few = min(stride) > 1 and w.shape[1] <= FEW_CHANNELS
    reach = [x.shape[2 + d] + 2 * padding[d] - w.shape[2 + d] for d in (0, 1)]
    return few or all(0 <= r < step for r, step in zip(reach, stride, strict=True))


FEW_CHANNELS = 8
"""Vector units hold 16 numbers: the gradient of fewer input channels leaves them half empty."""


class _Conv(torch.autograd.Function):
    r"""F.conv2d whose backward pass to the input is a matrix product, or a convolution at stride 1.

    With one output position, $\partial x = g W$. Else write input row $h = s j + m$ with block j
    and $0 \le m < s$. Offset d of position t touches row $h = s t + d - p$, so that block j needs

    $$ \partial x[s j + m] = \sum_b W_m[b]\, g[j + b], \qquad
       W_m[b] = W[d], \; d = m + p - s b , $$

    a convolution at stride 1 whose output channels are (m, channel), then unfolded into rows.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, stride: Any, padding: Any
    ) -> Tensor:
        ctx.size, ctx.stride, ctx.padding = x.shape, stride, padding
        ctx.save_for_backward(w)
        return F.conv2d(x, w, b, stride, padding)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (w,) = ctx.saved_tensors
        n, c, height, width = ctx.size
        if g.shape[2] == g.shape[3] == 1:
            (ky, kx), (py, px) = w.shape[2:], ctx.padding
            seen = F.pad(w, (-px, px + width - kx, -py, py + height - ky)).permute(0, 2, 3, 1)
            found = (g.reshape(n, -1) @ seen.reshape(len(w), -1)).view(n, height, width, c)
        else:
            found = _input_gradient(g, w, ctx.size, ctx.stride, ctx.padding)
        return found.permute(0, 3, 1, 2), None, None, None, None


def _input_gradient(
    g: Tensor, w: Tensor, size: torch.Size, stride: Sequence[int], padding: Sequence[int]
) -> Float[Tensor, "n h w c"]:
    (n, c, height, width), (sy, sx) = size, stride
    rows, first, last = _taps(w.shape[2], sy, padding[0])
    columns, left, right = _taps(w.shape[3], sx, padding[1])
    kernel = w.new_zeros(sy, sx, c, len(w), last - first + 1, right - left + 1)
    for m, d, b in rows:
        for k, e, a in columns:
            kernel[m, k, :, :, b - first, a - left] = w[:, :, d, e].T
    j, i = -(-height // sy), -(-width // sx)
    amounts = (-left, i + right - g.shape[3], -first, j + last - g.shape[2])
    weight = kernel.flatten(0, 2).contiguous(memory_format=torch.channels_last)
    blocks = F.conv2d(F.pad(g, amounts), weight).permute(0, 2, 3, 1)
    split = blocks.reshape(n, j, i, sy, sx * c).transpose(2, 3)
    return split.reshape(n, j * sy, i * sx, c)[:, :height, :width]


def _taps(k: int, step: int, padding: int) -> tuple[list[tuple[int, int, int]], int, int]:
    """(row m in a block, offset d, block distance b) of every offset; least and largest b."""
    taps = [
        (m, d, (m + padding - d) // step)
        for m in range(step)
        for d in range(k)
        if (m + padding - d) % step == 0
    ]
    distances = [b for *_, b in taps]
    return taps, min(distances), max(distances)
