r"""Run a model on a batch and record, for every layer, its inputs and its output cotangents.

No module or parameter is changed. Forward hooks record what each layer was called with. Gradient
edges (positions in the autograd graph, which in-place activations cannot move) allow reading

$$ g_c = \left(\frac{\partial f}{\partial y}\right)^{\!\top} r_c $$

for any vectors $r_c$ at the output. Only gradients of layer outputs are computed, never of weights.
`FastBackward` replaces some operations of any model by versions with a cheaper backward pass.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, saved_tensors_hooks
from torch.func import functional_call, jacfwd
from torch.overrides import TorchFunctionMode

from symrazor.accelerate.torch_internals import PAD_FUNCTIONS, tensor_version
from symrazor.curvature.convolution import CircularPad
from symrazor.curvature.weight_sharing import Layer
from symrazor.data.batches import Input, call


@dataclass
class Use:
    r"""One call of one layer, in the weight-sharing format.

    A model may pass several copies of each sample through a layer, one after the other in the first
    dimension: transformed images, frames of a film. They are further uses of the weight by the same
    sample, so that [(n copies), s, k, f] is read as [n, (copies s), k, f].

    If the model averages over copies and announces it (`announce_copies`), Kronecker factors may be
    reduced over them. The gradient of one sample is $\sum_c g_c a_c^\top$, with input $a_c$,
    cotangent $g_c$ and weight $w_c$ of copy c; it is approximated by
    $(\sum_c g_c)(\sum_c w_c a_c)^\top$. The curvature then falls as the copies grow apart, which
    tells the evidence how far apart they may be. Weights are shared by all samples or differ from
    sample to sample; a copy that does not contribute has weight zero.
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
        """Return an input of the layer in the format, by sample."""
        return self._fold(self.layer.form.inputs(x))

    def outputs(self, y: Tensor) -> Float[Tensor, "n s k o"]:
        """Return a tensor of the layer's output shape in the format, by sample."""
        return self._fold(self.layer.form.outputs(y))

    @property
    def averaged(self) -> bool:
        """Whether the model averages over these copies."""
        weights = self.copy_weights
        return self.copies > 1 and weights is not None and weights.shape[-1] == self.copies

    def mean_input(self, x: Tensor) -> Tensor:
        """Average an input of the layer over the copies of each sample."""
        if not self.averaged or self.copy_weights is None:
            return x
        split: Tensor = x.unflatten(0, (-1, self.copies))
        weights = self.copy_weights.to(x).expand(len(split), self.copies)
        return torch.einsum("nc...,nc->n...", split, weights)

    def summed_output(self, y: Tensor) -> Float[Tensor, "n s k o"]:
        """Sum a cotangent of the layer's output over the copies of each sample."""
        if not self.averaged:
            return self.outputs(y)
        split: Tensor = self.layer.form.outputs(y).unflatten(0, (-1, self.copies))
        return split.sum(1)

    def shaping_gradient(self, name: str, g: Tensor) -> Float[Tensor, "n p"]:
        r"""Return the gradients of a parameter that shapes the weight, by sample.

        $J_n[p] = \sum_y g_n[y]\, \partial y_n / \partial p$: the cotangent of the output times the
        derivative of the output. Lengthscales and anchor positions are few, so that this is cheap.
        """
        gradient = torch.einsum("ny,nyp->np", g.flatten(1), self._tangents[name])
        return gradient if self.copies == 1 else gradient.unflatten(0, (-1, self.copies)).sum(1)

    def gradients(
        self,
        g: Tensor,
        formed: Tensor | None = None,
        names: Sequence[str] | None = None,
        keep_graph: bool = False,
    ) -> dict[str, Float[Tensor, "n p"]]:
        """Return the gradients of the layer's tensors, by sample, in the parameters' layouts.

        Args:
            g: cotangent of the layer's output.
            formed: `outputs(g)`, if it is known.
            names: the tensors; by default all.
            keep_graph: whether the gradients are differentiated afterwards.
        """
        layer, result = self.layer, dict[str, Tensor]()
        formed = self.outputs(g) if formed is None else formed
        for name in layer.tensors if names is None else names:
            if name == layer.bias:
                result[name] = formed.sum(1).flatten(1)
            elif name == layer.weight:
                a = self.inputs(self.input if keep_graph else self.input.detach())
                blocks = torch.einsum("nsko,nski->nkoi", formed, a)
                result[name] = torch.vmap(layer.form.from_blocks)(blocks).flatten(1)
            else:
                result[name] = self.shaping_gradient(name, g)
        return result

    def _fold(self, formed: Tensor) -> Tensor:
        split: Tensor = formed.unflatten(0, (-1, self.copies))
        return formed if self.copies == 1 else split.flatten(1, 2)

    @property
    def input(self) -> Tensor:
        """The input; raises ValueError if it was overwritten after the call."""
        if tensor_version(self.x) != self.version:
            raise ValueError(
                f"The input of layer {self.layer.name!r} was changed in-place after the layer was "
                "called. Use the out-of-place operation."
            )
        return self.x

    def release_input(self) -> None:
        """Free the input; it may not be used afterwards."""
        self.x = self.x.new_empty(0)
        self.version = tensor_version(self.x)

    @cached_property
    def _tangents(self) -> dict[str, Float[Tensor, "n y p"]]:
        """Derivatives of the output in each shaping parameter, by forward-mode differentiation."""
        module = self.layer.module
        tangents: dict[str, Tensor] = {}
        for local, name in self.layer.shaping.items():
            # Under functional_call the attribute is a tensor, not a parameter.
            value: Tensor = attrgetter(local)(module)

            def output(p: Tensor, local: str = local, value: Tensor = value) -> Tensor:
                y: Tensor = functional_call(module, {local: p.reshape(value.shape)}, (self.input,))
                return y.flatten(1)

            tangents[name] = jacfwd(output)(value.reshape(-1))
        return tangents


