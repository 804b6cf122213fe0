"""Every layer of this library in a model, replaced by plain torch modules."""

from collections.abc import Mapping

import torch
from torch import nn

from symrazor.core.hyper import Hyper
from symrazor.curvature.tape import Input, call
from symrazor.layers.merge import merge
from symrazor.layers.path import Path
from symrazor.layers.relaxed import Relaxed
from symrazor.layers.subsampling import Subsample
from symrazor.layers.trace import is_ours, traced


class Rewriter:
    """Replaces the layers of this library in a copy of a model, and notes what it did.

    Args:
        model: the relaxed network, to look at.
        x: an input for it.
        drop: relaxed layer -> paths to leave out.

    Attributes:
        terms: relaxed layer -> its kept paths, those that were merged together.
    """

    def __init__(self, model: nn.Module, x: Input, drop: Mapping[str, set[int]]) -> None:
        """Find out what must be known before."""
        self.drop, self.spaces = drop, _spaces(model, x)
        self.terms: dict[str, list[list[int]]] = {}
        self.done: dict[int, tuple[nn.Module, nn.Module]] = {}  # the old one too: it keeps its id

    def rewrite(self, module: nn.Module, name: str) -> nn.Module:
        """The plain form of a module; a module that is used twice stays one."""
        if id(module) in self.done:
            return self.done[id(module)][1]
        plain = self.plain(module, name) if is_ours(module) else module
        self.done[id(module)] = (module, plain)
        if plain is module:
            module.__dict__.pop("_relaxation", None)  # the account of `relax`, a class of ours
            for key, child in module._modules.items():
                if child is not None:
                    inside = f"{name}.{key}".removeprefix(".")
                    module._modules[key] = self.rewrite(child, inside)
        return plain

    def plain(self, module: nn.Module, name: str) -> nn.Module:
        """One layer of this library as plain torch."""
        match module:
            case Relaxed():
                return self.sum(module, name)
            case Path():
                return merge([module])[0]
            case Subsample():
                return module.plain(self.spaces[name])
            case Hyper():
                holder = nn.Module()
                holder.register_buffer("value", module.value.detach())
                return holder
            case _:
                return traced(module, f"Plain{type(module).__name__}")

    def sum(self, layer: Relaxed, name: str) -> nn.Module:
        """The kept paths of a relaxed layer."""
        kept = [i for i in range(len(layer.paths)) if i not in self.drop[name]]
        factor = 1 / len(layer.paths) if layer.mean else 1.0
        plain, terms = merge([layer.path(i) for i in kept], factor)
        self.terms[name] = [[kept[i] for i in term] for term in terms]
        return plain


def _spaces(model: nn.Module, x: Input) -> dict[str, tuple[int, ...]]:
    """(c, *size) of the input of every subsampling outside of a path, from one forward pass."""
    inside = {id(m) for path in model.modules() if isinstance(path, Path) for m in path.modules()}
    alone = {
        name: m
        for name, m in model.named_modules()
        if isinstance(m, Subsample) and id(m) not in inside
    }
    seen: dict[str, set[tuple[int, ...]]] = {name: set() for name in alone}
    hooks = [
        m.register_forward_pre_hook(lambda m, args, name=name: seen[name].add(args[0].shape[1:]))
        for name, m in alone.items()
    ]
    try:
        with torch.no_grad():
            call(model, x)
    finally:
        for hook in hooks:
            hook.remove()
    for name, shapes in seen.items():
        if len(shapes) != 1:
            raise ValueError(
                f"expected the subsampling {name!r} to see inputs of one shape on the example "
                f"input, got {sorted(map(tuple, shapes)) or 'none'}"
            )
    return {name: tuple(*shapes) for name, shapes in seen.items()}
