r"""Define the weight-sharing format, the layers of a model in it, and the tape of their calls.

Every linear operation with parameters is

$$ y[n, s, k, o] = \sum_i W[k, o, i]\, a[n, s, k, i] + b[k, o] $$

with n samples, s shared uses of the weight (positions, tokens, group elements), k independent
blocks, and i input and o output features. The curvature engine knows nothing else about a layer. A
new layer type is one function registered with `sharing` (docs/how-to/add-a-layer.md).

| layer | s | k | i | o |
|---|---|---|---|---|
| Linear | leading dimensions | 1 | in | out |
| Conv | positions | groups | patch | channels |
| Embedding | tokens | vocabulary (a is one-hot) | 1 | width |
| affine part of a norm | positions | features | 1 | 1 |

A `Layer` is a module with its format, a `Use` one call of it, and a `Tape` the record of a forward
pass. A use keeps the input and the gradient edge of the output (a position in the autograd graph,
which in-place activations cannot move), from which the cotangent
$g_c = (\partial f / \partial y)^\top r_c$ of any vector $r_c$ at the model output f is read. Only
gradients of layer outputs are computed, never of weights.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial, singledispatch
from operator import attrgetter

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.func import functional_call, jacfwd

from symrazor.accelerate.torch_internals import tensor_version

Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Sharing:
    """Description of one module in the weight-sharing format.

    Args:
        inputs: maps the input of the module to a[n, s, k, i].
        outputs: maps a tensor of the module's output shape to [n, s, k, o]; applied to cotangents.
        weight: name of the module's weight parameter, or None.
        bias: name of its bias b[k, o], flattened in that order, or None.
        to_blocks: maps the weight parameter to W[k, o, i].
        from_blocks: the inverse of `to_blocks`.
        input_factor: optional faster sum of a a' over n and s, [k, i, i].
        project: optional faster product of a and a matrix [k, i, r]; maps the input of the module
            and the matrix to [n, s, k, r].
        dense: whether the weight gets an exact dense block instead of Kronecker factors; for
            weights with few entries, such as the scale of a norm.
        shaping: names of further parameters of the module or its children that shape the weight
            (lengthscales, for example); they have few entries and exact blocks.
    """

    inputs: Map
    outputs: Map
    weight: str | None = "weight"
    bias: str | None = "bias"
    to_blocks: Map = field(default=partial(torch.unsqueeze, dim=0))
    from_blocks: Map = field(default=partial(torch.squeeze, dim=0))
    input_factor: Map | None = None
    project: Callable[[Tensor, Tensor], Tensor] | None = None
    dense: bool = False
    shaping: tuple[str, ...] = ()


@singledispatch
def sharing(module: nn.Module) -> Sharing:
    """Return the format of a module, by its type; raise TypeError if none is registered."""
    raise TypeError(f"No weight-sharing format is registered for {type(module).__name__}.")


def registered_type(kind: type) -> type | None:
    """Return the base class of `kind` whose registration `sharing` would use, or None."""
    return next((c for c in kind.__mro__ if c in sharing.registry and c is not object), None)


def last_dimension(x: Float[Tensor, "n *s f"]) -> Float[Tensor, "n s 1 f"]:
    """Return features in the last dimension in the format, with all others as shared uses."""
    return x.reshape(len(x), -1, 1, x.shape[-1])


LINEAR = Sharing(inputs=last_dimension, outputs=last_dimension)
"""Format of F.linear."""


@sharing.register
def _linear(module: nn.Linear) -> Sharing:
    return LINEAR


def _without_format(x: Tensor) -> Tensor:
    raise ValueError("This parameter has no common format: its operations have formats.")


SINGLE = Sharing(inputs=_without_format, outputs=_without_format, bias=None, dense=True)
"""Format of a parameter whose operations are recorded one by one."""


@dataclass(frozen=True)
class Layer:
    """A module with at least one trainable weight, and its format.

    A parameter outside of registered layers is a layer of its own. Its operations are recorded (see
    `operations`), and its format is known once a model has run.

    Args:
        name: name of the module, or of the parameter.
        module: the module that holds the parameters.
        registered: the registered format of the module, None for a single parameter.
        weight: full name of the weight, None if absent or frozen.
        bias: full name of the bias, None if absent or frozen.
        shaping: full names of shaping parameters by local name.
        recorded: the format of a single parameter, if all its operations have the same.
    """

    name: str
    module: nn.Module
    registered: Sharing | None
    weight: str | None
    bias: str | None
    shaping: dict[str, str] = field(default_factory=dict)
    recorded: list[Sharing] = field(default_factory=list, compare=False, repr=False)

    @property
    def form(self) -> Sharing:
        """The format."""
        if self.registered is not None:
            return self.registered
        return self.recorded[0] if self.recorded else SINGLE

    @property
    def local_names(self) -> dict[str, str]:
        """Full names of all trainable parameters by their names in the module."""
        if self.registered is None:
            return {str(self.weight).rpartition(".")[2]: str(self.weight)}
        pairs = {self.registered.weight: self.weight, self.registered.bias: self.bias}
        return {k: v for k, v in pairs.items() if k is not None and v is not None} | self.shaping

    @property
    def factored_weight(self) -> str | None:
        """Full name of its weight if that has Kronecker factors, not an exact block."""
        return None if self.form.dense else self.weight

    @property
    def tensors(self) -> list[str]:
        """Full names of all its trainable tensors: bias, weight, shaping parameters."""
        return [n for n in (self.bias, self.weight, *self.shaping.values()) if n is not None]


def widened(x: Tensor) -> Tensor:
    """Return numbers of 16 bits in float32, in which sums are computed; others unchanged."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def join(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate tensors; a single one is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)


