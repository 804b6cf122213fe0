"""Nothing is skipped silently: every trainable weight is matched to a layer, or refused by name."""

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from symrazor.accelerate.processes import check_not_sharded
from symrazor.accelerate.torch_internals import BatchNorm, Dropout, is_compiled
from symrazor.core.errors import DivergenceError, UnsupportedParameterError
from symrazor.core.parameters import weights
from symrazor.curvature.tape import Input, Use, call, map_tensors, record, weight_gradients
from symrazor.curvature.weight_sharing import Layer, Sharing, registered_type, sharing


def layers(model: nn.Module) -> list[Layer]:
    """All layers that carry the model's trainable weights, each weight exactly once.

    The mode of dropout is not looked at here; see `check_mode`.

    Raises:
        UnsupportedParameterError: weights that no registered layer accounts for, or that several
            modules share, or that sit in a BatchNorm in training mode or in a subclass that
            overrides the forward pass of a registered layer.
    """
    if is_compiled(model):
        raise ValueError(
            "expected a module whose layers can be watched, got a torch.compile'd one; pass the "
            "module it was made from (they share their weights)"
        )
    check_not_sharded(model)
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
        reason = unsupported_reason(module)
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


def unsupported_reason(module: nn.Module) -> str | None:
    """Why the curvature of this module would be wrong, or None."""
    kind = type(module)
    base = registered_type(kind)
    if isinstance(module, BatchNorm):
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
        if isinstance(module, Dropout) and module.training and module.p > 0
    ]
    if noisy:
        raise ValueError(
            f"expected a deterministic model, got dropout in training mode at {noisy}; call "
            "model.eval() before the evidence and model.train() after it"
        )
    coupled = [
        name
        for name, module in model.named_modules()
        if isinstance(module, BatchNorm) and (module.training or module.running_mean is None)
    ]
    if coupled:
        raise ValueError(
            f"expected a model that treats data one by one, got batch norms on batch statistics at "
            f"{coupled}; call model.eval() before the evidence, or use GroupNorm"
        )


def verify(model: nn.Module, x: Input) -> None:
    """Check that outputs are deterministic, per datum, and that formats explain all gradients.

    The gradient of a random functional of the first datum's outputs, put together from inputs and
    cotangents in the weight-sharing format, must be autograd's, and that of the second datum must
    be zero. It is not if a weight is also used outside of its module (F.linear(x, layer.weight)),
    if a layer's first dimension is not the data, or if a registered format is wrong. The weights
    are jittered for it, in a copy, so that a zero somewhere above hides nothing.

    Raises:
        UnsupportedParameterError: the weights whose gradient is not explained.
        ValueError: outputs that differ from call to call or depend on the other data of a batch.
        DivergenceError: weights so large that their gradient is not finite.
    """
    pair = map_tensors(x, lambda part: part[:2])
    if not _outputs_are_fine(model, pair):
        return
    twin = _jittered_copy(model)
    theta = weights(twin)
    tape = record(twin, layers(twin), pair)
    root = torch.zeros_like(tape.f)
    generator = torch.Generator().manual_seed(0)
    root[0] = torch.randn(tape.f.shape[1:], generator=generator).to(tape.f)
    expected: Sequence[Tensor | None] = torch.autograd.grad(
        tape.f, list(theta.values()), root, retain_graph=True, allow_unused=True
    )
    _check_finite(theta, expected)
    nothing = tape.f.new_zeros(len(tape.f), 1)
    got = _by_format(tape.uses, tape.cotangents(root), len(tape.f))
    refused = {
        name: reason
        for (name, value), truth in zip(theta.items(), expected, strict=True)
        if (reason := _difference(value, truth, got.get(name, nothing))) is not None
    }
    if refused:
        raise UnsupportedParameterError(refused)


def check_output_precision(f: Tensor) -> None:
    """Raise ValueError for outputs in half precision."""
    if f.dtype in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"expected outputs in float32 or float64, got {f.dtype}: too coarse for curvature; "
            "use model.float()"
        )


