"""Describe one call of a layer in the weight-sharing format, and its per-sample gradients."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.func import functional_call, jacfwd

from symrazor.accelerate.torch_internals import tensor_version
from symrazor.curvature.weight_sharing import Layer, Sharing


def widened(x: Tensor) -> Tensor:
    """Return numbers of 16 bits in float32, in which sums are computed; others unchanged."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


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
class OperationUse(Use):
    """One operation with a parameter, or with a tensor d that was computed from parameters.

    Args:
        source: the tensor d.
        targets: the layer's parameters that d depends on, by full name.
        linear: whether the operation is linear in activations; else the recorded edge is d itself,
            expanded to one row per sample.
        layout: name of the format, equal for operations whose factors can be added.
    """

    source: Tensor = field(default_factory=lambda: torch.empty(0))
    targets: dict[str, Tensor] = field(default_factory=dict)
    linear: bool = False
    layout: str = ""

    @property
    def is_weight(self) -> bool:
        """Whether this is a linear operation with the parameter itself."""
        return self.linear and any(value is self.source for value in self.targets.values())

    def gradients(
        self,
        g: Tensor,
        formed: Tensor | None = None,
        names: Sequence[str] | None = None,
        keep_graph: bool = False,
    ) -> dict[str, Float[Tensor, "n p"]]:
        """Return the gradients of the parameters behind d, by sample."""
        wanted = self.targets if names is None else {n: self.targets.get(n) for n in names}
        targets = {name: value for name, value in wanted.items() if value is not None}
        if not targets:
            return {}
        formed = self.outputs(g) if formed is None else formed
        if self.linear:
            a = self.inputs(self.input if keep_graph else self.input.detach())
            blocks = torch.einsum("nsko,nski->nkoi", formed, a)
            rows = torch.vmap(self.form.from_blocks)(blocks).flatten(1)
        else:
            rows = formed.sum(1).flatten(1)
        for name, value in targets.items():
            if value is self.source:
                return {name: rows}
        pulled: Sequence[Tensor | None] = torch.autograd.grad(
            self.source,
            list(targets.values()),
            rows.reshape(-1, *self.source.shape).to(self.source.dtype),
            is_grads_batched=True,
            retain_graph=True,
            create_graph=keep_graph,
            allow_unused=True,
        )
        return {
            name: rows.new_zeros(len(rows), value.numel())
            if part is None
            else part.reshape(len(rows), -1)
            for (name, value), part in zip(targets.items(), pulled, strict=True)
        }
