r"""Networks without BatchNorm, which couples the data of a batch so that no evidence exists."""

import copy
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any, cast, get_args

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_weights

from symrazor.core.parameters import eval_mode
from symrazor.curvature.tape import Input, call, map_tensors

FoldsInto = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear
MOST_GROUPS, FEWEST_CHANNELS = 32, 4
_log = logging.getLogger("symrazor")


def replace_batchnorm(
    model: nn.Module, fold: bool = False, example_input: Input | None = None
) -> nn.Module:
    r"""A copy without BatchNorm: with GroupNorm in its place, or folded into the layers before it.

    GroupNorm is another function: train on. It gets the scale, shift and eps of the BatchNorm, and
    as many groups, up to 32, as divide the channels and leave at least 4 channels to each (one
    group if nothing does).

    Folding leaves the outputs of a trained network in eval mode as they are: with running mean m
    and variance v, scale $\gamma$ and shift $\beta$,

    $$ W \leftarrow \mathrm{diag}(s)\, W, \qquad b \leftarrow s\,(b - m) + \beta, \qquad
       s = \gamma / \sqrt{v + \epsilon} . $$

    It needs a forward pass that `torch.fx` can trace and, before each BatchNorm, a convolution or
    linear layer that feeds nothing else. A linear layer must act on [n, features]: on [n, l, c]
    BatchNorm scales positions l, which no weight of it can do, and only an example input tells the
    two apart. An nn.Identity is left in place of the BatchNorm.

    Args:
        model: any module; it stays as it is.
        fold: whether to fold.
        example_input: a batch as the model takes it, on which the outputs in eval mode before and
            after folding are compared; needed where a linear layer is before a BatchNorm.

    Raises:
        ValueError: the BatchNorm layers that cannot be folded, by name, and why; outputs that
            folding changed.
    """
    original, model = model, copy_of(model)
    norms = {name: m for name, m in model.named_modules() if isinstance(m, _BatchNorm)}
    new: dict[int, nn.Module] = {id(norm): _group_norm(norm) for norm in norms.values()}
    if fold and norms:
        _fold(model, norms, example_input is not None)
        new = {id(norm): nn.Identity().train(norm.training) for norm in norms.values()}
    done = "folded" if fold else "replaced by GroupNorm"
    _log.info("BatchNorm %s: %s", done, ", ".join(norms) or "none found")
    model = put(model, new)
    if fold and example_input is not None:
        _check_same(original, model, example_input)
    return model


@torch.no_grad()
def _check_same(before: nn.Module, after: nn.Module, x: Input) -> None:
    """Raise ValueError unless both models have the same outputs on x in eval mode."""
    with eval_mode(before), eval_mode(after):
        f, g = (call(model, map_tensors(x, torch.clone)) for model in (before, after))
    error = float((f - g).abs().max()) / (float(f.abs().max()) or 1.0)
    if not error <= torch.finfo(f.dtype).eps ** 0.5:
        raise ValueError(
            f"expected the outputs to stay, got a relative difference of {error:.1e}; does a "
            "linear layer before a BatchNorm act on [n, l, c]? use fold=False"
        )


def copy_of(model: nn.Module) -> nn.Module:
    """A deep copy, without the wrappers of torch.compile.

    Tensors that a forward pre-hook computes anew in every call, as `nn.utils.weight_norm` and
    `prune` do, are copied without their history, which deepcopy would refuse.

    Raises:
        ValueError: a model that cannot be copied, or that is scripted.
    """
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise ValueError(
            "expected modules written in Python, got torch.jit ones; pass the module they were "
            "made from"
        )
    computed = {
        id(value): value.detach().clone()
        for module in model.modules()
        for value in (vars(module).values() if module._forward_pre_hooks else ())
        if isinstance(value, Tensor) and not value.is_leaf
    }
    try:
        twin: nn.Module = copy.deepcopy(getattr(model, "_orig_mod", model), cast(Any, computed))
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"expected a model that copy.deepcopy can copy, got: {error}") from error
    return put(twin, {id(m): m._orig_mod for m in twin.modules() if hasattr(m, "_orig_mod")})


