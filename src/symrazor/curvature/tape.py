r"""Run a model on a batch and record, for every layer, its inputs and its output cotangents.

No module or parameter is changed. Forward hooks record what each registered layer was called with,
and `OperationRecorder` records all other operations with parameters. Gradient edges (positions in
the autograd graph, which in-place activations cannot move) allow reading

$$ g_c = \left(\frac{\partial f}{\partial y}\right)^{\!\top} r_c $$

for any vectors $r_c$ at the output. Only gradients of layer outputs are computed, never of weights.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from symrazor.accelerate.torch_internals import tensor_version
from symrazor.curvature.operations import OperationRecorder, settle_formats
from symrazor.curvature.uses import Use, widened
from symrazor.curvature.weight_sharing import Layer
from symrazor.data.batches import Input, call, map_tensors


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
    recorder = OperationRecorder(layers, uses)
    x = map_tensors(x, lambda part: part.view_as(part))  # marks are set on own tensors only
    map_tensors(x, recorder.mark_data)
    try:
        with _recording_hooks(layers, uses, recorder), recorder, torch.enable_grad():
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
    settle_formats(uses)
    return Tape(widened(f), uses)


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
def _recording_hooks(
    layers: Sequence[Layer], uses: list[Use], recorder: OperationRecorder
) -> Iterator[None]:
    by_module = {id(layer.module): layer for layer in layers if layer.registered is not None}
    thread = threading.get_ident()

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() == thread:
            recorder.enter_layer(args, kwargs)

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Any) -> None:
        if threading.get_ident() != thread:  # another thread runs the same model
            return
        if not recorder.leave_layer(y):
            return  # called on constants: its operations were recorded
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

    modules = [layer.module for layer in layers if layer.registered is not None]
    handles = [module.register_forward_hook(hook, with_kwargs=True) for module in modules]
    handles += [module.register_forward_pre_hook(enter, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
