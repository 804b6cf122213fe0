"""Match every trainable weight to a layer, and verify a model before its curvature is computed.

No weight is skipped silently: weights without curvature raise `UnsupportedParameterError`, which
names them. A weight outside of registered layers is supported if the operations that use it are.
The engine assumes that a model treats samples independently and that the formats of its
layers explain all uses of its weights. `verify` tests both against autograd on two samples.
"""

import copy
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from symrazor.accelerate.devices import autocast, tf32
from symrazor.accelerate.processes import check_not_sharded
from symrazor.accelerate.torch_internals import (
    BatchNorm,
    Dropout,
    is_compiled,
    local_parameters,
)
from symrazor.core.errors import DivergenceError, UnsupportedParameterError
from symrazor.core.parameters import weights
from symrazor.curvature.operations import record
from symrazor.curvature.weight_sharing import Layer, Sharing, Use, registered_type, sharing, widened
from symrazor.data.batches import Input, call, map_tensors


def layers(model: nn.Module) -> list[Layer]:
    """Return all layers that hold the model's trainable weights, each weight exactly once.

    Weights outside of registered layers, or shared by several modules, are layers of their own,
    whose operations are recorded (see `operations`). Whether the operations explain the gradient
    is checked by `verify`. Dropout is not checked here; see `check_mode`.

    Raises:
        UnsupportedParameterError: for weights of a BatchNorm in training mode, and of an Embedding
            with max_norm.
    """
    if is_compiled(model):
        raise ValueError(
            "The layers of a model returned by torch.compile cannot be recorded: pass the module "
            "it was made from (they share their weights)."
        )
    check_not_sharded(model)
    theta = weights(model)
    name_of = {id(parameter): name for name, parameter in theta.items()}
    shared = _shared(model)
    result: list[Layer] = []
    unsupported: dict[str, str] = {}
    covered: set[str] = set()
    for prefix, module in model.named_modules():
        names = {
            local: name_of[id(parameter)]
            for local, parameter in module.named_parameters(recurse=False)
            if id(parameter) in name_of and name_of[id(parameter)] not in covered
        }
        if not names:
            continue
        reason = _harm(module)
        if reason is not None:
            unsupported.update(dict.fromkeys(names.values(), reason))
            continue
        form = None
        if unsupported_reason(module) is None and not _holds_any(module, shared):
            form = sharing(module)
        if form is None or not _holds(module, form, names):
            result += [Layer(n, module, None, weight=n, bias=None) for n in names.values()]
            covered.update(names.values())
            continue
        shaping_names = {
            local: name_of[id(parameter)]
            for local in form.shaping
            if id(parameter := module.get_parameter(local)) in name_of
        }
        covered.update(names.values(), shaping_names.values())
        weight = names.get(form.weight) if form.weight else None
        bias = names.get(form.bias) if form.bias else None
        result.append(Layer(prefix, module, form, weight, bias, shaping_names))
    if unsupported:
        raise UnsupportedParameterError(unsupported, advice="")
    if not result:
        raise ValueError("The model has no trainable weights.")
    return result


def _holds(module: nn.Module, form: Sharing, names: Mapping[str, str]) -> bool:
    """Return whether a module holds the weight of its format, and the format names all the rest.

    A parametrized module computes its weight from other parameters.
    """
    is_stored = form.weight is None or form.weight in local_parameters(module)
    return is_stored and set(names) <= {form.weight, form.bias, *form.shaping}


def _shared(model: nn.Module) -> set[int]:
    """Return the ids of all parameters that several modules hold."""
    counts = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    return {number for number, count in counts.items() if count > 1}


def _holds_any(module: nn.Module, parameters: set[int]) -> bool:
    return any(id(parameter) in parameters for parameter in module.parameters(recurse=False))