def put(model: nn.Module, new: Mapping[int, Any]) -> nn.Module:
    """Put new[id(module)] at every place where that module is registered; returns the root."""
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            parent._modules[key] = new.get(id(child), child)
    root: nn.Module = new.get(id(model), model)
    return root


def _group_norm(norm: _BatchNorm) -> nn.GroupNorm:
    """The norm of each datum alone, with the scale and shift of a BatchNorm."""
    c = norm.num_features
    most = max(1, min(MOST_GROUPS, c // FEWEST_CHANNELS))
    groups = max(g for g in range(1, most + 1) if c % g == 0)
    new = nn.GroupNorm(groups, c, eps=norm.eps, affine=norm.affine)
    new.weight, new.bias = norm.weight, norm.bias
    return new.train(norm.training)


@torch.no_grad()
def _fold(model: nn.Module, norms: Mapping[str, _BatchNorm], compared: bool) -> None:
    """Fold every BatchNorm into the layer before it, in place; the outputs may be `compared`."""
    moving = [name for name, m in norms.items() if m.training or m.running_mean is None]
    if moving:
        raise ValueError(
            f"expected running statistics in eval mode, got BatchNorm on those of the batch at "
            f"{moving}; call model.eval(), or use fold=False"
        )
    layers = _layers_before(model)
    tied = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    refused = [
        name
        for name in norms
        if name not in layers or any(tied[id(p)] > 1 for p in layers[name].parameters())
    ]
    if refused:
        raise ValueError(
            "expected before each BatchNorm a convolution or linear layer with weights of its own "
            f"that feeds nothing else, got none before {refused}; use fold=False"
        )
    linear = {name: m for name in norms if isinstance(m := layers[name], nn.Linear)}
    if linear and not compared:
        raise ValueError(
            "expected an example input, to see whether a linear layer acts on [n, features], got "
            f"none for BatchNorm at {list(linear)}; pass example_input=..., or use fold=False"
        )
    longer = [name for name, m in linear.items() if m.out_features != norms[name].num_features]
    if longer:
        raise ValueError(
            "expected a linear layer on [n, features] before each BatchNorm, got one on maps of "
            f"positions before {longer}; use fold=False"
        )
    for name, norm in norms.items():
        layer = layers[name]
        w, b = layer.weight, layer.bias
        mean, variance = cast(Tensor, norm.running_mean), cast(Tensor, norm.running_var)
        fused = fuse_conv_bn_weights(w, b, mean, variance, norm.eps, norm.weight, norm.bias)
        layer.weight, layer.bias = fused
        layer.bias.requires_grad_((w if b is None else b).requires_grad)


def _layers_before(model: nn.Module) -> dict[str, FoldsInto]:
    """Name of a module called once -> the plain layer, called once, that feeds it and only it."""
    try:
        nodes = fx.Tracer().trace(model).nodes
    except Exception as error:
        raise ValueError(
            "expected a forward pass that torch.fx can trace, to find the layer before each "
            f"BatchNorm, got {type(error).__name__}: {error}; use fold=False"
        ) from error
    modules = dict(model.named_modules())
    used = [str(n.target) for n in nodes if n.op == "call_module"]
    used += [str(n.target).rpartition(".")[0] for n in nodes if n.op == "get_attr"]
    uses = Counter(used)
    return {
        str(node.target): cast(FoldsInto, modules[str(source.target)])
        for node in nodes
        for source in node.all_input_nodes
        if node.op == source.op == "call_module"
        and len(source.users) == uses[str(source.target)] == uses[str(node.target)] == 1
        and type(modules[str(source.target)]) in get_args(FoldsInto)
        and "weight" in modules[str(source.target)]._parameters
    }
