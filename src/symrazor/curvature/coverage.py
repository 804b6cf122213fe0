"""Nothing is skipped silently: every trainable weight is matched to a layer, or refused by name."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from symrazor.accelerate.processes import refuse_sharded
from symrazor.core.errors import UnsupportedParameterError
from symrazor.core.hyper import weights
from symrazor.curvature.weight_sharing import Sharing, registered_type, sharing


@dataclass(frozen=True)
class Layer:
    """A module with at least one trainable weight, and its format.

    `weight` and `bias` are full parameter names, None where absent or frozen; `shaping` maps the
    format's names of further parameters to full ones.
    """

    name: str
    module: nn.Module
    form: Sharing
    weight: str | None
    bias: str | None
    shaping: dict[str, str] = field(default_factory=dict)

    @property
    def tensors(self) -> list[str]:
        """Full names of all its weights."""
        return [n for n in (self.bias, self.weight, *self.shaping.values()) if n is not None]


def layers(model: nn.Module) -> list[Layer]:
    """All layers that carry the model's trainable weights, each weight exactly once.

    The mode of dropout is not looked at here; see `check_mode`.

    Raises:
        UnsupportedParameterError: weights that no registered layer accounts for, or that several
            modules share, or that sit in a BatchNorm in training mode or in a subclass that
            overrides the forward pass of a registered layer.
    """
    if hasattr(model, "_orig_mod"):
        raise ValueError(
            "expected a module whose layers can be watched, got a torch.compile'd one; pass the "
            "module it was made from (they share their weights)"
        )
    refuse_sharded(model)
    theta = weights(model)
    name_of = {id(parameter): name for name, parameter in theta.items()}
    found: list[Layer] = []
    covered: dict[str, str] = {}
    refused: dict[str, str] = {}
    shaping: set[str] = set()
    for prefix, module in model.named_modules():
        own = {
            local: name_of[id(parameter)]
            for local, parameter in module.named_parameters(recurse=False)
            if id(parameter) in name_of and name_of[id(parameter)] not in shaping
        }
        if not own:
            continue
        reason = refusal(module)
        if reason is not None:
            refused.update(dict.fromkeys(own.values(), reason))
            continue
        form = sharing(module)
        further = {
            local: name_of[id(parameter)]
            for local in form.shaping
            if id(parameter := module.get_parameter(local)) in name_of
        }
        own |= further
        shaping.update(further.values())
        refused |= _claim(prefix, module, form, own, covered)
        weight = own.get(form.weight) if form.weight else None
        bias = own.get(form.bias) if form.bias else None
        found.append(Layer(prefix, module, form, weight, bias, further))
    for name in theta:
        if name not in covered and name not in refused:
            refused[name] = "a parameter outside of any module"
    if refused:
        raise UnsupportedParameterError(refused)
    if not found:
        raise ValueError("expected at least one trainable weight, got a model without any")
    return found


def _claim(
    prefix: str, module: nn.Module, form: Sharing, own: Mapping[str, str], covered: dict[str, str]
) -> dict[str, str]:
    """Note weights as covered by a module; returns reasons against those that cannot be."""
    reasons: dict[str, str] = {}
    for local, name in own.items():
        if local not in (form.weight, form.bias, *form.shaping):
            reasons[name] = f"{type(module).__name__} does not say how it uses {local!r}"
        elif name in covered:
            reasons[name] = (
                f"shared by the modules {covered[name]!r} and {prefix!r}; use one module twice "
                "instead, or freeze one of the two"
            )
        covered[name] = prefix
    return reasons


def refusal(module: nn.Module) -> str | None:
    """Why the curvature of this module would be wrong, or None."""
    kind = type(module)
    base = registered_type(kind)
    if isinstance(module, _BatchNorm):
        if module.training or module.running_mean is None:
            return (
                "a BatchNorm on batch statistics couples the data of a batch, so that no per-datum "
                "curvature exists; call model.eval() to fix its statistics, or use GroupNorm"
            )
    if base is None:
        return f"no curvature is registered for layers of type {kind.__name__}"
    overriding = [
        method
        for method in ("forward", "_conv_forward", "__call__")
        if getattr(kind, method, None) is not getattr(base, method, None)
        or method in module.__dict__
    ]
    if overriding:
        return (
            f"{kind.__name__} overrides {overriding[0]} of {base.__name__}, so that the curvature "
            f"of {base.__name__} would be wrong; register {kind.__name__} itself"
        )
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return "an Embedding with max_norm changes its weights in the forward pass; unset max_norm"
    return None


def check_mode(model: nn.Module) -> None:
    """Refuse a model whose forward pass is random or couples data: dropout, batch statistics.

    Raises:
        ValueError: names the modules.
    """
    noisy = [
        name
        for name, module in model.named_modules()
        if isinstance(module, _DropoutNd) and module.training and module.p > 0
    ]
    if noisy:
        raise ValueError(
            f"expected a deterministic model, got dropout in training mode at {noisy}; call "
            "model.eval() before the evidence and model.train() after it"
        )
    coupled = [
        name
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
    ]
    if coupled:
        raise ValueError(
            f"expected a model that treats data one by one, got batch norms on batch statistics at "
            f"{coupled}; call model.eval() before the evidence, or use GroupNorm"
        )