def _harm(module: nn.Module) -> str | None:
    """Return why a module must not be used at all, or None."""
    if _uses_batch_statistics(module):
        return (
            "BatchNorm on batch statistics couples the samples of a batch, so that no per-sample "
            "curvature exists. Train symrazor.replace_batchnorm(model), which has GroupNorm. For "
            "the evidence of a trained network, call model.eval(), which fixes the statistics."
        )
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return "an Embedding with max_norm changes its weights in the forward pass; unset max_norm"
    return None


def unsupported_reason(module: nn.Module) -> str | None:
    """Return why a module has no registered format, or None."""
    kind = type(module)
    base = registered_type(kind)
    if (harm := _harm(module)) is not None:
        return harm
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
    return None


def _uses_batch_statistics(module: nn.Module) -> bool:
    return isinstance(module, BatchNorm) and (module.training or module.running_mean is None)


def check_mode(model: nn.Module) -> None:
    """Raise ValueError if dropout or batch statistics make outputs random or couple samples."""
    modules = list(model.named_modules())
    noisy = [name for name, m in modules if isinstance(m, Dropout) and m.training and m.p > 0]
    if noisy:
        raise ValueError(
            f"The model has dropout in training mode at {noisy}. Call model.eval() before the "
            "evidence and model.train() after it."
        )
    coupled = [name for name, module in modules if _uses_batch_statistics(module)]
    if coupled:
        raise ValueError(
            f"The model has batch norms on batch statistics at {coupled}, which couple the "
            "samples of a batch. Call model.eval() before the evidence, or use GroupNorm."
        )


def verify(model: nn.Module, x: Input) -> None:
    """Check that outputs are deterministic and per sample, and that formats explain all gradients.

    The gradient of a random functional of the first sample's outputs, assembled from inputs and
    cotangents in the weight-sharing format, must equal autograd's, and that of the second sample
    must be zero. It does not if a weight is also used outside of its module
    (F.linear(x, layer.weight)), if a layer's first dimension is not the sample, or if a registered
    format is wrong. The weights are jittered in a copy, so that no zero hides an error. All of this
    is computed without autocast and TF32, and in float32 for weights in bfloat16. A check that
    fails is repeated in float64: where large numbers nearly cancel, rounding errors are large.

    Raises:
        UnsupportedParameterError: names the weights whose gradient is not explained.
        ValueError: if outputs differ from call to call or depend on other samples of the batch.
        DivergenceError: if weights are so large that their gradient is not finite.
    """
    two_samples = map_tensors(x, lambda part: part[:2])
    if any(value.dtype == torch.bfloat16 for value in weights(model).values()):
        model, two_samples = copy.deepcopy(model).float(), map_tensors(two_samples, widened)
    with autocast({}), tf32(allowed=False):
        try:
            _verify_in_full_precision(model, two_samples)
        except (UnsupportedParameterError, ValueError):
            if not _is_right_in_float64(model, two_samples):
                raise