@dataclass
class Tape:
    """Record of one forward pass: the outputs f and every use of every layer."""

    f: Float[Tensor, "n k"]
    uses: list[Use]

    def cotangents(
        self, root: Float[Tensor, "n k"], create_graph: bool = False, retain_graph: bool = True
    ) -> list[Tensor | None]:
        """Return the gradients of sum(f * root) in the output of each use, in order.

        Without `retain_graph` the graph is freed, and this is the last call.
        """
        edges = [use.edge for use in self.uses]
        if not edges:
            return []
        options = {"retain_graph": retain_graph, "create_graph": create_graph}
        return list(torch.autograd.grad(self.f, edges, root, allow_unused=True, **options))


def record(model: Callable[..., Any], layers: Sequence[Layer], x: Input) -> Tape:
    """Run the model on one batch and record every use of its layers that acts on the outputs."""
    uses: list[Use] = []
    _copies.weights, _copies.recording = None, True
    try:
        with _recording_hooks(layers, uses), torch.enable_grad():
            f = call(model, x)
    finally:
        weights, _copies.weights, _copies.recording = _copies.weights, None, False
    if not f.requires_grad:
        raise ValueError(
            "The model outputs do not depend on the trainable weights. Does the model run under "
            "torch.no_grad() or call detach()?"
        )
    acting = _ancestors(f)
    uses = [use for use in uses if use.edge.node in acting]
    for use in uses:
        copies, remainder = divmod(use.y_shape[0], len(f))
        use.copies = copies if copies and not remainder else 1  # else `verify` reports the layer
        use.copy_weights = weights
    return Tape(f, uses)


_copies = threading.local()


def announce_copies(weights: Float[Tensor, " c"] | Float[Tensor, "n c"]) -> None:
    """Announce the weights with which a model averages over copies of each sample.

    Weights add up to 1; they are the same for all samples, or given for each sample. They are kept
    only while a pass is recorded: otherwise the graph behind them would never be freed.
    """
    if getattr(_copies, "recording", False):
        _copies.weights = weights


def _ancestors(f: Tensor) -> set[Node]:
    """Return all nodes of the autograd graph that f depends on."""
    assert f.grad_fn is not None
    nodes: set[Node] = {f.grad_fn}
    pending = [f.grad_fn]
    while pending:
        for node, _ in pending.pop().next_functions:
            if node is not None and node not in nodes:
                nodes.add(node)
                pending.append(node)
    return nodes