def _outputs_are_fine(model: nn.Module, pair: Input) -> bool:
    """Refuse random or coupled outputs; False for NaN, which the batch's own check will name."""
    with torch.no_grad():
        f, again = call(model, pair), call(model, pair)
        alone = call(model, map_tensors(pair, lambda part: part[:1]))
    if f.dim() != 2:
        raise ValueError(f"expected model outputs of shape [n, k], got {list(f.shape)}")
    check_output_precision(f)
    tolerance = 1e4 * torch.finfo(f.dtype).eps * float(f.abs().max())
    if not bool(torch.isfinite(f).all()):
        return False
    if bool(((f - again).abs() > tolerance).any()):
        raise ValueError(
            "expected a deterministic model, got other outputs for the same inputs on the second "
            "call; is there dropout or another random operation in training mode? call model.eval()"
        )
    if bool(((f[:1] - alone).abs() > tolerance).any()):
        raise ValueError(
            "expected a model that treats data one by one, got another output for a datum alone "
            "than in a batch; is there a statistic over the batch?"
        )
    return True


@torch.no_grad()
def _jittered_copy(model: nn.Module) -> nn.Module:
    """A copy with all weights moved a little, none of them zero.

    A copy, because the model may be in use elsewhere. One that cannot be copied (it keeps an
    activation of its own, say) is verified as it is.
    """
    try:
        twin = copy.deepcopy(model)
    except (RuntimeError, TypeError):
        return model
    generator = torch.Generator().manual_seed(0)
    for value in weights(twin).values():
        noise = torch.randn(value.shape, generator=generator).to(value)
        value.add_(0.1 * value.abs().mean().clamp(min=0.01) * noise)
    return twin


def _check_finite(theta: Mapping[str, Tensor], gradients: Sequence[Tensor | None]) -> None:
    """A gradient that overflows says nothing about formats."""
    for name, gradient in zip(theta, gradients, strict=True):
        if gradient is not None and not bool(torch.isfinite(gradient).all()):
            largest = max(float(value.detach().abs().max()) for value in theta.values())
            raise DivergenceError(
                f"expected a finite gradient of the outputs, got one of {name} that is not, with "
                f"weights up to {largest:.1e}: the training has diverged; lower the learning rate"
            )


def _by_format(
    uses: Sequence[Use], cotangents: Sequence[Tensor | None], n: int
) -> dict[str, Tensor | None]:
    """Per-datum gradients [n, p] of every weight; None where rows are not data."""
    got: dict[str, Tensor | None] = {}
    for use, g in zip(uses, cotangents, strict=True):
        if g is None:
            continue
        layer, formed = use.layer, use.outputs(g)
        pieces: dict[str, Tensor | None] = {}
        per_datum = len(formed) == n
        if layer.bias is not None:
            pieces[layer.bias] = formed.sum(1).flatten(1) if per_datum else None
        if layer.weight is not None:
            inputs = use.input.detach()
            j = weight_gradients([use], [inputs], [formed]).detach() if per_datum else None
            pieces[layer.weight] = j
        for name in layer.shaping.values():
            pieces[name] = use.shaping_gradient(name, g).detach() if per_datum else None
        for name, j in pieces.items():
            before = got.get(name, torch.zeros(()))
            got[name] = None if j is None or before is None else before.to(j) + j
    return got


def _difference(value: Tensor, truth: Tensor | None, ours: Tensor | None) -> str | None:
    """Why the gradient of a weight is not explained, or None if it is."""
    if ours is None:
        return (
            "the first dimension of its layer's input is not that of the data, so that its "
            "curvature cannot be told apart by datum; keep the data first, as in [n, s, features]"
        )
    expected = torch.zeros_like(value) if truth is None else truth
    error = ours.expand(-1, value.numel()).clone()
    error[0] -= expected.reshape(-1)
    scale = max(float(expected.abs().max()), float(ours.abs().max()))
    if float(error.abs().max()) <= 1e4 * torch.finfo(value.dtype).eps * scale:
        return None
    return (
        "the uses of its module do not explain its gradient; is it also used outside of its "
        "module, is its layer's first dimension not that of the data, or is the registered format "
        "wrong?"
    )