def _in_float64(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def _is_right_in_float64(model: nn.Module, two_samples: Input) -> bool:
    """Return whether the check passes in float64, so that float32 failed only by rounding."""
    if any(value.dtype != torch.float32 for value in weights(model).values()):
        return False
    try:
        twin = copy.deepcopy(model).double()
        _verify_in_full_precision(twin, map_tensors(two_samples, _in_float64))
    except Exception:  # also of a model that does not run in float64
        return False
    return True


def _verify_in_full_precision(model: nn.Module, two_samples: Input) -> None:
    if not _check_outputs(model, two_samples):
        return
    twin = _jittered_copy(model)
    theta = weights(twin)
    tape = record(twin, layers(twin), two_samples)
    root = torch.zeros_like(tape.f)
    generator = torch.Generator().manual_seed(0)
    root[0] = torch.randn(tape.f.shape[1:], generator=generator).to(tape.f)
    expected: Sequence[Tensor | None] = torch.autograd.grad(
        tape.f, list(theta.values()), root, retain_graph=True, allow_unused=True
    )
    _check_finite(theta, expected)
    zero = tape.f.new_zeros(len(tape.f), 1)
    assembled = _gradients_by_format(tape.uses, tape.cotangents(root), len(tape.f))
    unsupported = {
        name: reason
        for (name, value), truth in zip(theta.items(), expected, strict=True)
        if (reason := _mismatch(value, truth, assembled.get(name, zero))) is not None
    }
    if unsupported:
        raise UnsupportedParameterError(unsupported)


def check_output_precision(f: Tensor) -> None:
    """Raise ValueError for outputs in float16, whose gradients overflow."""
    if f.dtype == torch.float16:
        raise ValueError(
            "The model outputs are float16, whose range is too small for the gradients of a "
            "curvature. Use bfloat16 or float32."
        )


def _check_outputs(model: nn.Module, two_samples: Input) -> bool:
    """Check random or coupled outputs; return False for NaN, which is reported with its batch."""
    with torch.no_grad():
        f, repeated = call(model, two_samples), call(model, two_samples)
        alone = call(model, map_tensors(two_samples, lambda part: part[:1]))
    if f.dim() < 2 or len(alone) != 1:
        raise ValueError(
            f"The model outputs must have the shape [n, k], or [n, k, *positions], got "
            f"{list(f.shape)}."
        )
    check_output_precision(f)
    tolerance = 1e4 * torch.finfo(f.dtype).eps * float(f.abs().max())
    if not bool(torch.isfinite(f).all()):
        return False
    if bool(((f - repeated).abs() > tolerance).any()):
        raise ValueError(
            "The model is not deterministic: its outputs for the same inputs change on a second "
            "call. Is there dropout or another random operation in training mode? Call "
            "model.eval()."
        )
    if bool(((f[:1] - alone).abs() > tolerance).any()):
        raise ValueError(
            "The model couples the samples of a batch: the output of a sample alone differs from "
            "its output in a batch. Is there a statistic over the batch?"
        )
    return True


@torch.no_grad()
def _jittered_copy(model: nn.Module) -> nn.Module:
    """Return a copy with all weights moved a little, none of them zero.

    The model itself may be in use elsewhere. One that cannot be copied (because it stores an
    activation, for example) is verified as it is.
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
    """Raise DivergenceError if a gradient overflows, since formats cannot be checked then."""
    for name, gradient in zip(theta, gradients, strict=True):
        if gradient is not None and not bool(torch.isfinite(gradient).all()):
            largest = max(float(value.detach().abs().max()) for value in theta.values())
            raise DivergenceError(
                f"The gradient of the outputs with respect to {name} is not finite, with weights "
                f"up to {largest:.1e}. The training has diverged: lower the learning rate."
            )


def _gradients_by_format(
    uses: Sequence[Use], cotangents: Sequence[Tensor | None], n: int
) -> dict[str, Tensor | None]:
    """Return per-sample gradients [n, p] of every weight; None if rows are not samples."""
    total: dict[str, Tensor | None] = {}
    for use, g in zip(uses, cotangents, strict=True):
        if g is None:
            continue
        gradients = use.gradients(g) if len(use.outputs(g)) == n else {}
        for name in use.layer.tensors:
            j, before = gradients.get(name), total.get(name, torch.zeros(()))
            if gradients and j is None:
                continue
            total[name] = None if j is None or before is None else before.to(j) + j.detach()
    return total


def _mismatch(value: Tensor, truth: Tensor | None, assembled: Tensor | None) -> str | None:
    """Return why the gradient of a weight is not explained, or None if it is."""
    if assembled is None:
        return (
            "the first dimension of its layer's input is not the sample, so that its curvature "
            "cannot be separated by sample; keep samples first, as in [n, s, features]"
        )
    expected = torch.zeros_like(value) if truth is None else truth
    error = assembled.expand(-1, value.numel()).clone()
    error[0] -= expected.reshape(-1)
    scale = max(float(expected.abs().max()), float(assembled.abs().max()))
    if float(error.abs().max()) <= 1e4 * torch.finfo(value.dtype).eps * scale:
        return None
    return (
        "the uses of its module do not explain its gradient; is it also used outside of its "
        "module, is its layer's first dimension not the sample, or is the registered format wrong?"
    )