@contextmanager
def _recording_hooks(layers: Sequence[Layer], uses: list[Use]) -> Iterator[None]:
    by_module = {id(layer.module): layer for layer in layers}
    thread = threading.get_ident()

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Any) -> None:
        if threading.get_ident() != thread:  # another thread runs the same model
            return
        layer = by_module[id(module)]
        x = args[0] if args else next(iter(kwargs.values()))
        if not isinstance(y, Tensor) or not isinstance(x, Tensor):
            raise ValueError(f"Layer {layer.name!r} must map one tensor to one tensor.")
        if not y.requires_grad:
            raise ValueError(
                f"The output of layer {layer.name!r} has no gradient. Is the layer called under "
                "torch.no_grad()?"
            )
        uses.append(Use(layer, x, get_gradient_edge(y), tensor_version(x), y.shape))

    handles = [layer.module.register_forward_hook(hook, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class FastBackward(TorchFunctionMode):
    """Replace operations while active; weights that are leaves get no gradient.

    Circular padding uses `CircularPad`. Strided convolutions of few channels, and convolutions with
    one output position, use `_Conv`. All other convolutions do not store their input, which only
    the gradient of a weight would need.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Replace F.pad(..., mode="circular") and F.conv2d if that is faster."""
        kwargs = kwargs or {}
        if func in PAD_FUNCTIONS:
            x, amounts = args[:2] if len(args) > 1 else (args[0], kwargs["pad"])
            mode = args[2] if len(args) > 2 else kwargs.get("mode", "constant")
            if mode == "circular" and all(p >= 0 for p in amounts):
                return CircularPad.apply(x, tuple(amounts))  # type: ignore[no-untyped-call]
        elif func is F.conv2d and not kwargs and len(args) == 7 and _is_faster(*args):
            return _Conv.apply(*args[:5])  # type: ignore[no-untyped-call]
        elif func in (F.conv1d, F.conv2d, F.conv3d) and len(args) > 1 and args[1].is_leaf:
            address = _address(args[0])
            if address is not None:
                with saved_tensors_hooks(partial(_pack, address, args[0].shape), _unpack):
                    return func(*args, **kwargs)
        return func(*args, **kwargs)


def _address(x: Tensor) -> int | None:
    """Return the address of a tensor; None for traced or vmapped tensors, which have none."""
    if torch.compiler.is_compiling():
        return None
    try:
        return x.data_ptr()
    except RuntimeError:
        return None


def _pack(address: int, size: torch.Size, saved: Tensor) -> Tensor | Callable[[], Tensor]:
    """Store only the layout of a convolution's input, recognised by its address.

    The backward pass reads no more than its shape. (A reference to the input itself would be kept
    alive by the hooks, which autograd stores.)
    """
    if saved.shape != size or saved.data_ptr() != address:
        return saved
    layout = saved.shape, saved.stride()
    return partial(torch.empty_strided, *layout, dtype=saved.dtype, device=saved.device)


def _unpack(stored: Tensor | Callable[[], Tensor]) -> Tensor:
    return stored if isinstance(stored, Tensor) else stored()


def _is_faster(
    x: Tensor, w: Tensor, b: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int
) -> bool:
    """Return whether `_Conv` can replace a convolution and is faster."""
    if x.device.type != "cpu" or x.dim() != 4 or not x.requires_grad:
        return False
    if not isinstance(stride, tuple) or not isinstance(padding, tuple):
        return False
    if groups != 1 or dilation != (1, 1) or not w.is_leaf or not (b is None or b.is_leaf):
        return False
    few_channels = min(stride) > 1 and w.shape[1] <= MAX_FEW_CHANNELS
    reach = [x.shape[2 + d] + 2 * padding[d] - w.shape[2 + d] for d in (0, 1)]
    return few_channels or all(0 <= r < step for r, step in zip(reach, stride, strict=True))


MAX_FEW_CHANNELS = 8
"""Vector units hold 16 numbers: the gradient of at most this many channels leaves half unused."""


class _Conv(torch.autograd.Function):
    r"""F.conv2d whose backward pass to the input is a matrix product or a stride-1 convolution.

    With one output position, $\partial x = g W$. Otherwise write input row $h = s j + m$ with block
    j and $0 \le m < s$. Offset d of position t touches row $h = s t + d - p$, so that block j needs

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
            kernel = F.pad(w, (-px, px + width - kx, -py, py + height - ky)).permute(0, 2, 3, 1)
            gradient = (g.reshape(n, -1) @ kernel.reshape(len(w), -1)).view(n, height, width, c)
        else:
            gradient = _input_gradient(g, w, ctx.size, ctx.stride, ctx.padding)
        return gradient.permute(0, 3, 1, 2), None, None, None, None


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
    """Return (row m in a block, offset d, block distance b) of all taps; smallest and largest b."""
    taps = [
        (m, d, (m + padding - d) // step)
        for m in range(step)
        for d in range(k)
        if (m + padding - d) % step == 0
    ]
    distances = [b for *_, b in taps]
    return taps, min(distances), max(distances)
