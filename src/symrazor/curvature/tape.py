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
from operator import attrgetter
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import (
    GradientEdge,
    Node,
    get_gradient_edge,
)
from torch.func import functional_call, jacfwd

from symrazor.curvature.weight_sharing import Layer

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

    def shaping_gradient(self, name: str, g: Tensor) -> Float[Tensor, "n p"]:
        """Gradients of a parameter that shapes the weight, by datum."""
        found = shaped(self.tangents[name], g)
        return found if self.copies == 1 else found.unflatten(0, (-1, self.copies)).sum(1)

    def _fold(self, formed: Tensor) -> Tensor:
        split: Tensor = formed.unflatten(0, (-1, self.copies))
        return formed if self.copies == 1 else split.flatten(1, 2)

    @property
    def input(self) -> Tensor:
        """The input, provided nobody has overwritten it since."""
        if self.x._version != self.version:
            raise ValueError(
                f"expected the input of layer {self.layer.name!r} to stay as it was, got an "
                "in-place change after the layer was called; use the out-of-place operation"
            )
        return self.x

    def release_input(self) -> None:
        """Forget the input: it has been seen for the last time."""
        self.x = self.x.new_empty(0)
        self.version = self.x._version

    @cached_property
    def tangents(self) -> dict[str, Tensor]:
        """Derivatives of the output in the parameters that shape the layer's weight."""
        return tangents(self.layer, self.input)


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


def map_tensors(x: Input, change: Callable[[Tensor], Any]) -> Any:
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


def tangents(layer: Layer, x: Tensor) -> dict[str, Float[Tensor, "n y _"]]:
    """Derivative of the layer's output in each of its shaping parameters, by full name."""
    module = layer.module
    found: dict[str, Tensor] = {}
    for local, name in layer.shaping.items():
        value: Tensor = attrgetter(local)(module)  # no parameter where weights are functional

        def output(p: Tensor, local: str = local, value: Tensor = value) -> Tensor:
            y: Tensor = functional_call(module, {local: p.reshape(value.shape)}, (x,))
            return y.flatten(1)

        found[name] = jacfwd(output)(value.reshape(-1))
    return found


def shaped(tangent: Float[Tensor, "n y p"], g: Tensor) -> Float[Tensor, "n p"]:
    """Per-datum gradients of a shaping parameter from the cotangent of the layer's output."""
    return torch.einsum("ny,nyp->np", g.flatten(1), tangent)


def weight_gradients(
    uses: Sequence[Use], inputs: Sequence[Tensor], formed: Sequence[Tensor]
) -> Tensor:
    """Per-datum gradients [n, p] of a layer's weight, flattened in the parameter's layout."""
    each_use = zip(uses, inputs, formed, strict=True)
    parts = [torch.einsum("nsko,nski->nkoi", g, use.inputs(x)) for use, x, g in each_use]
    return torch.vmap(uses[0].layer.form.from_blocks)(torch.stack(parts).sum(0)).flatten(1)
