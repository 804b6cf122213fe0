"""Define one recorded operation with a parameter, and decide whether operations share a format."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.curvature.weight_sharing import Use


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
        chosen = self.targets if names is None else {n: self.targets.get(n) for n in names}
        targets = {name: value for name, value in chosen.items() if value is not None}
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


def settle_formats(uses: Sequence[Use]) -> None:
    """Decide, layer by layer, whether the recorded uses have common Kronecker factors."""
    by_layer: dict[str, list[Use]] = {}
    for use in uses:
        by_layer.setdefault(use.layer.name, []).append(use)
    for layer_uses in by_layer.values():
        layer = layer_uses[0].layer
        operations = [use for use in layer_uses if isinstance(use, OperationUse)]
        if not operations:
            continue
        layouts = {use.layout for use in operations}
        if len(operations) < len(layer_uses):
            layouts.add(_layout_of(layer.module))
        factored = all(use.is_weight for use in operations) and len(layouts) == 1
        if layer.registered is None:
            (local,) = layer.local_names
            layer.recorded[:] = [replace(operations[0].form, weight=local)] if factored else []
        for use in layer_uses:
            use.exact = not factored


def _layout_of(module: nn.Module) -> str:
    if isinstance(module, nn.Linear):
        return "linear"
    return "embedding" if isinstance(module, nn.Embedding) else "registered"