def multiply_blocks(
    x: Float[Tensor, "n s k f"], basis: Float[Tensor, "b f r"]
) -> Float[Tensor, "n s k r"]:
    """Multiply every block by its matrix, one matrix product for all samples."""
    n, s, k, f = x.shape
    blocks = max(k, len(basis))
    rows = x.permute(2, 0, 1, 3).reshape(k, n * s, f).expand(blocks, -1, -1)
    return (rows @ basis).reshape(blocks, n, s, -1).permute(1, 2, 0, 3)


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

    `own_form` is the format of a recorded operation (see `operations`). If the calls of a layer
    have no common Kronecker factors, all of them are `exact`: they have per-sample gradients only.
    """

    layer: Layer
    x: Tensor
    edge: GradientEdge
    version: int
    y_shape: torch.Size
    copies: int = 1
    copy_weights: Tensor | None = None
    own_form: Sharing | None = None
    exact: bool = False

    @property
    def form(self) -> Sharing:
        """The format of this call: that of its layer, or of a recorded operation."""
        return self.layer.form if self.own_form is None else self.own_form

    @property
    def factored_weight(self) -> str | None:
        """Full name of the weight if it has Kronecker factors; None if its block is exact."""
        return None if self.exact else self.layer.factored_weight

    @property
    def rows(self) -> int:
        """Number of (n, s) pairs: how often the weight was used in this call."""
        formed = self.form.outputs(torch.empty(self.y_shape, device="meta"))
        return formed.shape[0] * formed.shape[1]

    def inputs(self, x: Tensor) -> Float[Tensor, "n s k i"]:
        """Return an input of the layer in the format, by sample."""
        return self._fold(self.form.inputs(widened(x)))

    def projected(self, x: Tensor, basis: Float[Tensor, "k i r"]) -> Float[Tensor, "n s k r"]:
        """Return the product of an input of the layer in the format and a matrix, by sample."""
        if self.form.project is not None:
            return self._fold(self.form.project(widened(x), basis))
        return multiply_blocks(self.inputs(x), basis)

    def outputs(self, y: Tensor) -> Float[Tensor, "n s k o"]:
        """Return a tensor of the layer's output shape in the format, by sample."""
        return self._fold(self.form.outputs(widened(y)))

    @property
    def averaged(self) -> bool:
        """Whether the model averages over these copies."""
        weights = self.copy_weights
        return self.copies > 1 and weights is not None and weights.shape[-1] == self.copies

    def mean_input(self, x: Tensor) -> Tensor:
        """Average an input of the layer over the copies of each sample."""
        if not self.averaged or self.copy_weights is None:
            return x
        split: Tensor = widened(x).unflatten(0, (-1, self.copies))
        weights = self.copy_weights.to(x).expand(len(split), self.copies)
        return torch.einsum("nc...,nc->n...", split, weights)

    def summed_output(self, y: Tensor) -> Float[Tensor, "n s k o"]:
        """Sum a cotangent of the layer's output over the copies of each sample."""
        if not self.averaged:
            return self.outputs(y)
        split: Tensor = self.form.outputs(widened(y)).unflatten(0, (-1, self.copies))
        return split.sum(1)

    def shaping_gradient(self, name: str, g: Tensor) -> Float[Tensor, "n p"]:
        r"""Return the gradients of a parameter that shapes the weight, by sample.

        $J_n[p] = \sum_y g_n[y]\, \partial y_n / \partial p$: the cotangent of the output times the
        derivative of the output. Lengthscales and anchor positions are few, so that this is cheap.
        """
        gradient = torch.einsum("ny,nyp->np", widened(g).flatten(1), self._tangents[name])
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
                y: Tensor = functional_call(
                    module, {local: p.reshape(value.shape)}, (widened(self.input),)
                )
                return y.flatten(1)

            tangents[name] = jacfwd(output)(value.reshape(-1))
        return tangents


@dataclass
class Tape:
    """Record of one forward pass: the outputs f and every use of every layer."""

    f: Float[Tensor, "n k"]
    uses: list[Use]

    @classmethod
    def of(cls, f: Tensor, uses: Sequence[Use], announced: Sequence[Tensor]) -> "Tape":
        """Return the tape of a pass, with the uses on which the outputs depend."""
        acting = _ancestors(f)
        uses = [use for use in uses if use.edge.node in acting]
        for use in uses:
            copies, remainder = divmod(use.y_shape[0], len(f))
            use.copies = copies if copies and not remainder else 1  # else `verify` reports it
            use.copy_weights = announced[-1] if announced else None
        return cls(widened(f), uses)

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


_copies = threading.local()


@contextmanager
def announced_copies() -> Iterator[list[Tensor]]:
    """Collect what `announce_copies` announces within a context, in this thread."""
    _copies.announced = []
    try:
        yield _copies.announced
    finally:
        del _copies.announced


def announce_copies(weights: Float[Tensor, " c"] | Float[Tensor, "n c"]) -> None:
    """Announce the weights with which a model averages over copies of each sample.

    Weights add up to 1; they are the same for all samples, or given for each sample. They are kept
    only while a pass is recorded: otherwise the graph behind them would never be freed.
    """
    if hasattr(_copies, "announced"):
        _copies.announced.append(weights)
