"""Check a model on two data before any curvature is believed.

The engine takes it on trust that a model treats data one by one and that its layers' formats
explain all uses of its weights. Here both are tested against autograd, so that a silent error
becomes an `UnsupportedParameterError` or a `ValueError`.
"""

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from symrazor.core.errors import DivergenceError, UnsupportedParameterError
from symrazor.core.hyper import weights
from symrazor.curvature.coverage import layers
from symrazor.curvature.statistics import weight_gradients
from symrazor.curvature.tape import Input, Use, call, each, record


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
    pair = each(x, lambda part: part[:2])
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


def refuse_coarse(f: Tensor) -> None:
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
        alone = call(model, each(pair, lambda part: part[:1]))
    if f.dim() != 2:
        raise ValueError(f"expected model outputs of shape [n, k], got {list(f.shape)}")
    refuse_coarse(f)
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
            inputs = use.seen.detach()
            j = weight_gradients([use], [inputs], [formed]).detach() if per_datum else None
            pieces[layer.weight] = j
        for name in layer.shaping.values():
            pieces[name] = use.shaped(name, g).detach() if per_datum else None
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
